"""The launcher without verl: what it reads, what it believes, and that it leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from proxy.embedded import resolve
from proxy.engines import verl
from proxy.engines.verl import InjectionFailed, Launcher, Tail, check_plugin, last_words, merge
from proxy.engines.verl_plugin.table import MARKER
from proxy.specs import EngineSpec, FaultSpec, Recipe, RunSpec
from tests.pipeline.lab import heed_interrupts

TREE = """
import os, subprocess, sys, time
# What Ray does: children in sessions of their own, which outlive their parent and ignore a polite request.
code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.fork() or os.setsid(); time.sleep(600)"
log = open(sys.argv[-1].partition("=")[2] + "/log", "w")
subprocess.Popen([sys.executable, "-c", code + "  # ray " + sys.argv[1]], start_new_session=True, stdout=log)
time.sleep(0.5)
print("running", flush=True)
sys.exit(3) if "exit" in sys.argv[2:] else time.sleep(600)
"""


def marked(mark):
    """Return the processes that carry a mark in their command line."""
    found = subprocess.run(
        ["ps", "-wweo", "pid,stat,args"], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.split(None, 2) for line in found.splitlines() if mark in line]
    return [int(pid) for pid, stat, _ in lines if int(pid) != os.getpid() and not stat.startswith("Z")]


def gone(mark, patience=15.0):
    deadline = time.monotonic() + patience
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not marked(mark)


def launch(home, mark, *words):
    home.mkdir(exist_ok=True)
    return Launcher(home, [sys.executable, "-c", TREE, mark, *words], os.environ)


def until_running(home):
    log = home / "verl.log"
    deadline = time.monotonic() + 30
    while "running" not in (log.read_text() if log.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.fixture
def mark(tmp_path):
    return f"mark-{os.getpid()}-{tmp_path.name}"


def test_nothing_is_left_after_an_end_of_its_own(tmp_path, mark):
    with launch(tmp_path / "a", mark, "exit") as launcher:
        assert launcher.process.wait(30) == 3
        assert gone(mark, 1.0) and not launcher.temp.exists()
    assert launcher.cpu_s() >= 0


def test_nothing_is_left_after_a_stop(tmp_path, mark):
    with launch(tmp_path / "a", mark) as launcher:
        until_running(tmp_path / "a")
        assert len(marked(mark)) >= 3
    assert not marked(mark) and not launcher.temp.exists()


def test_nothing_is_left_when_the_watcher_itself_was_killed(tmp_path, mark):
    with launch(tmp_path / "a", mark) as launcher:
        until_running(tmp_path / "a")
        launcher.process.kill()
        launcher.process.wait()
        assert marked(mark)  # they outlive it
    assert gone(mark, 1.0) and not launcher.temp.exists()


OWNER = """
import sys, time
from pathlib import Path
from proxy.engines.verl import Launcher
import os
with Launcher(Path(sys.argv[1]), [sys.executable, "-c", sys.argv[3], sys.argv[2]], os.environ):
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_after_the_launcher_was_killed(tmp_path, mark, number):
    home = tmp_path / "a"
    home.mkdir()
    command = [sys.executable, "-c", OWNER, str(home), mark, TREE]
    owner = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts)
    until_running(home)
    assert len(marked(mark)) >= 3
    owner.send_signal(number)
    owner.wait(20)
    assert gone(mark)
    temp = json.loads((home / "order.json").read_text())["temp"]
    deadline = time.monotonic() + 5
    while os.path.exists(temp) and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(0.05)
    assert not os.path.exists(temp)  # noqa: PTH110


def test_the_tail_waits_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "verl.jsonl"
    tail = Tail(path)
    assert tail.poll() == []
    whole = '{"step": 1, "data": {"actor/kl_loss": 0.5, "actor/entropy": null, "note": "text"}}\n'
    path.write_text(whole + '{"step": 2, "da')
    ((step, data),) = tail.poll()
    assert step == 1 and data["actor/kl_loss"] == 0.5 and data["actor/entropy"] != data["actor/entropy"]
    assert "note" not in data and tail.poll() == []
    path.write_text(whole + '{"step": 2, "data": {}}\n')
    assert tail.poll() == [(2, {})]


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "it wrote nothing"),
        ("a\nb\n\n", "b"),
        ("ValueError: the cause\nray.exceptions.RayTaskError(X): lost\n", "ValueError: the cause"),
        ("\x1b[36m(TaskRunner pid=7)\x1b[0m torch.OutOfMemoryError: no\nbye\n", "torch.OutOfMemoryError: no"),
    ],
)
def test_the_last_words_are_the_cause(tmp_path, log, words):
    (tmp_path / "log").write_text(log)
    assert last_words(tmp_path / "log") == words


def report(kind, **fields):
    return {"kind": kind, "hooks": [], "witness": {}, "largest": {}, "metrics": {}, "error": ""} | fields


