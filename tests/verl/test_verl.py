"""Real verl on a CPU: a healthy run, one fault of each form, a broken plugin, and a launcher that is killed.

Few steps each; the runs of a module are made once, two at a time.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from diagnose.scoring import judge_witness
from diagnose.session import fault_spec
from proxy.api import Done, Failed, Job, Step, WorkerPool
from proxy.embedded import resolve
from proxy.engines import verl
from proxy.specs import EngineSpec, FaultSpec, Recipe, RunSpec
from taxonomy.registry import library
from tests.verl.conftest import alive, below

STEPS, FROM = 4, 3
RECIPE = Recipe(steps=STEPS, prompts=6, group_size=4, eval_every=0)
MODEL = "embedded:qwen3_moe"
FAULTS = ("learning_rate_too_high", "rollout_logprob_precision", "weight_sync_skipped")


def spec(fault=None):
    planned = fault and fault_spec(library()[fault], 1.0, FROM)
    return RunSpec(MODEL, RECIPE, 1, planned, EngineSpec("verl"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs by name: (outcome or reason, metrics by step)."""
    home = tmp_path_factory.mktemp("runs")
    broken = FaultSpec("broken", "transform", "rollout", "tests.verl.broken_injection:raises")
    specs = {"healthy": spec()} | {fault: spec(fault) for fault in FAULTS}
    specs["broken"] = replace(spec(), fault=broken)
    specs["v1"] = replace(spec("weight_sync_skipped"), engine=EngineSpec("verl", trainer="v1"))
    ends, seen = {}, set()
    with WorkerPool(2, home) as pool:
        for name, run in specs.items():
            pool.submit(Job(name, "run", asdict(run), str(home / name)))
        for event in pool.events():
            if isinstance(event, Step) and event.step == 1:
                seen |= below(os.getpid())
            if isinstance(event, Done | Failed):
                ends[event.id] = event
    deadline = time.monotonic() + 10
    while alive(seen) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive(seen), "a process was left behind"
    metrics = {}
    for name in specs:
        log = home / name / "metrics.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        metrics[name] = {line["step"]: line["data"] for line in lines}
    return ends, metrics, home


def done(runs, name):
    ends, metrics, home = runs
    assert isinstance(ends[name], Done), ends[name]
    outcome = json.loads((home / name / "outcome.json").read_text())
    assert outcome["status"] == "completed" and list(metrics[name]) == list(range(1, STEPS + 1))
    return outcome, metrics[name]


def test_a_healthy_run_looks_like_the_local_engines(runs):
    from proxy.engines import local

    _, metrics = done(runs, "healthy")
    here = {}
    recipe = replace(RECIPE, steps=1)
    local.run(RunSpec(MODEL, recipe, 1), resolve(MODEL), lambda step, data: here.update({step: data}))
    first = metrics[1]
    # Same prompts, same recipe, other noise: the levels of the first step agree.
    assert first["critic/rewards/mean"] == pytest.approx(here[1]["critic/rewards/mean"], abs=0.2)
    assert first["actor/entropy"] == pytest.approx(here[1]["actor/entropy"], rel=0.3)
    assert 1e-4 < first["training/rollout_probs_diff_mean"] < 2e-2
    assert first["actor/lr"] == pytest.approx(RECIPE.lr)
    assert first["rollout/weight_lag"] == 0
    assert all(math.isfinite(value) for value in first.values() if value is not None)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_witness_proves_each_form_of_injection(runs, fault):
    outcome, _ = done(runs, fault)
    assert judge_witness(library()[fault], [outcome["witness"]])[1], outcome["witness"]


@pytest.mark.parametrize("fault", FAULTS)
def test_before_its_first_step_a_fault_changes_nothing(runs, fault):
    metrics, healthy = done(runs, fault)[1], done(runs, "healthy")[1]
    for step in range(1, FROM):
        for name in ("critic/rewards/mean", "actor/kl_loss", "training/rollout_probs_diff_mean"):
            assert metrics[step][name] == pytest.approx(healthy[step][name], rel=1e-4), (step, name)


