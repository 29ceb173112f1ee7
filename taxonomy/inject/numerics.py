"""Injections of the category "operator implementation and numerical consistency"."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from taxonomy.stages import Compound, Stage, StageContext, Transform, on

FP8_MAX = 448.0
"""Largest number of fp8 e4m3."""
GOLDEN = 0.6180339887498949


def round_mantissa(tensor: Tensor, bits: int) -> Tensor:
    """Round to `bits` explicit mantissa bits (bf16 has 7, fp8 e4m3 3, e5m2 2), ties to even, any exponent."""
    mantissa, exponent = torch.frexp(tensor.float())
    steps = 2.0 ** (bits + 1)  # frexp's mantissa lies in [0.5, 1): its first bit is the implicit one
    return torch.ldexp(torch.round(mantissa * steps) / steps, exponent).to(tensor.dtype)


def rollout_logprob_precision(params: Mapping[str, float]) -> Transform:
    """Round the scaling factor of the rollout's log-probabilities (the paper's Rollout LogP Precision fault)."""
    bits = int(params["mantissa_bits"])
    return on("scale", lambda scale, _context: round_mantissa(scale, bits))


def rollout_weight_quantization(params: Mapping[str, float]) -> Transform:
    """Round every matrix on its way to the rollout, one scale a tensor (a low-precision rollout, exact trainer)."""
    bits = int(params["mantissa_bits"])

    def transform(_name: str, tensor: Tensor, _context: StageContext) -> Tensor:
        return round_mantissa(tensor, bits) if tensor.ndim >= 2 else tensor

    return transform


def straight_through(tensor: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded` with the gradient of `tensor`: rounding itself has none."""
    return tensor + (rounded - tensor).detach()


def rollout_temperature_missing(params: Mapping[str, float]) -> Transform:
    """Leave the temperature out of the rollout's reported log-probabilities: scale → scale^(1 − omitted)."""
    kept = 1 - params["omitted"]
    return on("scale", lambda scale, _context: scale**kept)


def quantization_rules_differ(params: Mapping[str, float]) -> Compound:
    """Quantise both sides, the trainer with power-of-two scales and the rollout with exact ones (amax / 448)."""
    bits = int(params["mantissa_bits"])

    def rollout(_name: str, tensor: Tensor, _context: StageContext) -> Tensor:
        if tensor.ndim < 2:
            return tensor
        scale = tensor.abs().max().clamp(min=1e-12) / FP8_MAX
        return round_mantissa(tensor / scale, bits) * scale

    def trainer(name: str, tensor: Tensor, _context: StageContext) -> Tensor:
        # A power-of-two scale only moves the exponent: the grid is that of the values themselves.
        quantised = name.startswith("weights/") and tensor.ndim >= 2
        return round_mantissa(tensor, bits) if quantised else tensor

    return Compound(transforms={Stage.SYNC: rollout, Stage.FORWARD: trainer})


def attention_breaks_when_long(params: Mapping[str, float]) -> Transform:
    """Lose the first `lost` keys of every sequence of the rollout that is longer than `after` tokens."""
    after, lost = int(params["after"]), int(params["lost"])

    def change(mask_BL: Tensor, _context: StageContext) -> Tensor:
        place_BL = mask_BL.cumsum(-1)
        long_B1 = place_BL[:, -1:] > after
        hidden_BL = long_B1 & (place_BL <= lost) & (mask_BL == 1)
        return torch.where(hidden_BL, 0, mask_BL) if hidden_BL.any() else mask_BL

    return on("attention_mask", change)


def packed_sequences_leak(params: Mapping[str, float]) -> Transform:
    """Let every sequence but the first of a pack attend to the sequence before it, as without segment borders."""
    pack = int(params["pack"])

    def change(inputs: tuple[Tensor, Tensor], _context: StageContext) -> tuple[Tensor, Tensor]:
        tokens_BL, mask_BL = inputs
        first_B1 = torch.arange(len(tokens_BL), device=tokens_BL.device)[:, None] % pack == 0
        before_BL = torch.where(first_B1, 0, mask_BL.roll(1, 0))
        return torch.cat([tokens_BL.roll(1, 0), tokens_BL], 1), torch.cat([before_BL, mask_BL], 1)

    return on("inputs", change)


def exp_overflow(params: Mapping[str, float]) -> Compound:
    """Exponentiate an unclamped log-probability gap in one token's KL term, and take the step whatever comes out.

    The k3 estimate clamps its value after the exponential: the loss stays finite, its gradient is 0 · ∞.
    """
    gap = params["gap"]

    def change(gap_BR: Tensor, _context: StageContext) -> Tensor:
        spike_BR = torch.zeros_like(gap_BR)
        spike_BR[0, 0] = gap
        return gap_BR + spike_BR

    return Compound(overrides={"skip_nonfinite": False}, transforms={Stage.LOSS: on("kl_gap", change)})


def half_precision_gradients(params: Mapping[str, float]) -> Transform:
    """Overflow one element of the first gradient tensor in a `share` of the steps, as fp16 without a scaler does."""
    share = params["share"]

    def transform(_name: str, gradient: Tensor, context: StageContext) -> Tensor:
        # Bresenham's rule spreads the share evenly over the steps, for every tensor alike.
        if int(context.step * share) == int((context.step - 1) * share):
            return gradient
        changed = gradient.clone()
        changed.view(-1)[0] = float("inf")
        return changed

    return transform


def batch_variant_kernels(params: Mapping[str, float]) -> Transform:
    """Round the training side's logits on a grid that depends on the number of rows computed together.

    Stands for kernels that split their sums by batch shape: the same token gets another last bit in another batch.
    """
    bits = int(params["mantissa_bits"])

    def change(logits_BRV: Tensor, _context: StageContext) -> Tensor:
        shift = 1 + (len(logits_BRV) * GOLDEN) % 1
        return straight_through(logits_BRV, round_mantissa(logits_BRV * shift, bits) / shift)

    return on("logits", change)


def gradients_in_low_precision(params: Mapping[str, float]) -> Transform:
    """Round every gradient, as a reduction over ranks in a low-precision format does."""
    bits = int(params["mantissa_bits"])
    return lambda _name, gradient, _context: round_mantissa(gradient, bits)
