"""What GRPO post-training of a model costs, from its ``config.json`` alone: the paper's Table 2 for the user's model.

Everything is arithmetic on the configuration; no weights are read and nothing is measured. The formulas stand in
``docs/cost.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from proxy.checkpoint import CONFIG, read_object
from proxy.errors import CheckpointError
from proxy.families import COMPARE, MOST_LAYERS, families, get_key, short

BYTES = {"weights": 4, "gradients": 4, "optimizer": 8, "reference": 2, "rollout": 2}
"""Bytes a parameter in each state: fp32 weights and gradients, AdamW's two fp32 moments, bf16 reference and rollout."""
USABLE = 0.9
"""Share of an accelerator's memory that can be planned with (vLLM's default gpu_memory_utilization)."""
GIB = 1024**3
LARGEST = 10**9
_ODD = (
    "linear_num_key_heads",
    "linear_attn_config",
    "mamba_d_state",
    "mamba_n_heads",
    "attn_type_list",
    "ssm_cfg",
)
"""Config keys of layers that are no attention as the formulas count it."""


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator, from its maker's data sheet.

    Attributes:
        name: Name on the command line.
        memory: GiB of one device.
        node: Devices of one node.
        tflops: Dense bf16 peak of one device, TFLOP/s.
        bandwidth: Memory bandwidth of one device, TB/s.
    """

    name: str
    memory: float
    node: int
    tflops: float
    bandwidth: float


ACCELERATORS = {
    device.name: device
    for device in (
        Accelerator("ascend-910b", 64, 8, 376, 1.6),
        Accelerator("ascend-910c", 64, 16, 376, 1.6),  # one of a package's two dies: what torch_npu counts
        Accelerator("a100", 80, 8, 312, 2.0),
        Accelerator("h100", 80, 8, 989, 3.35),
        Accelerator("h200", 141, 8, 989, 4.8),
        Accelerator("h20", 96, 8, 148, 4.0),
    )
}


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
        shared: Parameters of a MoE layer's shared expert, 0 without one.
        router: Parameters of a router, for each expert.
        dense: Parameters of the MLP of a layer without experts.
        attention: Parameters of one layer's attention, its norms included.
        vocabulary: Rows of the embedding.
        tied: Whether the output layer is the embedding.
    """

    hidden: int
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    expert: int
    shared: int
    router: int
    dense: int
    attention: int
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
        moe = experts * self.expert + self.experts * self.router + self.shared
        layers = self.layers * self.attention + (self.layers - self.moe_layers) * self.dense
        return embedding + layers + self.moe_layers * moe + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self._count(self.experts)

    @property
    def active(self) -> int:
        """Parameters that one token passes through; the embedding is a look-up and isn't counted."""
        return self._count(self.top_k) - (0 if self.tied else self.vocabulary * self.hidden)


