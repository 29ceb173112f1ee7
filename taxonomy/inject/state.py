"""Injections of the category "framework and model-state consistency" that act while a run goes on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from taxonomy.stages import Action, EventRule, Projection, StageContext, Transform, on

_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..+)")


def weight_sync_skipped(_params: Mapping[str, float]) -> EventRule:
    """Never refresh the rollout's weights while the fault is active."""
    return lambda _context: Action.SKIP


def stale_weights(params: Mapping[str, float]) -> EventRule:
    """Refresh the rollout's weights only every `interval` steps."""
    interval = int(params["interval"])
    return lambda context: Action.DO if context.step % interval == 0 else Action.SKIP


def weight_conversion_error(params: Mapping[str, float]) -> Transform:
    """Give the `layers` decoder layers after the first the weights of the layer before: a layer map off by one.

    Only tensors whose neighbour has the same name and shape are mixed up, as by a converter that does not fail.
    """
    count = int(params["layers"])
    sent: dict[str, Tensor] = {}

    def transform(name: str, tensor: Tensor, _context: StageContext) -> Tensor:
        found = _LAYER.fullmatch(name)
        if found is None or int(found[2]) > count:
            return tensor
        stem, layer, rest = found[1], int(found[2]), found[3]
        sent[name] = tensor.detach().clone()
        before = sent.get(f"{stem}{layer - 1}{rest}")
        return tensor if before is None or before.shape != tensor.shape else before

    return transform


def stale_prefix_cache(params: Mapping[str, float]) -> EventRule:
    """Flush the prefix cache only every `interval` steps instead of after every update of the weights."""
    interval = int(params["interval"])
    return lambda context: Action.SKIP if (context.step - context.from_step) % interval else Action.DO


def tensor_parallel_numerics(params: Mapping[str, float]) -> Transform:
    """Split the attention's output projection by rows over `ranks`: partial sums rounded and reduced in bf16."""
    ranks = int(params["ranks"])

    def change(whole: Any, _context: StageContext) -> Any:
        if not isinstance(whole, Projection):
            return whole
        pieces = zip(whole.input.chunk(ranks, -1), whole.weight.chunk(ranks, -1), strict=True)
        partial = [(piece.float() @ weight.float().T).bfloat16() for piece, weight in pieces]
        total = partial[0]
        for addend in partial[1:]:
            total = total + addend
        return replace(whole, output=total.to(whole.output.dtype))

    return on("o_proj", change)


def prompt_mismatch(params: Mapping[str, float]) -> Transform:
    """Put `line_breaks` line breaks before every prompt on the trainer's side: a chat template of its own."""
    count = int(params["line_breaks"])

    def change(inputs: Any, context: StageContext) -> Any:
        if "encode" not in context.facts:
            return inputs
        tokens_BL, mask_BL = inputs
        extra: list[int] = context.facts["encode"]("\n" * count)
        pad_BX = torch.zeros(len(tokens_BL), len(extra), dtype=tokens_BL.dtype, device=tokens_BL.device)
        wide_BL = torch.cat([pad_BX + tokens_BL[0, 0], tokens_BL], 1)
        seen_BL = torch.cat([pad_BX, mask_BL], 1)
        first_B = seen_BL.argmax(-1)  # left padding: the first real token of a row
        rows_B = torch.arange(len(tokens_BL), device=tokens_BL.device)
        for place, token in enumerate(reversed(extra), 1):
            wide_BL[rows_B, first_B - place] = token
            seen_BL[rows_B, first_B - place] = 1
        return wide_BL, seen_BL

    return on("inputs", change)


def logprob_shift(params: Mapping[str, float]) -> Transform:
    """Hand the rollout's log-probabilities to the trainer `offset` positions off."""
    offset = int(params["offset"])
    return on("rollout_log_probs", lambda values, _context: torch.roll(values, offset, -1))
