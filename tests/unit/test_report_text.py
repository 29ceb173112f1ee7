"""Terminal and Markdown reports, and the words they share."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from diagnose.report import reports
from diagnose.report.evidence import Evidence
from diagnose.report.markdown import escape, to_markdown
from diagnose.report.terminal import render, result_view
from diagnose.report.text import literal, number, percent, seconds
from diagnose.report.words import (
    NOT_REACHED,
    against,
    agreement_word,
    fault_of_run,
    headline,
    metric_title,
    order_note,
    replay_of_run,
    what_to_do,
    why,
)
from diagnose.result import Direction, RemedyResult, Verdict
from tests.fixtures.results import hostile, kl_spike, metric, with_verdict

GOLDEN = Path(__file__).parent.parent / "golden" / "report"


def golden(name: str, text: str) -> None:
    """Compare with a committed file; `UPDATE_GOLDEN=1` writes it, for a human to read in the diff."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "verdict", [Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC, Verdict.NOT_REPRODUCED]
)
def test_terminal_golden_at_80_columns(verdict: Verdict) -> None:
    text = render(with_verdict(verdict), width=80)
    assert max(map(len, text.splitlines())) <= 80
    golden(f"terminal_{verdict.value}.txt", text)


def test_markdown_golden() -> None:
    golden("kl_spike.md", to_markdown(kl_spike()))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_terminal_never_wider_than_asked_and_without_escapes(width: int) -> None:
    text = render(hostile(), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text and "\x00" not in text
    assert "[red]x[/]" in render(hostile(), width=200)


def test_colours_only_where_the_console_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(**options: object) -> str:
        console = Console(width=80, record=False, file=__import__("io").StringIO(), **options)
        console.print(result_view(kl_spike()))
        return console.file.getvalue()

    assert "\x1b[" in printed(force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    no_color = printed(force_terminal=True, color_system="standard")
    assert "\x1b[32m" not in no_color and "38;" not in no_color
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b" not in printed()


def test_markdown_tables_stay_whole_under_hostile_strings() -> None:
    text = to_markdown(hostile())
    assert "<script" not in text and "://" not in text and "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    unescaped = {line.replace("\\|", "").count("|") for line in rows}
    assert unescaped == {9, 7}


@given(st.text())
def test_literal_is_one_printable_line_and_idempotent(text: str) -> None:
    once = literal(text)
    assert literal(once) == once
    assert "\n" not in once and "\x1b" not in once
    assert once == "" or once.isprintable()


@given(st.text(alphabet="abc XYZ019.,;äß漢"))
def test_literal_and_markdown_leave_plain_words_alone(text: str) -> None:
    assert literal(text) == text and escape(text) == text


def test_literal_cuts_what_is_too_long() -> None:
    assert literal("x" * 50, limit=10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (float("nan"), "n/a"),
        (float("inf"), "∞"),
        (-0.25, "−0.25"),
        (1e-7, "1e-07"),
        (60.0, "60"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_percent_and_seconds() -> None:
    assert (percent(-0.404), percent(None)) == ("−40 %", "n/a")
    assert (seconds(8.4), seconds(92.4), seconds(7500), seconds(float("nan"))) == (
        "8 s",
        "1 min 32 s",
        "2 h 5 min",
        "n/a",
    )


@pytest.mark.parametrize(
    ("original", "proxy", "word"),
    [
        ("up", "up", "agrees"),
        ("none", "none", "agrees"),
        ("up", "down", "opposite"),
        ("down", "none", "silent"),
        ("none", "up", "extra"),
        ("up", "undetermined", "unclear"),
        ("undetermined", "undetermined", "unclear"),
    ],
)
def test_agreement_word(original: str, proxy: str, word: str) -> None:
    assert agreement_word(metric(Direction(original), Direction(proxy), None)) == word


def test_headlines_name_the_right_faults() -> None:
    assert "no other candidate" in headline(kl_spike())
    several = headline(with_verdict(Verdict.REPRODUCED_NOT_SPECIFIC))
    assert "Stale weights" in several and "Rollout precision" in several
    assert "Stale weights" not in headline(with_verdict(Verdict.NOT_REPRODUCED))
    assert headline(replace(kl_spike(), status="interrupted")).startswith("The experiment was not completed")


def test_not_specific_without_a_rival_names_none() -> None:
    result = with_verdict(Verdict.REPRODUCED_NOT_SPECIFIC)
    first = replace(result.score.ranking[0], rivals=(), split_by="")
    result = replace(result, score=replace(result.score, ranking=(first, *result.score.ranking[1:])))
    assert headline(result).endswith("but is not shown to be the only fault that does.")
    assert what_to_do(result)[0].startswith("If it is Stale weights: Synchronise")


def test_every_verdict_has_a_headline_and_unanswered_ones_a_next_step() -> None:
    for verdict in Verdict:
        assert headline(with_verdict(verdict)).endswith(".")
        assert what_to_do(with_verdict(verdict)) or verdict == Verdict.NO_FAULT
    empty = with_verdict(Verdict.INCONCLUSIVE)
    empty = replace(empty, score=replace(empty.score, ranking=()))
    assert headline(empty) and what_to_do(empty) and render(empty)


def test_a_set_comes_with_its_splitting_metric_and_every_fix() -> None:
    steps = what_to_do(with_verdict(Verdict.REPRODUCED_NOT_SPECIFIC))
    assert "route agreement" in steps[0]
    assert any("Synchronise" in step for step in steps) and any("precision" in step for step in steps[1:])


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        ("healthy-s1", None),
        ("stale_weights-x1-s2", "stale_weights"),
        ("a-x-b-x0.5-s10", "a-x-b"),
        ("odd", None),
    ],
)
def test_fault_of_run(run: str, fault: str | None) -> None:
    assert fault_of_run(run) == fault


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("healthy-s1", None),
        ("a-x1-s1", "a"),
        ("a-x0.5-s1", "a ×0.5"),
        ("a-x2-s10", "a ×2"),
        ("a-x1e-05-s1", "a ×1e-05"),
    ],
)
def test_replays_at_another_strength_have_a_name_of_their_own(run: str, name: str | None) -> None:
    assert replay_of_run(run) == name