def test_witnesses_of_several_processes_are_merged():
    witness, metrics = merge(
        [
            report("trainer", witness={"events_skipped": [4, 1], "change": [3.0, 3]}, largest={"lag": 1.0}),
            report("trainer", witness={"events_skipped": [4, 1], "change": [1.0, 1]}, largest={"lag": 5.0}),
            report("server", metrics={"2": {"rollout/weight_lag": 3.0}}),
            report("driver", metrics={"2": {"rollout/zero_std_groups": 0.5}}),
        ]
    )
    assert witness == {"events_skipped": 4.0, "change": 1.0, "lag": 5.0}
    assert metrics == {2: {"rollout/weight_lag": 3.0, "rollout/zero_std_groups": 0.5}}


FAULT = FaultSpec("x", "event", "optimizer", "a:b")
PLACE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.optimizer_step"


@pytest.mark.parametrize(
    ("log", "found", "words"),
    [
        ("", [], "the plugin was not loaded"),
        (MARKER, [], "FSDPEngine.optimizer_step is not in place in verl's trainer"),
        (MARKER, [report("trainer")], "FSDPEngine.optimizer_step is not in place"),
        (MARKER, [report("driver", hooks=[PLACE])], "not in place in verl's trainer"),
        (MARKER, [report("server", error="ValueError: no (numerics.py:7)")], "in verl's server: ValueError"),
    ],
)
def test_a_plugin_that_is_not_in_place_is_no_fault(tmp_path, log, found, words):
    (tmp_path / "verl.log").write_text(log)
    (tmp_path / "reports").mkdir()
    for index, content in enumerate(found):
        (tmp_path / "reports" / f"{index}.json").write_text(json.dumps(content))
    with pytest.raises(InjectionFailed, match=words) as caught:
        check_plugin(tmp_path, [FAULT], "v0")
    assert str(caught.value).startswith(verl.INJECTION_FAILED)


def test_a_plugin_in_place_is_believed(tmp_path):
    (tmp_path / "verl.log").write_text(f"x\n{MARKER}\n")
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "t.json").write_text(json.dumps(report("trainer", hooks=[PLACE])))
    check_plugin(tmp_path, [FAULT], "v0")


FAKE_VERL = """#!{python}
import json, os, pathlib, sys
job = pathlib.Path(os.environ["RL_DIAGNOSE_JOB"])
starts = pathlib.Path("{starts}")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) <= {late}:
    sys.exit("Exception: The current node timed out during startup. This could happen")
print("{marker}")
steps = json.loads((job / "job.json").read_text())["recipe"]["steps"]
with (job / "verl.jsonl").open("w") as log:
    for step in range(1, steps + 1 - {missing}):
        log.write(json.dumps(dict(step=step, data=dict(reward=0.5))) + chr(10))
"""


def fake_environment(folder, **words):
    """Return the interpreter of an environment whose verl is a few lines."""
    (folder / "bin").mkdir(parents=True)
    version = folder / "lib" / "python3.11" / "site-packages" / "verl" / "version" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("0.9.1")
    python = folder / "bin" / "python"
    words = {"late": 0, "missing": 0} | words
    python.write_text(
        FAKE_VERL.format(python=sys.executable, marker=MARKER, starts=folder / "starts", **words)
    )
    python.chmod(0o755)
    return str(python)


def run_fake(folder, **words):
    engine = EngineSpec("verl", fake_environment(folder / "env", **words))
    spec, seen = RunSpec("embedded:qwen3_moe", Recipe(steps=3), 1, None, engine), []
    outcome = verl.run(spec, resolve(spec.model), lambda step, _: seen.append(step), folder / "run")
    return outcome, seen


def test_a_run_is_over_when_all_steps_are_there(tmp_path):
    outcome, seen = run_fake(tmp_path)
    assert (outcome.status, outcome.steps, seen) == ("completed", 3, [1, 2, 3])


def test_an_early_end_is_a_failure(tmp_path):
    with pytest.raises(verl.RunFailed, match="after 2 steps"):
        run_fake(tmp_path, missing=1)


def test_a_ray_that_was_late_is_started_again(tmp_path):
    outcome, seen = run_fake(tmp_path, late=1)
    assert outcome.status == "completed" and seen == [1, 2, 3]
    assert (tmp_path / "env" / "starts").read_text() == "xx"


def test_the_gap_between_held_out_and_training_reward_is_the_local_engines():
    held_out = verl.HeldOut()
    name, paid = "val-core/gsm8k/reward/mean@1", "critic/rewards/mean"
    assert held_out.gap({name: 0.5}) == {}  # before training
    assert held_out.gap({paid: 0.2}) == {} == held_out.gap({paid: 0.4, "val-core/x/acc/best@4/mean": 1.0})
    assert held_out.gap({paid: 0.6, name: 0.5}) == {"val-core/reward_gap": pytest.approx(0.5 - 0.4)}
    assert held_out.gap({paid: 0.8, name: 0.5}) == {"val-core/reward_gap": pytest.approx(0.5 - 0.8)}
