"""Curves kept in a run folder, so that a verdict can be recomputed when the log is gone.

The file is also a log that `diagnose.logs.read` reads: lines ``{"step": N, "data": {canonical name: value or
null}}``, a key left out where the metric was not logged. The first line carries what the lines can't say,
under ``"curves"``.

Legend of shape suffixes: ``_N`` logged steps.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from diagnose.curves import Curves
from diagnose.errors import LogError
from diagnose.store import write_text


def write_curves(curves: Curves, path: Path) -> None:
    """Write curves to `path`, atomically and without loss."""
    head = {
        "source": curves.source,
        "metrics": list(curves.values),
        "events": [list(event) for event in curves.events],
        "resolution": dict(curves.resolution),
    }
    nonfinite = {name: set(steps) for name, steps in curves.nonfinite.items()}
    assert nonfinite.keys() <= curves.values.keys()
    rows: list[dict[str, Any]] = []
    for index, step in enumerate(map(int, curves.steps_N)):
        data: dict[str, float | None] = {}
        for name, values_N in curves.values.items():
            value = float(values_N[index])
            assert not math.isinf(value), f"{name} at {step}: non-finite values are NaN"
            if step in nonfinite.get(name, ()):
                data[name] = None
            elif not math.isnan(value):
                data[name] = value
        rows.append({"step": step, "data": data})
    first, *others = rows or [{}]
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in [first | {"curves": head}, *others])
    write_text(path, text)


def read_curves(path: Path) -> Curves:
    """Read what `write_curves` wrote.

    Raises:
        LogError: The file is missing or was not written by `write_curves`.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        head = rows[0]["curves"]
        rows = [row for row in rows if "step" in row]
        names: list[str] = head["metrics"]
        return Curves(
            source=head["source"],
            steps_N=np.array([row["step"] for row in rows], dtype=np.float64),
            values={
                name: np.array([_or_nan(row["data"].get(name)) for row in rows], dtype=np.float64)
                for name in names
            },
            nonfinite={
                name: steps
                for name in names
                if (steps := tuple(row["step"] for row in rows if row["data"].get(name, 0.0) is None))
            },
            events=tuple((str(kind), int(step)) for kind, step in head["events"]),
            resolution=head["resolution"],
        )
    except OSError as error:
        raise LogError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError) as error:
        raise LogError(f"{path}: not curves of a run folder ({error})") from error


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
