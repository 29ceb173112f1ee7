"""The detached runner: `python -m diagnose.runner RUN_DIR`, which outlives its viewer.

It is the only writer of the event file. Its last event is `end`, whatever happened, if the disk takes it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

from diagnose.errors import DiagnoseError, ExitCode
from diagnose.events import EndEvent, EventLog, NoteEvent
from diagnose.store import RunFolder, open_folder


class Interrupted(BaseException):
    """SIGTERM or SIGINT arrived. No `Exception`, so that no handler on the way takes it for a failure."""


def start(folder: RunFolder) -> subprocess.Popen[bytes]:
    """Start a runner for a folder, detached: it goes on when this process ends, by whatever signal.

    -P keeps the working folder off the module path: a folder named `proxy` there is the user's, not ours.
    """
    with folder.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "diagnose.runner", str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def main(arguments: list[str]) -> int:
    """Carry out the session in a run folder; return the exit code that a viewer should end with."""
    folder = open_folder(Path(arguments[0]))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    with folder.locked():
        log = EventLog(folder.events)
        status, code = _execute(folder, log)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        with suppress(OSError):  # the disk is full: a viewer notices by the lock
            log.append(EndEvent(status=status, exit_code=int(code)))
        log.close()
    return int(code)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Leave whatever is going on, once: a second signal must not disturb the clearing up."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise Interrupted


def _score_so_far(folder: RunFolder, log: EventLog, status: str) -> None:
    """Leave a verdict on the replays that are done; whatever keeps one from it, the session is over and kept."""
    try:
        from diagnose import pipeline

        pipeline.conclude_early(folder, log, status)
    except (OSError, ValueError) as error:
        with suppress(OSError):
            log.append(NoteEvent(text=f"no verdict on what is done: {error}"))
    except Exception:  # a defect of ours must not hide that the run was stopped
        traceback.print_exc()


def _execute(folder: RunFolder, log: EventLog) -> tuple[str, ExitCode]:
    """Run the pipeline; return status and exit code, having told the event file what went wrong."""
    try:
        # numpy and scipy come in here: only now has a failing import somewhere to be told.
        from diagnose import pipeline, session
        from diagnose.answer import exit_code

        result = pipeline.execute(folder, log)
        return result.status, exit_code(result, session.load(folder).expect)
    except Interrupted:
        _score_so_far(folder, log, "interrupted")
        return "interrupted", ExitCode.INTERRUPTED
    except OSError as error:
        message = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        mend = "make room or mend the disk; what is finished is kept"
        code = ExitCode.RUN_FAILED
    except DiagnoseError as error:
        message, mend, code = str(error), error.mend, error.exit_code
    except ValueError as error:  # of the proxy package, which doesn't know our exit codes
        message, mend, code = str(error), getattr(error, "mend", ""), ExitCode.RUN_FAILED
    except Exception as error:  # a defect of ours: the traceback is in runner.log, the viewer gets a sentence
        message = f"internal error: {type(error).__name__}: {error}"
        mend, code = f"please report it with {folder.log}", ExitCode.RUN_FAILED
    traceback.print_exc()
    with suppress(OSError):
        log.append(NoteEvent(level="error", text=message, mend=mend))
    _score_so_far(folder, log, "failed")
    return "failed", code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
