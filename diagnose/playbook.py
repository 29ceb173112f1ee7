"""Playbooks: read one, find one, and what follows from one.

`load` reports everything that is wrong with a file, each thing with line, column and what is allowed.
"""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from diagnose import located
from diagnose.errors import PlaybookError
from diagnose.located import Issue, quoted
from diagnose.playbook_issues import InvalidPlaybook, validated
from diagnose.playbook_model import AUTO, FIT, CandidateSpec, Playbook
from taxonomy.registry import Library, library

__all__ = [
    "AUTO",
    "FIT",
    "CandidateSpec",
    "InvalidPlaybook",
    "Issue",
    "Playbook",
    "find",
    "load",
    "needs_permission",
    "resolve_candidates",
    "schema",
    "shipped",
]


def load(path: Path, cards: Library | None = None) -> Playbook:
    """Read and validate a playbook. Relative paths in it start from its own folder.

    Args:
        path: The file.
        cards: Fault cards in force, None for all that are installed.

    Raises:
        PlaybookError: The file can't be read, or (`InvalidPlaybook`) something in it is wrong.
    """
    try:
        with path.open("rb") as file:
            content = file.read(located.MAX_BYTES + 1)
    except OSError as error:
        raise PlaybookError(f"{path}:1:1: {error.strerror or error}") from error
    return validated(content, path, cards)


def shipped() -> dict[str, Path]:
    """Return the playbooks that come with the program: name → file."""
    folder = Path(str(files("playbooks")))
    found = sorted((*folder.glob("*.yaml"), *folder.glob("*/*.yaml")))
    return {path.stem: path for path in reversed(found)}


def find(name_or_path: str | Path) -> Path:
    """Return the file of a playbook that is given as a path, or as the name of a shipped one.

    Raises:
        PlaybookError: There is neither; the message names the shipped ones.
    """
    with suppress(OSError, RuntimeError):  # too long a name, ~name of nobody
        path = Path(name_or_path).expanduser()
        if path.is_file():
            return path
    names = shipped()
    if str(name_or_path) in names:
        return names[str(name_or_path)]
    raise PlaybookError(
        f"no playbook {quoted(str(name_or_path))}" + located.near(str(name_or_path), tuple(names)),
        f"name a file or a shipped playbook: {', '.join(sorted(names)) or 'none is shipped'}",
    )


def resolve_candidates(
    playbook: Playbook, cards: Library, symptoms: tuple[str, ...] = ()
) -> tuple[CandidateSpec, ...]:
    """Return the faults to replay: those that the playbook lists, else every card that has the symptom.

    Args:
        playbook: The playbook.
        cards: The cards in force.
        symptoms: For ``symptom: auto``, the symptoms that the logs show; none: every card is a candidate.
    """
    if playbook.candidates is not None:
        return playbook.candidates
    wanted = set(symptoms) if playbook.symptom == AUTO else {playbook.symptom}
    return tuple(
        CandidateSpec.model_construct(fault=card.id)
        for card in cards.cards.values()
        if not wanted or wanted & set(card.symptoms)
    )


def needs_permission(playbook: Playbook) -> list[str]:
    """Return what the playbook would execute, a line each for the user to allow; empty where it names nothing.

    Arguments are shown as a list, as they will be passed: no shell reads them.
    """
    lines = []
    if playbook.engine.python:
        lines.append(f"engine.python: {playbook.engine.python}")
    if playbook.engine.command:
        lines.append(f"engine.command: {json.dumps(playbook.engine.command, ensure_ascii=False)}")
    # A configuration can name code too: a reward function, a module to import, what a job installs.
    if playbook.engine.config:
        lines.append(f"engine.config: {playbook.engine.config}")
    for name in ("overrides", "runtime_env"):
        if value := getattr(playbook.engine, name):
            lines.append(f"engine.{name}: {json.dumps(value, ensure_ascii=False)}")
    return lines


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a playbook, for editors. Defaults of the recipe are left out: they are tuned.

    The faults in force, those of other packages among them, stand as examples: an editor completes their ids, and
    refuses none that another installation knows.
    """
    found = Playbook.model_json_schema(by_alias=True)
    for name, definition in (("Playbook", found), *found["$defs"].items()):
        for setting in definition.get("properties", {}).values():
            setting.pop("title", None)
            if name == "RecipeSettings" or isinstance(setting.get("default"), dict):
                setting.pop("default", None)
    found["$defs"]["CandidateSpec"]["properties"]["fault"]["examples"] = list(library().cards)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
