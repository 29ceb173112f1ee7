"""An import without the words of its log: for what leaves the machine.

Names of metrics that frameworks log are public. A key that nobody knows may be called after a project, a validation
key after a data set, and a rejected line is quoted; none of them is needed to understand an import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from diagnose.anonymize import without_quotes
from diagnose.logs.model import Import, Rejected, Run
from diagnose.logs.names import EVERY
from diagnose.logs.text import count
from taxonomy.metrics import METRIC_BY_NAME


def without_names(found: Import) -> Import:
    """Return an import whose unknown keys have numbers for names, and whose notes and quotations are gone."""
    given: dict[str, str] = {}

    def hidden(key: str) -> str:
        if key in METRIC_BY_NAME or key in EVERY.names:
            return key
        return given.setdefault(key, f"‹key {len(given) + 1}›")

    notes = (f"{count(len(found.notes), 'note')} not shown, they name files",) if found.notes else ()
    return replace(
        found,
        runs=tuple(_run(run, hidden) for run in found.runs),
        rejected=tuple(
            Rejected(item.line, without_quotes(item.reason), item.file) for item in found.rejected
        ),
        notes=notes,
    )


def _run(run: Run, hidden: Callable[[str], str]) -> Run:
    return replace(
        run,
        names={hidden(raw): canonical for raw, canonical in run.names.items()},
        unmapped=tuple(hidden(key) for key in run.unmapped),
    )
