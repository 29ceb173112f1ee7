"""What the original does with its experts on calibration tokens: counts, pairs, routed context.

The checkpoint is streamed (`proxy.walk`), so that memory doesn't grow with it. Rows of equal length are run
together and nothing is padded.

Shape suffixes: E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from proxy.checkpoint import Checkpoint, open_checkpoint
from proxy.families import Layout, understand
from proxy.layer_stats import LayerStats
from proxy.rows import cut_rows
from proxy.tally import add_halves, as_stats
from proxy.walk import Pass

Progress = Callable[[str], None]


def uncalibrated(checkpoint: Checkpoint, layout: Layout) -> list[LayerStats]:
    """Return statistics without a single token, for strategies that need the router rows only.

    Raises:
        CheckpointError: A router row holds NaN or infinity.
    """
    return [without_tokens(checkpoint, layout, layer) for layer in layout.moe_layers]


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
) -> list[LayerStats]:
    """Run the checkpoint over calibration rows and return the statistics of each MoE layer, in layer order.

    Args:
        model_folder: Checkpoint folder; it is computed in float32, on the CPU, a layer at a time.
        token_rows: Token ids, one list a text.
        max_tokens: Tokens used at most; the last row is cut to fit.
        progress: Called with sentences for humans.
        state: Folder in which every finished layer is saved, and from which an interrupted call goes on.
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
    stats = []
    for base in uncalibrated(checkpoint, layout):
        halves = [as_stats(base, tally, outputs) for tally in tallies[base.layer]]
        stats.append(add_halves(halves[0], halves[1], with_halves=len(rows) > 1))
    return stats
