"""Facts typed on the command line: keys and values that nobody knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diagnose.cli import app, invoke
from diagnose.triage.config import facts_of
from diagnose.triage.context import nearest, typed, vocabulary
from taxonomy.clues import all_clues
from taxonomy.facts import Scalar, holds

ROOT = Path(__file__).parent.parent.parent
SEEN = ["--observed", "rollout_corr/logprob_abs_diff=up:start"]


def answer(capsys: pytest.CaptureFixture[str], *context: str) -> Any:
    words = [word for fact in context for word in ("--context", fact)]
    assert invoke(["triage", *SEEN, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def ruled_out(data: Any) -> dict[str, str]:
    return {item["fault"]: item["reason"] for item in data["ruled_out"]}


def test_an_unknown_key_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--context", "foo=bar", "--context", "rollout.backned=vllm"]
    assert invoke(["triage", *SEEN, *words]) == 0
    err = capsys.readouterr().err
    assert "--context foo: nothing asks for this fact" in err and "docs/triage.md" in err
    assert "--context rollout.backned" in err and "did you mean rollout.backend" in err
    assert len(answer(capsys, "foo=bar")["warnings"]) == 1


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("rollout.backned", "rollout.backend"),
        ("temperature", "rollout.temperature"),
        ("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
        ("tensor_parallel", "trainer.tensor_parallel"),
        ("model_moe", "model.moe"),
    ],
)
def test_the_nearest_key(key: str, wanted: str) -> None:
    assert nearest(key, "1")[0] == wanted


def test_values_that_clues_and_facts_name_are_known() -> None:
    """Whatever a clue asks for can be typed, and is understood as what the clue means."""
    for clue in all_clues().values():
        for group in (clue.needs, clue.excludes, clue.favours, *(check.when for check in clue.checks)):
            for key, condition in group.items():
                for part in str(condition).split("|"):
                    value = part.replace("*", "") if "*" in part else part
                    facts, warnings = typed([f"{key}={value}"])
                    assert not warnings, warnings
                    if not part.startswith(("<", ">")):
                        assert holds(condition, facts[key]), (key, condition, facts)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("rollout.routing_replay=R3", True),
        ("rollout.routing_replay=R2", False),
        ("rollout.routing_replay=disabled", False),
        ("model.moe=1", True),
        ("model.moe=0", False),
        ("weights.equal=yes", True),
        ("trainer.packing=enabled", True),
        ("rollout.prefix_caching=none", False),
        ("rollout.turns=8", "multi"),
        ("rollout.turns=1", "single"),
        ("rollout.turns=true", "multi"),
        ("rollout.temperature=!=1", "!=1"),
        ("rollout.quantization=bfloat16", "none"),
        ("rollout.quantization=fp8_e4m3", "fp8_e4m3"),
        ("rollout.mode=fully-async", "fully_async"),
        ("trainer.dtype=float16", "fp16"),
        ("device=cuda", "gpu"),
        ("library.vllm=0.20", "0.20"),
        ("trainer.moe_capacity_factor=none", None),
    ],
)
def test_what_a_typed_value_means(text: str, wanted: Scalar) -> None:
    facts, warnings = typed([text])
    assert not warnings
    found = facts[text.partition("=")[0]]
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize("key", [*vocabulary()])
def test_an_unknown_value_rules_nothing_out(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts, warnings = typed([f"{key}=zzz?"])
    if vocabulary()[key].kind == "text":
        assert facts and not warnings
    else:
        assert not facts and key in warnings[0] and vocabulary()[key].allowed in warnings[0]
    assert ruled_out(answer(capsys, f"{key}=zzz?")) == ruled_out(answer(capsys))


def test_modes_and_counts_no_longer_rule_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert "replay_misaligned" not in ruled_out(answer(capsys, "rollout.routing_replay=R3"))
    assert "retokenization_drift" not in ruled_out(answer(capsys, "rollout.turns=8"))
    assert "retokenization_drift" in ruled_out(answer(capsys, "rollout.turns=1"))


def test_a_configuration_is_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("foo: bar\nrollout: {backned: vllm, turns: zzz}\n")
    assert "rollout.turns" in facts_of({"rollout.turns": "zzz"})
    assert invoke(["triage", *SEEN, "--config", str(file)]) == 0
    assert "warning" not in capsys.readouterr().err


def test_the_documentation_lists_every_fact_with_its_values() -> None:
    text = (ROOT / "docs" / "triage.md").read_text(encoding="utf-8")
    for key, known in vocabulary().items():
        if key.startswith("library."):
            continue
        rows = [line for line in text.splitlines() if line.startswith("| ") and f"`{key}`" in line]
        words = [f"`{word}`" for word in known.words]
        assert any(all(word in row for word in words) for row in rows), f"{key}: {known.allowed}"


def test_help_names_facts_that_exist() -> None:
    info = next(
        item for item in app.registered_commands if item.callback and item.callback.__name__ == "triage"
    )
    named = str(info.epilog).partition(":")[2].partition(" and more")[0].split(",")
    assert len(named) > 5 and {name.strip() for name in named} <= set(vocabulary())
