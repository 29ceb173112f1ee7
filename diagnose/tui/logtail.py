"""The ends of a run folder's log files, as literal text."""

from __future__ import annotations

from pathlib import Path

from diagnose.report.text import literal

TAIL_BYTES = 16_384
"""What is read of each file: a worker that prints without end must not fill the screen."""


def log_files(run_dir: Path) -> list[Path]:
    """Return the runner's log and those of the workers, in that order."""
    return [
        path for path in [run_dir / "runner.log", *sorted(run_dir.glob("worker_*.log"))] if path.is_file()
    ]


def tail_text(path: Path) -> str:
    """Return the end of a file from the start of a line on; what can't be read says why instead."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return text if size <= TAIL_BYTES else text.partition("\n")[2]


def literal_lines(text: str) -> str:
    """Return a text line by line without control sequences."""
    return "".join(f"{literal(line)}\n" for line in text.splitlines())
