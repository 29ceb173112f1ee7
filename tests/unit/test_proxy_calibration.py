"""Calibration sees the model's true routing, whatever the batching, and reads the rows a user names."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM

from proxy.build import build
from proxy.calibration import collect
from proxy.errors import BuildError
from proxy.rows import calibration_rows, cut_rows
from proxy.specs import BuildSpec
from tests.fixtures import tiny_moe as tiny

ROWS = tiny.rows(10)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return tiny.make_qwen(tmp_path_factory.mktemp("qwen") / "original")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    return tiny.make_deepseek(tmp_path_factory.mktemp("deepseek") / "original")


def by_hand(folder: Path, experts: int) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Counts, pairs and routed context from the router's own outputs, token by token."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    sums = {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            sums[number] = (np.zeros(experts), np.zeros((experts, experts)), np.zeros((experts, 32)))

            def hook(_, args, output, number=number):
                counts, pairs, context = sums[number]
                _, weights, index = output
                for h, ps, es in zip(args[0].reshape(-1, 32), weights, index, strict=True):
                    for p, e in zip(ps.tolist(), es.tolist(), strict=True):
                        counts[e] += 1
                        context[e] += p * h.double().numpy()
                        for other in es.tolist():
                            pairs[e, other] += 1

            layer.mlp.gate.register_forward_hook(hook)
    with torch.no_grad():
        for row in ROWS:
            model(torch.tensor([row]))
    return sums


@pytest.mark.parametrize("family, experts, layers", [("qwen", 8, [0, 1]), ("deepseek", 12, [1, 2])])
def test_statistics_equal_a_plain_loop_over_tokens(family, experts, layers, request):
    folder = request.getfixturevalue(family)
    stats, expected = collect(folder, ROWS, 10_000), by_hand(folder, experts)
    assert [s.layer for s in stats] == layers
    for s in stats:
        counts, pairs, context = expected[s.layer]
        assert s.tokens == sum(map(len, ROWS))
        assert np.array_equal(s.counts_E, counts)
        assert np.array_equal(s.coactivation_EE, pairs)
        assert np.allclose(s.weighted_hidden_EH, context, atol=1e-4)
        assert {a.dtype for a in (s.counts_E, s.weighted_hidden_EH, s.router_EH)} == {np.dtype(np.float64)}
        router = tiny.load_all(folder)[f"model.layers.{s.layer}.mlp.gate.weight"]
        assert np.array_equal(s.router_EH, router.double().numpy())


def test_halves_add_up_and_are_the_even_and_odd_rows(qwen):
    for whole, even in zip(collect(qwen, ROWS, 10_000), collect(qwen, ROWS[::2], 10_000), strict=True):
        first, second = whole.halves
        assert np.array_equal(first.counts_E, even.counts_E)
        assert np.array_equal(first.counts_E + second.counts_E, whole.counts_E)
        assert np.allclose(first.weighted_hidden_EH + second.weighted_hidden_EH, whole.weighted_hidden_EH)
        assert first.tokens + second.tokens == whole.tokens
    assert collect(qwen, ROWS[:1], 10_000)[0].halves is None


def test_rows_are_cut_to_the_budget_and_the_context(qwen):
    assert collect(qwen, ROWS, 30)[0].tokens == 30
    assert cut_rows([[1] * 5, [2] * 5, [3]], 7, {}) == [[1] * 5, [2, 2]]
    assert cut_rows([[], [1] * 100], 1000, {"max_position_embeddings": 64}) == [[1] * 64]


@pytest.mark.parametrize("bad", [64, -1])
def test_foreign_token_ids_are_refused(bad, qwen):
    with pytest.raises(BuildError, match=rf"row 1 is {bad}, outside .* vocabulary of 64"):
        collect(qwen, [[1, bad]], 100)


@pytest.mark.parametrize("rows", [[], [[]]])
def test_no_tokens(rows, qwen):
    with pytest.raises(BuildError, match="no calibration tokens"):
        collect(qwen, rows, 100)


def test_model_that_does_not_load_is_one_line(tmp_path):
    folder = tiny.make_qwen(tmp_path / "q")
    tiny.edit_config(folder, hidden_size=48)
    with pytest.raises(BuildError, match="transformers") as caught:
        collect(folder, ROWS, 100)
    assert "\n" not in str(caught.value)
    tiny.edit_config(folder, hidden_size=32)
    tiny.edit_tensors(folder, {"model.layers.0.self_attn.q_proj.weight": None})
    with pytest.raises(BuildError, match=r"no weights for 1 tensors.*q_proj"):
        collect(folder, ROWS, 100)


def test_rows_of_a_file_as_ids_and_as_texts(tmp_path):
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input_ids": [3, 4]}\n\n{"text": "two one three"}\n{"text": "one"}\n')
    assert calibration_rows(str(file), tmp_path, 100) == [[3, 4], [2, 1, 0], [1]]
    assert calibration_rows(str(file), tmp_path, 4) == [[3, 4], [2, 1, 0]]


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "rows.jsonl:2: not JSON"),
        ("[1, 2]", "rows.jsonl:2: neither"),
        ('{"input_ids": [1.5]}', "rows.jsonl:2: neither"),
        ('{"prompt": "x"}', "rows.jsonl:2: neither"),
        ('{"text": "no tokenizer"}', "no tokenizer.json"),
    ],
)
def test_bad_lines_are_named(line, words, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1]}\n' + line + "\n")
    with pytest.raises(BuildError, match=words):
        calibration_rows(str(tmp_path / "rows.jsonl"), tmp_path, 100)


def test_broken_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(BuildError, match="not a tokenizer"):
        calibration_rows(str(tmp_path / "rows.jsonl"), tmp_path, 100)


def test_build_calibrates_on_the_file_of_its_spec(qwen, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ROWS))
    spec = BuildSpec(str(qwen), str(tmp_path / "p"), 4, calibration=str(file), calibration_tokens=50)
    manifest = build(spec)
    assert manifest["calibration"]["tokens"] == 50
    assert manifest["calibration"]["source"] == str(file)
    given = build(BuildSpec(str(qwen), str(tmp_path / "q"), 4, calibration_tokens=50), rows=ROWS)
    assert given["layers"] == manifest["layers"]
    assert given["calibration"]["sha256"] == manifest["calibration"]["sha256"]
