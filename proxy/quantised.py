"""Quantised tensors as float32: what calibration computes with. The builder itself only ever copies their bytes.

Three layouts are read, told apart by the names on disk:
- FP8 with block scales: ``X.weight`` (F8_E4M3) and ``X.weight_scale_inv``, one factor a block (128 x 128 in
  DeepSeek-V3); also compressed-tensors' ``X.weight_scale``, one factor a tensor, row or group of columns, and
  DeepSeek-V4's ``X.scale``. Factors may be F8_E8M0: powers of two.
- compressed-tensors "pack-quantized": ``X.weight_packed`` (I32, the lowest bits first), ``X.weight_scale``,
  optional ``X.weight_zero_point`` (packed along the rows), ``X.weight_shape``.
- MXFP4 (OCP Microscaling 1.0): ``X_blocks`` (two E2M1 values a byte, the low half first, 32 values a block)
  and ``X_scales`` (E8M0, bias 127); ``X`` comes out with its last two axes swapped, as gpt-oss has it in memory.

Shape suffixes: R rows, C columns, B blocks of columns, P packed words, V values of a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from proxy.companions import factors, is_companion
from proxy.errors import UNCALIBRATED, BuildError

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

ROWS_AT_ONCE = 512
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def to_float(raw: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Return tensors as float32 under the names of an unquantised checkpoint; `raw` is emptied on the way.

    Args:
        raw: Tensors as on disk, each with its companions.
        config: The checkpoint's `quantization_config`, empty where there is none.

    Raises:
        BuildError: A tensor is quantised in a way that is not known here.
    """
    import torch

    plain: Tensors = {}
    for name in [name for name in raw if not is_companion(name, raw)]:
        tensor = raw.pop(name)
        if name.endswith(".weight_packed") and tensor.dtype is torch.int32:
            base = name.removesuffix("_packed")
            plain[base] = _unpacked(base, tensor, raw, config)
        elif name.endswith("_blocks") and tensor.dtype is torch.uint8:
            plain[name.removesuffix("_blocks")] = mxfp4(tensor, raw[f"{name.removesuffix('_blocks')}_scales"])
        elif tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            scale = next((raw[one] for one in factors(name) if one in raw), None)
            if scale is None:
                raise BuildError(
                    f"tensor {name!r} is {tensor.dtype}, and none of {', '.join(factors(name))} is there",
                    "complete the download; with factors of another kind, use --strategy random or first_k",
                )
            if tensor.dtype is torch.int8 and scale.dtype is torch.float8_e8m0fnu:
                raise BuildError(
                    f"tensor {name!r} holds two 4-bit values a byte, which are not read",
                    "calibrate an FP8 or BF16 copy, or use --strategy random or first_k",
                )
            plain[name] = scaled(tensor, scale)
        elif tensor.dtype.is_floating_point:
            plain[name] = tensor.float()
        elif tensor.dtype in (torch.int64, torch.int32) and "tid2eid" in name:
            plain[name] = tensor
        else:
            raise BuildError(
                f"tensor {name!r} is {tensor.dtype}, and how it is quantised is not known here",
                "calibrate an unquantised copy, or use --strategy random or first_k",
            )
    raw.clear()
    return plain


