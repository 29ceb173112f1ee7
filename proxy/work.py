"""The folder in which a build works: beside its output, hidden, taken up again by the next call after a kill.

What a build was about to do is in `key`, what its calibration is made from in another; what has another key goes,
and a folder that no build made is left alone. An error removes the folder. A kill, a lost connection, Ctrl-C or a
full disk leaves it, and the same build goes on where it stopped. Nothing ever stands under the final name but the
finished proxy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from proxy.errors import BuildError

OURS = {"key", "lock", "proxy", "calibration"}
"""What a build keeps in its folder."""


def whole_path(out: str | Path) -> Path:
    """Return an output folder from the root on, without ``..``, which would count on folders made on the way."""
    return Path(os.path.normpath(Path(out).absolute()))


def work_place(out: str | Path) -> Path:
    """Return where a build that will write `out` works."""
    out = whole_path(out)
    return out.parent / f".{out.name}.building"


@contextmanager
def work_folder(out: str | Path, key: str, calibration: str = "") -> Iterator[Path]:
    """Give the folder to work in; its ``proxy`` becomes `out` at the end, and the rest is removed.

    Args:
        out: The output folder.
        key: What the build is made from; another key means another build.
        calibration: What its calibration is made from, which a build of another size or strategy may share.

    Raises:
        BuildError: `out` exists and is not an empty folder, cannot be made, another build writes it, or the
            folder to work in is somebody else's.
    """
    check_free(out)
    out = whole_path(out)
    work = work_place(out)
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("a")
    except OSError as error:
        raise BuildError(f"cannot write to {out.parent}: {error.strerror}", "choose another --out") from error
    try:
        _lock(lock, out)
        _prepare(work, key, calibration)
        yield work
        if out.exists():
            out.rmdir()  # still empty, or this fails
        (work / "proxy").rename(out)
    except OSError as error:
        kept = _worth_keeping(work)
        if not kept:
            _remove(work)
        raise BuildError(
            f"cannot write {out}: {error.strerror or error}",
            f"free some space and give the same command again, which goes on from {work}; or remove that folder"
            if kept
            else "free some space, or choose another --out",
        ) from error
    except Exception as error:
        if not isinstance(error, _Busy):
            _remove(work)
        raise
    else:
        _remove(work)
    finally:
        lock.close()


class _Busy(BuildError):
    """Another build holds the folder, which therefore stays."""


def _lock(lock: IO[str], out: Path) -> None:
    """Take the folder for this process, where the system has locks."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise _Busy(f"another build is writing {out}", "wait for it, or choose another --out") from error


def _worth_keeping(work: Path) -> bool:
    """Say whether a layer was calibrated or a shard written; drop what was half-written."""
    for part in (work / "proxy").glob("*.part"):
        _remove(part)
    return (work / "calibration" / "state.json").exists() or any((work / "proxy").glob("*.safetensors"))


def _prepare(work: Path, key: str, calibration: str) -> None:
    """Empty the folder of anything that another build left; its calibration stays where it is the same."""
    for name, made_from in (("proxy", key), ("calibration", calibration)):
        mark = work / "key" if name == "proxy" else work / name / "key"
        if not mark.exists() or mark.read_text() != made_from:
            _remove(work / name)
        (work / name).mkdir(exist_ok=True)
        mark.write_text(made_from)


def _remove(path: Path) -> None:
    """Remove a file or folder; of a build's own what says so goes last."""
    for name in ("proxy", "calibration"):
        if (path / "lock").is_file() and (path / name).is_dir():
            shutil.rmtree(path / name, ignore_errors=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def check_free(out: str | Path) -> None:
    """Refuse an output folder that holds something.

    Raises:
        BuildError: `out` exists and is not an empty folder, the folder beside it that a build works in is not a
            build's, or the system takes no such names.
    """
    out, work = whole_path(out), work_place(out)
    try:
        taken = out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir())))
        foreign = work.is_symlink() or (work.exists() and not _ours(work))
    except OSError as error:
        raise BuildError(f"cannot write to {out}: {error.strerror}", "choose another --out") from error
    if taken:
        what = (
            f"output folder {out} is not empty" if out.is_dir() else f"{out} is there already, and no folder"
        )
        raise BuildError(what, "choose another --out, or move it away")
    if foreign:
        raise BuildError(
            f"a build of {out} works in {work}, which something else made",
            "move that away, or choose another --out",
        )


def _ours(work: Path) -> bool:
    """Say whether a folder was made by a build: it is empty, or has a build's files and no others."""
    names = {path.name for path in work.iterdir()} if work.is_dir() else {"a file"}
    return names <= {"lock"} or {"key", "lock"} <= names <= OURS


def check_space(out: str | Path, size: int, what: str) -> None:
    """Refuse a build that the disk cannot hold.

    Args:
        out: The output folder.
        size: Bytes that will be written.
        what: What they are, for the message.

    Raises:
        BuildError: There is less room.
    """
    home = next(parent for parent in whole_path(out).parents if parent.exists())
    free = shutil.disk_usage(home).free
    work = work_place(out)
    if work.is_dir():  # what an interrupted build has written already is not needed again
        free += sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    if free < size:
        raise BuildError(
            f"{what} need {_readable(size)}, and {home} has {_readable(free)} left",
            "free some space, or choose another --out",
        )


def _readable(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
