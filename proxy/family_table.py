"""The families that the slicer knows, one entry each: data for `proxy.families`.

Names are those on disk, as the hub's checkpoints and `save_pretrained` of transformers have them; what a
model class calls them in memory doesn't matter. ``docs/families.md`` shows which of them were tried.
"""

from __future__ import annotations

from dataclasses import replace

from proxy.families import LAYERS, Family

_BIAS = ("gate.e_score_correction_bias",)
_MTP = ("num_nextn_predict_layers", "num_mtp_layers")

_DEEPSEEK = Family(
    model_type="deepseek_v3",
    also=("kimi_k2", "glm4_moe", "glm4v_moe", "solar_open", "axk1", "axk2"),
    counts=("n_routed_experts",),
    vectors=_BIAS,
    shared=("shared_experts.",),
    groups="n_group",
    topk_groups="topk_group",
    group_score_experts=2,
    mtp_counts=_MTP,
)

_MIXTRAL = Family(
    model_type="mixtral",
    also=("minimax", "phimoe"),
    counts=("num_local_experts",),
    block="block_sparse_moe.",
    mtp_counts=_MTP,
)

_GRANITE = Family(
    model_type="granitemoe",
    also=("granitemoeshared", "granitemoehybrid"),
    counts=("num_local_experts",),
    block="block_sparse_moe.",
    router="router.layer.weight",
    fused=("input_linear.weight", "output_linear.weight"),
)

_LLAMA4 = Family(
    model_type="llama4_text",
    also=("llama4",),
    counts=("num_local_experts",),
    block="feed_forward.",
    router="router.weight",
    shared=("shared_expert.",),
    tap="scores",
)

