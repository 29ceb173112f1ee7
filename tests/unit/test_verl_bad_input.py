"""A user's verl that goes wrong, with an interpreter of a few lines in verl's place: each time the reason is told."""

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

from proxy.embedded import resolve
from proxy.engines import verl
from proxy.engines.verl import Tail
from proxy.engines.verl_env import NoVerl, find_python, version_of
from proxy.engines.verl_plugin.table import MARKER
from proxy.specs import EngineSpec, Launch, Recipe, RunSpec
from tests.pipeline.lab import heed_interrupts

FAKE = """#!{python}
import json, os, pathlib, sys, time
starts = pathlib.Path("{folder}") / "starts"
starts.write_text((starts.read_text() if starts.exists() else "") + "x")
attempt = len(starts.read_text())
log = pathlib.Path(os.environ["VERL_FILE_LOGGER_PATH"])
print("{marker}", flush=True)
def step(n, mode="a", **data):
    with log.open(mode) as file:
        file.write(json.dumps(dict(step=n, data=data or dict(reward=0.5))) + chr(10))
{body}
"""


def environment(folder, body, version="0.9.1"):
    """Return an interpreter whose verl does what a few lines say."""
    (folder / "bin").mkdir(parents=True)
    file = folder / "lib" / "python3.11" / "site-packages" / "verl" / "version" / "version"
    file.parent.mkdir(parents=True)
    file.write_text(version)
    python = folder / "bin" / "python"
    python.write_text(FAKE.format(python=sys.executable, folder=folder, marker=MARKER, body=body))
    python.chmod(0o755)
    return str(python)


def spec(folder, body, steps=3, **engine):
    launch = Launch(flags=("-m", "verl.trainer.main_ppo"), overrides=("a=1",), directory=str(folder))
    engine = EngineSpec("verl", environment(folder / "env", body), launch=launch, **engine)
    return RunSpec("embedded:qwen3_moe", Recipe(steps=steps), 1, None, engine)


def run(folder, body, **more):
    one, seen = spec(folder, body, **more), {}
    outcome = verl.run(one, resolve(one.model), lambda step, data: seen.update({step: data}), folder / "run")
    return outcome, seen


def test_a_config_that_dies_in_hydra(tmp_path):
    body = "print(\"Could not override 'a'.\\nKey 'a' is not in struct\"); sys.exit(1)"
    with pytest.raises(verl.RunFailed, match="after 0 steps: Hydra: Could not override 'a'"):
        run(tmp_path, body)


def test_a_worker_out_of_memory_in_the_middle(tmp_path):
    body = """
step(1)
print("(WorkerDict pid=5) allocating the optimizer")
print("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.")
print("\\tclass_name: f.<locals>.WorkerDict\\n\\tpid: 5\\nExit detail: killed by SIGKILL by OOM killer")
sys.exit(1)"""
    with pytest.raises(verl.RunFailed, match=r"after 1 steps: WorkerDict \(pid 5\) was killed") as failed:
        run(tmp_path, body)
    assert "allocating the optimizer" in failed.value.mend


def test_nan_in_the_middle_is_an_event_of_a_run_that_goes_on(tmp_path):
    outcome, seen = run(tmp_path, "step(1); step(2, reward=None, loss=float('nan')); step(3)")
    assert outcome.status == "completed" and list(seen) == [1, 2, 3]
    assert math.isnan(seen[2]["reward"]) and math.isnan(seen[2]["loss"]) and seen[3]["reward"] == 0.5


def test_a_metrics_file_that_verl_opens_anew_when_it_resumes(tmp_path):
    body = "[step(n) for n in (1, 2, 3)]; time.sleep(0.8); step(3, 'w', reward=9.0); time.sleep(0.5); step(4)"
    outcome, seen = run(tmp_path, body, steps=4)
    assert outcome.steps == 4 and list(seen) == [1, 2, 3, 4]
    assert seen[3]["reward"] == 0.5  # of a step that is done again the first record counts


