"""What an Ascend machine needs for verl, piece by piece: driver, CANN, the torch pair, the vLLM pair.

Everything is read off files and variables: nothing of Ascend's is imported or run, so that a half-installed stack
can't take the doctor down with it. Not run on an NPU yet: the places are those that Huawei's installers document.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from proxy.engines import platforms

HOME = Path("usr/local/Ascend")
TOOLKITS = ("cann", "ascend-toolkit/latest", "ascend-toolkit")
VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


@dataclass(frozen=True)
class Piece:
    """One piece of the stack.

    Attributes:
        name: What it is.
        good: Whether it is as it has to be.
        detail: What was found.
        mend: What to do about it, "" where nothing is due.
    """

    name: str
    good: bool
    detail: str
    mend: str = ""


def here(
    environments: Mapping[str, Path], root: Path = Path("/"), variables: Mapping[str, str] = os.environ
) -> bool:
    """Whether anything says that this is an Ascend machine: devices, its folder, its variables, or torch_npu."""
    return bool(
        platforms.devices("npu", variables, root / "dev")
        or (root / HOME).is_dir()
        or any(name in variables for name in VARIABLES)
        or any("torch_npu" in versions(home) for home in environments.values())
    )


def versions(home: Path) -> dict[str, str]:
    """Return the distributions of an environment: name with underscores → version, by the names of their folders."""
    found = {}
    for pattern in (
        "lib/python3*/site-packages",
        "lib/python3*/dist-packages",
        "local/lib/python3*/dist-packages",
    ):
        for folder in home.glob(f"{pattern}/*.dist-info"):
            name, _, version = folder.name.removesuffix(".dist-info").partition("-")
            found[re.sub(r"[-.]", "_", name.lower())] = version
    return found


def pieces(
    environments: Mapping[str, Path], root: Path = Path("/"), variables: Mapping[str, str] = os.environ
) -> Iterator[Piece]:
    """Yield every piece of the stack.

    Args:
        environments: Python environments to look at: name → folder.
        root: Root of the file system.
        variables: Environment variables.
    """
    yield _driver(root, variables)
    yield _cann(root, variables)
    for name, home in environments.items():
        yield from _pairs(name, versions(home))


def _field(file: Path, name: str) -> str:
    """Return ``name=value`` from a file of such lines, "" where there is none."""
    if not file.is_file():
        return ""
    found = re.search(
        rf"^{name}\s*=\s*\[?([^\s\]]+)", file.read_text(errors="replace"), re.MULTILINE | re.IGNORECASE
    )
    return found[1] if found else ""


def _driver(root: Path, variables: Mapping[str, str]) -> Piece:
    version = _field(root / HOME / "driver" / "version.info", "Version")
    devices = platforms.devices("npu", variables, root / "dev")
    manager = (root / "dev" / "davinci_manager").exists()
    if not version:
        return Piece(
            "driver",
            False,
            f"no driver in {root / HOME / 'driver'}",
            "install the Ascend driver and firmware of this machine (as root), then: npu-smi info",
        )
    if not devices or not manager:
        missing = "/dev/davinci0 …" if not devices else "/dev/davinci_manager"
        return Piece(
            "driver",
            False,
            f"{version}, but {missing} is not visible",
            "in a container pass --device=/dev/davinciN for each NPU, /dev/davinci_manager, /dev/devmm_svm and "
            "/dev/hisi_hdc, and mount the driver; check ASCEND_RT_VISIBLE_DEVICES",
        )
    return Piece("driver", True, f"{version}, {len(devices)} devices")


def _cann(root: Path, variables: Mapping[str, str]) -> Piece:
    named = next((Path(variables[name]) for name in VARIABLES if variables.get(name)), None)
    places = [named] if named else [root / HOME / toolkit for toolkit in TOOLKITS]
    home = next((place for place in places if place.is_dir()), None)
    if home is None:
        return Piece(
            "CANN", False, f"no toolkit in {places[0]}", "install CANN: toolkit, kernels for this chip, NNAL"
        )
    infos = [
        home / "version.cfg",
        home / "version.info",
        *sorted(home.glob("*-linux/ascend_toolkit_install.info")),
    ]
    version = next(
        (
            found
            for file in infos
            for name in ("toolkit_installed_version", "version")
            if (found := _field(file, name))
        ),
        "unknown version",
    )
    if named is None:
        return Piece(
            "CANN",
            False,
            f"{version} in {home}, but its variables are not set",
            f"source {home / 'set_env.sh'} (and NNAL's {root / HOME / 'nnal/atb/set_env.sh'}) in this shell",
        )
    return Piece("CANN", True, f"{version} in {home}")


def _pairs(name: str, found: Mapping[str, str]) -> Iterator[Piece]:
    """Yield the pairs of one environment whose versions have to match."""
    torch, npu = found.get("torch", ""), found.get("torch_npu", "")
    if not torch or not npu:
        missing = "torch" if not torch else "torch_npu"
        wanted = f"torch_npu=={_release(torch)}" if torch else "torch"
        yield Piece(f"torch pair ({name})", False, f"{missing} is missing", f"pip install '{wanted}'")
    elif _release(torch) != _release(npu):
        yield Piece(
            f"torch pair ({name})",
            False,
            f"torch {torch} and torch_npu {npu} don't belong together",
            f"pip install torch=={_release(npu)}, or torch_npu=={_release(torch)}",
        )
    else:
        yield Piece(f"torch pair ({name})", True, f"torch {torch}, torch_npu {npu}")
    if name == "verl":
        vllm, ascend = found.get("vllm", ""), found.get("vllm_ascend", "")
        if not vllm or not ascend:
            missing = " and ".join(
                part for part, version in (("vllm", vllm), ("vllm-ascend", ascend)) if not version
            )
            wanted = f"pip install vllm-ascend{f'=={_release(vllm)}' if vllm else ''}"
            yield Piece(
                "vLLM pair (verl)", False, f"{missing} missing: verl has no rollout on an NPU", wanted
            )
        elif _release(vllm) != _release(ascend):
            detail = f"vllm {vllm} and vllm-ascend {ascend} don't belong together"
            yield Piece("vLLM pair (verl)", False, detail, f"pip install vllm=={_release(ascend)}")
        else:
            yield Piece("vLLM pair (verl)", True, f"vllm {vllm}, vllm-ascend {ascend}")


def _release(version: str) -> str:
    """Return the part of a version that pairs share: 2.7.1.post2 and 2.7.1+cpu are both 2.7.1."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return found[0] if found else version
