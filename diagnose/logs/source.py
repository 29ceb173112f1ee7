"""Where bytes come from: files, pipes, stdin, gzip; every one of them seekable and limited.

A compressed log is unpacked as it is read. A gzip bomb is told by its ratio: text of a log shrinks to a twentieth, at
most to a hundredth where it repeats itself, a bomb to a thousandth.
"""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from diagnose.errors import DiagnoseError, LogError
from diagnose.logs.text import printable

MAX_STREAM = 1 << 30
"""Most bytes taken from a pipe, which has to be kept to be read twice. Files have no limit."""
MAX_UNPACKED = 1 << 33
"""Most bytes that a compressed log may have when unpacked."""
MAX_RATIO = 300
"""Most bytes that one compressed byte may stand for."""
FREE_UNPACKED = 1 << 26
"""Bytes that are unpacked whatever the ratio."""
_IN_MEMORY = 64 << 20
_CHUNK = 1 << 16
GZIP = b"\x1f\x8b\x08"


def name_of(path: str | Path) -> str:
    """Return how a log is called in messages."""
    return "stdin" if str(path) == "-" else printable(str(path))


@contextmanager
def file_errors(source: str) -> Iterator[None]:
    """Turn what the operating system says of a file into an error for users; errors that are for them pass."""
    try:
        yield
    except OSError as error:
        mend = "correct the path; - reads from stdin" if isinstance(error, FileNotFoundError) else ""
        raise LogError(f"{source}: {error.strerror or error}", mend) from error
    except ValueError as error:
        if isinstance(error, DiagnoseError):
            raise
        raise LogError(f"{source}: no such file") from error  # a NUL byte in the path


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """Open a log so that it can be read twice: pipes are kept in memory, then on disk; gzip is unpacked.

    Only opening and copying are guarded here: an error of the caller's block is not the file's.

    Raises:
        LogError: The log can't be opened, or a pipe has too many bytes.
    """
    source = name_of(path)
    with SpooledTemporaryFile(_IN_MEMORY) as kept:
        stream = cast(BinaryIO, kept)
        with file_errors(source):
            if str(path) == "-":
                _copy(sys.stdin.buffer, stream, source)
            elif (file := Path(path)).is_file():
                stream = file.open("rb")
            else:
                with file.open("rb") as pipe:
                    _copy(pipe, stream, source)
            packed = stream.read(len(GZIP)) == GZIP
            stream.seek(0)
        with stream:
            yield cast(BinaryIO, Gunzip(stream)) if packed else stream


def _copy(pipe: BinaryIO, kept: BinaryIO, source: str) -> None:
    """Copy a pipe to its end, or to the limit."""
    size = 0
    while chunk := pipe.read(_CHUNK):
        size += len(chunk)
        if size > MAX_STREAM:
            raise LogError(f"{source}: more than {MAX_STREAM >> 20} MiB from a pipe", "name a file instead")
        kept.write(chunk)
    kept.seek(0)


class Gunzip(io.RawIOBase):
    """A gzip file as the stream that it unpacks to.

    Attributes:
        damage: What is wrong with the file, "" as long as nothing is. What comes before it is read.
    """

    def __init__(self, packed: BinaryIO) -> None:
        self.packed = packed
        self.damage = ""
        self._begin()

    def _begin(self) -> None:
        self.packed.seek(0)
        self.unpacker = zlib.decompressobj(31)
        self.waiting = b""
        self.taken = self.given = 0
        self.ended = False

    def seekable(self) -> bool:
        """Whether `seek` works: back to the beginning only."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go back to the beginning.

        Raises:
            io.UnsupportedOperation: For any other place.
        """
        if offset or whence:
            raise io.UnsupportedOperation("only back to the beginning")
        self._begin()
        return 0

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, fewer only at the end.

        Raises:
            LogError: The file unpacks to more than any log.
        """
        found: list[bytes] = []
        left = MAX_UNPACKED + 1 if size is None or size < 0 else size
        while left and not self.ended:
            data = self._some(left)
            left -= len(data)
            found.append(data)
        return b"".join(found)

    def _some(self, size: int) -> bytes:
        if self.unpacker.eof:  # another member may follow
            self.waiting = self.unpacker.unused_data or self.packed.read(_CHUNK)
            self.taken += len(self.waiting) if not self.unpacker.unused_data else 0
            if not self.waiting.startswith(GZIP[:2]):
                self.ended = True  # at the end, or padding
                return b""
            self.unpacker = zlib.decompressobj(31)
        if not self.waiting:
            self.waiting = self.packed.read(_CHUNK)
            self.taken += len(self.waiting)
            if not self.waiting:
                self.ended, self.damage = True, "the compressed file is cut off"
                return b""
        try:
            data = self.unpacker.decompress(self.waiting, min(size, 1 << 20))
        except zlib.error:
            self.ended, self.damage = True, "the compressed file is damaged"
            return b""
        self.waiting = self.unpacker.unconsumed_tail
        self.given += len(data)
        if self.given > max(FREE_UNPACKED, MAX_RATIO * self.taken) or self.given > MAX_UNPACKED:
            raise LogError(
                f"unpacks to more than {self.given >> 20} MiB from {self.taken >> 10} KiB, as no log does",
                "unpack it yourself if you trust it",
            )
        return data
