"""Calibration statistics of one layer: what `proxy.calibration` collects and the distances are made of.

Shape suffixes: E experts, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LayerStats:
    """What one MoE layer did on the calibration tokens.

    Attributes:
        layer: Index of the layer.
        tokens: Tokens seen.
        counts_E: Tokens routed to each expert.
        coactivation_EE: Tokens routed to both experts of a pair; the diagonal repeats `counts_E`.
        weighted_hidden_EH: Σ_t p_{t,i} h_t with h the router's input and p the weights that the model
        applies. router_EH: The router's rows.
        saliency_E: Σ_t p_{t,i} ‖f_i(h_t)‖₂ with f_i the expert's output; None where outputs were not computed.
        halves: The same over every other row, for the half-split agreement; None with fewer than two rows.
    """

    layer: int
    tokens: int
    counts_E: Array
    coactivation_EE: Array
    weighted_hidden_EH: Array
    router_EH: Array
    saliency_E: Array | None = None
    halves: tuple[LayerStats, LayerStats] | None = None
