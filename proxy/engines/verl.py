"""Runs real verl: ``python -m verl.trainer.main_ppo`` in its own environment, with a fault or without.

verl is not edited and not imported. A run has a job folder (`verl_job`), a process between us and verl that ends
everything whatever happens to us (`verl_watch`), and a tail on verl's file logger. A run that is begun again begins
anew: what was left of it is removed first.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxy.engines import leases, verl_job, verl_submit, verl_watch
from proxy.engines.platforms import PLATFORMS
from proxy.engines.verl_env import find_python
from proxy.engines.verl_plugin.table import MARKER, ROLLOUT
from proxy.engines.verl_words import RAY_LOGS, last_lines, last_words
from proxy.specs import INJECTION_FAILED, FaultSpec, RunOutcome, RunSpec

OnStep = Callable[[int, dict[str, float]], None]

STALL_S = 1800.0
"""A run in which nothing was logged for so long is given up; start-up alone can take ten minutes."""
SHARED_S = 5.0
"""A shared file system may show the last records of a job a little after its end."""
ATTEMPTS = 3
RAY_LATE = ("timed out during startup", "Address already in use", "already in use by other components")
"""What Ray says when its own processes took more than its fixed 30 seconds (a busy machine), or when another program
took a port between Ray's choosing and its binding: worth another attempt."""


class RunFailed(ValueError):
    """verl ended without finishing the run; `mend` holds the last lines of the process that it is about."""

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(message)
        self.mend = mend


class InjectionFailed(ValueError):
    """The plugin did not do what the card asks for."""


def reports(home: Path) -> list[dict[str, Any]]:
    """Return the reports of all processes of a job so far."""
    return [json.loads(path.read_text()) for path in sorted((home / "reports").glob("*.json"))]


def merge(found: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[int, dict[str, float]]]:
    """Return (witness, metrics by step) of a whole job from the reports of its processes.

    Means are taken over all calls in all processes, events averaged over the processes that saw them, and so are
    metrics.
    """
    sums: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    largest: dict[str, float] = {}
    seen: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for report in found:
        for name, (total, count) in report["witness"].items():
            sums[name] += total
            calls[name] += count
        for name, value in report["largest"].items():
            largest[name] = max(value, largest.get(name, value))
        for step, values in report["metrics"].items():
            for name, value in values.items():
                seen[int(step)][name].append(value)
    means = {name: total / calls[name] for name, total in sums.items() if calls[name]}
    metrics = {
        step: {name: sum(all_) / len(all_) for name, all_ in values.items()} for step, values in seen.items()
    }
    return means | largest, metrics


def check_errors(home: Path) -> None:
    """Raise `InjectionFailed` where the plugin reported an error, or could not be loaded for one."""
    for report in reports(home):
        if report["error"]:
            raise InjectionFailed(f"{INJECTION_FAILED} in verl's {report['kind']}: {report['error']}")
    text = (home / "verl.log").read_text(encoding="utf-8", errors="replace")
    if MARKER not in text and f"/{verl_job.PACKAGE}/" in text:
        words = last_words(home / "verl.log")
        raise InjectionFailed(f"{INJECTION_FAILED}: the plugin does not load: {words}")


def check_plugin(home: Path, faults: Sequence[FaultSpec], trainer: str, backend: str = ROLLOUT) -> None:
    """Check that the plugin is where it has to be: verl goes on without a word where one does not load.

    Raises:
        InjectionFailed: It is not, or it reported an error.
    """
    log = home / "verl.log"
    found = reports(home)
    check_errors(home)
    # A job's output comes a little later than its reports.
    if not found and MARKER not in log.read_text(encoding="utf-8", errors="replace"):
        raise InjectionFailed(f"{INJECTION_FAILED}: the plugin was not loaded by verl")
    kinds = {report["kind"] for report in found}
    there = {hook for report in found for hook in report["hooks"]}
    for fault in faults:
        for hook in verl_job.places_of(fault, trainer, backend):
            place = f"{hook.module}:{hook.symbol}" if hook.module else ""
            if hook.process not in kinds or (place and place not in there):
                what = place or f"a {hook.process} of ours"
                raise InjectionFailed(f"{INJECTION_FAILED}: {what} is not in place in verl's {hook.process}")


