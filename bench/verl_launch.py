"""What the launcher costs beyond verl, and the way from verl's shards to a proxy: `make verl-launch`.

The same command is run twice, by the launcher and bare. The launcher's own time is what passes before verl's process
starts and after it ends, which other work on the machine disturbs less than a difference of walls. The bare run saves
a checkpoint, which is recognised, merged by the command that a refusal names, and cut. With ``--candidates`` five runs
compare four candidates side by side with one alone instead.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from proxy.api import Done, Failed, Job, WorkerPool
from proxy.checkpoint import open_checkpoint
from proxy.embedded import UnknownCheckpoint, resolve
from proxy.engines import verl, verl_command, verl_config, verl_job, verl_own
from proxy.engines.verl_env import find_python
from proxy.plan import make_plan
from proxy.specs import EngineSpec, RunSpec
from proxy.verl_checkpoint import recognised
from tests.verl.own import project

MODEL = "embedded:qwen3_moe"
STEPS = 4
SHIM = """#!/bin/sh
date +%s.%N > {folder}/begin
{python} "$@"
code=$?
date +%s.%N > {folder}/end
exit $code
"""


def timed_environment(folder: Path) -> str:
    """Return an interpreter that is verl's, and writes down when a process begins and ends."""
    python = find_python()
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").symlink_to(python.parent.parent / "lib")
    shim = folder / "bin" / "python"
    shim.write_text(SHIM.format(folder=folder, python=python))
    shim.chmod(0o755)
    return str(shim)


def run_of(folder: Path, python: str) -> RunSpec:
    """Return the run of the smallest project of a user."""
    text = project(folder / "project")
    wish = verl_config.Wish(
        verl_command.split(text), platform="cpu", directory=str(folder / "project"), overrides=()
    )
    model = json.loads((resolve(MODEL) / "config.json").read_text())
    begin = time.monotonic()
    ready = verl_config.prepare(wish, find_python(), model, 0, 1.0, STEPS)
    print(f"composing the configuration, once for all runs: {time.monotonic() - begin:.1f} s", flush=True)
    return RunSpec(
        MODEL, ready.recipe, 1, None, EngineSpec("verl", python, ready.trainer, launch=ready.launch)
    )


def ours(spec: RunSpec, folder: Path, environment: Path) -> tuple[float, float, float]:
    """Carry out a run; return (wall, seconds before verl's process, seconds after it)."""
    begin, clock = time.monotonic(), time.time()
    verl.run(spec, resolve(MODEL), lambda *_: None, folder)
    wall, over = time.monotonic() - begin, time.time()
    started, ended = (float((environment / name).read_text()) for name in ("begin", "end"))
    return wall, started - clock, over - ended


def bare(spec: RunSpec, home: Path) -> float:
    """Run the very command without the launcher, saving a checkpoint; return the seconds."""
    verl_job.write_job(home, spec, resolve(MODEL))
    line = verl_job.command_line(str(find_python()), home, spec, resolve(MODEL), os.environ)
    with tempfile.TemporaryDirectory(prefix="rlb-", ignore_cleanup_errors=True) as temp:
        words = [word.replace(verl_own.TEMP_PLACE, temp) for word in line["command"]]
        words = [
            *(w for w in words if verl_command.key(w) != "trainer.save_freq"),
            f"++trainer.save_freq={STEPS}",
        ]
        begin = time.monotonic()
        with (home / "bare.log").open("w") as log:
            subprocess.run(
                words, cwd=home.parent / "project", env=_env(line), stdout=log, stderr=log, check=True
            )
        return time.monotonic() - begin


def _env(line: Mapping[str, object]) -> dict[str, str]:
    found = line["environment"]
    assert isinstance(found, dict)
    return found


def merged(checkpoints: Path) -> None:
    """Take verl's checkpoint the way that the refusal names; check that the proxy builder takes what comes out."""
    try:
        resolve(str(checkpoints))
    except UnknownCheckpoint as refused:
        print(f"refused: {refused}; {refused.mend}")
    shards = recognised(checkpoints)
    assert shards is not None and shards.merged is None
    begin = time.monotonic()
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
    environment |= {"VERL_PLATFORM": "nvidia", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    words = shlex.split(shards.command(str(find_python())))
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    original, found = open_checkpoint(resolve(MODEL)), open_checkpoint(resolve(str(shards.target)))
    assert {n: t.shape for n, t in found.tensors.items()} == {n: t.shape for n, t in original.tensors.items()}
    plan = make_plan(shards.target, 12)
    print(
        f"merged in {time.monotonic() - begin:.0f} s: the original's {len(found.tensors)} tensors by name and shape; "
    )
    print(f"a proxy of {plan.kept} of {plan.experts} experts can be cut from it")


def candidates(spec: RunSpec, folder: Path) -> None:
    """Compare four candidates, two at a time, with one run alone: by the clock and by the CPU."""

    def timed(count: int) -> tuple[float, float]:
        home, cpu_s = folder / f"side_by_side_{count}", 0.0
        begin = time.monotonic()
        with WorkerPool(min(count, 2), home) as pool:
            for index in range(count):
                pool.submit(Job(str(index), "run", asdict(spec), str(home / str(index))))
            for event in pool.events():
                assert not isinstance(event, Failed), event
                if isinstance(event, Done):
                    cpu_s += json.loads((home / event.id / "outcome.json").read_text())["cpu_s"]
        return time.monotonic() - begin, cpu_s

    (one, one_cpu), (four, four_cpu) = timed(1), timed(4)
    load = os.getloadavg()[0]
    print(
        f"one alone: {one:.0f} s, {one_cpu:.0f} CPU seconds; four, two at a time: {four:.0f} s, {four_cpu:.0f} CPU"
    )
    print(f"seconds; ratio of the walls {four / one:.2f} (load of the machine at the end {load:.0f})")


def main() -> None:
    """Measure and print."""
    folder = Path(tempfile.mkdtemp(prefix="verl-launch-"))
    spec = run_of(folder, timed_environment(folder / "env"))
    if sys.argv[1:] == ["--candidates"]:
        candidates(replace(spec, engine=replace(spec.engine, python="")), folder)
        shutil.rmtree(folder)
        return
    wall, before, after = ours(spec, folder / "ours", folder / "env")
    print(
        f"by the launcher: {wall:.1f} s for {STEPS} steps, of them its own: {before:.2f} s before, {after:.2f} s after"
    )
    plain = bare(replace(spec, engine=replace(spec.engine, python="")), folder / "bare")
    print(f"bare: {plain:.1f} s; difference of the walls: {wall - plain:+.1f} s")
    merged(folder / "bare" / "checkpoints")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
