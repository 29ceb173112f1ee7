"""Linear modules whose weights are read while they are used, some rows at a time, and never held.

The attention of a large model is many times as large as one of its experts, and the widest of its projections in
float32 alone is more than an expert: what is read again for every batch comes from the system's cache of files.

Shape suffixes: I input features, O output features, R some of the rows of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

ROWS_BYTES = 8 << 20
"""Size of the float32 rows that are read at a time."""
ROWS_STEP = 128
"""Rows are read in multiples of this, so that blocks of a quantised weight stay whole."""

Read = Callable[[int, int], torch.Tensor]
"""Returns the rows from the first number up to the second one, [R, I] in float32."""


class Borrowed(torch.nn.Linear):
    """A linear module that reads its weight. Whoever asks for the weight itself gets all of it."""

    read: Read

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The whole weight, [O, I]."""
        return self.read(0, self.out_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Return the product with the weight, plus the bias."""
        step = max(1, ROWS_BYTES // (4 * self.in_features * ROWS_STEP)) * ROWS_STEP
        out = input.new_empty((*input.shape[:-1], self.out_features))
        for start in range(0, self.out_features, step):
            stop = min(start + step, self.out_features)
            out[..., start:stop] = functional.linear(input, self.read(start, stop))
        if self.bias is not None:
            out += self.bias
        return out


@contextmanager
def borrowed(modules: Mapping[Any, Read]) -> Iterator[None]:
    """Let linear modules read their weights for as long as the context lasts."""
    assert all(type(module) is torch.nn.Linear for module in modules)
    for module, read in modules.items():
        module.__class__ = Borrowed
        module.read = read
    try:
        yield
    finally:
        for module in modules:
            module.__class__ = torch.nn.Linear
            del module.read
