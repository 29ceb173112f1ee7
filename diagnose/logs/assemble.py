"""Records → runs: one clock, one value a step and metric, canonical names.

- A step logged twice is merged (verl logs training and validation apart). Where both lines have a value for
  the same key and differ, the later one is kept and the conflict counted.
- A step that falls back to a fresh start begins a second run. One that falls back to a later step is a resume
  from a checkpoint: the same run, an event, and the later values win.
- Where steps fall back but none is logged anew (a table sorted by something else, files in the wrong order), there was
  neither a second run nor a resume: the lines are out of order, and are put in order.
- Records that name their run (MLflow, CSV exports) belong to it, whatever their order.

Values are kept in arrays, 8 bytes each, so that a long log needs little more memory than its curves.

Legend of shape suffixes: ``_N`` logged steps, ``_R`` records, ``_K`` values of one key.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diagnose.curves import Array, Curves
from diagnose.logs.canonical import Aliases, Offer
from diagnose.logs.model import Record, Row, Run

LATE = 8
"""A line at most this many steps behind that contradicts nothing is late, not a new start."""
ROUNDED_VALUES = 20
"""Values that must agree on their number of decimals before a log counts as rounded."""
MAX_KEYS = 20_000
"""Distinct raw keys that are remembered; a log with more than that has something else than metrics in it."""
MAX_USED = 1000
"""Distinct raw keys that may stand for a canonical metric (validation sets have a key each)."""
PIECE = 1 << 16
"""Values that are kept in one piece."""
MAX_BLOCKS = 500
"""Sets of keys that are kept as they come; records with others are taken apart."""
REPEATED = 0.05
"""Largest share of the records of a run out of order that may be there twice, from so many falls of the step on."""
FALLS = 3
MAX_RUNS = 1000
"""Runs of one log that are told apart; what comes after them joins the last."""


Column = tuple[NDArray[np.int64], Array]


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
    all_known: tuple[str, ...] = ()  # the keys of the record before, if each was known
    for record in records:
        known: Mapping[str, float] = record.data
        keys = known.names if isinstance(known, Row) else tuple(known)
        if keys != all_known:
            for key in keys:
                if key not in offers and len(offers) < MAX_KEYS:
                    offers[key] = aliases.offer(key) if used < MAX_USED else None
                    used += offers[key] is not None
            if all(offers.get(key) is not None for key in keys):
                all_known = keys
            else:
                known = {key: value for key, value in known.items() if offers.get(key) is not None}
                keys = tuple(known)
        draft = latest.get(record.run)
        if draft is None or not draft.takes(record.step, known):
            if len(drafts) < MAX_RUNS:
                draft = _Draft(record.line, record.run)
                drafts.append(draft)
                latest[record.run] = draft
            elif draft is None:
                draft = drafts[-1]
        draft.add(record, known, keys)
    return tuple(draft.finish(source, offers) for draft in _in_order(drafts))


def _in_order(drafts: list[_Draft]) -> list[_Draft]:
    """Return the runs, those put together again that are one run whose lines are out of order."""
    groups: dict[str, list[_Draft]] = {}
    for draft in drafts:
        groups.setdefault(draft.label, []).append(draft)
    found = []
    for group in groups.values():
        if sum(len(draft.resumes) for draft in group) + len(group) > 1 and all(
            len(draft.steps) for draft in group
        ):
            whole = _Draft(group[0].first_line, group[0].label)
            for draft in group:
                whole.append(draft)
            if whole.sort():
                found.append(whole)
                continue
        found += group
    return sorted(found, key=lambda draft: draft.first_line)


class _Block:
    """Records that have the same keys: the number of each, and its values after those of the one before.

    The values come in pieces, so that each can be given back as soon as the columns are made of it.
    """

    __slots__ = ("full", "keys", "numbers", "values")

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys
        self.numbers = array("q")
        self.values = array("d")
        self.full: list[array[float]] = []

    def add(self, number: int, values: Iterable[float]) -> None:
        """Take a record in."""
        self.numbers.append(number)
        self.values.extend(values)
        if len(self.values) >= PIECE:
            self.close()

    def close(self) -> None:
        """Begin another piece."""
        self.full.append(self.values)
        self.values = array("d")

    def take_columns(self) -> dict[str, Column]:
        """Return key → (numbers of its records, values), and forget the values."""
        self.close()
        numbers_K = np.array(self.numbers, dtype=np.int64)
        columns = [np.empty(len(numbers_K)) for _ in self.keys]
        at = 0
        while self.full:
            piece = self.full.pop(0)
            rows = np.array(piece).reshape(-1, len(self.keys))
            for column, values in zip(columns, rows.T, strict=True):
                column[at : at + len(values)] = values
            at += len(rows)
        return {key: (numbers_K, column) for key, column in zip(self.keys, columns, strict=True)}


@dataclass
class _Draft:
    """A run in the making.

    Attributes:
        first_line: Line of the first record.
        label: Its name within the log.
        first: First step, -1 before there is one.
        last: Step of the latest record, late ones aside.
        stride: Distance between the first two steps, 0 until there are two.
        steps: Step of every record with a known metric, by its number.
        blocks: Keys → the records that have them.
        recent: Step → what was logged for it, of the last few steps since the last resume.
        resumes: (number of the first record, step) of every resume.
        keys: Every raw key seen, in order (a dict for its order).
        decimals: Number of decimals → values printed so.
        made: What `columns` returns, once it was asked.
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
    out_of_order: int = 0
    steps: array[int] = field(default_factory=lambda: array("q"))
    blocks: dict[tuple[str, ...], _Block] = field(default_factory=dict)
    recent: dict[int, Mapping[str, float]] = field(default_factory=dict)
    resumes: list[tuple[int, int]] = field(default_factory=list)
    keys: dict[str, None] = field(default_factory=dict)
    decimals: Counter[int | None] = field(default_factory=Counter)
    made: dict[str, Column] | None = None

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
        if self.last - step > LATE or (row := self.recent.get(step)) is None:
            return False
        return all(key not in row or _same(row[key], value) for key, value in known.items())

    def add(self, record: Record, known: Mapping[str, float], keys: tuple[str, ...]) -> None:
        """Take a record in; `takes` has said yes, or it is the first.

        Args:
            record: The record.
            known: Of its values those in use.
            keys: Their keys.
        """
        step = record.step
        self.last_line = record.line
        self.records += 1
        block = self.blocks.get(keys)
        if block is None or len(known) < len(record.data) or record.not_numbers:
            if len(self.keys) < MAX_KEYS:
                self.keys.update(dict.fromkeys([*record.data, *record.not_numbers]))
            if not known:
                return
        self.decimals[record.decimals] += len(record.data)
        if step < self.last and not self._is_late(step, known):
            self.resumes.append((len(self.steps), step))
            self.recent.clear()
            self.last = step
        elif step > self.last >= 0 and not self.stride:
            self.stride = step - self.last
        if self.first < 0:
            self.first = step
        if step > self.last:
            self.last = step
        if (row := self.recent.get(step)) is not None:
            for key, value in known.items():
                if key in row:
                    same = _same(row[key], value)
                    self.duplicates += same
                    self.conflicts += not same
            self.recent[step] = {**row, **known}
        else:
            self.recent[step] = known
            if len(self.recent) > 4 * LATE:
                self.recent = {old: row for old, row in self.recent.items() if self.last - old <= LATE}
        number = len(self.steps)
        self.steps.append(step)
        if block is None:
            self._begin(number, keys, known)
        else:
            block.add(number, known.numbers if isinstance(known, Row) else known.values())

    def _begin(self, number: int, keys: tuple[str, ...], known: Mapping[str, float]) -> None:
        """Keep a record whose keys have not come together before; of too many kinds of records by key."""
        parts = [keys] if len(self.blocks) < MAX_BLOCKS else [(key,) for key in keys]
        for part in parts:
            self.blocks.setdefault(part, _Block(part)).add(number, [known[key] for key in part])

    def append(self, other: _Draft) -> None:
        """Put the records of another draft after one's own."""
        before = len(self.steps)
        self.last_line = max(self.last_line, other.last_line)
        self.records += other.records
        self.duplicates += other.duplicates
        self.conflicts += other.conflicts
        self.steps.extend(other.steps)
        for keys, block in other.blocks.items():
            mine = self.blocks.setdefault(keys, _Block(keys))
            mine.numbers.extend(number + before for number in block.numbers)
            mine.close()
            mine.full += [*block.full, block.values]
        self.keys.update(other.keys)
        self.decimals.update(other.decimals)

    def sort(self) -> bool:
        """Take the records for one run out of order, and return True; False where they can't be.

        They are where no step has another value when it is logged anew, and hardly any is logged anew at all.
        """
        steps_R = np.array(self.steps, dtype=np.float64)
        falls = int((np.diff(steps_R) < 0).sum())
        allowed = REPEATED * len(steps_R) if falls >= FALLS else 0
        for numbers_K, values_K in self.columns().values():
            steps_K = steps_R[numbers_K]
            order_K = np.argsort(steps_K, kind="stable")
            twice_K = np.flatnonzero(np.diff(steps_K[order_K]) == 0)
            one, other = values_K[order_K[twice_K]], values_K[order_K[twice_K + 1]]
            if len(twice_K) > allowed or not np.array_equal(one, other, equal_nan=True):
                return False
        self.out_of_order = int((steps_R < np.maximum.accumulate(steps_R)).sum())
        return True

    def columns(self) -> dict[str, Column]:
        """Return key → (numbers of its records, values) in their order; made once, of what the blocks held."""
        if self.made is None:
            parts: dict[str, list[Column]] = {}
            for block in self.blocks.values():
                for key, part in block.take_columns().items():
                    parts.setdefault(key, []).append(part)
            self.made = {}
            for key in list(parts):
                (numbers_K, values_K), *others = parts.pop(key)
                if others:
                    numbers_K = np.concatenate([numbers_K, *(numbers for numbers, _ in others)])
                    order_K = np.argsort(numbers_K, kind="stable")
                    numbers_K = numbers_K[order_K]
                    values_K = np.concatenate([values_K, *(values for _, values in others)])[order_K]
                self.made[key] = numbers_K, values_K
        return self.made

    def finish(self, source: str, offers: Mapping[str, Offer | None]) -> Run:
        """Return the run: names settled, records turned into curves."""
        steps_R: Array = np.array(self.steps, dtype=np.float64)
        steps_N = np.unique(steps_R)
        counts: Counter[str] = Counter()
        for block in self.blocks.values():
            counts.update(dict.fromkeys(block.keys, len(block.numbers)))
        names = _settle(counts, self.keys, offers)
        values: dict[str, Array] = {}
        nonfinite: dict[str, tuple[int, ...]] = {}
        resolution: dict[str, float] = {}
        decimals = self._common_decimals()
        columns = self.columns()
        for raw, canonical in names.items():
            offer = offers[raw]
            assert offer is not None
            numbers_K, values_K = columns.pop(raw)
            at = np.searchsorted(steps_N, steps_R[numbers_K])
            values_N, logged_N = np.full(len(steps_N), math.nan), np.zeros(len(steps_N), dtype=bool)
            with np.errstate(over="ignore"):
                values_N[at] = values_K * offer.scale  # of several values of a step the last wins
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
                tuple(("resume", step) for _, step in self.resumes),
                resolution,
            ),
            names=names,
            unmapped=tuple(key for key in self.keys if key not in names),
            first_line=self.first_line,
            last_line=self.last_line,
            records=self.records,
            duplicates=self.duplicates,
            conflicts=self.conflicts,
            replaced=self._replaced(steps_R),
            out_of_order=self.out_of_order,
            label=self.label,
        )

    def _replaced(self, steps_R: Array) -> int:
        """Return how many steps were logged both before and after a resume."""
        if not self.resumes:
            return 0
        generation_R = np.searchsorted(
            [number for number, _ in self.resumes], np.arange(len(steps_R)), side="right"
        )
        pairs = np.unique(np.stack([steps_R, generation_R]), axis=1)
        return int((np.unique(pairs[0], return_counts=True)[1] > 1).sum())

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
