"""What verl's output says about a run's end: the reason, and the last lines of the process that it is about.

A run is half a dozen processes that write into one log; when one fails, the others complain too, and Ray wraps the
reason into its own. The reason is the last exception that is not about a lost process; whose it is stands in the
innermost ``ray::Name (pid=…)`` above it, or in Ray's notice of a death.
"""

from __future__ import annotations

import re
from pathlib import Path

RAY_LOGS = "ray_logs"
"""Folder of a job with the ends of Ray's own logs, kept where a run failed."""
LAST_LINES = 3
MAX_CHARS = 300

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(?:\(.*?\)\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$")
_NO_MODULE = re.compile(r"python[\d.]*: ((?:Error while finding|No module named|can't open file).*)$")
_HYDRA = re.compile(
    r"^(Could not override .*|Error (?:merging|parsing) .*|mismatched input .*|Cannot find primary config .*"
    r"|Missing mandatory value.*|Interpolation key .*|In '.*': Could not .*|.*[Uu]nrecognized arguments: .*)$"
)
_RAISED = re.compile(r"ray::([\w.<>]+?)(?:\.\w+)?\(\) \(pid=(\d+)")
_SPOKEN = re.compile(r"^\((?P<name>[^()]*?) ?pid=(?P<pid>\d+)(?:, ip=[^)]*)?\)\s?(?P<text>.*)$")
_DEATH = re.compile(r"class_name: (?P<name>[\w.<>]+)(?:(?!class_name:).)*?\bpid: (?P<pid>\d+)", re.DOTALL)
_KILLED = ("SIGKILL", "OOM killer", "OutOfMemoryError", "running low on memory")
_NOT_TELLING = ("ray.exceptions", "KeyboardInterrupt", "Exception ignored")


def lines_of(log: Path) -> list[str]:
    """Return the lines of a log without colours, empty where there is none."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [_ANSI.sub("", line).rstrip() for line in text.splitlines()]


def last_words(log: Path) -> str:
    """Return the most telling line of verl's output: the last exception that is not about a lost process."""
    lines = [line.strip() for line in lines_of(log)]
    if refused := next((found[1] for line in lines if (found := _HYDRA.match(line))), ""):
        return f"Hydra: {refused}"[:MAX_CHARS]
    errors = [found[1] for line in lines if (found := _ERROR.match(line) or _NO_MODULE.search(line))]
    if death := _death("\n".join(lines)):
        name, pid, killed = death
        why = "was killed (often: out of memory)" if killed else "died"
        return f"{name} (pid {pid}) {why}"
    telling = [error for error in errors if not error.startswith(_NOT_TELLING)]
    if telling or errors:
        return (telling or errors)[-1][:MAX_CHARS]
    return next((line[:MAX_CHARS] for line in reversed(lines) if line), "it wrote nothing")


def _death(text: str) -> tuple[str, str, bool] | None:
    """Return (name, pid, whether it was killed) of the process whose death Ray reports first, None for none."""
    found = _DEATH.search(text)
    if found is None:
        return None
    notice = text[found.end() : found.end() + 2000]
    return found["name"].rpartition(".")[2], found["pid"], any(sign in notice for sign in _KILLED)


def culprit(log: Path) -> tuple[str, str] | None:
    """Return (name, pid) of the process that the end of a run is about, None where the log doesn't say."""
    text = "\n".join(lines_of(log))
    if death := _death(text):
        return death[0], death[1]
    raised = _RAISED.findall(text)
    return (raised[-1][0].rpartition(".")[2], raised[-1][1]) if raised else None


def last_lines(home: Path) -> str:
    """Return the last lines of the process that a run failed in, on one line, and where there is more.

    Args:
        home: Job folder, with ``verl.log`` and, of a run that failed, the ends of Ray's logs.
    """
    log = home / "verl.log"
    who = culprit(log)
    said: list[str] = []
    speaker = "the log ends"
    more = log
    if who:
        name, pid = who
        speaker = f"{name} (pid {pid}) said last"
        spoken = [found for line in lines_of(log) if (found := _SPOKEN.match(line)) and found["pid"] == pid]
        said = [found["text"].strip() for found in spoken]
        for file in sorted((home / RAY_LOGS).glob(f"worker-*-{pid}.*")):
            if not any(said):
                said, more = lines_of(file), file
    said = [line for line in said if line] or [line.strip() for line in lines_of(log) if line.strip()]
    last = " | ".join(line[:MAX_CHARS] for line in said[-LAST_LINES:])
    return f"{speaker}: {last or 'nothing'}; all of it: {more}"
