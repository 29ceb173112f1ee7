"""The paper's Table 2: parameters, memory, least accelerators and device-hours from a config alone."""

import json
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.zoo import KINDS, make
from diagnose.cli import invoke
from proxy.checkpoint import open_checkpoint
from proxy.cost import (
    ACCELERATORS,
    BYTES,
    Batch,
    cost,
    device_hours,
    memory,
    step_seconds,
)
from proxy.embedded import resolve
from proxy.errors import CheckpointError
from proxy.families import understand
from proxy.sizes import COUNTED, counted, shape_at, shape_of
from tests.fixtures import tiny_moe as tiny

QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = {
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 128,
    "vocab_size": 129280,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
NPU = ACCELERATORS["ascend-910c"]
PAPER = [  # config, experts, NPUs, seconds a step, NPU-hours
    (QWEN, 128, 16, 128.93, 0.573),
    (QWEN, 48, 8, 114.83, 0.255),
    (DEEPSEEK, 256, 512, 50 * 60, 426.7),
    (DEEPSEEK, 16, 64, 12 * 60, 12.8),
]


def row(config, experts, **more):
    return cost(shape_of(config).with_experts(experts), "proxy", NPU, 4096, Batch(), **more)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_embedded_checkpoints_are_counted_exactly(name):
    folder = resolve(f"embedded:{name}")
    tensors = open_checkpoint(folder).tensors.values()
    by_formula, by_header = shape_at(folder / "config.json"), shape_at(folder)
    assert by_formula.parameters == sum(math.prod(tensor.shape) for tensor in tensors)
    assert by_formula == by_header


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        "llama4_text",
        "gpt_oss",
        "deepseek_v32",
        "glm4_moe",
        "mixtral",
        "minimax_m2",
        "granitemoe",
    ],
)
def test_the_formulas_are_those_of_the_headers(name, tmp_path):
    folder = make(next(kind for kind in KINDS if kind.name == name), tmp_path / "o")
    checkpoint = open_checkpoint(folder)
    exact = counted(checkpoint, understand(checkpoint))
    assert exact.parameters == checkpoint.parameters
    found = shape_of(checkpoint.config)
    assert found.parameters == pytest.approx(exact.parameters, rel=2e-3)
    assert (found.expert, found.moe_layers, found.experts) == (exact.expert, exact.moe_layers, exact.experts)
    assert found.active == pytest.approx(exact.active, rel=1e-2)


def test_packed_weights_are_counted_by_the_formulas(tmp_path):
    folder = make(next(kind for kind in KINDS if kind.name == "gpt_oss"), tmp_path / "o")
    plain = shape_at(folder)
    tensors = tiny.load_all(folder)
    name = "model.layers.0.mlp.experts.down_proj"
    packed = {f"{name}_blocks": torch.zeros(12, 32, 1, 16, dtype=torch.uint8)}
    tiny.edit_tensors(
        folder, {name: None, f"{name}_scales": torch.ones(12, 32, 1, dtype=torch.uint8)} | packed
    )
    assert name in tensors and shape_at(folder) == shape_of(tiny.read_config(folder)) == plain


@pytest.mark.parametrize("width", [-5, 0, "x"])
def test_a_width_that_is_none(width, tmp_path):
    folder = shutil.copytree(resolve("embedded:qwen3_moe"), tmp_path / "o")
    tiny.edit_config(folder, hidden_size=width)
    with pytest.raises(CheckpointError, match="hidden_size"):
        shape_at(folder)


@pytest.mark.parametrize("name", ["hunyuan_v1_moe", "zaya", "jamba", "qwen3_vl_moe"])
def test_what_the_formulas_do_not_know_is_counted_in_the_headers(name, tmp_path):
    folder = make(next(kind for kind in KINDS if kind.name == name), tmp_path / "o")
    assert shape_at(folder).parameters == open_checkpoint(folder).parameters
    if name not in COUNTED:
        with pytest.raises(CheckpointError, match="not checked for a") as caught:
            shape_at(folder / "config.json")
        assert "folder with its weights" in caught.value.mend


def test_the_papers_models_have_their_published_sizes():
    assert shape_of(QWEN).parameters == pytest.approx(30.53e9, rel=1e-3)
    # 671.0 B without the sparse attention's indexer, which the published number leaves out.
    plain = {key: value for key, value in DEEPSEEK.items() if not key.startswith("index_")}
    assert shape_of(plain).parameters == pytest.approx(671.03e9, rel=1e-4)
    assert shape_of(QWEN).active == pytest.approx(3.04e9, rel=1e-2)


