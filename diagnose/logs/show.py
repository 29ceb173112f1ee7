"""``diagnose logs``: what the importer understood, once or line by line as the log grows."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable

from diagnose.console import Terminal
from diagnose.logs.follow import POLL, Point, follow
from diagnose.logs.text import printable
from taxonomy.metrics import METRIC_BY_NAME

SHOWN = 10
"""Points of the log as it was that are printed before the new ones."""
_FIRST = (
    "critic/rewards/mean",
    "val-core/reward/mean",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "response_length/mean",
)


def show_following(path: str, terminal: Terminal, as_json: bool) -> None:
    """Print the last points of a log and then each new one, until interrupted.

    Args:
        path: The log.
        terminal: Where to print.
        as_json: One JSON object a point, as verl's file logger writes them, instead of text.
    """
    import time

    backlog: deque[str] = deque(maxlen=SHOWN)
    reading = True

    def idle() -> bool:
        nonlocal reading
        if reading:
            reading = False
            _print(backlog, terminal)
        time.sleep(POLL)
        return False

    try:
        for point in follow(path, idle):
            line = point_json(point) if as_json else point_text(point)
            if reading:
                backlog.append(line)
            else:
                terminal.data(line)
    except KeyboardInterrupt:  # the way to end it
        _print(backlog if reading else (), terminal)


def _print(lines: Iterable[str], terminal: Terminal) -> None:
    for line in lines:
        terminal.data(line)


def point_json(point: Point) -> str:
    """Return a point as a line of verl's file logger: non-finite numbers are null."""
    data = {name: value if math.isfinite(value) else None for name, value in point.data.items()}
    return json.dumps({"step": point.step, "data": data} | ({"run": point.run} if point.run else {}))


def point_text(point: Point) -> str:
    """Return a point as one line for people: the metrics that matter most first, others only where they rank."""
    ranking = [name for name in point.data if METRIC_BY_NAME[name].ranks]
    names = [name for name in _FIRST if name in point.data]
    names += [name for name in ranking if name not in names]
    cells = [f"{name} {point.data[name]:.4g}" for name in names or point.data]
    run = f"{printable(point.run, 40)} " if point.run else ""
    return f"{run}step {point.step}  " + "  ".join(cells)
