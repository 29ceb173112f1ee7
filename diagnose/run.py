"""`diagnose run` behind its options: find or make a run folder, have a runner at work, watch it, report."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from diagnose.console import Terminal
from diagnose.errors import DiagnoseError, ExitCode, RunError
from diagnose.jobs import read_outcome
from diagnose.runner import start
from diagnose.store import RunFolder, list_runs, open_folder, read_json, write_json
from diagnose.viewer import Watched, follow

if TYPE_CHECKING:
    from diagnose.prepare import Overrides, Prepared
    from diagnose.result import Result

STOP_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Outputs:
    """Where the answer goes.

    Attributes:
        files: Report name → file.
        json: Whether stdout gets the JSON document instead of the table.
        wishes: What is wanted beside the verdict: "probe", "try_fix".
    """

    files: dict[str, Path] = field(default_factory=dict)
    json: bool = False
    wishes: tuple[str, ...] = ()

    def resume_command(self, folder: RunFolder) -> str:
        """Return the exact command that resumes a run with the same outputs."""
        words = ["diagnose", "run", "--resume", str(folder.path)]
        words += [word for name, path in self.files.items() for word in (f"--{name}", str(path))]
        words += [f"--{wish.replace('_', '-')}" for wish in self.wishes]
        return shlex.join([*words, "--json"] if self.json else words)


def find(target: str | None, out: Path | None = None) -> RunFolder:
    """Return the run folder that `--resume` means.

    Args:
        target: A run folder, or a playbook whose newest run is meant; None for the newest of all.
        out: A run folder, where `--out` names one.

    Raises:
        RunError: There is none.
    """
    if out is not None or (target is not None and Path(target).is_dir()):
        return open_folder(out or Path(str(target)))
    name = None
    if target is not None:
        from diagnose import playbook

        name = playbook.load(playbook.find(target)).name
    for folder in list_runs():
        session = read_json(folder.session)
        if name is None or (isinstance(session, dict) and session.get("name") == name):
            return folder
    of = f" of {name}" if name else ""
    raise RunError(f"there is no run{of} to resume", "start one: diagnose run PLAYBOOK")


def begin(
    playbook: str,
    overrides: Overrides,
    out: Path | None,
    allow_command: bool,
    dry_run: bool,
    terminal: Terminal,
    outputs: Outputs,
) -> int:
    """Prepare a run, make its folder, carry it out; with `dry_run` only print what would be done."""
    from diagnose.prepare import open_run, prepare

    prepared = prepare(playbook, overrides)
    for warning in prepared.warnings:
        terminal.warn(warning)
    if dry_run:
        _print_plan(prepared, terminal, out)
        return ExitCode.OK
    allow(prepared.commands, allow_command, terminal)
    if short := _shortage(prepared):
        terminal.warn(short)
    return carry_on(open_run(prepared, out), terminal, outputs)


def allow(commands: Sequence[str], allowed: bool, terminal: Terminal) -> None:
    """Show what a playbook would execute, and go on only when the user allows it.

    Raises:
        DiagnoseError: It was not allowed.
    """
    if not commands:
        return
    terminal.say("this playbook runs commands of its own:", level=-1)
    for command in commands:
        terminal.say(f"  {command}", level=-1)
    if not allowed and not (terminal.interactive and typer.confirm("Run them?", err=True)):
        raise DiagnoseError(
            "the commands of this playbook were not allowed", "read them, then add: --allow-command"
        )


def _print_plan(prepared: Prepared, terminal: Terminal, out: Path | None) -> None:
    """Print what a run would do."""
    from diagnose.prepare import plan_data

    plan = plan_data(prepared, out)
    if terminal.json_only:
        terminal.json(plan)
        return
    proxy = plan["proxy"]
    cut = f", {proxy['experts']} experts by {proxy['strategy']}" if "experts" in proxy else ""
    terminal.data(f"{plan['name']}: {plan['symptom']}")
    terminal.data(f"proxy: {proxy['source']} {proxy['checkpoint']}{cut}")
    more = ", then strengths and further seeds of those in front" if plan["race"] else ""
    terminal.data(
        f"runs: {len(plan['runs'])} of {plan['recipe']['steps']} steps on {plan['workers']} workers{more}, "
        + (f"at most {plan['budget_s']:g} s" if plan["budget_s"] else "no time limit")
    )
    if short := _shortage(prepared):
        terminal.data(short)
    rows = [
        (
            item["fault"],
            ", ".join(f"{name}={value:g}" for name, value in item["params"].items()),
            f"{item['strength']:g}",
            str(item["from_step"]),
        )
        for item in plan["candidates"]
    ]
    terminal.table(("candidate", "parameters", "strength", "from step"), rows, numbers=2)
    for fault, why in plan["not_tried"].items():
        terminal.data(f"not tried: {fault}: {why}")
    for command in plan["commands"]:
        terminal.data(f"would run: {command}")
    for line in plan.get("scaling", ()):
        terminal.data(f"scaled: {line}")
    for run, line in plan.get("command_lines", {}).items():
        terminal.data(f"\n# {run}" + (f", a Ray job at {line['address']}" if "address" in line else ""))
        if line.get("runtime_env"):
            terminal.data(f"# runtime_env: {json.dumps(line['runtime_env'])}")
        assignments = [f"{name}={shlex.quote(value)}" for name, value in line["environment"].items()]
        terminal.data(" ".join([*assignments, shlex.join(line["command"])]))


def _shortage(prepared: Prepared) -> str:
    """Say that the time limit is too small for all candidates, as far as that is known beforehand; "" otherwise."""
    from diagnose.pace import shortage, step_pace_s

    session = prepared.session
    each = 1 if session.race else len(session.seeds)
    counts = (len(session.candidates), len(session.seeds), each)
    short = shortage(session.budget_s, step_pace_s(session), session.recipe.steps, session.workers, counts)
    return (
        f"the time limit of {session.budget_s:g} s: {short} (--budget SECONDS, 0 for none)" if short else ""
    )


def add_time(folder: RunFolder, seconds: float) -> None:
    """Let the replays of a run take more time; what was left out for want of it is due again.

    The seconds count from now: a budget that was overrun, because an answer needs some replays whatever they cost, does
    not eat them.

    Raises:
        RunError: A runner is at work, the run has no budget, or `seconds` is nothing.
    """
    session = read_json(folder.session)
    session = session if isinstance(session, dict) else {}
    budget_s = session.get("budget_s")
    if folder.is_alive():
        raise RunError(f"a runner is at work in {folder.path}", "wait for its end, or stop it")
    if not budget_s:
        raise RunError(f"the run in {folder.path} has no time limit", "resume it without --budget")
    if not (seconds > 0 and math.isfinite(seconds)):
        raise RunError(f"{seconds:g} more seconds are no more time", "name a number above 0")
    done = [found for home in folder.runs.glob("*") if (found := read_outcome(home))]
    spent_s = sum(found.wall_s for found in done) / max(session.get("workers", 1), 1)
    folder.add_time(max(0.0, spent_s - budget_s - folder.added_s()) + seconds)


def carry_on(folder: RunFolder, terminal: Terminal, outputs: Outputs) -> int:
    """Bring a run to its end and report it: start a runner, or join the one at work; return the exit code.

    A run that is complete is scored anew and reported; nothing is run twice. Ctrl-C stops the runner and
    prints the command that resumes.
    """
    if outputs.wishes:
        write_json(folder.wishes, dict.fromkeys(outputs.wishes, True))
    watched = _watch(folder, terminal, outputs)
    if watched is None:
        terminal.say(f"interrupted; finished runs are kept in {folder.path}")
        terminal.say(f"resume with: {outputs.resume_command(folder)}", level=-1)
        _report(_so_far(folder, "interrupted", "interrupted by the user"), folder, terminal, outputs)
        return ExitCode.INTERRUPTED
    if watched.end is None:
        watched.problem = ("the runner died without a word (killed, or out of memory)", f"see {folder.log}")
    if watched.problem or watched.end is None or watched.end.status != "completed":
        message, mend = watched.problem or ("the run was interrupted", "")
        status = "interrupted" if watched.end and watched.end.status == "interrupted" else "failed"
        terminal.error(message, mend)
        terminal.say(f"resume with: {outputs.resume_command(folder)}", level=-1)
        _report(_so_far(folder, status, message), folder, terminal, outputs)
        return watched.end.exit_code if watched.end else ExitCode.RUN_FAILED
    from diagnose.report.json import from_json

    _report(from_json(read_json(folder.result) or {}), folder, terminal, outputs)
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
                process.wait(STOP_PATIENCE_S)  # it scores what is done
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
                process.wait()
        return None


def _so_far(folder: RunFolder, status: str, reason: str) -> Result:
    """Return the verdict on what is done: as the runner left it, else made now; without one the reason alone."""
    from diagnose.pipeline import worked_s
    from diagnose.report.json import from_json
    from diagnose.scoring import so_far

    stored = read_json(folder.result)
    if isinstance(stored, dict) and stored.get("status") == status:
        return from_json(stored)
    try:
        found = so_far(folder, status, worked_s(folder))
    except (DiagnoseError, OSError):
        found = None  # what went wrong before is the message; this is only what comes of it
    return found or unfinished(folder, status, reason)


def unfinished(folder: RunFolder, status: str, reason: str) -> Result:
    """Return a result that says only that there is none, and why."""
    from dataclasses import asdict

    from diagnose.result import Result, Score, Verdict
    from diagnose.scoring import describe_proxy
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


def _report(result: Result, folder: RunFolder, terminal: Terminal, outputs: Outputs) -> None:
    """Write the answer wherever it was asked for."""
    from diagnose.answer import write_answer
    from diagnose.report.evidence import read_evidence
    from diagnose.session import load

    write_answer(
        result, load(folder).expect, lambda: read_evidence(folder.path), outputs.files, outputs.json, terminal
    )
