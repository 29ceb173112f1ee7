"""Sizes of a model: counted in the headers of its weights, or by formulas from its ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxy.checkpoint import (
    CONFIG,
    FP8,
    INDEX,
    PLAIN_FLOATS,
    SINGLE,
    Checkpoint,
    open_checkpoint,
    read_object,
)
from proxy.companions import is_companion
from proxy.errors import CheckpointError
from proxy.families import (
    COMPARE,
    MOST_LAYERS,
    Layout,
    Role,
    families,
    get_key,
    hidden_size,
    short,
    text_size,
    understand,
)

_ODD = (
    "linear_num_key_heads",
    "linear_attn_config",
    "mamba_d_state",
    "mamba_n_heads",
    "attn_type_list",
    "ssm_cfg",
)
"""Config keys of layers that are no attention as the formulas count it."""
_ONE_EACH = (*PLAIN_FLOATS, *FP8, "F8_E8M0", "I8")
LARGEST = 10**9
COUNTED = {
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "flex_olmo",
    "glm4_moe",
    "glm4v_moe",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "kimi_k2",
    "kimi_k25",
    "llama4",
    "llama4_text",
    "minimax_m2",
    "mistral4",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_omni_moe_thinker",
    "qwen3_vl_moe",
    "qwen3_vl_moe_text",
    "solar_open",
}
"""Families whose checkpoints the formulas were held to (a test), and those that share a text model with one."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that its cost depends on.

    Attributes:
        hidden: Width of the residual stream.
        layers: Decoder layers.
        moe_layers: Those of them with experts.
        experts: Routed experts a MoE layer.
        top_k: Experts a token.
        expert: Parameters of one routed expert.
        router: Parameters of a router, for each expert.
        rest: All other parameters but embedding and output layer: attention, norms, shared experts, dense layers.
        vocabulary: Rows of the embedding.
        tied: Whether the output layer is the embedding.
    """

    hidden: int
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    expert: int
    router: int
    rest: int
    vocabulary: int
    tied: bool

    def with_experts(self, count: int) -> Shape:
        """Return the shape of a proxy that keeps `count` experts a layer."""
        if not self.top_k <= count <= self.experts:
            raise CheckpointError(
                f"a proxy of this model keeps {self.top_k} (Top-k) to {self.experts} experts a layer, not {count}",
                "choose other --experts",
            )
        return replace(self, experts=count)

    def _count(self, experts: int) -> int:
        embedding = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embedding + self.moe_layers * (experts * self.expert + self.experts * self.router) + self.rest

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self._count(self.experts)

    @property
    def active(self) -> int:
        """Parameters that one token passes through; the embedding is a look-up and isn't counted."""
        return self._count(self.top_k) - (0 if self.tied else self.vocabulary * self.hidden)


