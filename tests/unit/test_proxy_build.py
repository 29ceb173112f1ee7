"""The proxy computes what the original computes without the dropped experts; nothing half-made is left."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proxy.build import build
from proxy.calibration import collect
from proxy.errors import BuildError, CheckpointError, ProxyError
from proxy.manifest import checkpoint_hash, rows_hash
from proxy.plan import make_plan
from proxy.specs import BuildSpec
from tests.fixtures import tiny_moe as tiny

ROWS = tiny.rows()


def kept_of(manifest):
    return {int(layer): entry["kept"] for layer, entry in manifest["layers"].items()}


def spec(source: Path, out: Path, experts: int, strategy: str = "multi_view", **more) -> BuildSpec:
    return BuildSpec(str(source), str(out), experts, strategy=strategy, **more)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return tiny.make_qwen(tmp_path_factory.mktemp("qwen") / "original")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    return tiny.make_deepseek(tmp_path_factory.mktemp("deepseek") / "original")


@pytest.mark.parametrize("strategy", ["multi_view", "router+context", "frequency", "random", "first_k"])
@pytest.mark.parametrize("family", ["qwen", "deepseek"])
def test_logits_equal_the_original_with_dropped_experts_masked(family, strategy, tmp_path, request):
    original = request.getfixturevalue(family)
    manifest = build(spec(original, tmp_path / "p", 6, strategy), rows=ROWS)
    proxy, masked = tiny.logits(tmp_path / "p"), tiny.logits(original, kept_of(manifest))
    assert (proxy - masked).abs().max() <= 1e-5
    assert (proxy - tiny.logits(original)).abs().max() > 1e-2  # the mask matters, so the test can fail


def test_normalised_router_weights_are_covered_too(tmp_path):
    original = tiny.make_qwen(tmp_path / "original", norm_topk_prob=True)
    manifest = build(spec(original, tmp_path / "p", 4), rows=ROWS)
    masked = tiny.logits(original, kept_of(manifest))
    assert (tiny.logits(tmp_path / "p") - masked).abs().max() <= 1e-5


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_only_the_count_key_of_the_raw_config_changes(key, tmp_path):
    original = tiny.make_qwen(tmp_path / "original")
    tiny.rename_config_key(original, "num_local_experts", key)
    tiny.edit_config(
        original, rope_theta=1000000.0, torch_dtype="bfloat16", a_key_nobody_knows=[1, {"x": None}]
    )
    build(spec(original, tmp_path / "p", 4, "first_k"))
    assert tiny.read_config(tmp_path / "p") == tiny.read_config(original) | {key: 4}
    assert list(tiny.read_config(tmp_path / "p")) == list(tiny.read_config(original))


def test_sharded_checkpoint_gives_the_same_proxy(deepseek, tmp_path):
    sharded = tiny.shard(tiny.make_deepseek(tmp_path / "sharded"))
    whole = build(spec(deepseek, tmp_path / "whole", 6), rows=ROWS)
    parts = build(spec(sharded, tmp_path / "parts", 6), rows=ROWS)
    assert kept_of(whole) == kept_of(parts)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    tensors = tiny.load_all(tmp_path / "parts")
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert torch.equal(tiny.logits(tmp_path / "whole"), tiny.logits(tmp_path / "parts"))


@pytest.mark.parametrize("strategy", ["multi_view", "merge", "random"])
@pytest.mark.parametrize("family, experts", [("qwen", 8), ("deepseek", 12)])
def test_keeping_all_experts_is_the_identity(family, experts, strategy, tmp_path, request):
    original = request.getfixturevalue(family)
    manifest = build(spec(original, tmp_path / "p", experts, strategy), rows=ROWS)
    assert (tmp_path / "p/model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    assert manifest["parameters"]["before"] == manifest["parameters"]["after"]


def test_tensors_are_those_of_the_kept_experts(deepseek, tmp_path):
    manifest = build(spec(deepseek, tmp_path / "p", 6), rows=ROWS)
    before, after = tiny.load_all(deepseek), tiny.load_all(tmp_path / "p")
    for layer, kept in kept_of(manifest).items():
        block = f"model.layers.{layer}.mlp."
        for name in ("gate.weight", "gate.e_score_correction_bias"):
            assert torch.equal(after[block + name], before[block + name][kept])
        for new, old in enumerate(kept):
            for rest in ("gate_proj", "up_proj", "down_proj"):
                new_name, old_name = (f"{block}experts.{e}.{rest}.weight" for e in (new, old))
                assert torch.equal(after[new_name], before[old_name])
        assert [sum(4 * g <= e < 4 * g + 4 for e in kept) for g in range(3)] == [2, 2, 2]
    same = [name for name in before if ".experts." not in name and ".gate." not in name]
    assert all(torch.equal(before[name], after[name]) for name in same)
    assert len(after) == len(same) + 2 * (2 + 6 * 3)


def test_a_merged_proxy_has_no_ranking_to_prune_by(qwen, tmp_path):
    build(spec(qwen, tmp_path / "m", 4, "merge"), rows=ROWS)
    build(spec(qwen, tmp_path / "p", 4), rows=ROWS)
    assert not (tmp_path / "m/expert_ranking.jsonl").exists()
    assert (tmp_path / "p/expert_ranking.jsonl").exists()


def test_merge_averages_clusters_by_frequency(tmp_path):
    original = tiny.make_qwen(tmp_path / "original")
    bf16 = {name: tensor.bfloat16() for name, tensor in tiny.load_all(original).items()}
    tiny.edit_tensors(original, bf16)
    manifest = build(spec(original, tmp_path / "p", 3, "merge"), rows=ROWS)
    before, after = tiny.load_all(original), tiny.load_all(tmp_path / "p")
    sizes = []
    for stats in collect(original, ROWS, 65536):
        entry = manifest["layers"][str(stats.layer)]
        block = f"model.layers.{stats.layer}.mlp."
        assert torch.equal(after[block + "gate.weight"], before[block + "gate.weight"][entry["kept"]])
        for new, head in enumerate(entry["kept"]):
            members = [e for e, owner in enumerate(entry["owner"]) if owner == head]
            assert head == max(members, key=lambda e: stats.counts_E[e])
            sizes.append(len(members))
            share = torch.tensor(stats.counts_E[members] / stats.counts_E[members].sum())
            experts = torch.stack([before[f"{block}experts.{e}.up_proj.weight"].double() for e in members])
            expected = (share[:, None, None] * experts).sum(0)
            got = after[f"{block}experts.{new}.up_proj.weight"]
            assert got.dtype == torch.bfloat16
            assert (got.double() - expected).abs().max() <= expected.abs().max() * 2**-8
    assert max(sizes) > 1
    assert tiny.logits(tmp_path / "p").isfinite().all()


def add_mtp_layer(folder: Path) -> None:
    tensors = tiny.load_all(folder)
    mtp = {name.replace("layers.2.", "layers.3."): t for name, t in tensors.items() if "layers.2." in name}
    tiny.edit_tensors(folder, mtp | {"model.layers.3.eh_proj.weight": torch.ones(32, 64)})


@pytest.mark.parametrize("has_key", [True, False])
def test_mtp_layers_are_dropped_and_their_count_is_zero(has_key, deepseek, tmp_path):
    original = tiny.make_deepseek(tmp_path / "original")
    add_mtp_layer(original)
    if not has_key:
        config = tiny.read_config(original)
        del config["num_nextn_predict_layers"]
        (original / "config.json").write_text(json.dumps(config))
    manifest = build(spec(original, tmp_path / "p", 6), rows=ROWS)
    expected = tiny.read_config(original) | {"n_routed_experts": 6, "num_nextn_predict_layers": 0}
    assert tiny.read_config(tmp_path / "p") == expected
    assert not any("layers.3." in name for name in tiny.load_all(tmp_path / "p"))
    assert manifest["mtp_tensors_dropped"] == sum("layers.3." in name for name in tiny.load_all(original))
    masked = tiny.logits(deepseek, kept_of(manifest))
    assert (tiny.logits(tmp_path / "p") - masked).abs().max() <= 1e-5


def test_fp8_tensors_and_their_scales_pass_through(tmp_path):
    original = tiny.make_qwen(tmp_path / "original")
    tensors = tiny.load_all(original)
    changes = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            changes[name] = tensor.to(torch.float8_e4m3fn)
            changes[name.removesuffix("weight") + "weight_scale_inv"] = torch.full((1, 1), tensor.abs().max())
    tiny.edit_tensors(original, changes)
    manifest = build(spec(original, tmp_path / "p", 4, "random"))
    after = tiny.load_all(tmp_path / "p")
    for new, old in enumerate(kept_of(manifest)[1]):
        for rest in ("down_proj.weight", "down_proj.weight_scale_inv"):
            got, expected = (
                after[f"model.layers.1.mlp.experts.{new}.{rest}"],
                f"model.layers.1.mlp.experts.{old}.{rest}",
            )
            assert torch.equal(got.view(torch.uint8), changes[expected].view(torch.uint8))
    stats = collect(tiny.make_qwen(tmp_path / "plain"), ROWS, 200)
    with pytest.raises(BuildError, match=r"averages experts.*F8_E4M3") as caught:
        build(spec(original, tmp_path / "merged", 4, "merge"), stats=stats)
    assert "frequency" in caught.value.mend
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original", "p", "plain"]


def test_manifest_says_what_was_done(qwen, tmp_path):
    notes = []
    manifest = build(spec(qwen, tmp_path / "p", 3), notes.append, rows=ROWS)
    assert json.loads((tmp_path / "p/proxy_manifest.json").read_text()) == manifest
    assert manifest["source_hash"] == checkpoint_hash(qwen)
    assert manifest["proxy_hash"] == checkpoint_hash(tmp_path / "p")
    assert manifest["calibration"]["tokens"] == sum(map(len, ROWS))
    assert 0 <= manifest["half_split_jaccard"] <= 1
    assert manifest["parameters"]["after"] == sum(t.numel() for t in tiny.load_all(tmp_path / "p").values())
    assert manifest["parameters"]["before"] == sum(t.numel() for t in tiny.load_all(qwen).values())
    for entry in manifest["layers"].values():
        assert entry["loss"] <= entry["loss_start"]
        assert 0 < entry["routed_share_kept"] < 1
        assert all(entry["owner"][expert] == expert for expert in entry["kept"])
        assert set(entry["owner"]) == set(entry["kept"])
    assert [w for w in manifest["warnings"] if "twice top-2" in w]
    assert {f"warning: {text}" for text in manifest["warnings"]} <= set(notes)


def test_the_manifest_has_the_hash_of_every_file(qwen, tmp_path):
    original = tiny.shard(shutil.copytree(qwen, tmp_path / "o"))
    (original / "tokenizer.json").write_text("{}")
    (original / "pytorch_model.bin").write_bytes(b"not copied")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input_ids": [3, 4]}\n')
    asked = replace(spec(original, tmp_path / "p", 4), test_prompts=str(prompts))
    manifest = build(asked, rows=ROWS)

    def hashes(folder: Path) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}

    read = {name: value for name, value in hashes(original).items() if name != "pytorch_model.bin"}
    assert manifest["inputs"] == read and "model.safetensors.index.json" in read
    written = {name: value for name, value in hashes(tmp_path / "p").items() if name != "proxy_manifest.json"}
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == written
    assert {"tokenizer.json", "expert_ranking.jsonl"} <= set(written)
    assert manifest["test_prompts"] == {"rows": 1, "sha256": rows_hash([[3, 4]])}


def test_text_that_utf_8_has_no_bytes_for_stays_as_it_is(qwen, tmp_path):
    original = shutil.copytree(qwen, tmp_path / "o")
    tiny.edit_config(original, note="lone \ud800 surrogate")
    build(spec(original, tmp_path / "p", 4, "first_k"))
    assert tiny.read_config(tmp_path / "p")["note"] == "lone \ud800 surrogate"


def test_same_spec_same_proxy(qwen, tmp_path):
    for name in ("a", "b"):
        build(spec(qwen, tmp_path / name, 4), rows=ROWS)
    assert checkpoint_hash(tmp_path / "a") == checkpoint_hash(tmp_path / "b")
    build(spec(qwen, tmp_path / "c", 4, "first_k"))
    assert checkpoint_hash(tmp_path / "c") != checkpoint_hash(tmp_path / "a")


def test_random_depends_on_seed_and_layer(qwen, tmp_path):
    kept = [kept_of(build(spec(qwen, tmp_path / str(seed), 4, "random", seed=seed))) for seed in range(3)]
    assert len({json.dumps(k) for k in kept}) == 3
    assert any(k[0] != k[1] for k in kept)


def test_side_files_are_copied_and_foreign_ones_are_not(tmp_path):
    original = tiny.make_qwen(tmp_path / "original")
    (original / "tokenizer.json").write_text("{}")
    (original / "pytorch_model.bin").write_bytes(b"weights")
    (original / "notes").mkdir()
    build(spec(original, tmp_path / "p", 4, "first_k"))
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == [
        "config.json",
        "expert_ranking.jsonl",
        "generation_config.json",
        "model.safetensors",
        "proxy_manifest.json",
        "tokenizer.json",
    ]


def test_side_file_that_is_a_link_out_of_the_folder_is_refused(tmp_path):
    original = tiny.make_qwen(tmp_path / "original")
    (tmp_path / "secret").write_text("key")
    (original / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="link that leaves the folder"):
        build(spec(original, tmp_path / "p", 4, "first_k"))
    assert not (tmp_path / "p").exists()


def test_hub_cache_links_are_followed(qwen, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(qwen.iterdir()):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blobs / str(number))
    build(spec(snapshot, tmp_path / "p", 4, "first_k"))
    assert not any(path.is_symlink() for path in (tmp_path / "p").iterdir())


@pytest.mark.parametrize(
    "family, change, words",
    [
        ("qwen", {"experts": 9}, "checkpoint has 8"),
        ("qwen", {"experts": 1}, "routed to 2"),
        ("qwen", {"experts": 0}, "routed to 2"),
        ("deepseek", {"experts": 7}, "unequal size"),
        ("deepseek", {"experts": 3}, "group's score adds up"),
        ("qwen", {"strategy": "magic"}, "unknown strategy 'magic'"),
        ("qwen", {"strategy": "router+router"}, "unknown strategy"),
        ("qwen", {"alpha": (0.0, 0.0, 0.0)}, "without any weight"),
        ("qwen", {"alpha": (float("nan"), 1.0, 1.0)}, "three weights"),
        ("qwen", {"strategy": "router", "alpha": (0.0, 1.0, 1.0)}, "without any weight"),
        ("qwen", {"normalisation": "softmax"}, "unknown normalisation"),
        ("qwen", {"calibration": "/nonexistent.jsonl"}, "cannot be read"),
    ],
)
def test_bad_requests_are_one_line_errors_and_leave_nothing(family, change, words, tmp_path, request):
    original = request.getfixturevalue(family)
    settings = {"experts": 6} | change
    given = None if "calibration" in change else ROWS
    with pytest.raises(BuildError, match=words) as caught:
        build(spec(original, tmp_path / "p", **settings), rows=given)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_topk_groups_must_leave_enough_experts(tmp_path):
    original = tiny.make_deepseek(tmp_path / "original", n_group=3, topk_group=1)
    tiny.edit_config(original, num_experts_per_tok=3)
    with pytest.raises(BuildError, match="top 3") as caught:
        make_plan(original, 6)
    assert "multiple of 3, at least 9" in caught.value.mend
    assert any("no choice inside" in warning for warning in make_plan(original, 9).warnings)


@pytest.mark.parametrize("content", ["file", "folder", "self"])
def test_output_that_exists_is_never_touched(content, qwen, tmp_path):
    out = tmp_path / "p"
    if content == "file":
        out.write_text("precious")
    elif content == "folder":
        out.mkdir()
        (out / "precious").write_text("")
    else:
        out = qwen
    before = sorted(out.rglob("*")) if out.is_dir() else out.read_text()
    with pytest.raises(BuildError, match=r"not empty|there already, and no folder"):
        build(spec(qwen, out, 4, "first_k"))
    assert (sorted(out.rglob("*")) if out.is_dir() else out.read_text()) == before


def test_empty_output_folder_is_used(qwen, tmp_path):
    (tmp_path / "p").mkdir()
    build(spec(qwen, tmp_path / "p", 4, "first_k"))
    assert (tmp_path / "p/config.json").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["mlp.experts.0.up_proj.weight", "mlp.gate.weight", "self_attn.q_proj.weight"]
)
def test_nonfinite_weights_are_refused(name, dtype, value, tmp_path):
    original = tiny.make_qwen(tmp_path / "original")
    tensors = {key: tensor.to(dtype) for key, tensor in tiny.load_all(original).items()}
    tensors[f"model.layers.1.{name}"][0, -1] = value
    tiny.edit_tensors(original, tensors)
    with pytest.raises(CheckpointError, match="NaN or infinity") as caught:
        build(spec(original, tmp_path / "p", 4, "first_k"))
    assert name in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_activations_that_overflow_stop_calibration(tmp_path):
    original = tiny.make_qwen(tmp_path / "original")
    changes = {
        "model.layers.0.self_attn.o_proj.weight": torch.full((32, 32), 3e38),
        "model.layers.0.self_attn.v_proj.weight": torch.full((16, 32), 3e38),
    }
    tiny.edit_tensors(original, changes)
    with pytest.raises(BuildError, match="layer 0: the router's input holds NaN"):
        build(spec(original, tmp_path / "p", 4), rows=ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_an_interrupted_build_goes_on_and_leaves_nothing_then(qwen, tmp_path):
    def interrupt(note: str) -> None:
        if note.startswith("writing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(spec(qwen, tmp_path / "p", 4), interrupt, rows=ROWS)
    assert [path.name for path in tmp_path.iterdir()] == [".p.building"]
    notes = []
    build(spec(qwen, tmp_path / "p", 4), notes.append, rows=ROWS)
    assert not [note for note in notes if note.startswith("calibration: layer")]  # both were done
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    build(spec(qwen, tmp_path / "q", 4), rows=ROWS)
    assert checkpoint_hash(tmp_path / "p") == checkpoint_hash(tmp_path / "q")


def test_errors_are_value_errors():
    assert issubclass(ProxyError, ValueError)
    assert str(BuildError("two\nlines")) == "two lines"
