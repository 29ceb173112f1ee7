"""Injections of the category "expert routing consistency".

Legend of shape suffixes: ``_E`` experts, ``_T`` tokens, ``_K`` experts a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from taxonomy.stages import StageContext, Transform, on

Routes = tuple[Tensor, Tensor]
_ROUTER = re.compile(r".*\.(gate|router)\.weight")


def expert_permutation(params: Mapping[str, float]) -> Transform:
    """Dispatch the tokens of the busiest experts to one another in a ring: a wrong expert map.

    The experts are the most frequent ones that together carry `routing_share` of the routed tokens (at least two),
    so the fault is as large in a proxy with fewer experts as in the original.
    """
    share = params["routing_share"]

    def change(routes: Routes, context: StageContext) -> Routes:
        if context.routing_share_E is None:
            return routes
        share_E: Tensor = context.routing_share_E
        order_E = share_E.argsort(descending=True, stable=True)
        count = max(2, int((share_E[order_E].cumsum(0) < share).sum()) + 1)
        ring = order_E[:count]
        map_E = torch.arange(len(share_E), device=share_E.device)
        map_E[ring] = ring.roll(-1)
        index_TK, weights_TK = routes
        return map_E[index_TK], weights_TK

    return on("routes", change)


def top_k_mismatch(params: Mapping[str, float]) -> Transform:
    """Use fewer experts a token in the rollout than in the trainer, weights renormalised to the same sum."""
    dropped = int(params["dropped"])

    def change(routes: Routes, _context: StageContext) -> Routes:
        index_TK, weights_TK = routes
        keep = max(1, index_TK.shape[-1] - dropped)
        floor_T1 = weights_TK.topk(keep, dim=-1).values[:, -1:]
        kept_TK = torch.where(weights_TK >= floor_T1, weights_TK, 0)
        ratio_T1 = weights_TK.sum(-1, keepdim=True) / kept_TK.sum(-1, keepdim=True)
        return index_TK, kept_TK * ratio_T1

    return on("routes", change)


def router_zeroed(_params: Mapping[str, float]) -> Transform:
    """Send the routers to the rollout as zeros: a sync that leaves them out of a freshly allocated model."""

    def transform(name: str, tensor: Tensor, _context: StageContext) -> Tensor:
        return torch.zeros_like(tensor) if _ROUTER.fullmatch(name) else tensor

    return transform


def noise_width(logits_TE: Tensor, noise_TE: Tensor, top_k: int, flip_share: float) -> float:
    """Return the factor on the noise at which `flip_share` of the tokens are routed otherwise (bisection)."""
    plain_TK = logits_TE.topk(top_k, -1).indices

    def flips(width: float) -> float:
        noisy_TK = (logits_TE + width * noise_TE).topk(top_k, -1).indices
        return 1 - float((noisy_TK[:, :, None] == plain_TK[:, None, :]).any(-1).all(-1).float().mean())

    low, high = 0.0, 10 * float(logits_TE.std()) + 1e-6
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if flips(middle) < flip_share else (low, middle)
    return high


def router_disagreement(params: Mapping[str, float]) -> Transform:
    """Add noise to the rollout's router logits, so wide that each router sends `flip_share` of the tokens elsewhere.

    The width is found for each layer on the tokens of the first step, padding left out, then kept.
    """
    share = params["flip_share"]
    seen: dict[int, list[Tensor]] = {}
    widths: dict[int, float] = {}
    first: list[int] = []
    source = torch.Generator()

    def change(logits_TE: Any, context: StageContext) -> Any:
        if not first:
            first.append(context.step)
            source.manual_seed(context.step)
        noise_TE = torch.randn(logits_TE.shape, generator=source).to(logits_TE.device)
        if context.step == first[0]:
            live = slice(None) if context.live_T is None else context.live_T.bool()
            known = seen.setdefault(context.layer, [])
            known.append(logits_TE[live].detach().float())
            own_TE = torch.cat(known)
            sample_TE = torch.randn(own_TE.shape, generator=torch.Generator().manual_seed(0)).to(own_TE)
            widths[context.layer] = noise_width(own_TE, sample_TE, context.top_k, share)
        else:
            seen.clear()
        return (logits_TE.float() + widths[context.layer] * noise_TE).to(logits_TE.dtype)

    return on("router_logits", change)


def gate_weights(routes: Routes, ids_TK: Tensor, scores_TE: Tensor) -> Tensor:
    """Return what a router would weight other experts with: their scores, normalised where its own weights are."""
    own_TK, weights_TK = routes
    total_T1 = weights_TK.float().sum(-1, keepdim=True)
    found_TK = scores_TE.float().gather(-1, ids_TK)
    normalised = torch.allclose(total_T1, total_T1.mean(), rtol=2e-2)
    scale_T1: Tensor | float
    if normalised:
        scale_T1 = total_T1 / found_TK.sum(-1, keepdim=True)
    else:
        scale_T1 = total_T1 / scores_TE.float().gather(-1, own_TK).sum(-1, keepdim=True)
    return (found_TK * scale_T1).to(weights_TK.dtype)


def score_rule_mismatch(_params: Mapping[str, float]) -> Transform:
    """Read the other value of "normalise the Top-k weights" in the rollout: the same experts, other weights."""

    def change(routes: Routes, context: StageContext) -> Routes:
        if context.router_scores_TE is None:
            return routes
        ids_TK, weights_TK = routes
        total_T1 = weights_TK.float().sum(-1, keepdim=True)
        raw_TK = context.router_scores_TE.float().gather(-1, ids_TK)
        if torch.allclose(total_T1, total_T1.mean(), rtol=2e-2):
            other_TK = raw_TK * total_T1
        else:
            other_TK = weights_TK.float() / total_T1
        return ids_TK, other_TK.to(weights_TK.dtype)

    return on("routes", change)


def replay_misaligned(params: Mapping[str, float]) -> Transform:
    """Make the trainer use the rollout's experts, `offset` tokens off; the weights are the trainer's own scores."""
    offset = int(params["offset"])

    def change(routes: Routes, context: StageContext) -> Routes:
        if context.rollout_routes is None or context.router_scores_TE is None:
            return routes
        ids_TK = context.rollout_routes[0].roll(offset, 0)
        return ids_TK, gate_weights(routes, ids_TK, context.router_scores_TE)

    return on("routes", change)


def capacity_drop(params: Mapping[str, float]) -> Transform:
    """Give every expert of the training engine `capacity_factor` times its even share of tokens, and drop the rest.

    An expert keeps the tokens that weight it most; a dropped choice has weight 0. Padding takes no room.
    """
    factor = params["capacity_factor"]

    def transform(name: str, routes: Routes, context: StageContext) -> Routes:
        if not name.endswith("routes"):
            return routes
        ids_TK, weights_TK = routes
        live_T = torch.ones(len(ids_TK)) if context.live_T is None else context.live_T
        live_TK = live_T.bool()[:, None].expand_as(ids_TK).to(ids_TK.device)
        capacity = max(1, -int(-factor * int(live_TK.sum()) // context.num_experts))
        # Rank every choice among those of its expert, live and heavy ones first.
        key_N = torch.where(live_TK, weights_TK.detach().float(), -1.0).flatten()
        by_weight_N = key_N.argsort(descending=True, stable=True)
        order_N = by_weight_N[ids_TK.flatten()[by_weight_N].argsort(stable=True)]
        counts_E = torch.bincount(ids_TK.flatten(), minlength=context.num_experts)
        first_E = counts_E.cumsum(0) - counts_E
        place_N = torch.arange(len(order_N), device=ids_TK.device) - first_E[ids_TK.flatten()[order_N]]
        rank_N = torch.empty_like(place_N)
        rank_N[order_N] = place_N
        kept_TK = (rank_N.view_as(ids_TK) < capacity) | ~live_TK
        return ids_TK, weights_TK * kept_TK.to(weights_TK.dtype)

    return transform


def balancing_misscaled(params: Mapping[str, float], _recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Add the auxiliary balancing loss with too large a coefficient."""
    return {"aux_coef": params["coefficient"]}


def router_frozen(_params: Mapping[str, float], _recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Leave the routers out of the optimizer."""
    return {"router_lr": 0.0}


def router_lr_too_high(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Multiply the learning rate of the routers alone."""
    return {"router_lr": recipe["router_lr"] * params["factor"]}
