"""Parquet tables, as W&B keeps a run's history. Needs pyarrow, which is an extra: ``rl-diagnose[parquet]``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, BinaryIO

from diagnose.errors import LogError
from diagnose.logs import values
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import EVERY
from diagnose.logs.registry import file_reader
from diagnose.logs.text import key_name

BATCH = 4096
MAX_COLUMNS = 5000
"""Most columns that are read: those with numbers, steps first."""


def recognises(head: bytes) -> bool:
    """Whether a file is a Parquet file."""
    return head.startswith(b"PAR1")


@file_reader("parquet", "Parquet table (needs pyarrow)", recognises, EVERY)
def records(stream: BinaryIO) -> Iterator[Record | Rejected]:
    """Yield a record a row with a step."""
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise LogError(
            "this is a Parquet file, which needs pyarrow",
            "pip install 'rl-diagnose[parquet]', or export it as CSV",
        ) from error
    number = 0
    try:
        table = parquet.ParquetFile(stream)
        wanted = [
            field.name
            for field in table.schema_arrow
            if any(check(field.type) for check in (arrow.types.is_integer, arrow.types.is_floating))
        ][:MAX_COLUMNS]
        for batch in table.iter_batches(batch_size=BATCH, columns=wanted):
            columns: dict[str, list[Any]] = {name: batch.column(name).to_pylist() for name in wanted}
            for index in range(batch.num_rows):
                number += 1
                row = {name: column[index] for name, column in columns.items() if column[index] is not None}
                step = values.step_of(row)
                if step is None:
                    yield Rejected(number, "no row with a step")
                else:
                    yield Record(number, step, {key_name(key): float(value) for key, value in row.items()})
    except LogError:
        raise
    except (
        Exception
    ) as error:  # a library for a format that can be hostile: whatever it raises, the file is bad
        yield Rejected(number + 1, f"the Parquet file can't be read from here on: {type(error).__name__}")
