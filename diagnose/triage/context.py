"""Facts typed as KEY=VALUE, checked against what triage can use: the keys and values of clues and implied facts.

Only what a person types is checked. A configuration has hundreds of keys that no clue asks for, and a value there is
what the framework made of it; a person mistypes, and a value that nobody knows must not rule a fault out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from diagnose.errors import DiagnoseError
from diagnose.triage.config import dtype_of, facts_of, quantization_of
from taxonomy.clues import all_clues
from taxonomy.facts import Scalar, bound_of, implied, scalar

_OPEN = ("model.name", "device.name", "loss.aggregation")
"""Facts whose values are names that nobody can list; so are the versions, ``library.NAME``."""
_FORMATS = ("fp8*", "int8*", "*int4*", "nvfp4*", "mxfp*", "awq*", "gptq*", "w8a8*", "w4a*")
_DTYPES = ("bf16", "fp16", "fp32", "fp8*")
_MORE: Mapping[str, tuple[str, ...]] = {
    "framework": ("nemo-rl", "prime-rl"),
    "device": ("gpu",),
    "rollout.backend": ("sglang", "hf"),
    "rollout.mode": ("sync", "colocated"),
    "rollout.turns": ("single",),
    "rollout.quantization": ("none", *_FORMATS),
    "trainer.quantization": ("none", *_FORMATS),
    "precision": _DTYPES,
    "rollout.logits_dtype": _DTYPES,
    "trainer.dtype": _DTYPES,
    "trainer.reduce_dtype": _DTYPES,
    "data.context": ("short",),
}
"""Values that are known besides those that some clue names: they speak against it."""
_YES = {"y", "t", "enable", "enabled"}
_NO = {"n", "f", "disable", "disabled"}
_REPLAY = {"r3": True, "r2": False}
"""verl's modes of routing replay: R3 replays the rollout's routes, R2 the trainer's own."""


@dataclass(frozen=True)
class Known:
    """What may be said of one fact.

    Attributes:
        kind: "switch", "number", "words" or "text".
        words: Words and patterns that are known; of a number those that stand for none.
    """

    kind: str
    words: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """The values, for people."""
        if self.kind == "switch":
            return "true or false"
        if self.kind == "number":
            return ", ".join(("a number or a bound (>=4, !=1)", *self.words))
        return ", ".join(self.words) or "any text"


@cache
def vocabulary() -> Mapping[str, Known]:
    """Return every fact that triage can use, by key, in alphabetical order."""
    conditions: dict[str, list[Scalar]] = {"steps": [1]}
    for key, condition in (*_asked(), *implied()):
        parts = condition.split("|") if isinstance(condition, str) else [condition]
        conditions.setdefault(key, []).extend(parts)
    return {key: _known(key, conditions[key]) for key in sorted(conditions)}


def _asked() -> Iterator[tuple[str, Scalar]]:
    for clue in all_clues().values():
        for group in (clue.needs, clue.excludes, clue.favours, *(check.when for check in clue.checks)):
            yield from group.items()


def _known(key: str, conditions: Sequence[Scalar]) -> Known:
    if key in _OPEN or key.startswith("library."):
        return Known("text")
    if all(isinstance(item, bool) for item in conditions):
        return Known("switch")
    bounds = [scalar(bound_of(item)) for item in conditions]
    words = [str(item).lower() for item in bounds if not isinstance(item, int | float)]
    kind = "number" if len(words) < len(bounds) else "words"
    return Known(kind, tuple(dict.fromkeys((*words, *_MORE.get(key, ())))))


