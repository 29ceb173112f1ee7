"""`diagnose triage`: gathers what there is, asks for the assessment, prints and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diagnose.errors import DiagnoseError, ExitCode
from diagnose.triage import assess, merged
from diagnose.triage.advice import advise
from diagnose.triage.report import as_json, as_text
from taxonomy.assessment import assess as assess_observations
from taxonomy.facts import Scalar, scalar
from taxonomy.observations import parse_observation
from taxonomy.registry import library

if TYPE_CHECKING:
    from diagnose.console import Terminal
    from diagnose.curves import Curves
    from diagnose.triage.config import Difference


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
    warnings: list[str] = []
    observations = [parse_observation(text) for text in order.observed]
    if order.generations:
        from diagnose.triage.generations import read_generations

        observations += read_generations(order.generations)
    faulty = [_curves(log, order.run, warnings) for log in order.logs]
    healthy = [_curves(log, None, warnings) for log in order.healthy]
    stated, diff = _settings(order)
    said = _typed(order.context)
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
        from diagnose.triage.playbook import playbook_text

        if "-" in (*order.logs, *order.healthy):
            raise DiagnoseError("a playbook can't name stdin", "save the log to a file first")
        text = playbook_text(
            answer,
            cards,
            [Path(log) for log in order.logs],
            [Path(log) for log in order.healthy],
            said,
            order.playbook,
        )
        order.playbook.parent.mkdir(parents=True, exist_ok=True)
        order.playbook.write_text(terminal.outgoing(text), encoding="utf-8")
        terminal.say(f"wrote {order.playbook}; next: diagnose run {order.playbook}")
    return ExitCode.NOT_REPRODUCED if order.fail_on_symptom and answer.symptoms else ExitCode.OK


def _curves(log: str, run: int | None, warnings: list[str]) -> Curves:
    """Return the curves of one run of a log."""
    from diagnose.logs import read

    found = read(log)
    if run is not None:
        if run > len(found.runs):
            raise DiagnoseError(f"{found.source} holds {len(found.runs)} runs: there is no run {run}")
        return found.runs[run - 1].curves
    if len(found.runs) > 1:
        warnings.append(
            f"{found.source} holds {len(found.runs)} runs; the last one is judged (--run 1 for the first)"
        )
    return found.runs[-1].curves


def _typed(context: Sequence[str]) -> dict[str, Scalar]:
    """Return the facts typed as KEY=VALUE."""
    facts: dict[str, Scalar] = {}
    for text in context:
        key, found, value = text.partition("=")
        if not found or not key.strip():
            raise DiagnoseError(
                f"--context {text!r} is not KEY=VALUE", "as in --context rollout.backend=vllm"
            )
        key = key.strip()
        facts[key] = value.strip() if key.startswith("library.") else scalar(value)
    return facts


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
