"""Put runs on one clock: updates since the fault became active, cut into equal blocks, one median a block.

Nothing is rescaled: block b of the original and block b of the proxy are the same updates since activation, and
what lies beyond the shorter of the two is not compared.

Legend of shape suffixes: ``_R`` runs, ``_M`` metrics, ``_N`` logged steps, ``_B`` blocks, ``_B1`` block edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from diagnose.curves import Array, Curves
from diagnose.score.settings import Settings
from taxonomy.metrics import METRIC_BY_NAME, METRICS, Metric


class Contrast(StrEnum):
    """What a block is measured against, on both sides alike."""

    TWIN = "twin"
    """Healthy runs over the same updates."""
    PAST = "past"
    """The run's own blocks before the fault, less what healthy proxy runs change over the same updates."""
    START = "start"
    """The run's own first block: no twin, no past. Enough to rank, not to judge."""


@dataclass(frozen=True)
class Clock:
    """Where the blocks of one system lie.

    Attributes:
        start: First step at which the fault is active.
        horizon: Steps compared from there on.
        blocks: Equal blocks that the horizon is cut into.
        baseline: Steps before `start` that serve as baseline (0 with a twin).
    """

    start: int
    horizon: int
    blocks: int
    baseline: int = 0

    @property
    def edges_B1(self) -> Array:
        """Edges: step s lies in block b when edges[b] < s <= edges[b + 1]."""
        return self.start - 1 + np.linspace(0.0, self.horizon, self.blocks + 1)


@dataclass(frozen=True)
class Frame:
    """What all panels of one comparison have in common.

    Attributes:
        metrics: Names, the order of the rows everywhere.
        contrast: What blocks are measured against.
        settings: Thresholds.
        epsilons: ε of a metric's transform where it isn't the metric's own: logs that round can't tell values
            below their last digit apart, and both systems must be treated alike.
    """

    metrics: tuple[str, ...]
    contrast: Contrast
    settings: Settings
    epsilons: Mapping[str, float] = field(default_factory=dict)

    @property
    def absolute_M(self) -> NDArray[np.bool_]:
        """Which metrics are compared in absolute units, above a floor that both systems share."""
        return np.array(
            [
                METRIC_BY_NAME[name].kind in self.settings.absolute_kinds
                or name in self.settings.absolute_metrics
                for name in self.metrics
            ],
            bool,
        )


@dataclass(frozen=True)
class Panel:
    """Block medians of several runs, in transformed units.

    Attributes:
        metrics: Names.
        x_RMB: Block medians; NaN where a run has no finite value in a block.
        event_RMB: 1 where a block holds non-finite values that are not cosmetic, else 0.
    """

    metrics: tuple[str, ...]
    x_RMB: Array
    event_RMB: Array


