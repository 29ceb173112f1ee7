"""The curves behind a verdict, as reports and the TUI plot them.

Legend of shape suffixes: ``_N`` points of one curve, ``_S`` seeds (runs of one kind).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

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
    by_step: dict[float, list[float]] = {}
    seeds = 0
    for curves in curves_S:
        values_N = curves.values.get(metric)
        if values_N is None:
            continue
        keep_N = np.isfinite(values_N)
        seeds += bool(keep_N.any())
        for step, value in zip(curves.steps_N[keep_N].tolist(), values_N[keep_N].tolist(), strict=True):
            by_step.setdefault(step, []).append(value)
    if not by_step:
        return None
    steps = sorted(by_step)
    stretch = math.ceil(len(steps) / points)
    chunks = [steps[i : i + stretch] for i in range(0, len(steps), stretch)]
    pools = [[value for step in chunk for value in by_step[step]] for chunk in chunks]
    return Line(
        x_N=np.array([np.median(chunk) for chunk in chunks]),
        y_N=np.array([np.median(pool) for pool in pools]),
        low_N=np.array([min(pool) for pool in pools]),
        high_N=np.array([max(pool) for pool in pools]),
        seeds=seeds,
    )


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
