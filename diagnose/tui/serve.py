"""The screen in a browser, through textual-serve (an extra: ``pip install 'rl-diagnose[serve]'``).

Whoever reaches the port can do what the screen can do, start training runs included: it listens on this machine
alone unless another address is asked for.
"""

from __future__ import annotations

import os
import shlex
import sys

from diagnose.errors import DiagnoseError


def is_served() -> bool:
    """Return whether this process is a screen that a server started: it has no terminal, and needs none."""
    return "TEXTUAL_DRIVER" in os.environ


def serve(host: str, port: int) -> None:
    """Serve the screen until interrupted, one program a browser tab.

    Raises:
        DiagnoseError: textual-serve is not installed.
        OSError: The port is taken.
    """
    try:
        from textual_serve.server import Server
    except ImportError as error:
        raise DiagnoseError(
            "the screen can't be served: textual-serve is not installed", "pip install 'rl-diagnose[serve]'"
        ) from error
    command = shlex.join([sys.executable, "-P", "-m", "diagnose"])
    Server(command, host=host, port=port, title="diagnose").serve()
