"""A CPU as a verl platform: registered under the name "cpu", selected by ``VERL_PLATFORM=cpu``.

verl has no such platform: without it a machine without an accelerator is taken for an NVIDIA one.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(types.ModuleType):
    """What verl asks of ``torch.cuda``, answered for a CPU: nothing to wait for, no memory to count."""

    def __init__(self) -> None:
        super().__init__("rl_diagnose_cpu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("is_available", "is_bf16_supported"):
            return lambda *_a, **_k: True
        if name == "get_rng_state":
            return lambda *_a, **_k: torch.get_rng_state()
        if name == "set_rng_state":
            return lambda state, *_a, **_k: torch.set_rng_state(state)
        if name == "mem_get_info":
            return lambda *_a, **_k: (0, 0)
        if name == "memory":
            return self
        if name == "device_count":
            return lambda: 1
        if name == "get_device_name":
            return lambda *_a, **_k: "cpu"
        return lambda *_a, **_k: 0


@PlatformRegistry.register("cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """One logical device a process. To Ray it is a "GPU": verl's placement counts only GPU and NPU resources."""

    _module = _Device()
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _module

    def is_available(self) -> bool:
        """Return True: there is always a CPU."""
        return True

    def current_device(self) -> str:
        """Return the device that tensors are moved to; verl passes it to ``Tensor.to``."""
        return "cpu"

    def device_count(self) -> int:
        """Return the logical devices of a process."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing."""

    def empty_cache(self) -> None:
        """Do nothing."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """Return that there is none."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return the collective backend."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable that Ray sets for its "GPU" resource."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Do nothing around a block."""
        yield

    def profiler_start(self) -> None:
        """Do nothing."""

    def profiler_stop(self) -> None:
        """Do nothing."""

    def ray_resource_name(self) -> str:
        """Return the logical resource that stands for a device."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return what keeps Ray's hands off device visibility."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """Return False: weights travel through Ray."""
        return False

    def cudart(self) -> None:
        """Return None: there is no such library."""


def patch_torch() -> None:
    """Two calls that verl makes whatever the device: a doubled backend string, and pinned memory."""
    distributed: Any = torch.distributed
    original = distributed.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(backend, str) and backend.split(",") == ["cpu:gloo", "cpu:gloo"]:
            backend = "gloo"
        return original(backend, *args, **kwargs)

    distributed.init_process_group = init_process_group
    torch.Tensor.pin_memory = lambda tensor, *_a, **_k: tensor  # type: ignore[method-assign]
