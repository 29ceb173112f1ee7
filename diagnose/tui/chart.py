"""The overlay chart: original and proxy, healthy and faulty, in one plot, and the same in words beside it.

The four curves differ by sign and by line, so colour is only a help: circles are the original, squares the
proxy; healthy is hollow on a dotted line, faulty filled on a solid one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static
from textual_plot import HiResMode, NumericAxisFormatter, PlotWidget

from diagnose.curves import Array, Curves
from diagnose.report.evidence import Evidence, Line, line
from diagnose.report.svg import limits, ticks
from diagnose.report.text import literal, number
from diagnose.report.words import metric_title, onset_word
from taxonomy.metrics import METRIC_BY_NAME

POINTS = 160
"""Points of a drawn curve: the dots of a wide terminal, so that long logs cost no more than short ones."""
LATE = 0.25
"""Share of the steps that counts as the end of a curve in the words beside the chart."""
EARLY = 8
"""Points under which a curve is not compared in words."""


@dataclass(frozen=True)
class Stroke:
    """How one of the four curves is drawn.

    Attributes:
        name: Legend text.
        mark: Sign on the curve.
        solid: Solid line, else dotted.
        color: Name of a terminal colour.
    """

    name: str
    mark: str
    solid: bool
    color: str


STROKES = {
    ("original", "healthy"): Stroke("original healthy", "○", False, "bright_blue"),
    ("original", "faulty"): Stroke("original faulty", "●", True, "bright_red"),
    ("proxy", "healthy"): Stroke("proxy healthy", "□", False, "cyan"),
    ("proxy", "faulty"): Stroke("proxy faulty", "■", True, "yellow"),
}
Overlay = dict[tuple[str, str], Line]


def drawn_curves(evidence: Evidence, fault: str | None) -> tuple[Curves, ...]:
    """Return the runs that a chart of a fault rests on; a new run or a new step makes a new object."""
    faulty = evidence.proxy_faulty.get(fault, ()) if fault else ()
    return (*evidence.original_healthy, *evidence.original_faulty, *evidence.proxy_healthy, *faulty)


def overlay(evidence: Evidence, fault: str | None, metric: str) -> Overlay:
    """Return the curves of one metric that exist, by (system, condition).

    Args:
        evidence: All curves.
        fault: Whose replay to lay over the incident; None for healthy replays alone.
        metric: Canonical metric.
    """
    sources = {
        ("original", "healthy"): evidence.original_healthy,
        ("original", "faulty"): evidence.original_faulty,
        ("proxy", "healthy"): evidence.proxy_healthy,
        ("proxy", "faulty"): evidence.proxy_faulty.get(fault, ()) if fault else (),
    }
    drawn = {key: line(curves, metric, POINTS) for key, curves in sources.items()}
    return {key: curve for key, curve in drawn.items() if curve is not None}


def summary(curves: Overlay, fault: str | None, metric: str) -> str:
    """Return in words what the chart shows so far; levels only, since judging is the scorer's business."""
    parts = []
    for system in ("original", "proxy"):
        healthy, faulty = curves.get((system, "healthy")), curves.get((system, "faulty"))
        name = system if system == "original" or not fault else f"proxy with {literal(fault, 40)}"
        if faulty is not None:
            parts.append(f"{name} {_against(faulty, healthy)}")
        elif healthy is not None:
            level = _median(healthy, healthy.x_N[-1])
            parts.append(f"{system} healthy {number(level)} at step {healthy.x_N[-1]:g}, no faulty curve yet")
    return f"{metric_title(metric)}: " + ("; ".join(parts) if parts else "no values yet") + "."


def _against(faulty: Line, healthy: Line | None) -> str:
    """Return where a faulty curve stands at its end, against the healthy ones over the same steps."""
    last = float(faulty.x_N[-1])
    words = f"{number(_median(faulty, last))} at step {last:g}"
    if healthy is None:
        return f"{words}, no healthy twin"
    window = (healthy.x_N <= last) & (healthy.x_N > last * (1 - LATE))
    if len(faulty.x_N) < EARLY or not window.any():
        return f"{words}, too early to compare"
    level, low, high = _median(faulty, last), healthy.low_N[window].min(), healthy.high_N[window].max()
    # Where it stands, not which way it "goes": that is for the scorer to say, over all seeds and blocks.
    where = "▲ above" if level > high else "▼ below" if level < low else "= within"
    return f"{words} against {number(_median(healthy, last))} healthy ({where} the healthy range)"


