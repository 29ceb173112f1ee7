"""Stands between the launcher and verl, and leaves no process behind: run by path, standard library alone.

``python verl_watch.py ORDER.json`` starts the command of the order and ends when the command ends, when its own
standard input closes (the launcher is gone, by whatever signal), or at SIGTERM. It is the reaper of everything the
command started, however often that detached itself, and kills it before it ends itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

PATIENCE_S = 1.5
SAMPLE_S = 2.0
KEPT_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def parents() -> dict[int, int]:
    """Return process → parent of everything that runs here (Linux; elsewhere nothing)."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
    return found


def descendants(root: int) -> list[int]:
    """Return all processes below one."""
    up = parents()
    below, level = [], {root}
    while level:
        level = {process for process, parent in up.items() if parent in level}
        below += sorted(level)
    return below


def cpu_s(process: int) -> float:
    """Return the CPU seconds of a process so far, 0 where it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reap() -> dict[int, int]:
    """Collect children that have ended: process → status."""
    ended: dict[int, int] = {}
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not process:
            return ended
        ended[process] = status


def clear(temp: str) -> None:
    """End everything below this process, politely first, and remove the temporary folder."""
    for number, patience in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, PATIENCE_S)):
        deadline = time.monotonic() + patience
        while (rest := descendants(os.getpid())) and time.monotonic() < deadline:
            for process in rest:
                try:
                    os.kill(process, number)
                except OSError:
                    continue
            reap()
            time.sleep(0.05)
    shutil.rmtree(temp, ignore_errors=True)


def keep_logs(temp: str, kept: str) -> None:
    """Copy the ends of Ray's own logs: they say why a process died that said nothing itself."""
    for log in sorted(Path(temp).glob("session_*/logs/*")):
        if log.is_file() and not log.parent.parent.is_symlink() and log.stat().st_size:
            Path(kept).mkdir(parents=True, exist_ok=True)
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - KEPT_BYTES))
                (Path(kept) / log.name).write_bytes(file.read())


class Stop(BaseException):
    """A signal asked this process to end."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Stop


def _die_with_us() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def watch(order: dict[str, str | list[str]], used: dict[int, float]) -> int:
    """Run the command to its end, or ours; return its exit code, and in `used` the CPU seconds by process."""
    linux = sys.platform.startswith("linux")
    if linux:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with Path(str(order["log"])).open("ab") as log:
        child = subprocess.Popen(
            [*order["command"]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=str(order["cwd"]),
            preexec_fn=_die_with_us if linux else None,
        )
    code = 1
    looked = 0.0
    try:
        while True:
            if time.monotonic() - looked > SAMPLE_S:
                looked = time.monotonic()
                used |= {process: cpu_s(process) for process in descendants(os.getpid())}
            ready, _, _ = select.select([sys.stdin], [], [], 0.1)
            if ready and not os.read(sys.stdin.fileno(), 1024):
                break
            ended = reap()
            if child.pid in ended:
                code = os.waitstatus_to_exitcode(ended[child.pid])
                break
    except Stop:
        pass
    return code


def main() -> int:
    """Carry out one order."""
    order = json.loads(Path(sys.argv[1]).read_text())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    code = 1
    used: dict[int, float] = {}
    try:
        code = watch(order, used)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if code:
            with contextlib.suppress(OSError):  # the disk is full: ending everything comes first
                keep_logs(order["temp"], order["kept"])
        clear(order["temp"])
        Path(order["usage"]).write_text(json.dumps({"cpu_s": sum(used.values())}))
    return code


if __name__ == "__main__":
    sys.exit(main())
