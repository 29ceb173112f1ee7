"""Shapes of effects over time: onset, anomaly type, and how alike two effect curves run.

Legend of shape suffixes: ``_B`` blocks, ``_B1`` block edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from diagnose.curves import Array, Curves
from diagnose.result import AnomalyType
from diagnose.score.align import Clock, Frame, nanmedian, stacks
from diagnose.score.settings import Settings
from taxonomy.metrics import METRIC_BY_NAME

NEIGHBOURS = frozenset(
    {
        frozenset({AnomalyType.IMMEDIATE, AnomalyType.GRADUAL}),
        frozenset({AnomalyType.GRADUAL, AnomalyType.DELAYED}),
        frozenset({AnomalyType.TRANSIENT, AnomalyType.SPIKE}),
        frozenset({AnomalyType.COLLAPSE, AnomalyType.IMMEDIATE}),
        frozenset({AnomalyType.COLLAPSE, AnomalyType.GRADUAL}),
        frozenset({AnomalyType.COLLAPSE, AnomalyType.DELAYED}),
    }
)
"""Types that one fault can show at two strengths: a weaker effect crosses its margin later."""


def onset_block(z_B: Array, c: float) -> int | None:
    """Return the first block that leaves ±c together with the next one, on the same side; None without one."""
    for b in range(len(z_B) - 1):
        if abs(z_B[b]) > c and abs(z_B[b + 1]) > c and z_B[b] * z_B[b + 1] > 0:
            return b
    return None


def change_point(z_B: Array) -> int | None:
    """Return the block from which on a lasting step explains an effect curve best; None without two blocks.

    The least-squares change point of a curve that is 0 before its onset: the largest (Σ_{i ≥ b} z_i)² / (B − b).
    A weak effect shows it where no single block leaves a margin.
    """
    known = np.flatnonzero(np.isfinite(z_B))
    if len(known) < 2:
        return None
    sums = np.cumsum(z_B[known][::-1])[::-1]
    gain = (sums**2 / np.arange(len(known), 0, -1))[:-1]
    return int(known[gain.argmax()])


def effect_onset(z_B: Array, c: float) -> int | None:
    """Return the block in which the effect on a metric that moved first shows: the earlier of two.

    The first block beyond the margin together with the next tells when an effect that grows or passes began, the
    change point when a weak one did.
    """
    found = [block for block in (onset_block(z_B, c), change_point(z_B)) if block is not None]
    return min(found, default=None)


def inside(z_B: Array, c: float, settings: Settings) -> float:
    """Return the |z| within which a block of a metric that moved is back.

    The margin, or `passed_share` of the largest |z| that two neighbours reach together, if that is less: blocks
    of a weak lasting effect are within a margin made for detection without being back.
    """
    left, right = z_B[:-1], z_B[1:]
    together = np.where(left * right > 0, np.minimum(np.abs(left), np.abs(right)), 0.0)
    return min(c, settings.passed_share * float(together.max(initial=0.0)))


def jumps(e_B: Array, onset: int, settings: Settings) -> bool:
    """Whether the effect gains `sudden` of its largest size between the block before the onset and the one after.

    A ramp that crosses its margin late gains two blocks' worth only.
    """
    before = abs(e_B[onset - 1]) if onset > 0 else 0.0
    gained = np.nanmax(np.abs(e_B[onset : onset + 2])) - np.nan_to_num(before)
    return bool(gained >= settings.sudden * np.nanmax(np.abs(e_B)))


def onset_interval(block: int | None, clock: Clock) -> tuple[int, int] | None:
    """Return (low, high), the updates between which an effect set in that first shows in `block`.

    A step change shows in a block's median when it comes before the block's middle; noise and slow growth widen
    this to the block itself and the one before.
    """
    if block is None:
        return None
    edges_B1 = clock.edges_B1
    return int(np.floor(edges_B1[max(block - 1, 0)])) + 1, int(np.floor(edges_B1[block + 1]))


def anomaly_type(
    e_B: Array,
    z_B: Array,
    c: float,
    onset: int | None,
    *,
    event: bool,
    spike: bool,
    collapsed: bool,
    settings: Settings,
) -> AnomalyType:
    """Name the shape of one effect curve.

    In this order: non-finite · spike or none (did not move) · transient (the last two blocks are back inside) ·
    collapse · immediate (from the first block on, at `sudden` of its largest size at once) · delayed (quiet for
    `delayed_blocks`, then a jump) · gradual.

    Args:
        e_B: Effect in transformed units.
        z_B: Effect in noise units.
        c: Margin in noise units.
        onset: Block in which the effect first shows, None where the metric did not move.
        event: Whether it turned non-finite.
        spike: Whether single points stand out that no median shows.
        collapsed: Whether the late level is next to nothing.
        settings: Thresholds.
    """
    if event:
        return AnomalyType.NONFINITE
    if onset is None:
        return AnomalyType.SPIKE if spike else AnomalyType.NONE
    # Blocks without a value are left out, and the onset counts among the others.
    known = np.isfinite(z_B)
    onset = int(known[:onset].sum())
    z_B, e_B = z_B[known], e_B[known]
    if len(z_B) > onset + 3 and (np.abs(z_B[-2:]) <= inside(z_B, c, settings)).all():
        return AnomalyType.TRANSIENT
    if collapsed:
        return AnomalyType.COLLAPSE
    if onset == 0 and abs(e_B[0]) >= settings.sudden * float(np.abs(e_B).max()):
        return AnomalyType.IMMEDIATE
    if onset >= settings.delayed_blocks and jumps(e_B, onset, settings):
        return AnomalyType.DELAYED
    return AnomalyType.GRADUAL


def type_agreement(a: AnomalyType, b: AnomalyType) -> float:
    """Return 1 for the same type, 0.5 for neighbouring ones, else 0."""
    return 1.0 if a is b else 0.5 if frozenset({a, b}) in NEIGHBOURS else 0.0


def trend(a_B: Array, b_B: Array) -> float | None:
    """Return the uncentred cosine of two effect curves, best over a shift of −1, 0 or +1 block.

    Uncentred, because a step has a flat effect curve, of which centring would leave the noise. None where fewer
    than two blocks overlap or a curve is zero throughout.
    """
    best: float | None = None
    for shift in (0, 1, -1):
        left, right = (a_B, b_B) if shift == 0 else (a_B[1:], b_B[:-1]) if shift == 1 else (a_B[:-1], b_B[1:])
        both = np.isfinite(left) & np.isfinite(right)
        norm = float(np.linalg.norm(left[both]) * np.linalg.norm(right[both]))
        if both.sum() >= 2 and norm > 0:
            cosine = float(left[both] @ right[both]) / norm
            best = cosine if best is None else max(best, cosine)
    return best


def excursions(runs: Sequence[Curves], clock: Clock, frame: Frame) -> list[Array]:
    """Return |point − block median| of all points on the clock, values_MN for each run."""
    found: list[Array] = [np.empty((len(frame.metrics), 0))] * len(runs)
    for indices, steps_N, values_RMN in stacks(runs, frame):
        cuts_B1 = np.searchsorted(steps_N, clock.edges_B1, side="right")
        parts = [
            np.abs(part_RMN - nanmedian(part_RMN)[:, :, None])
            for part_RMN in (values_RMN[:, :, low:high] for low, high in pairwise(cuts_B1))
        ]
        for r, values_MN in zip(indices, np.concatenate(parts, 2), strict=True):
            found[r] = np.nan_to_num(values_MN)
    return found


def spike_limit(healthy: Sequence[Curves], clock: Clock, frame: Frame) -> Array:
    """Return by metric how far a single point may lie from its block's median before it is a spike.

    `spike` times the largest such distance in any healthy run (`spike_few` times with few runs), and at least the
    metric's floor; infinite without healthy runs.
    """
    settings = frame.settings
    rows = [values_MN.max(1, initial=0.0) for values_MN in excursions(healthy, clock, frame)]
    if not rows:
        return np.full(len(frame.metrics), np.inf)
    factor = settings.spike if len(rows) >= settings.own_seeds else settings.spike_few
    floor_M = np.array([METRIC_BY_NAME[name].floor for name in frame.metrics])
    return np.asarray(np.maximum(factor * np.max(rows, 0), floor_M))


def spikes(faulty: Sequence[Curves], clock: Clock, frame: Frame, limit_M: Array) -> NDArray[np.bool_]:
    """Return by metric whether every faulty run has a few points beyond its spike limit.

    At most a tenth of the points are spikes, or it is no spike but another kind of noise.

    Args:
        faulty: Faulty runs.
        clock: Their clock.
        frame: The comparison's frame.
        limit_M: `spike_limit` of healthy runs.
    """
    found_M = np.full(len(frame.metrics), bool(faulty))
    for values_MN in excursions(faulty, clock, frame):
        out_M = (values_MN > limit_M[:, None]).sum(1)
        found_M &= (out_M > 0) & (out_M <= max(values_MN.shape[1] // 10, 1))
    return found_M


def collapsed(
    faulty: Sequence[Curves],
    healthy: Sequence[Curves],
    name: str,
    clock: Clock,
    healthy_clock: Clock,
    settings: Settings,
) -> bool:
    """Whether the late level of a positive outcome has fallen to next to nothing of the healthy one (raw units)."""
    if name not in settings.collapsing_metrics:
        return False
    levels = []
    for runs, where in ((faulty, clock), (healthy, healthy_clock)):
        middle = float(where.edges_B1[where.blocks // 2])
        rows = [run.values[name][run.steps_N > middle] for run in runs if name in run.values]
        levels.append(float(nanmedian(np.concatenate(rows))) if rows else float("nan"))
    return levels[1] > 0 and 0 <= levels[0] <= settings.collapsed * levels[1]
