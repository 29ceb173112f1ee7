"""Each way in which families lay out experts and routers is cut right; all families: `make families`."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from bench import families as matrix
from bench.zoo import KINDS, Kind, make
from proxy.build import build
from proxy.checkpoint import open_checkpoint
from proxy.errors import CheckpointError
from proxy.families import Role, families, understand
from proxy.specs import BuildSpec
from tests.fixtures import tiny_moe as tiny

BY_NAME = {kind.name: kind for kind in KINDS}

# One of each trait: fused and transposed with biases, hash ids, zero experts, joined rows, experts outside a
# block, groups, a bias beside the block, routers of one row more.
TRAITS = (
    "gpt_oss",
    "deepseek_v4",
    "longcat_flash",
    "dbrx",
    "gemma4_text",
    "axk1",
    "kolibri1",
    "zaya",
    "granitemoe",
    "nemotron_h",
)


@pytest.fixture(scope="module", autouse=True)
def silent():
    matrix.quiet()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a maker of tiny checkpoints that makes each once."""
    home, done = tmp_path_factory.mktemp("zoo"), {}

    def of(name: str) -> Path:
        if name not in done:
            done[name] = make(BY_NAME[name], home / name)
        return done[name]

    return of


@pytest.mark.parametrize("name", TRAITS)
def test_a_proxy_loads_and_equals_the_masked_original(name, tmp_path):
    row = matrix.check(BY_NAME[name], tmp_path)
    assert row.loads, row.note
    assert row.difference <= 1e-5
    assert row.changed > 1e-2  # the mask matters, so the test can fail


def test_the_oracle_notices_a_wrong_expert(made, tmp_path):
    original = made("gpt_oss")
    manifest = build(BuildSpec(str(original), str(tmp_path / "p"), 6, strategy="first_k"))
    kept = {int(layer): entry["kept"] for layer, entry in manifest["layers"].items()}
    wrong = kept | {1: [0, 1, 2, 3, 4, 6]}
    model, problems = matrix.load(tmp_path / "p")
    whole, _ = matrix.load(original)
    layout = understand(open_checkpoint(original))
    with matrix.masked(whole, layout, wrong, {}):
        oracle = matrix.logits(whole)
    assert not problems
    assert (matrix.logits(model) - oracle).abs().max() > 1e-2


def test_fused_records_are_sliced_on_the_experts_axis(made, tmp_path):
    original = made("gpt_oss")
    manifest = build(BuildSpec(str(original), str(tmp_path / "p"), 6, strategy="random"))
    before, after = tiny.load_all(original), tiny.load_all(tmp_path / "p")
    for layer, entry in manifest["layers"].items():
        for rest in ("experts.gate_up_proj", "experts.down_proj_bias", "router.weight", "router.bias"):
            name = f"model.layers.{layer}.mlp.{rest}"
            assert torch.equal(after[name], before[name][entry["kept"]])
    assert manifest["parameters"]["after"] == sum(tensor.numel() for tensor in after.values())


def test_fused_experts_are_merged_record_by_record(made, tmp_path):
    original = made("granitemoe")
    manifest = build(
        BuildSpec(str(original), str(tmp_path / "p"), 4, strategy="merge"), rows=tiny.rows(8, seed=3)
    )
    before, after = tiny.load_all(original), tiny.load_all(tmp_path / "p")
    entry = manifest["layers"]["1"]
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    alone = [i for i, head in enumerate(entry["kept"]) if entry["owner"].count(head) == 1]
    merged = [i for i, head in enumerate(entry["kept"]) if entry["owner"].count(head) > 1]
    assert merged
    for i in alone:
        assert torch.equal(after[name][i], before[name][entry["kept"][i]])
    for i in merged:
        members = [e for e, owner in enumerate(entry["owner"]) if owner == entry["kept"][i]]
        assert not torch.equal(after[name][i], before[name][entry["kept"][i]])
        low, high = before[name][members].amin(0), before[name][members].amax(0)
        assert ((after[name][i] >= low - 1e-6) & (after[name][i] <= high + 1e-6)).all()


