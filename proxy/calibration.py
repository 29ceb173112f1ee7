"""What the original does with its experts on calibration tokens: counts, pairs, routed context.

The checkpoint is streamed (`proxy.walk`), so that memory doesn't grow with it. Rows of equal length are run
together and nothing is padded.

Shape suffixes: E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from proxy.checkpoint import Checkpoint, open_checkpoint
from proxy.families import Layout, understand
from proxy.layer_stats import LayerStats
from proxy.rows import cut_rows
from proxy.tally import add_halves, as_stats
from proxy.walk import Pass

Progress = Callable[[str], None]


class AllStats(Sequence[LayerStats]):
    """The statistics of all MoE layers, in layer order, each made when it is asked for: one is in memory at a time.

    Args:
        layout: The checkpoint's layout.
        make: Returns the statistics of a layer.
    """

    def __init__(self, layout: Layout, make: Callable[[int], LayerStats]) -> None:
        self._layers, self._make = layout.moe_layers, make

    @overload
    def __getitem__(self, place: int) -> LayerStats: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[LayerStats]: ...
    def __getitem__(self, place: int | slice) -> LayerStats | Sequence[LayerStats]:
        if isinstance(place, slice):
            return [self._make(layer) for layer in self._layers[place]]
        return self._make(self._layers[place])

    def __len__(self) -> int:
        return len(self._layers)


def uncalibrated(checkpoint: Checkpoint, layout: Layout) -> Sequence[LayerStats]:
    """Return statistics without a single token, for strategies that need the router rows only.

    Raises:
        CheckpointError: A router row holds NaN or infinity (when the layer's statistics are asked for).
    """
    return AllStats(layout, lambda layer: without_tokens(checkpoint, layout, layer))


def without_tokens(checkpoint: Checkpoint, layout: Layout, layer: int) -> LayerStats:
    """Return one layer's statistics without a token."""
    router_EH = checkpoint.array(layout.router(layer)).astype(np.float64)[: layout.experts]
    experts, hidden = router_EH.shape
    return LayerStats(
        layer=layer,
        tokens=0,
        counts_E=np.zeros(experts),
        coactivation_EE=np.zeros((experts, experts)),
        weighted_hidden_EH=np.zeros((experts, hidden)),
        router_EH=router_EH,
    )


def collect(
    model_folder: str | Path,
    token_rows: Sequence[Sequence[int]],
    max_tokens: int,
    progress: Progress | None = None,
    state: Path | None = None,
    outputs: bool = False,
) -> Sequence[LayerStats]:
    """Run the checkpoint over calibration rows and return the statistics of each MoE layer, in layer order.

    Args:
        model_folder: Checkpoint folder; it is computed in float32, on the CPU, a layer at a time.
        token_rows: Token ids, one list a text.
        max_tokens: Tokens used at most; the last row is cut to fit.
        progress: Called with sentences for humans.
        state: Folder in which every finished layer is saved, and from which an interrupted call goes on. The
            statistics are then read from it whenever they are asked for.
        outputs: Compute the experts of the last layer too, so that every layer has a saliency.

    Raises:
        CheckpointError: The checkpoint cannot be read or is not understood, or holds NaN or infinity.
        BuildError: There are no tokens, or the model does not load, or computes NaN or infinity.
    """
    checkpoint = open_checkpoint(model_folder)
    layout = understand(checkpoint)
    rows = cut_rows(token_rows, max_tokens, checkpoint.config)
    if progress:
        progress(f"calibrating on {sum(map(len, rows))} tokens of {len(rows)} rows")
    tallies = Pass(checkpoint, layout, rows, progress, state, outputs).run()

    def layer_stats(layer: int) -> LayerStats:
        base = without_tokens(checkpoint, layout, layer)
        halves = [as_stats(base, tally, outputs) for tally in tallies[layer]]
        return add_halves(halves[0], halves[1], with_halves=len(rows) > 1)

    lazy = AllStats(layout, layer_stats)
    return lazy if state else list(lazy)
