"""Filling the bank with what a test needs: the plan in numbers, and progress in words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from diagnose.bank import Bank, Filled, Progress
from diagnose.console import Terminal
from diagnose.errors import RunError
from diagnose.jobs import cores
from diagnose.selftest.arena import Arena
from diagnose.selftest.report import Section
from proxy.specs import RunSpec

TYPICAL_COST_S = 6.5
"""CPU seconds of a run of 60 steps where no finished run says better."""

SAY_EVERY_S = 30.0


def plan(bank: Bank, arena: Arena, parts: Mapping[str, Sequence[RunSpec]], workers: int | None) -> Section:
    """Return how many runs each part takes, how many are missing, and how long they will take."""
    cost_s = bank.cost_s() or TYPICAL_COST_S * arena.recipe("default").steps / 60
    at_once = workers or cores()
    rows, known, total, missing = [], set[str](), 0, 0
    for name, runs in parts.items():
        keys = {bank.key(run, arena.by_path[run.model]) for run in runs} - known
        known |= keys
        open_ = sum(bank.outcome(key) is None for key in keys)
        total, missing = total + len(keys), missing + open_
        rows.append((name, str(len(keys)), str(open_), f"{open_ * cost_s / 60 / at_once:.1f}"))
    rows.append(("all", str(total), str(missing), f"{missing * cost_s / 60 / at_once:.1f}"))
    text = f"{cost_s:.1f} CPU seconds a run, {at_once} at a time."
    return Section("Runs", (text,), ("part", "runs", "missing", "minutes"), tuple(rows))


def fill(
    bank: Bank, arena: Arena, parts: Mapping[str, Sequence[RunSpec]], limit_s: float, terminal: Terminal
) -> list[Filled]:
    """Make what is missing, part by part; `limit_s` (0: none) is for all of them together.

    Raises:
        RunError: No run of a part came through.
    """
    begin, found = time.monotonic(), []
    for name, runs in parts.items():
        left_s = limit_s and max(limit_s - (time.monotonic() - begin), 1e-3)
        said = [time.monotonic()]

        def progress(now: Progress, name: str = name, said: list[float] = said) -> None:
            if time.monotonic() - said[0] < SAY_EVERY_S and now.done < now.total:
                return
            said[0] = time.monotonic()
            left = f", {now.left_s / 60:.0f} min left" if now.left_s and now.done < now.total else ""
            failed = f", {now.failed} failed" if now.failed else ""
            terminal.say(f"{name}: {now.done} of {now.total} runs{failed}{left}")

        done = bank.fill(
            runs, arena.by_path, limit_s=left_s, progress=progress, note=lambda text: terminal.say(text, 1)
        )
        if done.died and not done.made:
            raise RunError(f"no run came through: {next(iter(done.died.values()))}")
        for key, reason in done.died.items():
            terminal.warn(f"{key}: {reason}")
        found.append(done)
    return found
