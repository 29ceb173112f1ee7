"""YAML as plain data in which every value still knows its place, read safely and with limits.

Nothing is executed or instantiated: mappings, lists, text, numbers, true/false and null are all there is. All
trouble is collected as `Issue`s, not raised, so that a user sees everything that is wrong with a file at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from diagnose.report.text import literal

MAX_BYTES = 1 << 20
MAX_NODES = 10_000
"""Most values of a document, with every alias counted as what it stands for."""
MAX_DEPTH = 32
MAX_ALIASES = 100
LISTED = 30
"""A longer list of allowed values is not printed with a mistake."""

Path = tuple[str | int, ...]
"""Where a value is: mapping keys and list positions from the root."""


class Place(NamedTuple):
    """A position in a file, both numbers counted from 1."""

    line: int
    col: int


class Issue(NamedTuple):
    """One thing that is wrong, and where."""

    line: int
    col: int
    message: str


@dataclass
class Located:
    """A document.

    Attributes:
        data: The document: dict, tuple (for a list), str, int, float, bool or None.
        values: Path → place of the value.
        keys: Path → place of the mapping key or list item that leads there.
        broken: Paths whose value could not be read and is None in `data`; `issues` says why.
        issues: What is wrong.
    """

    data: Any = None
    values: dict[Path, Place] = field(default_factory=dict)
    keys: dict[Path, Place] = field(default_factory=dict)
    broken: set[Path] = field(default_factory=set)
    issues: list[Issue] = field(default_factory=list)

    def place(self, path: Path) -> Place:
        """Return the place of a value; where it is missing, of the key whose mapping should have it.

        A list that is written as a single value has its items where that value is.
        """
        if path in self.values:
            return self.values[path]
        while path:
            *around, step = path
            path = tuple(around)
            if path in self.values:
                return self.values[path] if isinstance(step, int) else self.keys[path]
        return Place(1, 1)


def parse(content: bytes) -> Located:
    """Read one YAML document."""
    located = Located()
    if len(content) > MAX_BYTES:
        located.issues.append(Issue(1, 1, f"larger than {MAX_BYTES >> 20} MiB"))
        return located
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = _place_of(content[: error.start].decode("utf-8-sig", "replace"))
        located.issues.append(Issue(*place, "not UTF-8 text"))
        return located
    try:
        fatal, second = _survey(text)
        if fatal:
            located.issues.append(fatal)
            return located
        loader = yaml.SafeLoader(text)
        node = loader.get_node() if loader.check_node() else None
        if node is not None:
            _Builder(loader, located).build(node)
        if second:
            located.issues.append(second)
    except yaml.MarkedYAMLError as error:
        located.issues.append(_syntax_issue(error))
    except yaml.reader.ReaderError as error:
        place = _place_of(text[: error.position])
        located.issues.append(Issue(*place, f"character U+{error.character:04X} is not allowed in YAML"))
    return located


def _place_of(before: str) -> Place:
    """Return the place that follows a text."""
    return Place(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)


def _at(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _survey(text: str) -> tuple[Issue | None, Issue | None]:
    """Return what forbids to read the first document (too deep, too many values or aliases), and a second one.

    Works on the parser's events, so a hostile document is refused before anything is built from it. The values
    that aliases multiply are counted later, by `_Builder`.
    """
    nodes = aliases = depth = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                return None, Issue(*_at(event.start_mark), "a second document: only one is read")
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
        for number, limit, what in (
            (depth, MAX_DEPTH, "nested deeper than {} levels"),
            (nodes, MAX_NODES, "more than {} values"),
            (aliases, MAX_ALIASES, "more than {} aliases"),
        ):
            if number > limit:
                return Issue(*_at(event.start_mark), what.format(limit)), None
    return None, None


def _syntax_issue(error: yaml.MarkedYAMLError) -> Issue:
    """Return the issue for what the parser could not read, in one line."""
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "not YAML"
    if "'\\t'" in problem:
        problem = "a tab character: indent with spaces"
    elif error.context:
        problem = f"{problem} {error.context}"
    return Issue(*(_at(mark) if mark else Place(1, 1)), literal(problem, 200))


def quoted(value: object) -> str:
    """Return a foreign value as it may appear in a message: one line, short, quotes around a text."""
    return literal(repr(value), 60)


_STR, _NULL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"
_MERGE = "tag:yaml.org,2002:merge"
_SCALARS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool", _NULL}
_TEXTS = {_STR, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
# What YAML 1.2 and JSON call a float and YAML 1.1 a text: 8e-5 (no dot) and 1.5e3 (no sign).
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class _TooBig(Exception):
    """The aliases of a document multiply beyond the limits."""


class _Builder:
    """Turns a node tree into data, noting places and trouble."""

    def __init__(self, loader: yaml.SafeLoader, located: Located) -> None:
        self._loader = loader
        self._located = located
        self._nodes = 0

    def build(self, root: Node) -> None:
        """Fill the document in."""
        self._located.keys[()] = _at(root.start_mark)
        try:
            self._located.data = self._value(root, ())
        except _TooBig:
            self._issue(root, f"aliases make this more than {MAX_NODES} values or {MAX_DEPTH} levels")

    def _issue(self, node: Node, message: str) -> None:
        self._located.issues.append(Issue(*_at(node.start_mark), message))

    def _value(self, node: Node, path: Path) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise _TooBig
        self._located.values[path] = _at(node.start_mark)
        if isinstance(node, MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            for index, item in enumerate(node.value):
                self._located.keys[*path, index] = _at(item.start_mark)
            return tuple(self._value(item, (*path, index)) for index, item in enumerate(node.value))
        if isinstance(node, ScalarNode) and node.tag in _SCALARS | _TEXTS:
            return self._scalar(node, path)
        self._issue(node, f"tag {quoted(node.tag)} is not allowed")
        self._located.broken.add(path)
        return None

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        if node.tag in _TEXTS:
            if _HIDDEN.search(node.value):
                self._issue(node, "a control character in a text")
                self._located.broken.add(path)
                return None
            plain_number = node.style is None and _EXPONENT.fullmatch(node.value)
            return float(node.value) if plain_number else node.value
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError, OverflowError):  # e.g. !!int x, or 10,000 digits
            self._issue(node, f"{quoted(node.value)} is no {node.tag.rpartition(':')[2]}")
            self._located.broken.add(path)
            return None

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        found: dict[str, Node] = {}
        for key, value in self._pairs(node):
            name = self._key(key)
            if name is None:
                continue
            if name in found:
                line = self._located.keys[*path, name].line
                self._issue(key, f"duplicate key {quoted(name)} (first in line {line})")
                continue
            found[name] = value
            self._located.keys[*path, name] = _at(key.start_mark)
        for key, value in self._merged(node, 0):
            if key.tag == _STR and key.value not in found:
                found[key.value] = value
                self._located.keys[*path, key.value] = _at(key.start_mark)
        return {name: self._value(value, (*path, name)) for name, value in found.items()}

    def _pairs(self, node: MappingNode) -> Iterator[tuple[Node, Node]]:
        """Yield the pairs that are written in a mapping, merges left out."""
        return ((key, value) for key, value in node.value if key.tag != _MERGE)

    def _merged(self, node: MappingNode, depth: int) -> Iterator[tuple[Node, Node]]:
        """Yield the pairs that ``<<`` brings in, the strongest first."""
        if depth > MAX_DEPTH:
            raise _TooBig
        for key, value in node.value:
            if key.tag != _MERGE:
                continue
            for part in value.value if isinstance(value, SequenceNode) else [value]:
                self._nodes += 1
                if self._nodes > MAX_NODES:
                    raise _TooBig
                if isinstance(part, MappingNode):
                    yield from self._pairs(part)
                    yield from self._merged(part, depth + 1)
                else:
                    self._issue(part, "<< takes a mapping or a list of mappings")

    def _key(self, node: Node) -> str | None:
        """Return a mapping key, None (and an issue) for one that is no plain text."""
        if not isinstance(node, ScalarNode):
            self._issue(node, "a key must be text")
        elif node.tag not in _TEXTS:
            self._issue(node, f"a key must be text: write {quoted(node.value)} in quotes")
        elif _HIDDEN.search(node.value):
            self._issue(node, "a control character in a key")
        else:
            return str(node.value)
        return None


def near(value: str, allowed: Sequence[str]) -> str:
    """Return "; did you mean …?" for what comes close, else ""."""
    matches = difflib.get_close_matches(value[:100], allowed, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def unknown(what: str, value: str, allowed: Sequence[str]) -> str:
    """Return the sentence about a value that is not one of those allowed; a long list is counted, not printed."""
    listed = f"allowed: {', '.join(allowed)}" if len(allowed) <= LISTED else f"{len(allowed)} are allowed"
    return f"unknown {what} {quoted(value)}{near(value, allowed)} ({listed})"


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, keys joined by dots; lists are left out."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif not isinstance(value, tuple | list):
            flat[f"{prefix}{key}"] = value
    return flat