def test_rows_behind_the_experts_stay(made, tmp_path):
    original = made("longcat_flash")
    manifest = build(BuildSpec(str(original), str(tmp_path / "p"), 6, strategy="random"))
    before, after = tiny.load_all(original), tiny.load_all(tmp_path / "p")
    for layer, entry in manifest["layers"].items():
        name = f"model.layers.{layer}.mlp.router.classifier.weight"
        assert torch.equal(after[name], before[name][[*entry["kept"], 12, 13]])


def test_hash_ids_become_their_representatives(made, tmp_path):
    original = made("deepseek_v4")
    manifest = build(BuildSpec(str(original), str(tmp_path / "p"), 6, strategy="random"))
    before, after = tiny.load_all(original), tiny.load_all(tmp_path / "p")
    entry = manifest["layers"]["0"]
    table = torch.tensor([entry["kept"].index(owner) for owner in entry["owner"]])
    name = "model.layers.0.ffn.gate.tid2eid"
    assert torch.equal(after[name].long(), table[before[name].long()])
    bad = {name: torch.full_like(before[name], 99)}
    shutil.copytree(original, tmp_path / "bad")
    tiny.edit_tensors(tmp_path / "bad", bad)
    with pytest.raises(CheckpointError, match="tid2eid' names expert 99, and there are 12"):
        build(BuildSpec(str(tmp_path / "bad"), str(tmp_path / "q"), 6, strategy="random"))
    assert not (tmp_path / "q").exists()


def test_counts_given_as_a_list_stay_a_list(made, tmp_path):
    original = shutil.copytree(made("hunyuan_v1_moe"), tmp_path / "o")
    tiny.edit_config(original, num_experts=[12, 12, 12], moe_topk=[3, 3, 3])
    build(BuildSpec(str(original), str(tmp_path / "p"), 6, strategy="first_k"))
    assert tiny.read_config(tmp_path / "p") == tiny.read_config(original) | {"num_experts": [6, 6, 6]}
    tiny.edit_config(original, num_experts=[12, 8, 12])
    with pytest.raises(CheckpointError, match=r"num_experts is \[12, 8, 12\]"):
        understand(open_checkpoint(original))


def test_wrappers_keep_their_count_in_a_section(made, tmp_path):
    original = shutil.copytree(made("qwen3_vl_moe"), tmp_path / "o")
    config = tiny.read_config(original)
    config["text_config"]["num_experts"] = config["text_config"].pop("num_local_experts")
    (original / "config.json").write_text(json.dumps(config))
    build(BuildSpec(str(original), str(tmp_path / "p"), 4, strategy="first_k"))
    edited = tiny.read_config(tmp_path / "p")
    assert edited["text_config"]["num_experts"] == 4
    assert "num_experts" not in edited
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    before, after = tiny.load_all(original)[name], tiny.load_all(tmp_path / "p")[name]
    assert torch.equal(after, before[:4])
    tower = [one for one in tiny.load_all(original) if one.startswith("model.visual.")]
    assert tower and set(tower) <= set(tiny.load_all(tmp_path / "p"))


def test_every_tensor_of_a_family_has_one_role(made):
    for name in ("nemotron_h", "gemma4_text", "zaya"):
        checkpoint = open_checkpoint(made(name))
        layout = understand(checkpoint)
        assert set(layout.parts) == set(checkpoint.tensors)
        sliced = [part for part in layout.parts.values() if part.role is Role.ROWS]
        assert {part.records for part in sliced} == {layout.experts + layout.extra_rows}


def test_a_family_without_an_entry_is_refused_by_what_it_looks_like(tmp_path):
    original = make(Kind("jetmoe"), tmp_path / "o")
    with pytest.raises(CheckpointError, match=r"'jetmoe' is not a known .*self_attention.experts"):
        understand(open_checkpoint(original))


def test_the_families_of_the_day_are_in_the_table():
    qwen = "qwen2_moe qwen3_moe qwen3_next qwen3_5_moe qwen3_vl_moe"
    deepseek = "deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 glm4_moe glm_moe_dsa kimi_k2 minimax_m2"
    others = "mixtral olmoe gpt_oss ernie4_5_moe hunyuan_v1_moe llama4 granitemoe phimoe"
    assert set(f"{qwen} {deepseek} {others}".split()) <= set(families())
