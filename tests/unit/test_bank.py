"""The bank of runs: everything once, whatever is killed in between."""

import sys
from dataclasses import replace

import pytest

from diagnose.bank import Bank, Model, build_key
from diagnose.errors import RunError
from diagnose.session import fault_spec
from proxy.specs import BuildSpec, Recipe, RunSpec
from taxonomy.registry import library
from tests.pipeline import fake_worker

MODEL = Model("embedded:qwen3_moe", "abc")
MODELS = {MODEL.path: MODEL}
RECIPE = Recipe(steps=4)

BROKEN = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "event": "failed", "reason": "TypeError: oh"}), flush=True)
"""


@pytest.fixture
def log(tmp_path, monkeypatch):
    """What workers were asked to do."""
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "starts.log"))
    return lambda: (
        (tmp_path / "starts.log").read_text().splitlines() if (tmp_path / "starts.log").exists() else []
    )


@pytest.fixture
def bank(tmp_path):
    return Bank(tmp_path / "bank", 2, [sys.executable, fake_worker.__file__])


def runs(*seeds, fault=None):
    return [RunSpec(MODEL.path, RECIPE, seed, fault and fault_spec(library()[fault], 1.0)) for seed in seeds]


def test_only_what_is_missing_is_run(bank, log):
    seen = []
    first = bank.fill(runs(1, 2), MODELS, progress=seen.append)
    assert (first.made, first.there, first.left_out, first.died) == (2, 0, 0, {})
    assert [(item.done, item.total, item.failed) for item in seen] == [(1, 2, 0), (2, 2, 0)]
    again = bank.fill(runs(1, 2, 3), MODELS)
    assert (again.made, again.there) == (1, 2)
    assert len(log()) == 3
    curves = bank.curves(bank.key(runs(3)[0], MODEL))
    assert list(curves.steps_N) == [1, 2, 3, 4]
    assert bank.outcome(bank.key(runs(3)[0], MODEL)).status == "completed"


def test_equal_runs_are_one_and_a_model_elsewhere_is_the_same_model(bank, log):
    bank.fill([*runs(1), *runs(1)], MODELS)
    moved = replace(MODEL, path="embedded:deepseek_v3")
    bank.fill([replace(runs(1)[0], model=moved.path)], {moved.path: moved})
    assert len(log()) == 1


def test_a_run_without_an_outcome_is_made_again(bank, log):
    key = bank.key(runs(1)[0], MODEL)
    bank.folder(key).mkdir(parents=True)
    (bank.folder(key) / "metrics.jsonl").write_text('{"step": 1, "data": {}}\nhalf a li')
    assert bank.missing(runs(1), MODELS)
    bank.fill(runs(1), MODELS)
    assert list(bank.curves(key).steps_N) == [1, 2, 3, 4]


def test_a_dead_worker_costs_its_own_run_alone_and_the_next_call_makes_it(bank, log, monkeypatch):
    key = bank.key(runs(2)[0], MODEL)
    monkeypatch.setenv("FAKE_DIE", key)
    filled = bank.fill(runs(1, 2, 3), MODELS)
    assert filled.made == 2 and list(filled.died) == [key] and "SIGKILL" in filled.died[key]
    monkeypatch.delenv("FAKE_DIE")
    assert bank.fill(runs(1, 2, 3), MODELS).made == 1


def test_a_run_that_says_no_is_an_answer_and_not_asked_again(bank, log, monkeypatch):
    key = bank.key(runs(1)[0], MODEL)
    monkeypatch.setenv("FAKE_FAIL", key)
    bank.fill(runs(1), MODELS)
    assert bank.outcome(key).reason == "no luck"
    monkeypatch.delenv("FAKE_FAIL")
    assert bank.fill(runs(1), MODELS).there == 1 and len(log()) == 1


def test_a_run_that_breaks_is_no_answer(tmp_path, bank):
    worker = tmp_path / "broken.py"
    worker.write_text(BROKEN)
    broken = Bank(tmp_path / "bank", 1, [sys.executable, str(worker)])
    key = bank.key(runs(1)[0], MODEL)
    assert broken.fill(runs(1), MODELS).died == {key: "TypeError: oh"}
    assert bank.fill(runs(1), MODELS).made == 1


def test_a_fault_that_a_model_cannot_have_is_an_answer(tmp_path, bank):
    worker = tmp_path / "refusing.py"
    worker.write_text(BROKEN.replace("TypeError: oh", "injection failed: no buffers"))
    refusing = Bank(tmp_path / "bank", 1, [sys.executable, str(worker)])
    assert refusing.fill(runs(1), MODELS).died == {}
    assert bank.fill(runs(1), MODELS).there == 1
    assert bank.outcome(bank.key(runs(1)[0], MODEL)).reason == "injection failed: no buffers"


def test_a_time_limit_leaves_out_what_it_cuts_off(bank, log, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_S", "0.1")
    filled = bank.fill(runs(*range(1, 9)), MODELS, limit_s=0.2)
    assert 1 <= filled.made <= 2 and filled.made + filled.left_out == 8  # what was under way is waited for


def test_proxies_are_built_once_wherever_they_were_to_go(bank, log):
    cut = BuildSpec("embedded:qwen3_moe", "somewhere", 12)
    models = bank.models({"proxy": cut, "original": "embedded:qwen3_moe"})
    assert (models["proxy"].hash, models["original"].hash) == ("fake", "fake-original")
    assert bank.models({"proxy": replace(cut, out="elsewhere"), "original": "embedded:qwen3_moe"}) == models
    assert sorted(log()) == ["build proxy", "hash original"]
    assert build_key(replace(cut, strategy="random")) != build_key(cut)


def test_one_process_fills_a_bank_at_a_time(bank, tmp_path):
    with bank._locked("runs"), pytest.raises(RunError, match="another process"):
        Bank(tmp_path / "bank", 1, [sys.executable, fake_worker.__file__]).fill(runs(1), MODELS)


def test_what_is_complete_needs_no_turn(bank, log):
    bank.fill(runs(1), MODELS)
    with bank._locked("runs"):
        assert bank.fill(runs(1), MODELS).there == 1


def test_runs_of_other_sources_are_counted(bank, log):
    bank.fill(runs(1, 2), MODELS)
    keys = [bank.key(spec, MODEL) for spec in runs(1, 2)]
    assert bank.strangers(keys) == 0
    spec = bank.folder(keys[0]) / "spec.json"
    spec.write_text(spec.read_text().replace('"code": "', '"code": "x'))
    assert bank.strangers(keys) == 1
