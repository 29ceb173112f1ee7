"""Records → runs: one clock, one value a step and metric, canonical names.

- A step logged twice is merged (verl logs training and validation apart). Where both lines have a value for
  the same key and differ, the later one is kept and the conflict counted.
- A step that falls back to a fresh start begins a second run. One that falls back to a later step is a resume
  from a checkpoint: the same run, an event, and the later values win.
- Records that name their run (MLflow, CSV exports) belong to it, whatever their order.

Values are kept by column, 16 bytes each, so that a long log needs little more memory than its curves.

Legend of shape suffixes: ``_N`` logged steps.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
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
MAX_KEYS = 20_000
"""Distinct raw keys that are remembered; a log with more than that has something else than metrics in it."""
MAX_USED = 1000
"""Distinct raw keys that may stand for a canonical metric (validation sets have a key each)."""
MAX_RUNS = 1000
"""Runs of one log that are told apart; what comes after them joins the last."""


class _Column:
    """The values of one raw key: row numbers, ascending, and a value for each."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows = array("q")
        self.values = array("d")

    def get(self, row: int) -> float | None:
        """Return the value of a row, None where there is none."""
        rows = self.rows
        if not rows or rows[-1] < row:
            return None
        at = len(rows) - 1 if rows[-1] == row else bisect_left(rows, row)
        return self.values[at] if rows[at] == row else None

    def put(self, row: int, value: float) -> None:
        """Set the value of a row that is the last one, or not far before it."""
        rows = self.rows
        if not rows or rows[-1] < row:
            rows.append(row)
            self.values.append(value)
            return
        at = bisect_left(rows, row)
        if rows[at] == row:
            self.values[at] = value
        else:
            rows.insert(at, row)
            self.values.insert(at, value)


def assemble(records: Iterable[Record], source: str, aliases: Aliases) -> tuple[Run, ...]:
    """Return the runs of one log, in the order in which they were logged.

    Args:
        records: Records in the order of the file.
        source: Name that the curves carry.
        aliases: The format's alias table.
    """
    offers: dict[str, Offer | None] = {}
    drafts: list[_Draft] = []
    latest: dict[str, _Draft] = {}
    used = 0
    for record in records:
        known: dict[str, float] = {}
        for key, value in record.data.items():
            if key not in offers:
                if len(offers) >= MAX_KEYS:
                    continue
                offers[key] = aliases.offer(key) if used < MAX_USED else None
                used += offers[key] is not None
            if offers[key] is not None:
                known[key] = value
        draft = latest.get(record.run)
        if draft is None or not draft.takes(record.step, known):
            if len(drafts) < MAX_RUNS:
                draft = _Draft(record.line, record.run)
                drafts.append(draft)
                latest[record.run] = draft
            elif draft is None:
                draft = drafts[-1]
        draft.add(record, known)
    return tuple(draft.finish(source, offers) for draft in drafts)


@dataclass
class _Draft:
    """A run in the making.

    Attributes:
        first_line: Line of the first record.
        label: Its name within the log.
        first: First step, -1 before there is one.
        last: Step of the latest record, late ones aside.
        stride: Distance between the first two steps, 0 until there are two.
        steps: Step of every row, in the order in which rows were begun.
        rows: Step → its row. A step that comes again after a resume gets a new one.
        columns: Raw key → its values.
        fresh: Steps logged since the last resume or before its step, ascending.
        stale: Steps that a resume went back behind, and that have not come again.
        replaced: Steps that came again after a resume.
        keys: Every raw key seen, in order (a dict for its order).
        decimals: Number of decimals → values printed so.
    """

    first_line: int
    label: str = ""
    first: int = -1
    last: int = -1
    stride: int = 0
    last_line: int = 0
    records: int = 0
    duplicates: int = 0
    conflicts: int = 0
    steps: array[int] = field(default_factory=lambda: array("q"))
    rows: dict[int, int] = field(default_factory=dict)
    columns: dict[str, _Column] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)
    replaced: set[int] = field(default_factory=set)
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
        if self.last - step > LATE or step not in self.rows or step in self.stale:
            return False
        row = self.rows[step]
        return all(
            key not in self.columns or (old := self.columns[key].get(row)) is None or _same(old, value)
            for key, value in known.items()
        )

    def add(self, record: Record, known: Mapping[str, float]) -> None:
        """Take a record in; `takes` has said yes, or it is the first."""
        step = record.step
        self.last_line = record.line
        self.records += 1
        if len(self.keys) < MAX_KEYS:
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
        row = self.rows.get(step)
        if row is None or step in self.stale:
            if row is not None:
                self.stale.discard(step)
                self.replaced.add(step)
            row = self.rows[step] = len(self.steps)
            self.steps.append(step)
            self.fresh.append(step)
        for key, value in known.items():
            column = self.columns.get(key)
            if column is None:
                column = self.columns[key] = _Column()
            elif (old := column.get(row)) is not None:
                same = _same(old, value)
                self.duplicates += same
                self.conflicts += not same
            column.put(row, value)

    def _resume(self, step: int) -> None:
        """Go back to `step`: what was logged from there on is what a later value replaces."""
        self.resumes.append(step)
        while self.fresh and self.fresh[-1] >= step:
            self.stale.add(self.fresh.pop())
        self.last = step

    def finish(self, source: str, offers: Mapping[str, Offer | None]) -> Run:
        """Return the run: names settled, columns turned into curves."""
        steps_N: Array
        steps_N, place = np.unique(np.array(self.steps, dtype=np.float64), return_inverse=True)
        names = _settle({key: len(column.rows) for key, column in self.columns.items()}, self.keys, offers)
        values: dict[str, Array] = {}
        nonfinite: dict[str, tuple[int, ...]] = {}
        resolution: dict[str, float] = {}
        decimals = self._common_decimals()
        for raw, canonical in names.items():
            offer, column = offers[raw], self.columns[raw]
            assert offer is not None
            at = place[np.array(column.rows, dtype=np.int64)]
            values_N, logged_N = np.full(len(steps_N), math.nan), np.zeros(len(steps_N), dtype=bool)
            with np.errstate(over="ignore"):
                values_N[at] = (
                    np.array(column.values) * offer.scale
                )  # of several rows of a step the last wins
            logged_N[at] = True
            finite_N = np.isfinite(values_N)
            values[canonical] = np.where(finite_N, values_N, math.nan)
            if (bad_N := logged_N & ~finite_N).any():
                nonfinite[canonical] = tuple(int(step) for step in steps_N[bad_N])
            if digit := max(float(f"1e-{decimals}") if decimals else 0.0, offer.digit):
                resolution[canonical] = digit * offer.scale
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
            replaced=len(self.replaced),
            label=self.label,
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
    counts: Mapping[str, int], keys: Iterable[str], offers: Mapping[str, Offer | None]
) -> dict[str, str]:
    """Return raw key → canonical name: of several keys the one with the best rank, then the most values.

    In the order of `keys`, so that a canonical metric keeps its place in the log.

    Args:
        counts: Raw key → number of its values.
        keys: Raw keys in the order of their first appearance.
        offers: Raw key → what it stands for.
    """
    best: dict[str, tuple[tuple[int, int], str]] = {}
    for key in keys:
        offer = offers.get(key)
        if offer is None or not counts.get(key):
            continue
        merit = (offer.rank, -counts[key])
        if offer.canonical not in best or merit < best[offer.canonical][0]:
            best[offer.canonical] = (merit, key)
    chosen = {raw: canonical for canonical, (_, raw) in best.items()}
    return {key: chosen[key] for key in keys if key in chosen}
