"""Injections of the category "expert routing consistency".

Legend of shape suffixes: ``_E`` experts, ``_T`` tokens, ``_K`` experts a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from taxonomy.stages import StageContext, Transform

Routes = tuple[Tensor, Tensor]


def expert_permutation(params: Mapping[str, float]) -> Transform:
    """Dispatch the tokens of the busiest experts to one another in a ring: a wrong expert map.

    The experts are the most frequent ones that together carry `routing_share` of the routed tokens (at least two),
    so the fault is as large in a proxy with fewer experts as in the original.
    """
    share = params["routing_share"]

    def transform(name: str, routes: Routes, context: StageContext) -> Routes:
        if name != "routes" or context.routing_share_E is None:
            return routes
        share_E: Tensor = context.routing_share_E
        order_E = share_E.argsort(descending=True, stable=True)
        count = max(2, int((share_E[order_E].cumsum(0) < share).sum()) + 1)
        ring = order_E[:count]
        map_E = torch.arange(len(share_E), device=share_E.device)
        map_E[ring] = ring.roll(-1)
        index_TK, weights_TK = routes
        return map_E[index_TK], weights_TK

    return transform


def top_k_mismatch(params: Mapping[str, float]) -> Transform:
    """Use fewer experts a token in the rollout than in the trainer, weights renormalised to the same sum."""
    dropped = int(params["dropped"])

    def transform(name: str, routes: Routes, _context: StageContext) -> Routes:
        if name != "routes":
            return routes
        index_TK, weights_TK = routes
        keep = max(1, index_TK.shape[-1] - dropped)
        floor_T1 = weights_TK.topk(keep, dim=-1).values[:, -1:]
        kept_TK = torch.where(weights_TK >= floor_T1, weights_TK, 0)
        ratio_T1 = weights_TK.sum(-1, keepdim=True) / kept_TK.sum(-1, keepdim=True)
        return index_TK, kept_TK * ratio_T1

    return transform
