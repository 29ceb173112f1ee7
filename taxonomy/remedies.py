"""Remedies: settings that may undo a fault's effect without removing its cause. Data, as the cards are.

A card names the remedies that make physical sense for its fault. Whether one helps is not declared: `--try-fix` runs
fault and remedy together on the proxy. Switching the fault itself off is no remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Remedy:
    """One change of the recipe.

    Attributes:
        id: Name that cards use.
        what: What to do, for humans.
        settings: Recipe fields and their values.
        factors: Recipe fields and what their present value is multiplied by.
        hydra: Settings of verl's own, by their name on its command line; only its engine can try them.
        engine: Settings of the verl engine, by their name in a playbook's `engine`.
        needs: What of verl it needs that the engine here hasn't, "" where it can be tried.
    """

    id: str
    what: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    hydra: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""

    def overrides(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe fields that change; whole numbers stay whole."""
        scaled = {
            name: type(recipe[name])(
                round(recipe[name] * by) if isinstance(recipe[name], int) else recipe[name] * by
            )
            for name, by in self.factors.items()
        }
        return {**self.settings, **scaled}


REMEDIES: tuple[Remedy, ...] = (
    Remedy(
        "old_from_trainer",
        "Take the old log-probabilities from the trainer instead of the rollout",
        {"old_log_prob": "trainer"},
    ),
    Remedy(
        "importance_weights",
        "Old log-probabilities from the trainer, and truncated importance weights between rollout and trainer (cap 2)",
        {"old_log_prob": "trainer", "importance_cap": 2.0},
    ),
    Remedy(
        "stronger_kl",
        "Hold the policy ten times closer to the reference (KL coefficient)",
        factors={"kl_coef": 10.0},
    ),
    Remedy("tighter_clip", "Clip the ratio at a quarter of the present range", factors={"clip_ratio": 0.25}),
    Remedy(
        "tighter_gradients",
        "Clip the gradient norm at a tenth of the present limit",
        factors={"max_grad_norm": 0.1},
    ),
    Remedy("one_update", "One update a step, over the whole batch", {"mini_batches": 1, "epochs": 1}),
    Remedy("larger_groups", "Twice as many responses a prompt", factors={"group_size": 2.0}),
    Remedy("longer_responses", "Half as long again as the response limit", factors={"max_new_tokens": 1.5}),
    Remedy("warm_up", "Warm the learning rate up over ten steps", {"warmup_steps": 10}),
    Remedy("slower", "A quarter of the learning rate", factors={"lr": 0.25}),
    Remedy("balancing_loss", "Turn the routers' balancing loss on (coefficient 0.01)", {"aux_coef": 0.01}),
    Remedy("slower_routers", "Train the routers at a tenth of the learning rate", {"router_lr": 0.1}),
)

_CORRECTION = "algorithm.rollout_correction"
OF_VERL: tuple[Remedy, ...] = (
    Remedy(
        "sequence_weights",
        "Truncated importance weights of whole responses (rollout_is=sequence, cap 2)",
        {"old_log_prob": "trainer"},
        hydra={f"{_CORRECTION}.rollout_is": "sequence", f"{_CORRECTION}.rollout_is_threshold": "2.0"},
    ),
    Remedy(
        "masked_weights",
        "Importance weights of tokens, 0 outside 0.5 to 5 (rollout_is=token with two bounds)",
        {"old_log_prob": "trainer"},
        hydra={f"{_CORRECTION}.rollout_is": "token", f"{_CORRECTION}.rollout_is_threshold": "'0.5_5.0'"},
    ),
    Remedy(
        "rejection",
        "Leave responses out whose mean k3 divergence between rollout and trainer is over 0.01 (rollout_rs)",
        {"old_log_prob": "trainer"},
        hydra={f"{_CORRECTION}.rollout_rs": "seq_mean_k3", f"{_CORRECTION}.rollout_rs_threshold": "0.01"},
    ),
    Remedy(
        "same_precision",
        "Rollout and trainer in one precision, fp32 (rollout.dtype, fsdp_config.mixed_precision.param_dtype)",
        engine={"rollout_dtype": "fp32", "train_dtype": "fp32"},
    ),
    Remedy(
        "router_replay",
        "Make the trainer use the rollout's experts (router_replay.mode=R3, rollout.enable_rollout_routing_replay)",
        hydra={
            "actor_rollout_ref.actor.megatron.router_replay.mode": "R3",
            "actor_rollout_ref.rollout.enable_rollout_routing_replay": "True",
        },
        needs="verl's Megatron or VeOmni engine and a vLLM rollout: its FSDP engine has no router replay",
    ),
)
"""Remedies that are verl's own, for faults in which rollout and trainer disagree. The thresholds are those of verl's
presets (`RolloutCorrectionConfig`)."""
MISMATCH = "importance_weights"
"""A card that names this remedy is about rollout and trainer that disagree."""


def offered(named: Sequence[str], engine: str) -> list[Remedy]:
    """Return the remedies that an engine may be asked to try.

    Args:
        named: Remedies that the card names.
        engine: "local" or "verl".
    """
    own = OF_VERL if engine == "verl" and MISMATCH in named else ()
    return [*(REMEDY_BY_ID[name] for name in named), *own]


REMEDY_BY_ID = {remedy.id: remedy for remedy in REMEDIES}
