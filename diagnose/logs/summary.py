"""What the importer understood of a log: the JSON of ``diagnose logs`` and a rendering for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from diagnose.logs.model import Import, Rejected, Run
from diagnose.logs.text import count
from taxonomy.metrics import METRIC_BY_NAME

if TYPE_CHECKING:
    from rich.console import Group

SHOWN = 20
"""Unmapped keys and rejected lines that the rendering for people lists."""
_RIGHT = (2, 3)


def as_json(imported: Import) -> dict[str, Any]:
    """Return the summary of an import as JSON-able data (``"schema": 1``).

    Each run has ``steps``, ``first_step``, ``last_step``, ``metrics`` (canonical name → ``raw`` key, ``unit``, ``n``
    finite values, ``nonfinite`` values, ``resolution`` where the log is rounded), ``unmapped`` keys and the
    ``rejected`` lines from its first line up to the next run's. ``label`` and ``file`` are there where a log names
    its runs or is a folder; ``notes`` says what of a folder was left out.
    """
    return {
        "schema": 1,
        "source": imported.source,
        "format": imported.format,
        "lines": imported.counts.lines,
        "records": imported.counts.records,
        "rejected": imported.counts.rejected,
        "notes": list(imported.notes),
        "runs": [
            _run(run, rejected)
            for run, rejected in zip(imported.runs, _rejected_by_run(imported), strict=True)
        ],
    }


def _run(run: Run, rejected: list[Rejected]) -> dict[str, Any]:
    curves = run.curves
    return {
        "steps": len(curves.steps_N),
        "first_step": int(curves.steps_N[0]) if len(curves.steps_N) else None,
        "last_step": int(curves.steps_N[-1]) if len(curves.steps_N) else None,
        "metrics": {
            canonical: {
                "raw": raw,
                "unit": METRIC_BY_NAME[canonical].unit,
                "n": int(np.isfinite(curves.values[canonical]).sum()),
                "nonfinite": len(curves.nonfinite.get(canonical, ())),
            }
            | ({"resolution": curves.resolution[canonical]} if canonical in curves.resolution else {})
            for raw, canonical in run.names.items()
        },
        "unmapped": list(run.unmapped),
        "rejected": [
            {"line": item.line, "reason": item.reason} | ({"file": item.file} if item.file else {})
            for item in rejected
        ],
        "events": [{"kind": kind, "step": step} for kind, step in curves.events],
        "duplicates": run.duplicates,
        "conflicts": run.conflicts,
        "replaced": run.replaced,
        "out_of_order": run.out_of_order,
    } | {name: text for name, text in (("label", run.label), ("file", run.file)) if text}


def _rejected_by_run(imported: Import) -> list[list[Rejected]]:
    """Return the rejected lines of each run; those before the first run go with it."""
    found: list[list[Rejected]] = [[] for _ in imported.runs]
    for item in imported.rejected:
        own = [index for index, run in enumerate(imported.runs) if run.file in ("", item.file)] or [0]
        before = [index for index in own if imported.runs[index].first_line <= item.line]
        found[before[-1] if before else own[0]].append(item)
    return found


def as_text(imported: Import) -> str:
    """Return the summary as plain lines."""
    return "\n".join(_lines(imported)) + "\n"


def _lines(imported: Import) -> Iterator[str]:
    yield _headline(imported)
    for index, (run, rejected) in enumerate(zip(imported.runs, _rejected_by_run(imported), strict=True), 1):
        yield ""
        yield _run_headline(run, index, len(imported.runs))
        rows = _rows(run)
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            cells = [
                cell.rjust(width) if column in _RIGHT else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            yield ("  " + "  ".join(cells)).rstrip()
        for note in _notes(run, rejected):
            yield f"  {note}"
    if imported.notes:
        yield ""
        yield from imported.notes[:SHOWN]


def as_rich(imported: Import) -> Group:
    """Return the summary for a rich console. All foreign text is literal: no markup is interpreted."""
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(_headline(imported))]
    for index, (run, rejected) in enumerate(zip(imported.runs, _rejected_by_run(imported), strict=True), 1):
        header, *rows = _rows(run)
        table = Table(
            title=Text(_run_headline(run, index, len(imported.runs))), title_justify="left", box=None
        )
        for column, name in enumerate(header):
            table.add_column(Text(name), justify="right" if column in _RIGHT else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        parts += [Text(""), table, *(Text(note) for note in _notes(run, rejected))]
    if imported.notes:
        parts += [Text(""), *(Text(note) for note in imported.notes[:SHOWN])]
    return Group(*parts)


def _headline(imported: Import) -> str:
    counts = imported.counts
    return (
        f"{imported.source}: {imported.format}, {count(len(imported.runs), 'run')}, "
        f"{count(counts.lines, 'line')}, {count(counts.records, 'metric line')}, {counts.rejected} rejected"
    )


def _run_headline(run: Run, index: int, of: int) -> str:
    steps_N = run.curves.steps_N
    span = f", {int(steps_N[0])} to {int(steps_N[-1])}" if len(steps_N) else ""
    lines = f"lines {run.first_line} to {run.last_line}"
    name = " ".join(text for text in (run.file, run.label) if text)
    return f"run {index} of {of}{f' ({name})' if name else ''}: {count(len(steps_N), 'step')}{span} ({lines})"


def _rows(run: Run) -> list[tuple[str, ...]]:
    """Return the table, header first: canonical metric, unit, values, non-finite values, where it comes from."""
    rows: list[tuple[str, ...]] = [("metric", "unit", "values", "not finite", "read from")]
    for raw, canonical in run.names.items():
        values_N = run.curves.values[canonical]
        bad = len(run.curves.nonfinite.get(canonical, ()))
        metric = METRIC_BY_NAME[canonical]
        name = canonical + ("" if metric.ranks else " (not scored)")
        origin = "" if raw == canonical else raw
        rows.append((name, metric.unit, str(int(np.isfinite(values_N).sum())), str(bad or ""), origin))
    return rows


def _notes(run: Run, rejected: list[Rejected]) -> list[str]:
    """Return what else there is to say about a run, a line each."""
    notes = [f"{kind} at step {step}" for kind, step in run.curves.events[:SHOWN]]
    if run.replaced:
        notes.append(f"{count(run.replaced, 'step')} trained again after a resume: the later values count")
    if run.duplicates:
        notes.append(f"{count(run.duplicates, 'value')} logged twice")
    if run.out_of_order:
        notes.append(f"{count(run.out_of_order, 'line')} out of order: sorted by step")
    if run.conflicts:
        notes.append(f"{count(run.conflicts, 'value')} logged twice, differently: the later ones count")
    if rounded := run.curves.resolution:
        notes.append(
            "all values are rounded to a fixed number of decimals: a 0 may be a small number"
            if len(rounded) == len(run.curves.values)
            else f"rounded to a fixed number of decimals, so that a 0 may be a small number: {_some(tuple(rounded))}"
        )
    if run.unmapped:
        notes.append(f"{count(len(run.unmapped), 'key')} not used: {_some(run.unmapped)}")
    for item in rejected[:SHOWN]:
        where = f"{item.file} " if item.file != run.file else ""
        notes.append(f"{where}line {item.line} rejected: {item.reason}")
    if len(rejected) > SHOWN:
        notes.append(f"and {count(len(rejected) - SHOWN, 'more line')} rejected")
    return notes


def _some(keys: tuple[str, ...]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(keys[:SHOWN]) + more
