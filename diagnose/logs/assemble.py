"""Records → runs: one clock, one value a step and metric, canonical names.

- A step logged twice is merged (verl logs training and validation apart). Where both lines have a value for
  the same key and differ, the later one is kept and the conflict counted.
- A step that falls back to a fresh start begins a second run. One that falls back to a later step is a resume
  from a checkpoint: the same run, an event, and the later values win.

Legend of shape suffixes: ``_N`` logged steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from diagnose.curves import Array, Curves
from diagnose.logs.canonical import Aliases, Offer
from diagnose.logs.model import Record, Run

LATE = 8
"""A line at most this many steps behind that contradicts nothing is late, not a new start."""
ROUNDED_VALUES = 20
"""Values that must agree on their number of decimals before a log counts as rounded."""


def assemble(records: Iterable[Record], source: str, aliases: Aliases) -> tuple[Run, ...]:
    """Return the runs of one log, in the order in which they were logged.

    Args:
        records: Records in the order of the file.
        source: Name that the curves carry.
        aliases: The format's alias table.
    """
    offers: dict[str, Offer | None] = {}
    drafts: list[_Draft] = []
    for record in records:
        for key in record.data:
            if key not in offers:
                offers[key] = aliases.offer(key)
        known = {key: value for key, value in record.data.items() if offers[key] is not None}
        if not drafts or not drafts[-1].takes(record.step, known):
            drafts.append(_Draft(record.line))
        drafts[-1].add(record, known)
    return tuple(draft.finish(source, offers) for draft in drafts)


@dataclass
class _Draft:
    """A run in the making.

    Attributes:
        first_line: Line of the first record.
        first: First step, -1 before there is one.
        last: Step of the latest record, late ones aside.
        stride: Distance between the first two steps, 0 until there are two.
        rows: Step → raw key → value, since the last resume; steps ascend.
        before: The same for steps that were trained again after a resume.
        keys: Every raw key seen, in order (a dict for its order).
        decimals: Number of decimals → values printed so.
    """

    first_line: int
    first: int = -1
    last: int = -1
    stride: int = 0
    last_line: int = 0
    records: int = 0
    duplicates: int = 0
    conflicts: int = 0
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    before: dict[int, dict[str, float]] = field(default_factory=dict)
    keys: dict[str, None] = field(default_factory=dict)
    resumes: list[int] = field(default_factory=list)
    decimals: Counter[int | None] = field(default_factory=Counter)

    def takes(self, step: int, known: Mapping[str, float]) -> bool:
        """Whether a record of `step` belongs to this run and not to a new one.

        A record without a known metric says nothing about that: it may be prose that looks like one.
        """
        if not known or step >= self.last or self._is_late(step, known):
            return True
        fresh = step <= 1 or (step <= self.first <= self.stride)
        return not fresh

    def _is_late(self, step: int, known: Mapping[str, float]) -> bool:
        """Whether a record behind `last` only adds to the step that it names, or repeats it."""
        row = self.rows.get(step)
        return (
            row is not None
            and self.last - step <= LATE
            and all(key not in row or _same(row[key], value) for key, value in known.items())
        )

    def add(self, record: Record, known: Mapping[str, float]) -> None:
        """Take a record in; `takes` has said yes, or it is the first."""
        step = record.step
        self.last_line = record.line
        self.records += 1
        self.keys.update(dict.fromkeys([*record.data, *record.not_numbers]))
        if not known:
            return
        self.decimals[record.decimals] += len(record.data)
        if self.first < 0:
            self.first = step
        if step < self.last and not self._is_late(step, known):
            self._resume(step)
        if step > self.last >= 0 and not self.stride:
            self.stride = step - self.last
        self.last = max(self.last, step)
        row = self.rows.setdefault(step, {})
        for key, value in known.items():
            if key in row:
                same = _same(row[key], value)
                self.duplicates += same
                self.conflicts += not same
            row[key] = value

    def _resume(self, step: int) -> None:
        """Go back to `step`: what was logged from there on is what a later value replaces."""
        self.resumes.append(step)
        while self.rows and (latest := next(reversed(self.rows))) >= step:
            self.before[latest] = self.before.get(latest, {}) | self.rows.pop(latest)
        self.last = step

    def finish(self, source: str, offers: Mapping[str, Offer | None]) -> Run:
        """Return the run: names settled, rows turned into curves."""
        replaced = len(self.before.keys() & self.rows.keys())
        rows = {
            step: self.before.get(step, {}) | self.rows.get(step, {})
            for step in sorted(self.before.keys() | self.rows.keys())
        }
        names = _settle(rows, self.keys, offers)
        steps_N: Array = np.array(list(rows), dtype=np.float64)
        values: dict[str, Array] = {}
        nonfinite: dict[str, tuple[int, ...]] = {}
        resolution: dict[str, float] = {}
        decimals = self._common_decimals()
        for raw, canonical in names.items():
            offer = offers[raw]
            assert offer is not None
            values_N = np.array([row.get(raw, math.nan) for row in rows.values()]) * offer.scale
            values[canonical] = np.where(np.isfinite(values_N), values_N, math.nan)
            bad = tuple(
                step for step, row in rows.items() if raw in row and not math.isfinite(row[raw] * offer.scale)
            )
            if bad:
                nonfinite[canonical] = bad
            if decimals:
                resolution[canonical] = float(f"1e-{decimals}") * offer.scale
        return Run(
            curves=Curves(
                source,
                steps_N,
                values,
                nonfinite,
                tuple(("resume", step) for step in self.resumes),
                resolution,
            ),
            names=names,
            unmapped=tuple(key for key in self.keys if key not in names),
            first_line=self.first_line,
            last_line=self.last_line,
            records=self.records,
            duplicates=self.duplicates,
            conflicts=self.conflicts,
            replaced=replaced,
        )

    def _common_decimals(self) -> int:
        """Return the number of decimals that the whole run was rounded to, 0 for a run that was not."""
        if len(self.decimals) != 1:
            return 0
        ((decimals, values),) = self.decimals.items()
        return decimals if decimals is not None and 2 <= decimals <= 5 and values >= ROUNDED_VALUES else 0


def _same(one: float, other: float) -> bool:
    """Equality under which NaN equals NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))


def _settle(
    rows: Mapping[int, Mapping[str, float]], keys: Iterable[str], offers: Mapping[str, Offer | None]
) -> dict[str, str]:
    """Return raw key → canonical name: of several keys the one with the best rank, then the most values.

    In the order of `keys`, so that a canonical metric keeps its place in the log.
    """
    counts = Counter(key for row in rows.values() for key in row)
    best: dict[str, tuple[tuple[int, int], str]] = {}
    for key in keys:
        offer = offers.get(key)
        if offer is None or not counts[key]:
            continue
        merit = (offer.rank, -counts[key])
        if offer.canonical not in best or merit < best[offer.canonical][0]:
            best[offer.canonical] = (merit, key)
    chosen = {raw: canonical for canonical, (_, raw) in best.items()}
    return {key: chosen[key] for key in keys if key in chosen}