class Tail:
    """Reads verl's file logger as it grows; a half-written last line waits for its end.

    verl opens the file anew for writing when it resumes: what was read before stays read, and of a step that is
    done again only the first record counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._seen: set[int] = set()

    def poll(self) -> list[tuple[int, dict[str, float]]]:
        """Return the records that are new: (step, metrics), null as NaN, strings left out."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.splitlines():
            record = json.loads(line)
            if int(record["step"]) in self._seen:
                continue
            self._seen.add(int(record["step"]))
            data = {
                name: float("nan") if value is None else float(value)
                for name, value in record["data"].items()
                if value is None or isinstance(value, int | float)
            }
            found.append((int(record["step"]), data))
        return found


class Launcher:
    """One verl process tree, or one Ray job; a context manager that leaves none of it behind."""

    def __init__(
        self, home: Path, command: Sequence[str], environment: Mapping[str, str], directory: str = ""
    ) -> None:
        # Ray puts sockets into this folder: their paths must stay under 108 bytes.
        self.temp = Path(tempfile.mkdtemp(prefix="rld-"))
        order = {
            "command": [*command, f"++ray_kwargs.ray_init._temp_dir={self.temp}"],
            "cwd": directory or str(home),
            "temp": str(self.temp),
            "kept": str(home / RAY_LOGS),
        }
        self._start(home, [sys.executable, "-I", verl_watch.__file__], order, environment)

    def _start(
        self, home: Path, start: Sequence[str], order: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self.log = home / "verl.log"
        self._usage = home / "usage.json"
        self._order = home / "order.json"
        # It may hold the user's tokens.
        self._order.touch(mode=0o600)
        self.log.touch()
        self._order.write_text(
            json.dumps({**order, "log": str(self.log), "usage": str(self._usage)}, indent=1)
        )
        self._words = [*start, str(self._order)]
        self.process = subprocess.Popen(
            self._words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**environment},
            start_new_session=True,  # Ctrl-C and our own end reach it by its standard input alone
        )

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End everything, and wait for it."""
        assert self.process.stdin
        self.process.stdin.close()
        if self.process.wait() < 0:  # the watcher itself was killed: what it would have ended is ours to end
            self._clear()
        shutil.rmtree(self.temp, ignore_errors=True)

    def _clear(self) -> None:
        _sweep(self.temp)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the tree, known after its end; 0 for a Ray job."""
        return float(json.loads(self._usage.read_text())["cpu_s"]) if self._usage.exists() else 0.0


class Submitter(Launcher):
    """One Ray job on a cluster; a context manager that leaves none behind."""

    def __init__(self, home: Path, python: Path, line: Mapping[str, Any], directory: str) -> None:
        self.temp = Path(tempfile.mkdtemp(prefix="rld-"))
        job = f"rl-diagnose-{secrets.token_hex(6)}"
        order = {
            "address": line["address"],
            "entrypoint": shlex.join(line["command"]),
            "submission_id": job,
            "runtime_env": {**line["runtime_env"], "env_vars": line["environment"]},
            "metadata": {"name": job, "run": str(home.parent), "directory": directory},
        }
        # What lets a client in (RAY_AUTH_MODE, RAY_AUTH_TOKEN …) goes along.
        foreign = [n for n in os.environ if n.startswith(("PYTHON", "RAY_")) and not n.startswith("RAY_AUTH")]
        base = {name: value for name, value in os.environ.items() if name not in foreign}
        self._start(home, [str(python), verl_submit.__file__], order, base)

    def _clear(self) -> None:
        subprocess.run([*self._words, "--stop"], stdin=subprocess.DEVNULL, check=False)


def _sweep(temp: Path) -> None:
    """Kill Ray's processes that have a file open in a temporary folder: it is all that can be known of them.

    Their parents are gone, and they have overwritten their command line and environment.
    """
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            ray = b"ray" in (entry / "cmdline").read_bytes()
            if ray and any(str(link.readlink()).startswith(f"{temp}/") for link in (entry / "fd").iterdir()):
                os.kill(int(entry.name), signal.SIGKILL)


