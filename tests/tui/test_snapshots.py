"""Pictures of the screens as a human accepted them; `pytest tests/tui --snapshot-update` renews them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList

from diagnose.tui.app import DiagnoseApp
from diagnose.tui.plan import PastRun
from tests.tui.synthetic import CARDS, STEPS, FakeBackend, Script, play
from tests.tui.test_flows import screen_text, to_candidates, to_symptom, until


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The time of day at which a run began is the terminal's own."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("size", [(80, 24), (200, 50)], ids=["80x24", "200x50"])
def test_verdict(snap_compare, tmp_path: Path, size: tuple[int, int]) -> None:
    """The run screen of a finished run: verdict at 80×24, all three panes at 200×50."""
    play(Script(tmp_path / "old"))

    async def finished(pilot: Pilot) -> None:
        await until(pilot, lambda: "Reproduced and specific" in screen_text(pilot.app), patience=10)
        await until(pilot, lambda: bool(pilot.app.screen.query_one("#ranking").has_focus), patience=10)
        await pilot.pause(0.3)

    app = DiagnoseApp(FakeBackend(tmp_path), tmp_path / "old", cards=CARDS, poll_s=0.05)
    assert snap_compare(app, terminal_size=size, run_before=finished)


def test_candidates(snap_compare, tmp_path: Path) -> None:
    """The candidates of a playbook at 80×24."""
    app = DiagnoseApp(FakeBackend(tmp_path), cards=CARDS)
    assert snap_compare(app, terminal_size=(80, 24), run_before=to_candidates)


def test_home(snap_compare, tmp_path: Path) -> None:
    """The first screen, with a log opened lately and a run that can be resumed."""
    backend = FakeBackend(tmp_path)
    backend.logs.append(Path("logs/incident.jsonl"))
    backend.past.append(PastRun(Path("kl_spike-20260101-120000"), "kl_spike", "↻ resumable"))

    async def filled(pilot: Pilot) -> None:
        sources = pilot.app.screen.query_one("#sources", OptionList)
        await until(pilot, lambda: sources.option_count == 7)

    app = DiagnoseApp(backend, cards=CARDS)
    assert snap_compare(app, terminal_size=(80, 24), run_before=filled)


@pytest.mark.parametrize("size", [(80, 24), (200, 50)], ids=["80x24", "200x50"])
def test_symptom(snap_compare, tmp_path: Path, size: tuple[int, int]) -> None:
    """What the log shows, with onset, evidence, curve and what is ruled out."""

    async def drawn(pilot: Pilot) -> None:
        await to_symptom(pilot)
        await pilot.pause(0.3)

    app = DiagnoseApp(FakeBackend(tmp_path), cards=CARDS)
    assert snap_compare(app, terminal_size=size, run_before=drawn)


def test_card(snap_compare, tmp_path: Path) -> None:
    """A whole fault card over the candidates."""

    async def opened(pilot: Pilot) -> None:
        await to_candidates(pilot)
        await pilot.press("i")
        await pilot.pause(0.3)

    app = DiagnoseApp(FakeBackend(tmp_path), cards=CARDS)
    assert snap_compare(app, terminal_size=(100, 40), run_before=opened)


def test_running(snap_compare, tmp_path: Path) -> None:
    """A run under way: one replay done, one at step 30, the rest queued."""
    script = Script(tmp_path / "live")
    script.begin()
    script.start(None)
    script.steps(None, STEPS)
    script.finish(None)
    script.start("stale_weights")
    script.steps("stale_weights", 30)

    async def drawn(pilot: Pilot) -> None:
        await until(pilot, lambda: "step 30/60" in screen_text(pilot.app))
        await pilot.pause(0.3)

    app = DiagnoseApp(FakeBackend(tmp_path), tmp_path / "live", cards=CARDS, poll_s=0.05)
    assert snap_compare(app, terminal_size=(120, 36), run_before=drawn)
    script.unlock()


def test_help(snap_compare, tmp_path: Path) -> None:
    """All keys of the run screen."""
    play(Script(tmp_path / "old"))

    async def opened(pilot: Pilot) -> None:
        await until(pilot, lambda: "Reproduced and specific" in screen_text(pilot.app))
        await pilot.press("question_mark")
        await pilot.pause(0.3)

    app = DiagnoseApp(FakeBackend(tmp_path), tmp_path / "old", cards=CARDS, poll_s=0.05)
    assert snap_compare(app, terminal_size=(100, 40), run_before=opened)