def nanmedian(x: Array, axis: int = -1) -> Array:
    """Return the median over the finite values of `axis`, NaN where there are none.

    Same as `numpy.nanmedian` for arrays without infinities, minus its warnings and its slow path.
    """
    sorted_x = np.moveaxis(np.sort(x, axis=axis), axis, -1)
    if sorted_x.shape[-1] == 0:
        return np.full(sorted_x.shape[:-1], np.nan)
    n = np.isfinite(sorted_x).sum(-1)[..., None]
    low = np.take_along_axis(sorted_x, np.maximum(n - 1, 0) // 2, -1)
    high = np.take_along_axis(sorted_x, np.minimum(n // 2, sorted_x.shape[-1] - 1), -1)
    return np.asarray(np.where(n > 0, (low + high) / 2, np.nan)[..., 0])


def nanmean(x: Array, axis: int = -1) -> Array:
    """Return the mean over the finite values of `axis`, NaN where there are none."""
    finite = np.isfinite(x)
    n = finite.sum(axis)
    total = np.where(finite, x, 0.0).sum(axis)
    return np.asarray(np.divide(total, n, out=np.full(np.shape(n), np.nan), where=n > 0))


def transform(metric: Metric, values: Array, epsilon: float | None = None) -> Array:
    """Return g(values): log10(max(x, 0) + ε), logit of x clipped to [ε, 1 − ε], or x.

    Args:
        metric: The metric, which names its transform.
        values: Raw values of any shape.
        epsilon: ε in place of the metric's own (for logs that round).
    """
    epsilon = metric.epsilon if epsilon is None else epsilon
    if metric.transform == "log10":
        return np.log10(np.maximum(values, 0.0) + epsilon)
    if metric.transform == "logit":
        p = np.clip(values, epsilon, 1 - epsilon)
        return np.log(p / (1 - p))
    return values


def ranking_metrics(*groups: Sequence[Curves]) -> tuple[str, ...]:
    """Return the ranking metrics that any run of any group has logged, in the registry's order."""
    seen = {name for runs in groups for run in runs for name in (*run.values, *run.nonfinite)}
    return tuple(metric.name for metric in METRICS if metric.ranks and metric.name in seen)


def resolutions(*groups: Sequence[Curves]) -> dict[str, float]:
    """Return, for metrics that any log rounds, the coarsest last digit (raw units)."""
    coarsest: dict[str, float] = {}
    for runs in groups:
        for run in runs:
            for name, digit in run.resolution.items():
                coarsest[name] = max(digit, coarsest.get(name, 0.0))
    return coarsest


def frame(
    metrics: tuple[str, ...], contrast: Contrast, digits: Mapping[str, float], settings: Settings
) -> Frame:
    """Return a frame whose log transforms can't see below the last digit of the coarsest log."""
    epsilons = {
        name: max(digit, METRIC_BY_NAME[name].epsilon)
        for name, digit in digits.items()
        if name in METRIC_BY_NAME and METRIC_BY_NAME[name].transform == "log10"
    }
    return Frame(metrics, contrast, settings, epsilons)


def first_update(runs: Sequence[Curves]) -> int:
    """Return the step at which the clock of a log starts when the fault is active from the first update.

    Step 1 for logs from the beginning, also where an evaluation was logged before it or only every tenth update
    is; the first step there is for a log that starts late (the tail of a run).
    """
    first = min(float(run.steps_N[0]) for run in runs)
    gaps = [float(np.median(np.diff(run.steps_N))) for run in runs if len(run.steps_N) > 1]
    return 1 if first <= 1.5 * max(gaps, default=1.0) else round(first)


def last_step(runs: Sequence[Curves]) -> int:
    """Return the last step that any of the runs reached."""
    return round(max((float(run.steps_N[-1]) for run in runs if len(run.steps_N)), default=0.0))


def points(runs: Sequence[Curves], low: int, high: int) -> int:
    """Return how many steps in [low, high] the densest of the runs has logged."""
    return max((int(((run.steps_N >= low) & (run.steps_N <= high)).sum()) for run in runs), default=0)


def block_count(n: int, settings: Settings, most: int | None = None) -> int:
    """Return B = min(most, ⌊n / points_a_block⌋), but at least what little n allows.

    Below `min_blocks` the answer is inconclusive anyhow; blocks of one or two points then still show which way
    things went.
    """
    most = settings.max_blocks if most is None else most
    return max(min(most, n // settings.points_a_block), min(settings.min_blocks, n // 2), 1)


def _is_cosmetic(run: Curves, name: str, settings: Settings) -> bool:
    """Whether non-finite values of a metric stand alone while loss and gradient norm stay finite."""
    if name in settings.core_metrics:
        return False
    logged = [core for core in settings.core_metrics if core in run.values or core in run.nonfinite]
    return bool(logged) and not any(run.nonfinite.get(core) for core in logged)


def events(run: Curves, settings: Settings) -> dict[str, tuple[int, ...]]:
    """Return the steps of non-finite values by metric, cosmetic ones left out."""
    return {
        name: steps
        for name, steps in run.nonfinite.items()
        if steps and not _is_cosmetic(run, name, settings)
    }


def matrix(run: Curves, frame: Frame) -> Array:
    """Return the transformed values of a run by metric, values_MN; NaN rows for metrics it lacks."""
    values_MN = np.full((len(frame.metrics), len(run.steps_N)), np.nan)
    for m, name in enumerate(frame.metrics):
        if name in run.values:
            raw_N = np.asarray(run.values[name], float)
            values_MN[m] = transform(METRIC_BY_NAME[name], raw_N, frame.epsilons.get(name))
    values_MN[~np.isfinite(values_MN)] = np.nan
    return values_MN


def stacks(runs: Sequence[Curves], frame: Frame) -> list[tuple[list[int], Array, Array]]:
    """Return (indices, steps_N, values_RMN) for each group of runs that were logged at the same steps."""
    groups: dict[bytes, list[int]] = {}
    for r, run in enumerate(runs):
        groups.setdefault(run.steps_N.tobytes(), []).append(r)
    return [
        (indices, runs[indices[0]].steps_N, np.stack([matrix(runs[r], frame) for r in indices]))
        for indices in groups.values()
    ]


def panel(runs: Sequence[Curves], clock: Clock, frame: Frame) -> Panel:
    """Cut runs into blocks and take medians.

    With `Contrast.PAST` the median over the baseline steps is taken off every block; with `Contrast.START` the
    first block is, except from metrics that are compared in absolute units. A run that ended before the middle of
    a block has no value there; a block with more non-finite than finite points has none either.
    """
    shape = (len(runs), len(frame.metrics), clock.blocks)
    x_RMB, event_RMB = np.full(shape, np.nan), np.zeros(shape)
    edges_B1 = clock.edges_B1
    middle_B = (edges_B1[1:] + edges_B1[:-1]) / 2
    for indices, steps_N, values_RMN in stacks(runs, frame):
        cuts_B1 = np.searchsorted(steps_N, edges_B1, side="right")
        last = steps_N[-1] if len(steps_N) else -np.inf
        for b in np.flatnonzero(last >= middle_B):
            x_RMB[indices, :, b] = nanmedian(values_RMN[:, :, cuts_B1[b] : cuts_B1[b + 1]])
        for r, values_MN in zip(indices, values_RMN, strict=True):
            for name, steps in events(runs[r], frame.settings).items():
                if name not in frame.metrics:
                    continue
                m = frame.metrics.index(name)
                block = np.searchsorted(edges_B1, np.asarray(steps, float), side="left") - 1
                count_B = np.bincount(block[(block >= 0) & (block < clock.blocks)], minlength=clock.blocks)
                finite_B = np.diff(np.append(0, np.isfinite(values_MN[m]).cumsum())[cuts_B1])
                event_RMB[r, m] = count_B > 0
                x_RMB[r, m, count_B > finite_B] = np.nan
        if frame.contrast is Contrast.PAST:
            before = (steps_N < clock.start) & (steps_N >= clock.start - clock.baseline)
            x_RMB[indices] -= nanmedian(values_RMN[:, :, before])[:, :, None]
    if frame.contrast is Contrast.START:
        x_RMB[:, ~frame.absolute_M] -= x_RMB[:, ~frame.absolute_M, :1]
    return Panel(frame.metrics, x_RMB, event_RMB)