def read_config(path: Path) -> dict[str, Any]:
    """Return a model's configuration; `path` is its folder or the file itself.

    Raises:
        CheckpointError: There is none, or it is no JSON object.
    """
    return read_object(path / CONFIG if path.is_dir() else path)


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
    root = next((root for root in family.roots if any(_at(config, root, key) for key in family.counts)), None)
    if root is None:
        raise CheckpointError(f"the config has none of {', '.join(family.counts)}", COMPARE)
    raw: Mapping[str, Any] = get_key(config, root) if root else config
    section, number = _Section(raw), _Section(raw).number
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
    if section.optional("shared_expert_intermediate_size"):
        shared = 3 * hidden * number("shared_expert_intermediate_size") + hidden
    elif section.optional("n_shared_experts"):
        shared = 3 * hidden * width * number("n_shared_experts")
    dense = 3 * hidden * number("intermediate_size") if moe_layers < layers else 0
    experts, top_k = number(*family.counts), number(family.top_k)
    if top_k > experts:
        raise CheckpointError(f"config: {family.top_k} {top_k} is more than the {experts} experts", COMPARE)
    return Shape(
        hidden,
        layers,
        moe_layers,
        experts,
        top_k,
        3 * hidden * width,
        shared,
        hidden + sum(name.startswith("gate.") for name in family.vectors),
        dense,
        _attention(section),
        number("vocab_size"),
        bool(config.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
    )


def _at(config: dict[str, Any], root: str, key: str) -> Any:
    return get_key(config, f"{root}.{key}" if root else key)


def memory(shape: Shape) -> dict[str, int]:
    """Return the bytes of each state of the whole model, by the names of `BYTES`."""
    return {state: size * shape.parameters for state, size in BYTES.items()}


def activations(shape: Shape, tokens: int) -> int:
    """Return the bytes of a device's activations for a micro batch of `tokens`, layers recomputed.

    The input of every layer in bf16, and the logits with their gradient in fp32.
    """
    return tokens * (2 * shape.layers * shape.hidden + 8 * shape.vocabulary)


def counts(node: int) -> list[int]:
    """Return the numbers of devices that a parallel plan can use: powers of two inside a node, then of whole nodes."""
    inside = [1 << power for power in range(node.bit_length()) if 1 << power < node]
    return inside + [node << power for power in range(16)]


def least_accelerators(shape: Shape, device: Accelerator, tokens: int) -> int:
    """Return the least number of devices that hold all states at once, evenly split, beside the activations.

    Raises:
        CheckpointError: The activations alone do not fit.
    """
    room = USABLE * device.memory * GIB - activations(shape, tokens)
    if room <= 0:
        raise CheckpointError(
            f"a micro batch of {tokens} tokens leaves no room on {device.name} ({device.memory:g} GiB)",
            "choose fewer --tokens",
        )
    need = ceil(sum(memory(shape).values()) / room)
    if need > counts(device.node)[-1]:
        raise CheckpointError(f"the model needs {need:,} {device.name}, more than a plan can use", COMPARE)
    return next(count for count in counts(device.node) if count >= need)


@dataclass(frozen=True)
class Batch:
    """One training step.

    Attributes:
        responses: Responses of a step.
        prompt: Tokens of a prompt.
        response: Tokens of a response.
        utilisation: Share of the peak that training reaches (MFU).
        decoding: Share of the memory bandwidth that decoding reaches.
    """

    responses: int = 1024
    prompt: int = 512
    response: int = 1024
    utilisation: float = 0.2
    decoding: float = 0.3


def step_seconds(shape: Shape, device: Accelerator, devices: int, batch: Batch) -> float:
    """Return an estimate of a step's seconds: training and scoring by arithmetic, decoding by memory traffic.

    A token costs 6 FLOP a parameter that it passes through in the update and 2 in each of two scoring passes (old
    and reference log-probabilities). Every decoding step reads all weights once, on each group of devices that holds
    a copy of the model.
    """
    tokens = batch.responses * (batch.prompt + batch.response)
    arithmetic = 10 * shape.active * tokens / (devices * device.tflops * 1e12 * batch.utilisation)
    group = min(devices, ceil(memory(shape)["rollout"] / (USABLE * device.memory * GIB)))
    read = memory(shape)["rollout"] / (group * device.bandwidth * 1e12 * batch.decoding)
    return arithmetic + batch.response * read


def device_hours(devices: int, seconds: float) -> float:
    """Return the device-hours of a step (the paper's NPU-hours)."""
    return devices * seconds / 3600


@dataclass(frozen=True)
class Cost:
    """One row of the table.

    Attributes:
        variant: "original" or "proxy".
        experts: Experts a layer.
        parameters: All parameters.
        active: Parameters a token passes through.
        memory: Bytes by state.
        activations: Bytes of a device's activations.
        devices: Least number of accelerators, or the number that was asked for.
        seconds: Seconds of a step.
        measured: Whether the seconds were given.
        hours: Device-hours of a step.
    """

    variant: str
    experts: int
    parameters: int
    active: int
    memory: dict[str, int]
    activations: int
    devices: int
    seconds: float
    measured: bool
    hours: float


def cost(
    shape: Shape,
    variant: str,
    device: Accelerator,
    tokens: int,
    batch: Batch,
    devices: int = 0,
    seconds: float = 0.0,
) -> Cost:
    """Return a row of the table.

    Args:
        shape: The model.
        variant: "original" or "proxy".
        device: Kind of accelerator.
        tokens: Tokens of a micro batch.
        batch: One training step.
        devices: Number of accelerators, 0 for the least.
        seconds: Measured seconds of a step, 0 for the estimate.

    Raises:
        CheckpointError: The model does not fit.
    """
    count = devices or least_accelerators(shape, device, tokens)
    took = seconds or step_seconds(shape, device, count, batch)
    return Cost(
        variant,
        shape.experts,
        shape.parameters,
        shape.active,
        memory(shape),
        activations(shape, tokens),
        count,
        took,
        bool(seconds),
        device_hours(count, took),
    )
