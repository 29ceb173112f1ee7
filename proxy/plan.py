"""What a build would do, from the headers alone: budget checks, sizes, warnings. No torch, no tensor read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from proxy.checkpoint import Checkpoint, open_checkpoint
from proxy.errors import BuildError
from proxy.families import Layout, Role, understand

ALIGNMENT = 16
"""Grouped matrix kernels and expert parallelism like expert counts that are multiples of this."""


@dataclass(frozen=True)
class Plan:
    """What a build would do.

    Attributes:
        family: `model_type` of the checkpoint.
        experts: Routed experts a layer now.
        kept: Routed experts a layer afterwards.
        top_k: Experts a token is routed to, before and after.
        groups: Expert groups (1: none).
        quota: Experts kept in each group.
        moe_layers: Indices of the MoE layers.
        parameters_before: Elements of all tensors.
        parameters_after: The same for the proxy.
        bytes_before: Size of all tensors.
        bytes_after: Size of the proxy's tensors.
        mtp_tensors: Tensors of multi-token-prediction layers, which are dropped.
        warnings: Plain sentences.
    """

    family: str
    experts: int
    kept: int
    top_k: int
    groups: int
    quota: int
    moe_layers: tuple[int, ...]
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    mtp_tensors: int
    warnings: tuple[str, ...]


def make_plan(folder: str | Path, experts: int) -> Plan:
    """Check a budget against a checkpoint folder.

    Args:
        folder: Checkpoint folder.
        experts: Experts to keep a layer (K).

    Raises:
        CheckpointError: The checkpoint cannot be read or is not understood.
        BuildError: The budget does not fit it.
    """
    checkpoint = open_checkpoint(folder)
    return plan_layout(checkpoint, understand(checkpoint), experts)


def plan_layout(checkpoint: Checkpoint, layout: Layout, experts: int) -> Plan:
    """Do the same as `make_plan` for a checkpoint that was already opened."""
    warnings = check_budget(layout, experts)
    parameters = size = mtp = 0
    for name, part in layout.parts.items():
        info = checkpoint.tensors[name]
        if part.role is Role.DROP:
            mtp += 1
            continue
        if part.role is Role.EXPERT and experts <= part.expert < layout.experts:
            continue  # which ones go does not matter for the size: all experts are alike
        sliced = part.role in (Role.ROWS, Role.FUSED)
        kept = part.records - layout.experts + experts if sliced else part.records
        parameters += prod(info.shape) // part.records * kept
        size += info.nbytes // part.records * kept
    return Plan(
        family=layout.family.model_type,
        experts=layout.experts,
        kept=experts,
        top_k=layout.top_k,
        groups=layout.groups,
        quota=experts // layout.groups,
        moe_layers=layout.moe_layers,
        parameters_before=checkpoint.parameters,
        parameters_after=parameters,
        bytes_before=sum(info.nbytes for info in checkpoint.tensors.values()),
        bytes_after=size,
        mtp_tensors=mtp,
        warnings=warnings,
    )


def check_budget(layout: Layout, experts: int) -> tuple[str, ...]:
    """Check how many experts may be kept; return warnings.

    Args:
        layout: The checkpoint's layout.
        experts: Experts to keep a layer (K).

    Raises:
        BuildError: K is above the checkpoint's count, below top-k, or does not fit the expert groups.
    """
    keep = f"cannot keep {experts} experts a layer"
    if experts > layout.experts:
        raise BuildError(f"{keep}: the checkpoint has {layout.experts}", f"choose at most {layout.experts}")
    if experts < layout.top_k:
        raise BuildError(
            f"{keep}: each token is routed to {layout.top_k}",
            f"choose at least {layout.top_k}, better twice that",
        )
    warnings = []
    if experts == layout.experts:
        warnings.append(f"the checkpoint has {experts} experts a layer, so none is taken out")
    if layout.groups > 1:
        warnings += _check_groups(layout, experts, keep)
    if experts < 2 * layout.top_k:
        warnings.append(
            f"{experts} experts are fewer than twice top-{layout.top_k}: tokens have little choice left, "
            "so routing faults show less"
        )
    if experts % ALIGNMENT:
        warnings.append(
            f"{experts} experts are no multiple of {ALIGNMENT}, which some kernels and parallel layouts need"
        )
    return tuple(warnings)


def _check_groups(layout: Layout, experts: int, keep: str) -> list[str]:
    """Check the quota of each group: equal, large enough for its score and for top-k."""
    groups, family = layout.groups, layout.family
    least = max(family.group_score_experts, -(-layout.top_k // layout.topk_groups))
    mend = f"choose a multiple of {groups}, at least {least * groups}"
    quota = experts // groups
    if experts % groups:
        raise BuildError(f"{keep}: its {groups} expert groups would be of unequal size", mend)
    if quota < family.group_score_experts:
        raise BuildError(
            f"{keep}: a group's score adds up its {family.group_score_experts} best experts", mend
        )
    if quota * layout.topk_groups < layout.top_k:
        raise BuildError(
            f"{keep}: a token may use {layout.topk_groups} of {groups} groups, which would leave it "
            f"{quota * layout.topk_groups} experts for its top {layout.top_k}",
            mend,
        )
    if quota * layout.topk_groups == layout.top_k:
        return [
            f"{quota} experts a group leave no choice inside the {layout.topk_groups} groups a token may use"
        ]
    return []
