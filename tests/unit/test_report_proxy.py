"""The proxy's manifest in words; whatever is in the file, it is shown or left out, never fatal."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from diagnose.report.proxy import clusters, facts, proxy_view

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


def shown(manifest: dict[str, object]) -> str:
    out = StringIO()
    Console(file=out, width=100, color_system=None).print(proxy_view(manifest))
    return out.getvalue()


def test_sizes_kept_experts_and_clusters_are_told() -> None:
    text = shown(MANIFEST)
    for fact in (
        "2 of 4 experts a layer, 1 a token",
        "600 of 1,000 parameters: 60 %",
        "0 3",
        "0 ← 1; 3 ← 2",
        "0.75",
    ):
        assert fact in text
    assert "[red]2 experts[/]" in text


def test_the_largest_clusters_come_first() -> None:
    assert clusters({"kept": [5, 2], "owner": [5, 2, 2, 5, 5, 5]}) == ["5 ← 0 3 4", "2 ← 1"]


@pytest.mark.parametrize(
    "broken", [{}, {"layers": [1], "experts": "x", "parameters": {"before": 0}}, {"spec": 3}]
)
def test_a_manifest_of_another_shape_is_shown_as_far_as_it_goes(broken: dict[str, object]) -> None:
    shown(broken)
    assert isinstance(facts(broken), list)
