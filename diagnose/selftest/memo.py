"""Scoring hundreds of incidents against the same replays: what is pure and asked for again is remembered.

`install` puts a memory in front of some functions of `diagnose.score`, for the life of a process that does nothing
but diagnose from a bank. Arguments are compared by content, curves by identity (and kept alive, so that an identity
is not used twice); results are frozen. Intervals of strengths, which nobody counts here, are left out.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

from diagnose.curves import Curves
from diagnose.score.calibration import SeedSet

KEPT = 20_000
"""Results that are kept of one function; then its memory starts anew."""


class Memory:
    """A function with a memory."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.known: dict[bytes, Any] = {}
        self._alive: dict[int, Curves | SeedSet] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return what the function returns."""
        key = self._key((arguments, options))
        if key not in self.known:
            if len(self.known) >= KEPT:
                self.known.clear()
            self.known[key] = self.function(*arguments, **options)
        return self.known[key]

    def _key(self, arguments: Any) -> bytes:
        alive = self._alive

        class Writer(pickle.Pickler):
            def persistent_id(self, item: Any) -> int | None:
                if isinstance(item, Curves | SeedSet):
                    alive[id(item)] = item
                    return id(item)
                return None

        buffer = io.BytesIO()
        Writer(buffer, 5).dump(arguments)
        return hashlib.blake2b(buffer.getbuffer(), digest_size=16).digest()


def _nothing(*_: Any) -> None:
    """Stand for the interval of a strength."""


def install() -> list[tuple[ModuleType | type, str, Any]]:
    """Put the memories in place; return what was there, for `remove`."""
    from diagnose.score import align, experiment, noise, onset, ranking, score, shape, system
    from diagnose.selftest import detect

    panel = Memory(align.panel)
    new: list[tuple[ModuleType | type, str, Any]] = [
        *((module, "panel", panel) for module in (experiment, onset, score, system, detect)),
        (system, "leave_one_out", Memory(noise.leave_one_out)),
        (system, "seed_scale", Memory(noise.seed_scale)),
        (score, "look", Memory(experiment.look)),
        (score, "spike_limit", Memory(shape.spike_limit)),
        (ranking, "_interval", _nothing),
    ]
    curves = Memory(SeedSet.curves)
    new.append((SeedSet, "curves", lambda self: curves(self)))
    old = [(owner, name, getattr(owner, name)) for owner, name, _ in new]
    for owner, name, value in new:
        setattr(owner, name, value)
    return old


def remove(old: list[tuple[ModuleType | type, str, Any]]) -> None:
    """Put back what `install` returned."""
    for owner, name, value in old:
        setattr(owner, name, value)
