"""How fast replays went before, and how many a budget is enough for: to be said before a run, not after it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from diagnose.jobs import read_outcome
from diagnose.session import LEAST_REPLAYS, Session
from diagnose.store import RunFolder, list_runs, read_json

LOOKED_AT = 30
"""Run folders that are looked at, the newest."""


def step_pace_s(session: Session, folders: Iterable[RunFolder] | None = None) -> float | None:
    """Return the seconds that a step took in the newest run with the same engine and proxy; None without one.

    Of a step in the middle of a run: workers side by side take steps at the same time.

    Args:
        session: What is about to be run.
        folders: Run folders, newest first; None for those of the default place.
    """
    experts = session.build.experts if session.build else None
    for folder in list_runs()[:LOOKED_AT] if folders is None else folders:
        past = read_json(folder.session)
        if not isinstance(past, dict) or (past.get("engine"), past.get("checkpoint")) != (
            session.engine,
            session.checkpoint,
        ):
            continue
        if (past.get("build") or {}).get("experts") != experts:
            continue
        found = (read_outcome(home) for home in folder.runs.glob("*"))
        paces = [
            done.wall_s / done.steps for done in found if done and done.status == "completed" and done.steps
        ]
        if paces:
            return statistics.median(paces)
    return None


def candidates_in_time(
    budget_s: float, step_s: float, steps: int, workers: int, candidates: int, seeds: int, each: int
) -> int:
    """Return about how many candidates get their first replays within a budget, healthy replays taken off.

    Args:
        budget_s: Seconds that the replays may take, above 0.
        step_s: See `step_pace_s`.
        steps: Steps of a replay.
        workers: Replays at a time.
        candidates: Candidates in all.
        seeds: Healthy replays.
        each: Replays that every candidate gets.
    """
    replays = int(budget_s * workers / (step_s * steps))
    return min(candidates, max((replays - seeds) // each, min(workers, LEAST_REPLAYS)))


def shortage(
    budget_s: float, step_s: float | None, steps: int, workers: int, counts: tuple[int, int, int]
) -> str:
    """Return in a few words that a budget is too small for all candidates; "" where it is not, or there is none.

    Args:
        budget_s: Seconds that the replays may take, 0 for no limit.
        step_s: See `step_pace_s`; None where it is not known, which is said.
        steps: Steps of a replay.
        workers: Replays at a time.
        counts: Candidates, healthy replays, replays that every candidate gets.
    """
    candidates, seeds, each = counts
    if not budget_s or not candidates:
        return ""
    if step_s is None:
        return "perhaps not enough for all (never run here before)"
    enough = candidates_in_time(budget_s, step_s, steps, workers, candidates, seeds, each)
    return "" if enough >= candidates else f"enough for about {enough} of {candidates} candidates"