class _Section:
    """A section of a config, its numbers checked.

    Args:
        raw: The section.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def number(self, *keys: str) -> int:
        """Return the first positive whole number under these keys."""
        for key in keys:
            if found := self.optional(key):
                return found
        raise CheckpointError(f"the config has no positive whole number {' or '.join(keys)}", COMPARE)

    def optional(self, key: str) -> int:
        """Return a whole number that may be missing, null or 0: then 0."""
        value = self.raw.get(key)
        if value is None or value is False:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
            raise CheckpointError(
                f"config: {key} is {short(value)}, expected a whole number up to {LARGEST}", COMPARE
            )
        return value

    def numbers(self, key: str) -> set[int]:
        """Return a list of whole numbers that may be missing."""
        value = self.raw.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise CheckpointError(
                f"config: {key} is {short(value)}, expected a list of whole numbers", COMPARE
            )
        return set(value)


def _attention(section: _Section) -> int:
    """Return the parameters of one layer's attention with the layer's two norms."""
    config, number = section.raw, section.number
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    norms = 2 * hidden
    if section.optional("kv_lora_rank"):
        rank, rope = number("kv_lora_rank"), number("qk_rope_head_dim")
        plain, value = number("qk_nope_head_dim"), number("v_head_dim")
        query = heads * (plain + rope)
        low = section.optional("q_lora_rank")
        total = hidden * low + low + low * query if low else hidden * query
        total += hidden * (rank + rope) + rank + rank * heads * (plain + value) + heads * value * hidden
        if section.optional("index_n_heads"):  # the sparse attention's indexer
            count, width = number("index_n_heads"), number("index_head_dim")
            total += low * count * width + hidden * width + 2 * width + hidden * count
        return total + norms
    width = section.optional("head_dim") or hidden // heads
    keys = section.optional("num_key_value_heads") or heads
    total = hidden * heads * width * 2 + hidden * keys * width * 2
    kind = str(config.get("model_type"))
    if config.get("attention_bias") or kind.startswith("qwen2"):
        total += (heads + 2 * keys) * width
    if kind.startswith(("qwen3", "glm4_moe")) or config.get("use_qk_norm") or config.get("qk_layernorm"):
        total += 2 * width
    return total + norms


def shape_of(config: dict[str, Any]) -> Shape:
    """Return the shape of a Mixture-of-Experts model.

    Raises:
        CheckpointError: The family is not known, has layers that the formulas don't count, or a key is missing.
    """
    kinds = [str(config.get("model_type"))[:60], str(get_key(config, "text_config.model_type"))]
    family = next((families()[kind] for kind in kinds if kind in families()), None)
    if family is None:
        raise CheckpointError(
            f"model_type {kinds[0]!r} is no Mixture-of-Experts family that is known here",
            "docs/families.md lists them",
        )
    root = next(
        (
            root
            for root in family.roots
            if any(get_key(config, f"{root}.{key}".lstrip(".")) for key in family.counts)
        ),
        None,
    )
    if root is None:
        raise CheckpointError(f"the config has none of {', '.join(family.counts)}", COMPARE)
    raw: Mapping[str, Any] = get_key(config, root) if root else config
    section, number = _Section(raw), _Section(raw).number
    if family.model_type not in COUNTED:
        raise CheckpointError(
            f"the formulas were not checked for a {family.model_type}",
            "name a folder with its weights: then their headers are counted",
        )
    if odd := [key for key in _ODD if raw.get(key)]:
        raise CheckpointError(
            f"the formulas don't count layers of the kind that {odd[0]} describes",
            "docs/cost.md says what they count",
        )
    hidden, layers = number("hidden_size"), number(family.layers or "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise CheckpointError(f"config: {layers} layers are more than any model has", COMPARE)
    width = number("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    first = section.optional("first_k_dense_replace")
    every = section.optional("decoder_sparse_step") or section.optional("moe_layer_freq") or 1
    only_dense = section.numbers("mlp_only_layers")
    offset = 1 if section.optional("decoder_sparse_step") else 0
    moe_layers = sum(
        layer >= first and (layer + offset) % every == 0 and layer not in only_dense
        for layer in range(layers)
    )
    shared = 0
    wide = "intermediate_size"
    if family.model_type.startswith("llama4"):
        shared, wide = 3 * hidden * width, "intermediate_size_mlp"
        every, offset = section.optional("interleave_moe_layer_step") or 1, 1
        moe_layers = len(section.numbers("moe_layers")) or layers // every
    elif section.optional("shared_expert_intermediate_size"):
        shared = 3 * hidden * number("shared_expert_intermediate_size") + hidden
    elif section.optional("n_shared_experts"):
        shared = 3 * hidden * width * number("n_shared_experts")
    dense = 3 * hidden * number(wide) if moe_layers < layers else 0
    experts, top_k = number(*family.counts), number(family.top_k)
    if top_k > experts:
        raise CheckpointError(f"config: {family.top_k} {top_k} is more than the {experts} experts", COMPARE)
    expert, attention = 3 * hidden * width, _attention(section)
    if family.model_type == "gpt_oss":  # biases everywhere, and a sink a head
        expert, attention = expert + 2 * width + hidden, attention + number("num_attention_heads") + hidden
    return Shape(
        hidden,
        layers,
        moe_layers,
        experts,
        top_k,
        expert,
        hidden + sum("gate." in name or name == "router.bias" for name in family.vectors),
        layers * attention + (layers - moe_layers) * dense + moe_layers * shared + hidden,
        number("vocab_size"),
        bool(config.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
    )


def counted(checkpoint: Checkpoint, layout: Layout) -> Shape:
    """Return the shape of a model by the headers of its weights, towers of other modalities included.

    Raises:
        CheckpointError: The config lacks the width or the vocabulary.
    """
    experts = router = ends = total = 0
    config = checkpoint.config
    hidden, vocabulary = text_size(config, "hidden_size"), text_size(config, "vocab_size")
    hidden = hidden or hidden_size(config)
    if hidden <= 0 or not vocabulary:
        raise CheckpointError("the config has no hidden_size or no vocab_size", COMPARE)
    for name, info in checkpoint.tensors.items():
        part = layout.parts[name]
        if part.role is Role.DROP or is_companion(name, checkpoint.tensors):
            continue
        total += info.numel
        experts += info.numel if part.role in (Role.EXPERT, Role.FUSED) else 0
        router += info.numel if part.role is Role.ROWS else 0
        ends += info.numel if part.layer < 0 and info.shape == (vocabulary, hidden) else 0
    layers, moe_layers = (
        {part.layer for part in layout.parts.values() if part.layer >= 0},
        len(layout.moe_layers),
    )
    each = moe_layers * layout.experts
    return Shape(
        hidden,
        len(layers),
        moe_layers,
        layout.experts,
        layout.top_k,
        experts // each,
        router // each,
        total - experts // each * each - router // each * each - ends,
        vocabulary,
        ends <= vocabulary * hidden,
    )


def shape_at(path: Path) -> Shape:
    """Return the shape of the model at a path: counted where weights lie there, by the formulas for a bare config.

    Args:
        path: A folder, or a ``config.json``.

    Raises:
        CheckpointError: Neither can be read or counted.
    """
    if path.is_dir() and any((path / name).exists() for name in (SINGLE, INDEX)):
        checkpoint = open_checkpoint(path)
        layout = understand(checkpoint)
        # Of weights that lie several in one on disk (MXFP4, packed ones) the headers don't tell how many they are.
        if all(info.dtype in _ONE_EACH or "tid2eid" in name for name, info in checkpoint.tensors.items()):
            return counted(checkpoint, layout)
        return shape_of(checkpoint.config)
    return shape_of(read_object(path / CONFIG if path.is_dir() else path))
