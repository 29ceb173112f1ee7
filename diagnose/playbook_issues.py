"""Everything that is wrong with a playbook, as sentences with line and column.

The models complain in pydantic's words and by path; here both become what an engineer can act on: the place in the
file, what was found, what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from diagnose import located
from diagnose.errors import PlaybookError
from diagnose.located import Issue, Located, near, quoted, unknown
from diagnose.playbook_model import Playbook, RecipeSettings, cross_checks
from diagnose.report.text import literal
from proxy.specs import Recipe
from taxonomy.registry import Library

_TYPES = {
    "string_type": "text",
    "path_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


class InvalidPlaybook(PlaybookError):
    """A playbook with something wrong in it.

    Attributes:
        issues: All that is wrong, in the order of the file.
    """

    def __init__(self, path: Path, issues: tuple[Issue, ...]) -> None:
        super().__init__("\n".join(f"{literal(path)}:{i.line}:{i.col}: {i.message}" for i in issues))
        self.issues = issues


def validated(content: bytes, path: Path, cards: Library | None = None) -> Playbook:
    """Return the playbook that a file's content is.

    Args:
        content: The file's bytes.
        path: The file, for messages and for relative paths.
        cards: Fault cards in force, None for all that are installed.

    Raises:
        InvalidPlaybook: Something is wrong, or everything.
    """
    document = located.parse(content)
    found = list(document.issues)
    if document.data is not None or not found:
        try:
            playbook = Playbook.model_validate(
                {} if document.data is None else document.data,
                context={"base": path.parent.absolute(), "library": cards},
            )
        except ValidationError as error:
            found += _complaints(error, document)
        if isinstance(document.data, dict):
            found += [Issue(*document.place(where), what) for where, what in cross_checks(document.data)]
    if found:
        raise InvalidPlaybook(path, tuple(sorted(dict.fromkeys(found))))
    return playbook


def recipe_issue(recipe: Recipe) -> str:
    """Return what is wrong with a recipe's values by the rules of a playbook, "" where nothing is."""
    try:
        RecipeSettings.model_validate(asdict(recipe))
    except ValidationError as error:
        complaint = error.errors(include_url=False)[0]
        return f"{complaint['loc'][0]} {_sentence(complaint, complaint['loc'])}"
    return ""


def _complaints(error: ValidationError, document: Located) -> Iterator[Issue]:
    """Yield an issue for each complaint of the models, except about values that could not even be read."""
    for complaint in error.errors(include_url=False):
        where: located.Path = complaint["loc"]
        if any(where[:length] in document.broken for length in range(len(where) + 1)):
            continue
        place = document.place(where)
        if complaint["type"] == "extra_forbidden":
            place = document.keys.get(where, place)
        yield Issue(*place, _sentence(complaint, where))


def _sentence(complaint: Any, where: located.Path) -> str:
    """Return what one complaint says."""
    kind, context, value = complaint["type"], complaint.get("ctx", {}), complaint["input"]
    if kind == "missing":
        return f"missing required key {_key(where)}"
    if kind == "extra_forbidden":
        return unknown("key", str(where[-1]), keys_at(where[:-1]))
    if kind == "value_error":
        return literal(context["error"], 500)
    if kind in ("literal_error", "enum"):
        allowed = re.findall(r"'([^']*)'", context["expected"])
        hint = near(value, allowed) if isinstance(value, str) else ""
        return f"must be {context['expected'].replace(chr(39), '')}, not {_found(value)}{hint}"
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, not {_found(value)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {context[name]:.15g}, not {_found(value)}"
    if kind == "too_short":
        return "must not be empty"
    if kind == "string_pattern_mismatch":
        return f"must be 1 to 64 letters, digits, '_', '-' or '.', not {_found(value)}"
    return literal(f"{complaint['msg']}, not {_found(value)}", 500)


def _key(where: located.Path) -> str:
    return f'"{where[-1]}"'


def _found(value: Any) -> str:
    """Return what was found where something else should be."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple | list):
        return "a list"
    if isinstance(value, str):
        return f"the text {quoted(value)}"
    return quoted(value).lower() if isinstance(value, bool) else quoted(value)


def keys_at(where: located.Path) -> tuple[str, ...]:
    """Return the keys that are allowed in the mapping at a path of the document."""
    model: Any = Playbook
    for step in where:
        if isinstance(step, int):
            continue
        field = next(f for name, f in model.model_fields.items() if (f.alias or name) == step)
        model = next(_models(field.annotation))
    return tuple(field.alias or name for name, field in model.model_fields.items())


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a field's annotation, whatever they are wrapped in."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
