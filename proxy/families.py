"""MoE families as data: where a checkpoint keeps its experts, and what every one of its tensors is.

A family is one declarative entry. `understand` lays it over an opened checkpoint and gives each tensor a
role. In a MoE layer nothing may be left over, because a per-expert tensor that is copied by mistake loads
clean and is wrong. Third-party packages add families through the entry-point group
``rl_diagnose.families`` (a callable that returns an iterable of `Family`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from proxy.checkpoint import Checkpoint, TensorInfo
from proxy.errors import CheckpointError

_NUMBER = r"(0|[1-9]\d{0,5})"  # as the names are written back: no leading zeros


@dataclass(frozen=True)
class Family:
    """How one family of checkpoints names things. Config keys may be dotted (``text_config.num_experts``).

    Attributes:
        model_type: `model_type` of the config.
        counts: Config keys of the expert count; every one that is present is edited.
        top_k: Config key of the experts a token is routed to.
        layers: Config key of the number of layers of the backbone.
        layer: Prefix of a layer's tensors, with ``{L}``.
        block: Prefix of the MoE block inside a layer.
        router: Router rows inside the block, one row an expert.
        experts: Prefix of one expert's tensors inside the block, with ``{E}``.
        vectors: Other tensors inside the block with one entry an expert (selection bias), sliced.
        shared: Prefixes inside the block that every token passes through; byte copy.
        groups: Config key of the number of expert groups ("" for a family without groups).
        topk_groups: Config key of the groups a token may use.
        group_score_experts: Experts of a group that its score adds up; a group may not have fewer.
        mtp_counts: Config keys of the number of multi-token-prediction layers, kept as further layers
            behind the backbone; they are dropped and the count is set to 0. Empty: no such layers.
    """

    model_type: str
    counts: tuple[str, ...]
    top_k: str = "num_experts_per_tok"
    layers: str = "num_hidden_layers"
    layer: str = "model.layers.{L}."
    block: str = "mlp."
    router: str = "gate.weight"
    experts: str = "experts.{E}."
    vectors: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    groups: str = ""
    topk_groups: str = ""
    group_score_experts: int = 1
    mtp_counts: tuple[str, ...] = ()


FAMILIES = (
    # transformers writes num_local_experts where the hub's configs have num_experts.
    Family(model_type="qwen3_moe", counts=("num_experts", "num_local_experts")),
    Family(
        model_type="deepseek_v3",
        counts=("n_routed_experts",),
        vectors=("gate.e_score_correction_bias",),
        shared=("shared_experts.",),
        groups="n_group",
        topk_groups="topk_group",
        group_score_experts=2,
        mtp_counts=("num_nextn_predict_layers", "num_mtp_layers"),
    ),
)


@cache
def families() -> dict[str, Family]:
    """Return the known families by `model_type`: the shipped ones and those of installed packages."""
    known = list(FAMILIES)
    for point in entry_points(group="rl_diagnose.families"):
        known += point.load()()
    by_type = {family.model_type: family for family in known}
    assert len(by_type) == len(known), "two families share a model_type"
    return by_type


class Role(Enum):
    """What happens to a tensor when experts are taken out."""

    COPY = "copied byte for byte"
    EXPERT = "one expert's own: kept under a new number or dropped"
    ROWS = "one row or entry an expert: sliced"
    DROP = "multi-token prediction: dropped"


@dataclass(frozen=True)
class Part:
    """Role of one tensor; `layer`, `expert`, `rest` (name behind the expert's prefix) where they apply."""

    role: Role
    layer: int = -1
    expert: int = -1
    rest: str = ""


@dataclass(frozen=True)
class Layout:
    """A family laid over one checkpoint.

    Attributes:
        family: The family.
        experts: Routed experts a layer (N).
        top_k: Experts a token is routed to.
        groups: Expert groups (1: none), contiguous and of equal size.
        topk_groups: Groups a token may use.
        moe_layers: Indices of the MoE layers.
        parts: Role of every tensor, by name.
    """

    family: Family
    experts: int
    top_k: int
    groups: int
    topk_groups: int
    moe_layers: tuple[int, ...]
    parts: dict[str, Part] = field(default_factory=dict)

    def block(self, layer: int) -> str:
        """Return the name prefix of a layer's MoE block."""
        return self.family.layer.replace("{L}", str(layer)) + self.family.block

    def router(self, layer: int) -> str:
        """Return the name of a layer's router rows."""
        return self.block(layer) + self.family.router

    def expert(self, layer: int, expert: int, rest: str) -> str:
        """Return the name of one of an expert's tensors."""
        return self.block(layer) + self.family.experts.replace("{E}", str(expert)) + rest


def get_key(config: dict[str, Any], key: str) -> Any:
    """Return the value under a dotted config key, None where there is none."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def set_key(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the value under a dotted config key whose parents exist."""
    *parents, last = key.split(".")
    for name in parents:
        config = config[name]
    config[last] = value


def understand(checkpoint: Checkpoint) -> Layout:
    """Find a checkpoint's family and give each of its tensors a role.

    Raises:
        CheckpointError: The family is unknown, or a config key or tensor is missing, of an unexpected shape,
            or not understood; the message names it.
    """
    family = _family(checkpoint)
    config = checkpoint.config
    experts = _count(config, family)
    layers = _positive(config, family.layers)
    groups = _positive(config, family.groups, default=1) if family.groups else 1
    topk_groups = _positive(config, family.topk_groups, default=1) if family.topk_groups else 1
    if experts % groups or topk_groups > groups:
        raise CheckpointError(
            f"config: {experts} experts, {family.groups} {groups}, {family.topk_groups} {topk_groups} clash"
        )
    parts, unknown = _assign(checkpoint, family, layers)
    if unknown:
        raise CheckpointError(
            f"{checkpoint.folder}: not understood in a {family.model_type} checkpoint: {_some(unknown)}",
            "this variant of the family needs an entry of its own in proxy/families.py",
        )
    moe_layers = tuple(sorted({part.layer for part in parts.values() if part.role is Role.EXPERT}))
    if not moe_layers:
        raise CheckpointError(
            f"{checkpoint.folder}: no layer has experts, so this is not a Mixture-of-Experts model"
        )
    layout = Layout(family, experts, _positive(config, family.top_k), groups, topk_groups, moe_layers, parts)
    if layout.top_k > experts:
        raise CheckpointError(f"config: {family.top_k} {layout.top_k} is more than the {experts} experts")
    _check_complete(checkpoint, layout)
    return layout


def _family(checkpoint: Checkpoint) -> Family:
    """Return the family named by the config, or say what the checkpoint looks like."""
    model_type = checkpoint.config.get("model_type")
    if isinstance(model_type, str) and model_type in families():
        return families()[model_type]
    alike = sorted({re.sub(r"\d+", "*", name) for name in checkpoint.tensors if "expert" in name})
    looks = f"its experts are {_some(alike)}" if alike else "no tensor names an expert, so it looks dense"
    raise CheckpointError(
        f"{checkpoint.folder}: model_type {model_type!r} is not a known Mixture-of-Experts family ({looks})",
        f"known: {', '.join(sorted(families()))}; a family is one entry in proxy/families.py",
    )


def _positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive whole number of the config; `default` stands in for an explicit null only."""
    value = get_key(config, key)
    if value is None and default is not None and key in config:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config: {key} is {value!r}, expected a positive whole number")
    return value


def _count(config: dict[str, Any], family: Family) -> int:
    """Return the expert count, which every count key that is present must agree on."""
    present = [key for key in family.counts if get_key(config, key) is not None]
    if not present:
        raise CheckpointError(f"config has none of {', '.join(family.counts)}: the expert count is unknown")
    counts = {_positive(config, key) for key in present}
    if len(counts) > 1:
        raise CheckpointError(f"config: {' and '.join(present)} disagree: {sorted(counts)}")
    return counts.pop()


def _assign(checkpoint: Checkpoint, family: Family, layers: int) -> tuple[dict[str, Part], list[str]]:
    """Return the role of each tensor, and the names that fit none."""
    layer_name = re.compile(re.escape(family.layer).replace(re.escape("{L}"), _NUMBER))
    expert_name = re.compile(re.escape(family.experts).replace(re.escape("{E}"), _NUMBER))
    parts: dict[str, Part] = {}
    in_block: dict[int, list[tuple[str, str]]] = {}
    unknown: list[str] = []
    for name in checkpoint.tensors:
        found = layer_name.match(name)
        if not found:
            parts[name] = Part(Role.COPY)
            if "expert" in name:
                unknown.append(name)
            continue
        layer, rest = int(found[1]), name[found.end() :]
        if layer >= layers:
            parts[name] = Part(Role.DROP, layer)
            if not family.mtp_counts:
                unknown.append(name)
        elif rest.startswith(family.block):
            in_block.setdefault(layer, []).append((name, rest.removeprefix(family.block)))
        else:
            parts[name] = Part(Role.COPY, layer)
    for layer, names in in_block.items():
        sparse = any(
            expert_name.match(rest) or rest == family.router or "expert" in rest for _, rest in names
        )
        for name, rest in names:
            expert = expert_name.match(rest)
            if expert:
                parts[name] = Part(Role.EXPERT, layer, int(expert[1]), rest[expert.end() :])
            elif rest == family.router or rest in family.vectors:
                parts[name] = Part(Role.ROWS, layer)
            elif not sparse or rest.startswith(family.shared):
                parts[name] = Part(Role.COPY, layer)
            else:
                unknown.append(name)
    return parts, unknown


def _check_complete(checkpoint: Checkpoint, layout: Layout) -> None:
    """Check that each MoE layer has all its experts, alike in names, dtypes and shapes, and rows for each."""
    members: dict[int, dict[int, dict[str, TensorInfo]]] = {layer: {} for layer in layout.moe_layers}
    for name, part in layout.parts.items():
        if part.role is Role.EXPERT:
            members[part.layer].setdefault(part.expert, {})[part.rest] = checkpoint.tensors[name]
    for layer, experts in members.items():
        if len(experts) != layout.experts or max(experts) != layout.experts - 1:
            raise CheckpointError(
                f"layer {layer} holds {len(experts)} experts, numbered up to {max(experts)}; "
                f"the config says {layout.experts}"
            )
        first = {rest: (info.dtype, info.shape) for rest, info in experts[0].items()}
        for expert, tensors in experts.items():
            if {rest: (info.dtype, info.shape) for rest, info in tensors.items()} != first:
                raise CheckpointError(
                    f"layer {layer}: tensors of expert {expert} differ from those of expert 0"
                )
        if layout.router(layer) not in checkpoint.tensors:
            raise CheckpointError(f"layer {layer} has experts but no router {layout.router(layer)!r}")
    for name, part in layout.parts.items():
        shape = checkpoint.tensors[name].shape
        if part.role is Role.ROWS and shape[:1] != (layout.experts,):
            raise CheckpointError(f"tensor {name!r} has shape {shape}, expected {layout.experts} rows")


def _some(names: Iterable[str], most: int = 3) -> str:
    """Return a few names, quoted, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more
