"""Checkpoints are read without loading them, and what is broken or not understood is refused by name."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from proxy.checkpoint import TensorInfo, from_float32, open_checkpoint, to_float32
from proxy.errors import CheckpointError
from proxy.families import Role, understand
from proxy.manifest import checkpoint_hash
from tests.fixtures import tiny_moe as tiny


@pytest.fixture
def qwen(tmp_path) -> Path:
    return tiny.make_qwen(tmp_path / "original")


def refuse(folder: Path, words: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=words) as caught:
        understand(open_checkpoint(folder))
    assert "\n" not in str(caught.value)
    return caught.value


def test_tensors_are_where_the_header_says(qwen):
    checkpoint = open_checkpoint(qwen)
    expected = tiny.load_all(qwen)
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert np.array_equal(checkpoint.array(name), tensor.numpy())
    assert checkpoint.parameters == sum(tensor.numel() for tensor in expected.values())


@settings(max_examples=50)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_float_conversions_agree_with_torch(values):
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")):
        tensor = torch.tensor(values)
        narrow = tensor.to(dtype)
        if not narrow.isfinite().all():
            continue
        raw = narrow.view(torch.uint8).numpy().tobytes()
        info = TensorInfo("x", "f", name, tuple(narrow.shape), 0, len(raw))
        assert np.array_equal(to_float32(raw, info), narrow.float().numpy())
        assert from_float32(tensor.numpy(), name) == raw


def test_every_tensor_has_a_role(tmp_path):
    folder = tiny.make_deepseek(tmp_path / "d")
    checkpoint = open_checkpoint(folder)
    layout = understand(checkpoint)
    assert (layout.experts, layout.top_k, layout.groups, layout.topk_groups) == (12, 2, 3, 2)
    assert layout.moe_layers == (1, 2)
    assert set(layout.parts) == set(checkpoint.tensors)
    by_role = {role: [n for n, part in layout.parts.items() if part.role is role] for role in Role}
    assert len(by_role[Role.EXPERT]) == 2 * 12 * 3
    assert sorted(name.split("mlp.")[1] for name in by_role[Role.ROWS]) == [
        "gate.e_score_correction_bias",
        "gate.e_score_correction_bias",
        "gate.weight",
        "gate.weight",
    ]
    assert all("shared_experts" not in n for n in by_role[Role.EXPERT] + by_role[Role.ROWS])


def test_missing_shard(qwen):
    tiny.shard(qwen)
    (qwen / "model-00002-of-00003.safetensors").unlink()
    assert "download" in refuse(qwen, "model-00002-of-00003.safetensors.*missing").mend


@pytest.mark.parametrize(
    "target", ["../outside.safetensors", "/etc/passwd", "..", "sub/x.safetensors", "a\\b"]
)
def test_index_may_not_leave_the_folder(target, qwen):
    tiny.shard(qwen)
    save_file({"lm_head.weight": torch.ones(2)}, qwen.parent / "outside.safetensors")
    path = qwen / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = target
    path.write_text(json.dumps(index))
    refuse(qwen, "leads out of the folder")


def test_shard_may_not_be_a_link_out_of_the_folder(qwen):
    weights = qwen / "model.safetensors"
    weights.rename(qwen.parent / "elsewhere.safetensors")
    weights.symlink_to(qwen.parent / "elsewhere.safetensors")
    refuse(qwen, "link that leaves the folder")


def test_index_that_lies_about_a_tensor(qwen):
    tiny.shard(qwen)
    path = qwen / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    refuse(qwen, "'model.extra.weight'")


@pytest.mark.parametrize("damage", ["truncated", "header", "huge", "empty"])
def test_broken_safetensors(damage, qwen):
    path = qwen / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(
        {
            "truncated": raw[:-5],
            "header": raw[:8] + b"x" + raw[9:],
            "huge": struct.pack("<Q", 2**62) + raw[8:],
            "empty": b"",
        }[damage]
    )
    refuse(qwen, "not a sound safetensors file")


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100000])
def test_broken_config(text, qwen):
    (qwen / "config.json").write_text(text)
    refuse(qwen, "not JSON|not a JSON object")


def test_not_a_checkpoint_at_all(tmp_path):
    refuse(tmp_path / "nowhere", "not a folder")
    refuse(tmp_path, "has no config.json")
    (tmp_path / "config.json").write_text("{}")
    refuse(tmp_path, "neither model.safetensors nor")


def test_dense_model_is_refused_as_one(qwen):
    experts = [name for name in tiny.load_all(qwen) if ".experts." in name or ".gate." in name]
    tiny.edit_tensors(qwen, dict.fromkeys(experts))
    refuse(qwen, "no layer has experts")
    tiny.edit_config(qwen, model_type="qwen3")
    assert "sibling" in refuse(qwen, "'qwen3' is not a known.*looks dense").mend


def test_unknown_family_is_told_what_its_experts_look_like(qwen):
    tiny.edit_config(qwen, model_type="qwen3_moe_next")
    error = refuse(
        qwen, r"'qwen3_moe_next' is not a known .*'model.layers.\*.mlp.experts.\*.down_proj.weight'"
    )
    assert "qwen3_next" in error.mend and "deepseek_v3" not in error.mend
    tiny.edit_config(qwen, model_type=None)
    refuse(qwen, "None is not a known")


@pytest.mark.parametrize(
    "name, words",
    [
        ("model.layers.0.mlp.gate.bias", "not understood.*'model.layers.0.mlp.gate.bias'"),
        ("model.layers.0.mlp.experts.gate_up_proj", "not understood.*gate_up_proj"),
        ("model.layers.0.mlp.experts.08.up_proj.weight", "not understood"),
        ("model.layers.7.mlp.up_proj.weight", "config.json says 2 layers, and there is 'model.layers.7"),
        ("model.experts.0.weight", "not understood"),
        ("model.layers.0.mlp.experts.8.up_proj.weight", "holds 9 experts.*says 8"),
        ("model.layers.0.mlp.experts.0.down_proj.bias", "expert 1 differ"),
    ],
)
def test_tensors_that_are_not_understood_are_named(name, words, qwen):
    tiny.edit_tensors(qwen, {name: torch.ones(8)})
    refuse(qwen, words)


def test_incomplete_layers_are_refused(qwen):
    tensors = tiny.load_all(qwen)
    router = "model.layers.1.mlp.gate.weight"
    tiny.edit_tensors(qwen, {router: None})
    refuse(qwen, "no router 'model.layers.1.mlp.gate.weight'")
    tiny.edit_tensors(qwen, {router: tensors[router][:7].clone()})
    refuse(qwen, r"shape \(7, 32\), expected 8 rows")
    gone = [name for name in tensors if ".1.mlp.experts.3." in name]
    tiny.edit_tensors(qwen, {router: tensors[router], **dict.fromkeys(gone)})
    refuse(qwen, "layer 1 holds 7 experts")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_local_experts": None}, "expert count is unknown"),
        ({"num_local_experts": "8"}, "expected a positive whole number"),
        ({"num_local_experts": 10**12}, "says 1000000000000"),
        ({"num_experts": 9}, "disagree"),
        ({"num_experts_per_tok": 9}, "more than the 8 experts"),
        ({"num_hidden_layers": True}, "expected a positive whole number"),
    ],
)
def test_config_that_does_not_fit(change, words, qwen):
    tiny.edit_config(qwen, **change)
    refuse(qwen, words)


def test_groups_that_do_not_fit(tmp_path):
    folder = tiny.make_deepseek(tmp_path / "d")
    tiny.edit_config(folder, n_group=5)
    refuse(folder, "12 experts, n_group 5")
    tiny.edit_config(folder, n_group=None, topk_group=None)
    assert understand(open_checkpoint(folder)).groups == 1


def test_hash_covers_config_and_every_shard_but_nothing_else(qwen):
    tiny.shard(qwen)
    first = checkpoint_hash(qwen)
    (qwen / "tokenizer.json").write_text("{}")
    assert checkpoint_hash(qwen) == first
    path = qwen / "model-00003-of-00003.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    changed = checkpoint_hash(qwen)
    assert changed != first
    path.write_bytes(raw)
    assert checkpoint_hash(qwen) == first
    tiny.edit_config(qwen, rms_norm_eps=1e-5)
    assert checkpoint_hash(qwen) not in (first, changed)