@pytest.mark.parametrize(("config", "experts", "npus", "seconds", "hours"), PAPER)
def test_npu_hours_of_the_papers_rows(config, experts, npus, seconds, hours):
    found = row(config, experts, devices=npus, seconds=seconds)
    assert found.hours == pytest.approx(hours, abs=0.06 if hours > 1 else 6e-4) and found.measured
    assert device_hours(npus, seconds) == found.hours


def test_least_accelerators_of_the_papers_rows():
    least = [row(config, experts).devices for config, experts, *_ in PAPER]
    used = [npus for _, _, npus, *_ in PAPER]
    assert least[:2] == used[:2]
    # A lower bound for DeepSeek-V3.2, half of what was used on both rows: the reduction is the paper's.
    assert all(count <= npus for count, npus in zip(least, used, strict=True))
    assert least[2] / least[3] == used[2] / used[3] == 8


def test_memory_is_bytes_by_state_and_falls_with_the_experts():
    whole, cut = shape_of(QWEN), shape_of(QWEN).with_experts(48)
    assert memory(whole)["optimizer"] == 8 * whole.parameters
    assert sum(memory(whole).values()) == sum(BYTES.values()) * whole.parameters
    gone = 80 * (whole.expert + whole.router) * whole.moe_layers
    assert whole.parameters - cut.parameters == gone
    assert cut.active == pytest.approx(whole.active, rel=0.01)  # Top-k is untouched


def test_the_estimate_falls_with_more_devices_and_grows_with_longer_responses():
    shape = shape_of(QWEN)
    assert step_seconds(shape, NPU, 32, Batch()) < step_seconds(shape, NPU, 16, Batch())
    assert step_seconds(shape, NPU, 16, Batch(response=4096)) > step_seconds(shape, NPU, 16, Batch())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "no Mixture-of-Experts family"),
        ({"num_experts": None}, "has none of"),
        ({"vocab_size": "many"}, "vocab_size is 'many', expected a whole number"),
        ({"vocab_size": None}, "no positive whole number vocab_size"),
        ({"vocab_size": 10**400}, "vocab_size is 1000.*…, expected a whole number"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers are more than any model has"),
        ({"head_dim": -5}, "head_dim is -5"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list"),
        ({"num_experts_per_tok": 500}, "num_experts_per_tok 500 is more than the 128 experts"),
        ({"first_k_dense_replace": "two"}, "first_k_dense_replace is 'two'"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads"),
    ],
)
def test_what_cannot_be_counted_is_refused(change, words):
    with pytest.raises(CheckpointError, match=words):
        shape_of(QWEN | change)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.integers(0, 300),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 9), max_size=2),
    st.just({}),
)


@settings(max_examples=300, deadline=2000)
@given(st.dictionaries(st.sampled_from([*QWEN, *DEEPSEEK, "text_config"]), ODD, max_size=4), st.booleans())
def test_odd_configs_are_counted_or_refused(change, deep):
    try:
        shape = shape_of((DEEPSEEK if deep else QWEN) | change)
        found = cost(shape, "original", NPU, 4096, Batch())
    except CheckpointError as error:
        assert error.mend and "\n" not in str(error)
    else:
        assert math.isfinite(found.hours) and found.hours > 0


def test_the_command(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    order = ["proxy", "cost", str(tmp_path), "--experts", "48", "--seconds", "128.93,114.83"]
    assert invoke([*order, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [line["devices"] for line in data["rows"]] == [16, 8]
    assert [line["hours"] for line in data["rows"]] == pytest.approx([0.573, 0.255], abs=1e-3)
    assert invoke(order) == 0
    assert "2.25× cheaper a step" in capsys.readouterr().out
    for wrong in (
        ["--experts", "4"],
        ["--experts", "200"],
        ["--accelerator", "abacus"],
        ["--tokens", "9000000"],
        ["--seconds", "nan"],
        ["--seconds", "inf"],
    ):
        assert invoke(["proxy", "cost", str(tmp_path), *wrong]) == 2
    assert invoke(["proxy", "cost", str(tmp_path / "nothing")]) == 2
    assert "config.json" in capsys.readouterr().err
