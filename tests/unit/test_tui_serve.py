"""The screen in a browser."""

import sys

import pytest

from diagnose.cli import invoke
from diagnose.errors import ExitCode
from diagnose.tui.serve import is_served


def test_without_the_extra_the_mend_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    assert invoke(["--serve"]) == ExitCode.USAGE
    assert "rl-diagnose[serve]" in capsys.readouterr().err


def test_the_server_starts_this_program_on_this_machine_alone(monkeypatch: pytest.MonkeyPatch):
    calls = []

    class Server:
        def __init__(self, command: str, host: str, port: int, title: str) -> None:
            calls.append((command, host, port))

        def serve(self) -> None:
            calls.append("served")

    module = type(sys)("textual_serve.server")
    module.Server = Server  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "textual_serve", type(sys)("textual_serve"))
    monkeypatch.setitem(sys.modules, "textual_serve.server", module)
    assert invoke(["--serve", "--port", "9"]) == ExitCode.OK
    (command, host, port), served = calls
    assert command.endswith("-m diagnose") and (host, port, served) == ("localhost", 9, "served")


def test_a_served_process_needs_no_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TEXTUAL_DRIVER", raising=False)
    assert not is_served()
    monkeypatch.setenv("TEXTUAL_DRIVER", "textual.drivers.web_driver:WebDriver")
    assert is_served()