def test_a_learning_rate_that_changes_in_the_middle(runs):
    metrics, healthy = done(runs, "learning_rate_too_high")[1], done(runs, "healthy")[1]
    assert metrics[STEPS]["actor/kl_loss"] > 5 * healthy[STEPS]["actor/kl_loss"]


def test_a_rounded_scale_shows_in_the_mismatch_alone(runs):
    metrics, healthy = done(runs, "rollout_logprob_precision")[1], done(runs, "healthy")[1]
    name = "training/rollout_probs_diff_mean"
    assert metrics[FROM][name] > 2 * healthy[FROM][name]
    # The tokens of its first faulty step are the healthy ones: only what is reported about them is off.
    assert metrics[FROM]["critic/rewards/mean"] == healthy[FROM]["critic/rewards/mean"]


def test_a_skipped_sync_leaves_the_rollout_behind(runs):
    metrics, healthy = done(runs, "weight_sync_skipped")[1], done(runs, "healthy")[1]
    assert [metrics[step]["rollout/weight_lag"] for step in range(1, STEPS + 1)] == [0, 0, 1, 2]
    name = "training/rollout_probs_diff_mean"
    assert metrics[STEPS][name] > 2 * healthy[STEPS][name]


def test_the_v1_trainer(runs):
    outcome, metrics = done(runs, "v1")
    assert judge_witness(library()["weight_sync_skipped"], [outcome["witness"]])[1], outcome["witness"]
    assert [metrics[step]["rollout/weight_lag"] for step in range(1, STEPS + 1)] == [0, 0, 1, 2]
    # Responses to one prompt differ, or there would be nothing to learn from.
    assert max(metrics[step]["critic/advantages/max"] for step in metrics) > 0.5


def test_a_broken_injection_is_no_result(runs):
    ends, _, home = runs
    assert isinstance(ends["broken"], Failed)
    assert ends["broken"].reason.startswith(
        "injection failed in verl's server: RuntimeError: broken on purpose"
    )
    assert not (home / "broken" / "outcome.json").exists()


def test_a_plugin_that_verl_never_loads_fails_the_run(tmp_path, monkeypatch):
    entry = verl.verl_job.write_plugin

    def without_hooks(home, modules):
        entry(home, modules)
        hooks = home / verl.verl_job.PACKAGE / "proxy" / "engines" / "verl_plugin" / "hooks.py"
        hooks.write_text(hooks.read_text() + "\n\ndef install():\n    raise OSError('no hooks today')\n")

    monkeypatch.setattr(verl.verl_job, "write_plugin", without_hooks)
    with pytest.raises(verl.InjectionFailed, match="injection failed"):
        verl.run(spec("weight_sync_skipped"), resolve(MODEL), lambda *_: None, tmp_path)


OWNER = """
import json, sys
from pathlib import Path
from proxy.embedded import resolve
from proxy.engines import verl
from proxy.specs import RunSpec
spec = RunSpec.from_json(json.loads(sys.argv[1]))
verl.run(spec, resolve(spec.model), lambda step, _: print(step, flush=True), Path(sys.argv[2]))
"""


def test_a_killed_launcher_leaves_nothing_and_the_run_can_be_done_again(tmp_path):
    run = replace(spec(), recipe=replace(RECIPE, steps=2))
    command = [sys.executable, "-P", "-c", OWNER, json.dumps(asdict(run)), str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert owner.stdout.readline().strip() == b"1"
    tree = below(owner.pid)
    assert len(tree) > 5  # raylet, driver, workers …
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 10
    while alive(tree) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(tree)
    temp = json.loads((tmp_path / "verl" / "order.json").read_text())["temp"]
    assert not Path(temp).exists()
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout.split() == ["1", "2"]