def test_a_tail_waits_for_the_end_of_a_line_and_survives_truncation(tmp_path):
    file = tmp_path / "log"
    tail = Tail(file)
    assert tail.poll() == []
    lines = [json.dumps({"step": n, "data": {"x": n}}) + "\n" for n in range(1, 6)]
    file.write_text(lines[0] + lines[1] + lines[2][:9])
    assert [step for step, _ in tail.poll()] == [1, 2]
    file.write_text(lines[1])
    assert tail.poll() == []
    file.write_text(lines[1] + lines[3])
    assert tail.poll() == [(4, {"x": 4.0})]


def test_a_port_that_is_taken_is_tried_again(tmp_path):
    body = """
if attempt < 3:
    sys.exit("OSError: [Errno 98] Address already in use")
[step(n) for n in (1, 2, 3)]"""
    assert run(tmp_path, body)[0].steps == 3
    assert (tmp_path / "env" / "starts").read_text() == "xxx"


def test_a_port_that_stays_taken_is_the_reason(tmp_path):
    with pytest.raises(verl.RunFailed, match="Address already in use"):
        run(tmp_path, 'sys.exit("OSError: [Errno 98] Address already in use")')
    assert len((tmp_path / "env" / "starts").read_text()) == verl.ATTEMPTS


def test_a_run_may_not_take_longer_than_allowed(tmp_path):
    begin = time.monotonic()
    with pytest.raises(verl.RunFailed, match="longer than 5 s, at step 1"):
        run(tmp_path, "step(1); time.sleep(300)", limit_s=5.0)
    assert time.monotonic() - begin < 120


def test_what_ray_wrote_is_kept_where_a_run_failed(tmp_path):
    body = """
temp = next(w for w in sys.argv if "_temp_dir=" in w).partition("=")[2]
logs = pathlib.Path(temp) / "session_1" / "logs"
logs.mkdir(parents=True)
(logs / "worker-ab-01-5.err").write_text("no space left" + chr(10))
print("ray.exceptions.ActorDiedError: x\\n\\tclass_name: Server\\n\\tpid: 5")
sys.exit(1)"""
    with pytest.raises(verl.RunFailed, match=r"Server \(pid 5\) died") as failed:
        run(tmp_path, body)
    assert "no space left" in failed.value.mend
    order = json.loads((tmp_path / "run" / "verl" / "order.json").read_text())
    assert not Path(order["temp"]).exists()
    assert (tmp_path / "run" / "verl" / "order.json").stat().st_mode & 0o077 == 0


OWNER = """
import json, sys
from pathlib import Path
from proxy.embedded import resolve
from proxy.engines import verl
from proxy.specs import RunSpec
spec = RunSpec.from_json(json.loads(sys.argv[1]))
verl.run(spec, resolve(spec.model), lambda step, _: print(step, flush=True), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_leaves_no_process(tmp_path, number):
    body = """
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
(log.parent / "pids").write_text(f"{os.getpid()} {child.pid}")
step(1)
time.sleep(600)"""
    one = spec(tmp_path, body)
    command = [sys.executable, "-P", "-c", OWNER, json.dumps(asdict(one)), str(tmp_path / "run")]
    owner = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        preexec_fn=heed_interrupts,
    )
    assert owner.stdout.readline().strip() == b"1"
    pids = (tmp_path / "run" / "verl" / "pids").read_text().split()
    owner.send_signal(number)
    owner.wait(30)
    deadline = time.monotonic() + 15
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_another_interpreter_is_refused_with_the_mend(tmp_path):
    with pytest.raises(NoVerl, match="has no verl"):
        find_python(sys.executable)
    with pytest.raises(NoVerl, match="is not there"):
        find_python(str(tmp_path / "nothing"))
    assert replace(EngineSpec("verl"), python="x").python == "x"


def test_a_verl_from_sources_is_found_by_asking(tmp_path):
    """As in the images of verl and vllm-ascend: no wheel in a folder of the interpreter's."""
    sources = tmp_path / "src" / "verl"
    (sources / "version").mkdir(parents=True)
    (sources / "__init__.py").write_text("raise SystemExit('imported')")
    (sources / "version" / "version").write_text("0.9.2.dev0\n")
    python = tmp_path / "usr" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'src')!r}); exec(sys.argv[2])"
    python.write_text(f"#!{sys.executable}\n{code}\n")
    python.chmod(0o755)
    assert find_python(str(python)) == python
    assert version_of(python) == "0.9.2.dev0"


