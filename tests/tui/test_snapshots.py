"""Pictures of the screens as a human accepted them; `pytest tests/tui --snapshot-update` renews them."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from diagnose.tui.app import DiagnoseApp
from tests.tui.synthetic import CARDS, FakeBackend, Script, play
from tests.tui.test_flows import screen_text, to_candidates, until


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
