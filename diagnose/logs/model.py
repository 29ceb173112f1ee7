"""What log readers yield, and what an import consists of."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from diagnose.curves import Curves


class Row(Mapping[str, float]):
    """The values of a line whose keys are those of many others: it costs the long log no dictionary a line.

    Attributes:
        names: The keys; lines with the same keys share one tuple.
        numbers: Their values, in that order.
    """

    __slots__ = ("names", "numbers")

    def __init__(self, names: tuple[str, ...], numbers: array[float]) -> None:
        self.names, self.numbers = names, numbers

    def __getitem__(self, key: str) -> float:
        try:
            return self.numbers[self.names.index(key)]
        except ValueError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Record(NamedTuple):
    """The metrics that one place of a log gives for one training step.

    A tuple, because a long log has many.

    Attributes:
        line: Line number, counted from 1; in a file without lines the record's or entry's number.
        step: Training step, ≥ 0.
        data: Raw key → value as logged; NaN and ±inf where the log says so, NaN for null.
        not_numbers: Raw keys whose value is no number.
        decimals: How many decimals every one of the record's non-integer values is printed with, None where
            they differ or the format is exact.
        run: Name of the run within the log, "" where the log doesn't name runs.
    """

    line: int
    step: int
    data: Mapping[str, float]
    not_numbers: tuple[str, ...] = ()
    decimals: int | None = None
    run: str = ""


@dataclass(frozen=True)
class Rejected:
    """A line, or a part of one, that should have been a record and is none.

    Attributes:
        line: Line, record or entry number, as in `Record`.
        reason: Why, for humans.
        file: File of a folder, "" for a log that is one file.
    """

    line: int
    reason: str
    file: str = ""


@dataclass(frozen=True)
class Run:
    """One training run of a log (a file may hold several).

    Attributes:
        curves: The curves under canonical names.
        names: Raw key → canonical name, one raw key for each canonical metric of `curves`.
        unmapped: Raw keys that are not used: unknown, no number, or second best for a canonical metric that
            another key already gives. In the order of their first appearance.
        first_line: Line of the first record.
        last_line: Line of the last record.
        records: Records that the run was made of.
        duplicates: Values that were logged again, unchanged.
        conflicts: Values that were logged again for the same step with another value; the later one is kept.
        replaced: Steps before a resume that were trained again after it; the later values are kept.
        out_of_order: Records whose step is smaller than one before them, in a run without a resume; they were sorted.
        label: Name of the run within the log, "" where there is none.
        file: File of a folder that the run was read from, "" for a log that is one file.
    """

    curves: Curves
    names: Mapping[str, str]
    unmapped: tuple[str, ...]
    first_line: int
    last_line: int
    records: int
    duplicates: int = 0
    conflicts: int = 0
    replaced: int = 0
    out_of_order: int = 0
    label: str = ""
    file: str = ""


@dataclass(frozen=True)
class Counts:
    """How much of a log was understood.

    Attributes:
        lines: Number of the last line read (of the last record, in a file without lines).
        records: Metric records.
        rejected: Rejected lines, also those that `Import.rejected` no longer lists.
    """

    lines: int
    records: int
    rejected: int


@dataclass(frozen=True)
class Import:
    """A log, understood.

    Attributes:
        source: The path as given, or "stdin".
        format: Name of the reader; of a folder the names of its readers, with "+" between them.
        runs: Runs in the order in which they were logged, at least one.
        rejected: The first rejected lines (`diagnose.logs.MAX_REJECTED` at most).
        counts: Totals.
        notes: What else the import has to say: files that were left out, the same run twice.
    """

    source: str
    format: str
    runs: tuple[Run, ...]
    rejected: tuple[Rejected, ...]
    counts: Counts
    notes: tuple[str, ...] = ()
