"""Tiny random checkpoints of many Mixture-of-Experts families, made with the installed transformers.

Every model has 12 experts (top-3), hidden size 32 and 64 tokens, so that a family takes a fraction of a second.
Router rows and selection biases are drawn wide, far from ties.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 64
EXPERTS = 12
TOP_K = 3

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "top_k_experts": TOP_K,
    "max_position_embeddings": 64,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Small values of config keys, used where a family's config has the key."""

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
"""The same for a wrapper's vision tower, which the tests never call."""

_MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [1, 1, 0],
    "partial_rotary_factor": 0.5,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 1.0,
}
_GROUPS = {"n_group": 3, "topk_group": 2}


@dataclass(frozen=True)
class Kind:
    """One tiny checkpoint.

    Attributes:
        model_type: Key of transformers' config mapping.
        changes: Config keys beside the small common values.
        variant: What sets it apart from another of the same type.
    """

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    variant: str = ""

    @property
    def name(self) -> str:
        """Name of the row."""
        return self.model_type + (f" ({self.variant})" if self.variant else "")


KINDS = (
    Kind("afmoe"),
    Kind("aria_text"),
    Kind("axk1", _GROUPS),
    Kind("axk2"),
    Kind("bailing_hybrid", {"num_expert_group": 3, "topk_group": 2}),
    Kind("beam", {"mlp_layer_types": ["dense", "sparse", "sparse"], "n_group": 3, "topk_group": 2}),
    Kind("cohere2_moe"),
    Kind("dbrx"),
    Kind("deepseek_v2"),
    Kind("deepseek_v2", _GROUPS | {"topk_method": "group_limited_greedy"}, "groups"),
    Kind("deepseek_v3", _GROUPS),
    Kind("deepseek_v32", _GROUPS),
    Kind("deepseek_v4", {"mlp_layer_types": ["hash_moe", "moe", "moe"]}),
    Kind("dots1"),
    Kind("dots3_note_text", {"per_layer_config": {}, "head_dim": 12}),
    Kind("ernie4_5_moe"),
    Kind("exaone_moe"),
    Kind("flex_olmo"),
    Kind("flint", {"decoder_sparse_step": 1, "mlp_only_layers": []}),
    Kind("gemma4_text", {"enable_moe_block": True, "vocab_size_per_layer_input": VOCABULARY}),
    Kind("glm4_moe"),
    Kind("glm4_moe_lite"),
    Kind("glm4v_moe", {"rope_parameters": _MROPE}),
    Kind("glm_moe_dsa"),
    Kind("gpt_oss"),
    Kind("granitemoe"),
    Kind("granitemoe_swa"),
    Kind("granitemoehybrid", {"shared_intermediate_size": 16}),
    Kind("granitemoeshared", {"shared_intermediate_size": 16}),
    Kind("hunyuan_v1_moe"),
    Kind("hy_v3"),
    Kind("hy_v4"),
    Kind("inkling_text"),
    Kind("inkling2_text"),
    Kind("jamba", {"num_hidden_layers": 4}),
    Kind("jetmoe"),
    Kind("kimi_k25"),
    Kind("kimi_linear"),
    Kind("kolibri1"),
    Kind("laguna"),
    Kind("lfm2_moe", {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}),
    Kind("llama4_text", {"num_experts_per_tok": 1}),
    Kind(
        "longcat_flash",
        {"num_hidden_layers": 4, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48, "zero_expert_num": 2},
    ),
    Kind("mellum"),
    Kind("mimo_v2_flash"),
    Kind("minimax"),
    Kind("minimax_m2"),
    Kind("minimax_m3_vl_text", {"shared_intermediate_size": 16, "dense_intermediate_size": 32}),
    Kind("mistral4", {"rope_parameters": _YARN}),
    Kind("mistral_large4"),
    Kind("mixtral"),
    Kind(
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    Kind("olmoe"),
    Kind("phimoe"),
    Kind("qwen2_moe"),
    Kind("qwen3_5_moe_text"),
    Kind("qwen3_moe"),
    Kind("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}, "a dense layer"),
    Kind("qwen3_next"),
    Kind("qwen3_vl_moe"),
    Kind("qwen4_exp_text"),
    Kind("solar_open"),
    Kind("zaya", {"num_experts_per_tok": 1}),
)


def make(kind: Kind, folder: Path) -> Path:
    """Write a tiny random checkpoint with transformers.

    Raises:
        Exception: Whatever transformers raises where it cannot build one; the matrix prints it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = tiny_config(kind)
    torch.manual_seed(0)
    known: Any = AutoModelForCausalLM._model_mapping
    loader: Any = AutoModelForCausalLM if type(config) in known else AutoModelForImageTextToText
    model = loader.from_config(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _fill(name, tensor)
    model.save_pretrained(folder)
    return folder


def tiny_config(kind: Kind) -> Any:
    """Return a family's config with small values."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind.model_type]
    if kind.model_type == "dbrx":
        return made(
            d_model=32,
            n_heads=4,
            n_layers=3,
            vocab_size=VOCABULARY,
            max_seq_len=64,
            attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            ffn_config={
                "hidden_size": 32,
                "ffn_hidden_size": 16,
                "moe_num_experts": EXPERTS,
                "moe_top_k": TOP_K,
            },
        )
    base = made()
    text = getattr(base, "text_config", None)
    if text is None:
        return made(**(_small(base) | kind.changes))
    changes: dict[str, Any] = {"text_config": _small(text) | kind.changes}
    if getattr(base, "vision_config", None) is not None:
        changes["vision_config"] = {
            key: value for key, value in _VISION.items() if hasattr(base.vision_config, key)
        }
    return made(**changes)


def _small(config: Any) -> dict[str, Any]:
    """Return the small values of the keys that a config has."""
    keys = config.to_dict()
    small = {key: value for key, value in _COMMON.items() if key in keys or hasattr(config, key)}
    if "qk_rope_head_dim" in keys:  # latent attention: heads are not grouped, and head_dim is what is rotated
        small |= {"num_key_value_heads": 4}
        if "head_dim" in small:
            small["head_dim"] = 4
    return small


def _fill(name: str, tensor: Any) -> None:
    """Draw a tensor: wide router rows and biases, moderate weights, the rest as the family made it."""
    router = (
        "gate.weight",
        "router.weight",
        "router.layer.weight",
        "wg.weight",
        "classifier.weight",
        "router.proj.weight",
    )
    if tensor.dtype.is_floating_point and name.endswith((*router, "router_mlp.out_proj.weight")):
        tensor.normal_(std=0.5)
    elif name.endswith(("e_score_correction_bias", "expert_bias", "router.bias", "balancing_biases")):
        tensor.normal_(std=0.1)
        if name.endswith("balancing_biases"):
            tensor[-1] = -1.0  # what zaya's class puts there whatever the file says
    elif name.endswith("tid2eid"):
        import torch

        choices = [torch.randperm(EXPERTS)[: tensor.shape[1]] for _ in range(len(tensor))]
        tensor.copy_(torch.stack(choices))
    elif tensor.dtype.is_floating_point and tensor.ndim > 1:
        tensor.normal_(std=0.2)


def tokens(rows: int = 4, length: int = 12, seed: int = 0) -> Any:
    """Return random token ids, [rows, length]; ids that families reserve are left out."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)
