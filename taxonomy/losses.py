"""Losses: what a run loses or lets grow over its whole length, where no healthy run does.

Legend of shape suffixes: ``_B`` blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from taxonomy.changes import DEFAULT, MIN_POINTS, Margins, block_medians, usual, wiggle
from taxonomy.levels import GAP_LIMITS, Array, Log, finite, median, rises
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.observations import Observation

KL_ALARM = 1.0
"""KL to the reference, in nats a token, that is out of hand where it buys no reward."""
KL_GROWTH = 30.0
ENTROPY_GROWTH = 0.5
"""Nats that an entropy must have gained, beside having doubled."""
ENTROPY_GONE = 0.02
VANISHED = 1e-3
"""Share of its early level under which a gradient norm has vanished."""


def change_point(steps: Array, values: Array) -> tuple[tuple[int, int], bool]:
    """Return where a series changes level, as (first step, last step), and whether it does so at once.

    The place is the least-squares split into two levels. "At once" means that the few points around it make up 40 % of
    the whole change; the interval is then one step wide, otherwise it begins with the series.
    """
    n = len(values)
    if n < 6:
        return (int(steps[0]), int(steps[-1])), False
    total, square = np.cumsum(values), np.cumsum(values**2)
    k = np.arange(2, n - 1)
    left = square[k - 1] - total[k - 1] ** 2 / k
    right = square[-1] - square[k - 1] - (total[-1] - total[k - 1]) ** 2 / (n - k)
    split = int(k[int((left + right).argmin())])
    width = max(3, n // 12)
    jump = median(values[split : split + width]) - median(values[max(split - width, 0) : split])
    start, end = _ends(values, 8, 8)
    at_once = split >= 3 and abs(jump) >= 0.4 * abs(end - start) and jump * (end - start) > 0
    return ((int(steps[split - 1]) + 1 if at_once else int(steps[0])), int(steps[split])), at_once


def losses(log: Log, margins: Margins = DEFAULT) -> Iterator[Observation]:
    """Yield what a run lost or lets grow over its whole length, where no healthy run does.

    The reward (and the held-out one) under where it started, or most of its gain gone; the gap between rollout and
    trainer severalfold; the gradient norm tenfold; a KL beyond 1 nat a token that buys no reward; an entropy that has
    more than doubled, or vanished, while the reward does not improve.
    """
    improves = rises(log)
    for name in ("critic/rewards/mean", "val-core/reward/mean"):
        steps, values = finite(log, name)
        if len(values) < (MIN_POINTS if name.startswith("critic") else 6):
            continue
        edges = np.linspace(steps[0] - 1, steps[-1], min(8, len(values) // 3) + 1)
        x_B = block_medians(steps, values, edges)
        noise = max(
            _curved_noise(x_B),
            1.25 * wiggle(values) / (len(values) / len(x_B)) ** 0.5,
            METRIC_BY_NAME[name].floor,
        )
        start, best, end = x_B[0], float(np.nanmax(x_B)), median(x_B[-2:])
        lost = (
            best - end > max(4 * noise, margins.fall * max(best - start, 0.0)) and x_B[-1] < best - 4 * noise
        )
        below = end < start - 4 * noise
        if below or (lost and end < start + 0.25 * (best - start)):
            fell = f"falls from {best:.3g} to {end:.3g}" + (
                f", below its start at {start:.3g}" if below else ""
            )
            yield _changed(log, name, "down", best, end, fell, "loss")
    yield from _growth(log, improves, margins)
    yield from _entropy(log, improves)


def _curved_noise(x_B: Array) -> float:
    """Return the standard deviation of a block median from second differences: a rise and a fall are no noise."""
    second = np.abs(np.diff(x_B[np.isfinite(x_B)], 2))
    return 1.4826 * median(second) / 6**0.5 if len(second) > 2 else 0.0


def _changed(
    log: Log, metric: str, direction: str, before: float, after: float, evidence: str, rule: str
) -> Observation:
    """Return an observation whose onset is where the metric changes level most, on its own scale."""
    steps, values = finite(log, metric)
    if metric == "actor/kl_loss":  # from 0 its first steps are steep in every run
        steps, values = steps[len(steps) // 8 :], values[len(values) // 8 :]
    ratio = metric in GAP_LIMITS or METRIC_BY_NAME[metric].transform == "log10"
    scale = np.log10(np.abs(values) + 1e-9) if ratio else values
    interval, at_once = change_point(steps, scale)
    late = interval[1] > (steps[0] + steps[-1]) / 2
    onset = "sudden" if at_once else "delayed" if late else "gradual"
    return Observation(metric, direction, onset, "", interval, after, before, evidence, rule=rule)


def _ends(values: Array, early: int, late: int) -> tuple[float, float]:
    """Return the medians of the first and of the last n-th part of a series, of three points at least."""
    return median(values[: max(len(values) // early, 3)]), median(values[-max(len(values) // late, 3) :])


def _growth(log: Log, improves: bool | None, margins: Margins) -> Iterator[Observation]:
    """Yield the gap, gradient norm and KL that grow as no healthy run's do."""
    for name, limit in GAP_LIMITS.items():
        _, values = finite(log, name)
        if len(values) < 8 or not limit.above or name == "rollout_corr/kl":  # k1 is signed noise around 0
            continue
        size = np.abs(values - limit.neutral)
        early, end = _ends(size, 8, 4)
        middle = median(size[len(size) // 4 : len(size) // 2])
        if end > margins.gap_growth * max(early, 1e-12) and end > 2 * usual(name) and end > 1.2 * middle:
            said = f"grows from {early:.3g} to {end:.3g} over the run"
            yield _changed(log, name, "up", early, end, said, "gap_growth")
    _, values = finite(log, "actor/grad_norm")
    if len(values) >= 8:
        early, end = _ends(values, 4, 8)
        enough = margins.grad_growth * (10 if improves else 1)
        if early > 0 and end > enough * early:
            said = f"grows from {early:.3g} to {end:.3g}"
            yield _changed(log, "actor/grad_norm", "up", early, end, said, "growth")
        elif early > 1e-4 and 0 < end < VANISHED * early and not improves:
            said = f"vanishes, from {early:.3g} to {end:.3g}"
            yield _changed(log, "actor/grad_norm", "down", early, end, said, "growth")
    _, values = finite(log, "actor/kl_loss")
    if len(values) >= 8:
        early, end = float(values[:3].min()), _ends(values, 8, 4)[1]
        if end > KL_ALARM and end > KL_GROWTH * max(early, 1e-3) and not improves:
            said = f"climbs from {early:.3g} to {end:.3g} nat and buys no reward"
            yield _changed(log, "actor/kl_loss", "up", early, end, said, "kl_runaway")


def _entropy(log: Log, improves: bool | None) -> Iterator[Observation]:
    """Yield an entropy that runs away or vanishes while the reward does not improve."""
    _, values = finite(log, "actor/entropy")
    if len(values) < 8 or improves or improves is None:
        return
    early, end = _ends(values, 4, 4)
    what = f"from {early:.3g} to {end:.3g} nat while the reward does not rise"
    if end > 2 * early and end > early + ENTROPY_GROWTH:
        yield _changed(log, "actor/entropy", "up", early, end, f"grows {what}", "entropy")
    elif end < ENTROPY_GONE and end < 0.05 * early:
        yield _changed(log, "actor/entropy", "down", early, end, f"vanishes, {what}", "entropy")
