"""MoE families as data: where a checkpoint keeps its experts, and what every one of its tensors is.

A family is one declarative entry (`proxy.family_table`). `understand` lays it over an opened checkpoint and
gives each tensor a role. In a MoE block nothing may be left over, because a per-expert tensor that is copied
by mistake loads clean and is wrong. Third-party packages add families through the entry-point group
``rl_diagnose.families`` (a callable that returns an iterable of `Family`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import Enum
from functools import cache, cached_property
from importlib.metadata import entry_points
from typing import Any

from proxy.checkpoint import FP8, PLAIN_FLOATS, Checkpoint, TensorInfo
from proxy.companions import is_companion, unreadable
from proxy.errors import CheckpointError

_NUMBER = r"(0|[1-9]\d{0,5})"  # as the names are written back: no leading zeros
COMPARE = "compare config.json with that of the model's source"
DOWNLOAD = "complete the download"
MOST_LAYERS = 10_000
"""No model has more."""

LAYERS = ("model.layers.{L}.", "model.language_model.layers.{L}.", "language_model.model.layers.{L}.")
"""Prefixes of a layer's tensors: a text model's, and those of wrappers that add vision or audio."""


@dataclass(frozen=True)
class Family:
    """How one family of checkpoints names things. Config keys are looked up in `roots`, and may be dotted.

    Attributes:
        model_type: `model_type` of the config.
        also: Further values of `model_type` with the very same names.
        roots: Config sections that may hold the keys, "" for the top; the first with an expert count is it.
        counts: Config keys of the expert count; every one that is present is edited.
        top_k: Config key of the experts a token is routed to.
        layers: Config key of the number of layers of the backbone; "" where every layer belongs to it.
        layer: Possible prefixes of a layer's tensors, with ``{L}``; the one in use holds router rows.
        block: Prefix of the MoE block inside a layer ("" where its parts lie in the layer itself).
        router: Router rows inside the block, one row an expert.
        experts: Prefix of one expert's tensors inside the block, with ``{E}``.
        fused: Prefixes inside the block of tensors that hold all experts, one record an expert.
        flat: Whether the rows of all experts are joined on the first axis of such tensors.
        vectors: Other tensors inside the block with one entry an expert (selection bias), sliced.
        beside: The same, outside the block, by their name inside the layer.
        ids: Tensors inside the block whose values are expert ids (hash routing), mapped.
        shared: Prefixes inside the block that every token passes through; byte copy.
        extra_rows: Router rows behind those of the experts: a number, or the config key that has it.
        groups: Config key of the number of expert groups ("" for a family without groups).
        topk_groups: Config key of the groups a token may use.
        group_score_experts: Experts of a group that its score adds up; a group may not have fewer.
        mtp_counts: Config keys of the number of multi-token-prediction layers, set to 0 when they are dropped.
        mtp: Further prefixes of multi-token-prediction tensors, beside layers behind the backbone.
        tap: Where calibration sees the routing: "experts" (the experts' own arguments) or "scores" (the
            router's first result, one score an expert, 0 where it was not chosen).
    """

    model_type: str
    also: tuple[str, ...] = ()
    roots: tuple[str, ...] = ("", "text_config")
    counts: tuple[str, ...] = ("num_experts",)
    top_k: str = "num_experts_per_tok"
    layers: str = "num_hidden_layers"
    layer: tuple[str, ...] = LAYERS
    block: str = "mlp."
    router: str = "gate.weight"
    experts: str = "experts.{E}."
    fused: tuple[str, ...] = ("experts.",)
    flat: bool = False
    vectors: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    extra_rows: int | str = 0
    groups: str = ""
    topk_groups: str = ""
    group_score_experts: int = 1
    mtp_counts: tuple[str, ...] = ()
    mtp: tuple[str, ...] = ("mtp.", "model.mtp.", "model.mtp_layers.")
    tap: str = "experts"


@cache
def families() -> dict[str, Family]:
    """Return the known families by `model_type`: the shipped ones and those of installed packages."""
    from proxy.family_table import FAMILIES

    known = list(FAMILIES)
    for point in entry_points(group="rl_diagnose.families"):
        known += point.load()()
    spelled = [
        replace(family, model_type=name) for family in known for name in (family.model_type, *family.also)
    ]
    by_type = {family.model_type: family for family in spelled}
    assert len(by_type) == len(spelled), "two families share a model_type"
    return by_type


class Role(Enum):
    """What happens to a tensor when experts are taken out."""

    COPY = "copied byte for byte"
    EXPERT = "one expert's own: kept under a new number or dropped"
    FUSED = "weights of all experts, one record an expert: sliced"
    ROWS = "one row or entry an expert: sliced"
    IDS = "expert ids: mapped"
    DROP = "multi-token prediction: dropped"


@dataclass(frozen=True)
class Part:
    """Role of one tensor.

    Attributes:
        role: The role.
        layer: Its layer, -1 outside of layers; layers behind the backbone go on counting.
        expert: Its expert, for `Role.EXPERT`.
        rest: Name behind the expert's prefix, for `Role.EXPERT`; name inside the layer for others in a layer.
        head: Name up to the expert's number, for `Role.EXPERT`.
        records: Equal leading records the tensor consists of, for sliced roles.
    """

    role: Role
    layer: int = -1
    expert: int = -1
    rest: str = ""
    head: str = ""
    records: int = 1

    def renamed(self, expert: int) -> str:
        """Return the name of an expert's tensor under another number."""
        return f"{self.head}{expert}.{self.rest}"


@dataclass(frozen=True)
class Layout:
    """A family laid over one checkpoint.

    Attributes:
        family: The family.
        experts: Routed experts a layer (N).
        top_k: Experts a token is routed to.
        groups: Expert groups (1: none), contiguous and of equal size.
        topk_groups: Groups a token may use.
        moe_layers: Indices of the backbone's MoE layers.
        mtp_layers: Indices of MoE layers behind the backbone that are kept and pruned; empty when dropped.
        parts: Role of every tensor, by name.
        root: Config section that holds the family's keys.
        prefix: The layer prefix in use, with ``{L}``.
        extra_rows: Router rows behind those of the experts.
    """

    family: Family
    experts: int
    top_k: int
    groups: int
    topk_groups: int
    moe_layers: tuple[int, ...]
    mtp_layers: tuple[int, ...] = ()
    parts: dict[str, Part] = field(default_factory=dict)
    root: str = ""
    prefix: str = LAYERS[0]
    extra_rows: int = 0

    def block(self, layer: int) -> str:
        """Return the name prefix of a layer's MoE block."""
        return self.prefix.replace("{L}", str(layer)) + self.family.block

    def router(self, layer: int) -> str:
        """Return the name of a layer's router rows."""
        return self.routers[layer]

    @cached_property
    def routers(self) -> dict[int, str]:
        """Name of the router rows, by layer."""
        tail = self.family.block + self.family.router
        return {
            part.layer: name
            for name, part in self.parts.items()
            if part.role is Role.ROWS and part.rest == tail
        }

    @cached_property
    def members(self) -> dict[int, dict[int, dict[str, str]]]:
        """Names of the experts' own tensors, by layer, expert and rest of the name."""
        found: dict[int, dict[int, dict[str, str]]] = {}
        for name, part in self.parts.items():
            if part.role is Role.EXPERT:
                found.setdefault(part.layer, {}).setdefault(part.expert, {})[part.rest] = name
        return found

    def key(self, key: str) -> str:
        """Return a family's config key with its section."""
        return f"{self.root}.{key}" if self.root else key


def get_key(config: Mapping[str, Any], key: str) -> Any:
    """Return the value under a dotted config key, None where there is none."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def hidden_size(config: dict[str, Any]) -> int:
    """Return the width of a checkpoint's hidden states, 0 where its config does not say."""
    keys = (root + name for root in ("", "text_config.") for name in ("hidden_size", "d_model"))
    return next((size for key in keys if isinstance(size := get_key(config, key), int)), 0)


def text_size(config: Mapping[str, Any], name: str) -> int:
    """Return a size of the text model, which wrappers keep in a section of its own; 0 where the config has none.

    Raises:
        CheckpointError: It is no positive whole number.
    """
    for key in (name, f"text_config.{name}"):
        if get_key(config, key) is not None:
            return _positive(config, key)
    return 0


def set_key(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the value under a dotted config key whose parents exist."""
    *parents, last = key.split(".")
    for name in parents:
        config = config[name]
    config[last] = value


def understand(checkpoint: Checkpoint, mtp: str = "drop") -> Layout:
    """Find a checkpoint's family and give each of its tensors a role.

    Args:
        checkpoint: The checkpoint.
        mtp: "drop" multi-token-prediction layers, or "prune" their experts too.

    Raises:
        CheckpointError: The family is unknown, or a config key or tensor is missing, of an unexpected shape,
            or not understood; the message names it.
    """
    assert mtp in ("drop", "prune"), mtp
    family = _family(checkpoint)
    config = checkpoint.config
    root = _root(config, family)
    prefix = _prefix(checkpoint, family)
    experts = _count(config, [f"{root}{key}" for key in family.counts])
    layers = _positive(config, root + family.layers) if family.layers else 10**9
    for name in ("vocab_size", "max_position_embeddings"):
        text_size(config, name)
    groups = _positive(config, root + family.groups, default=1) if family.groups else 1
    topk_groups = _positive(config, root + family.topk_groups, default=1) if family.topk_groups else 1
    extra = family.extra_rows
    if isinstance(extra, str):
        extra = _positive(config, root + extra) if get_key(config, root + extra) else 0
    if experts % groups or topk_groups > groups:
        raise CheckpointError(
            f"config: {experts} experts, {family.groups} {groups}, {family.topk_groups} {topk_groups} clash",
            COMPARE,
        )
    parts, unknown = _Assigner(checkpoint, family, prefix, layers, experts, extra, mtp).assign()
    numbered = _pattern(prefix, "{L}")
    beyond = [name for name in unknown if (found := numbered.match(name)) and int(found[1]) >= layers]
    if beyond:
        raise CheckpointError(
            f"{checkpoint.folder}: config.json says {layers} layers, and there is {beyond[0]!r}", COMPARE
        )
    if unknown:
        raise CheckpointError(
            f"{checkpoint.folder}: not understood in a {family.model_type} checkpoint: {_some(unknown)}",
            "this variant of the family needs an entry of its own in proxy/family_table.py",
        )
    sparse = sorted({part.layer for part in parts.values() if part.role in (Role.EXPERT, Role.FUSED)})
    moe_layers = tuple(layer for layer in sparse if layer < layers)
    if not moe_layers:
        raise CheckpointError(
            f"{checkpoint.folder}: no layer has experts, so this is not a Mixture-of-Experts model",
            "take a Mixture-of-Experts checkpoint, with all of its shards",
        )
    layout = Layout(
        family,
        experts,
        _positive(config, root + family.top_k),
        groups,
        topk_groups,
        moe_layers,
        tuple(layer for layer in sparse if layer >= layers),
        parts,
        root.removesuffix("."),
        prefix,
        extra,
    )
    if layout.top_k > experts:
        raise CheckpointError(
            f"config: {family.top_k} {layout.top_k} is more than the {experts} experts", COMPARE
        )
    _check_layers(checkpoint, layout, layers if family.layers else None)
    _check_complete(checkpoint, layout)
    return layout


def _family(checkpoint: Checkpoint) -> Family:
    """Return the family named by the config, or say what the checkpoint looks like."""
    model_type = checkpoint.config.get("model_type")
    if isinstance(model_type, str) and model_type in families():
        return families()[model_type]
    alike = sorted({re.sub(r"\d+", "*", name) for name in checkpoint.tensors if "expert" in name})
    if alike:
        near = get_close_matches(str(model_type), families(), n=3)
        looks = f"its experts are {_some(alike)}"
        mend = f"closest of the known ones: {', '.join(near)}; " if near else ""
        mend += "docs/families.md lists them, one entry in proxy/family_table.py adds another"
    else:
        looks = "no tensor names an expert, so it looks dense"
        mend = (
            "a dense model has no experts to cut: take a Mixture-of-Experts sibling (proxy: {from: sibling})"
        )
    raise CheckpointError(
        f"{checkpoint.folder}: model_type {model_type!r} is not a known Mixture-of-Experts family ({looks})",
        mend,
    )


def _root(config: dict[str, Any], family: Family) -> str:
    """Return the config section that holds the expert count, with a dot behind it ("" for the top)."""
    for root in family.roots:
        start = f"{root}." if root else ""
        if any(get_key(config, start + key) is not None for key in family.counts):
            return start
    raise CheckpointError(
        f"config has none of {', '.join(family.counts)}: the expert count is unknown", COMPARE
    )


def _prefix(checkpoint: Checkpoint, family: Family) -> str:
    """Return the layer prefix under which router rows are found, the first one where none are."""
    for prefix in family.layer:
        pattern = _pattern(prefix, "{L}", re.escape(family.block + family.router) + "$")
        if any(map(pattern.match, checkpoint.tensors)):
            return prefix
    return family.layer[0]


def _pattern(name: str, hole: str, tail: str = "") -> re.Pattern[str]:
    """Return a pattern for a name with a number in a hole."""
    return re.compile(re.escape(name).replace(re.escape(hole), _NUMBER) + tail)


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive whole number of the config; `default` stands in for an explicit null only.

    A list (one number a layer) counts as its number where they are all equal.
    """
    value = get_key(config, key)
    *parents, last = key.split(".")
    section = get_key(config, ".".join(parents)) if parents else config
    if value is None and default is not None and isinstance(section, dict) and last in section:
        return default
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config: {key} is {short(value)}, expected a positive whole number", COMPARE)
    return value


def _count(config: dict[str, Any], keys: list[str]) -> int:
    """Return the expert count, which every count key that is present must agree on."""
    present = [key for key in keys if get_key(config, key) is not None]
    counts = {_positive(config, key) for key in present}
    if len(counts) > 1:
        raise CheckpointError(f"config: {' and '.join(present)} disagree: {sorted(counts)}", COMPARE)
    return counts.pop()


@dataclass
class _Assigner:
    """Gives each tensor of a checkpoint its role."""

    checkpoint: Checkpoint
    family: Family
    prefix: str
    layers: int
    experts: int
    extra: int
    mtp: str

    def assign(self) -> tuple[dict[str, Part], list[str]]:
        """Return the role of each tensor, and the names that fit none."""
        layer_name = _pattern(self.prefix, "{L}")
        mtp_name = re.compile(f"({'|'.join(map(re.escape, self.family.mtp))})(?:(?:layers\\.)?{_NUMBER}\\.)?")
        parts: dict[str, Part] = {}
        unknown: list[str] = []
        in_layer: dict[int, list[tuple[str, str]]] = {}
        for name in self.checkpoint.tensors:
            found = layer_name.match(name)
            foreign = not found and mtp_name.match(name)
            if found:
                layer, rest = int(found[1]), name[found.end() :]
            elif foreign:
                layer, rest = self.layers + int(foreign[2] or 0), name[foreign.end() :]
            else:
                parts[name] = Part(Role.COPY)
                if "expert" in name:
                    unknown.append(name)
                continue
            if layer >= self.layers and found and not self.family.mtp_counts:
                unknown.append(name)
            elif layer >= self.layers and self.mtp == "drop":
                parts[name] = Part(Role.DROP, layer)
            else:
                in_layer.setdefault(layer, []).append((name, rest))
        for layer, names in in_layer.items():
            self._assign_layer(layer, names, parts, unknown)
        return parts, unknown

    def _assign_layer(
        self, layer: int, names: list[tuple[str, str]], parts: dict[str, Part], unknown: list[str]
    ) -> None:
        """Assign the tensors of one layer, given as full names and names inside the layer."""
        family = self.family
        expert_name = _pattern(family.block + family.experts, "{E}")
        router = family.block + family.router
        rows = {router, *(family.block + name for name in family.vectors), *family.beside}
        ids = {family.block + name for name in family.ids}
        fused = tuple(family.block + name for name in family.fused)
        shared = tuple(family.block + name for name in family.shared)
        single = any(expert_name.match(rest) for _, rest in names)
        sparse = single or any(
            rest == router or (rest.startswith(family.block) and "expert" in rest.removeprefix(family.block))
            for _, rest in names
        )
        for name, rest in names:
            expert = expert_name.match(rest)
            records = self.experts + self.extra if rest in rows and self._has_extra(name) else self.experts
            if expert:
                start = len(name) - len(rest) + expert.start(1)
                parts[name] = Part(Role.EXPERT, layer, int(expert[1]), rest[expert.end() :], name[:start])
            elif rest in rows:
                parts[name] = Part(Role.ROWS, layer, rest=rest, records=records)
            elif rest in ids:
                parts[name] = Part(Role.IDS, layer, rest=rest)
            elif sparse and rest.startswith(fused) and not self.checkpoint.tensors[name].shape:
                parts[name] = Part(Role.COPY, layer, rest=rest)  # one factor for all experts
            elif sparse and not single and rest.startswith(fused):
                parts[name] = Part(Role.FUSED, layer, rest=rest, records=self.experts)
            elif not sparse or not rest.startswith(family.block) or (shared and rest.startswith(shared)):
                parts[name] = Part(Role.COPY, layer, rest=rest)
            elif not family.block and "expert" not in rest:
                parts[name] = Part(Role.COPY, layer, rest=rest)  # the block is the layer, attention included
            else:
                unknown.append(name)

    def _has_extra(self, name: str) -> bool:
        """Say whether a tensor with a row an expert has the extra rows too (a selection bias need not)."""
        return bool(self.extra) and self.experts + self.extra in self.checkpoint.tensors[name].shape[:2]


def _check_layers(checkpoint: Checkpoint, layout: Layout, count: int | None) -> None:
    """Check that there are tensors of each layer of the backbone; of all up to the last one where none is counted."""
    held = {part.layer for part in layout.parts.values() if part.layer >= 0}
    last = max(held) + 1 if count is None else count
    missing = next((layer for layer in range(min(last, len(held) + 1)) if layer not in held), None)
    if missing is not None:
        says = f"and config.json says {count} layers" if count else f"and there is a layer {max(held)}"
        raise CheckpointError(f"{checkpoint.folder}: no tensor is of layer {missing}, {says}", DOWNLOAD)


def _check_complete(checkpoint: Checkpoint, layout: Layout) -> None:
    """Check that each MoE layer has all its experts, alike in names, dtypes and shapes, and rows for each.

    Whatever is quantised has to have its factors.
    """
    name, needed = unreadable({name: info.dtype for name, info in checkpoint.tensors.items()})
    if needed:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name!r} is quantised ({checkpoint.tensors[name].dtype}), "
            f"and its {needed!r} is missing",
            DOWNLOAD,
        )
    quantised = any(
        get_key(checkpoint.config, key) for key in ("quantization_config", "text_config.quantization_config")
    )

    def look(tensors: dict[str, str]) -> object:
        # A quantised checkpoint may leave some experts in full precision.
        return _matrices(tensors) if quantised else _looks(checkpoint, tensors)

    for layer, experts in layout.members.items() if quantised else ():
        if (lost := _lost(checkpoint, experts)) is not None:
            raise CheckpointError(
                f"layer {layer}: expert {lost} lacks tensors that its neighbours have, or has another shape",
                DOWNLOAD,
            )

    for layer, experts in layout.members.items():
        regular = {expert for expert in experts if expert < layout.experts}
        if len(regular) != layout.experts or max(experts) >= layout.experts + layout.extra_rows:
            raise CheckpointError(
                f"layer {layer} holds {len(experts)} experts, numbered up to {max(experts)}; "
                f"the config says {layout.experts}",
                DOWNLOAD,
            )
        first = look(experts[0])
        for expert in regular:
            if look(experts[expert]) != first:
                raise CheckpointError(
                    f"layer {layer}: tensors of expert {expert} differ from those of expert 0", DOWNLOAD
                )
    for layer in (*layout.moe_layers, *layout.mtp_layers):
        if layer not in layout.routers:
            raise CheckpointError(
                f"layer {layer} has experts but no router {layout.block(layer) + layout.family.router!r}",
                DOWNLOAD,
            )
    for name, part in layout.parts.items():
        if part.role not in (Role.ROWS, Role.FUSED):
            continue
        shape = checkpoint.tensors[name].shape
        lead = shape[1:2] if shape[:1] == (1,) and part.role is Role.ROWS else shape[:1]
        joined = layout.family.flat and part.role is Role.FUSED and lead and lead[0] % part.records == 0
        router = name == layout.routers.get(part.layer)
        if (lead != (part.records,) and not joined) or (router and len(shape) != 2):
            raise CheckpointError(f"tensor {name!r} has shape {shape}, expected {part.records} rows", COMPARE)


