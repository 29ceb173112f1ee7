"""Injections of the category "operator implementation and numerical consistency"."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from taxonomy.stages import StageContext, Transform


def round_mantissa(tensor: Tensor, bits: int) -> Tensor:
    """Round to `bits` explicit mantissa bits (bf16 has 7, fp8 e4m3 3, e5m2 2), ties to even, any exponent."""
    mantissa, exponent = torch.frexp(tensor.float())
    steps = 2.0 ** (bits + 1)  # frexp's mantissa lies in [0.5, 1): its first bit is the implicit one
    return torch.ldexp(torch.round(mantissa * steps) / steps, exponent).to(tensor.dtype)


def rollout_logprob_precision(params: Mapping[str, float]) -> Transform:
    """Round the scaling factor of the rollout's log-probabilities (the paper's Rollout LogP Precision fault)."""
    bits = int(params["mantissa_bits"])

    def transform(name: str, tensor: Tensor, _context: StageContext) -> Tensor:
        return round_mantissa(tensor, bits) if name == "scale" else tensor

    return transform


def rollout_weight_quantization(params: Mapping[str, float]) -> Transform:
    """Round every matrix on its way to the rollout, one scale a tensor (a low-precision rollout, exact trainer)."""
    bits = int(params["mantissa_bits"])

    def transform(_name: str, tensor: Tensor, _context: StageContext) -> Tensor:
        return round_mantissa(tensor, bits) if tensor.ndim >= 2 else tensor

    return transform