def scaled(tensor_RC: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return FP8 values times their factors: one in all, one a row, or one a block, whatever the block's size."""
    import torch

    scale = scale.float()
    if scale.numel() == 1 or tensor_RC.ndim < 2:
        return torch.mul(tensor_RC.float(), scale)
    rows, columns = tensor_RC.shape[-2:]
    result = torch.empty(tensor_RC.shape, dtype=torch.float32)
    if scale.ndim < tensor_RC.ndim:
        scale = scale.reshape(*scale.shape, *[1] * (tensor_RC.ndim - scale.ndim))
    block_rows, block_columns = block_size(rows, scale.shape[-2]), block_size(columns, scale.shape[-1])
    if (-(-rows // block_rows), -(-columns // block_columns)) != tuple(scale.shape[-2:]):
        raise BuildError(
            f"factors of shape {tuple(scale.shape)} do not fit values of shape {tuple(tensor_RC.shape)}",
            "complete the download",
        )
    for start in range(0, rows, ROWS_AT_ONCE):
        stop = min(rows, start + ROWS_AT_ONCE)
        part = result[..., start:stop, :]
        part.copy_(tensor_RC[..., start:stop, :])
        factor = scale[..., torch.arange(start, stop) // block_rows, :]
        if columns == scale.shape[-1] * block_columns:
            part.view(*part.shape[:-1], scale.shape[-1], block_columns).mul_(factor[..., None])
            continue
        for block in range(scale.shape[-1]):
            span = slice(block * block_columns, (block + 1) * block_columns)
            part[..., span] *= factor[..., block : block + 1]
    return result


def block_size(length: int, blocks: int) -> int:
    """Return the length of a block: the power of two that gives this many, the last one cut; else an even share."""
    size = -(-length // blocks)
    power = 1 << (size - 1).bit_length()
    return power if -(-length // power) == blocks else size


def _unpacked(name: str, packed_RP: torch.Tensor, raw: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    """Return a compressed-tensors "pack-quantized" weight as float32."""
    import torch

    scale_RB = raw[f"{name}_scale"].float()
    rows = packed_RP.shape[0]
    columns = int(raw[f"{name}_shape"].flatten()[-1]) if f"{name}_shape" in raw else 0
    bits = _bits(config, packed_RP.shape[1], columns)
    values_RC = unpack(packed_RP, bits, columns or packed_RP.shape[1] * 32 // bits)
    zero: Any = 2 ** (bits - 1)
    if f"{name}_zero_point" in raw:
        zero_BR = unpack(raw[f"{name}_zero_point"].T.contiguous(), bits, rows)
        zero = zero_BR.T.repeat_interleave(values_RC.shape[1] // scale_RB.shape[1], dim=1)
    if f"{name}_g_idx" in raw and (raw[f"{name}_g_idx"] >= 0).all():
        scale_RC = scale_RB[:, raw[f"{name}_g_idx"].long()]
    else:
        scale_RC = scale_RB.repeat_interleave(values_RC.shape[1] // scale_RB.shape[1], dim=1)
    plain_RC: torch.Tensor = (values_RC - zero).to(torch.float32) * scale_RC
    return plain_RC


def unpack(packed_RP: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Return unsigned values of 32-bit words along the last axis, the lowest bits first, [R, columns]."""
    import torch

    shifts_V = torch.arange(0, 32 - 32 % bits, bits, dtype=torch.int32)
    values_RPV = (packed_RP.to(torch.int32)[..., None] >> shifts_V) & (2**bits - 1)
    values_RC: torch.Tensor = values_RPV.reshape(len(packed_RP), -1)[:, :columns]
    return values_RC


def _bits(config: Mapping[str, Any], words: int, columns: int) -> int:
    """Return how many bits a value has, from its shape or else from the config."""
    if columns:
        return 32 // -(-columns // words)
    groups = config.get("config_groups") or {}
    found = {int((group.get("weights") or {}).get("num_bits") or 0) for group in groups.values()} - {0}
    if len(found) != 1:
        raise BuildError(
            "the checkpoint's quantization_config does not say how many bits a weight has", UNCALIBRATED
        )
    return found.pop()


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return MXFP4 weights as float32, their last two axes swapped: [.., R, B, 16] -> [.., C, R]."""
    import torch

    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).long()
    values = table[pairs].flatten(-2)  # [.., R, B, 32]
    exponent = scales.view(torch.uint8).to(torch.int32) - 127
    return torch.ldexp(values, exponent[..., None]).flatten(-2).transpose(-1, -2).contiguous()
