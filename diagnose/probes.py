"""Probes (`--probe`): the cheapest experiment on the original that would split a set of faults.

A probe changes a few settings of the recipe for a few steps. What it would show is not declared: every fault of the
set is run on the proxy under the probe, and so is a healthy run; the metric that decides is the one on which the
faults go different ways there. Only the engineer can run the probe on the failing system; what comes out is the
sentence that says what to run and how to read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from diagnose.curves import Curves, median_between
from diagnose.jobs import read_outcome
from diagnose.logs import read
from diagnose.report.text import number
from diagnose.result import Direction, ProbeResult, Score
from diagnose.score.plan import Replay
from diagnose.score.score import gather, lay
from diagnose.score.settings import DEFAULT
from diagnose.score.specificity import apart
from diagnose.score.verdict import MOVED
from diagnose.session import PlannedFault, PlannedRun, Session, planned_run
from diagnose.store import RunFolder
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.registry import Library

STEPS = DEFAULT.min_blocks * DEFAULT.points_a_block
"""Steps of a probe: the fewest that the scoring can read."""
SEEDS = (1, 2, 3)
MOST_RIVALS = 3
"""Look-alikes of the first candidate that are probed, the nearest first."""


@dataclass(frozen=True)
class Probe:
    """One cheap experiment.

    Attributes:
        id: Its name.
        what: What to do, for humans.
        settings: Recipe fields that it sets.
    """

    id: str
    what: str
    settings: Mapping[str, Any] = field(default_factory=dict)


PROBES: tuple[Probe, ...] = (
    # Not quite 0, so that a multiple of the learning rate stays one.
    Probe("frozen", "Set the learning rate to 0", {"lr": 1e-12}),
    Probe(
        "old_from_trainer",
        "Recompute the old log-probabilities with the trainer",
        {"old_log_prob": "trainer"},
    ),
    Probe(
        "equal_shapes",
        "One update a step over the whole batch, old log-probabilities from the trainer (equal batch shapes)",
        {"mini_batches": 1, "epochs": 1, "old_log_prob": "trainer"},
    ),
    Probe("trainer_rollout", "Generate the rollouts with the trainer's own forward", {"exact": True}),
    Probe(
        "greedy_held_out",
        "Evaluate held-out prompts greedily every five steps",
        {"eval_greedy": True, "eval_every": 5},
    ),
)


def suspects(session: Session, score: Score, cards: Library) -> tuple[PlannedFault, ...]:
    """Return the first candidate and those that can't be told from it, as probes run them; empty without a set.

    Each at the strength that fits it best, active from the first step: a probe is too short to wait for an onset.
    """
    first = next(iter(score.ranking), None)
    if first is None or not first.rivals:
        return ()
    found = []
    for fault in (first.fault, *first.rivals[:MOST_RIVALS]):
        strength = next(item.severity for item in score.ranking if item.fault == fault)
        own = [item for item in session.candidates if item.fault == fault]
        planned = ([item for item in own if item.strength == strength] or own)[0].at(strength, cards[fault])
        found.append(replace(planned, spec=replace(planned.spec, from_step=1, until_step=0)))
    return tuple(found)


def plan(session: Session, folder: RunFolder, score: Score, cards: Library) -> list[PlannedRun]:
    """Return the runs that the probes of a set need, probe by probe."""
    faults = suspects(session, score, cards)
    if not faults:
        return []
    return [
        probe_run(session, folder.proxy, probe, fault, seed)
        for probe in PROBES
        for fault in (None, *faults)
        for seed in SEEDS
    ]


def probe_run(
    session: Session, proxy: Path, probe: Probe, planned: PlannedFault | None, seed: int
) -> PlannedRun:
    """Return one short run under a probe, healthy with `planned` None."""
    short = replace(session.recipe, **{"steps": STEPS, "eval_every": 0, **probe.settings})
    run = planned_run(replace(session, recipe=short), proxy, planned, seed)
    return replace(run, id=f"probe.{probe.id}.{run.id}")


def results(
    session: Session, folder: RunFolder, score: Score, logged: Sequence[str], cards: Library
) -> tuple[ProbeResult, ...]:
    """Return what the probes' finished runs predict, the most telling first.

    Args:
        session: The session.
        folder: Its folder.
        score: The verdict with the set to split.
        logged: Metrics that the original logs: a probe that needs another is of no use there.
        cards: Fault cards.
    """
    faults = suspects(session, score, cards)
    found = []
    for probe in PROBES if faults else ():
        runs: dict[str, list[Curves]] = {}
        for planned in (None, *faults):
            own = [probe_run(session, folder.proxy, probe, planned, seed).id for seed in SEEDS]
            done = [curves for run in own if (curves := finished(folder.extra / run)) is not None]
            runs[planned.fault if planned else ""] = done
        first = faults[0].fault
        for rival in faults[1:]:
            if runs[""] and runs[first] and runs[rival.fault]:
                pair = (first, rival.fault)
                found.append(compare(probe, pair, runs[first], runs[rival.fault], runs[""], logged, cards))
    return tuple(sorted(found, key=lambda item: (not item.metric, -item.apart)))


def finished(home: Path) -> Curves | None:
    """Return the curves of a completed run, None where there is none."""
    outcome = read_outcome(home)
    if outcome is None or outcome.status != "completed":
        return None
    return read(home / "metrics.jsonl").runs[-1].curves


def compare(
    probe: Probe,
    pair: tuple[str, str],
    first: Sequence[Curves],
    second: Sequence[Curves],
    healthy: Sequence[Curves],
    logged: Sequence[str],
    cards: Library,
) -> ProbeResult:
    """Return what a probe predicts for two faults, from their runs on the proxy.

    The decisive metric is one that goes another way under one fault than under the other, in the sense of the
    scoring (up, down, or not shown to move, against healthy runs under the probe), and among those the one on
    which their effects lie farthest apart. The scoring judges by blocks, in transformed units; whoever runs the probe
    reads levels: a metric whose late medians don't say the same decides nothing.
    """
    nothing = ProbeResult(
        probe.id,
        probe.what,
        dict(probe.settings),
        STEPS,
        pair,
        "",
        (Direction.UNDETERMINED, Direction.UNDETERMINED),
        (float("nan"),) * 3,
        0.0,
        "",
    )
    found = lay(gather(first, healthy, healthy, [Replay(pair[1], second)], cards), 1)
    if not found or 0 not in found[0].seen:
        return nothing
    a, b = found[0].case.original, found[0].seen[0]
    metrics = found[0].case.frame.metrics
    apart_M = apart(a.signature, b.signature)
    deciding = [
        m
        for m, name in enumerate(metrics)
        if name in logged
        and _way(a.reading.direction[m]) != _way(b.reading.direction[m])
        and apart_M[m] > DEFAULT.min_margin
    ]
    for m in sorted(deciding, key=lambda k: -float(apart_M[k])):
        name = metrics[m]
        directions = (a.reading.direction[m], b.reading.direction[m])
        late = partial(median_between, metric=name, low=STEPS // 2 + 1)
        values = (late(first), late(second), late(healthy))
        found_m = replace(nothing, metric=name, directions=directions, values=values, apart=float(apart_M[m]))
        if found_m.borne_out:
            titles = [cards[fault].title for fault in pair]
            return replace(found_m, advice=advice(probe, titles, name, directions, values))
    return nothing


def advice(
    probe: Probe,
    titles: Sequence[str],
    metric: str,
    directions: Sequence[Direction],
    values: Sequence[float],
) -> str:
    """Return the sentence that says what to run and how to read it."""
    verbs = [
        {
            Direction.UP: "goes up, above a healthy run's",
            Direction.DOWN: "goes down, below a healthy run's",
        }.get(way, "stays where a healthy run has it")
        for way in directions
    ]
    a, b, healthy = map(number, values)
    return (
        f"{probe.what}, everything else as it is, and run {STEPS} steps. If the {METRIC_BY_NAME[metric].title} "
        f"{verbs[0]} (proxy: {a}, healthy {healthy}): {titles[0]}; if it {verbs[1]} (proxy: {b}): {titles[1]}."
    )


def _way(direction: Direction) -> Direction:
    """Not moving and not shown to move look the same to who runs the probe."""
    return direction if direction in MOVED else Direction.NONE
