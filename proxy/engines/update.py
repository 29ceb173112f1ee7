"""One optimizer update of GRPO: the loss (clipped ratio and k3 KL to the frozen reference), its gradients, the step.

Legend of shape suffixes: ``_B`` responses, ``_R`` response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proxy.engines.injector import Injector
from proxy.engines.metrics import masked_mean
from proxy.engines.policy import Policy, token_log_probs
from proxy.engines.rollout import Batch
from proxy.specs import Recipe
from taxonomy.stages import Action, Stage, StageContext


def k3_kl_BR(log_probs_BR: Tensor, reference_BR: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy ‖ reference) per token, clamped as verl's ``low_var_kl`` is."""
    gap_BR = (reference_BR - log_probs_BR).clamp(-20, 20)
    return (gap_BR.exp() - gap_BR - 1).clamp(-10, 10)


def update(
    trainer: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rows: Tensor,
    old_BR: Tensor,
    reference_BR: Tensor,
    advantages_B: Tensor,
    recipe: Recipe,
    injector: Injector,
    context: StageContext,
) -> dict[str, float]:
    """Make one optimizer update on the given rows of the batch and return its metrics.

    The loss is the clipped surrogate of PPO plus `kl_coef` times the k3 KL to the reference, both token means.
    `actor/grad_norm` is the norm before clipping, as in verl.
    """
    mask_BR = batch.response_mask_BR[rows].float()
    log_probs_BR, _ = token_log_probs(
        trainer, batch.tokens_BL[rows], batch.mask_BL[rows], mask_BR.shape[1], 1 / recipe.temperature
    )
    log_ratio_BR = (log_probs_BR - old_BR[rows]).clamp(-20, 20)
    ratio_BR = log_ratio_BR.exp()
    gain_BR = -advantages_B[rows, None] * ratio_BR
    clipped_BR = -advantages_B[rows, None] * ratio_BR.clamp(1 - recipe.clip_ratio, 1 + recipe.clip_ratio)
    pg_loss = masked_mean(torch.maximum(gain_BR, clipped_BR), mask_BR)
    kl_loss = masked_mean(k3_kl_BR(log_probs_BR, reference_BR[rows]), mask_BR)
    loss = pg_loss + recipe.kl_coef * kl_loss
    optimizer.zero_grad()
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), recipe.max_grad_norm)
    if injector.event(Stage.OPTIMIZER, context) is Action.DO:
        optimizer.step()
    return {
        "actor/pg_loss": float(pg_loss.detach()),
        "actor/kl_loss": float(kl_loss.detach()),
        "actor/loss": float(loss.detach()),
        "actor/grad_norm": float(grad_norm),
        "actor/ppo_kl": float(masked_mean(-log_ratio_BR.detach(), mask_BR)),
        "actor/pg_clipfrac": float(masked_mean((clipped_BR > gain_BR).float().detach(), mask_BR)),
        "clipped_norm": min(float(grad_norm), recipe.max_grad_norm),
    }
