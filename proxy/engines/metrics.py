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
    `rollout_probs_diff_*` differences of *probabilities*. With w = p_trainer / p_rollout of a token,
    `rollout_is_mean` is the mean w and `rollout_is_eff_sample_size` is 1 / mean((w / mean w)²), the share of the
    sample that is left after weighting. `late_gap` is the mean |log-probability gap| of the later half of the
    response positions in use minus that of the earlier half.
    """
    live = mask_BR.bool()
    rollout, trainer = rollout_BR[live].double(), trainer_BR[live].double()
    gap = (rollout.exp() - trainer.exp()).abs()
    log_ratio = (trainer - rollout).clamp(-20, 20)
    count_B = mask_BR.sum(-1).clamp(min=1)
    ppl_B = ((rollout_BR - trainer_BR) * mask_BR).sum(-1) / count_B
    pair = torch.stack([rollout.exp(), trainer.exp()])
    weight = log_ratio.exp()
    log_gap = (trainer - rollout).abs()
    position = mask_BR.cumsum(-1)[live]
    late = position > (int(position.max()) + 1) // 2
    return {
        "training/rollout_probs_diff_mean": float(gap.mean()),
        "training/rollout_probs_diff_max": float(gap.max()),
        "training/rollout_probs_diff_std": float(gap.std()),
        "training/rollout_actor_probs_pearson_corr": float(torch.corrcoef(pair)[0, 1]),
        "rollout_corr/kl": float(-log_ratio.mean()),
        "rollout_corr/k3_kl": float((weight - 1 - log_ratio).mean()),
        "rollout_corr/chi2_token": float((2 * log_ratio).exp().mean() - 1),
        "rollout_corr/log_ppl_abs_diff": float(ppl_B.abs().mean()),
        "rollout_corr/logprob_abs_diff": float(log_gap.mean()),
        "rollout_corr/mult_prob_error": float(log_gap.clamp(max=20).exp().mean()),
        "rollout_corr/rollout_is_mean": float(weight.mean()),
        "rollout_corr/rollout_is_eff_sample_size": float(weight.mean().square() / weight.square().mean()),
        "rollout_corr/late_gap": float(log_gap[late].mean() - log_gap[~late].mean()) if late.any() else 0.0,
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


def flips(
    before: list[tuple[Tensor, Tensor]],
    after: list[tuple[Tensor, Tensor]],
    layers: tuple[int, ...],
    live: Tensor,
) -> dict[str, float]:
    """Return the share of expert choices of the same tokens that changed between two states of the weights.

    Args:
        before: (expert ids, weights) of each MoE layer, rows = tokens.
        after: The same tokens later.
        layers: Decoder-layer index of each entry.
        live: Mask over the rows, True for real tokens.
    """
    from proxy.engines.injector import route_agreement

    share = [
        1 - route_agreement((old[0][live], old[1][live]), (new[0][live], new[1][live]))
        for old, new in zip(before, after, strict=True)
    ]
    by_layer = {f"routing/flips/layer_{layer}": value for layer, value in zip(layers, share, strict=True)}
    return by_layer | {"routing/flips/mean": sum(share) / len(share)}
