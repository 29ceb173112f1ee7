"""Twins: how a run differs from healthy runs of the same recipe, over the same steps.

Legend of shape suffixes: ``_B`` blocks, ``_KB`` healthy runs and blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from taxonomy.changes import DEFAULT, Margins, block_medians, block_noise, transformed
from taxonomy.levels import GAP_LIMITS, Array, Log, finite, median
from taxonomy.metrics import METRICS, Metric
from taxonomy.observations import QUANTITY, UNCLEAR, Observation


def against_twins(log: Log, healthy: Sequence[Log], margins: Margins = DEFAULT) -> list[Observation]:
    """Return how every ranking metric compares with healthy runs over the same steps.

    z_b = (x_b − mean of the healthy x_b) / (s·√(1 + 1/K)) by block. s is the larger of what seeds differ by (from three
    healthy runs on) and what neighbouring blocks of a run differ by, inflated. A metric moved where the median over
    the late half, or two neighbouring blocks on one side, lie beyond the margin.
    """
    last = min(float(run.steps_N[-1]) for run in (log, *healthy))
    first = max(float(run.steps_N[0]) for run in (log, *healthy))
    points = min(int(((run.steps_N >= first) & (run.steps_N <= last)).sum()) for run in (log, *healthy))
    blocks = min(8, points // 4)
    if blocks < 4:
        return []
    edges = np.linspace(first - 1, last, blocks + 1)
    found = []
    for metric in METRICS:
        if not metric.ranks or any(len(finite(run, metric.name)[0]) < blocks for run in (log, *healthy)):
            continue
        found.append(_compared(metric, log, healthy, edges, margins))
    return [item for item in found if item is not None]


def _compared(
    metric: Metric, log: Log, healthy: Sequence[Log], edges: Array, margins: Margins
) -> Observation | None:
    """Return what one metric does against healthy runs, None where it can't be told."""
    digit = max(run.resolution.get(metric.name, 0.0) for run in (log, *healthy))

    def row(run: Log) -> Array:
        steps, values = finite(run, metric.name)
        return block_medians(steps, transformed(metric, values, digit), edges)

    x_B, x_KB = row(log), np.array([row(run) for run in healthy])
    center_B = (
        x_KB.mean(0) if np.isfinite(x_KB).all() else np.array([median(c[np.isfinite(c)]) for c in x_KB.T])
    )
    e_B = x_B - center_B
    known = np.isfinite(e_B)
    if known.sum() < 3:
        return None
    within = math.sqrt(float(np.mean([block_noise(r) ** 2 for r in x_KB]))) * margins.twin_inflation
    between = float(np.sqrt(np.nanmean(np.nanvar(x_KB, axis=0, ddof=1)))) if len(healthy) > 2 else 0.0
    scale = max(within, between) * math.sqrt(1 + 1 / len(healthy))
    floor = max(metric.floor, digit)
    z_B = np.where(known, e_B, 0.0) / max(scale, floor / margins.twin, 1e-12)
    late_z = median(z_B[known][known.sum() // 2 :])
    pairs_B = np.where(
        z_B[:-1] * z_B[1:] > 0, np.minimum(np.abs(z_B[:-1]), np.abs(z_B[1:])) * np.sign(z_B[1:]), 0.0
    )
    pair = float(pairs_B[np.abs(pairs_B).argmax()])
    peak = late_z if abs(late_z) >= abs(pair) else pair
    raw_log, raw_healthy = (
        median(finite(run, metric.name)[1][len(finite(run, metric.name)[1]) // 2 :])
        for run in (log, healthy[0])
    )
    said = f"{raw_log:.3g} against {raw_healthy:.3g} in the healthy run"
    if abs(peak) <= margins.twin:
        still = abs(peak) < margins.twin_still
        within_noise = "no difference beyond the noise"
        short = f"a difference, too small to be sure of ({abs(peak):.1f} noise units)"
        return Observation(
            metric.name,
            "none",
            value=raw_log,
            healthy=raw_healthy,
            evidence=f"{said}: {within_noise if still else short}",
            alarm=False,
            rule="twin" if still else UNCLEAR,
            doubt=not still
            or not _as_healthy(x_B, x_KB, floor)
            or _stands_out(*(_points(metric, run, edges, digit) for run in (log, *healthy)), least=floor),
        )
    beyond_B = np.sign(peak) * z_B > max(margins.twin / 2, abs(peak) * 0.25)
    onset = next(
        (b for b in range(len(z_B) - 1) if beyond_B[b] and beyond_B[b + 1]), int(np.abs(z_B).argmax())
    )
    kind = _twin_onset(log, healthy, metric, z_B, onset)
    low = int(edges[max(onset - 1, 0)]) + 1
    high = int(edges[onset + 1])
    better = peak > 0 and metric.name in QUANTITY and QUANTITY[metric.name][0] in ("reward", "held_out")
    return Observation(
        metric.name,
        "up" if peak > 0 else "down",
        kind,
        interval=(low, high) if onset else (int(edges[0]) + 1, high),
        value=raw_log,
        healthy=raw_healthy,
        evidence=f"{said} ({abs(peak):.0f} noise units)",
        alarm=not better,
        rule="twin",
    )


def _as_healthy(x_B: Array, x_KB: Array, floor: float) -> bool:
    """Whether the level is what the healthy runs' is, in the early and in the late half.

    Stricter than "no symptom", for what rests on it: the half's median has to lie between those of the healthy runs, or
    as near to them as it can be told. That is one standard error of the median of n blocks, 1.25·s/√n, of a difference
    to K runs; s is what neighbouring blocks of a healthy run differ by, not inflated.

    Args:
        x_B: Block medians of the run, in the metric's own transform.
        x_KB: Those of the healthy runs.
        floor: Difference that means nothing, in the same units.
    """
    noise = math.sqrt(float(np.mean([block_noise(row_B) ** 2 for row_B in x_KB])))
    for half in np.array_split(np.arange(len(x_B)), 2):
        mine, theirs = x_B[half], x_KB[:, half]
        mine = mine[np.isfinite(mine)]
        levels = np.array([median(row[np.isfinite(row)]) for row in theirs])
        if not len(mine) or not np.isfinite(levels).all():
            return False
        error = 1.2533 * noise / math.sqrt(len(mine)) * math.sqrt(1 + 1 / len(x_KB))
        reach = max(error, floor)
        if not levels.min() - reach <= median(mine) <= levels.max() + reach:
            return False
    return True


def _points(metric: Metric, run: Log, edges: Array, digit: float) -> Array:
    """Return the single values of a run over the steps compared, in the metric's own transform."""
    steps, values = finite(run, metric.name)
    return transformed(metric, values[(steps > edges[0]) & (steps <= edges[-1])], digit)


def _stands_out(mine: Array, *theirs: Array, least: float) -> bool:
    """Whether single steps stand out, which no median shows: beyond the healthy runs' range by half of it."""
    low, high = min(float(x.min()) for x in theirs), max(float(x.max()) for x in theirs)
    reach = max((high - low) / 2, least)
    return bool(mine.min() < low - reach or mine.max() > high + reach)


def _twin_onset(log: Log, healthy: Sequence[Log], metric: Metric, z_B: Array, onset: int) -> str:
    """Return the class of an onset against healthy runs."""
    largest = float(np.abs(z_B).max())
    reached = float(np.abs(z_B[onset : onset + 2]).max()) >= 0.5 * largest
    if onset >= 2 and reached:
        return "sudden"
    if onset == 0 and reached:
        if metric.name in GAP_LIMITS:
            mine, theirs = (
                finite(log, metric.name)[1][:1],
                [finite(run, metric.name)[1][:1] for run in healthy],
            )
            if len(mine) and all(len(t) for t in theirs):
                usual = max(float(np.abs(t[0])) for t in theirs)
                return "start" if abs(float(mine[0])) > 3 * usual + metric.floor else "immediate"
        return "immediate"
    return "delayed" if onset >= len(z_B) / 2 else "gradual"
