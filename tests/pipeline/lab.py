"""A place to run `diagnose` in: an incident with its twins, a playbook, and the fake worker."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from diagnose.events import Tail
from diagnose.store import RunFolder
from tests.pipeline import fake_worker

PLAYBOOK = """\
version: 1
name: demo
symptom: kl_divergence_increase
original: {{faulty: incident.jsonl, healthy: [healthy_1.jsonl, healthy_2.jsonl]}}
proxy: {{from: checkpoint, checkpoint: "embedded:qwen3_moe", experts: 12}}
recipe: {{steps: {steps}, seeds: 2}}
candidates:
  - {{fault: excess_inner_epochs}}
  - {{fault: learning_rate_too_high}}
  - {{fault: reward_flipped}}
{more}
"""
RUNS = 8


@dataclass
class Lab:
    """A folder with an incident, and ways to run `diagnose` in it."""

    home: Path
    env: dict = field(default_factory=dict)

    @property
    def out(self):
        return self.home / "run"

    @property
    def folder(self):
        return RunFolder(self.out)

    @property
    def playbook(self):
        return self.home / "playbook.yaml"

    def write_playbook(self, steps=24, more=""):
        self.playbook.write_text(PLAYBOOK.format(steps=steps, more=more))

    def started(self):
        """Return the jobs that workers took up, in order, over all runners."""
        log = self.home / "starts.log"
        return log.read_text().split("\n")[:-1] if log.exists() else []

    def events(self):
        return Tail(self.folder.events).poll()

    def result(self):
        return json.loads(self.folder.result.read_text())

    def popen(self, *arguments, **env):
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "diagnose.cli", *map(str, arguments)],
            cwd=self.home,
            env=os.environ | self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_interrupts,
        )

    def run(self, *arguments, **env):
        """Run `diagnose` to its end; return (exit code, stdout, stderr)."""
        process = self.popen(*arguments, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def processes(self):
        """Return the pids of all runners and workers of this place that are alive."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                environ = (path / "environ").read_bytes()
                zombie = (path / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            except OSError:
                continue
            if str(self.home).encode() in environ and not zombie and int(path.name) != os.getpid():
                found.append(int(path.name))
        return found


def heed_interrupts():
    """Undo an ignored SIGINT, which processes inherit from a shell that put the tests into the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(condition, patience_s=20.0):
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def make_lab(home):
    """Return a lab in an empty folder."""
    fake_worker.write_log(home / "incident.jsonl", "learning_rate_too_high", 7, steps=24)
    for seed in (1, 2):
        fake_worker.write_log(home / f"healthy_{seed}.jsonl", None, 10 + seed, steps=24)
    lab = Lab(home)
    lab.env = {
        "DIAGNOSE_WORKER": f"{sys.executable} {fake_worker.__file__}",
        "FAKE_LOG": str(home / "starts.log"),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_DATA_HOME": str(home / "data"),
        "CI": "true",
    }
    lab.write_playbook()
    return lab
