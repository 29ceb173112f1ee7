"""A folder → one `Import`: files that are pieces of one run are joined, the same run in two formats counts once.

- TensorBoard event files of one folder are one run, in the order of their names, which begin with the time. So are the
  pieces that log rotation leaves (``train.log.2``, ``train.log.1``, ``train.log``).
- MLflow's folder store (``mlruns/``) has a file a metric; a run's are read together.
- Any other file that a reader knows is a log of its own. A trainer that writes console, JSON lines and TensorBoard
  gives three logs of one run: the one with most metrics is kept, and a note says so.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from diagnose.errors import LogError
from diagnose.logs import values
from diagnose.logs.assemble import assemble
from diagnose.logs.importer import MAX_REJECTED, Intake, check_usable, choose
from diagnose.logs.model import Counts, Import, Record, Rejected, Run
from diagnose.logs.names import EVERY
from diagnose.logs.registry import FileReader, Reader
from diagnose.logs.source import name_of, opened
from diagnose.logs.text import count, key_name, printable

MAX_FILES = 5000
"""Files of a folder that are looked at."""
MAX_METRIC_FILE = 1 << 26
"""Largest file of one MLflow metric, in bytes."""
_OTHER = re.compile(
    r".*\.(safetensors|bin|pt|pth|npz|npy|png|jpg|svg|html|py|pyc|yaml|yml|toml|md|lock|patch|so|whl|zip|tar|model|tiktoken)$",
    re.IGNORECASE,
)
_ROTATED = re.compile(r"(?P<stem>.+\.(?:log|txt|out|err|jsonl))\.(?P<age>\d{1,4})(?P<packed>\.gz)?")
_ALIKE = 1e-5
"""Relative difference up to which two values are the same number, printed twice."""
_ALIKE_VALUES = 5
_COMPARED_RUNS = 60


def read_folder(folder: Path, log_format: str | None = None) -> Import:
    """Read every log of a folder.

    Args:
        folder: The folder.
        log_format: Name of a reader, to read nothing else.

    Raises:
        LogError: Nothing in it is usable; the message has the counts.
    """
    source = name_of(folder)
    stores, files, more = _walk(folder, source)
    notes = [f"more than {MAX_FILES} files: the others were not looked at"] if more else []
    imports: list[Import] = []
    unknown = failed = 0
    groups: dict[tuple[str, str], tuple[list[Path], Reader | FileReader]] = {}
    if log_format in (None, "mlflow"):
        imports += [_read_store(store, folder) for store in stores]
    for file in files:
        try:
            with opened(file) as stream:
                reader = choose(stream)
        except (LogError, OSError) as error:
            failed += 1
            notes.append(f"{_inside(file, folder)} left out: {printable(str(error), 120)}")
            continue
        if reader is None or log_format not in (None, reader.name):
            unknown += 1
        else:
            groups.setdefault(_group(file, reader, folder), ([], reader))[0].append(file)
    # Of equal logs the first counts, and TensorBoard keeps only float32.
    ordered = sorted(groups.items(), key=lambda item: item[1][1].name == "tensorboard")
    for (_, name), (members, reader) in ordered:
        found = _read_group(sorted(members, key=_age), reader, name, folder)
        if found.runs:
            imports.append(found)
        else:
            unknown += 1
    runs, same = _distinct([run for found in imports for run in found.runs])
    counts = Counts(
        *(sum(getattr(found.counts, name) for found in imports) for name in ("lines", "records", "rejected"))
    )
    if not files and not stores:
        raise LogError(
            f"{source}: no file in this folder may be a log", "name the log, or the folder that holds it"
        )
    if not runs:
        raise LogError(
            f"{source}: none of the {count(len(files), 'file')} in this folder is a log with metrics"
            + (f" ({failed} can't be read)" if failed else ""),
            "name one log file in it to see what is wrong with it",
        )
    check_usable(runs, source, counts)
    if unknown:
        notes.append(f"{count(unknown, 'file')} without metrics left out")
    rejected = [item for found in imports for item in found.rejected][:MAX_REJECTED]
    formats = "+".join(sorted({found.format for found in imports}))
    return Import(source, formats, tuple(runs), tuple(rejected), counts, (*notes, *same))


def _inside(path: Path, folder: Path) -> str:
    """Return how a file of a folder is called in messages."""
    return printable(str(path.relative_to(folder)))


def _walk(folder: Path, source: str) -> tuple[list[Path], list[Path], bool]:
    """Return MLflow's run folders, the files that may be logs, and whether there were too many."""
    stores: list[Path] = []
    files: list[Path] = []
    seen = 0

    def fail(error: OSError) -> None:
        if Path(error.filename or "") == folder:
            raise LogError(f"{source}: {error.strerror or error}") from error

    for place, inner, names in os.walk(folder, onerror=fail):
        here = Path(place)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        if "metrics" in inner and "meta.yaml" in names:
            stores.append(here)
            inner[:] = []
            continue
        for name in sorted(names):
            file = here / name
            if (seen := seen + 1) > MAX_FILES:
                return stores, files, True
            if name.startswith(".") or _OTHER.fullmatch(name) or file.is_symlink() or not file.is_file():
                continue
            files.append(file)
    return stores, files, False


def _group(file: Path, reader: Reader | FileReader, folder: Path) -> tuple[str, str]:
    """Return what the pieces of one run have in common: a key, and the name that is shown."""
    if reader.name == "tensorboard":
        place = _inside(file.parent, folder) if file.parent != folder else "TensorBoard files"
        return f"{file.parent}\0tensorboard", place
    stem = rotated["stem"] if (rotated := _ROTATED.fullmatch(file.name)) else file.name
    return f"{file.parent / stem}\0{reader.name}", _inside(file.parent / stem, folder)


