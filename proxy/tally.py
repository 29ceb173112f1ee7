"""Running sums of one layer's routing, and the statistics they become. Sums are float64.

Shape suffixes: T tokens, E experts, H hidden size, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.layer_stats import LayerStats

if TYPE_CHECKING:
    import torch


@dataclass
class Tally:
    """Running sums of one layer over half of the rows."""

    tokens: int
    coactivation_EE: torch.Tensor
    weighted_hidden_EH: torch.Tensor
    saliency_E: torch.Tensor

    @classmethod
    def empty(cls, experts: int, hidden: int) -> Tally:
        """Return sums over no token."""
        import torch

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return cls(0, zeros(experts, experts), zeros(experts, hidden), zeros(experts))

    def count(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> bool:
        """Add tokens' routing; a weight of exactly 0 is no choice, and neither is an idle expert behind the last.

        Returns whether the sums are still finite.
        """
        import torch

        experts = len(self.saliency_E)
        chosen_TK = (weights_TK != 0) & (index_TK < experts)
        index_TK = torch.where(chosen_TK, index_TK, 0).long()
        zeros_TE = torch.zeros(len(index_TK), experts, dtype=torch.float64)
        chosen_TE = zeros_TE.scatter_add(1, index_TK, chosen_TK.double()).clamp(max=1)
        applied_TE = zeros_TE.scatter_add(1, index_TK, torch.where(chosen_TK, weights_TK, 0.0).double())
        self.tokens += len(index_TK)
        self.coactivation_EE += chosen_TE.T @ chosen_TE
        self.weighted_hidden_EH += applied_TE.T @ hidden_TH.double()
        return bool(self.weighted_hidden_EH.isfinite().all())


def as_stats(base: LayerStats, tally: Tally, outputs: bool) -> LayerStats:
    """Return one half's sums as statistics."""
    if not tally.tokens:
        return base
    coactivation_EE = tally.coactivation_EE.numpy()
    return LayerStats(
        layer=base.layer,
        tokens=tally.tokens,
        counts_E=coactivation_EE.diagonal().copy(),
        coactivation_EE=coactivation_EE,
        weighted_hidden_EH=tally.weighted_hidden_EH.numpy(),
        router_EH=base.router_EH,
        saliency_E=tally.saliency_E.numpy() if outputs and tally.saliency_E.any() else None,
    )


def add_halves(first: LayerStats, second: LayerStats, with_halves: bool) -> LayerStats:
    """Return the statistics over both halves."""
    weighted_EH = first.weighted_hidden_EH
    if second.tokens:
        weighted_EH = weighted_EH + second.weighted_hidden_EH
    saliency_E = first.saliency_E
    if saliency_E is not None and second.saliency_E is not None:
        saliency_E = saliency_E + second.saliency_E
    return LayerStats(
        layer=first.layer,
        tokens=first.tokens + second.tokens,
        counts_E=first.counts_E + second.counts_E,
        coactivation_EE=first.coactivation_EE + second.coactivation_EE,
        weighted_hidden_EH=weighted_EH,
        router_EH=first.router_EH,
        saliency_E=saliency_E,
        halves=(first, second) if with_halves else None,
    )
