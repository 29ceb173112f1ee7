"""A log that holds several runs: which of them is judged, and what each of them looks like in a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taxonomy.assessment import Triage

if TYPE_CHECKING:
    from diagnose.curves import Curves
    from diagnose.logs import Import

MOST = 50
"""Runs of one log that are looked at, the last ones."""


@dataclass(frozen=True)
class Glance:
    """One of several runs.

    Attributes:
        number: Its number in the log, counted from 1.
        name: Its name, or that of its file; "" where it has none.
        steps: Logged steps.
        verdict: As in `Triage`.
        onset: As in `Triage`.
        symptoms: Ids of its symptoms.
        judged: Whether the answer is about it.
    """

    number: int
    name: str
    steps: int
    verdict: str
    onset: tuple[int, int] | None
    symptoms: tuple[str, ...]
    judged: bool


def glances(found: Import, judge: Callable[[Curves], Triage]) -> tuple[Glance, ...]:
    """Return every run of a log at a glance, () where it holds only one.

    The answer is about the last run, the one that somebody is waiting for. The files of a folder have no order: there
    it is about the first that is faulty, else the first that shows anything.

    Args:
        found: The log.
        judge: Returns the answer about a run.
    """
    if len(found.runs) < 2:
        return ()
    first = max(0, len(found.runs) - MOST)
    answers = [judge(run.curves) for run in found.runs[first:]]
    chosen = len(answers) - 1
    if len({run.file for run in found.runs}) > 1:
        worst = [at for at, answer in enumerate(answers) if answer.verdict == "faulty"]
        worst += [at for at, answer in enumerate(answers) if answer.symptoms]
        chosen = next(iter(worst), chosen)
    return tuple(
        Glance(
            first + at + 1,
            "" if run.label == str(first + at + 1) else run.label or run.file,
            len(run.curves.steps_N),
            answer.verdict,
            answer.onset if answer.symptoms else None,
            tuple(item.id for item in answer.symptoms),
            at == chosen,
        )
        for at, (run, answer) in enumerate(zip(found.runs[first:], answers, strict=True))
    )
