"""A user's own command on real verl: a fault in it, NaN in the middle, a worker that dies. Three runs in all."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from diagnose.scoring import judge_witness
from diagnose.session import fault_spec
from proxy.api import Done, Failed, Job, WorkerPool
from proxy.embedded import resolve
from proxy.engines import verl_command, verl_config
from proxy.engines.verl_env import find_python
from proxy.specs import EngineSpec, RunSpec
from taxonomy.registry import library
from tests.verl.own import REWARD, logged, project

MODEL = "embedded:qwen3_moe"
STEPS = 3

NAN = REWARD.replace(
    "    score = ",
    "    from rl_diagnose_plugin.proxy.engines.verl_plugin.state import process\n"
    "    count = process().__dict__.setdefault('graded', [0])\n"
    "    count[0] += 1\n"
    "    if 32 < count[0] <= 64:  # the second step's responses\n"
    "        return {'score': float('nan'), 'length': 0.0}\n"
    "    score = ",
)
DEADLY = REWARD.replace(
    "    score = ",
    "    import signal, sys\n    print('about to allocate too much', flush=True)\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n    score = ",
)


def prepared(home, reward=REWARD, *more):
    """Return a run of the user's command."""
    wish = verl_config.Wish(
        verl_command.split(project(home, *more, reward=reward)), platform="cpu", directory=str(home)
    )
    model = json.loads((resolve(MODEL) / "config.json").read_text())
    ready = verl_config.prepare(wish, find_python(), model, 0, 1.0, STEPS)
    return RunSpec(
        MODEL, ready.recipe, 1, None, EngineSpec("verl", trainer=ready.trainer, launch=ready.launch)
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return (last event by run, folder)."""
    home = tmp_path_factory.mktemp("own")
    healthy = prepared(home / "healthy_project")
    stale = fault_spec(library()["weight_sync_skipped"], 1.0, 2)
    specs = {
        "stale": replace(healthy, fault=stale),
        "nan": prepared(home / "nan_project", NAN),
        "killed": prepared(home / "killed_project", DEADLY),
    }
    ends = {}
    with WorkerPool(2, home) as pool:
        for name, spec in specs.items():
            pool.submit(Job(name, "run", asdict(spec), str(home / name)))
        for event in pool.events():
            if isinstance(event, Done | Failed):
                ends[event.id] = event
    return ends, home


def test_a_fault_in_the_users_own_command(runs):
    ends, home = runs
    assert isinstance(ends["stale"], Done), ends["stale"]
    metrics = logged(home / "stale")
    assert list(metrics) == list(range(1, STEPS + 1))
    assert [metrics[step]["rollout/weight_lag"] for step in metrics] == [0, 1, 2]
    outcome = json.loads((home / "stale" / "outcome.json").read_text())
    assert judge_witness(library()["weight_sync_skipped"], [outcome["witness"]])[1]
    # It was the user's reward that was trained on, and the user's learning rate.
    assert metrics[1]["critic/score/max"] <= 1.0 - 0.05
    assert metrics[1]["actor/lr"] == pytest.approx(1e-4)


def test_nan_in_the_middle(runs):
    ends, home = runs
    assert isinstance(ends["nan"], Done), ends["nan"]
    metrics = logged(home / "nan")
    assert metrics[1]["critic/score/mean"] is not None
    assert metrics[2]["critic/score/mean"] is None
    assert list(metrics) == list(range(1, STEPS + 1))


def test_a_worker_that_is_killed_is_named_with_its_last_words(runs):
    ends, home = runs
    assert isinstance(ends["killed"], Failed)
    reason = ends["killed"].reason
    assert "RewardLoopWorker" in reason and "killed (often: out of memory)" in reason
    assert "about to allocate too much" in reason
    assert not (home / "killed" / "outcome.json").exists()
    assert (home / "stale" / "outcome.json").exists()  # what was finished is kept
    temp = json.loads((home / "killed" / "verl" / "order.json").read_text())["temp"]
    assert not Path(temp).exists()
