"""`diagnose triage`: gathers what there is, asks for the assessment, prints and writes it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diagnose.errors import DiagnoseError, ExitCode
from diagnose.triage import assess, merged
from diagnose.triage.advice import advise
from diagnose.triage.context import typed
from diagnose.triage.report import as_json, as_text
from taxonomy.assessment import Triage
from taxonomy.assessment import assess as assess_observations
from taxonomy.facts import Scalar
from taxonomy.observations import Observation, contradiction, parse_observation
from taxonomy.registry import library

if TYPE_CHECKING:
    from diagnose.console import Terminal
    from diagnose.curves import Curves
    from diagnose.logs import Import, Run
    from diagnose.triage.config import Difference

REASONS = 3
"""Kinds of rejected lines, and notes, that the warning about a log names."""


@dataclass(frozen=True)
class Order:
    """What is asked.

    Attributes:
        logs: Logs of the incident.
        healthy: Healthy logs.
        observed: Observations as typed.
        context: Facts as typed, KEY=VALUE.
        config: Resolved configuration of the run.
        good_config: That of a healthy run.
        generations: Folder of generated responses.
        run: Which run of a log that holds several, counted from 1; None for the last.
        playbook: File to write.
        fail_on_symptom: Whether a symptom is exit code 1.
        json: Whether stdout gets JSON.
        anonymize: Whether what is printed and written says nothing about where it comes from.
    """

    logs: tuple[str, ...] = ()
    healthy: tuple[str, ...] = ()
    observed: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    config: Path | None = None
    good_config: Path | None = None
    generations: Path | None = None
    run: int | None = None
    playbook: Path | None = None
    fail_on_symptom: bool = False
    json: bool = False
    anonymize: bool = False


def command(order: Order, terminal: Terminal) -> int:
    """Answer, print, write; return the exit code.

    Raises:
        DiagnoseError: Nothing was given to judge by, or something given can't be read.
    """
    if not (order.logs or order.observed or order.generations or order.config):
        raise DiagnoseError(
            "nothing to judge by", "diagnose triage LOG, or --observed actor/kl_loss=up:gradual"
        )
    if order.playbook and os.path.lexists(order.playbook):
        raise _exists(order.playbook)
    warnings: list[str] = []
    observations = _observed(order.observed)
    if order.generations:
        from diagnose.triage.generations import read_generations

        observations += read_generations(order.generations)
    faulty = [_curves(log, order.run, warnings) for log in order.logs]
    healthy = [_curves(log, None, warnings) for log in order.healthy]
    stated, diff = _settings(order)
    said, unusable = typed(order.context)
    warnings += unusable
    facts = merged(stated, said)
    answer = (
        assess(faulty, healthy, facts, more=observations)
        if faulty
        else assess_observations(observations, facts)
    )

    if order.anonymize:
        from diagnose.anonymize import Anonymizer, names_in

        files = [
            *order.logs,
            *order.healthy,
            *map(str, filter(None, (order.config, order.good_config, order.generations))),
        ]
        terminal = replace(terminal, anonymizer=Anonymizer.of_machine(files, names_in(merged(stated, said))))
    cards = library()
    first = min((int(run.steps_N[0]) for run in faulty if len(run.steps_N)), default=None)
    advice = advise(answer, cards, first)
    for text in warnings:
        terminal.warn(text)
    if order.json:
        terminal.json(as_json(answer, advice, [*order.logs], warnings, diff))
    else:
        terminal.data(as_text(answer, advice, _headline(order, faulty, healthy), cards, diff))
    if order.playbook:
        _write_playbook(order.playbook, order, answer, said, terminal)
    return ExitCode.NOT_REPRODUCED if order.fail_on_symptom and answer.symptoms else ExitCode.OK


def _curves(log: str, run: int | None, warnings: list[str]) -> Curves:
    """Return the curves of one run of a log."""
    from diagnose.logs import read

    found = read(log)
    if run is not None and run > len(found.runs):
        raise DiagnoseError(f"{found.source} holds {len(found.runs)} runs: there is no run {run}")
    if run is None and len(found.runs) > 1:
        warnings.append(
            f"{found.source} holds {len(found.runs)} runs; the last one is judged (--run 1 for the first)"
        )
    judged = found.runs[-1 if run is None else run - 1]
    if text := import_warning(found, judged):
        warnings.append(text)
    return judged.curves


def import_warning(found: Import, run: Run) -> str:
    """Return what was lost or doubtful in reading a log, as one line; "" for nothing."""
    from diagnose.logs.text import count

    parts = []
    if found.counts.rejected:
        reasons = Counter(item.reason.partition(":")[0] for item in found.rejected)
        why = ", ".join(f"{number} x {reason}" for reason, number in reasons.most_common(REASONS))
        first = f"; first: line {found.rejected[0].line}" if found.rejected else ""
        parts.append(f"{count(found.counts.rejected, 'line')} rejected ({why}{first})")
    if run.out_of_order:
        parts.append(f"{count(run.out_of_order, 'line')} out of order, sorted by step")
    if run.conflicts:
        parts.append(f"{count(run.conflicts, 'value')} logged twice, differently: the later ones count")
    parts += found.notes[:REASONS]
    if (more := len(found.notes) - REASONS) > 0:
        parts.append(f"and {more} more notes")
    return f"{found.source}: {'; '.join(parts)} (diagnose logs tells more)" if parts else ""


def _observed(texts: Sequence[str]) -> list[Observation]:
    """Return the observations typed.

    Raises:
        DiagnoseError: Two of them exclude each other.
    """
    from diagnose.triage.aliases import canonical_names

    found = [parse_observation(text, canonical_names) for text in texts]
    if pair := contradiction(found):
        both = " and ".join(f"{item.metric}={item.direction}" for item in pair)
        raise DiagnoseError(f"--observed contradicts itself: {both}", "say one of the two")
    return found


def _exists(target: Path) -> DiagnoseError:
    return DiagnoseError(f"{target} exists already", "give another name to --write-playbook, or remove it")


def _write_playbook(
    target: Path, order: Order, answer: Triage, said: dict[str, Scalar], terminal: Terminal
) -> None:
    """Write the playbook to run next, unless there is nothing to replay."""
    from diagnose.triage.playbook import playbook_text

    if "-" in (*order.logs, *order.healthy):
        raise DiagnoseError("a playbook can't name stdin", "save the log to a file first")
    text = playbook_text(
        answer,
        library(),
        [Path(log) for log in order.logs],
        [Path(log) for log in order.healthy],
        said,
        target,
    )
    if answer.verdict == "healthy":
        terminal.say(f"nothing to replay, the log shows no fault: {target} is not written")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(terminal.outgoing(text))
    except FileExistsError as error:
        raise _exists(target) from error
    terminal.say(f"wrote {target}; next: diagnose run {target}")


def _settings(order: Order) -> tuple[dict[str, Scalar], tuple[Difference, ...]]:
    """Return the facts of the configuration, and what differs from the good one."""
    if order.config is None:
        if order.good_config is not None:
            raise DiagnoseError("--good-config is compared with --config", "give both")
        return {}, ()
    from diagnose.triage.config import differences, facts_of, read_settings

    bad = read_settings(order.config)
    if order.good_config is None:
        return facts_of(bad), ()
    diff = differences(read_settings(order.good_config), bad)
    changed: dict[str, Scalar] = {f"changed:{fault}": True for item in diff for fault in item.faults}
    return facts_of(bad) | changed, diff


def _headline(order: Order, faulty: Sequence[Curves], healthy: Sequence[Curves]) -> str:
    """Return what the answer rests on."""
    parts = []
    for log, run in zip(order.logs, faulty, strict=True):
        span = f", {int(run.steps_N[0])} to {int(run.steps_N[-1])}" if len(run.steps_N) else ""
        parts.append(f"{log}: {len(run.steps_N)} steps{span}, {len(run.values)} metrics")
    if healthy:
        parts.append(f"against {len(healthy)} healthy log{'s' * (len(healthy) > 1)}")
    elif faulty:
        parts.append("against its own past")
    if order.observed:
        parts.append(f"{len(order.observed)} observations by hand")
    if order.generations:
        parts.append(f"responses in {order.generations}")
    return "; ".join(parts)