def _median(curve: Line, last: float) -> float:
    """Return the median over the last quarter of the steps up to `last`."""
    window = (curve.x_N <= last) & (curve.x_N > last * (1 - LATE))
    return float(np.median(curve.y_N[window])) if window.any() else float("nan")


class LogFormatter(NumericAxisFormatter):
    """Labels of an axis whose values are logarithms to base 10."""

    def get_labels_for_ticks(self, ticks: Sequence[float]) -> list[str]:
        """Return the values themselves, not their logarithms."""
        return [number(10**tick, 2) for tick in ticks]


class OverlayChart(Vertical):
    """Title, legend, plot and words for one metric of one candidate."""

    def compose(self) -> ComposeResult:
        """Lay out the parts."""
        yield Static(id="chart-legend", markup=False)
        yield Plot(id="plot-area", allow_pan_and_zoom=False)
        yield Static(id="chart-words", markup=False)

    def show(
        self, evidence: Evidence, fault: str | None, metric: str, onset: tuple[int, int] | None = None
    ) -> None:
        """Draw one metric.

        Args:
            evidence: All curves.
            fault: Candidate whose replays are drawn.
            metric: Canonical metric.
            onset: Onset interval of the original, drawn as one or two vertical lines, None for none.
        """
        curves = overlay(evidence, fault, metric)
        card = METRIC_BY_NAME.get(metric)
        log = card.epsilon if card is not None and card.transform == "log10" else None
        unit = f" ({card.unit})" if card is not None and card.unit else ""
        scale = ", log scale" if log is not None else ""
        legend = Text(f"{metric_title(metric)}{unit}{scale}  ", "bold")
        for key in curves:
            stroke = STROKES[key]
            legend.append(f" {stroke.mark} {stroke.name} ", f"not bold {stroke.color}")
        if onset is not None:
            legend.append(f" │ onset {onset_word(onset)}", "not bold")
        self.query_one("#chart-legend", Static).update(legend)
        self.query_one("#chart-words", Static).update(summary(curves, fault, metric))
        self.query_one(Plot).draw(curves, log, onset)


class Plot(PlotWidget, can_focus=False):
    """The plot itself; never focused, so that its keys don't hide those of the screen."""

    def on_mount(self) -> None:
        """Make room: the words are outside."""
        super().on_mount()
        self.margin_top, self.margin_bottom, self.margin_left = 0, 1, 9

    def draw(self, curves: Overlay, log: float | None, onset: tuple[int, int] | None) -> None:
        """Replace what is drawn.

        Args:
            curves: Curves by (system, condition).
            log: Added before taking log10, None for a linear axis.
            onset: Interval of steps to mark.
        """

        def scaled(values_N: Array) -> Array:
            return values_N if log is None else np.log10(np.maximum(values_N, 0.0) + log)

        self.clear()
        if not curves:
            self.set_xticks([])
            self.set_yticks([])
            return
        x_low, x_high = limits([curve.x_N for curve in curves.values()], pad=0.0)
        if x_low == x_high:
            x_low, x_high = x_low - 1, x_high + 1
        y_low, y_high = limits([scaled(curve.y_N) for curve in curves.values()])
        self.set_xlimits(x_low, x_high)
        self.set_ylimits(y_low, y_high)
        self.set_xticks(ticks(x_low, x_high, 5))
        self.set_yticks(ticks(y_low, y_high, 4))
        self.set_y_formatter(NumericAxisFormatter() if log is None else LogFormatter())
        for key, curve in curves.items():
            stroke, y_N = STROKES[key], scaled(curve.y_N)
            if stroke.solid:
                self.plot(curve.x_N, y_N, stroke.color, HiResMode.BRAILLE)
            else:
                self.scatter(curve.x_N, y_N, marker_style=stroke.color, hires_mode=HiResMode.BRAILLE)
        for index, (key, curve) in enumerate(curves.items()):
            # Marks are staggered, so that curves that lie on each other still show all four.
            every = max(1, len(curve.x_N) // 7)
            here = slice(min(index * every // 4, len(curve.x_N) - 1), None, every)
            stroke = STROKES[key]
            self.scatter(curve.x_N[here], scaled(curve.y_N)[here], stroke.mark, stroke.color)
        for edge in dict.fromkeys(onset or ()):
            if x_low < edge < x_high:
                self.add_v_line(edge, "dim")