FAMILIES = (
    # transformers writes num_local_experts where the hub's configs have num_experts.
    Family(
        model_type="qwen3_moe",
        also=("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_thinker"),
        counts=("num_experts", "num_local_experts"),
    ),
    Family(model_type="mellum", counts=("num_experts", "num_local_experts"), mtp_counts=_MTP),
    Family(
        model_type="qwen2_moe",
        also=("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text", "flint"),
        shared=("shared_expert.", "shared_expert_gate."),
    ),
    Family(model_type="olmoe", also=("flex_olmo",)),
    _DEEPSEEK,
    replace(_DEEPSEEK, model_type="kimi_k25", also=(), layer=(*LAYERS, "language_model.model.blocks.{L}.")),
    # Some of these omit the keys of groups or of multi-token prediction, or add a selection bias.
    replace(_DEEPSEEK, model_type="deepseek_v2", also=("mistral4", "unlimited_ocr"), group_score_experts=1),
    replace(
        _DEEPSEEK,
        model_type="deepseek_v32",
        also=("glm4_moe_lite", "glm_moe_dsa", "dots1", "mimo_v2_flash", "dots3_note", "dots3_note_text"),
    ),
    replace(_DEEPSEEK, model_type="hy_v4", also=()),
    Family(
        model_type="deepseek_v4",
        counts=("n_routed_experts",),
        layer=("model.layers.{L}.", "layers.{L}."),
        block="ffn.",
        vectors=("gate.bias", *_BIAS),
        ids=("gate.tid2eid",),
        shared=("shared_experts.",),
        mtp_counts=_MTP,
    ),
    _MIXTRAL,
    replace(_MIXTRAL, model_type="minimax_m2", also=(), vectors=("e_score_correction_bias",)),
    Family(
        model_type="minimax_m3_vl",
        counts=("num_local_experts",),
        block="block_sparse_moe.",
        vectors=("e_score_correction_bias",),
        shared=("shared_experts.",),
        mtp_counts=_MTP,
    ),
    Family(
        model_type="minimax_m3_vl_text",
        counts=("num_local_experts",),
        vectors=_BIAS,
        shared=("shared_experts.",),
        mtp_counts=_MTP,
    ),
    # The router's bias is one of the linear map: it enters the choice and the weights.
    Family(
        model_type="gpt_oss",
        counts=("num_local_experts",),
        router="router.weight",
        vectors=("router.bias",),
    ),
    Family(
        model_type="ernie4_5_moe",
        counts=("moe_num_experts",),
        top_k="moe_k",
        vectors=("moe_statics.e_score_correction_bias",),
        shared=("shared_experts.",),
        mtp_counts=_MTP,
    ),
    Family(
        model_type="hunyuan_v1_moe",
        top_k="moe_topk",
        router="gate.wg.weight",
        shared=("shared_mlp.",),
    ),
    Family(
        model_type="hy_v3",
        router="router.gate.weight",
        vectors=("expert_bias",),
        shared=("shared_mlp.",),
        mtp_counts=_MTP,
    ),
    Family(
        model_type="afmoe",
        router="router.gate.weight",
        vectors=("expert_bias",),
        shared=("shared_experts.",),
    ),
    Family(
        model_type="kimi_linear",
        top_k="num_experts_per_token",
        block="block_sparse_moe.",
        vectors=_BIAS,
        shared=("shared_experts.",),
        groups="num_expert_group",
        topk_groups="topk_group",
        group_score_experts=2,
        mtp_counts=_MTP,
    ),
    Family(
        model_type="bailing_hybrid",
        top_k="num_experts_per_token",
        vectors=("gate.expert_bias",),
        shared=("shared_experts.",),
        groups="num_expert_group",
        topk_groups="topk_group",
        group_score_experts=2,
        mtp_counts=_MTP,
    ),
    Family(
        model_type="exaone_moe",
        vectors=("e_score_correction_bias",),
        shared=("shared_experts.",),
        groups="n_group",
        topk_groups="topk_group",
        group_score_experts=2,
        mtp_counts=_MTP,
    ),
    Family(
        model_type="beam",
        vectors=_BIAS,
        groups="n_group",
        topk_groups="topk_group",
        group_score_experts=2,
    ),
    Family(model_type="laguna", vectors=("experts.e_score_correction_bias",), shared=("shared_expert.",)),
    Family(model_type="lfm2_moe", block="feed_forward.", vectors=("expert_bias",)),
    Family(model_type="jamba", block="feed_forward.", router="router.weight"),
    Family(model_type="cohere2_moe", shared=("shared_experts.",)),
    Family(
        model_type="kolibri1",
        counts=("num_local_experts",),
        beside=("moe.router.expert_bias",),
        shared=("shared_experts.",),
    ),
    _LLAMA4,
    _GRANITE,
    replace(
        _GRANITE,
        model_type="granitemoe_swa",
        also=(),
        router="router.weight",
        fused=("experts.",),
        shared=("shared_mlp.",),
    ),
    Family(
        model_type="nemotron_h",
        counts=("n_routed_experts",),
        layers="",
        layer=("backbone.layers.{L}.", "model.layers.{L}."),
        block="mixer.",
        vectors=_BIAS,
        shared=("shared_experts.", "fc1_latent_proj.", "fc2_latent_proj."),
        groups="n_group",
        topk_groups="topk_group",
        group_score_experts=2,
        mtp_counts=_MTP,
    ),
    # Zero experts pass their token on unchanged: rows of the router, no weights.
    Family(
        model_type="longcat_flash",
        counts=("n_routed_experts",),
        top_k="moe_topk",
        layers="num_layers",
        router="router.classifier.weight",
        vectors=("router.e_score_correction_bias",),
        extra_rows="zero_expert_num",
        mtp_counts=_MTP,
    ),
    # The shared experts have router rows of their own, behind those of the routed ones.
    Family(
        model_type="inkling_text",
        counts=("n_routed_experts",),
        vectors=_BIAS,
        shared=("shared_experts.", "gate.global_scale"),
        extra_rows="n_shared_experts",
    ),
    Family(
        model_type="inkling2_text",
        counts=("n_routed_experts",),
        layer=("model.llm.layers.{L}.", *LAYERS),
        vectors=("gate.bias", *_BIAS),
        shared=("shared_experts.",),
    ),
    # The last row is an expert that does nothing.
    Family(
        model_type="zaya",
        router="gate.router_mlp.out_proj.weight",
        vectors=("gate.balancing_biases",),
        shared=("gate.down_proj.", "gate.router_mlp.", "gate.router_states_scale"),
        extra_rows=1,
    ),
    Family(
        model_type="aria_text",
        also=("aria",),
        counts=("moe_num_experts",),
        top_k="moe_topk",
        router="router.weight",
        shared=("shared_experts.",),
    ),
    Family(
        model_type="dbrx",
        roots=("ffn_config",),
        counts=("moe_num_experts",),
        top_k="moe_top_k",
        layers="",
        layer=("transformer.blocks.{L}.",),
        block="ffn.",
        router="router.layer.weight",
        fused=("experts.mlp.",),
        flat=True,
    ),
    Family(
        model_type="gemma4_text",
        also=("gemma4", "gemma4_unified", "gemma4_unified_text"),
        top_k="top_k_experts",
        block="",
        router="router.proj.weight",
        vectors=("router.per_expert_scale",),
        fused=("experts.",),
    ),
    Family(
        model_type="mistral_large4",
        roots=("text_config", ""),
        counts=("n_routed_experts", "num_experts"),
        layer=("layers.{L}.", "language_model.layers.{L}.", *LAYERS),
        block="",
        vectors=_BIAS,
        shared=("shared_experts.",),
        groups="n_group",
        topk_groups="topk_group",
    ),
)
