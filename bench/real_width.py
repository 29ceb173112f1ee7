"""Random checkpoints at the real width of large models, with fewer layers: one shard a layer, made in place.

``qwen3``: Qwen3-30B-A3B's layers (128 experts, top-8, hidden 2048, 768 wide), BF16, 1.2 GB a layer.
``deepseek``: DeepSeek-V3's MoE layers (256 experts in 8 groups, top-8, hidden 7168, 2048 wide) in FP8 with
128 x 128 block scales, 11.5 GB a layer, behind one dense layer. The vocabulary is small: embeddings are
copied byte for byte and would only take disk.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 4096
_CHUNK = 4 << 20

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 0,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "vocab_size": VOCABULARY,
}

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def qwen3_layer(layer: int) -> Shapes:
    """Return dtype and shape of a layer's tensors."""
    start, wide = f"model.layers.{layer}.", {}
    for name, shape in {
        "self_attn.q_proj.weight": (4096, 2048),
        "self_attn.k_proj.weight": (512, 2048),
        "self_attn.v_proj.weight": (512, 2048),
        "self_attn.o_proj.weight": (2048, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "input_layernorm.weight": (2048,),
        "post_attention_layernorm.weight": (2048,),
        "mlp.gate.weight": (128, 2048),
    }.items():
        wide[start + name] = ("BF16", shape)
    for expert in range(128):
        for name, shape in {
            "gate_proj": (768, 2048),
            "up_proj": (768, 2048),
            "down_proj": (2048, 768),
        }.items():
            wide[f"{start}mlp.experts.{expert}.{name}.weight"] = ("BF16", shape)
    return wide


def deepseek_layer(layer: int) -> Shapes:
    """Return dtype and shape of a layer's tensors; layer 0 is dense."""
    start, wide = f"model.layers.{layer}.", {}

    def fp8(name: str, rows: int, columns: int) -> None:
        wide[f"{start}{name}.weight"] = ("F8_E4M3", (rows, columns))
        scales = (-(-rows // 128), -(-columns // 128))
        wide[f"{start}{name}.weight_scale_inv"] = ("F32", scales)

    fp8("self_attn.q_a_proj", 1536, 7168)
    fp8("self_attn.q_b_proj", 128 * 192, 1536)
    fp8("self_attn.kv_a_proj_with_mqa", 576, 7168)
    fp8("self_attn.kv_b_proj", 128 * 256, 512)
    fp8("self_attn.o_proj", 7168, 128 * 128)
    for name, size in {
        "self_attn.q_a_layernorm": 1536,
        "self_attn.kv_a_layernorm": 512,
        "input_layernorm": 7168,
        "post_attention_layernorm": 7168,
    }.items():
        wide[f"{start}{name}.weight"] = ("BF16", (size,))
    if layer == 0:
        blocks = {"mlp": 18432}
    else:
        wide[start + "mlp.gate.weight"] = ("BF16", (256, 7168))
        wide[start + "mlp.gate.e_score_correction_bias"] = ("F32", (256,))
        blocks = {"mlp.shared_experts": 2048} | {f"mlp.experts.{expert}": 2048 for expert in range(256)}
    for block, width in blocks.items():
        fp8(f"{block}.gate_proj", width, 7168)
        fp8(f"{block}.up_proj", width, 7168)
        fp8(f"{block}.down_proj", 7168, width)
    return wide


KINDS = {"qwen3": (QWEN3, qwen3_layer), "deepseek": (DEEPSEEK, deepseek_layer)}


def make(kind: str, folder: Path, layers: int) -> Path:
    """Write a checkpoint shard by shard; shards that are there already are kept."""
    config, layer_of = KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    hidden = config["hidden_size"]
    ends: Shapes = {
        "model.embed_tokens.weight": ("BF16", (VOCABULARY, hidden)),
        "model.norm.weight": ("BF16", (hidden,)),
        "lm_head.weight": ("BF16", (VOCABULARY, hidden)),
    }
    weight_map: dict[str, str] = {}
    size = 0
    for number, shapes in enumerate([ends, *(layer_of(layer) for layer in range(layers))]):
        file = f"model-{number:05}.safetensors"
        if not (folder / file).exists():
            _write(folder / file, shapes, number)
        weight_map |= dict.fromkeys(shapes, file)
        size += (folder / file).stat().st_size
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}, indent=2))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def fewer(folder: Path, layers: int, out: Path) -> Path:
    """Return a checkpoint of the first layers of another one, its shards hard-linked."""
    out.mkdir(parents=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {f"model-{number:05}.safetensors" for number in range(layers + 1)}
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file in files}
    for file in files:
        os.link(folder / file, out / file)
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return out


def _write(path: Path, shapes: Shapes, seed: int) -> None:
    """Write one safetensors file of random weights, under its name once it is whole."""
    width = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in shapes.items():
        end = offset + width[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draft = path.with_suffix(".part")
    rng = np.random.default_rng(seed)
    with draft.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, (dtype, shape) in shapes.items():
            for chunk in _values(name, dtype, shape, rng):
                file.write(chunk)
    draft.replace(path)


def _values(name: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[bytes]:
    """Yield a tensor's bytes: ones for norms, small normal values for weights, a scale that fits for FP8."""
    count = math.prod(shape)
    if "norm" in name and dtype == "BF16":
        yield np.full(count, 0x3F80, "<u2").tobytes()
        return
    if name.endswith("weight_scale_inv"):
        yield np.full(count, 0.02 / 32, "<f4").tobytes()
        return
    if dtype == "F32":
        yield rng.normal(0, 0.01, count).astype("<f4").tobytes()
        return
    table = _fp8_table() if dtype == "F8_E4M3" else _bf16_table()
    while count:
        many = min(count, _CHUNK)
        yield table[rng.integers(0, len(table), many, np.uint16 if len(table) > 256 else np.uint8)].tobytes()
        count -= many


def _fp8_table() -> Any:
    """Return 256 bytes that are normal values of deviation 32 in FP8."""
    import torch

    values = torch.distributions.Normal(0.0, 32.0).icdf((torch.arange(256) + 0.5) / 256)
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _bf16_table() -> Any:
    """Return 65 536 normal values of deviation 0.02 in BF16."""
    values = np.random.default_rng(0).normal(0, 0.02, 1 << 16).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2")
