"""Numbers, steps and pairs as frameworks print them: JSON values, ``np.float64(0.5)``, quoted "nan", "5/3766"."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from diagnose.logs.text import key_name

MAX_STEP = 10**12
"""Largest step taken for one; steps must also be exact as float64."""
MAX_KEYS = 5000
"""Most keys of one record that are looked at."""

# Repetitions are bounded, so that no line takes more than linear time.
NUMBER = (
    r"[-+]?(?:nan|infinity|inf|\d{1,330}(?:\.\d{0,330})?(?:e[-+]?\d{1,5})?|\.\d{1,330}(?:e[-+]?\d{1,5})?)"
)
"""A printed number; to be compiled with re.IGNORECASE."""
WRAPPED = rf"[a-z_][\w.]{{0,40}}\(\s?(?P<wrapped>{NUMBER})(?:,[^()]{{0,80}})?\)"
"""A number in the repr of an array scalar: np.float64(0.5), tensor(0.25, device='cuda:0')."""

STEP_KEYS = (
    "step",
    "global_step",
    "train/global_step",  # before _step: W&B counts log calls, transformers counts updates
    "training/global_step",
    "trainer/global_step",
    "train/step",
    "rollout/step",
    "eval/step",
    "iteration",
    "_step",
)
"""Keys that hold the training step of a flat record, best first."""
OF_STEPS = "global_step/max_steps"
"""ms-swift's step key; its value is "5/3766"."""

_PAIR = re.compile(
    r"""(?P<quote>['"])(?P<key>[^'"]{1,200})(?P=quote)\s{0,3}:\s{0,3}"""
    rf"(?:(?P<plain>{NUMBER})|{WRAPPED}|(?P<none>None|null|No\ Log)|(?P<bool>True|False|true|false)"
    r"""|(?P<text>'[^']{0,500}'|"[^"]{0,500}"))(?=\s{0,3}(?:[,}]|$))""",
    re.IGNORECASE | re.VERBOSE,
)


def number(raw: Any) -> float | None:
    """Return a JSON value as a number: NaN for null and for a quoted "nan", None for what is no number."""
    if raw is None:
        return math.nan
    if isinstance(raw, str):
        if raw.strip().lower().lstrip("+-") not in ("nan", "inf", "infinity"):
            return None
        return float(raw)
    if isinstance(raw, bool | int | float):
        try:
            return float(raw)
        except OverflowError:
            return math.inf
    return None


def quoted_number(text: str) -> float | None:
    """Return the number in a quoted text (transformers 5 prints all its numbers so), None where it is none."""
    if len(text) > 400 or not text.isascii() or "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def step(raw: Any) -> int | None:
    """Return a step, None where the value is none."""
    if (
        isinstance(raw, bool)
        or not isinstance(raw, int | float)
        or not 0 <= raw <= MAX_STEP
        or raw != int(raw)
    ):
        return None
    return int(raw)


def step_of(values: Mapping[str, Any]) -> int | None:
    """Return the training step that a flat record names, None where it names none."""
    for key in STEP_KEYS:
        if key in values:
            raw = values[key]
            if isinstance(raw, str):
                raw = quoted_number(raw)
            if (found := step(raw)) is not None:
                return found
    text = values.get(OF_STEPS)
    if isinstance(text, str) and (match := re.fullmatch(r"(\d{1,12})/\d{1,12}", text)):
        return int(match[1])
    return None


def flat(raw: Mapping[str, Any], depth: int = 2, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of a mapping; those of mappings inside come as "outer/inner", down to `depth`."""
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth > 1:
            yield from flat(value, depth - 1, f"{name}/")
        else:
            yield name, value


def split(entries: Iterable[tuple[str, Any]]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the numbers among the entries of a record, and the keys of the others.

    A null is neither: except in verl's file logger it says that nothing was measured, and NaN is written as NaN.
    """
    data: dict[str, float] = {}
    others: list[str] = []
    for count, (key, raw) in enumerate(entries):
        if count >= MAX_KEYS:
            break
        if raw is None:
            continue
        value = number(raw)
        if value is None and isinstance(raw, str):
            value = quoted_number(raw)
        if value is None:
            others.append(key_name(key))
        else:
            data[key_name(key)] = value
    return data, tuple(others)


def dict_pairs(text: str) -> dict[str, Any]:
    """Return the pairs of a printed Python dict whose values are numbers, None, booleans or texts.

    Lenient on purpose: names such as nan and np.float64(…) are no literals, the opening brace may be missing and the
    last pair may be cut off. Values of other kinds are passed over. Linear in the text.
    """
    found: dict[str, Any] = {}
    for pair in _PAIR.finditer(text):
        if len(found) >= MAX_KEYS:
            break
        if (printed := pair["plain"] or pair["wrapped"]) is not None:
            found[pair["key"]] = float(printed)
        elif pair["none"] is not None:
            found[pair["key"]] = None
        elif pair["bool"] is not None:
            found[pair["key"]] = pair["bool"].lower() == "true"
        else:
            found[pair["key"]] = pair["text"][1:-1]
    return found
