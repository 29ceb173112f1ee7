"""verl's checkpoints are recognised wherever one points at, and refused with the very command that merges them."""

import shlex

import pytest

from proxy.embedded import UnknownCheckpoint, resolve
from proxy.verl_checkpoint import recognised


def fsdp(run, step=20, weights=False):
    actor = run / f"global_step_{step}" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "model_world_size_2_rank_0.pt").touch()
    (actor / "huggingface" / "config.json").write_text("{}")
    if weights:
        (actor / "huggingface" / "model.safetensors").touch()
    return actor


def megatron(run, weights=False):
    actor = run / "global_step_7" / "actor"
    (actor / "model" / "dist_ckpt").mkdir(parents=True)
    (actor / "model" / "huggingface").mkdir()
    (actor / "model" / "huggingface" / "config.json").write_text("{}")
    if weights:
        (actor / "model" / "huggingface" / "model-00001-of-00002.safetensors").touch()
    return actor


@pytest.mark.parametrize("place", [".", "..", "../..", "huggingface"])
def test_fsdp_shards(tmp_path, place):
    actor = fsdp(tmp_path / "my run")
    found = recognised((actor / place).resolve())
    assert (found.actor, found.backend, found.merged) == (actor, "fsdp", None)
    assert found.target == tmp_path / "my run" / "global_step_20_hf"
    with pytest.raises(UnknownCheckpoint, match="fsdp shards") as refused:
        resolve(str((actor / place).resolve()))
    words = shlex.split(refused.value.mend.partition(": ")[2].partition(", then")[0])
    assert words[:6] == ["python", "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    assert words[6:] == ["--local_dir", str(actor), "--target_dir", str(found.target)]


@pytest.mark.parametrize("place", [".", "..", "../..", "model/huggingface"])
def test_megatron_shards(tmp_path, place):
    actor = megatron(tmp_path)
    assert recognised((actor / place).resolve()).backend == "megatron"
    with pytest.raises(UnknownCheckpoint, match="megatron shards"):
        resolve(str((actor / place).resolve()))


def test_the_newest_step_of_a_run_counts_unless_verl_says_which(tmp_path):
    for step in (5, 10, 100):
        fsdp(tmp_path, step)
    assert recognised(tmp_path).actor.parent.name == "global_step_100"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    assert recognised(tmp_path).actor.parent.name == "global_step_10"


def test_weights_that_are_there_already_are_named(tmp_path):
    actor = fsdp(tmp_path, weights=True)
    with pytest.raises(UnknownCheckpoint) as refused:
        resolve(str(actor))
    assert refused.value.mend == f"name {actor / 'huggingface'}"
    assert resolve(str(actor / "huggingface")) == actor / "huggingface"


def test_an_ordinary_folder_is_none(tmp_path):
    assert recognised(tmp_path) is None
    assert recognised(resolve("embedded:qwen3_moe")) is None
