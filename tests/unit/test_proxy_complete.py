"""A checkpoint that lacks something is refused before any work, whatever the strategy, and the message names it."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import families as matrix
from bench.zoo import KINDS, make
from proxy.build import build
from proxy.checkpoint import open_checkpoint
from proxy.companions import unreadable
from proxy.complete import check_complete
from proxy.errors import BuildError, CheckpointError, ProxyError
from proxy.families import Role, understand
from proxy.skeleton import Skeleton
from proxy.specs import BuildSpec
from tests.fixtures import tiny_moe as tiny
from tests.unit.test_proxy_quantised import quantise_fp8

ROWS = tiny.rows(12)


@pytest.fixture(scope="module", autouse=True)
def silent():
    matrix.quiet()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return tiny.make_qwen(tmp_path_factory.mktemp("qwen") / "original")


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "c")


def refused(folder: Path, words: str, tmp_path: Path, strategy: str = "first_k", **more) -> ProxyError:
    """Build, and see it end in one line before anything is calibrated, with nothing left."""
    before, notes = sorted(tmp_path.iterdir()), []
    with pytest.raises(ProxyError, match=words) as caught:
        build(
            BuildSpec(str(folder), str(tmp_path / "p"), 4, strategy, **more),
            notes.append,
            rows=ROWS,
        )
    assert not any("calibrating" in note for note in notes)
    assert sorted(tmp_path.iterdir()) == before
    assert "\n" not in str(caught.value) and caught.value.mend
    return caught.value


# One of each way in which names on disk become names in the model.
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v4", "dbrx", "zaya", "qwen3_vl_moe"])
def test_every_tensor_that_is_taken_away_is_missed(name, tmp_path):
    checkpoint = open_checkpoint(make(next(k for k in KINDS if k.name == name), tmp_path / "o"))
    layout, skeleton = understand(checkpoint), Skeleton(checkpoint)
    check_complete(checkpoint, layout, skeleton)
    groups: dict[tuple, list[str]] = {}  # what a layer's experts have in common goes together
    for tensor, part in layout.parts.items():
        key = (part.layer, part.rest) if part.role is Role.EXPERT else (tensor,)
        groups.setdefault(key, []).append(tensor)
    for gone in groups.values():
        rest = {tensor: info for tensor, info in checkpoint.tensors.items() if tensor not in gone}
        with pytest.raises(CheckpointError):
            less = replace(checkpoint, tensors=rest)
            check_complete(less, understand(less), skeleton)


@pytest.mark.parametrize("strategy", ["first_k", "multi_view"])
@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("model.layers.1.", "no tensor is of layer 1, and config.json says 2 layers"),
        ("model.layers.1.self_attn.q_proj", r"its 'model.layers.1.self_attn.q_proj.weight'"),
        ("model.layers.0.mlp.experts.3.up_proj", "tensors of expert 3 differ"),
        ("model.layers.0.mlp.gate.", "has experts but no router"),
        ("lm_head.", "its 'lm_head.weight'"),
        ("model.norm.", "its 'model.norm.weight'"),
    ],
)
def test_what_is_missing_is_named(gone, words, strategy, qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    tiny.edit_tensors(folder, {name: None for name in tiny.load_all(folder) if name.startswith(gone)})
    refused(folder, words, tmp_path, strategy)


def test_a_matrix_that_no_expert_of_a_layer_has(qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    gone = [name for name in tiny.load_all(folder) if ".1.mlp.experts." in name and "up_proj" in name]
    tiny.edit_tensors(folder, dict.fromkeys(gone))
    assert "up_proj" in str(refused(folder, "experts.gate_up_proj.*no tensor is called", tmp_path))


def test_tensors_and_config_of_two_models(qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    tiny.edit_config(folder, intermediate_size=999, hidden_size=tiny.read_config(folder)["hidden_size"] * 2)
    refused(folder, "has shape .*, and by config.json it is", tmp_path)


@pytest.mark.parametrize("strategy", ["first_k", "multi_view"])
def test_experts_of_another_width(strategy, qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    tiny.edit_config(folder, moe_intermediate_size=2 * tiny.read_config(folder)["moe_intermediate_size"])
    refused(folder, "values, and by config.json they are", tmp_path, strategy)


def test_fewer_layers_in_the_config_than_in_the_files(qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    tiny.edit_config(folder, num_hidden_layers=1)
    refused(folder, "config.json says 1 layers, and there is 'model.layers.1.", tmp_path)


@pytest.mark.parametrize("layers", [3, 10**6, 10**12])
def test_more_layers_in_the_config_than_in_the_files_end_at_once(layers, qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    tiny.edit_config(folder, num_hidden_layers=layers)
    refused(folder, f"no tensor is of layer 2, and config.json says {layers} layers", tmp_path)


def test_layers_of_a_tower_are_bounded_too(tmp_path):
    folder = make(next(k for k in KINDS if k.name == "qwen3_vl_moe"), tmp_path / "o")
    config = tiny.read_config(folder)
    config["vision_config"]["depth"] = 10**9
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "vision_config.depth is 1000000000, more than any model has", tmp_path, "multi_view")


def test_a_tensor_that_the_index_does_not_name(qwen, tmp_path):
    folder = tiny.shard(copy_of(qwen, tmp_path))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(iter(index["weight_map"]))
    del index["weight_map"][name]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "anew" in refused(folder, f"holds tensor '{name}', which .* does not name", tmp_path).mend


@pytest.mark.parametrize("strategy", ["first_k", "multi_view"])
def test_quantised_tensors_without_their_factors(strategy, qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    values, scale = quantise_fp8(tiny.load_all(folder)[name])
    tiny.edit_tensors(folder, {name: values, f"{name}_scale_inv": scale})
    tiny.edit_config(folder, quantization_config={"quant_method": "fp8"})
    build(BuildSpec(str(folder), str(tmp_path / "whole"), 4, strategy), rows=ROWS)
    tiny.edit_tensors(folder, {f"{name}_scale_inv": None})
    refused(
        folder,
        rf"'{name}' is quantised \(F8_E4M3\), and its '{name}_scale_inv' is missing",
        tmp_path,
        strategy,
    )


def test_factors_of_another_shape(qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    changes = {}
    for name, tensor in tiny.load_all(folder).items():
        if ".experts." in name:
            values, scale = quantise_fp8(tensor)
            changes |= {name: values, f"{name}_scale_inv": scale}
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    changes[name] = changes[name].reshape(-1)
    tiny.edit_tensors(folder, changes)
    tiny.edit_config(folder, quantization_config={"quant_method": "fp8"})
    refused(folder, "layer 0: expert [12] .* another shape", tmp_path, "multi_view")


def test_experts_of_two_values_a_byte_are_copied(qwen, tmp_path):
    """As DeepSeek-V4 has them: int8, half as wide, factors of powers of two."""
    folder = copy_of(qwen, tmp_path)
    changes: dict[str, torch.Tensor | None] = {}
    for name, tensor in tiny.load_all(folder).items():
        if ".experts." in name:
            scale = torch.ones(tensor.shape[0], 1).to(torch.float8_e8m0fnu)
            changes |= {name: tensor[:, ::2].to(torch.int8), name.removesuffix("weight") + "scale": scale}
    tiny.edit_tensors(folder, changes)
    tiny.edit_config(folder, quantization_config={"quant_method": "fp8"})
    build(BuildSpec(str(folder), str(tmp_path / "p"), 4, "first_k"))
    with pytest.raises(BuildError, match="two 4-bit values a byte"):
        build(BuildSpec(str(folder), str(tmp_path / "q"), 4), rows=ROWS)


def test_a_quantised_expert_may_be_packed_or_not_but_not_less(qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    tensors = tiny.load_all(folder)
    changes = {}
    for name, tensor in tensors.items():
        if ".experts.5." in name:  # one of eight is quantised
            values, scale = quantise_fp8(tensor)
            changes |= {name: values, f"{name}_scale_inv": scale}
    tiny.edit_tensors(folder, changes)
    tiny.edit_config(folder, quantization_config={"quant_method": "fp8"})
    build(BuildSpec(str(folder), str(tmp_path / "whole"), 4, "random"))
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tiny.edit_tensors(folder, {name: None})
    refused(folder, "layer 1: (tensors of )?expert 5 (differ|lacks)", tmp_path)
    tiny.edit_tensors(folder, {f"{name}_scale_inv": None})
    refused(folder, "layer 1: (tensors of )?expert 5 (differ|lacks)", tmp_path)


@pytest.mark.parametrize(
    ("dtypes", "found"),
    [
        ({"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32", "b.weight": "BF16"}, ""),
        ({"a.weight": "F8_E4M3", "a.scale": "F8_E8M0", "b.weight": "F8_E5M2"}, "b.weight_scale_inv"),
        ({"a.weight": "F8_E4M3"}, "a.weight_scale_inv"),
        ({"a.weight": "I8", "a.SCB": "F32"}, ""),  # bitsandbytes
        ({"a.weight._data": "I8", "a.weight._scale": "F32"}, ""),  # quanto
        ({"x.experts.down_proj": "F8_E4M3", "x.experts.down_proj_scale": "F32"}, ""),
        (
            {"x.experts.down_proj": "I8", "y.weight": "I8", "y.weight_scale": "F32"},
            "x.experts.down_proj_scale_inv",
        ),
        ({"x.experts.down_proj_blocks": "U8", "x.experts.down_proj_scales": "U8"}, ""),
        ({"x.experts.down_proj_blocks": "U8"}, "x.experts.down_proj_scales"),
        ({"a.weight_packed": "I32", "a.weight_scale": "BF16", "a.weight_shape": "I64"}, ""),
        ({"a.weight_packed": "I32", "a.weight_shape": "I64"}, "a.weight_scale"),
        ({"a.qweight": "I32", "a.scales": "F16"}, ""),  # GPTQ and AWQ
        ({"a.router.scale": "BF16", "a.router.proj.weight": "BF16"}, ""),
    ],
)
def test_factors_are_missed_only_where_their_names_are_known(dtypes, found):
    assert unreadable(dtypes)[1] == found


def quantised(kind: str, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Return what a foreign quantisation makes of a weight."""
    stem, (rows, columns) = name.removesuffix("weight"), tensor.shape
    zeros, scale = (
        torch.zeros(columns, rows // 8, dtype=torch.int32),
        torch.ones(1, rows, dtype=torch.float16),
    )
    if kind in ("gptq", "awq"):
        return {
            name: None,
            f"{stem}qweight": zeros,
            f"{stem}qzeros": zeros[:1].clone(),
            f"{stem}scales": scale,
        }
    if kind == "bitsandbytes":
        absmax = {f"{name}.absmax": torch.ones(4), f"{name}.quant_map": torch.ones(16)}
        return {name: torch.zeros(rows * columns // 2, 1, dtype=torch.uint8)} | absmax
    if kind == "quanto":
        return {name: None, f"{name}._data": tensor.to(torch.int8), f"{name}._scale": scale}
    packed = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    small = torch.ones(rows, max(columns // 16, 1)).to(torch.float8_e4m3fn)
    weight = {"nvfp4": f"{name}_packed", "modelopt": name}[kind]
    whole = {"nvfp4": f"{stem}weight_global_scale", "modelopt": f"{stem}weight_scale_2"}[kind]
    return {name: None} | {weight: packed, f"{stem}weight_scale": small, whole: torch.ones(1)}


@pytest.mark.parametrize("plain", [(), (3, 5)])
@pytest.mark.parametrize("kind", ["gptq", "awq", "bitsandbytes", "quanto", "nvfp4", "modelopt"])
def test_foreign_quantisations_are_copied_and_still_have_to_be_whole(kind, plain, qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    changes: dict[str, torch.Tensor | None] = {}
    for name, tensor in tiny.load_all(folder).items():
        if ("_proj.weight" in name) and not any(f".experts.{one}." in name for one in plain):
            changes |= quantised(kind, name, tensor)
    tiny.edit_tensors(folder, changes)
    tiny.edit_config(folder, quantization_config={"quant_method": kind})
    build(BuildSpec(str(folder), str(tmp_path / "whole"), 4, "first_k"))
    if kind != "bitsandbytes":  # whatever part of an expert is gone
        for part in [
            name for name in tiny.load_all(folder) if name.startswith("model.layers.1.mlp.experts.4.up_proj.")
        ]:
            less = shutil.copytree(folder, tmp_path / "less")
            tiny.edit_tensors(less, {part: None})
            refused(less, "expert 4 (lacks|differ)|is missing", tmp_path)
            shutil.rmtree(less)
    for gone in ("model.layers.1.self_attn.q_proj.", "model.layers.1.mlp.experts.4.up_proj."):
        less = shutil.copytree(folder, tmp_path / "less")
        tiny.edit_tensors(less, {name: None for name in tiny.load_all(less) if name.startswith(gone)})
        refused(less, "q_proj|expert 4 (lacks|differ)", tmp_path)
        shutil.rmtree(less)


def test_experts_that_transformers_keeps_in_another_way(tmp_path):
    """Llama-4 checkpoints for vLLM have their experts one by one."""
    folder = make(next(k for k in KINDS if k.name == "llama4_text"), tmp_path / "o")
    changes: dict[str, torch.Tensor | None] = {}
    for name, tensor in tiny.load_all(folder).items():
        if ".experts." in name:
            changes[name] = None
            parts = (
                {"down_proj": tensor}
                if "down" in name
                else dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, -1), strict=True))
            )
            for part, stack in parts.items():
                start = name.rpartition(".")[0]
                changes |= {f"{start}.{e}.{part}.weight": stack[e].T.contiguous() for e in range(12)}
    tiny.edit_tensors(folder, changes)
    manifest = build(BuildSpec(str(folder), str(tmp_path / "copied"), 6, "first_k"))
    assert "the experts were not checked" in manifest["warnings"][0]
    assert "first_k" in refused(folder, "in another way than this checkpoint", tmp_path, "multi_view").mend
    name = "model.layers.1.self_attn.q_proj.weight"
    tiny.edit_tensors(folder, {name: None})
    refused(folder, name, tmp_path)


def test_a_model_that_transformers_knows_under_another_name(tmp_path):
    folder = make(next(k for k in KINDS if k.name == "deepseek_v3"), tmp_path / "o")
    rows = [[3, 5, 9, 4]] * 8
    expected = build(BuildSpec(str(folder), str(tmp_path / "p"), 6), rows=rows)
    tiny.edit_config(
        folder, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    )
    found = build(BuildSpec(str(folder), str(tmp_path / "q"), 6), rows=rows)
    assert found["layers"] == expected["layers"] and found["family"] == "kimi_k2"
    assert tiny.read_config(tmp_path / "q")["model_type"] == "kimi_k2"


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "kimi_k25"])
def test_a_head_that_is_the_embedding_is_not_missed(name, tmp_path):
    kind = next(k for k in KINDS if k.name == name)
    folder = make(replace(kind, changes=kind.changes | {"tie_word_embeddings": True}), tmp_path / "o")
    assert not any("lm_head" in tensor for tensor in tiny.load_all(folder))
    build(BuildSpec(str(folder), str(tmp_path / "p"), 6, "first_k"))
    build(BuildSpec(str(folder), str(tmp_path / "q"), 6), rows=[[3, 5, 9, 4]] * 8)


def test_a_pipe_or_a_link_to_itself_as_weights(qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, "not a plain file", tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    refused(folder, "model.safetensors", tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": "64"}, "vocab_size is '64', expected a positive whole number"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"max_position_embeddings": [1, 2]}, "max_position_embeddings is"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        ({"num_attention_heads": 0}, "transformers cannot load"),
        ({"num_local_experts": None}, "expert count is unknown"),
        ({"hidden_act": "no such"}, "transformers cannot load"),
    ],
)
def test_odd_config_values_end_in_one_line(change, words, qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    tiny.edit_config(folder, **change)
    refused(folder, words, tmp_path, "multi_view")


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_attention_that_would_be_fetched_from_somewhere_is_not(family, tmp_path):
    """transformers takes a name like a repository's for a kernel, downloads it and runs it."""
    folder = make(next(k for k in KINDS if k.name == family), tmp_path / "o")
    expected = build(BuildSpec(str(folder), str(tmp_path / "p"), 6), rows=[[3, 5, 9, 4]] * 8)
    config = tiny.read_config(folder)
    for section in (config, config.get("text_config", {}), config.get("vision_config", {})):
        section["attn_implementation"] = section["_attn_implementation"] = "somebody/kernel@main"
    (folder / "config.json").write_text(json.dumps(config))
    model = Skeleton(open_checkpoint(folder)).model
    named = {
        getattr(module.config, "_attn_implementation", None)
        for module in model.modules()
        if hasattr(module, "config")
    }
    assert named <= {"sdpa", "eager"}
    assert (
        build(BuildSpec(str(folder), str(tmp_path / "q"), 6), rows=[[3, 5, 9, 4]] * 8)["layers"]
        == expected["layers"]
    )


def test_a_config_without_end(qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    deep = json.loads('{"a":' * 900 + "1" + "}" * 900)
    tiny.edit_config(folder, deep=deep)
    refused(folder, "nested more than", tmp_path)


def test_what_the_strategy_cannot_do_is_said_before_calibration(qwen, tmp_path):
    refused(qwen, "no three views", tmp_path, "frequency", search_alpha=True)
    refused(qwen, "no three views", tmp_path, "router+context", search_alpha=True)
    refused(
        qwen, "cannot be split into halves", tmp_path, "multi_view", search_alpha=True, calibration_tokens=5
    )
    refused(
        qwen, "test prompts file .*nothing.*cannot be read", tmp_path, test_prompts=str(tmp_path / "nothing")
    )
    refused(qwen, "test prompts file .* is not a plain file", tmp_path, "random", test_prompts=str(tmp_path))
    refused(qwen, "test prompts file embedded cannot be read", tmp_path, test_prompts="embedded")


def test_reap_on_a_family_whose_experts_run_all_together(tmp_path):
    folder = make(next(k for k in KINDS if k.name == "llama4_text"), tmp_path / "o")
    assert "frequency" in refused(folder, "only run all together", tmp_path, "reap").mend


def test_nan_in_what_calibration_does_not_read_is_found_first(qwen, tmp_path):
    for name in ("lm_head.weight", "model.layers.1.mlp.experts.7.down_proj.weight"):
        folder = copy_of(qwen, tmp_path)
        tensor = tiny.load_all(folder)[name].clone()
        tensor.view(-1)[3] = float("nan")
        tiny.edit_tensors(folder, {name: tensor})
        refused(folder, f"'{name}' .*NaN", tmp_path, "multi_view")
        shutil.rmtree(folder)


def test_token_ids_beyond_a_wrappers_vocabulary(tmp_path):
    folder = make(next(k for k in KINDS if k.name == "qwen3_vl_moe"), tmp_path / "o")
    assert "vocab_size" not in tiny.read_config(folder)
    with pytest.raises(BuildError, match="row 1 is 64, outside the checkpoint's vocabulary of 64"):
        build(BuildSpec(str(folder), str(tmp_path / "p"), 4), rows=[[3, 64]])
    with pytest.raises(BuildError, match="row 1 is 5000"):
        build(BuildSpec(str(folder), str(tmp_path / "p"), 4), rows=[[3, 5000]])


def test_embeddings_are_not_read_past_their_end(qwen, tmp_path):
    folder = copy_of(qwen, tmp_path)
    tiny.edit_config(folder, vocab_size=10**6)
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head.weight' has shape"):
        build(BuildSpec(str(folder), str(tmp_path / "p"), 4), rows=[[3, 5000]])
    from proxy.walk import Pass

    checkpoint = open_checkpoint(folder)
    with pytest.raises(BuildError, match=r"token id 5000 is outside of 'model.embed_tokens.weight'"):
        Pass(checkpoint, understand(checkpoint), [[3, 5000]]).run()
