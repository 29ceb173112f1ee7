"""Remedies: settings that may undo a fault's effect without removing its cause. Data, as the cards are.

A card names the remedies that make physical sense for its fault. Whether one helps is not declared: `--try-fix` runs
fault and remedy together on the proxy. Switching the fault itself off is no remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """

    id: str
    what: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

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

REMEDY_BY_ID = {remedy.id: remedy for remedy in REMEDIES}
