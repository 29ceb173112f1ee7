"""The parts of the study that rest on simulated curves, whose truth is known exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from diagnose.score.error_study import SEEDS, HealthyErrors, healthy_errors
from diagnose.score.pair_study import PairRow, Truth, pair_errors
from diagnose.score.power_study import WORLDS, Power, planted
from diagnose.selftest.report import Section, figures, number
from diagnose.selftest.stats import share
from diagnose.selftest.summary import Figure, at_least, at_most

if TYPE_CHECKING:
    from bench.study.incidents import Study

PHIS = (0.5, 0.8, 0.95)
UPDATES = (40, 60, 100, 300)
KNOWN = 20
"""Healthy seeds at which the bars are set."""
REPEATS = 100
KINDS: Mapping[Truth, str] = {
    "pair": "two faults of the library",
    "single": "one fault",
    "twin": "one fault, its near twin replayed as well",
    "unknown": "one fault that is not in the library",
}


def sections(study: Study) -> list[Section]:
    """Return the error rates on healthy logs, and how often planted effects are found, with their onsets."""
    repeats, updates = (4, UPDATES[:1]) if study.quick else (REPEATS, UPDATES)
    worlds = WORLDS[:1] if study.quick else WORLDS
    cells: list[Callable[[], HealthyErrors]] = [
        partial(healthy_errors, SEEDS[k], (phi,), n, repeats)
        for k in sorted(SEEDS, reverse=True)
        if k > 1
        for phi in PHIS
        for n in updates
    ]
    plants: list[Callable[[], tuple[Power, ...]]] = [
        partial(planted, phi, n, runs=(1, 2, 4), repeats=repeats) for phi, n in worlds
    ]
    with ProcessPoolExecutor(study.workers) as pool:
        healthy_jobs = [pool.submit(cell) for cell in cells]
        planted_jobs = [pool.submit(plant) for plant in plants]
        pair_jobs = [pool.submit(pair_errors, kind, repeats) for kind in KINDS]
        healthy = [job.result() for job in healthy_jobs]
        power = [row for job in planted_jobs for row in job.result()]
        pairs = [job.result() for job in pair_jobs]
    return [*_healthy(healthy), *_planted(power), _pairs(pairs)]


def _healthy(rows: Sequence[HealthyErrors]) -> list[Section]:
    known = [row for row in rows if row.seeds == KNOWN]

    def worst(count: Callable[[HealthyErrors], int], name: str, limit: float) -> Figure:
        row = max(known, key=lambda item: count(item) / item.repeats)
        where = f"{name}, worst of {len(known)} worlds (φ {row.phi[0]:g}, {row.updates} updates)"
        return at_most(where, share(count(row), row.repeats), limit)

    def pooled(count: Callable[[HealthyErrors], int], name: str, limit: float) -> Figure:
        return at_most(name, share(sum(map(count, known)), sum(item.repeats for item in known)), limit)

    bars = [
        pooled(lambda row: row.reproduced, "any answer “reproduced”", 0.05),
        worst(lambda row: row.reproduced, "any answer “reproduced”", 0.05),
        pooled(lambda row: row.direction, "any of 20 metrics given a direction", 0.1),
        worst(lambda row: row.direction, "any of 20 metrics given a direction", 0.1),
        pooled(lambda row: row.faulty, "called faulty", 0.02),
    ]
    table = tuple(
        (
            str(row.seeds),
            row.source,
            f"{row.phi[0]:g}",
            str(row.updates),
            *(
                f"{count / row.repeats:.2f}"
                for count in (row.faulty, row.open, row.reproduced, row.direction)
            ),
        )
        for row in rows
    )
    text = (
        f"Healthy logs of 20 independent metrics with AR(1) noise, {KNOWN} healthy seeds on both sides, "
        f"{known[0].repeats} repeats a world with new seeds for everything; two unrelated faults as candidates."
    )
    header = ("K", "noise from", "φ", "updates", "called faulty", "left open", "reproduced", "any direction")
    few = "The same by the number K of healthy seeds; with few of them the evidence is weak and says so."
    return [
        figures(f"Simulated healthy logs, K = {KNOWN}", bars, text),
        Section("Simulated healthy logs by K", (few,), header, table),
    ]


def _planted(rows: Sequence[Power]) -> list[Section]:
    bars = []
    for runs in sorted({row.runs for row in rows}):
        own = [row for row in rows if row.runs == runs]
        tried, found = sum(row.repeats for row in own), sum(row.found for row in own)
        word = f"{runs} faulty run{'s' if runs > 1 else ''}"
        bars += [
            at_least(f"found, {word}", share(found, tried), 0.9),
            at_least(f"onset within two blocks, {word}", share(sum(row.onset for row in own), found), 0.9),
        ]
    table = tuple(
        (
            f"{row.phi:g}",
            str(row.updates),
            number(row.effective, 1),
            str(row.runs),
            f"{row.found / row.repeats:.2f}",
            f"{row.faulty / row.repeats:.2f}",
            f"{row.onset / row.found:.2f}" if row.found else "–",
        )
        for row in rows
    )
    text = (
        f"One of 20 metrics shifted by {rows[0].size:g} standard deviations between seeds of its late-half median, "
        f"K = {rows[0].seeds}, in worlds where (1 − φ)n/(1 + φ) ≥ 5; found: given its direction."
    )
    header = ("φ", "updates", "(1 − φ)n/(1 + φ)", "faulty runs", "found", "log called faulty", "onset right")
    return [figures("Planted effects", bars, text), Section("Planted effects by world", (), header, table)]


def _pairs(rows: Sequence[PairRow]) -> Section:
    table = tuple(
        (
            KINDS[row.truth],  # type: ignore[index]
            str(row.repeats),
            *(
                f"{count / row.repeats:.2f}"
                for count in (row.pair, row.exact, row.specific, row.right, row.first)
            ),
        )
        for row in rows
    )
    text = (
        "Simulated incidents against eight faults, whose amplitudes in the proxy are off by 0.7 · e^{±0.4}, metric by "
        "metric."
    )
    header = (
        "incident",
        "n",
        "a pair is named",
        "the true pair",
        "one specific fault",
        "the true one",
        "truth first",
    )
    return Section("Two faults at once, simulated", (text,), header, table)
