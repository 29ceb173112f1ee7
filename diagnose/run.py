"""`diagnose run` behind its options: find or make a run folder, have a runner at work, watch it, report."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from diagnose.console import Terminal
from diagnose.errors import ExitCode, RunError
from diagnose.runner import start
from diagnose.store import RunFolder, list_runs, open_folder, read_json
from diagnose.viewer import Watched, follow

if TYPE_CHECKING:
    from diagnose.result import Result

STOP_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Outputs:
    """Where the answer goes.

    Attributes:
        files: Report name → file.
        json: Whether stdout gets the JSON document instead of the table.
    """

    files: dict[str, Path] = field(default_factory=dict)
    json: bool = False

    def resume_command(self, folder: RunFolder) -> str:
        """Return the exact command that resumes a run with the same outputs."""
        words = ["diagnose", "run", "--resume", str(folder.path)]
        words += [word for name, path in self.files.items() for word in (f"--{name}", str(path))]
        return shlex.join([*words, "--json"] if self.json else words)


def find(target: str | None, name: str | None = None) -> RunFolder:
    """Return the run folder that `--resume` means.

    Args:
        target: A run folder, None for the newest.
        name: Playbook name that the newest must have.

    Raises:
        RunError: There is none.
    """
    if target is not None:
        return open_folder(Path(target))
    for folder in list_runs():
        session = read_json(folder.session)
        if name is None or (isinstance(session, dict) and session.get("name") == name):
            return folder
    of = f" of playbook {name}" if name else ""
    raise RunError(f"there is no run{of} to resume", "start one: diagnose run PLAYBOOK")


def carry_on(folder: RunFolder, terminal: Terminal, outputs: Outputs) -> int:
    """Bring a run to its end and report it: start a runner, or join the one at work; return the exit code.

    A run that is complete is scored anew and reported; nothing is run twice. Ctrl-C stops the runner and
    prints the command that resumes.
    """
    watched = _watch(folder, terminal, outputs)
    if watched is None:
        terminal.say(f"interrupted; finished runs are kept in {folder.path}")
        terminal.say(f"resume with: {outputs.resume_command(folder)}", level=-1)
        report(unfinished(folder, "interrupted", "interrupted by the user"), folder, terminal, outputs)
        return ExitCode.INTERRUPTED
    if watched.end is None:
        watched.problem = ("the runner died without a word (killed, or out of memory)", f"see {folder.log}")
    if watched.problem or watched.end is None or watched.end.status != "completed":
        message, mend = watched.problem or ("the run was interrupted", "")
        status = "interrupted" if watched.end and watched.end.status == "interrupted" else "failed"
        terminal.error(message, mend)
        terminal.say(f"resume with: {outputs.resume_command(folder)}", level=-1)
        report(unfinished(folder, status, message), folder, terminal, outputs)
        return watched.end.exit_code if watched.end else ExitCode.RUN_FAILED
    from diagnose.report.json import from_json

    report(from_json(read_json(folder.result) or {}), folder, terminal, outputs)
    return watched.end.exit_code


def _watch(folder: RunFolder, terminal: Terminal, outputs: Outputs) -> Watched | None:
    """Have a runner at work and follow it to its end; None when the user stopped it."""
    process: subprocess.Popen[bytes] | None = None
    try:
        if folder.is_alive():
            terminal.say(f"joining the runner at work in {folder.path}")
            return follow(folder, terminal)
        offset = folder.events.stat().st_size if folder.events.exists() else 0
        process = start(folder)
        terminal.say(f"run folder: {folder.path}")
        return follow(folder, terminal, process, offset)
    except KeyboardInterrupt:
        terminal.say("stopping …")
        if process is None:
            folder.stop(STOP_PATIENCE_S)
        else:
            process.terminate()
            try:
                process.wait(STOP_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return None


def unfinished(folder: RunFolder, status: str, reason: str) -> Result:
    """Return a result that says only that there is none, and why."""
    from dataclasses import asdict

    from diagnose.pipeline import describe_proxy
    from diagnose.result import Result, Score, Verdict
    from diagnose.session import load

    session = load(folder)
    return Result(
        status=status,
        score=Score(verdict=Verdict.INCONCLUSIVE, reasons=(reason,), ranking=()),
        symptom=session.symptom,
        name=session.name,
        proxy=describe_proxy(session, folder),
        engine=session.engine,
        recipe=asdict(session.recipe),
        seeds=session.seeds,
        not_tried={planned.fault: "the run did not come to its end" for planned in session.candidates},
        failures={},
        wall_s=0.0,
        run_dir=str(folder.path),
    )


def report(result: Result, folder: RunFolder, terminal: Terminal, outputs: Outputs) -> None:
    """Write the files that were asked for, and the answer to stdout (a table only for a completed run)."""
    if outputs.files:
        from diagnose.report import reports
        from diagnose.report.evidence import read_evidence
        from diagnose.report.junit import to_junit
        from diagnose.session import load

        evidence = read_evidence(folder.path)
        for name, path in outputs.files.items():
            if name == "junit":
                text = to_junit(result, load(folder).expect)  # the one report that knows what was expected
            else:
                text = reports()[name].render(result, evidence)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            terminal.say(f"wrote {path}")
    if outputs.json:
        from diagnose.report.json import dumps

        terminal.data(dumps(result))
    elif result.status == "completed":
        from diagnose.report.terminal import result_view

        terminal.show(result_view(result))
