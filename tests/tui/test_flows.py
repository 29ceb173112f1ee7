"""The way through the TUI by keyboard alone, on a synthetic run folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from textual.css.query import NoMatches
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, OptionList, Static, Tree

from diagnose.report.json import from_json
from diagnose.report.words import VERDICT_TITLE
from diagnose.result import Verdict
from diagnose.tui.app import DiagnoseApp
from diagnose.tui.plan import Incident, PastRun
from diagnose.tui.screens.candidates import CandidatesScreen
from diagnose.tui.screens.dialogs import ConfirmScreen
from diagnose.tui.screens.home import HomeScreen
from diagnose.tui.screens.incident import IncidentScreen, PasteScreen
from diagnose.tui.screens.run import RunScreen
from diagnose.tui.screens.symptom import SymptomScreen
from diagnose.tui.screens.verdict import VerdictPane
from taxonomy.symptoms import SYMPTOMS
from tests.fixtures.results import HOSTILE, hostile, kl_spike, with_verdict
from tests.tui.synthetic import CARDS, FAULTS, STEPS, FakeBackend, Script, play

SIZES = [(80, 24), (200, 50)]


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[FakeBackend]:
    fake = FakeBackend(tmp_path)
    yield fake
    fake.close()


def app_for(backend: FakeBackend, run_dir: Path | None = None) -> DiagnoseApp:
    return DiagnoseApp(backend, run_dir, cards=CARDS, poll_s=0.05)


async def until(pilot: Pilot, condition: Callable[[], bool], what: str = "", patience: float = 10.0) -> None:
    """Wait until something holds, `patience` seconds at most (of an idle machine)."""
    for _ in range(round(patience / 0.05)):
        await pilot.pause(0.05)
        with suppress(NoMatches):  # a dialog is still on top
            if condition():
                return
    raise AssertionError(f"never: {what or condition}")


def text(app: DiagnoseApp, selector: str) -> str:
    return str(app.screen.query_one(selector, Static).render())


def screen_text(app: DiagnoseApp) -> str:
    """What the terminal shows, as text."""
    return "\n".join(
        "".join(segment.text for segment in line) for line in app.screen._compositor.render_strips()
    )


async def to_symptom(pilot: Pilot) -> None:
    app = pilot.app
    await until(pilot, lambda: app.screen.query_one("#sources", OptionList).option_count > 2, "playbooks")
    await pilot.press("enter")
    await until(pilot, lambda: app.screen.query_one("#symptoms", Tree).has_focus, "tree in focus")


async def to_candidates(pilot: Pilot) -> None:
    app = pilot.app
    await to_symptom(pilot)
    await pilot.press("enter")
    await until(pilot, lambda: isinstance(app.screen, CandidatesScreen), "candidates")


@pytest.mark.parametrize("size", SIZES)
async def test_from_symptom_to_export_without_leaving_the_keyboard(
    backend: FakeBackend, size: tuple[int, int]
) -> None:
    app = app_for(backend)
    async with app.run_test(size=size) as pilot:
        await to_candidates(pilot)
        await pilot.press("down", "down", "space", "k", "backspace", "2", "enter")
        assert "3 of 4 marked: 8 runs of 60 steps" in text(app, "#cost")
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen), "run screen")
        (plan, order), script = backend.started[0], backend.scripts[0]
        assert plan.symptom == "kl_divergence_increase"
        assert (order.faults, order.seeds, order.budget_s) == (FAULTS, 2, 120.0)
        rows = app.screen.query_one("#rows", DataTable)
        await until(pilot, lambda: rows.row_count == 8, "all rows")
        script.start(None)
        script.steps(None, 30)
        await until(
            pilot, lambda: "step 30/60, 30 s left" in str(rows.get_cell("healthy-s1", "state")), "ETA"
        )
        script.steps(None, STEPS, first=31)
        script.finish(None)
        script.start("stale_weights")
        script.steps("stale_weights", STEPS)
        script.finish("stale_weights")
        await until(
            pilot, lambda: "✔ seen (58)" in str(rows.get_cell("stale_weights-x1-s1", "witness")), "witness"
        )
        assert "proxy with stale_weights" in text(app, "#chart-words")
        script.verdict(kl_spike())
        await until(pilot, lambda: "Reproduced and specific" in screen_text(app), "verdict")
        assert "✔ replay 2/8" in text(app, "#stages")
        await pilot.press("e", "h")
        report = script.folder.path / "report.html"
        await until(pilot, report.is_file, "report")
        await until(pilot, lambda: str(report.name) in text(app, "#note"), "path shown")
        assert "<svg" in report.read_text() and "Stale weights" in report.read_text()
        await pilot.press("e", "j")
        await until(pilot, (script.folder.path / "report.json").is_file, "json")
        data = json.loads((script.folder.path / "report.json").read_text())
        assert from_json(data).score.verdict == Verdict.REPRODUCED


async def test_quitting_leaves_the_run_alive(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await to_candidates(pilot)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        await pilot.press("q")
    assert backend.stopped == 0 and backend.scripts[0].folder.is_alive()


async def test_leaving_the_run_screen_leaves_the_run_alive_and_attaches_again(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await to_candidates(pilot)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        script = backend.scripts[0]
        backend.past.append(PastRun(script.folder.path, "kl_spike", "running"))
        await pilot.press("escape")
        assert isinstance(app.screen, HomeScreen) and script.folder.is_alive() and backend.stopped == 0
        sources = app.screen.query_one("#sources", OptionList)
        await until(pilot, lambda: sources.option_count == 5, "the run among past runs")
        sources.highlighted = 4
        sources.focus()
        script.start(None)
        script.steps(None, 3)
        await pilot.press("enter")
        await until(
            pilot, lambda: isinstance(app.screen, RunScreen) and "step 3/60" in screen_text(app), "attached"
        )


async def test_stop_asks_first_and_resume_goes_on(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await to_candidates(pilot)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        await until(pilot, lambda: "Replay under way" in text(app, "#status"))
        await pilot.press("s", "n")
        assert backend.stopped == 0
        await pilot.press("s", "y")
        await until(pilot, lambda: "Stopped" in text(app, "#status"), "stopped")
        assert backend.stopped == 1
        await pilot.press("u")
        await until(pilot, lambda: "Replay under way" in text(app, "#status"), "resumed")


async def test_a_runner_that_died_is_said_and_resumable(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await to_candidates(pilot)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        backend.scripts[0].unlock()
        await until(pilot, lambda: "gone without a last word" in text(app, "#status"), "death noticed")
        assert "u" in app.screen.active_bindings and "s" not in app.screen.active_bindings


async def test_the_engineer_may_pick_another_symptom(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await to_symptom(pilot)
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, CandidatesScreen))
        await pilot.press("r")
        await until(pilot, lambda: bool(backend.started))
        assert backend.started[0][0].symptom == "no_learning"


async def test_a_broken_playbook_says_where(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await pilot.press("o", *"broken.yaml", "enter")
        await until(pilot, lambda: "broken.yaml:3:5" in text(app, "#detail"), "the error")
        assert "did you mean" in text(app, "#detail") and isinstance(app.screen, HomeScreen)


async def test_a_run_folder_can_be_typed(backend: FakeBackend, tmp_path: Path) -> None:
    play(Script(tmp_path / "old"))
    app = app_for(backend)
    async with app.run_test() as pilot:
        await pilot.press("o")
        app.screen.query_one("#path", Input).value = str(tmp_path / "old")
        await pilot.press("enter")
        await until(
            pilot, lambda: isinstance(app.screen, RunScreen) and "Reproduced and specific" in screen_text(app)
        )


async def test_commands_run_only_after_a_yes(tmp_path: Path) -> None:
    backend = FakeBackend(tmp_path, commands=("engine.command: ['rm', '-rf', '[red]/[/]']",))
    app = app_for(backend)
    async with app.run_test() as pilot:
        await to_candidates(pilot)
        await pilot.press("r")
        await pilot.pause()
        assert "[red]/[/]" in screen_text(app)
        await pilot.press("n")
        assert not backend.started
        await pilot.press("r", "y")
        await until(pilot, lambda: bool(backend.started))
    backend.close()


async def test_a_refused_fault_cannot_be_marked_and_nothing_marked_cannot_start(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await to_candidates(pilot)
        await pilot.press("a", "a")
        assert "Mark at least one" in text(app, "#cost")
        await pilot.press("r")
        assert not backend.started
        await pilot.press("end", "space")
        assert "Mark at least one" in text(app, "#cost")
        assert "dense model" in text(app, "#detail")


async def test_the_card_shows_all_that_is_known(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test(size=(100, 40)) as pilot:
        await to_candidates(pilot)
        await pilot.press("i")
        await pilot.pause()
        shown = screen_text(app)
        for fact in (
            "mechanism",
            "sync_skipped > 0",
            "a source",
            "look-alikes",
            "Synchronise after every update",
        ):
            assert fact in shown
        await pilot.press("escape")
        assert isinstance(app.screen, CandidatesScreen)


async def test_the_metric_of_the_chart_can_be_stepped_and_picked(
    backend: FakeBackend, tmp_path: Path
) -> None:
    play(Script(tmp_path / "old"))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test() as pilot:
        await until(pilot, lambda: "Reproduced" in screen_text(app))
        await pilot.press("2")
        await pilot.pause()
        assert "KL to reference" in text(app, "#chart-words")
        await pilot.press("n")
        assert "gradient norm" in text(app, "#chart-words")
        await pilot.press("p", "m", "up", "enter")
        await pilot.pause()
        assert "reward" in text(app, "#chart-words")
        for sign in "○●□■":
            assert sign in screen_text(app)


async def test_the_ranking_cursor_decides_what_is_charted(backend: FakeBackend, tmp_path: Path) -> None:
    play(Script(tmp_path / "old"))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test(size=(200, 50)) as pilot:
        await until(pilot, lambda: "proxy with stale_weights" in text(app, "#chart-words"))
        await pilot.press("3", "down", "down")
        await until(pilot, lambda: "proxy with update_omission" in text(app, "#chart-words"))
        assert "Update omission" in text(app, "#metrics-title")


async def test_every_verdict_is_shown_in_words(backend: FakeBackend, tmp_path: Path) -> None:
    play(Script(tmp_path / "old"))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test() as pilot:
        await until(pilot, lambda: "Reproduced" in screen_text(app))
        for verdict in Verdict:
            app.screen.query_one(VerdictPane).show(with_verdict(verdict), "")
            await until(pilot, lambda: VERDICT_TITLE[verdict] in screen_text(app), verdict.value)  # noqa: B023


async def test_hostile_strings_are_literal_everywhere(backend: FakeBackend, tmp_path: Path) -> None:
    script = Script(tmp_path / "old", HOSTILE)
    script.begin(faults=(HOSTILE,))
    script.note(HOSTILE, "warn")
    script.fail(HOSTILE, HOSTILE)
    script.verdict(hostile())
    backend.past.append(PastRun(tmp_path / "old", HOSTILE, HOSTILE))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test(size=(200, 50)) as pilot:
        await until(pilot, lambda: "Reproduced and specific" in screen_text(app))
        for key in "123":
            await pilot.press(key)
            await pilot.pause()
            assert "[red]x[/]" in screen_text(app) and "\x1b" not in screen_text(app)
        await pilot.press("escape")
        await until(pilot, lambda: "[red]x[/]" in screen_text(app), "list of runs")


async def test_a_bare_log_leads_to_candidates(backend: FakeBackend, tmp_path: Path) -> None:
    log, twin = tmp_path / "incident.log", tmp_path / "healthy.log"
    log.touch()
    twin.touch()
    app = app_for(backend)
    async with app.run_test() as pilot:
        await pilot.press("o")
        app.screen.query_one("#path", Input).value = str(log)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, IncidentScreen), "what is beside the log")
        app.screen.query_one("#twin", Input).value = str(twin)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: isinstance(app.screen, SymptomScreen), "symptoms")
        assert backend.incidents == [Incident(log, twin)]


async def test_a_path_is_completed(backend: FakeBackend, tmp_path: Path) -> None:
    (tmp_path / "a_long_name.jsonl").touch()
    app = app_for(backend)
    async with app.run_test() as pilot:
        await pilot.press("o")
        field = app.screen.query_one("#path", Input)
        field.value = f"{tmp_path}/a_l"
        field.cursor_position = len(field.value)
        await until(pilot, lambda: field._suggestion.endswith("a_long_name.jsonl"), "a suggestion")
        await pilot.press("right")
        assert field.value == f"{tmp_path}/a_long_name.jsonl"


async def test_a_pasted_piece_of_a_log_is_kept_and_opened(backend: FakeBackend, tmp_path: Path) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await pilot.press("v")
        await until(pilot, lambda: isinstance(app.screen, PasteScreen))
        await pilot.press(*"step:1", "ctrl+s")
        await until(pilot, lambda: isinstance(app.screen, IncidentScreen), "what is beside it")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: backend.incidents == [Incident(tmp_path / "pasted.log")])
        assert (tmp_path / "pasted.log").read_text() == "step:1"


@pytest.mark.parametrize("size", SIZES)
async def test_the_symptom_screen_shows_onset_evidence_and_what_is_ruled_out(
    backend: FakeBackend, size: tuple[int, int]
) -> None:
    app = app_for(backend)
    async with app.run_test(size=size) as pilot:
        await to_symptom(pilot)
        shown = screen_text(app)
        assert "● 18–22: KL to the reference" in shown and "◇ Policy does not move" in shown
        assert "◇ akin to it" in shown
        assert "KL to reference 9 times its healthy level, from step 18–22" in text(app, "#detail")
        await pilot.press("down")
        await until(pilot, lambda: "something akin: entropy stays where it was" in text(app, "#detail"))
        await pilot.press("up", "2")
        await pilot.pause()
        assert "onset" in text(app, "#chart-legend") and "original faulty" in text(app, "#chart-legend")
        await pilot.press("3")
        await pilot.pause()
        shown = screen_text(app)
        assert "the model is dense" in shown and "before step 18" in shown
        assert shown.index("Cheapest check") < shown.index("Compare the weights of rollout")


async def test_strength_budget_and_filter_of_the_candidates(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test(size=(120, 40)) as pilot:
        await to_candidates(pilot)
        await pilot.press("slash", *"omission", "enter")
        table = app.screen.query_one("#faults", DataTable)
        await until(pilot, lambda: table.row_count == 1, "one row")
        await pilot.press("t", "backspace", *"-3", "enter")
        await until(pilot, lambda: "a number above 0" in screen_text(app), "refused")
        await pilot.press(*["backspace"] * 3, "2", "enter")
        await until(pilot, lambda: "× 2" in screen_text(app), "strength")
        await pilot.press("b", *["backspace"] * 3, *"60", "enter")
        await until(pilot, lambda: "at most 1 min" in text(app, "#cost"), "budget")
        await pilot.press("b", "backspace", "backspace", *"-1", "enter")
        await until(pilot, lambda: "0 for no limit, or a number" in screen_text(app), "what is wanted")
        await pilot.press("backspace", "backspace", *"0.0", "enter")
        await until(pilot, lambda: "no time limit" in text(app, "#cost"), "what the hint says")
        await pilot.press("b", "backspace", *"60", "enter")
        await until(pilot, lambda: "at most 1 min" in text(app, "#cost"), "budget")
        await pilot.press("escape")
        await until(pilot, lambda: table.row_count == 4, "all of them again")
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, SymptomScreen), "back")
        await pilot.press("c")
        await until(pilot, lambda: "at most 1 min" in text(app, "#cost"), "the budget is still there")
        await pilot.press("end", "up", "t", "backspace", "2", "enter")
        await pilot.press("r")
        await until(pilot, lambda: bool(backend.started))
        order = backend.started[0][1]
        assert order.strengths == {"update_omission": 2.0} and order.budget_s == 60
        assert order.faults == FAULTS


async def test_the_second_interrupt_leaves_and_the_run_goes_on(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test(notifications=True) as pilot:
        await to_candidates(pilot)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        await pilot.press("ctrl+c")
        await until(pilot, lambda: "again to leave" in screen_text(app), "a warning first")
        assert app.is_running
        await pilot.press("ctrl+c")
        await pilot.pause()
    assert not app.is_running and backend.scripts[0].folder.is_alive() and backend.stopped == 0


async def test_two_screens_on_one_run_show_the_same_and_disturb_nothing(
    backend: FakeBackend, tmp_path: Path
) -> None:
    script = Script(tmp_path / "old")
    script.begin()
    one, two = app_for(backend, tmp_path / "old"), app_for(backend, tmp_path / "old")
    async with one.run_test(size=(80, 24)) as first, two.run_test(size=(200, 50)) as second:
        script.start(None)
        script.steps(None, 5)
        await until(first, lambda: "step 5/60" in screen_text(one), "the first")
        await until(second, lambda: "step 5/60" in screen_text(two), "the second")
        before = sorted(path.name for path in script.folder.path.rglob("*"))
        await first.press("q")
        script.steps(None, 9, first=6)
        await until(second, lambda: "step 9/60" in screen_text(two), "the second goes on")
    assert sorted(path.name for path in script.folder.path.rglob("*")) == before


async def test_a_run_folder_that_vanishes_is_said(backend: FakeBackend, tmp_path: Path) -> None:
    play(Script(tmp_path / "old"))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test(size=(200, 50)) as pilot:
        await until(pilot, lambda: "Reproduced" in screen_text(app))
        (tmp_path / "old").rename(tmp_path / "elsewhere")
        await until(pilot, lambda: "is gone" in screen_text(app), "said")
        assert "Reproduced and specific" in screen_text(app)  # what was read stays on the screen


async def test_a_log_that_vanishes_is_said(tmp_path: Path, backend: FakeBackend, monkeypatch) -> None:
    def gone(_incident: Incident) -> Path:
        raise FileNotFoundError(2, "No such file or directory", "incident.log")

    monkeypatch.setattr(backend, "playbook_for", gone)
    (tmp_path / "incident.log").touch()
    app = app_for(backend)
    async with app.run_test() as pilot:
        await pilot.press("o")
        app.screen.query_one("#path", Input).value = str(tmp_path / "incident.log")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, IncidentScreen))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "No such file" in text(app, "#detail"), "said")


async def test_a_full_disk_while_starting_is_said_and_starting_again_is_possible(
    backend: FakeBackend, monkeypatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    app = app_for(backend)
    async with app.run_test() as pilot:
        await to_candidates(pilot)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "start", full)
            await pilot.press("r")
            await until(pilot, lambda: "No space left" in text(app, "#detail"), "said")
            assert "make room, then try again" in text(app, "#detail")
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen), "the second try")


async def test_a_disk_that_filled_up_under_a_run_is_said(
    backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(tmp_path / "old")
    script.begin()
    script.unlock()  # the runner could not even write its last word
    monkeypatch.setattr("diagnose.tui.follow.disk_usage", lambda _: SimpleNamespace(free=0))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test() as pilot:
        await until(pilot, lambda: "is full. Make room, then u resumes" in text(app, "#status"), "said")
        assert "u" in app.screen.active_bindings


async def test_proxy_and_log_can_be_read_while_a_run_goes_on(backend: FakeBackend, tmp_path: Path) -> None:
    script = Script(tmp_path / "old")
    script.begin()
    script.note("the proxy is ready")
    (tmp_path / "old" / "worker_0.log").write_text("line 1\nline [red]2[/]\x1b[2J\n")
    app = app_for(backend, tmp_path / "old")
    async with app.run_test(size=(100, 40), notifications=True) as pilot:
        await until(pilot, lambda: "the proxy is ready" in screen_text(app))
        await pilot.press("x")
        await until(pilot, lambda: "not built yet" in screen_text(app))
        (tmp_path / "old" / "proxy").mkdir()
        manifest = {"experts": {"before": 32, "after": 12, "top_k": 2}, "layers": {"0": {"kept": [7, 9]}}}
        (tmp_path / "old" / "proxy" / "proxy_manifest.json").write_text(json.dumps(manifest))
        await pilot.press("x")
        await until(pilot, lambda: "12 of 32 experts" in screen_text(app) and "7 9" in screen_text(app))
        await pilot.press("escape", "l")
        await until(
            pilot, lambda: "line [red]2[/]" in screen_text(app) and "worker_0.log" in screen_text(app)
        )
        assert "\x1b" not in screen_text(app)


async def test_pause_and_retry(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test(notifications=True) as pilot:
        await to_candidates(pilot)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        script = backend.scripts[0]
        await until(pilot, lambda: "z" in app.screen.active_bindings, "alive")
        await pilot.press("z")
        await until(pilot, lambda: backend.paused and "z goes on" in screen_text(app), "paused")
        script.start("stale_weights")
        script.fail("stale_weights", "worker ended with signal 9")
        script.end("failed", 4)
        rows = app.screen.query_one("#rows", DataTable)
        await until(pilot, lambda: "failed" in str(rows.get_cell("stale_weights-x1-s1", "state")))
        rows.move_cursor(row=1)
        await until(pilot, lambda: "r" in app.screen.active_bindings, "retry offered")
        await pilot.press("r")
        await until(pilot, lambda: backend.retried == ["stale_weights-x1-s1"], "retried")


async def test_remedies_are_one_key_and_probes_only_for_a_set(backend: FakeBackend, tmp_path: Path) -> None:
    first, *rest = kl_spike().score.ranking
    alone = replace(kl_spike(), score=replace(kl_spike().score, ranking=(replace(first, rivals=()), *rest)))
    play(Script(tmp_path / "old"), alone)
    app = app_for(backend, tmp_path / "old")
    async with app.run_test() as pilot:
        await until(pilot, lambda: "Reproduced" in screen_text(app))
        await until(pilot, lambda: "f" in app.screen.active_bindings, "remedies offered")
        assert "d" not in app.screen.active_bindings and "b" not in app.screen.active_bindings
        await pilot.press("f")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen), "asked first")
        assert "6 runs, 360 steps in all, about 1 min 20 s" in screen_text(app) and not backend.wishes
        await pilot.press("n")
        assert not backend.wishes
        await pilot.press("f")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen), "asked again")
        await pilot.press("y")
        await until(pilot, lambda: backend.wishes == ["try_fix"], "started")


async def test_help_and_palette_know_every_key(backend: FakeBackend, tmp_path: Path) -> None:
    play(Script(tmp_path / "old"))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "Reproduced" in screen_text(app))
        screen = app.screen
        ours = [a.binding for a in screen.active_bindings.values() if a.binding.id]
        assert all(b.description and b.tooltip for b in ours)
        assert len({b.id for b in ours}) == len({(b.id, b.action) for b in ours})
        titles = {command.title for command in app.get_system_commands(screen)}
        assert {"Export", "Metric", "Leave", "Help"} <= titles
        await pilot.press("question_mark")
        await pilot.pause()
        assert "Write a report file into the run folder" in screen_text(app)
        await pilot.press("escape")
        assert app.screen is screen


async def test_resizing_in_the_middle_loses_nothing(backend: FakeBackend, tmp_path: Path) -> None:
    play(Script(tmp_path / "old"))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: "Reproduced" in screen_text(app))
        for size in [(80, 24), (20, 6), (200, 50)]:
            await pilot.press("2")
            await pilot.resize_terminal(*size)
            await pilot.press("3")
            await until(pilot, lambda: size[0] < 80 or "Reproduced" in screen_text(app))  # noqa: B023


async def test_export_failure_is_said(backend: FakeBackend, tmp_path: Path) -> None:
    play(Script(tmp_path / "old"))
    (tmp_path / "old" / "report.md").mkdir()
    app = app_for(backend, tmp_path / "old")
    async with app.run_test() as pilot:
        await until(pilot, lambda: "Reproduced" in screen_text(app))
        await pilot.press("e", "m")
        await until(pilot, lambda: "Not written" in text(app, "#note"), "the failure")


async def test_the_advice_is_in_view_and_the_numbers_a_page_down(
    backend: FakeBackend, tmp_path: Path
) -> None:
    play(Script(tmp_path / "old"))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "What to do" in screen_text(app), "advice in view")
        assert "Reproduced and specific" in screen_text(app) and "What Stale weights did" not in screen_text(
            app
        )
        await until(pilot, lambda: app.screen.query_one("#ranking").has_focus)
        await pilot.press("pagedown")
        await until(pilot, lambda: "What Stale weights did" in screen_text(app), "numbers in view")


def test_the_tui_never_imports_torch() -> None:
    code = (
        "import sys, diagnose.tui.app, diagnose.tui.launch, diagnose.tui.screens.run, diagnose.report.html;"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_first_screen_needs_neither_numpy_nor_the_plot_widget() -> None:
    code = "import sys, diagnose.tui.app; sys.exit(bool({'numpy', 'textual_plot'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("size", SIZES)
async def test_a_marked_candidate_that_the_log_rules_out_says_so(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    plan = backend.plan(Path("kl_spike.yaml"))
    first, *rest = plan.choices
    out = replace(first, ruled_out="the weights were equal at every step")
    monkeypatch.setattr(backend, "plan", lambda *_: replace(plan, choices=(out, *rest)))
    app = app_for(backend)
    async with app.run_test(size=size) as pilot:
        await to_candidates(pilot)
        said = "uled out by the log or its setting: the weights were equal at every step"
        await until(pilot, lambda: said in text(app, "#detail").replace("\n", " "), "told below the table")
        rows = app.screen.query_one("#faults", DataTable)
        assert str(rows.get_cell(first.fault, "mark")) == "[x]"
        if size[0] == 200:
            assert str(rows.get_cell(first.fault, "why")).startswith("ruled out by the log")
            assert not str(rows.get_cell(rest[0].fault, "why")).startswith("ruled out")


async def test_a_symptom_too_long_for_its_pane_ends_in_an_ellipsis(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = SYMPTOMS[-1]
    long = replace(last, title=f"{last.title} {'and so on ' * 20}")
    monkeypatch.setattr("diagnose.tui.screens.symptom.SYMPTOMS", (*SYMPTOMS[:-1], long))
    app = app_for(backend)
    async with app.run_test(size=(200, 50)) as pilot:
        await to_symptom(pilot)
        for width in (200, 90):
            await pilot.resize_terminal(width, 50)
            await pilot.pause(0.2)
            line = next(line for line in screen_text(app).splitlines() if last.title in line)
            assert "…" in line[: line.index("┃", 2)], line
            whole = next(s.title for s in SYMPTOMS if s.id == "kl_divergence_increase")
            assert f"{whole} " in screen_text(app)
