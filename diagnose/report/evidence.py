"""The curves behind a verdict, as reports and the TUI plot them.

Legend of shape suffixes: ``_N`` points of one curve, ``_S`` seeds (runs of one kind), ``_P`` points of several
curves, ``_U`` their different steps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diagnose.curves import Array, Curves
from diagnose.report.words import replay_name, replay_of_run


@dataclass(frozen=True)
class Evidence:
    """Curves of the incident and of the replays, each list over seeds.

    Attributes:
        original_healthy: Healthy twins of the incident, empty where there are none.
        original_faulty: The incident.
        proxy_healthy: The proxy without a fault.
        proxy_faulty: The proxy by injected fault (at another strength than the default: by `replay_name`).
    """

    original_healthy: tuple[Curves, ...] = ()
    original_faulty: tuple[Curves, ...] = ()
    proxy_healthy: tuple[Curves, ...] = ()
    proxy_faulty: Mapping[str, tuple[Curves, ...]] = field(default_factory=dict)

    def replays(self, fault: str, strength: float = 1.0) -> tuple[Curves, ...]:
        """Return the runs of a fault at a strength, those under the fault's own name where it has no other."""
        return self.proxy_faulty.get(replay_name(fault, strength)) or self.proxy_faulty.get(fault, ())

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that the original has a curve of, then those that only the proxy has."""
        groups = (
            self.original_faulty,
            self.original_healthy,
            self.proxy_healthy,
            *self.proxy_faulty.values(),
        )
        return tuple(dict.fromkeys(name for group in groups for curves in group for name in curves.metrics))


@dataclass(frozen=True)
class Line:
    """One drawable curve over seeds: median, minimum and maximum at each step that has a value.

    Attributes:
        x_N: Steps.
        y_N: Median over the seeds that have a finite value there.
        low_N: Minimum over those seeds.
        high_N: Maximum over those seeds.
        seeds: Number of runs that contributed.
    """

    x_N: Array
    y_N: Array
    low_N: Array
    high_N: Array
    seeds: int


def line(curves_S: Iterable[Curves], metric: str, points: int = 400) -> Line | None:
    """Return one metric of several runs as a drawable line, None where no run has a finite value.

    Args:
        curves_S: Runs of one kind.
        metric: Canonical metric name.
        points: Longest line; longer ones are thinned to medians of equal stretches, with their extremes in
            low and high, so that a spike of one step stays visible.
    """
    found = [(curves.steps_N, curves.values[metric]) for curves in curves_S if metric in curves.values]
    finite = [
        (steps_N[keep], values_N[keep])
        for steps_N, values_N in found
        if (keep := np.isfinite(values_N)).any()
    ]
    if not finite:
        return None
    steps_P, values_P = (np.concatenate(parts) for parts in zip(*finite, strict=True))
    unique_U, place_P = np.unique(steps_P, return_inverse=True)
    stretch = math.ceil(len(unique_U) / points)
    low_N, y_N, high_N = _spread(values_P, place_P // stretch)
    _, x_N, _ = _spread(unique_U, np.arange(len(unique_U)) // stretch)
    return Line(x_N=x_N, y_N=y_N, low_N=low_N, high_N=high_N, seeds=len(finite))


def _spread(values_P: Array, group_P: npt.NDArray[np.intp]) -> tuple[Array, Array, Array]:
    """Return minimum, median and maximum of each group of values; groups are numbered from 0 without a gap."""
    sorted_P = values_P[np.lexsort((values_P, group_P))]
    count_N = np.bincount(group_P)
    end_N = np.cumsum(count_N)
    start_N = end_N - count_N
    middle_N = (sorted_P[start_N + (count_N - 1) // 2] + sorted_P[start_N + count_N // 2]) / 2
    return sorted_P[start_N], middle_N, sorted_P[end_N - 1]


def read_curves(path: Path) -> Curves | None:
    """Return the curves of a `{"step": n, "data": {…}}` file, None where it has no usable line.

    Only for files that this program itself wrote in a run folder (foreign logs go through `diagnose.logs`). A
    half-written last line is skipped, a repeated step keeps its last record.
    """
    records: dict[int, Mapping[str, float | None]] = {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for raw in text.splitlines():
        try:
            record = json.loads(raw)
            records[int(record["step"])] = dict(record["data"])
        except (ValueError, TypeError, KeyError):
            continue
    return curves_from_records(str(path.name), records)


def curves_from_records(source: str, records: Mapping[int, Mapping[str, object]]) -> Curves | None:
    """Return records by step as curves, None where there are none; null and non-numbers become NaN."""
    if not records:
        return None
    steps = sorted(records)
    names = dict.fromkeys(name for step in steps for name in records[step])
    values = {
        name: np.array([_number(records[step].get(name)) for step in steps], dtype=np.float64)
        for name in names
    }
    return Curves(source, np.array(steps, dtype=np.float64), values)


def read_evidence(run_dir: Path) -> Evidence:
    """Return all curves of a run folder as far as they have been written; never raises for a missing file."""
    proxy_healthy: list[Curves] = []
    proxy_faulty: dict[str, list[Curves]] = {}
    for path in sorted(run_dir.glob("runs/*/metrics.jsonl"), key=_natural):
        curves = read_curves(path)
        if curves is not None:
            fault = replay_of_run(path.parent.name)
            (proxy_healthy if fault is None else proxy_faulty.setdefault(fault, [])).append(curves)
    original_faulty, original_healthy = read_inputs(run_dir)
    return Evidence(
        original_healthy=original_healthy,
        original_faulty=original_faulty,
        proxy_healthy=tuple(proxy_healthy),
        proxy_faulty={fault: tuple(group) for fault, group in proxy_faulty.items()},
    )


def read_inputs(run_dir: Path) -> tuple[tuple[Curves, ...], tuple[Curves, ...]]:
    """Return the incident's curves and those of its healthy twins, as imported into a run folder."""

    def group(kind: str) -> tuple[Curves, ...]:
        paths = sorted(run_dir.glob(f"inputs/{kind}_*.jsonl"), key=_natural)
        return tuple(curves for curves in map(read_curves, paths) if curves is not None)

    return group("faulty"), group("healthy")


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _natural(path: Path) -> list[str | int]:
    """Sort key under which seed 10 comes after seed 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
