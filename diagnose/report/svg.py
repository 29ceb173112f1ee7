"""One small line chart as inline SVG: no script, no external resource, colours by CSS class.

Legend of shape suffixes: ``_N`` points of one curve.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from diagnose.curves import Array
from diagnose.report.evidence import Line
from diagnose.report.text import literal, number

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 26, 34


@dataclass(frozen=True)
class Series:
    """One curve of a chart.

    Attributes:
        name: Legend text.
        style: CSS class: "healthy" (dashed, hollow marks) or "faulty" (solid, filled marks).
        line: The curve.
    """

    name: str
    style: str
    line: Line


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round tick values (1, 2 or 5 × 10^k apart) inside [low, high]; needs low < high, both finite."""
    assert low < high
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    spacing = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / spacing - 1e-9)
    last = math.floor(high / spacing + 1e-9)
    return [round(index * spacing, 12) + 0.0 for index in range(first, last + 1)]


def limits(values: Sequence[Array], pad: float = 0.05) -> tuple[float, float]:
    """Return padded limits of all finite values, (0, 1) where there are none; never an empty interval."""
    pool_N = (
        np.concatenate([np.asarray(v, dtype=np.float64).ravel() for v in values]) if values else np.empty(0)
    )
    pool_N = pool_N[np.isfinite(pool_N)]
    if not pool_N.size:
        return 0.0, 1.0
    low, high = float(pool_N.min()), float(pool_N.max())
    span = high - low
    if span <= 1e-9 * max(abs(low), abs(high)):
        span = max(abs(low), abs(high))
        span = span if span > 1e-200 else 1.0
    return low - pad * span, high + pad * span


def chart(
    series: Sequence[Series],
    *,
    title: str,
    y_label: str = "",
    x_limits: tuple[float, float] | None = None,
    onset: tuple[float, float] | None = None,
    log_epsilon: float | None = None,
    width: int = 420,
    height: int = 240,
) -> str:
    """Return an `<svg>` element.

    Args:
        series: Curves, drawn in this order.
        title: Drawn above the plot and read out by screen readers.
        y_label: Unit of the values.
        x_limits: First and last step, None for those of the curves.
        onset: Interval of steps to shade as the onset, None for none.
        log_epsilon: Added before a log10 axis is taken; None for a linear axis.
        width: Width in user units.
        height: Height in user units.
    """

    def scaled(values_N: Array) -> Array:
        return values_N if log_epsilon is None else np.log10(np.maximum(values_N, 0.0) + log_epsilon)

    x_low, x_high = x_limits or limits([s.line.x_N for s in series], pad=0.0)
    if x_low >= x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    y_low, y_high = limits([scaled(v) for s in series for v in (s.line.low_N, s.line.high_N)])
    plot_w, plot_h = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def at_x(value: float) -> float:
        return _LEFT + plot_w * (value - x_low) / (x_high - x_low)

    def at_y(value: float) -> float:
        return _TOP + plot_h * (1 - (value - y_low) / (y_high - y_low))

    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{_text(title)}">',
        f'<text class="title" x="{_LEFT}" y="15">{_text(title)}</text>',
    ]
    if onset is not None:
        left, right = (min(max(at_x(edge), _LEFT), _LEFT + plot_w) for edge in onset)
        band = max(right - left, 3.0)
        parts.append(
            f'<rect class="onset" x="{left:.1f}" y="{_TOP}" width="{band:.1f}" height="{plot_h}">'
            f"<title>onset, steps {number(onset[0])} to {number(onset[1])}</title></rect>"
        )
        parts.append(f'<text class="tick" x="{left + 3:.1f}" y="{_TOP + 11}">onset</text>')
    for value in ticks(y_low, y_high, 4):
        y = at_y(value)
        label = number(value) if log_epsilon is None else number(10**value, 2)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + plot_w}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value in ticks(x_low, x_high, 5):
        x = at_x(value)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - 18}" text-anchor="middle">{number(value, 6)}</text>'
        )
    parts.append(f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{plot_w}" height="{plot_h}"/>')
    label = (
        "step" + (f" · y: {y_label}" if y_label else "") + (", log scale" if log_epsilon is not None else "")
    )
    middle = _LEFT + plot_w / 2
    parts.append(
        f'<text class="tick" x="{middle}" y="{height - 4}" text-anchor="middle">{_text(label)}</text>'
    )
    for item in series:
        parts += _curve(item, scaled, at_x, at_y)
    return "".join(parts) + "</svg>"


def _curve(
    item: Series,
    scaled: Callable[[Array], Array],
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
) -> list[str]:
    line = item.line
    xs = [at_x(x) for x in line.x_N.tolist()]
    ys, lows, highs = ([at_y(v) for v in scaled(v_N).tolist()] for v_N in (line.y_N, line.low_N, line.high_N))
    parts = []
    if line.seeds > 1 or not np.array_equal(line.low_N, line.high_N):
        edge = _points(xs + xs[::-1], highs + lows[::-1])
        parts.append(f'<polygon class="band {item.style}" points="{edge}"/>')
    parts.append(f'<polyline class="line {item.style}" points="{_points(xs, ys)}"/>')
    every = max(1, len(xs) // 8)
    marks = "".join(
        f'<circle class="mark {item.style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        for x, y in list(zip(xs, ys, strict=True))[every // 2 :: every]
    )
    return [*parts, f"<g><title>{_text(item.name)}</title>{marks}</g>"]


def _points(xs: list[float], ys: list[float]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))


def _text(value: str) -> str:
    return html.escape(literal(value, 200), quote=True)
