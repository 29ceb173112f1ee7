"""The proxy's manifest in words; whatever is in the file, it is shown or left out, never fatal."""

from __future__ import annotations

import json
import shutil
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from diagnose.cli import invoke
from diagnose.report.proxy import COLUMNS, checkpoint_facts, clusters, facts, proxy_view, size, spans
from proxy.build import build
from proxy.embedded import resolve
from proxy.specs import BuildSpec

MANIFEST = {
    "spec": {"checkpoint": "model", "strategy": "multi_view"},
    "experts": {"before": 4, "after": 2, "top_k": 1},
    "parameters": {"before": 1000, "after": 600},
    "calibration": {"source": "embedded", "tokens": 65536},
    "layers": {
        "1": {"kept": [0, 3], "owner": [0, 0, 3, 3], "routed_share_kept": 0.75, "half_split_jaccard": 1.0}
    },
    "warnings": ["[red]2 experts[/] are few"],
}


KEYS = st.sampled_from(
    [
        *MANIFEST,
        *COLUMNS.values(),
        "bytes",
        "before",
        "after",
        "top_k",
        "tokens",
        "kept",
        "owner",
        "uncut",
        "1",
    ]
)


def shown(manifest: dict[str, object]) -> str:
    out = StringIO()
    Console(file=out, width=80, color_system=None).print(proxy_view(manifest))
    return out.getvalue()


def test_sizes_kept_experts_and_clusters_are_told() -> None:
    text = shown(MANIFEST)
    for fact in (
        "2 of 4 experts a layer, 1 a token",
        "600 of 1,000 parameters (60 % of the original)",
        "Layer 1 keeps 0 3",
        "0 ← 1; 3 ← 2",
        "0.75",
    ):
        assert fact in text
    assert "[red]2 experts[/]" in text


def test_the_weights_of_the_views_are_told_and_how_they_were_found() -> None:
    alpha = [1 / 3, 0.0, 2 / 3]
    assert "Views: router 0.33, co-activation 0, context 0.67" in facts(MANIFEST | {"alpha": alpha})
    search = {"finalists": [{"alpha": [1, 0, 0]}, {"alpha": alpha, "agreement": 0.206}]}
    told = facts(MANIFEST | {"alpha": alpha, "calibration": {"alpha_search": search}})
    assert any("--alpha auto" in line and "21 % of the original's next tokens" in line for line in told)
    assert not any("Views" in line for line in facts(MANIFEST | {"alpha": None}))


def test_a_distance_that_was_not_measured_is_no_zero(tmp_path) -> None:
    built = build(BuildSpec("embedded:qwen3_moe", str(tmp_path / "p"), 12, "first_k"))
    assert {entry["loss_an_expert"] for entry in built["layers"].values()} == {None} and built[
        "alpha"
    ] is None
    row = next(line for line in shown(built).splitlines() if line.strip().startswith("0 "))
    assert row.split() == ["0", "–", "–", "–", "–"]


def test_inspect_notices_an_edited_proxy(tmp_path, capsys) -> None:
    build(BuildSpec("embedded:qwen3_moe", str(tmp_path / "p"), 12, "first_k"))
    assert invoke(["proxy", "inspect", str(tmp_path / "p")]) == 0
    assert "not the proxy" not in capsys.readouterr().err
    config = (tmp_path / "p/config.json").read_text()
    (tmp_path / "p/config.json").write_text(config.replace('"use_cache": true', '"use_cache": null'))
    assert invoke(["proxy", "inspect", str(tmp_path / "p")]) == 0
    assert "warning: this is not the proxy that was built: config.json" in capsys.readouterr().err


def test_the_largest_clusters_come_first() -> None:
    assert clusters({"kept": [5, 2], "owner": [5, 2, 2, 5, 5, 5]}) == ["5 ← 0 3 4", "2 ← 1"]


@pytest.mark.parametrize(
    "broken", [{}, {"layers": [1], "experts": "x", "parameters": {"before": 0}}, {"spec": 3}]
)
def test_a_manifest_of_another_shape_is_shown_as_far_as_it_goes(broken: dict[str, object]) -> None:
    shown(broken)
    assert isinstance(facts(broken), list)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200, deadline=2000)
@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_any_manifest_is_shown(change: dict[str, object]) -> None:
    shown(MANIFEST | change)
    shown(MANIFEST | {"layers": {"1": change}})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('"x"', "is not a JSON object"),
        ("[" * 100_000, "is not JSON"),
        (json.dumps(MANIFEST | {"bytes": {"before": 10**400, "after": 10**400}}), "This is a proxy."),
        (
            json.dumps(MANIFEST | {"layers": [1], "parameters": {"before": -1, "after": 1}}),
            "This is a proxy.",
        ),
    ],
)
def test_inspect_says_what_a_checkpoint_is_whatever_its_manifest(text, says, tmp_path, capsys) -> None:
    folder = shutil.copytree(resolve("embedded:qwen3_moe"), tmp_path / "model")
    (folder / "proxy_manifest.json").write_text(text)
    assert invoke(["proxy", "inspect", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "family      qwen3_moe" in out and says in out + err and "Traceback" not in err
    assert invoke(["proxy", "inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "qwen3_moe"


def test_a_folder_with_a_line_break_in_its_name_is_one_error(tmp_path, capsys) -> None:
    assert invoke(["proxy", "inspect", str(tmp_path / "a\nerror: b")]) != 0
    assert capsys.readouterr().err.count("error:") == 2  # one of them is the folder's


def test_a_checkpoint_is_told_in_lines_that_fit() -> None:
    plan = {
        "kept": 16,
        "groups": 8,
        "quota": 2,
        "parameters_before": 10,
        "parameters_after": 3,
        "mtp_tensors": 5,
    }
    data = {
        "family": "deepseek_v3",
        "experts": 256,
        "top_k": 8,
        "groups": 8,
        "moe_layers": list(range(3, 61)),
        "parameters": 684_489_845_504,
        "tensors": 91_991,
        "plan": plan | {"bytes_before": 688_586_727_753, "bytes_after": 79_000_000_000},
    }
    lines = checkpoint_facts(data)
    assert "experts     256 a layer in 8 groups, 8 of them for each token" in lines
    assert "MoE layers  58 (3 to 60)" in lines
    assert "cut to 16 experts a layer, 2 of each group: 3 parameters (30 %), 79.0 GB of 688.6 GB" in lines
    assert any(line.startswith("5 tensors of multi-token prediction are dropped") for line in lines)


def test_numbers_for_people() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0 to 2, 5, 7 to 8" and spans([]) == ""
    assert (size(1_400_000), size(61_100_000_000)) == ("1.4 MB", "61.1 GB")
