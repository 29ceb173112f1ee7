"""Injections of the category "optimisation and training stability"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taxonomy.stages import Action, EventRule, StageContext, Transform, on


def actor_update_omission(_params: Mapping[str, float]) -> EventRule:
    """Leave out the optimizer step (the paper's Actor Update Omission fault)."""
    return lambda _context: Action.SKIP


def learning_rate_too_high(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Multiply the learning rate."""
    return {"lr": recipe["lr"] * params["factor"]}


def kl_sign_flipped(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Add the KL loss with the wrong sign: the policy is paid for leaving the reference."""
    return {"kl_coef": -params["factor"] * recipe["kl_coef"]}


def kl_term_missing(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Take a share of the KL coefficient away, all of it by default."""
    return {"kl_coef": (1 - params["removed"]) * recipe["kl_coef"]}


def kl_coefficient_too_large(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Multiply the KL coefficient."""
    return {"kl_coef": params["factor"] * recipe["kl_coef"]}


def gradient_clipping_off(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Put the largest gradient norm out of reach."""
    return {"max_grad_norm": params["factor"] * recipe["max_grad_norm"]}


def loss_length_bias(params: Mapping[str, float], _recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Weigh every token by its response's length to the power of −exponent."""
    return {"length_exponent": params["exponent"]}


def completion_cap_too_short(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Cut responses at a fraction of the cap."""
    return {"max_new_tokens": max(1, round(recipe["max_new_tokens"] / params["divisor"]))}


def padding_in_the_loss(params: Mapping[str, float]) -> Transform:
    """Count the filler after the end token as response, in the first `share` of the batch's rows."""
    share = params["share"]

    def change(mask_BR: Any, _context: StageContext) -> Any:
        changed_BR = mask_BR.clone()
        changed_BR[: round(len(mask_BR) * share)] = 1
        return changed_BR

    return on("response_mask", change)


def group_ids_broken(params: Mapping[str, float]) -> Transform:
    """Give every response of the first `share` of the batch a group of its own."""
    share = params["share"]

    def change(groups_B: Any, _context: StageContext) -> Any:
        cut = round(len(groups_B) * share)
        changed_B = groups_B.clone()
        changed_B[:cut] = len(groups_B) + groups_B.new_tensor(range(cut))
        return changed_B

    return on("groups", change)


def reward_flipped(params: Mapping[str, float]) -> Transform:
    """Reward the opposite for the first `share` of every batch's groups."""
    share = params["share"]

    def change(rewards: Any, _context: StageContext) -> Any:
        cut = round(len(rewards) * share)
        changed = rewards.clone()
        changed[:cut] = rewards.max() - rewards[:cut]
        return changed

    return on("rewards", change)


def excess_inner_epochs(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Reuse every batch for more passes, with the ratio clip out of reach: the policy runs off its own data."""
    return {"epochs": recipe["epochs"] * int(params["epochs"]), "clip_ratio": 1e6}