def _looks(checkpoint: Checkpoint, tensors: dict[str, str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of an expert's tensors."""

    def look(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
        return info.dtype, info.shape

    return {rest: look(checkpoint.tensors[name]) for rest, name in tensors.items()}


def _lost(checkpoint: Checkpoint, experts: Mapping[int, dict[str, str]]) -> int | None:
    """Return an expert in which a quantised matrix has a part of what it has in another one, or another shape.

    A matrix in full precision is its weight alone. Packed ones may have other shapes, since their bits may differ.
    """
    kinds: dict[str, dict[frozenset[str], int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for expert, tensors in experts.items():
        found: dict[str, set[str]] = {}
        for rest, name in tensors.items():
            matrix, _, kind = rest.partition(".")
            info = checkpoint.tensors[name]
            whole = kind in ("weight", "bias") and info.dtype in PLAIN_FLOATS
            found.setdefault(matrix, set()).add("" if whole else kind)
            plain = kind == "weight" and info.dtype in (*PLAIN_FLOATS, *FP8)
            if plain and shapes.setdefault(matrix, info.shape) != info.shape:
                return expert
        for matrix, names in found.items():
            if names != {""}:
                kinds.setdefault(matrix, {}).setdefault(frozenset(names - {""}), expert)
    for found_kinds in kinds.values():
        for some, expert in found_kinds.items():
            if any(some < other for other in found_kinds):
                return expert
    return None


def short(value: Any, most: int = 60) -> str:
    """Return a value of somebody's config for a message."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def _matrices(tensors: Iterable[str]) -> set[str]:
    """Return which matrices an expert has, however many tensors a quantisation makes of one; factors alone are none."""
    parts = [rest.partition(".") for rest in tensors]
    return {matrix for matrix, _, name in parts if name != "scale" and not is_companion(name, ())}


def _some(names: Iterable[str], most: int = 3) -> str:
    """Return a few names, quoted, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more
