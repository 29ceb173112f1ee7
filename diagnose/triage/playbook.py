"""The playbook to run next, written from a triage's answer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from diagnose.errors import DiagnoseError
from diagnose.triage.advice import injectable
from taxonomy.assessment import Triage
from taxonomy.facts import Scalar
from taxonomy.registry import Library

CANDIDATES = 6
STEPS = 60
"""Steps of a replay by default (`proxy.specs.Recipe`)."""
PAST = 20
"""Steps that a replay must go on after its onset, to be judged."""


def playbook_text(
    answer: Triage,
    cards: Library,
    faulty: Sequence[Path],
    healthy: Sequence[Path],
    context: Mapping[str, Scalar],
    target: Path,
    name: str = "",
) -> str:
    """Return a playbook that `diagnose run` accepts.

    Args:
        answer: The answer.
        cards: Fault cards.
        faulty: Logs of the incident.
        healthy: Logs of healthy twins.
        context: What the user said about the run.
        target: File that it will be written to: paths are relative to its folder.
        name: Its name, "" for that of the file.

    Raises:
        DiagnoseError: There is no log to name, or none of the candidates can be replayed.
    """
    if not faulty:
        raise DiagnoseError(
            "a playbook names a log, and observations have none", "write it from the log: diagnose triage LOG"
        )
    chosen = [card for card in injectable(answer, cards) if _runs_locally(card.id, cards)][:CANDIDATES]
    if answer.verdict == "faulty" and not chosen:
        raise DiagnoseError(
            "none of the candidates can be replayed", "diagnose faults shows what each engine can inject"
        )
    symptom = _symptom(answer, cards)
    name = name or playbook_name(target.stem)
    lines = [
        "# yaml-language-server: $schema=./playbook.schema.json",
        "version: 1",
        f"name: {name}",
        f"symptom: {symptom}",
        "original:",
        f"  faulty: {_paths(faulty, target)}",
    ]
    if healthy:
        lines.append(f"  healthy: {_paths(healthy, target)}")
    if context:
        lines.append("  context:")
        lines += [
            f"    {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
            for key, value in context.items()
        ]
    lines += [
        "proxy:",
        "  from: embedded   # a stand-in; better: from: checkpoint, and the folder of the failing model",
        "  checkpoint: embedded:qwen3_moe",
        "  experts: 12",
    ]
    if chosen:
        lines.append("candidates:     # in the order of the triage")
        step = _from_step(answer)
        lines += [f"  - {{fault: {card.id}{f', from_step: {step}' if step else ''}}}" for card in chosen]
    if answer.onset:
        low, high = answer.onset
        lines.append(f"# onset in the log: steps {low} to {high}")
    return "\n".join(lines) + "\n"


def playbook_name(text: str) -> str:
    """Return a text as the name of a playbook may be: ASCII letters, digits and _.-, none of the three at an end."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_.-")[:64] or "incident"


def _symptom(answer: Triage, cards: Library) -> str:
    """Return the symptom that the first candidate shares with the log, else the log's first."""
    seen = [item.id for item in answer.symptoms]
    for candidate in answer.candidates:
        shared = [id_ for id_ in seen if id_ in cards[candidate.fault].symptoms]
        if shared:
            return shared[0]
    return seen[0] if seen else "auto"


def _from_step(answer: Triage) -> int | None:
    """Return the step of a replay's injection, where the log has a sharp onset that a replay can reach."""
    sharp = any(
        item.alarm and item.onset == "sudden" and item.interval == answer.onset
        for item in answer.observations
    )
    if answer.onset is None or not sharp:
        return None
    step = (answer.onset[0] + answer.onset[1] + 1) // 2
    return step if 1 < step <= STEPS - PAST else None


def _runs_locally(fault: str, cards: Library) -> bool:
    from proxy.engines.base import refusal

    return not refusal("local", cards[fault])


def _paths(files: Sequence[Path], target: Path) -> str:
    base = target.absolute().parent
    shown = []
    for file in files:
        full = file.absolute()
        inside = full.is_relative_to(base) or os.path.commonpath([full, base]) != os.sep
        shown.append(os.path.relpath(full, base) if inside else str(full))
    return json.dumps(shown[0] if len(shown) == 1 else shown, ensure_ascii=False)
