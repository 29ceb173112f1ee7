"""`diagnose triage`: gathers what there is, asks for the assessment, prints and writes it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diagnose.errors import DiagnoseError, ExitCode
from diagnose.triage import assess, merged
from diagnose.triage.advice import advise
from diagnose.triage.context import private_words, typed
from diagnose.triage.private import without_values
from diagnose.triage.report import as_json, as_text
from diagnose.triage.runs import Glance, glances
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
    healthy = [_Judged.last(log) for log in order.healthy]
    stated, diff = _settings(order)
    said, unusable = typed(order.context)
    warnings += unusable
    facts = merged(stated, said)
    twins = [log.curves for log in healthy]

    def judge(runs: Sequence[Curves]) -> Triage:
        if not runs:
            return assess_observations(observations, facts)
        return assess(runs, twins, facts, more=observations)

    faulty, others = _chosen(order, lambda run: judge([run]))
    answer = judge([log.curves for log in faulty])
    warnings += _of_reading([*faulty, *healthy], order.anonymize)
    if order.anonymize:
        terminal = replace(terminal, anonymizer=_anonymizer(order, [*faulty, *healthy], stated, said))
        diff = tuple(without_values(change) for change in diff)
    cards = library()
    first = min((int(log.curves.steps_N[0]) for log in faulty if len(log.curves.steps_N)), default=None)
    advice = advise(answer, cards, first)
    for text in warnings:
        terminal.warn(text)
    if order.json:
        terminal.json(as_json(answer, advice, [*order.logs], warnings, diff, others))
    else:
        terminal.data(as_text(answer, advice, _headline(order, faulty, healthy), cards, diff, others))
    if order.playbook:
        _write_playbook(order.playbook, order, faulty, healthy, answer, said, terminal)
    return ExitCode.NOT_REPRODUCED if order.fail_on_symptom and answer.symptoms else ExitCode.OK


@dataclass(frozen=True)
class _Judged:
    """One run of a log.

    Attributes:
        path: The log, as typed.
        found: What was read of it.
        index: Place of the run in it.
    """

    path: str
    found: Import
    index: int

    @staticmethod
    def last(path: str) -> _Judged:
        from diagnose.logs import read

        found = read(path)
        return _Judged(path, found, len(found.runs) - 1)

    @property
    def curves(self) -> Curves:
        return self.found.runs[self.index].curves

    @property
    def is_last(self) -> bool:
        """Whether it is the run that anything else takes which is given the log."""
        return self.index == len(self.found.runs) - 1


def _chosen(
    order: Order, judge: Callable[[Curves], Triage]
) -> tuple[list[_Judged], tuple[tuple[str, tuple[Glance, ...]], ...]]:
    """Return the runs that are asked about, and all runs of logs that hold several, at a glance."""
    chosen, several = [], []
    for path in order.logs:
        log = _Judged.last(path)
        if order.run is not None:
            if order.run > (held := len(log.found.runs)):
                said = f"{held} runs" if held > 1 else "one run"
                raise DiagnoseError(f"{log.found.source} holds {said}: there is no run {order.run}")
            log = replace(log, index=order.run - 1)
        elif seen := glances(log.found, judge):
            log = replace(log, index=next(item.number for item in seen if item.judged) - 1)
            several.append((path, seen))
        chosen.append(log)
    return chosen, tuple(several)


def _of_reading(logs: Sequence[_Judged], anonymize: bool) -> list[str]:
    """Return the warnings about logs: several runs, what was lost in reading."""
    warnings = []
    for log in logs:
        found = log.found
        if (held := len(found.runs)) > 1:
            which = f"run {log.index + 1} is judged" + ("" if log.is_last else ", not the last")
            warnings.append(f"{found.source} holds {held} runs; {which} (--run N for another)")
        if anonymize:
            from diagnose.logs.private import without_names

            found = without_names(found)
        if text := import_warning(found, found.runs[log.index]):
            warnings.append(text)
    return warnings


def _anonymizer(
    order: Order, logs: Sequence[_Judged], stated: Mapping[str, Scalar], said: Mapping[str, Scalar]
) -> Callable[[str], str]:
    """Return what everything that leaves the machine passes through."""
    from diagnose.anonymize import Anonymizer, names_in

    given = map(str, filter(None, (order.config, order.good_config, order.generations)))
    runs = [run for log in logs for run in log.found.runs]
    return Anonymizer.of_machine(
        [*order.logs, *order.healthy, *given, *(run.file for run in runs)],
        [
            *names_in(merged(stated, said)),
            *private_words(order.context, stated),
            *(run.label for run in runs),
        ],
    )


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
    target: Path,
    order: Order,
    faulty: Sequence[_Judged],
    healthy: Sequence[_Judged],
    answer: Triage,
    said: dict[str, Scalar],
    terminal: Terminal,
) -> None:
    """Write the playbook to run next, unless there is nothing to replay.

    It names the logs. Where it must not, or where it is about a run that is not the last of its log, the curves are
    written beside it and named instead.
    """
    from diagnose.triage.playbook import playbook_name, playbook_text

    if "-" in (*order.logs, *order.healthy):
        raise DiagnoseError("a playbook can't name stdin", "save the log to a file first")
    name = playbook_name(terminal.outgoing(target.stem))
    copies: dict[Path, Curves] = {}

    def path_of(log: _Judged, role: str) -> Path:
        if log.is_last and not order.anonymize:
            return Path(log.path)
        copy = target.with_name(f"{name}.{role}.jsonl")
        copies[copy] = replace(log.curves, source=copy.name)
        return copy

    text = playbook_text(
        answer,
        library(),
        [path_of(log, f"faulty_{at}") for at, log in enumerate(faulty, 1)],
        [path_of(log, f"healthy_{at}") for at, log in enumerate(healthy, 1)],
        said,
        target,
        name,
    )
    if answer.verdict == "healthy":
        terminal.say(f"nothing to replay, the log shows no fault: {target} is not written")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if there := next((copy for copy in copies if os.path.lexists(copy)), None):
        raise _exists(there)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(terminal.outgoing(text))
    except FileExistsError as error:
        raise _exists(target) from error
    for copy, curves in copies.items():
        from diagnose.logs import write_curves

        write_curves(curves, copy)
    beside = f", and {' and '.join(copy.name for copy in copies)} beside it" if copies else ""
    terminal.say(f"wrote {target}{beside}; next: diagnose run {target}")


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


def _headline(order: Order, faulty: Sequence[_Judged], healthy: Sequence[_Judged]) -> str:
    """Return what the answer rests on."""
    from diagnose.logs.text import count

    parts = []
    for log in faulty:
        run = log.curves
        which = f" run {log.index + 1} of {len(log.found.runs)}" if len(log.found.runs) > 1 else ""
        span = f", {int(run.steps_N[0])} to {int(run.steps_N[-1])}" if len(run.steps_N) else ""
        parts.append(
            f"{log.path}{which}: {count(len(run.steps_N), 'step')}{span}, {count(len(run.values), 'metric')}"
        )
    if healthy:
        parts.append(f"against {len(healthy)} healthy log{'s' * (len(healthy) > 1)}")
    elif faulty:
        parts.append("against its own past")
    if order.observed:
        parts.append(f"{count(len(order.observed), 'observation')} by hand")
    if order.generations:
        parts.append(f"responses in {order.generations}")
    return "; ".join(parts)