def typed(context: Sequence[str]) -> tuple[dict[str, Scalar], tuple[str, ...]]:
    """Return the facts typed as KEY=VALUE, and warnings about what can't be used.

    A key that no clue asks for is kept, since it does nothing. A value that is not known is left out.

    Raises:
        DiagnoseError: A text has another form.
    """
    facts: dict[str, Scalar] = {}
    warnings = []
    for text in context:
        key, found, value = text.partition("=")
        key, value = key.strip(), value.strip()
        if not found or not key:
            raise DiagnoseError(
                f"--context {text!r} is not KEY=VALUE", "as in --context rollout.backend=vllm"
            )
        known = _lookup(key)
        if known is None:
            near = nearest(key, value)
            meant = f"; did you mean {' or '.join(near)}?" if near else " (docs/triage.md lists the keys)"
            warnings.append(f"--context {key}: nothing asks for this fact, so it changes nothing{meant}")
            facts[key] = scalar(value)
        elif not _is_known(known, meant_by := value if known.kind == "text" else _meant(key, known, value)):
            warnings.append(f"--context {text}: ignored, the values known are: {known.allowed}")
        else:
            facts[key] = meant_by
    return facts, tuple(warnings)


def _lookup(key: str) -> Known | None:
    if key.startswith("library."):
        return Known("text")
    if key.startswith("changed:"):
        return Known("switch") if key.partition(":")[2] in all_clues() else None
    return vocabulary().get(key)


def is_public(fact: str, value: Scalar) -> bool:
    """Return whether a value says nothing of anybody: a number, a switch, or a word that some clue knows."""
    if value is None or isinstance(value, int | float):
        return True
    known = _lookup(fact) if fact else None
    return known is not None and known.kind != "text" and _is_known(known, value)


def private_words(context: Sequence[str], stated: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Return the words of facts that may be called after somebody: keys nobody knows, values nobody knows.

    Args:
        context: Facts as typed, KEY=VALUE.
        stated: Facts of a configuration.
    """
    found: list[str] = []
    for text in context:
        key, _, value = (part.strip() for part in text.partition("="))
        if _lookup(key) is None:
            found.append(key)
        if not is_public(key, scalar(value)):
            found.append(value)
    found += [str(value) for key, value in stated.items() if not is_public(key, value)]
    return tuple(dict.fromkeys(found))


def nearest(key: str, value: str = "") -> tuple[str, ...]:
    """Return the known keys that a mistyped one may stand for, or that a framework's setting states."""
    known = vocabulary()
    stated = [fact for fact in facts_of({key.removeprefix("actor_rollout_ref."): value}) if fact in known]
    last = key.lower().rpartition(".")[2].replace("-", "_")
    same = [fact for fact in known if fact.rpartition(".")[2] == last]
    close = difflib.get_close_matches(key.lower(), known, 2, 0.7)
    return tuple(dict.fromkeys((*stated, *same, *close)))[:2]


def _meant(key: str, known: Known, text: str) -> Scalar:
    """Return what a typed value stands for."""
    value, word = scalar(text), text.lower()
    if known.kind == "switch":
        if key == "rollout.routing_replay" and word in _REPLAY:
            return _REPLAY[word]
        if isinstance(value, int | float):
            return value > 0
        return word in _YES if word in _YES | _NO else False if value is None else value
    if key == "rollout.turns" and isinstance(value, int):
        return "multi" if value is True or value > 1 else "single"
    if key.endswith(".quantization"):
        return quantization_of(value)
    if key == "precision" or key.endswith("dtype"):
        return dtype_of(value)
    if key == "device" and word == "cuda":
        return "gpu"
    return text.replace("-", "_") if key == "rollout.mode" else value


def _is_known(known: Known, value: Scalar) -> bool:
    """Return whether a value, or the one that it is a bound of, is one that some clue understands."""
    if known.kind == "text":
        return value != ""
    if known.kind == "switch":
        return isinstance(value, bool)
    bound = scalar(bound_of(value))
    if known.kind == "number" and isinstance(bound, int | float) and not isinstance(bound, bool):
        return True
    word = str(bound).lower()
    return not isinstance(bound, bool) and any(fnmatchcase(word, item) for item in known.words)
