"""Ray jobs on a cluster that is really started: `make verl-cluster`. CPU only; some minutes.

Starts ``ray start --head``, submits four candidates through the launcher, two at a time, beside one that is interrupted
after its first step, and checks what has to hold: each run's metrics and witness are there, the job that was
interrupted is stopped, the cluster runs no process of a job afterwards, and the cluster itself goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from diagnose.session import fault_spec
from proxy.api import Done, Failed, Job, Step, WorkerPool
from proxy.embedded import resolve
from proxy.engines import verl_command, verl_config, verl_watch
from proxy.engines.verl_env import find_python
from proxy.specs import EngineSpec, RunSpec
from taxonomy.registry import library
from tests.verl.own import logged, project

MODEL = "embedded:qwen3_moe"
STEPS = 3
FAULTS = ("", "weight_sync_skipped", "learning_rate_too_high", "actor_update_omission")
ATTEMPTS = 4


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Start a head node and yield its dashboard's address; everything of it is ended afterwards."""
    python = find_python()
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "RAY_"))}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"  # a job's python3 is verl's
    for attempt in range(ATTEMPTS):
        temp = Path(tempfile.mkdtemp(prefix="rlc-"))
        port = free_port()
        order = {
            "command": [
                *(str(python.parent / "ray"), "start", "--head", "--block", "--disable-usage-stats"),
                *(f"--port={free_port()}", "--num-cpus=24", "--num-gpus=2", f"--temp-dir={temp}"),
                *("--include-dashboard=true", f"--dashboard-port={port}", "--object-store-memory=400000000"),
                f"--dashboard-agent-listen-port={free_port()}",
            ],
            "log": str(folder / "cluster.log"),
            "cwd": str(folder),
            "temp": str(temp),
            "usage": str(folder / "usage.json"),
            "kept": str(folder / "ray_logs"),
        }
        (folder / "cluster.json").write_text(json.dumps(order))
        keeper = subprocess.Popen(
            [sys.executable, "-I", verl_watch.__file__, str(folder / "cluster.json")],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        address = f"http://127.0.0.1:{port}"
        try:
            if _answers(address, keeper):
                yield address
                return
        finally:
            assert keeper.stdin
            keeper.stdin.close()
            keeper.wait()
            shutil.rmtree(temp, ignore_errors=True)
        print(f"the head node did not start (attempt {attempt + 1}): Ray gives it 30 seconds", flush=True)
    raise SystemExit("no cluster could be started on this machine now")


def _answers(address: str, keeper: subprocess.Popen[bytes]) -> bool:
    """Wait for a dashboard; return whether it answers."""
    deadline = time.monotonic() + 120
    while keeper.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address}/api/jobs/", timeout=5):
                return True
        except OSError:
            time.sleep(0.5)
    return False


def jobs(address: str) -> dict[str, str]:
    """Return the cluster's jobs: submission id → status."""
    with urllib.request.urlopen(f"{address}/api/jobs/", timeout=30) as answer:
        return {job["submission_id"]: job["status"] for job in json.load(answer) if job["submission_id"]}


def workers() -> list[str]:
    """Return the processes of verl's jobs that run on this machine under a cluster of ours."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [
        line
        for line in found.splitlines()
        if "rl-diagnose-" in line and "main_ppo" in line and " ps " not in line
    ]


def specs(address: str, folder: Path) -> dict[str, RunSpec]:
    """Return the runs: the smallest project of a user, healthy and with a fault each."""
    text = project(folder / "project")
    for name in ("train.jsonl", "test.jsonl", "reward.py"):
        text = text.replace(
            f"={name}", f"={folder / 'project' / name}"
        )  # a cluster has no working folder of ours
    wish = verl_config.Wish(
        verl_command.split(text), platform="cpu", address=address, directory=str(folder / "project")
    )
    model = json.loads((resolve(MODEL) / "config.json").read_text())
    ready = verl_config.prepare(wish, find_python(), model, 0, 1.0, STEPS)
    engine = EngineSpec("verl", trainer=ready.trainer, launch=ready.launch)
    healthy = RunSpec(MODEL, ready.recipe, 1, None, engine)
    return {
        fault or "healthy": replace(healthy, fault=fault_spec(library()[fault], 1.0, 2) if fault else None)
        for fault in FAULTS
    }


OWNER = """
import json, sys
from pathlib import Path
from proxy.embedded import resolve
from proxy.engines import verl
from proxy.specs import RunSpec
spec = RunSpec.from_json(json.loads(sys.argv[1]))
verl.run(spec, resolve(spec.model), lambda step, _: print(step, flush=True), Path(sys.argv[2]))
"""


def interrupted(spec: RunSpec, folder: Path, address: str) -> None:
    """Kill a launcher after its first step; its job has to stop, and nothing of it to stay."""
    spec = replace(spec, recipe=replace(spec.recipe, steps=50))
    command = [sys.executable, "-P", "-c", OWNER, json.dumps(asdict(spec)), str(folder / "interrupted")]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert owner.stdout and owner.stdout.readline().strip() == b"1"
    begin = time.monotonic()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    order = json.loads((folder / "interrupted" / "verl" / "order.json").read_text())
    while jobs(address)[order["submission_id"]] not in ("STOPPED", "FAILED"):
        assert time.monotonic() - begin < 60, "the job goes on"
        time.sleep(0.5)
    print(
        f"interrupt: the job was {jobs(address)[order['submission_id']]} after {time.monotonic() - begin:.1f} s"
    )


def timed(runs: dict[str, RunSpec], home: Path, workers_: int) -> float:
    """Carry out runs side by side; return the seconds."""
    begin = time.monotonic()
    with WorkerPool(workers_, home) as pool:
        for name, spec in runs.items():
            pool.submit(Job(name, "run", asdict(spec), str(home / name)))
        for event in pool.events():
            if isinstance(event, Step):
                print(
                    f"{time.monotonic() - begin:6.1f} s  {event.id}: step {event.step}/{event.steps}",
                    flush=True,
                )
            assert not isinstance(event, Failed), event
            if isinstance(event, Done):
                print(f"{time.monotonic() - begin:6.1f} s  {event.id}: done", flush=True)
    return time.monotonic() - begin


def main() -> None:
    """Carry out the whole check."""
    folder = Path(tempfile.mkdtemp(prefix="verl-cluster-"))
    with cluster(folder) as address:
        print(f"cluster: {address}", flush=True)
        runs = specs(address, folder)
        one = timed({"alone": runs["healthy"]}, folder / "alone", 1)
        four = timed(runs, folder / "four", 2)
        for name in runs:
            outcome = json.loads((folder / "four" / name / "outcome.json").read_text())
            assert outcome["status"] == "completed" and len(logged(folder / "four" / name)) == STEPS, outcome
            print(f"{name}: witness {outcome['witness']}")
        same = logged(folder / "alone" / "alone")[1], logged(folder / "four" / "healthy")[1]
        assert same[0]["critic/rewards/mean"] == same[1]["critic/rewards/mean"], (
            "a run does not repeat itself"
        )
        print(f"four candidates, two at a time: {four:.0f} s, one alone: {one:.0f} s, ratio {four / one:.2f}")
        interrupted(runs["healthy"], folder, address)
        assert not workers(), workers()
        assert set(jobs(address).values()) <= {"SUCCEEDED", "STOPPED", "FAILED"}
        print(f"the cluster goes on, its jobs: {sorted(jobs(address).values())}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
