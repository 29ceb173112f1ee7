"""The answer leaves the program: files for CI and people, stdout, and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from diagnose.console import Terminal
from diagnose.errors import ExitCode
from diagnose.result import Result, Verdict

if TYPE_CHECKING:
    from diagnose.report.evidence import Evidence


def write_answer(
    result: Result,
    expect: Mapping[str, str],
    evidence: Callable[[], Evidence],
    files: Mapping[str, Path],
    json: bool,
    terminal: Terminal,
) -> None:
    """Write the reports that were asked for, then the answer to stdout.

    Args:
        result: The result.
        expect: What the playbook expects; JUnit is the one report that shows it.
        evidence: Reads the curves, called only where a report is written.
        files: Report name → file.
        json: Whether stdout gets JSON instead of the table.
        terminal: The terminal.
    """
    if files:
        from diagnose.report import reports
        from diagnose.report.junit import to_junit

        curves = evidence()
        for name, path in files.items():
            text = to_junit(result, expect) if name == "junit" else reports()[name].render(result, curves)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(terminal.outgoing(text), encoding="utf-8")
            terminal.say(f"wrote {path}")
    if expect:
        from diagnose.report.junit import unmet

        for complaint in unmet(result, expect):
            terminal.warn(complaint)
    if json:
        from diagnose.report.json import dumps

        terminal.data(dumps(result))
    elif result.status == "completed" or result.score.ranking:
        from diagnose.report.terminal import result_view

        terminal.show(result_view(result))


_EXIT = {
    Verdict.REPRODUCED: ExitCode.OK,
    Verdict.REPRODUCED_NOT_SPECIFIC: ExitCode.OK,
    Verdict.NO_FAULT: ExitCode.OK,
    Verdict.PARTLY: ExitCode.NOT_REPRODUCED,
    Verdict.NOT_REPRODUCED: ExitCode.NOT_REPRODUCED,
    Verdict.INJECTION_FAILED: ExitCode.RUN_FAILED,
    Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
}


def exit_code(result: Result, expect: Mapping[str, str] | None = None) -> ExitCode:
    """Return the exit code of a result: that of its verdict, or of `expect` (0 met, 1 unmet) where there is one."""
    if result.status != "completed":
        return ExitCode.INTERRUPTED if result.status == "interrupted" else ExitCode.RUN_FAILED
    if expect:
        from diagnose.report.junit import unmet

        return ExitCode.NOT_REPRODUCED if unmet(result, expect) else ExitCode.OK
    return _EXIT[result.score.verdict]
