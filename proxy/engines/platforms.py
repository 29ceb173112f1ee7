"""The one place that knows accelerators from outside: names, device files, environment (torch-free).

verl calls its platforms by vendor and chooses one by itself, by what can be imported: where torch_npu can be, it takes
the machine for a Huawei one, whatever else is in it. So ``VERL_PLATFORM`` is always set, from here. And torch itself
loads whatever backend is installed: with torch_npu but without CANN, ``import torch`` fails. So that is switched off
where a run is not for an NPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Platform:
    """One kind of accelerator.

    Attributes:
        name: Our name, verl's ``trainer.device``.
        vendor: verl's name of the platform (``VERL_PLATFORM``).
        visible: Environment variable that lists the devices a process may see, "" for none.
        files: Pattern of the device files' names in ``/dev``, "" for none.
        environment: Variables that every run on it gets.
    """

    name: str
    vendor: str
    visible: str = ""
    files: str = ""
    environment: tuple[tuple[str, str], ...] = ()


_NO_BACKENDS = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

PLATFORMS = {
    "cpu": Platform("cpu", "cpu", environment=(("VERL_ENGINE_DEVICE", "cuda"), _NO_BACKENDS)),
    "cuda": Platform("cuda", "nvidia", "CUDA_VISIBLE_DEVICES", r"nvidia\d+", (_NO_BACKENDS,)),
    "npu": Platform(
        "npu",
        "huawei",
        "ASCEND_RT_VISIBLE_DEVICES",
        r"davinci\d+",
        # Several candidates share a host: each takes whatever ports are free for its HCCL sockets.
        (("HCCL_HOST_SOCKET_PORT_RANGE", "auto"), ("HCCL_NPU_SOCKET_PORT_RANGE", "auto")),
    ),
}
"""Platforms by name. ``VERL_ENGINE_DEVICE`` has a CPU take verl's engine class for CUDA: it has none of its own."""


def devices(
    platform: str, environment: Mapping[str, str] = os.environ, dev: Path = Path("/dev")
) -> list[str]:
    """Return the indices of a platform's devices that this process may use, as its variable would list them."""
    known = PLATFORMS[platform]
    listed = environment.get(known.visible) if known.visible else None
    if listed is not None:
        return [item.strip() for item in listed.split(",") if item.strip()]
    if not known.files or not dev.is_dir():
        return []
    found = (re.sub(r"\D", "", path.name) for path in dev.iterdir() if re.fullmatch(known.files, path.name))
    return sorted(found, key=int)


def detect(environment: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> str:
    """Return the platform of this machine by its device files; "cpu" where there are none."""
    return next((name for name in ("npu", "cuda") if devices(name, environment, dev)), "cpu")
