"""What goes wrong ends in one line with the mend, and nothing half-written stands under the final name."""

import errno
import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from proxy.build import build
from proxy.checkpoint import open_checkpoint
from proxy.doubts import of_calibration, of_overlap, of_routers
from proxy.errors import BuildError, CheckpointError, ProxyError
from proxy.families import understand
from proxy.layer_stats import LayerStats
from proxy.manifest import file_hash
from proxy.plan import make_plan
from proxy.selection import Selection
from proxy.specs import BuildSpec
from proxy.work import work_folder, work_place
from proxy.worker import one_line
from tests.fixtures import tiny_moe as tiny

ROWS = tiny.rows(12)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return tiny.make_qwen(tmp_path_factory.mktemp("qwen") / "original")


def spec(source: Path, out: Path, **more) -> BuildSpec:
    return BuildSpec(str(source), str(out), 4, **({"strategy": "first_k"} | more))


def test_a_full_disk_during_calibration_leaves_nothing(qwen, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(BuildError, match="No space left on device"):
        build(spec(qwen, tmp_path / "p", strategy="multi_view"), rows=ROWS)
    assert list(tmp_path.iterdir()) == []


def test_room_is_asked_for_before_anything_is_read(qwen, tmp_path, monkeypatch):
    usage = os.statvfs(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    notes = []
    with pytest.raises(
        BuildError, match=r"the proxy's weights need 0.1 MB, and .* has 0.0 MB left"
    ) as caught:
        build(spec(qwen, tmp_path / "p"), notes.append)
    assert usage and notes == [] and "choose another --out" in caught.value.mend


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_output(qwen, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(BuildError, match="cannot write to"):
        build(spec(qwen, tmp_path / "p"))
    tmp_path.chmod(0o700)


def test_output_in_a_place_that_cannot_be_written(qwen, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot write to .*file: Not a directory"):
        build(spec(qwen, tmp_path / "file/p"))
    assert (tmp_path / "file").read_text() == ""


def test_two_builds_of_one_output_do_not_mix(qwen, tmp_path):
    with work_folder(tmp_path / "p", "other") as work:
        (work / "proxy/mine").write_text("mine")
        with pytest.raises(BuildError, match="another build is writing"):
            build(spec(qwen, tmp_path / "p"))
        assert (work / "proxy/mine").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["mine"]


def test_what_another_build_left_is_not_taken_up(qwen, tmp_path):
    left = work_place(tmp_path / "p")
    (left / "proxy").mkdir(parents=True)
    (left / "proxy/model.safetensors").write_bytes(b"of another checkpoint")
    (left / "key").write_text("another build")
    (left / "lock").write_text("")
    build(spec(qwen, tmp_path / "p"))
    assert understand(open_checkpoint(tmp_path / "p")).experts == 4


@pytest.mark.parametrize("kind", ["folder", "link", "file", "half", "dangling"])
def test_what_no_build_made_is_never_touched(kind, qwen, tmp_path):
    place, elsewhere = work_place(tmp_path / "p"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("precious")
    if kind in ("folder", "half"):
        place.mkdir()
        (place / "thesis.txt").write_text("precious")
        for name in ("key", "lock") if kind == "half" else ():
            (place / name).write_text("")
    elif kind == "file":
        place.write_text("precious")
    else:
        place.symlink_to(elsewhere if kind == "link" else tmp_path / "nothing")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BuildError, match="which something else made") as caught:
        build(spec(qwen, tmp_path / "p"))
    assert "--out" in caught.value.mend and sorted(tmp_path.rglob("*")) == before
    assert (elsewhere / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("left", [(), ("lock",)])
def test_a_build_that_was_killed_at_once_is_taken_up(left, qwen, tmp_path):
    place = work_place(tmp_path / "p")
    place.mkdir()
    for name in left:
        (place / name).write_text("")
    build(spec(qwen, tmp_path / "p"))
    assert not place.exists()


def test_another_size_takes_up_the_same_calibration(qwen, tmp_path):
    def stop(note: str) -> None:
        if note.startswith("kept "):
            raise KeyboardInterrupt

    first = spec(qwen, tmp_path / "p", strategy="multi_view")
    with pytest.raises(KeyboardInterrupt):
        build(first, stop, rows=ROWS)
    notes = []
    other = replace(first, experts=6, strategy="frequency")
    build(other, notes.append, rows=ROWS)
    assert not any(note.startswith("calibration: layer") for note in notes)
    build(replace(other, out=str(tmp_path / "q")), rows=ROWS)
    assert file_hash(tmp_path / "p/model.safetensors") == file_hash(tmp_path / "q/model.safetensors")
    for changed in ({"rows": ROWS[1:]}, {"strategy": "reap"}):
        with pytest.raises(KeyboardInterrupt):
            build(replace(first, out=str(tmp_path / "r")), stop, rows=ROWS)
        notes.clear()
        asked = replace(first, out=str(tmp_path / "r"), strategy=changed.get("strategy", first.strategy))
        build(asked, notes.append, rows=changed.get("rows", ROWS))
        assert any(note.startswith("calibration: layer") for note in notes)
        shutil.rmtree(tmp_path / "r")


def test_an_interrupted_calibration_says_where_it_goes_on(qwen, tmp_path):
    def stop(note: str) -> None:
        if note.startswith("calibration: layer 2"):
            raise KeyboardInterrupt

    asked, notes = spec(qwen, tmp_path / "p", strategy="reap"), []
    with pytest.raises(KeyboardInterrupt):
        build(asked, stop, rows=ROWS)
    build(asked, notes.append, rows=ROWS)
    assert "going on with a calibration that was interrupted after layer 2 of 2" in notes


def test_options_that_change_nothing_are_told(qwen, tmp_path):
    def warnings(**more) -> str:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        return " ".join(build(spec(qwen, out, **more), rows=[[3] * 200, [4, 5, 6]])["warnings"])

    assert "no views, so --alpha changes nothing" in warnings(strategy="frequency", alpha=(1.0, 0.0, 0.0))
    assert "--alpha" not in warnings(strategy="frequency")
    assert "needs no calibration, so mine.jsonl is not read" in warnings(calibration="mine.jsonl")
    assert "1 of 2 calibration rows are longer than the model's" in warnings(strategy="frequency")
    everything = replace(spec(qwen, tmp_path / "all"), experts=8)
    assert "none is taken out" in " ".join(build(everything)["warnings"])


def test_a_full_disk_while_writing_keeps_the_calibration(qwen, tmp_path, monkeypatch):
    asked = spec(qwen, tmp_path / "p", strategy="multi_view")
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr("proxy.writer.write_all", full)
        with pytest.raises(BuildError, match="No space left on device") as caught:
            build(asked, rows=ROWS)
    place = work_place(tmp_path / "p")
    assert str(place) in caught.value.mend and not (tmp_path / "p").exists()
    assert not list(place.rglob("*.part"))
    notes = []
    build(asked, notes.append, rows=ROWS)
    assert not any("calibration: layer" in note for note in notes) and not place.exists()
    build(replace(asked, out=str(tmp_path / "q")), notes.append, rows=ROWS)
    assert any("calibration: layer" in note for note in notes)  # or the line above proves nothing
    assert file_hash(tmp_path / "p/model.safetensors") == file_hash(tmp_path / "q/model.safetensors")


@pytest.mark.parametrize("name", ["n" * 250, "n" * 300])
def test_names_that_no_file_may_have(name, qwen, tmp_path):
    with pytest.raises(BuildError, match=r"cannot write to .*File name too long") as caught:
        build(spec(qwen, tmp_path / name))
    assert "--out" in caught.value.mend and not list(tmp_path.iterdir())


def test_an_output_that_steps_back_is_where_it_ends(qwen, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("")
    with pytest.raises(BuildError, match="there is not empty"):
        build(spec(qwen, tmp_path / "there/new/.."))
    build(spec(qwen, tmp_path / "new/../p"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "there"]


def test_a_file_that_is_whole_is_kept_and_a_part_is_written_anew(qwen, tmp_path):
    sharded = tiny.shard(tiny.make_qwen(tmp_path / "o"))

    def stop(note: str) -> None:
        if "model-00003" in note:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(spec(sharded, tmp_path / "p"), stop)
    work = work_place(tmp_path / "p") / "proxy"
    before = {path.name: path.stat().st_mtime_ns for path in work.glob("*.safetensors")}
    assert len(before) == 2
    (work / "model-00003-of-00003.safetensors.part").write_bytes(b"half")
    build(spec(sharded, tmp_path / "p"))
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "p").glob("*.safetensors")}
    assert len(after) == 3 and before.items() <= after.items()
    assert torch.equal(tiny.logits(tmp_path / "p"), tiny.logits(build_of(qwen, tmp_path / "q")))


def build_of(source: Path, out: Path) -> Path:
    build(spec(source, out))
    return out


def damaged(kind: str, folder: Path) -> None:
    """Break a sharded checkpoint in one way."""
    index_path, shard = folder / "model.safetensors.index.json", folder / "model-00002-of-00003.safetensors"
    index, raw = json.loads(index_path.read_text()), shard.read_bytes()
    if kind == "truncated":
        shard.write_bytes(raw[:-9])
    elif kind == "missing":
        shard.unlink()
    elif kind == "swapped":
        name = next(name for name, file in index["weight_map"].items() if file == shard.name)
        index["weight_map"][name] = "model-00001-of-00003.safetensors"
    elif kind == "outside":
        index["weight_map"] = dict.fromkeys(index["weight_map"], "../model.safetensors")
    elif kind == "header":
        shard.write_bytes(struct.pack("<Q", 1 << 40) + raw[8:])
    elif kind == "nan":
        tensors = tiny.load_all(folder)
        name = next(n for n, f in index["weight_map"].items() if f == shard.name and "experts.1." in n)
        value = tensors[name].flatten()[0].item()
        shard.write_bytes(raw.replace(struct.pack("<f", value), struct.pack("<f", float("nan"))))
    index_path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "kind, words",
    [
        ("truncated", "not a sound safetensors file"),
        ("missing", "is missing"),
        ("swapped", "which does not hold it"),
        ("outside", "leads out of the folder"),
        ("header", "not a sound safetensors file"),
        ("nan", "holds NaN or infinity"),
    ],
)
@pytest.mark.parametrize("strategy", ["first_k", "multi_view"])
def test_damaged_checkpoints_end_in_one_line(kind, words, strategy, tmp_path):
    folder = tiny.shard(tiny.make_qwen(tmp_path / "o"))
    damaged(kind, folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        build(spec(folder, tmp_path / "p", strategy=strategy), rows=ROWS)
    assert "\n" not in one_line(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def add_mtp_layer(folder: Path) -> None:
    tensors = tiny.load_all(folder)
    mtp = {name.replace("layers.2.", "layers.3."): t for name, t in tensors.items() if "layers.2." in name}
    tiny.edit_tensors(folder, mtp | {"model.layers.3.eh_proj.weight": torch.ones(32, 64)})


def test_mtp_layers_can_be_pruned_too(tmp_path):
    original = tiny.make_deepseek(tmp_path / "o")
    add_mtp_layer(original)
    tiny.edit_config(original, num_nextn_predict_layers=1)
    manifest = build(BuildSpec(str(original), str(tmp_path / "p"), 6, mtp="prune"), rows=ROWS)
    before, after = tiny.load_all(original), tiny.load_all(tmp_path / "p")
    assert tiny.read_config(tmp_path / "p")["num_nextn_predict_layers"] == 1
    assert torch.equal(after["model.layers.3.eh_proj.weight"], before["model.layers.3.eh_proj.weight"])
    rows = after["model.layers.3.mlp.gate.weight"]
    kept = [int(torch.where((before["model.layers.3.mlp.gate.weight"] == row).all(1))[0]) for row in rows]
    assert [sum(4 * g <= e < 4 * g + 4 for e in kept) for g in range(3)] == [2, 2, 2]
    for new, old in enumerate(kept):
        names = [f"model.layers.3.mlp.experts.{e}.up_proj.weight" for e in (new, old)]
        assert torch.equal(after[names[0]], before[names[1]])
    assert set(manifest["layers"]) == {"1", "2"}
    plan = make_plan(original, 6)
    assert plan.mtp_tensors and manifest["mtp_tensors_dropped"] == 0


def test_the_ranking_file_lists_every_layer(qwen, tmp_path):
    manifest = build(BuildSpec(str(qwen), str(tmp_path / "p"), 4), rows=ROWS)
    lines = [json.loads(line) for line in (tmp_path / "p/expert_ranking.jsonl").read_text().splitlines()]
    assert [line["layer"] for line in lines] == [0, 1]
    for line in lines:
        assert line["keep"] == manifest["layers"][str(line["layer"])]["kept"]
        assert sorted(line["rank"]) == list(range(8)) and set(line["rank"][:4]) == set(line["keep"])
        kept_counts = [line["counts"][e] for e in line["rank"][:4]]
        assert kept_counts == sorted(kept_counts, reverse=True)
    assert [line["module"] for line in lines] == ["model.layers.0.mlp", "model.layers.1.mlp"]


def stats(
    tokens: int = 1000, router: np.ndarray | None = None, counts: np.ndarray | None = None
) -> LayerStats:
    counts = np.full(8, tokens / 4) if counts is None else counts
    router = np.eye(8) if router is None else router
    return LayerStats(3, tokens, counts, np.diag(counts), np.zeros((8, 8)), router)


def test_doubts_say_the_number_behind_them():
    assert of_calibration([stats()], [0.9], 4, 2) == []
    few = of_calibration([stats(tokens=40)], [0.9], 4, 2)
    assert few == ["calibration has 10 tokens an expert, fewer than 32: use more calibration tokens"]
    unsteady = of_calibration([stats(), replace(stats(), layer=5)], [0.7, 0.3], 4, 2)
    assert len(unsteady) == 1 and "both keep 50% (layer 5: 30%)" in unsteady[0]
    starved = of_calibration([stats(counts=np.array([900.0, 100, 0, 0, 0, 0, 0, 0]))], [0.9], 4, 2)
    assert "fewer than 4 experts were ever active in layers [3]" in starved[0]


def test_parallel_router_rows_are_named_only_where_both_are_kept():
    router = np.eye(8)
    router[5] = 2 * router[2] + 0.01 * router[0]
    chosen = Selection((0, 2, 5, 6), (0,) * 8)
    said = of_routers([stats(router=router)], {3: chosen})
    assert len(said) == 1 and "layer 3, experts 2 and 5: cosine 1.000" in said[0]
    assert of_routers([stats(router=router)], {3: Selection((0, 1, 2, 6), (0,) * 8)}) == []


def test_calibration_that_holds_test_prompts_is_noticed(qwen, tmp_path):
    assert of_overlap([[1, 2, 3, 4], [5, 6]], [[1, 2, 3], [9]]) == [
        "1 of 2 calibration rows begin with a test prompt: what is measured on those prompts flatters the proxy"
    ]
    assert of_overlap([[1, 2, 3, 4]], [[1, 2, 4], [2, 3], []]) == []
    (tmp_path / "tests.jsonl").write_text(json.dumps({"input_ids": ROWS[3][:5]}) + "\n")
    asked = BuildSpec(str(qwen), str(tmp_path / "p"), 4, test_prompts=str(tmp_path / "tests.jsonl"))
    assert any("1 of 12 calibration rows" in warning for warning in build(asked, rows=ROWS)["warnings"])


def test_the_plan_says_what_both_would_weigh(qwen):
    plan = make_plan(qwen, 4)
    assert plan.bytes_before == 4 * plan.parameters_before
    assert plan.bytes_after == 4 * plan.parameters_after


def test_every_error_is_for_users():
    assert issubclass(BuildError, ProxyError) and issubclass(CheckpointError, ProxyError)
