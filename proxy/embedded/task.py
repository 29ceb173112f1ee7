"""The verifiable arithmetic task of the embedded originals.

A prompt is ``17+48=``, the right response ``65``. Its value and its format are graded apart: a response may carry
the right number in the wrong format (leading zeros). Every prompt belongs to one split, decided by a hash of its
text, so pre-training, calibration, RL and test never share one.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import cache

ANSWER_WEIGHT = 0.8
FORMAT_WEIGHT = 0.2
SPLITS = {"pretrain": 0.60, "calibration": 0.05, "rl": 0.20, "test": 0.15}
"""Share of the prompts in each split."""


@dataclass(frozen=True)
class Reward:
    """Reward of one response: its two parts and their sum, each in [0, 1] before weighting."""

    answer: float
    format: float

    @property
    def total(self) -> float:
        """Weighted sum of the parts."""
        return ANSWER_WEIGHT * self.answer + FORMAT_WEIGHT * self.format


def answer(prompt: str) -> int:
    """Return the right number for a prompt such as ``17+48=``."""
    body = prompt.removesuffix("=")
    for sign in "+-*":
        left, found, right = body.partition(sign)
        if found and left:
            a, b = int(left), int(right)
            return {"+": a + b, "-": a - b, "*": a * b}[sign]
    raise AssertionError(f"not a prompt of this task: {prompt!r}")


def grade(prompt: str, response: str) -> Reward:
    """Grade a response, given as text without special tokens; unparsable text earns nothing."""
    digits = response.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        return Reward(0.0, 0.0)
    value = int(response)
    return Reward(float(value == answer(prompt)), float(str(value) == response))


def split_of(prompt: str) -> str:
    """Return the split a prompt belongs to."""
    share = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") / 2**64
    for split, width in SPLITS.items():
        if share < width:
            return split
        share -= width
    return "test"


@cache
def prompts(split: str) -> tuple[str, ...]:
    """Return every prompt of a split, in a fixed shuffled order."""
    sums = [f"{a}{sign}{b}=" for a in range(100) for b in range(100) for sign in "+-"]
    products = [f"{a}*{b}=" for a in range(10) for b in range(100)]
    found = [p for p in sums + products * 6 if split_of(p) == split]
    random.Random(split).shuffle(found)
    return tuple(found)


def drawn(split: str, seed: int, step: int, count: int) -> list[str]:
    """Return the prompts of one training step, none twice: every engine draws the same ones for a seed."""
    return random.Random(f"data/{seed}/{step}").sample(prompts(split), count)
