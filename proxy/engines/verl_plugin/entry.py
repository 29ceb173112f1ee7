"""What verl imports in each of its processes (``VERL_USE_EXTERNAL_MODULES``): marker, platform, hooks.

verl is only half imported at this point, so everything that needs one of its modules waits until that module is
loaded.
"""

from __future__ import annotations

import os
import sys

from proxy.engines.verl_plugin import hooks, platform, vllm_hooks
from proxy.engines.verl_plugin.state import process
from proxy.engines.verl_plugin.table import MARKER, VLLM


def install() -> None:
    """Put everything in place, and say so."""
    if process().job["platform"] == "cpu":
        platform.patch_torch()
    hooks.install()
    if (
        process().job["backend"] == VLLM
    ):  # a worker of vLLM's that imports verl, whether or not it finds plugins
        vllm_hooks.register()
    print(f"{MARKER} (pid {os.getpid()})", file=sys.stderr, flush=True)


install()
