"""The gate before any fault is scored: the healthy proxy must itself follow the healthy original.

Legend of shape suffixes: ``_R`` runs, ``_B`` blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnose.curves import Array
from diagnose.score.align import Panel, nanmedian
from diagnose.score.effect import median_variance
from diagnose.score.noise import Scale
from diagnose.score.settings import Settings
from diagnose.score.shape import trend
from taxonomy.metrics import METRIC_BY_NAME


@dataclass(frozen=True)
class Gate:
    """Whether the healthy proxy follows the healthy original.

    Attributes:
        passed: False stops the judgement: what such a proxy does says nothing about the original.
        text: One sentence for the report.
    """

    passed: bool
    text: str


def _change(runs: Panel, scale: Scale, m: int) -> tuple[float, float, Array]:
    """Return the healthy runs' change from the first to the last third, its z, and the mean curve."""
    curve_B = nanmedian(runs.x_RMB[:, m], 0)
    third = max(len(curve_B) // 3, 1)
    first, last = nanmedian(curve_B[:third]), nanmedian(curve_B[-third:])
    count = np.asarray(int(np.isfinite(runs.x_RMB[:, m]).any(1).sum()))
    se = float(scale.late_M[m]) * float(np.sqrt(2 * median_variance(count)))
    change = float(last - first)
    return change, change / se if se > 0 else float("nan"), curve_B - curve_B[0]


def healthy_gate(
    metrics: tuple[str, ...],
    original: tuple[Panel, Scale] | None,
    proxy: tuple[Panel, Scale],
    settings: Settings,
) -> Gate:
    """Compare what training without a fault does to the reward in both systems, from the first update on.

    Passed when the proxy's reward moves the way the original's does; nothing is asked where the original's does
    not move. Without a healthy original, the proxy must at least learn: a proxy whose reward never rises cannot
    show a fault that stops the reward from rising.

    Args:
        metrics: Names.
        original: Healthy panel and noise scale of the original, None without a twin.
        proxy: The same for the proxy.
        settings: Thresholds.
    """
    name = settings.gate_metric
    title = METRIC_BY_NAME[name].title
    if name not in metrics:
        return Gate(
            True, f"Neither log has the {title}, so whether the healthy proxy learns was not checked."
        )
    m = metrics.index(name)
    blocks = proxy[0].x_RMB.shape[-1]
    if blocks < settings.min_blocks or not np.isfinite(proxy[0].x_RMB[:, m]).any():
        return Gate(True, f"The healthy proxy's {title} is too short or missing; learning was not checked.")
    change_P, z_P, curve_P = _change(*proxy, m)
    floor = METRIC_BY_NAME[name].floor
    rises_P = z_P > settings.gate_z and change_P > floor
    falls_P = z_P < -settings.gate_z and change_P < -floor
    said_P = f"{change_P:+.3g} in the proxy ({z_P:+.1f} σ)"
    if original is None:
        if rises_P:
            return Gate(True, f"No healthy original; the healthy proxy learns: {title} {said_P}.")
        return Gate(False, f"The healthy proxy does not learn: {title} {said_P}.")
    if not np.isfinite(original[0].x_RMB[:, m]).any():
        return Gate(True, f"The healthy original has no {title}; whether the proxy follows was not checked.")
    change_O, z_O, curve_O = _change(*original, m)
    said = f"healthy {title} changes by {change_O:+.3g} in the original ({z_O:+.1f} σ) and by {said_P}"
    cosine = trend(curve_O[1:], curve_P[1:])
    alike = "" if cosine is None else f", similarity of the curves {cosine:.2f}"
    if z_O > settings.gate_z and change_O > floor:
        if rises_P:
            return Gate(True, f"The healthy proxy follows the healthy original: {said}{alike}.")
        return Gate(False, f"The healthy proxy does not follow the healthy original: {said}.")
    if z_O < -settings.gate_z and change_O < -floor and rises_P:
        return Gate(False, f"The healthy proxy does not follow the healthy original: {said}.")
    if falls_P and change_O > floor:
        return Gate(False, f"The healthy proxy does not follow the healthy original: {said}.")
    return Gate(True, f"The healthy original hardly changes, so nothing is asked of the proxy: {said}.")
