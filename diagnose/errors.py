"""Errors that reach the user: each carries its exit code, a one-line message and, where there is one, the mend."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line (a public contract)."""

    OK = 0
    """Reproduced (specific or not), or no fault in a healthy log."""
    NOT_REPRODUCED = 1
    """Not reproduced, only partly, or the playbook's `expect` unmet."""
    USAGE = 2
    """Usage or playbook error."""
    LOGS = 3
    """Logs unusable."""
    RUN_FAILED = 4
    """Build, run or injection failed."""
    INCONCLUSIVE = 5
    """The evidence does not allow an answer."""
    INTERRUPTED = 130
    """Stopped by the user; the command that resumes was printed."""


class DiagnoseError(ValueError):
    """Base of all errors a user can cause.

    Attributes:
        mend: What to do about it.
        names: Words of somebody's files in the message, which ``--anonymize`` takes out.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, mend: str = "", names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.mend = mend
        self.names = names


class PlaybookError(DiagnoseError):
    """A playbook that does not validate; the message starts with ``file:line:col``."""


class LogError(DiagnoseError):
    """A log in which nothing usable is left."""

    exit_code = ExitCode.LOGS


class RunError(DiagnoseError):
    """A proxy that could not be built, or a run that could not be carried out."""

    exit_code = ExitCode.RUN_FAILED
