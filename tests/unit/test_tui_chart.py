"""The words beside the chart, and what is laid over what."""

from __future__ import annotations

import numpy as np

from diagnose.curves import Curves
from diagnose.report.evidence import Evidence
from diagnose.tui.chart import STROKES, LogFormatter, drawn_curves, overlay, summary
from tests.fixtures.results import HOSTILE, KL, REWARD, evidence


def flat(level: float, steps: int) -> Curves:
    return Curves("flat", np.arange(1.0, steps + 1), {"m": np.full(steps, level)})


def test_four_curves_differ_without_colour() -> None:
    assert len({(stroke.mark, stroke.solid) for stroke in STROKES.values()}) == 4


def test_only_curves_that_exist_are_laid_over() -> None:
    assert set(overlay(evidence(), "stale_weights", KL)) == set(STROKES)
    assert ("proxy", "faulty") not in overlay(evidence(), "other", KL)
    assert overlay(evidence(), None, "no such metric") == {}


def test_summary_says_which_side_of_the_healthy_band() -> None:
    words = summary(overlay(evidence(), "stale_weights", KL), "stale_weights", KL)
    assert words.count("▲ above") == 2 and "proxy with stale_weights" in words
    assert "▼ below" in summary(overlay(evidence(), "stale_weights", REWARD), "stale_weights", REWARD)
    assert summary({}, None, KL) == "KL to reference: no values yet."


def test_summary_compares_the_same_steps_of_a_run_under_way() -> None:
    rising = Curves("rising", np.arange(1.0, 61), {"m": np.arange(1.0, 61)})
    part = Curves("part", np.arange(1.0, 21), {"m": np.arange(1.0, 21)})
    words = summary(
        overlay(Evidence(proxy_healthy=(rising,), proxy_faulty={"f": (part,)}), "f", "m"), "f", "m"
    )
    assert "at step 20" in words and "= within the healthy range" in words


def test_summary_does_not_judge_a_few_steps() -> None:
    found = Evidence(proxy_healthy=(flat(1.0, 60),), proxy_faulty={"f": (flat(9.0, 5),)})
    assert "too early to compare" in summary(overlay(found, "f", "m"), "f", "m")


def test_summary_without_a_twin_and_with_hostile_names() -> None:
    found = Evidence(original_faulty=(flat(1.0, 60),), proxy_faulty={HOSTILE: (flat(2.0, 60),)})
    words = summary(overlay(found, HOSTILE, "m"), HOSTILE, "m")
    assert "no healthy twin" in words and "\x1b" not in words


def test_log_axis_shows_the_values() -> None:
    assert LogFormatter().get_labels_for_ticks([-3.0, 0.0, np.log10(0.25)]) == ["0.001", "1", "0.25"]


def test_a_new_step_is_a_new_picture() -> None:
    one, two = evidence(), evidence()
    assert [id(c) for c in drawn_curves(one, None)] == [id(c) for c in drawn_curves(one, None)]
    assert {id(c) for c in drawn_curves(one, None)}.isdisjoint(id(c) for c in drawn_curves(two, None))
