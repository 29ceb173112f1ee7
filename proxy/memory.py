"""What the process holds, and how it gives back what it no longer needs."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

LARGE_BLOCK = 1 << 20
_M_MMAP_THRESHOLD = -3


def peak_memory() -> int:
    """Return the most memory that this process ever held, in bytes; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def give_back_large_blocks() -> None:
    """Have freed blocks from `LARGE_BLOCK` bytes on go back to the system at once, for the rest of the process.

    glibc raises its own limit to the largest block that was ever freed, up to 32 MiB; the weights of experts then come
    from a heap that fragments, and a build holds half as much again as it uses. Elsewhere nothing happens.
    """
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