def run(spec: RunSpec, checkpoint: Path, on_step: OnStep, folder: Path) -> RunOutcome:
    """Carry out one run and report each step through `on_step(step, metrics)`, as the local engine does.

    Args:
        spec: The run.
        checkpoint: Checkpoint folder, already resolved.
        on_step: Called for each record of verl's file logger, with the plugin's metrics of that step added.
        folder: Run folder; the job lies in its ``verl`` folder afterwards.

    Raises:
        NoVerl: There is no environment with verl.
        CannotExpress: verl cannot carry out this run.
        InjectionFailed: The plugin is not in place, or reported an error.
        RunFailed: verl ended early, stalled, or took longer than allowed.
    """
    python = find_python(spec.engine.python)
    home = (folder / "verl").absolute()
    launch = spec.engine.launch
    platform, count = (launch.platform, launch.accelerators) if launch and not launch.address else ("cpu", 0)
    with leases.hold(platform, count) as devices:
        begin = time.monotonic()
        for attempt in range(ATTEMPTS):
            settings = verl_job.write_job(home, spec, checkpoint.absolute())
            if launch and launch.address:
                line = verl_job.command_line(str(python), home, spec, checkpoint.absolute())
                started: Launcher = Submitter(home, python, line, launch.directory)
            else:
                own = verl_job.environment(home, os.environ, launch)
                if devices:
                    own[PLATFORMS[platform].visible] = ",".join(devices)
                words = [str(python), *verl_job.flags_of(spec), *settings]
                started = Launcher(home, words, own, launch.directory if launch else "")
            with started as launcher:
                code, steps = _follow(launcher, home, spec, on_step, begin)
            if code == 0 and steps >= spec.recipe.steps:
                break
            check_errors(home)
            if code == 0 and not steps and launch and launch.address:
                raise RunFailed(
                    f"nothing arrived in {home}", "the run folder must lie where all nodes see it"
                )
            reason = last_words(launcher.log)
            late = any(sign in reason for sign in RAY_LATE)
            if steps or not late or attempt == ATTEMPTS - 1:
                raise RunFailed(
                    f"verl ended with code {code} after {steps} steps: {reason}", last_lines(home)
                )
    for scrap in ("hf", "hydra", "checkpoints"):
        shutil.rmtree(home / scrap, ignore_errors=True)
    return RunOutcome(
        "completed",
        steps=steps,
        witness=merge(reports(home))[0],
        cpu_s=launcher.cpu_s(),
        wall_s=time.monotonic() - begin,
    )


class HeldOut:
    """Adds what the local engine logs at an evaluation: held-out reward less the training reward since the last one."""

    _NAME = re.compile(r"val-core/.+/reward/mean@\d+")

    def __init__(self) -> None:
        self._paid: list[float] = []

    def gap(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return `val-core/reward_gap` of a step with an evaluation, nothing for others and before training."""
        if "critic/rewards/mean" in metrics:
            self._paid.append(metrics["critic/rewards/mean"])
        held_out = [value for name, value in metrics.items() if self._NAME.fullmatch(name)]
        if not held_out or not self._paid:
            return {}
        paid = sum(self._paid) / len(self._paid)
        self._paid.clear()
        return {"val-core/reward_gap": sum(held_out) / len(held_out) - paid}


def _follow(launcher: Launcher, home: Path, spec: RunSpec, on_step: OnStep, begin: float) -> tuple[int, int]:
    """Follow verl to its end; return its exit code and the last step that it logged."""
    tail, steps, heard, checked = Tail(home / "verl.jsonl"), 0, time.monotonic(), False
    remote = spec.engine.launch is not None and bool(spec.engine.launch.address)
    code: int | None = None
    held_out, grace = HeldOut(), math.inf
    while code is None or (code == 0 and remote and steps < spec.recipe.steps and time.monotonic() < grace):
        code = launcher.process.poll()
        if code is not None and grace == math.inf:
            grace = time.monotonic() + SHARED_S
        for step, metrics in tail.poll():
            heard = time.monotonic()
            # What a job says comes later than what it logs.
            if step and not checked and launcher.log.stat().st_size:
                _check(home, spec)
                checked = True
            on_step(step, metrics | merge(reports(home))[1].get(step, {}) | held_out.gap(metrics))
            steps = max(steps, step)
        now = time.monotonic()
        if now - heard > STALL_S:
            raise RunFailed(
                f"verl logged nothing for {STALL_S:.0f} s: {last_words(launcher.log)}", last_lines(home)
            )
        if spec.engine.limit_s and now - begin > spec.engine.limit_s:
            raise RunFailed(f"verl took longer than {spec.engine.limit_s:g} s, at step {steps}")
        time.sleep(0.1)
    if steps and not checked:
        _check(home, spec)
    return code, steps


def _check(home: Path, spec: RunSpec) -> None:
    check_plugin(home, verl_job.faults_of(spec), spec.engine.trainer, verl_job.backend_of(spec.engine))
