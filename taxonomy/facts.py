"""Facts about a run (its context), and conditions on them, in three-valued logic: a fact may simply not be known.

Facts have short canonical names (``rollout.backend``, ``model.moe``) whatever the framework calls them; the
translation of whole config files is in `diagnose.triage.config`. A fact typed by a person may itself be a condition
(``rollout.temperature=!=1``: "something other than 1").
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping

Scalar = str | int | float | bool | None
Facts = Mapping[str, Scalar]

_COMPARED = re.compile(r"(?P<op>!=|>=|<=|>|<)\s*(?P<value>.+)")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_VERSION = re.compile(r"\d+(?:\.\d+)*")

_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
    "null": None,
    "none": None,
}


def scalar(text: Scalar) -> Scalar:
    """Return what a text stands for: a switch, a number, or itself."""
    if not isinstance(text, str):
        return text
    clean = text.strip()
    if clean.lower() in _WORDS:
        return _WORDS[clean.lower()]
    if _NUMBER.fullmatch(clean):
        number = float(clean)
        return (
            int(number) if number.is_integer() and "." not in clean and "e" not in clean.lower() else number
        )
    return clean


def holds(condition: Scalar, fact: Scalar) -> bool | None:
    """Return whether a fact fulfils a condition; None where that can't be told.

    A condition is a value, ``a|b`` (one of several), a pattern with ``*``, or a comparison: ``!=1``, ``>=32``, and
    ``>=v0.20`` for versions. ``!=`` a value that is no number holds for every other known value.
    """
    if isinstance(condition, str) and "|" in condition:
        found = [holds(part, fact) for part in condition.split("|")]
        return True if True in found else None if None in found else False
    wanted, known = scalar(condition), scalar(fact)
    compared = _COMPARED.fullmatch(wanted) if isinstance(wanted, str) else None
    vague = _COMPARED.fullmatch(known) if isinstance(known, str) else None
    if vague:
        if compared and compared.groupdict() == vague.groupdict():
            return True
        return _excluded(vague["op"], vague["value"], wanted if not compared else None)
    if compared:
        return _compare(compared["op"], fact, compared["value"])
    if isinstance(wanted, str) and isinstance(known, str):
        return fnmatch.fnmatchcase(known.lower(), wanted.lower())
    if isinstance(wanted, bool) or isinstance(known, bool) or wanted is None or known is None:
        return wanted is known
    if isinstance(wanted, str) or isinstance(known, str):
        return str(wanted).lower() == str(known).lower()
    return float(wanted) == float(known)


def bound_of(value: Scalar) -> Scalar:
    """Return the bound of a comparison (``>=4``: "4"), and anything else as it is."""
    compared = _COMPARED.fullmatch(value.strip()) if isinstance(value, str) else None
    return compared["value"] if compared else value


def _excluded(op: str, bound: str, wanted: Scalar) -> bool | None:
    """Return False where "known to be `op` bound" rules the wanted value out, None otherwise."""
    if wanted is None:
        return None
    return False if _compare(op, wanted, bound) is False else None


def _compare(op: str, fact: Scalar, bound: str) -> bool | None:
    """Compare numbers, or versions where the bound is one; anything else only knows equality."""
    if op == "!=":
        same = holds(bound, fact)
        return None if same is None else not same
    left: tuple[float, ...] | None
    right: tuple[float, ...] | None
    if bound.startswith("v"):
        left, right = _version(str(fact)), _version(bound)
    else:
        left, right = _number(scalar(fact)), _number(scalar(bound))
    if left is None or right is None:
        return None
    size = max(len(left), len(right))
    a, b = (part + (0.0,) * (size - len(part)) for part in (left, right))
    return {">=": a >= b, "<=": a <= b, ">": a > b, "<": a < b}[op]


def _number(value: Scalar) -> tuple[float, ...] | None:
    return (float(value),) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _version(text: str) -> tuple[float, ...] | None:
    found = _VERSION.match(text.strip().lstrip("v"))
    return tuple(float(part) for part in found[0].split(".")) if found else None


# What follows from a framework or a device as such, where the run does not say otherwise.
_IMPLIED: tuple[tuple[str, Scalar, str, Scalar], ...] = (
    ("framework", "vime|slime|mindspeed-rl", "trainer.backend", "megatron"),
    ("framework", "trl|ms-swift|unsloth|openrlhf", "trainer.backend", "hf"),
    ("framework", "mindspeed-rl", "device", "npu"),
    ("device.name", "*ascend*|*910*", "device", "npu"),
    ("trainer.backend", "megatron|mindspeed", "weights.converted", True),
    ("trainer.backend", "hf|fsdp|fsdp2|dtensor", "weights.converted", False),
)
_MOE = re.compile(
    r"(?i)-a\d+(?:\.\d+)?b\b|mixtral|moe\b|deepseek-?(?:v[23]|r1)(?!-distill)|gpt-oss|glm-4\.[5-9]|kimi-k2|olmoe"
)
_DENSE = re.compile(
    r"(?i)(?:qwen-?[23](?:\.5)?|llama-?\d(?:\.\d)?|gemma-?\d?|mistral|phi-?\d|smollm\d?)[-_]\w*?\d+(?:\.\d+)?[bm]\b"
)


def implied() -> Iterator[tuple[str, Scalar]]:
    """Yield the facts that `completed` reads or adds, each with a condition on it or a value of it."""
    yield from (("model.name", "*"), ("model.moe", True))
    for key, condition, target, value in _IMPLIED:
        yield from ((key, condition), (target, value))


def completed(facts: Facts) -> dict[str, Scalar]:
    """Return the facts and what follows from them (a framework's trainer, dense or Mixture-of-Experts by name)."""
    known = {
        key: str(value) if key.startswith("library.") else scalar(value)  # 0.20 is no 0.2
        for key, value in facts.items()
    }
    name = str(known.get("model.name") or "").rsplit("/", 1)[-1]
    if "model.moe" not in known and name:
        if _MOE.search(name):
            known["model.moe"] = True
        elif _DENSE.search(name):
            known["model.moe"] = False
    for key, condition, target, value in _IMPLIED:
        if target not in known and key in known and holds(condition, known[key]):
            known[target] = value
    return known
