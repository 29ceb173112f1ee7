"""One optimizer update of GRPO: the loss (clipped ratio and k3 KL to the frozen reference), its gradients, the step.

Legend of shape suffixes: ``_B`` responses, ``_R`` response positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from proxy.engines.forward import log_probs, seen_weights
from proxy.engines.metrics import masked_mean
from proxy.engines.policy import Policy, Routes
from proxy.engines.rollout import Batch
from proxy.engines.router import Seen, balancing_loss, inside
from proxy.engines.taps import Taps
from proxy.specs import Recipe
from taxonomy.stages import Action, Stage, StageContext


@dataclass(frozen=True)
class Experience:
    """A batch of responses and all that the loss needs to know about them.

    Attributes:
        batch: The responses.
        old_BR: Log-probabilities that the ratio is taken against.
        own_BR: Log-probabilities by the trainer before the first update of the step.
        reference_BR: Log-probabilities by the frozen reference.
        advantages_B: Advantages.
        replayed: The rollout's routes by layer, (ids_BLK, weights_BLK); None where nothing asks for them.
    """

    batch: Batch
    old_BR: Tensor
    own_BR: Tensor
    reference_BR: Tensor
    advantages_B: Tensor
    replayed: Sequence[Routes] | None = None

    def routes_of(self, rows: Tensor) -> list[Routes] | None:
        """Return the rollout's routes of some responses."""
        if self.replayed is None:
            return None
        return [(ids_BLK[rows], weights_BLK[rows]) for ids_BLK, weights_BLK in self.replayed]


def k3_kl_BR(
    log_probs_BR: Tensor, reference_BR: Tensor, tap: Callable[[Tensor], Tensor] = lambda gap_BR: gap_BR
) -> Tensor:
    """Return the k3 estimate of KL(policy ‖ reference) per token, clamped as verl's ``low_var_kl`` is.

    Args:
        log_probs_BR: Log-probabilities by the policy.
        reference_BR: Those by the reference.
        tap: May replace the exponents (reference − policy, clamped) before they are exponentiated.
    """
    gap_BR = tap((reference_BR - log_probs_BR).clamp(-20, 20))
    return (gap_BR.exp() - gap_BR - 1).clamp(-10, 10)


def token_weights_BR(mask_BR: Tensor, exponent: float) -> Tensor:
    """Return the weight of every token in the loss, length^(−exponent) with the mean over real tokens at 1."""
    lengths_B1 = mask_BR.sum(-1, keepdim=True).clamp(min=1)
    weights_BR = mask_BR * lengths_B1**-exponent
    return weights_BR / masked_mean(weights_BR, mask_BR).clamp(min=1e-12)


def update(
    trainer: Policy,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    rows: Tensor,
    recipe: Recipe,
    taps: Taps,
    context: StageContext,
) -> dict[str, float]:
    """Make one optimizer update on the given rows of the batch and return its metrics.

    The loss is the clipped surrogate of PPO plus `kl_coef` times the k3 KL to the reference, both means over tokens
    (weighted by length where the recipe says so). `actor/grad_norm` is the norm before clipping, as in verl. Keys
    without a slash are for the caller: `clipped_norm`, `ratio_deviation` (mean |ratio − 1| against the trainer's own
    log-probabilities before the step's first update), `token_weight_spread` (largest over smallest token weight),
    `balancing_term` (the balancing loss as it enters the total).
    """
    batch, injector = experience.batch, taps.injector
    live_T = batch.mask_BL[rows].flatten()
    mask_BR = batch.response_mask_BR[rows].float()
    advantages_B1 = experience.advantages_B[rows, None]

    def tap(name: str) -> Callable[[Tensor], Tensor]:
        return lambda tensor: injector.transform(Stage.LOSS, name, tensor, context)

    with ExitStack() as stack:
        stack.enter_context(seen_weights(trainer, injector, context))
        replayed = experience.routes_of(rows)
        stack.enter_context(taps.over(trainer, Stage.FORWARD, context, replayed=replayed, live_T=live_T))
        routers: dict[int, Seen] = stack.enter_context(inside(trainer)) if recipe.aux_coef else {}
        log_probs_BR, _ = log_probs(
            trainer,
            batch.tokens_BL[rows],
            batch.mask_BL[rows],
            mask_BR.shape[1],
            1 / recipe.temperature,
            injector,
            context,
        )
        log_ratio_BR = tap("log_ratio")((log_probs_BR - experience.old_BR[rows]).clamp(-20, 20))
        ratio_BR = log_ratio_BR.exp()
        gain_BR = -advantages_B1 * ratio_BR
        clipped_BR = -advantages_B1 * ratio_BR.clamp(1 - recipe.clip_ratio, 1 + recipe.clip_ratio)
        pg_BR = torch.maximum(gain_BR, clipped_BR)
        if recipe.importance_cap:
            gap_BR = (experience.own_BR - batch.log_probs_BR)[rows].clamp(-20, 20)
            pg_BR = pg_BR * gap_BR.exp().clamp(max=recipe.importance_cap)
        kl_BR = k3_kl_BR(log_probs_BR, experience.reference_BR[rows], tap("kl_gap"))
        spread = 1.0
        if recipe.length_exponent:
            weights_BR = token_weights_BR(mask_BR, recipe.length_exponent)
            used = weights_BR[mask_BR > 0]
            spread = float(used.max() / used.min())
            pg_BR, kl_BR = pg_BR * weights_BR, kl_BR * weights_BR
        pg_loss, kl_loss = masked_mean(pg_BR, mask_BR), masked_mean(kl_BR, mask_BR)
        loss = pg_loss + recipe.kl_coef * kl_loss
        balancing = 0.0
        if routers:
            term = recipe.aux_coef * balancing_loss(routers, live_T, trainer.num_experts)
            loss, balancing = loss + term, float(term.detach())
        optimizer.zero_grad()
        loss.backward()
    for name, parameter in trainer.model.named_parameters():
        if (gradient := parameter.grad) is not None:
            parameter.grad = injector.transform(Stage.GRADIENTS, name, gradient, context)
    norm = float(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), recipe.max_grad_norm))
    takes_step = math.isfinite(norm) or not recipe.skip_nonfinite
    if takes_step and injector.event(Stage.OPTIMIZER, context) is Action.DO:
        optimizer.step()
    own_BR = (log_probs_BR.detach() - experience.own_BR[rows]).clamp(-20, 20)
    return {
        "actor/pg_loss": float(pg_loss.detach()),
        "actor/kl_loss": float(kl_loss.detach()),
        "actor/loss": float(loss.detach()),
        "actor/grad_norm": norm,
        "actor/ppo_kl": float(masked_mean(-log_ratio_BR.detach(), mask_BR)),
        "actor/pg_clipfrac": float(masked_mean((clipped_BR > gain_BR).float().detach(), mask_BR)),
        "actor/nonfinite_grad": float(not math.isfinite(norm)),
        "actor/nonfinite_loss": float(not math.isfinite(float(loss.detach()))),
        "clipped_norm": min(norm, recipe.max_grad_norm),
        "ratio_deviation": float(masked_mean((own_BR.exp() - 1).abs(), mask_BR)),
        "token_weight_spread": spread,
        "balancing_term": balancing,
    }