def test_registry_has_every_format() -> None:
    found = reports()
    assert set(found) >= {"json", "junit", "markdown", "text", "html"}
    for name, report in found.items():
        assert report.render(kl_spike(), Evidence()), name


def test_what_goes_the_other_way_is_told_with_the_reasons() -> None:
    result = kl_spike()
    assert against(result) == ()
    first, *others = result.score.ranking
    opposite = metric(Direction.UP, Direction.DOWN, -0.5)
    metrics = {**first.metrics, "actor/entropy": opposite}
    turned = replace(result, score=replace(result.score, ranking=(replace(first, metrics=metrics), *others)))
    (said,) = against(turned)
    assert said == (
        f"Against {first.title}: the other way went {metric_title('actor/entropy')} "
        "(up in the incident, down in the replay)."
    )
    assert said in why(turned) and "the other way went" in " ".join(render(turned).split())
    nothing = replace(turned, score=replace(turned.score, verdict=Verdict.NOT_REPRODUCED))
    assert against(nothing) == ()


def test_a_ranking_that_is_not_by_distance_says_why() -> None:
    result = kl_spike()
    assert order_note(result) == ""
    first, *others = result.score.ranking
    denied = replace(others[-1], fault="near_but_denied", distance=first.distance / 2)
    score = replace(result.score, ranking=(first, *others, denied))
    assert order_note(replace(result, score=score)).startswith("Last, however near: near_but_denied.")


def test_what_was_asked_for_comes_before_the_reasons() -> None:
    cured = RemedyResult("stale_weights", "slower", "A quarter of the rate", {}, 0.95, (), "vanishes")
    text = render(replace(kl_spike(), remedies=(cured,)))
    assert text.index("Would it help?") < text.index("A quarter of the rate") < text.index("Why")


def test_a_command_to_be_typed_is_never_cut() -> None:
    folder = "/a/" + "very_long_name_" * 12 + "end"
    late = replace(kl_spike(), run_dir=folder, not_tried={"late": f"{NOT_REACHED}: the budget was spent"})
    text = render(late, width=60)
    assert f"diagnose run --resume {folder} --budget 300" in "".join(
        line.strip(" •") + " " * (len(line) < 60) for line in text.splitlines()
    ).replace("  ", " ")
