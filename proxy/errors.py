"""Errors of the proxy package that a user can cause: a one-line message and, where there is one, the mend."""

UNCALIBRATED = "use --strategy random or first_k, which compute nothing with the model"
"""What to do where a model cannot be computed."""


class ProxyError(ValueError):
    """Base of the errors below; `mend` says what to do about it.

    Args:
        message: What is wrong; joined to one line, because reports and logs print it as one.
        mend: What to do about it, "" where nothing is known.
    """

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(" ".join(message.split()))
        self.mend = mend


class CheckpointError(ProxyError):
    """A checkpoint folder that cannot be read, or whose tensors are not understood."""


class BuildError(ProxyError):
    """A proxy that cannot be built from a readable checkpoint: budget, strategy, calibration or output."""


class CannotPredict(BuildError):
    """A checkpoint whose next tokens cannot be predicted while it is streamed."""
