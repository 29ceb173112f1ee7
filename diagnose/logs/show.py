"""``diagnose logs``: what the importer understood, once or line by line as the log grows."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from diagnose.console import Terminal
from diagnose.logs.follow import POLL, Point, follow
from diagnose.logs.importer import read
from diagnose.logs.summary import as_json, as_rich
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


def command(
    path: str, log_format: str | None, following: bool, anonymize: bool, json_only: bool, terminal: Terminal
) -> None:
    """Print what the importer understood of a log.

    Args:
        path: The log, a folder or "-".
        log_format: Name of a reader, None to find it.
        following: Whether to go on with new points as they come.
        anonymize: Whether what is printed says nothing about where it comes from.
        json_only: JSON instead of text.
        terminal: Where to print.
    """
    if following:
        _follow(path, log_format, _anonymous(terminal, path, ()) if anonymize else terminal, json_only)
        return
    found = read(path, log_format)
    if anonymize:
        from diagnose.logs.private import without_names

        terminal = _anonymous(terminal, path, [name for run in found.runs for name in (run.label, run.file)])
        found = without_names(found)
    if json_only:
        terminal.json(as_json(found))
    else:
        terminal.show(as_rich(found), plain_width=120)


def _anonymous(terminal: Terminal, path: str, names: Iterable[str]) -> Terminal:
    """Return a terminal that says nothing about this machine, the log's path and its runs' names."""
    from diagnose.anonymize import Anonymizer

    return replace(terminal, anonymizer=Anonymizer.of_machine([path], filter(None, names)))


def _follow(path: str, log_format: str | None, terminal: Terminal, json_lines: bool) -> None:
    """Print the last points of a log and then each new one, until interrupted."""
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
        for point in follow(path, idle, log_format):
            line = point_json(point) if json_lines else point_text(point)
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
