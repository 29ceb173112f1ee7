"""Tables: CSV as W&B, SwanLab, MLflow and spreadsheets export it, and Markdown tables in pasted text.

A CSV's header names a step and the metrics. Wide exports put the run before the metric's name (``my-run - train/kl``,
``my-run-kl``); long ones have a row for each run, step and metric.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from diagnose.errors import LogError
from diagnose.logs import values
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import EVERY
from diagnose.logs.registry import file_reader, reader
from diagnose.logs.text import Line, key_name, lines, printable

MAX_LONG = 20_000_000
"""Values of a long table, which has to be sorted before it is read."""
STEPS = (
    "step",
    "global_step",
    "global step",
    "_step",
    "iteration",
    "train/global_step",
    "training/global_step",
)
_KEYS = ("key", "metric", "metric_name", "tag", "name")
_VALUES = ("value", "metric_value")
_RUNS = ("run", "run_id", "run_uuid", "run_name", "experiment", "experiment_name")
_SEPARATORS = (" - ", ": ", "-", "_")
# Beside each metric W&B exports its smallest and largest value of a bin, SwanLab its time.
_BESIDE = ("__MIN", "__MAX", "__step", "_timestamp")


def _cells(text: str) -> tuple[list[str], str]:
    """Return the cells of a header line and their delimiter."""
    best: tuple[list[str], str] = ([], ",")
    for delimiter in ",\t;":
        try:
            row = next(csv.reader([text], delimiter=delimiter), [])
        except csv.Error:
            continue
        if len(row) > len(best[0]):
            best = (row, delimiter)
    return [cell.strip() for cell in best[0]], best[1]


def _column(header: Sequence[str], names: Sequence[str]) -> int:
    """Return the position of the first column that is called one of the names, -1 where none is."""
    lower = [cell.lower() for cell in header]
    return next((lower.index(name) for name in names if name in lower), -1)


def split_column(cell: str) -> tuple[str, str]:
    """Return (run, metric) of a column: ``my-run - train/kl`` → ``my-run``, ``train/kl``."""
    if EVERY.offer(cell) is not None:
        return "", cell
    for separator in _SEPARATORS:
        at = cell.find(separator)
        for _ in range(20):
            if at < 0:
                break
            metric = cell[at + len(separator) :]
            if at and EVERY.offer(metric) is not None:
                return cell[:at], metric
            at = cell.find(separator, at + 1)
    return "", cell


def recognises(head: bytes) -> bool:
    """Whether a file begins with the header of a table of metrics."""
    if b"\0" in head[:64] and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return False
    for line in lines(io.BytesIO(head)):
        header, _ = _cells(line.text)
        if len(header) < 2 or _column(header, STEPS) < 0:
            return False
        long = _column(header, _KEYS) >= 0 and _column(header, _VALUES) >= 0
        # A header that is longer than the head is cut in its last column.
        return long or any(EVERY.offer(split_column(cell)[1]) is not None for cell in header)
    return False


@file_reader("csv", "CSV (W&B, SwanLab and MLflow exports, spreadsheets)", recognises, EVERY)
def csv_records(stream: BinaryIO) -> Iterator[Record | Rejected]:
    """Yield a record a row and run; rows without a step are rejected, empty cells were not logged."""
    rejected: list[Rejected] = []
    found = lines(stream, lambda number: rejected.append(Rejected(number, "longer than 1 MiB")))
    first = next(found, None)
    if first is None:
        return
    header, delimiter = _cells(first.text)
    if _column(header, STEPS) < 0:
        raise LogError("this table has no column for the step", f"call it {' or '.join(STEPS[:3])}")
    if (key := _column(header, _KEYS)) >= 0 and (value := _column(header, _VALUES)) >= 0:
        yield from _long(found, header, delimiter, key, value)
    else:
        yield from _wide(found, header, delimiter)
    yield from rejected


def _rows(found: Iterable[Line], delimiter: str) -> Iterator[tuple[int, list[str] | None]]:
    """Yield the rows with their line numbers, None for one that is no row."""
    for line in found:
        try:
            rows = list(csv.reader([line.text], delimiter=delimiter))
        except csv.Error:
            rows = []
        yield line.number, rows[0] if rows else None


def _number(cell: str) -> float | None:
    return values.number(cell) if len(cell) < 12 and cell[-1:].isalpha() else values.quoted_number(cell)


def _wide(found: Iterable[Line], header: Sequence[str], delimiter: str) -> Iterator[Record | Rejected]:
    at = _column(header, STEPS)
    columns = [
        (index, *split_column(cell))
        for index, cell in enumerate(header)
        if index != at and not cell.endswith(_BESIDE)
    ]
    if len({run for _, run, metric in columns if EVERY.offer(metric)}) < 2:
        columns = [(index, "", metric) for index, _, metric in columns]
    keys = [
        (index, printable(run, 80), key_name(metric)) for index, run, metric in columns[: values.MAX_KEYS]
    ]
    for number, row in _rows(found, delimiter):
        step = values.step(_number(row[at].strip())) if row and len(row) > at else None
        if row is None or step is None:
            yield Rejected(number, "no row with a step")
            continue
        runs: dict[str, dict[str, float]] = {}
        others: dict[str, list[str]] = {}
        for index, run, metric in keys:
            cell = row[index].strip() if index < len(row) else ""
            if not cell:
                continue
            value = _number(cell)
            if value is None:
                others.setdefault(run, []).append(metric)
            else:
                runs.setdefault(run, {})[metric] = value
        for run, data in runs.items():
            yield Record(number, step, data, tuple(others.get(run, ())), run=run)


def _long(
    found: Iterable[Line], header: Sequence[str], delimiter: str, key: int, value: int
) -> Iterator[Record | Rejected]:
    at, run = _column(header, STEPS), _column(header, _RUNS)
    runs: dict[str, dict[int, tuple[int, dict[str, float]]]] = {}
    count = 0
    for number, row in _rows(found, delimiter):
        if row is None or len(row) <= max(at, key, value, run):
            yield Rejected(number, "too few cells")
            continue
        step, logged = values.step(_number(row[at].strip())), _number(row[value].strip())
        if step is None or logged is None:
            yield Rejected(number, "no row with a step and a value")
            continue
        if (count := count + 1) > MAX_LONG:
            raise LogError(f"this table has more than {MAX_LONG} values", "give it in parts")
        label = printable(row[run], 80) if run >= 0 else ""
        _, data = runs.setdefault(label, {}).setdefault(step, (number, {}))
        if len(data) < values.MAX_KEYS:
            data[key_name(row[key])] = logged
    for label, steps in runs.items():
        for step in sorted(steps):
            number, data = steps[step]
            yield Record(number, step, data, run=label if len(runs) > 1 else "")


_ROW = re.compile(r"\|.{3,}\|")
_RULE = re.compile(r"\|[\s:|-]{3,}\|")


def _markdown(text: str) -> list[str] | None:
    """Return the cells of a row of a Markdown table, None for any other text."""
    if not text.startswith("|") or not _ROW.fullmatch(text):
        return None
    return [cell.strip().strip("`*").strip() for cell in text[1:-1].split("|")[: values.MAX_KEYS]]


def recognises_markdown(text: str) -> bool:
    """Whether a text is the header of a Markdown table of metrics."""
    cells = _markdown(text.removeprefix("> "))
    return bool(cells) and _column(cells or [], STEPS) == 0 and any(EVERY.offer(cell) for cell in cells or [])


@reader("markdown", "Markdown table", recognises_markdown, EVERY, needles=(b"|",))
def markdown_records(found: Iterable[Line]) -> Iterator[Record | Rejected]:
    """Yield the rows of every table whose first column is the step; other text is passed over."""
    header: list[str] = []
    for line in found:
        text = line.text.removeprefix("> ")
        cells = _markdown(text)
        if cells is None or _RULE.fullmatch(text):
            continue
        if _column(cells, STEPS) == 0:
            header = cells
            continue
        match = re.match(r"\d{1,12}(?=\s|$)", cells[0]) if header else None
        if match is None:
            continue
        data: dict[str, float] = {}
        for name, cell in zip(header[1:], cells[1:], strict=False):
            if cell and (value := _number(cell)) is not None:
                data[key_name(name)] = value
        yield Record(line.number, int(match[0]), data)
