"""A streamed model computes what the loaded one computes, reads each weight once, and takes up where it was killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import families as matrix
from bench.zoo import KINDS, make, tokens
from proxy.alpha import predictions, search_alpha, simplex
from proxy.build import build
from proxy.calibration import collect
from proxy.checkpoint import open_checkpoint
from proxy.errors import BuildError
from proxy.families import understand
from proxy.hidden import HiddenStates
from proxy.manifest import checkpoint_hash
from proxy.memory import give_back_large_blocks, peak_memory
from proxy.rows import batch_tokens, batches
from proxy.selection import Selection
from proxy.specs import BuildSpec
from proxy.strategies import Request, strategy
from proxy.stream import Streamed
from proxy.walk import Pass
from tests.fixtures import tiny_moe as tiny

ROWS = tiny.rows(12)
BY_NAME = {kind.name: kind for kind in KINDS}


@pytest.fixture(scope="module", autouse=True)
def silent():
    matrix.quiet()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return tiny.make_qwen(tmp_path_factory.mktemp("qwen") / "original", num_hidden_layers=4)


def walk(folder: Path, rows=ROWS, **more) -> Pass:
    checkpoint = open_checkpoint(folder)
    made = Pass(checkpoint, understand(checkpoint), rows, **more)
    made.run()
    return made


# Layers that hand tuples on, experts that only run together, an idle expert, experts in a latent space.
@pytest.mark.parametrize(
    "name", ["zaya", "llama4_text", "longcat_flash", "nemotron_h", "gpt_oss", "deepseek_v4"]
)
def test_streamed_routing_is_that_of_the_loaded_model(name, tmp_path):
    original = make(BY_NAME[name], tmp_path / "o")
    whole, _ = matrix.load(original)
    said = matrix.streamed(original, whole, understand(open_checkpoint(original)))
    assert not said.startswith("no"), said
    assert float(said.split()[-1]) < 1e-5


def test_every_weight_is_read_once_and_every_pair_computed_once(qwen):
    done = walk(qwen)
    checkpoint = open_checkpoint(qwen)
    tokens = sum(map(len, ROWS))
    assert done.pairs == tokens * 2 * 3  # top-2 in all layers but the last, whose routing is all that matters
    whole = sum(info.nbytes for info in checkpoint.tensors.values())
    assert done.model.read_bytes < whole
    assert done.model.read_bytes > 0.5 * whole


def test_a_layer_keeps_nothing_when_it_is_done(qwen):
    done = walk(qwen)
    left = [name for name, tensor in done.model.layers.state_dict().items() if not tensor.is_meta]
    assert left == []


def test_hidden_states_in_a_file_are_as_good_as_in_memory(qwen, tmp_path, monkeypatch):
    plain = collect(qwen, ROWS, 10_000)
    saved = collect(qwen, ROWS, 10_000, state=tmp_path / "state")
    monkeypatch.setattr("proxy.hidden.MEMORY_LIMIT", 0)
    spilled = collect(qwen, ROWS, 10_000)
    for other in (saved, spilled):
        for a, b in zip(plain, other, strict=True):
            assert np.array_equal(a.coactivation_EE, b.coactivation_EE)
            assert np.array_equal(a.weighted_hidden_EH, b.weighted_hidden_EH)


def test_an_unnamed_file_is_gone_with_its_states(monkeypatch, tmp_path):
    monkeypatch.setattr("proxy.hidden.MEMORY_LIMIT", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    states = HiddenStates(3, (4,))
    states.values[:] = 1.0
    assert list(tmp_path.iterdir()) == []
    states.close()


def test_a_pass_goes_on_after_its_last_finished_layer(qwen, tmp_path):
    notes = []

    def stop(note: str) -> None:
        notes.append(note)
        if "layer 2 of 4" in note:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(qwen, ROWS, 10_000, stop, state=tmp_path / "s")
    assert json.loads((tmp_path / "s/state.json").read_text())["layer"] == 1
    resumed = []
    again = collect(qwen, ROWS, 10_000, resumed.append, state=tmp_path / "s")
    assert resumed[1] == "going on with a calibration that was interrupted after layer 2 of 4"
    assert [note.split(",")[0] for note in resumed[2:]] == [f"calibration: layer {n} of 4" for n in (3, 4)]
    for a, b in zip(again, collect(qwen, ROWS, 10_000), strict=True):
        assert np.array_equal(a.counts_E, b.counts_E)
        assert np.array_equal(a.weighted_hidden_EH, b.weighted_hidden_EH)


@pytest.mark.parametrize("damage", ["state", "hidden"])
def test_a_damaged_state_is_begun_anew(damage, qwen, tmp_path):
    expected = collect(qwen, ROWS, 10_000, state=tmp_path / "s")
    state = json.loads((tmp_path / "s/state.json").read_text())
    if damage == "state":
        (tmp_path / "s/state.json").write_text('{"layer": 2')
    else:
        (tmp_path / "s" / state["hidden"]).write_bytes(b"short")
    again = collect(qwen, ROWS, 10_000, state=tmp_path / "s")
    assert np.array_equal(expected[3].counts_E, again[3].counts_E)


def test_a_killed_build_resumes_to_the_same_proxy(qwen, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ROWS))
    code = (
        "import os, sys, signal\n"
        "from proxy.build import build\n"
        "from proxy.specs import BuildSpec\n"
        "def note(text):\n"
        "    if text.startswith('calibration: layer 2'): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"build(BuildSpec({str(qwen)!r}, {str(tmp_path / 'p')!r}, 4, calibration={str(rows)!r}), note)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": "."}, capture_output=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not (tmp_path / "p").exists()
    notes = []
    build(BuildSpec(str(qwen), str(tmp_path / "p"), 4, calibration=str(rows)), notes.append)
    assert [note.split(",")[0] for note in notes if "calibration: layer" in note] == [
        "calibration: layer 3 of 4",
        "calibration: layer 4 of 4",
    ]
    build(BuildSpec(str(qwen), str(tmp_path / "q"), 4, calibration=str(rows)))
    assert checkpoint_hash(tmp_path / "p") == checkpoint_hash(tmp_path / "q")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "q", "rows.jsonl"]


def test_progress_says_how_far_how_long_and_how_much(qwen):
    notes = []
    collect(qwen, ROWS, 10_000, notes.append)
    assert notes[1].startswith("calibration: layer 1 of 4, ")
    assert all(word in notes[1] for word in ("GB read", "s left", "peak memory"))


def test_saliency_is_the_size_of_weighted_outputs(qwen):
    stats = collect(qwen, ROWS, 10_000, outputs=True)
    model, _ = matrix.load(qwen)
    expected = np.zeros((4, 8))

    def hook(layer):
        def before(module, args):
            hidden, index, weights = args
            for expert in range(8):
                rows, slots = torch.where(index == expert)
                if len(rows):
                    one = torch.full((len(rows), 1), expert)
                    out = type(module).forward(module, hidden[rows], one, weights[rows, slots][:, None])
                    expected[layer, expert] += out.norm(dim=1).sum().item()

        return before

    for number, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(hook(number))
    with torch.no_grad():
        for row in ROWS:
            model(torch.tensor([row]))
    for layer in stats:
        assert layer.saliency_E == pytest.approx(expected[layer.layer], rel=1e-4)
        first, second = layer.halves
        assert first.saliency_E + second.saliency_E == pytest.approx(layer.saliency_E)
    top = sorted(range(8), key=lambda e: -stats[1].saliency_E[e] / max(stats[1].counts_E[e], 1))[:3]
    assert strategy("reap").select(stats[1], Request(3)).kept == tuple(sorted(top))


def test_experts_that_are_never_active_together_are_not_weighed_by_that(tmp_path):
    folder = make(BY_NAME["llama4_text"], tmp_path / "o")
    rows = [[int(token) for token in row] for row in torch.randint(3, 64, (10, 16))]
    manifest = build(BuildSpec(str(folder), str(tmp_path / "p"), 6, search_alpha=True), rows=rows)
    assert manifest["experts"]["top_k"] == 1 and manifest["alpha"][1] == 0
    assert all(found["alpha"][1] == 0 for found in manifest["calibration"]["alpha_search"]["finalists"])


def test_a_masked_router_is_forgotten_with_its_layer(tmp_path):
    """A dense layer behind it may get a weight at the same address."""
    folder = make(BY_NAME["qwen3_moe (a dense layer)"], tmp_path / "o")
    checkpoint = open_checkpoint(folder)
    layout = understand(checkpoint)
    model = Streamed(checkpoint, layout)
    picked = {layer: Selection((0, 1, 2, 3), (0,) * 12) for layer in layout.moe_layers}
    with torch.inference_mode(), model.masked(picked):
        for layer in range(3):
            with model.layer(layer) as module:
                router = getattr(module.mlp, "gate", None)
                scores = torch.nn.functional.linear(torch.ones(1, 32), module.self_attn.k_proj.weight)
                assert scores.isfinite().all()
                if router is not None:
                    scores = torch.nn.functional.linear(torch.ones(1, 32), router.weight)
                    assert scores.isfinite().sum() == 4
            assert not model._masked_rows
    rows = [[int(token) for token in row] for row in torch.randint(3, 64, (10, 16))]
    build(BuildSpec(str(folder), str(tmp_path / "p"), 6, search_alpha=True), rows=rows)


def test_an_expert_of_a_class_that_cannot_do_with_one_slot(tmp_path):
    folder = make(BY_NAME["longcat_flash"], tmp_path / "o")
    checkpoint, tensors = open_checkpoint(folder), tiny.load_all(folder)
    model = Streamed(checkpoint, understand(checkpoint))
    hidden_TH, weight_T = torch.randn(5, 32), torch.rand(5)
    with torch.inference_mode(), model.layer(1):
        for expert in (3, 0):
            model.load_expert(1, expert)
            up, gate, down = (
                tensors[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"].float()
                for name in ("up", "gate", "down")
            )
            inner = torch.nn.functional.silu(hidden_TH @ gate.T) * (hidden_TH @ up.T)
            expected_TH = inner @ down.T * weight_T[:, None]
            assert torch.allclose(model.compute(1, hidden_TH, weight_T), expected_TH, atol=1e-6)


def test_a_padding_token_that_calibration_does_not_use(qwen, tmp_path):
    folder = shutil.copytree(qwen, tmp_path / "o")
    tiny.edit_config(folder, pad_token_id=tiny.read_config(folder)["vocab_size"] - 1)
    rows = [[3, 4, 5, 6], [4, 6, 3, 5]]  # fewer tokens than the padding's id
    for ours, plain in zip(collect(folder, rows, 100), collect(qwen, rows, 100), strict=True):
        assert np.array_equal(ours.coactivation_EE, plain.coactivation_EE)


def test_reap_needs_outputs(qwen):
    with pytest.raises(BuildError, match="reap weighs experts by the size of their outputs"):
        strategy("reap").select(collect(qwen, ROWS, 100)[0], Request(3))


def test_reap_builds(qwen, tmp_path):
    manifest = build(BuildSpec(str(qwen), str(tmp_path / "p"), 4, strategy="reap"), rows=ROWS)
    assert manifest["spec"]["strategy"] == "reap"
    stats = collect(qwen, ROWS, 65536, outputs=True)
    assert manifest["layers"]["3"]["kept"] == list(strategy("reap").select(stats[3], Request(4)).kept)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "deepseek_v4", "gpt_oss"])
def test_streamed_predictions_are_those_of_the_loaded_models(name, tmp_path):
    original = make(BY_NAME[name], tmp_path / "o")
    checkpoint = open_checkpoint(original)
    layout = understand(checkpoint)
    rows = matrix.tokens().tolist()
    manifest = build(BuildSpec(str(original), str(tmp_path / "p"), 6, strategy="random"))
    picked = {
        int(layer): type("Picked", (), {"kept": tuple(entry["kept"]), "owner": tuple(entry["owner"])})
        for layer, entry in manifest["layers"].items()
    }

    def best(model):
        return matrix.logits(model).argmax(-1)

    whole, proxy = matrix.load(original)[0], matrix.load(tmp_path / "p")[0]
    order = [0, 2, 1, 3]  # a pass goes through the even rows first
    assert predictions(checkpoint, layout, rows, None) == best(whole)[order].flatten().tolist()
    masked = predictions(checkpoint, layout, rows, picked)
    assert masked == best(proxy)[order].flatten().tolist()


def test_alpha_is_searched_on_rows_that_selection_did_not_see(qwen, tmp_path):
    manifest = build(BuildSpec(str(qwen), str(tmp_path / "p"), 4, search_alpha=True), rows=tiny.rows(60))
    found = manifest["calibration"]["alpha_search"]
    assert 1 <= len(found["finalists"]) <= 3
    assert sum(found["alpha"]) == pytest.approx(1)
    best = max(found["finalists"], key=lambda one: one["routed_mass"] + one.get("agreement", 0))
    assert best["alpha"] == found["alpha"]
    assert all(0 <= one["routed_mass"] <= 1 for one in found["finalists"])
    stats = collect(qwen, tiny.rows(60), 65536)
    chosen = strategy("multi_view").select(stats[0], Request(4, alpha=tuple(found["alpha"])))
    assert manifest["layers"]["0"]["kept"] == list(chosen.kept)


def test_the_grid_begins_with_even_weights():
    assert simplex()[0] == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert len(simplex()) == 10
    assert all(sum(point) == pytest.approx(1) for point in simplex())


def test_alpha_cannot_be_searched_for_fewer_views_or_one_row(qwen):
    checkpoint = open_checkpoint(qwen)
    layout = understand(checkpoint)
    stats = collect(qwen, ROWS[:1], 100)
    with pytest.raises(BuildError, match="no three views"):
        search_alpha(strategy("frequency"), Request(4), stats, checkpoint, layout, None)
    with pytest.raises(BuildError, match="one calibration row"):
        search_alpha(strategy("multi_view"), Request(4), stats, checkpoint, layout, None)


# Plain and quantised projections, weights that are asked for instead of called, tuples, the plain forward.
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "deepseek_v3", "deepseek_v4", "nemotron_h", "zaya", "mistral_large4", "gpt_oss"]
)
def test_weights_read_on_demand_are_as_good_as_held_ones(name, tmp_path, monkeypatch):
    original = make(BY_NAME[name], tmp_path / "o")
    held = walk(original, tokens().tolist(), state=tmp_path / "held")
    monkeypatch.setattr("proxy.stream.ON_DEMAND_BYTES", 0)
    monkeypatch.setattr("proxy.on_demand.ROWS_STEP", 8)
    monkeypatch.setattr("proxy.on_demand.ROWS_BYTES", 1)
    lent, plain = [], Streamed._reader
    monkeypatch.setattr(Streamed, "_reader", lambda model, name: lent.append(name) or plain(model, name))
    done = walk(original, tokens().tolist())
    assert len(lent) > 5
    for layer, halves in done.tallies.items():
        for ours, theirs in zip(halves, held.tallies[layer], strict=True):
            assert torch.equal(ours.coactivation_EE, theirs.coactivation_EE)
            assert torch.allclose(ours.weighted_hidden_EH, theirs.weighted_hidden_EH, rtol=1e-4, atol=1e-5)


def test_sums_of_finished_layers_wait_on_disk(qwen, tmp_path):
    done = walk(qwen, state=tmp_path / "s")
    assert done.tallies.held == {}
    assert list(done.tallies) == [0, 1, 2, 3]
    for layer, halves in walk(qwen).tallies.items():
        for ours, theirs in zip(halves, done.tallies[layer], strict=True):
            assert torch.equal(ours.weighted_hidden_EH, theirs.weighted_hidden_EH)
    with pytest.raises(KeyError):
        done.tallies[4]


def test_wide_models_run_fewer_tokens_together():
    assert [batch_tokens(width) for width in (0, 64, 2048, 7168)] == [4096, 4096, 256, 256]
    rows = [[1] * 100 for _ in range(7)]
    assert [len(batch) for batch in batches(rows, 300)] == [3, 3, 1]
    assert [len(batch) for batch in batches(rows, 50)] == [1] * 7


def test_freed_blocks_are_asked_back_for_wide_models_only(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("proxy.walk.give_back_large_blocks", lambda: asked.append(1))
    walk(tiny.make_qwen(tmp_path / "narrow"))
    assert asked == []
    monkeypatch.setattr("proxy.walk.WIDE", 32)
    walk(tiny.make_qwen(tmp_path / "wide"))
    assert asked == [1]
    give_back_large_blocks()
    assert peak_memory() > 0
