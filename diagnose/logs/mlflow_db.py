"""MLflow's SQLite store (``mlflow.db``), opened read-only; its folder store is in `diagnose.logs.folder`.

The file is somebody else's: only tables are queried (a view or a trigger could do anything), the schema is not
trusted, values are limited in size, and a query that takes too long is given up.
"""

from __future__ import annotations

import io
import math
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO
from urllib.parse import quote

from diagnose.errors import LogError
from diagnose.logs import values
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import EVERY
from diagnose.logs.registry import file_reader
from diagnose.logs.text import key_name, printable

MAX_SECONDS = 300.0
"""Longest time that the database may work, in seconds."""
MAX_VALUE = 1 << 20
"""Longest text or row of the database, in bytes."""
_STEPS = 100_000
_RUNS = "SELECT run_uuid, name FROM runs ORDER BY start_time, run_uuid"
_METRICS = """
SELECT step, key, value, is_nan FROM metrics WHERE run_uuid = ? ORDER BY step, timestamp
"""


def recognises(head: bytes) -> bool:
    """Whether a file is an SQLite database."""
    return head.startswith(b"SQLite format 3\x00")


@file_reader("mlflow", "MLflow database (SQLite)", recognises, EVERY)
def records(stream: BinaryIO) -> Iterator[Record | Rejected]:
    """Yield a record a run and step, runs in the order of their start."""
    with _path(stream) as path:
        # Immutable: SQLite takes no lock and writes nothing, which is wrong only where a write-ahead log has news.
        mode = "mode=ro" if Path(f"{path}-wal").exists() else "mode=ro&immutable=1"
        try:
            base = sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True)
        except sqlite3.Error as error:
            raise LogError(f"this SQLite database can't be opened: {error}") from error
        try:
            yield from _read(base)
        finally:
            base.close()


def _read(base: sqlite3.Connection) -> Iterator[Record | Rejected]:
    base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
    base.text_factory = lambda raw: raw.decode("utf-8", "replace")
    until = time.monotonic() + MAX_SECONDS
    base.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
    number = 0
    try:
        for pragma in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON", "mmap_size=0"):
            base.execute(f"PRAGMA {pragma}")
        tables = {name for (name,) in base.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        if not {"runs", "metrics"} <= tables:
            raise LogError("this SQLite database is not MLflow's: it has no tables runs and metrics")
        for run, name in list(base.execute(_RUNS)):
            label = printable(str(name or run), 80)
            rows = base.execute(_METRICS, (run,))
            for step, group in groupby(rows, key=lambda row: row[0]):
                number += 1
                data = {key_name(str(key)): _value(value, nan) for _, key, value, nan in group}
                found = values.step(step)
                if found is None:
                    yield Rejected(number, f"step is no whole number ≥ 0: {printable(repr(step), 40)}")
                else:
                    yield Record(number, found, data, run=label)
    except (sqlite3.Error, OverflowError, MemoryError, UnicodeDecodeError) as error:  # also of its messages
        yield Rejected(number + 1, f"the database can't be read from here on: {printable(str(error), 80)}")


def _value(value: Any, nan: Any) -> float:
    """Return a stored value; MLflow stores NaN as 0 with a flag, and infinity as the largest number."""
    if nan or not isinstance(value, int | float):
        return math.nan
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else float(value)


@contextmanager
def _path(stream: BinaryIO) -> Iterator[Path]:
    """Give the path of a stream; one that is no plain file (a pipe, a compressed file) is copied to one."""
    if isinstance(stream, io.BufferedReader) and isinstance(stream.name, str):
        yield Path(stream.name).resolve()
        return
    with NamedTemporaryFile(suffix=".db") as copy:
        shutil.copyfileobj(stream, copy)
        copy.flush()
        yield Path(copy.name)