CLIENT = """
import json, pathlib
STATE = pathlib.Path("{state}")


class Status(str):
    def is_terminal(self):
        return self in ("SUCCEEDED", "FAILED", "STOPPED")


class Info:
    def __init__(self, status, message):
        self.status, self.message = Status(status), message


def note(what):
    with STATE.open("a") as file:
        file.write(what + chr(10))


class JobSubmissionClient:
    def __init__(self, address):
        if "{mode}" == "nobody":
            raise ConnectionError("Failed to connect to Ray at address: " + address)

    def submit_job(self, entrypoint, submission_id, runtime_env, metadata):
        if "{mode}" == "early" and "early" not in (STATE.read_text() if STATE.exists() else ""):
            note("early")
            raise RuntimeError("No available agent to submit job, please try again later.")
        note("submitted " + entrypoint)
        log = pathlib.Path(runtime_env["env_vars"]["VERL_FILE_LOGGER_PATH"])
        if "{mode}" in ("good", "early", "slow", "fails"):
            steps = 1 if "{mode}" in ("slow", "fails") else 3
            log.write_text("".join(json.dumps(dict(step=n + 1, data=dict(x=1))) + chr(10) for n in range(steps)))

    def get_job_logs(self, _id):
        words = dict(fails="ValueError: bad luck", far="far").get("{mode}", "")
        return "{marker}" + chr(10) + words

    def get_job_info(self, _id):
        if "stop" in STATE.read_text().split():
            return Info("STOPPED", "")
        status = dict(slow="RUNNING", fails="FAILED").get("{mode}", "SUCCEEDED")
        return Info(status, "exit code 1, last available logs x")

    def stop_job(self, _id):
        note("stop")
"""


def cluster(folder, mode):
    """Return a run for a cluster whose client is a few lines."""
    one = spec(folder, "")
    home = folder / "env"
    (home / "fake" / "ray").mkdir(parents=True)
    (home / "fake" / "ray" / "__init__.py").touch()
    client = CLIENT.format(state=folder / "state", mode=mode, marker=MARKER)
    (home / "fake" / "ray" / "job_submission.py").write_text(client)
    python = home / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={home / "fake"} exec {sys.executable} "$@"\n')
    launch = replace(one.engine.launch, address="http://head:8265", entry="python3.10")
    return replace(one, engine=replace(one.engine, launch=launch))


def submit(folder, mode):
    one, seen = cluster(folder, mode), []
    outcome = verl.run(one, resolve(one.model), lambda step, _: seen.append(step), folder / "run")
    return outcome, seen, (folder / "state").read_text()


@pytest.mark.parametrize("mode", ["good", "early"])
def test_a_ray_job_is_submitted_and_followed(tmp_path, mode):
    outcome, seen, state = submit(tmp_path, mode)
    assert outcome.status == "completed" and seen == [1, 2, 3]
    assert state.splitlines()[-1].startswith("submitted python3.10 -m verl.trainer.main_ppo a=1")


def test_a_ray_job_that_fails_is_told_from_its_log(tmp_path):
    with pytest.raises(verl.RunFailed, match="after 1 steps: ValueError: bad luck"):
        submit(tmp_path, "fails")
    assert "Ray job FAILED: exit code 1\n" in (tmp_path / "run" / "verl" / "verl.log").read_text()


def test_a_folder_that_the_cluster_does_not_see(tmp_path):
    with pytest.raises(verl.RunFailed, match="nothing arrived in") as failed:
        submit(tmp_path, "far")
    assert "all nodes see it" in failed.value.mend


def test_a_cluster_that_does_not_answer(tmp_path):
    with pytest.raises(verl.RunFailed, match="no job could be submitted to http://head:8265"):
        submit(tmp_path, "nobody")


def test_a_job_is_stopped_with_its_launcher(tmp_path):
    one = cluster(tmp_path, "slow")
    command = [sys.executable, "-P", "-c", OWNER, json.dumps(asdict(one)), str(tmp_path / "run")]
    owner = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())}
    )
    assert owner.stdout.readline().strip() == b"1"
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 15
    while "stop" not in (tmp_path / "state").read_text().split() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "stop" in (tmp_path / "state").read_text().split()
