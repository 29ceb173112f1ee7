"""Copy stretches of one file into another at the speed of a plain copy, while another thread looks for NaN.

The kernel moves the bytes where it can (Linux: `sendfile`, as `shutil.copyfile` does), so they never pass through
this process; the check reads the same pages a second time from the system's cache.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from proxy.checkpoint import Checkpoint, TensorInfo, check_finite, read_chunks
from proxy.errors import CheckpointError

AT_ONCE = 8 << 20
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOTSOCK, errno.EXDEV)
_BY_KERNEL = hasattr(os, "sendfile") and sys.platform.startswith("linux")

Records = tuple[TensorInfo, tuple[int, ...] | None, int]
"""A tensor, which of its equal leading records are copied (None for all), and of how many."""


def spans(records: Iterable[Records]) -> Iterator[tuple[int, int]]:
    """Yield start and length of the stretches that records cover in their file; neighbours are one stretch."""
    start = length = 0
    for info, chosen, of in records:
        size = info.nbytes // of
        pieces = (
            [(info.start, info.nbytes)] if chosen is None else [(info.start + r * size, size) for r in chosen]
        )
        for first, count in pieces:
            if first != start + length:
                if length:
                    yield start, length
                start, length = first, 0
            length += count
    if length:
        yield start, length


def copy_span(source: BinaryIO, target: BinaryIO, start: int, length: int, go_on: Callable[[], bool]) -> None:
    """Append a stretch of one file to another, both opened without buffers.

    Args:
        source: File to read.
        target: File to write, at its end.
        start: First byte.
        length: Number of bytes.
        go_on: Asked every `AT_ONCE` bytes; the copy ends early where it says no.

    Raises:
        CheckpointError: The file ends before the stretch does.
        OSError: Whatever the system says of the target.
    """
    by_kernel, buffer = _BY_KERNEL, memoryview(b"")
    while length and go_on():
        if by_kernel:
            try:
                done = os.sendfile(target.fileno(), source.fileno(), start, min(length, AT_ONCE))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                by_kernel = False
                continue
        else:
            buffer = buffer or memoryview(bytearray(min(length, AT_ONCE)))
            source.seek(start)
            done = source.readinto(buffer[: min(length, AT_ONCE)])  # type: ignore[attr-defined]
            write_all(target, buffer[:done])
        if not done:
            raise CheckpointError(f"{Path(source.name).name} ends early", "complete the download")
        start, length = start + done, length - done


def write_all(target: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of some bytes to a file without a buffer, which may take a part of them at a time."""
    view = memoryview(data)
    while view:
        view = view[target.write(view) :]


class Checks:
    """A thread that reads what is copied and looks for NaN and infinity.

    Attributes:
        failed: Set as soon as something was found; `finish` raises it.
    """

    def __init__(self, checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> None:
        self.failed = threading.Event()
        self._checkpoint, self._pool = checkpoint, pool
        self._pending: list[Future[None]] = []

    def add(self, file: str, records: Iterable[Records]) -> None:
        """Check records of one of the checkpoint's files."""
        self._pending.append(self._pool.submit(self._check, file, list(records)))

    def finish(self) -> None:
        """Wait for what was added.

        Raises:
            CheckpointError: A tensor holds NaN or infinity, or is cut short.
        """
        for future in self._pending:
            future.result()
        self._pending.clear()

    def _check(self, file: str, records: list[Records]) -> None:
        """Read and check, in the thread."""
        try:
            with self._checkpoint.open(file) as source:
                for info, chosen, of in records:
                    for chunk in read_chunks(source, info, chosen, of):
                        if self.failed.is_set():
                            return
                        check_finite(chunk, info)
        except BaseException:
            self.failed.set()
            raise


@contextmanager
def checks(checkpoint: Checkpoint) -> Iterator[Checks]:
    """Give a thread that checks what is copied, for as long as the context lasts."""
    with ThreadPoolExecutor(1, "check") as pool:
        checking = Checks(checkpoint, pool)
        try:
            yield checking
        finally:
            checking.failed.set()  # whatever is still to be read is not wanted any more