def _age(file: Path) -> tuple[int, str]:
    """Order the pieces of a rotated log, the oldest first; others by name."""
    rotated = _ROTATED.fullmatch(file.name)
    return (-int(rotated["age"]) if rotated else 0), file.name


def _read_group(files: list[Path], reader: Reader | FileReader, name: str, folder: Path) -> Import:
    """Read the pieces of one run as one log."""
    intakes = [Intake(_inside(file, folder)) for file in files]

    def piece(file: Path, intake: Intake) -> Iterator[Record]:
        try:
            with opened(file) as stream:
                yield from intake.records(stream, reader)
        except (LogError, OSError) as error:
            intake.reject(Rejected(intake.lines, f"not read from here on: {printable(str(error), 120)}"))

    found = assemble(chain.from_iterable(map(piece, files, intakes)), name, reader.aliases)
    runs = tuple(replace(run, file=name) for run in found if run.curves.values)
    counts = Counts(
        *(
            sum(getattr(intake.counts(), kind) for intake in intakes)
            for kind in ("lines", "records", "rejected")
        )
    )
    rejected = tuple(item for intake in intakes for item in intake.rejected)[:MAX_REJECTED]
    return Import(name, reader.name, runs, rejected, counts)


def _read_store(store: Path, folder: Path) -> Import:
    """Read a run of MLflow's folder store: ``metrics/<key>`` has lines "time value step"."""
    intake = Intake(_inside(store, folder))
    by_step: dict[int, dict[str, float]] = {}
    root = store / "metrics"
    files = 0
    for place, inner, names in os.walk(root):
        inner.sort()
        for name in sorted(names):
            file = Path(place) / name
            files += 1
            if files > MAX_FILES or file.is_symlink() or not file.is_file():
                continue
            _read_metric(file, key_name(file.relative_to(root).as_posix()), by_step, intake.reject)
    rows = (Record(entry, step, by_step[step]) for entry, step in enumerate(sorted(by_step), 1))
    label = _run_name(store / "meta.yaml")
    runs = assemble(rows, intake.file, EVERY)
    runs = tuple(replace(run, file=intake.file, label=label) for run in runs if run.curves.values)
    counts = Counts(len(by_step), len(by_step), intake.refused)
    return Import(intake.file, "mlflow", runs, tuple(intake.rejected), counts)


def _read_metric(
    file: Path, key: str, by_step: dict[int, dict[str, float]], reject: Callable[[Rejected], None]
) -> None:
    try:
        if file.stat().st_size > MAX_METRIC_FILE:
            reject(Rejected(0, f"{key!r}: larger than {MAX_METRIC_FILE >> 20} MiB"))
            return
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        reject(Rejected(0, f"{key!r}: {error.strerror or error}"))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        cells = line.split()
        value = _metric_value(cells[1]) if len(cells) in (2, 3) else None
        step = (
            values.step(values.quoted_number(cells[2])) if len(cells) == 3 else 0 if len(cells) == 2 else None
        )
        if value is None or step is None:
            reject(Rejected(number, f"{key!r}: no line of time, value and step"))
        else:
            by_step.setdefault(step, {})[key] = value


def _metric_value(cell: str) -> float | None:
    """Return a value; MLflow writes infinity as the largest number."""
    value = values.quoted_number(cell)
    if value is not None and abs(value) > 1.79e308:
        return math.copysign(math.inf, value)
    return value


def _run_name(meta: Path) -> str:
    """Return the run's name in a meta.yaml, "" where there is none."""
    try:
        with meta.open(encoding="utf-8", errors="replace") as file:
            found = re.search(r"^run_name:\s*(.{1,200})$", file.read(1 << 16), re.MULTILINE)
    except OSError:
        return ""
    return printable(found[1].strip("'\" "), 80) if found else ""


def _distinct(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs without those that are another's copy in another format, and notes on these."""
    if len(runs) > _COMPARED_RUNS:
        return runs, []
    notes: list[str] = []
    kept: list[Run] = []
    for run in runs:
        twin = next((index for index, other in enumerate(kept) if _alike(run, other)), None)
        if twin is None:
            kept.append(run)
            continue
        other = kept[twin]
        if _worth(run) > _worth(other):
            run, kept[twin] = other, run
        notes.append(f"{run.file} has the same run as {kept[twin].file}, which is used")
    return kept, notes


def _worth(run: Run) -> tuple[int, int, int]:
    return len(run.curves.values), len(run.curves.steps_N), -len(run.curves.resolution)


def _alike(run: Run, other: Run) -> bool:
    """Whether two runs from different files have the same numbers wherever both have some."""
    if run.file == other.file:
        return False
    _, mine, theirs = np.intersect1d(run.curves.steps_N, other.curves.steps_N, return_indices=True)
    compared = telling = 0
    for name in run.curves.values.keys() & other.curves.values.keys():
        one, two = run.curves.values[name][mine], other.curves.values[name][theirs]
        both = np.isfinite(one) & np.isfinite(two)
        one, two = one[both], two[both]
        slack = max(run.curves.resolution.get(name, 0.0), other.curves.resolution.get(name, 0.0))
        if (np.abs(one - two) > slack + _ALIKE * np.maximum(np.abs(one), np.abs(two))).any():
            return False
        compared += len(one)
        telling += len(np.unique(one)) > 2
    return compared >= _ALIKE_VALUES and telling > 0
