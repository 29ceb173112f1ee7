"""A worker that speaks the real protocol and makes up its curves: no torch, a run in milliseconds.

Curves follow the fault cards (each expectation shifts its metric), so that the pipeline around it has
something to score. Knobs, by environment: FAKE_STEP_S (seconds a step), FAKE_LOG (file to which every start
is appended), FAKE_DIE (run id that kills its worker at step 3), FAKE_FAIL (run id that ends as failed).
"""

import hashlib
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

from taxonomy.metrics import METRICS
from taxonomy.registry import library

STRENGTH = re.compile(r"-x([^-]+)-s")
LEVELS = {"log10": 0.05, "identity": 0.4, "logit": 0.4}


def record(fault, seed, step, strength=1.0, from_step=1):
    """Return one step's metrics: a level, a little noise, and the card's shifts from `from_step` on."""
    rng = random.Random(f"{seed}/{step}")
    data = {}
    for metric in METRICS:
        if not metric.ranks:
            continue
        level = LEVELS[metric.transform] * (1 + 0.02 * step * metric.name.startswith("critic/rewards"))
        data[metric.name] = level * (1 + 0.02 * rng.gauss(0, 1))
    if fault is not None and step >= from_step:
        for expectation in library()[fault].signature:
            if expectation.direction != "none":
                factor = 1 + 0.8 * strength if expectation.direction == "up" else 1 / (1 + 0.8 * strength)
                data[expectation.metric] *= factor
    return data


def write_log(path, fault, seed, steps=40, strength=1.0, from_step=1):
    """Write a verl file-logger log; what a test gives to `diagnose` as the original's."""
    lines = (
        json.dumps({"step": step, "data": record(fault, seed, step, strength, from_step)})
        for step in range(1, steps + 1)
    )
    Path(path).write_text("\n".join(lines) + "\n")


def say(job, event, **fields):
    print(json.dumps({"id": job, "event": event, **fields}), flush=True)


def note(text):
    if log := os.environ.get("FAKE_LOG"):
        with Path(log).open("a") as file:
            file.write(text + "\n")


def build(job):
    out = Path(job["spec"]["out"])
    out.mkdir(parents=True)
    (out / "config.json").write_text("{}")
    files = {"config.json": {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}}
    manifest = {"proxy_hash": "fake", "source_hash": "fake-original", "spec": job["spec"], "files": files}
    (out / "proxy_manifest.json").write_text(json.dumps(manifest))
    say(job["id"], "done", result={"path": str(out), "manifest": manifest})


def acts_not(fault, recipe):
    """Without updates a fault of the optimizer does nothing; nor does one of the loss in one update a step."""
    frozen = recipe["lr"] < 1e-9 and fault["stage"] == "optimizer"
    return frozen or (recipe["mini_batches"] == 1 and fault["stage"] == "loss")


def run(job):
    spec, out = job["spec"], Path(job["out"])
    fault, steps = spec["fault"], spec["recipe"]["steps"]
    if job["id"] == os.environ.get("FAKE_FAIL"):
        outcome = {"status": "failed", "reason": "no luck", "steps": 0, "witness": {}}
        (out / "outcome.json").write_text(json.dumps(outcome))
        say(job["id"], "failed", reason="no luck")
        return
    with (out / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            if step == 3 and job["id"] == os.environ.get("FAKE_DIE"):
                print("something dreadful", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(float(os.environ.get("FAKE_STEP_S", "0")))
            name, start = (fault["id"], fault["from_step"]) if fault else (None, 1)
            named = STRENGTH.search(job["id"])  # a run of a bank has a key and no name
            strength = float(named[1]) if fault and named else 1.0
            if fault and acts_not(fault, spec["recipe"]):
                strength = 0.0
            data = record(name, 1000 + spec["seed"], step, strength, from_step=start)
            print(json.dumps({"step": step, "data": data}), file=file, flush=True)
            say(job["id"], "step", step=step, steps=steps, data=data)
    witness = {library()[fault["id"]].witness.name: 1e9} if fault else {}
    outcome = {
        "status": "completed",
        "reason": "",
        "steps": steps,
        "witness": witness,
        "cpu_s": 0.0,
        "wall_s": 0.0,
    }
    partial = out / ".outcome.json"
    partial.write_text(json.dumps(outcome))
    partial.rename(out / "outcome.json")
    say(job["id"], "done", result=outcome)


def main():
    for line in sys.stdin:
        job = json.loads(line)
        note(f"{job['job']} {job['id']}")
        say(job["id"], "started")
        if job["job"] == "build":
            build(job)
        elif job["job"] == "run":
            run(job)
        elif job["job"] == "hash":
            say(job["id"], "done", result={"hash": "fake-original"})
        else:
            say(job["id"], "failed", reason=f"unknown job {job['job']!r}")


if __name__ == "__main__":
    main()
