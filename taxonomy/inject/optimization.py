"""Injections of the category "optimisation and training stability"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taxonomy.stages import Action, EventRule, StageContext, Transform


def actor_update_omission(_params: Mapping[str, float]) -> EventRule:
    """Leave out the optimizer step (the paper's Actor Update Omission fault)."""
    return lambda _context: Action.SKIP


def learning_rate_too_high(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Multiply the learning rate."""
    return {"lr": recipe["lr"] * params["factor"]}


def kl_sign_flipped(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Add the KL loss with the wrong sign: the policy is paid for leaving the reference."""
    return {"kl_coef": -params["factor"] * recipe["kl_coef"]}


def kl_missing(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Scale the KL coefficient down, to nothing by default."""
    return {"kl_coef": params["factor"] * recipe["kl_coef"]}


def reward_flipped(params: Mapping[str, float]) -> Transform:
    """Reward the opposite for the first `share` of every batch's groups."""
    share = params["share"]

    def transform(name: str, rewards: Any, _context: StageContext) -> Any:
        if name != "rewards":
            return rewards
        cut = round(len(rewards) * share)
        changed = rewards.clone()
        changed[:cut] = rewards.max() - rewards[:cut]
        return changed

    return transform


def excess_inner_epochs(params: Mapping[str, float], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Reuse every batch for more passes, with the ratio clip out of reach: the policy runs off its own data."""
    return {"epochs": recipe["epochs"] * int(params["epochs"]), "clip_ratio": 1e6}
