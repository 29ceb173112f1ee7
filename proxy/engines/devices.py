"""One place that knows devices: CPU, CUDA and Ascend NPU (torch_npu)."""

from __future__ import annotations

import importlib.util

import torch


class NoDevice(ValueError):
    """The requested device is not there."""


def pick(name: str = "auto") -> torch.device:
    """Return the device to run on.

    Args:
        name: "auto", "cpu", "cuda" or "npu".

    Raises:
        NoDevice: The named accelerator is not available.
    """
    if name in ("npu", "auto") and importlib.util.find_spec("torch_npu") is not None:
        import torch_npu  # noqa: F401  (registers the "npu" device with torch)

        if torch.npu.is_available():  # type: ignore[attr-defined]
            return torch.device("npu")
    if name == "npu":
        raise NoDevice("no Ascend NPU: torch_npu is missing or sees no device (see `diagnose doctor`)")
    if name in ("cuda", "auto") and torch.cuda.is_available():
        return torch.device("cuda")
    if name == "cuda":
        raise NoDevice("torch sees no CUDA device (see `diagnose doctor`)")
    return torch.device("cpu")
