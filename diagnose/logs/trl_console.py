"""TRL, ms-swift and Unsloth on a console: Python dicts, one a log call, between progress bars and everything else.

The dicts name no step, only an epoch rounded to two decimals. The step is recovered (`_Clock`) from the progress bar,
which counts updates: directly where dict and bar alternate, else, because stdout is often buffered in blocks while the
bar is not, from the number of dicts and the bar's last position. Without a bar dicts are counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diagnose.logs import values
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import TRL
from diagnose.logs.registry import reader
from diagnose.logs.text import Line

# A bar of the trainer has no description before it, unlike those for checkpoint shards, data sets and rollouts.
_BAR = re.compile(r"\d{1,3}%\|[^|]{0,300}\|\s{0,4}(\d{1,9})/(\d{1,9})\s\[")
_END = "train_runtime"
_ROUND = (1000, 500, 250, 200, 100, 50, 25, 20, 10, 5, 2, 1)
_EPOCH_DIGIT = 0.01
MAX_WAITING = 1_000_000
"""Dicts that wait for their steps at most; more of one run are not believed."""


def pairs_of(text: str) -> dict[str, Any] | None:
    """Return the pairs of a metric dict, None for any other text (completions have dicts in them too)."""
    if "': " not in text and '": ' not in text:
        return None
    pairs = values.dict_pairs(text)
    known = {
        offer.canonical
        for key, value in pairs.items()
        if (not isinstance(value, str) or values.quoted_number(value) is not None)
        and (offer := TRL.offer(key)) is not None
    }
    return pairs if len(known) >= 2 or (known and "epoch" in pairs) or _END in pairs else None


@dataclass(frozen=True)
class _Waiting:
    """A dict that waits for its step."""

    line: int
    data: Mapping[str, float]
    others: tuple[str, ...]
    epoch: float
    bar: int

    @property
    def evaluation(self) -> bool:
        """Whether it belongs to the step of the dict before it."""
        return bool(self.data) and all(key.startswith("eval_") or key == "epoch" for key in self.data)


@dataclass
class _Clock:
    """The steps of one run.

    Attributes:
        total: Length of the training bar, 0 before there is one.
        bar: Its position.
        last: Step of the last record given out.
        held: A dict that is given out at its bar position as soon as the bar moves on.
        waiting: Dicts that came without the bar moving between them; they wait for the end of the run.
        run: Name of the run: a number, "" for the first.
    """

    total: int = 0
    bar: int = 0
    last: int = 0
    held: _Waiting | None = None
    waiting: list[_Waiting] = field(default_factory=list)
    run: str = ""

    def move(self, position: int, total: int) -> Iterator[Record]:
        """Take note of a progress bar; bars of another length (evaluation) are passed over."""
        if self.total != total and self.total and self.bar != self.total:
            return
        if self.total != total and (self.held or self.waiting or self.last):
            return
        self.total = total
        if position > self.bar and self.held is not None:
            yield self._give(self.held, self.held.bar)
            self.held = None
        self.bar = position

    def take(self, item: _Waiting) -> Iterator[Record]:
        """Take a dict in."""
        if item.evaluation and not self.waiting:
            if self.held is not None:
                yield self._give(self.held, self.held.bar)
                self.held = None
            yield self._give(item, max(self.last, self.bar if not self.last else 0))
        elif self.waiting or self.held is not None or self.bar <= self.last:
            self.waiting += [self.held, item] if self.held is not None else [item]
            self.held = None
        else:
            self.held = item

    def end(self, complete: bool = False) -> Iterator[Record]:
        """Give out what waits, at the end of a run or of what there is of one."""
        if self.held is not None:
            yield self._give(self.held, self.held.bar)
        for item, step in zip(self.waiting, self._steps(complete), strict=True):
            yield self._give(item, step)

    def _give(self, item: _Waiting, step: int) -> Record:
        self.last = max(self.last, step)
        return Record(item.line, step, item.data, item.others, run=self.run)

    def _steps(self, complete: bool) -> list[int]:
        """Return the steps of the dicts that wait."""
        training = [item for item in self.waiting if not item.evaluation]
        epochs = [item.epoch for item in training]
        found = iter(place(epochs, self.bar, self.total if complete else 0, self.last) if epochs else ())
        steps, step = [], self.last
        for item in self.waiting:
            step = step if item.evaluation else next(found)
            steps.append(step)
        return steps


def place(epochs: Sequence[float], bar: int, total: int, after: int) -> list[int]:
    """Return the steps of log calls that were made every so many updates.

    Args:
        epochs: The epoch of each call, to two decimals; NaN where it has none.
        bar: Last position of the bar, 0 where that is not known. It may lag behind.
        total: Updates of the whole run where it got to its end, else 0.
        after: Step of the last call before these.
    """
    epochs_K, count = np.array(epochs), len(epochs)
    choices = [updates for updates in (bar, total) if updates >= after + count]
    if not choices:
        return list(range(after + 1, after + 1 + count))
    known_K = np.isfinite(epochs_K)
    if 10 * int(known_K.sum()) >= 9 * count:  # a dict that was cut may have lost its epoch
        epochs_K = np.interp(np.arange(count), np.flatnonzero(known_K), epochs_K[known_K])
    span = float(epochs_K[-1] - epochs_K[0])
    trusted = bool(
        np.isfinite(epochs_K).all() and span >= 10 * _EPOCH_DIGIT and (np.diff(epochs_K) >= 0).all()
    )

    def stride_at(updates: int) -> int:
        """Return the roundest stride that agrees with so many updates, 0 where none does."""
        if trusted:
            estimate = span / (count - 1) * updates / epochs_K[-1]
            slack = _EPOCH_DIGIT / span + 1 / count
            return _roundest(estimate * (1 - slack), estimate * (1 + slack))
        return _roundest((updates - after) / (count + 1) * (1 + 1e-12), (updates - after) / count)

    updates = min(choices, key=lambda choice: _roundness(stride_at(choice)))
    per_epoch = updates / epochs_K[-1] if trusted else math.nan
    stride = stride_at(updates)
    if not stride and trusted:  # dicts were lost
        stride = round(float(np.median(np.diff(epochs_K))) * per_epoch)
    stride = max(1, stride or (updates - after) // count)
    steps, step = [], after
    for epoch in epochs_K:
        step += stride
        if trusted and epoch * per_epoch - step > _EPOCH_DIGIT * per_epoch + stride + 1:  # a gap
            step = max(step, stride * round(epoch * per_epoch / stride))
        steps.append(step)
    limit = updates
    for index in reversed(range(count)):  # no dict after the last update
        if steps[index] <= limit:
            break
        steps[index], limit = limit, limit - stride
    return (
        steps if all(np.diff(steps) > 0) and steps[0] > after else list(range(after + 1, after + 1 + count))
    )


def _roundest(low: float, high: float) -> int:
    """Return the roundest whole number in [low, high], 0 where there is none."""
    for unit in _ROUND:
        candidate = math.ceil(low / unit) * unit
        if max(low, 1) <= candidate <= high:
            return candidate
    return 0


def _roundness(stride: int) -> int:
    """Return how round a stride is: smaller is rounder."""
    return next((rank for rank, unit in enumerate(_ROUND) if stride and stride % unit == 0), len(_ROUND))


def recognises(text: str) -> bool:
    """Whether a text holds a metric dict."""
    return not text.startswith('{"') and (pairs := pairs_of(text)) is not None and _END not in pairs


@reader("trl-console", "TRL, ms-swift or Unsloth console", recognises, TRL, hints=(b"': ", b'": '))
def records(lines: Iterable[Line]) -> Iterator[Record | Rejected]:
    """Yield the records; they come when their step is known, at the latest where the run ends."""
    clock = _Clock()
    epoch, ends = -math.inf, 0
    for line in lines:
        text = line.text
        if "%|" in text and (bar := _BAR.match(text)):
            yield from clock.move(int(bar[1]), int(bar[2]))
        pairs = pairs_of(text)
        if pairs is None:
            continue
        if _END in pairs:
            yield from clock.end(complete=True)
            ends += 1
            clock, epoch = _Clock(run=f"{ends + 1}"), -math.inf
            continue
        if not line.whole and "}" not in text[text.rfind("'") :]:
            yield Rejected(line.number, f"cut off after {len(pairs)} values")
        data, others = values.split(pairs.items())
        step = values.step_of(pairs)
        if step is not None:
            yield Record(line.number, step, data, others, run=clock.run)
            continue
        now = data.get("epoch", math.nan)
        if (
            now < epoch or len(clock.waiting) >= MAX_WAITING
        ):  # a run that did not get to its end, and the next one
            yield from clock.end()
            clock = _Clock(clock.total, run=clock.run)
        epoch = now if math.isfinite(now) else epoch
        yield from clock.take(_Waiting(line.number, data, others, now, clock.bar))
    yield from clock.end()
