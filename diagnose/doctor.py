"""What works on this machine, and the mend for what doesn't. torch is asked in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from diagnose import ascend
from proxy.engines.verl_env import TESTED, NoVerl, find_python, version_of

DISTRIBUTION = "rl-diagnose"
PACKAGES = ("diagnose", "proxy", "taxonomy")
PROBE_S = 120.0
"""Patience for importing torch: seconds on a laptop, a minute from a cold network disk."""
LOW_DISK_GIB = 2.0

_TORCH_PROBE = """
import json, torch
from torch import cuda
names = [cuda.get_device_name(i) for i in range(cuda.device_count())] if cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "cuda": names}))
"""
_NPU_PROBE = """
import json, torch_npu
from torch import npu
names = [npu.get_device_name(i) for i in range(npu.device_count())] if npu.is_available() else []
print(json.dumps({"npu": names}))
"""


@dataclass(frozen=True)
class Check:
    """One answer.

    Attributes:
        name: What was looked at.
        status: "ok", "warn" (works, with a catch), "absent" (optional and not there) or "fail".
        detail: What was found.
        mend: What to do about it, "" where nothing is due.
    """

    name: str
    status: str
    detail: str
    mend: str = ""


def examine() -> list[Check]:
    """Return all checks; a check that itself goes wrong says so and the others go on."""
    probes: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("python", _python),
        ("torch", _torch),
        ("torch_npu", _torch_npu),
        ("transformers", _transformers),
        ("verl", _verl),
        ("packages", _packages),
        ("workers", _workers),
        ("disk", _disk),
    )
    checks = []
    for name, probe in probes:
        try:
            checks.append(probe())
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            checks.append(Check(name, "fail", f"could not be examined: {error}"))
    return checks + _ascend()


def _ascend() -> list[Check]:
    """The pieces of an Ascend stack, where anything of one is here."""
    environments = {"diagnose": Path(sys.prefix)}
    with suppress(NoVerl):
        environments["verl"] = find_python().parent.parent
    if not ascend.here(environments):
        return []
    return [
        Check(f"ascend {piece.name}", "ok" if piece.good else "fail", piece.detail, piece.mend)
        for piece in ascend.pieces(environments)
    ]


def _installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, None where it isn't installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _ask(code: str) -> tuple[dict[str, object] | None, str]:
    """Run Python code in a process of its own; return what it printed as JSON, or None and its last words."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=PROBE_S, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        answer: dict[str, object] = json.loads(lines[-1])
        return answer, ""
    words = done.stderr.strip().splitlines()
    return None, words[-1] if words else f"exit code {done.returncode}"


def _python() -> Check:
    return Check("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")


def _torch() -> Check:
    found = _installed("torch")
    if found is None:
        return Check("torch", "fail", "not installed", "make setup, or: pip install torch")
    answer, words = _ask(_TORCH_PROBE)
    if answer is None:
        return Check(
            "torch",
            "fail",
            f"{found} is installed but does not import: {words}",
            "source CANN's set_env.sh; on a machine without an NPU uninstall torch_npu, or set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
            if "backend extension" in words
            else "reinstall torch for this machine (CPU or CUDA build)",
        )
    devices = ["cpu", *map(str, answer["cuda"])] if isinstance(answer["cuda"], list) else ["cpu"]
    return Check("torch", "ok", f"{answer['version']}, devices: {', '.join(devices)}")


def _torch_npu() -> Check:
    found = _installed("torch_npu") or _installed("torch-npu")
    if found is None:
        return Check(
            "torch_npu", "absent", "not installed", "only for Ascend: pip install 'rl-diagnose[npu]'"
        )
    answer, words = _ask(_NPU_PROBE)
    if answer is None:
        return Check(
            "torch_npu",
            "fail",
            f"{found} is installed but does not import: {words}",
            "install the release that matches torch's version, and source the CANN environment",
        )
    names = answer["npu"]
    if not names:
        return Check(
            "torch_npu",
            "warn",
            f"{found}, but no device is visible",
            "check npu-smi info and ASCEND_RT_VISIBLE_DEVICES",
        )
    return Check("torch_npu", "ok", f"{found}, devices: {names}")


def _transformers() -> Check:
    found = _installed("transformers")
    if found is None:
        return Check("transformers", "fail", "not installed", "make setup, or: pip install transformers")
    return Check("transformers", "ok", found)


def _verl() -> Check:
    """An environment of its own: verl's pins and ours don't agree."""
    try:
        python = find_python()
    except NoVerl as error:
        return Check("verl", "absent", str(error), f"only for --engine verl: {error.mend}")
    root = python.parent.parent
    found = version_of(python)
    if found != TESTED:
        return Check("verl", "warn", f"{found} in {root}; tested with {TESTED}", "make verl-env")
    return Check("verl", "ok", f"{found} in {root}")


def _packages() -> Check:
    """The three package names also belong to foreign distributions: all three must come from one place."""
    homes: dict[str, Path] = {}
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            return Check("packages", "fail", f"package {name} has no source", f"pip install {DISTRIBUTION}")
        homes[name] = Path(spec.origin).resolve().parent.parent
    owners = packages_distributions()
    foreign = sorted({o for name in PACKAGES for o in owners.get(name, ()) if o != DISTRIBUTION})
    if len(set(homes.values())) > 1:
        where = ", ".join(f"{name} from {home}" for name, home in homes.items())
        return Check(
            "packages",
            "fail",
            f"the three packages come from different places: {where}",
            f"uninstall {', '.join(foreign) or 'the foreign package'}, or use an environment of its own",
        )
    if foreign:
        return Check(
            "packages",
            "warn",
            f"{', '.join(foreign)} installs a package of the same name; ours is found first",
            "use an environment of its own: the order may change with the next installation",
        )
    return Check("packages", "ok", f"{', '.join(PACKAGES)} from {homes['diagnose']}")


def _workers() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        return Check(
            "workers", "warn", "1 core", "the replays run one after the other; expect twice the time"
        )
    return Check("workers", "ok", f"{cores} cores, so {cores} replays side by side")


def _disk() -> Check:
    from diagnose.store import default_parent

    folder = default_parent()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    detail = f"{free:.1f} GiB free for run folders in {folder}"
    if not os.access(existing, os.W_OK):
        return Check("disk", "fail", f"{existing} is not writable", "name a folder with --out")
    if free < LOW_DISK_GIB:
        return Check("disk", "warn", detail, "delete old run folders, or name a folder with --out")
    return Check("disk", "ok", detail)
