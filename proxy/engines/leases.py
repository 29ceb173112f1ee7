"""Accelerators of this machine, lent to one run at a time: candidates side by side never share one (torch-free).

Each device has a lock file; a lease ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from proxy.engines import platforms

WAIT_S = 0.5


class TooFew(ValueError):
    """This machine has fewer accelerators than a run takes."""


def home() -> Path:
    """Return the folder of the lock files, one for each user."""
    folder = Path(tempfile.gettempdir()) / f"rl-diagnose-leases-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def hold(
    platform: str,
    count: int,
    folder: Path | None = None,
    wait: Callable[[], None] = lambda: time.sleep(WAIT_S),
) -> Iterator[tuple[str, ...]]:
    """Hold devices for the length of a block; wait until enough are free.

    Args:
        platform: "cpu", "cuda" or "npu".
        count: How many.
        folder: Folder of the lock files.
        wait: What to do while too few are free.

    Raises:
        TooFew: There are not so many, free or not.
    """
    there = platforms.devices(platform) if count else []
    if len(there) < count:
        raise TooFew(f"a run takes {count} accelerators ({platform}), this machine has {len(there)}")
    held: dict[str, IO[bytes]] = {}
    folder = folder or home()
    try:
        while len(held) < count:
            for device in there:
                if len(held) < count and device not in held and (lock := _taken(folder, platform, device)):
                    held[device] = lock
            if len(held) < count:
                # All or none: two runs that each hold half of what they need would wait for ever.
                for lock in held.values():
                    lock.close()
                held.clear()
                wait()
        yield tuple(held)
    finally:
        for lock in held.values():
            lock.close()


def _taken(folder: Path, platform: str, device: str) -> IO[bytes] | None:
    """Return the lock of a device, None where another run has it."""
    lock = (folder / f"{platform}-{device.replace('/', '_')}.lock").open("ab")
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    lock.close()
    return None
