"""The metrics of one step, under verl's names.

Legend of shape suffixes: ``_B`` responses, ``_R`` response positions, ``_L`` positions, ``_K`` experts a token,
``_E`` experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Return the mean over real tokens (verl's ``token-mean``)."""
    return (values_BR * mask_BR).sum() / mask_BR.sum().clamp(min=1)


def mismatch(rollout_BR: Tensor, trainer_BR: Tensor, mask_BR: Tensor) -> dict[str, float]:
    """Return the rollout–trainer mismatch metrics from two sets of log-probabilities of the same tokens.

    `rollout_corr/kl` is the k1 estimate (nats, signed), `k3_kl` the k3 estimate, `chi2_token` the χ² divergence,
    `rollout_probs_diff_*` differences of *probabilities*.
    """
    live = mask_BR.bool()
    rollout, trainer = rollout_BR[live].double(), trainer_BR[live].double()
    gap = (rollout.exp() - trainer.exp()).abs()
    log_ratio = (trainer - rollout).clamp(-20, 20)
    count_B = mask_BR.sum(-1).clamp(min=1)
    ppl_B = ((rollout_BR - trainer_BR) * mask_BR).sum(-1) / count_B
    pair = torch.stack([rollout.exp(), trainer.exp()])
    return {
        "training/rollout_probs_diff_mean": float(gap.mean()),
        "training/rollout_probs_diff_max": float(gap.max()),
        "training/rollout_probs_diff_std": float(gap.std()),
        "training/rollout_actor_probs_pearson_corr": float(torch.corrcoef(pair)[0, 1]),
        "rollout_corr/kl": float(-log_ratio.mean()),
        "rollout_corr/k3_kl": float((log_ratio.exp() - 1 - log_ratio).mean()),
        "rollout_corr/chi2_token": float((2 * log_ratio).exp().mean() - 1),
        "rollout_corr/log_ppl_abs_diff": float(ppl_B.abs().mean()),
    }


def routing(
    rollout: list[tuple[Tensor, Tensor]],
    trainer: list[tuple[Tensor, Tensor]],
    layers: tuple[int, ...],
    live: Tensor,
    num_experts: int,
) -> dict[str, float]:
    """Return route agreement rollout–trainer and load of the trainer, by layer and as means.

    Args:
        rollout: (expert ids, weights) of each MoE layer, rows = tokens.
        trainer: The same tokens in the trainer.
        layers: Decoder-layer index of each entry.
        live: Mask over the rows, True for real tokens.
        num_experts: Experts of a layer.
    """
    from proxy.engines.injector import route_agreement

    agreement, entropy, largest = [], [], []
    metrics: dict[str, float] = {}
    for layer, left, right in zip(layers, rollout, trainer, strict=True):
        agreement.append(route_agreement((right[0][live], right[1][live]), (left[0][live], left[1][live])))
        load_E = torch.bincount(right[0][live].flatten(), minlength=num_experts).double()
        share_E = load_E / load_E.sum()
        entropy.append(float(torch.special.entr(share_E).sum()))
        largest.append(float(share_E.max() * num_experts))
        metrics |= {
            f"routing/agreement/layer_{layer}": agreement[-1],
            f"routing/load_entropy/layer_{layer}": entropy[-1],
            f"routing/load_max/layer_{layer}": largest[-1],
        }
    count = len(layers)
    return metrics | {
        "routing/agreement/mean": sum(agreement) / count,
        "routing/load_entropy/mean": sum(entropy) / count,
        "routing/load_max/mean": sum(largest) / count,
    }
