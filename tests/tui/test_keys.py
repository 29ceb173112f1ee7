"""Keys mean one thing, windows keep them to themselves, and what is on the screen can be read whole."""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text
from textual.binding import Binding
from textual.pilot import Pilot
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList

from diagnose.events import RunEvent, SessionEvent, StageEvent, VerdictEvent
from diagnose.provenance import scoring_key
from diagnose.report.json import dumps
from diagnose.report.words import headline
from diagnose.result import Direction, ProbeResult, RemedyResult
from diagnose.scoring import MANIFEST
from diagnose.store import RunFolder
from diagnose.tui.plan import Launched
from diagnose.tui.screens.candidates import CandidatesScreen
from diagnose.tui.screens.dialogs import AskScreen, ConfirmScreen, FilterScreen
from diagnose.tui.screens.home import HomeScreen
from diagnose.tui.screens.incident import PasteScreen
from diagnose.tui.screens.run import RunScreen
from diagnose.tui.screens.symptom import SymptomScreen
from diagnose.tui.table import RowTable, cut
from tests.fixtures.results import kl_spike
from tests.tui.synthetic import FAULTS, STEPS, FakeBackend, Script, play
from tests.tui.test_flows import app_for, screen_text, text, to_candidates, until

SIZES = [(80, 24), (120, 36), (200, 50)]
SAME = {"Run again": "Run", "Leave": "Back", "List": "Back"}
"""Words for the same thing: to run, and to go back."""


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[FakeBackend]:
    fake = FakeBackend(tmp_path)
    yield fake
    fake.close()


def test_a_key_means_the_same_on_every_screen() -> None:
    meanings = defaultdict(set)
    for screen in (HomeScreen, SymptomScreen, CandidatesScreen, RunScreen):
        for binding in screen.BINDINGS:
            assert isinstance(binding, Binding)
            pane = binding.group is not None and binding.group.description == "Panes"
            meanings[binding.key].add("pane" if pane else SAME.get(binding.description, binding.description))
    assert len(meanings) > 20
    assert {key: said for key, said in meanings.items() if len(said) > 1} == {}


async def finished(pilot: Pilot) -> None:
    await until(pilot, lambda: "Reproduced" in screen_text(pilot.app))
    await until(pilot, lambda: pilot.app.screen.query_one("#ranking").has_focus)


@pytest.mark.parametrize("opens", ["x", "l", "e", "f", "question_mark"])
async def test_keys_of_the_screen_do_nothing_in_a_window_over_it(
    backend: FakeBackend, tmp_path: Path, opens: str
) -> None:
    script = Script(tmp_path / "old")
    play(script)
    (script.folder.path / "proxy").mkdir()
    (script.folder.path / "proxy" / MANIFEST).write_text("{}")
    app = app_for(backend, tmp_path / "old")
    async with app.run_test() as pilot:
        await finished(pilot)
        beneath = app.screen
        await pilot.press(opens)
        await until(pilot, lambda: isinstance(app.screen, ModalScreen), "the window")
        window = app.screen
        own = {key for active in window.active_bindings.values() for key in active.binding.key.split(",")}
        letters = {f"({key})" for key in "abdflprsuxz" if f"({key})" in screen_text(app)}
        for key in "abdflprsuxz":
            if key not in own and f"({key})" not in letters:
                await pilot.press(key)
                assert app.screen is window, key
        # Nor does the screen's own line of keys show through: it would say what is not so.
        assert "123 Panes" not in screen_text(app)
        await pilot.press("escape")
        assert app.screen is beneath and not backend.wishes and not backend.retried


async def test_after_an_error_keys_are_keys_again(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await pilot.press("o", *"broken.yaml", "enter")
        await until(pilot, lambda: "broken.yaml:3:5" in text(app, "#detail"), "the error")
        assert app.screen.query_one("#sources").has_focus
        await pilot.press("v")
        assert isinstance(app.screen, PasteScreen)
        await pilot.press("escape", "o")
        field = app.screen.query_one("#path", Input)
        assert field.has_focus and field.value == "broken.yaml"  # to be mended, not typed again
        await pilot.press("escape")
        assert app.screen.query_one("#sources").has_focus


async def test_home_and_end_go_to_the_first_and_the_last_row(backend: FakeBackend, tmp_path: Path) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await to_candidates(pilot)
        table = app.screen.query_one(RowTable)
        await pilot.press("end")
        assert table.cursor_row == table.row_count - 1 > 0 and table.scroll_x == 0
        await pilot.press("home")
        assert table.cursor_row == 0


@pytest.mark.parametrize("size", SIZES)
async def test_no_table_is_wider_than_its_room(
    backend: FakeBackend, tmp_path: Path, size: tuple[int, int]
) -> None:
    script = Script(tmp_path / "old")
    script.begin(seeds=tuple(range(1, 9)))
    script.start(None)
    script.steps(None, 3)
    script.unlock()
    script.write(RunEvent(run=f"probe.greedy.{'long_name_' * 6}-x4-s1", fault="a", seed=1, status="queued"))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.screen.query_one("#rows", RowTable).row_count > 30)
        assert "step 3/60, 57 s left" in text(app, "#row-detail")
        script.verdict(kl_spike())
        await finished(pilot)
        for key in "132":
            await pilot.press(key)
            await pilot.pause(0.2)
            for table in app.screen.query(RowTable):
                if table.size.width:
                    assert table.virtual_size.width <= table.scrollable_content_region.width, table.id
        await pilot.press("escape")
        await to_candidates(pilot)
        table = app.screen.query_one(RowTable)
        await pilot.pause(0.2)
        assert table.virtual_size.width <= table.scrollable_content_region.width
        assert {"fault", "category", "told apart by"} <= {str(c.label) for c in table.ordered_columns}


@pytest.mark.parametrize(
    ("whole", "width", "short"),
    [
        ("rollout_logprob_precision ×4", 28, "rollout_logprob_precision ×4"),
        ("rollout_logprob_precision ×4", 15, "rollout…sion ×4"),  # the strength is not what gives way
        ("KL to the reference climbs", 12, "KL to the r…"),
        ("漢字漢字漢字_漢字", 8, "漢…_漢字"),
    ],
)
def test_a_name_loses_its_middle_and_a_sentence_its_end(whole: str, width: int, short: str) -> None:
    assert cut(Text(whole), width).cell_len <= width
    assert cut(Text(whole), width).plain.rstrip() == short or "漢" in whole


async def test_a_metric_is_found_by_typing(backend: FakeBackend, tmp_path: Path) -> None:
    play(Script(tmp_path / "old"))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test() as pilot:
        await finished(pilot)
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, FilterScreen))
        every = app.screen.query_one("#picks", OptionList).option_count
        await pilot.press(*"norm gradient")
        await until(pilot, lambda: 0 < app.screen.query_one("#picks", OptionList).option_count < every)
        await pilot.press(*"zzz", "enter")
        assert "nothing has" in screen_text(app) and isinstance(app.screen, FilterScreen)
        await pilot.press(*["backspace"] * 3, "enter")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        assert "gradient norm" in text(app, "#chart-words")


async def test_a_run_that_spent_its_budget_goes_on_with_more_seconds(
    backend: FakeBackend, tmp_path: Path
) -> None:
    script = Script(tmp_path / "old")
    backend.scripts.append(script)
    script.begin()
    script.start(None)
    script.steps(None, STEPS)
    script.finish(None)
    script.verdict(kl_spike())  # the candidates are still queued: the budget left them out
    app = app_for(backend, tmp_path / "old")
    async with app.run_test() as pilot:
        await finished(pilot)
        assert "budget was spent: 1 of 4 replays" in text(app, "#status")
        await pilot.press("b")
        assert isinstance(app.screen, AskScreen)
        await pilot.press("escape")
        assert backend.added == []
        await pilot.press("b", *["backspace"] * 3, "0", "enter")
        assert "a number above 0" in screen_text(app)
        await pilot.press("backspace", *"90", "enter")
        await until(pilot, lambda: backend.added == [90.0], "more time")
        await until(pilot, lambda: "Replay under way" in text(app, "#status"), "it goes on")
        assert "b" not in app.screen.active_bindings


async def test_what_is_tried_beside_the_verdict_leaves_it_in_view(
    backend: FakeBackend, tmp_path: Path
) -> None:
    script = Script(tmp_path / "old")
    play(script)
    app = app_for(backend, tmp_path / "old")
    async with app.run_test(size=(200, 50)) as pilot:
        await finished(pilot)
        await pilot.press("f")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen), "asked")
        await pilot.press("y")
        await until(pilot, lambda: backend.wishes == ["try_fix"], "started")
        script.lock()
        script.write(SessionEvent(name="kl_spike", symptom="kl_divergence_increase", candidates=FAULTS))
        for fault in (None, *FAULTS):
            script.finish(fault)
        script.write(StageEvent(stage="replay", status="skipped"))
        for number in (1, 2):
            run = f"fix.lower_lr.stale_weights-x1-s{number}"
            script.write(RunEvent(run=run, fault="stale_weights", seed=number, status="queued"))
        await until(pilot, lambda: "0 of 2 fix runs" in text(app, "#status"), "the new runs")
        await until(pilot, lambda: "a runner is at work again" in screen_text(app), "said at the verdict")
        shown = screen_text(app)
        assert "From before: a runner is at work again" in shown and "3 Verdict of before" in shown
        assert "Reproduced and specific" in shown
        assert "fix lower_lr: stale_weights" in shown
        assert f"replay 4/{len(FAULTS) + 1}" in text(app, "#stages")  # and no replay more than before
        again = replace(kl_spike(), wall_s=99.0)
        script.verdict(again)
        await until(pilot, lambda: "at work again" not in screen_text(app), "the end")
        assert "of before" not in screen_text(app)


async def test_candidates_and_run_count_the_same_runs(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await to_candidates(pilot)
        counted = re.search(r"(\d+) runs of", text(app, "#cost"))
        assert counted is not None
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        await until(pilot, lambda: f"replay 0/{counted[1]}" in text(app, "#stages"), "the same number")


async def test_a_race_says_that_more_may_come(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = backend.plan(Path("kl_spike.yaml"))
    monkeypatch.setattr(backend, "plan", lambda *_: replace(plan, race=True, seeds=2))
    app = app_for(backend)
    async with app.run_test(size=(200, 50)) as pilot:
        await to_candidates(pilot)
        assert "2 of 4 marked: 4+ runs" in text(app, "#cost")  # 2 healthy, and each candidate once
        assert "1 run+" in screen_text(app) and "the nearest get more runs" in screen_text(app)


async def test_help_explains_the_signs(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test(size=(120, 50)) as pilot:
        await to_candidates(pilot)
        for signs in (CandidatesScreen.SIGNS, SymptomScreen.SIGNS):
            await pilot.press("question_mark")
            await pilot.pause()
            shown = screen_text(app)
            assert all(sign in shown and meaning in shown for sign, meaning in signs.items())
            await pilot.press("escape", "escape")


async def test_help_says_what_the_numbers_of_the_verdict_mean(backend: FakeBackend, tmp_path: Path) -> None:
    play(Script(tmp_path / "old"))
    app = app_for(backend, tmp_path / "old")
    async with app.run_test(size=(120, 70)) as pilot:
        await finished(pilot)
        headings = {
            str(column.label) for column in app.screen.query_one("#ranking", RowTable).ordered_columns
        }
        assert {"distance", "agrees", "proof"} <= headings & set(RunScreen.SIGNS)
        await pilot.press("question_mark")
        await pilot.pause()
        box = app.screen.query_one(".dialog").region
        lines = screen_text(app).splitlines()[box.y : box.bottom]
        shown = " ".join(" ".join(line[box.x + 1 : box.right - 1] for line in lines).split())
        assert "reproduced, but not shown to be the only cause" in shown and "so do others" not in shown
        assert "in units of healthy noise: 0 is the same" in shown
        assert RunScreen.SIGNS["proof"].split("; ")[0] in shown


async def test_look_alikes_that_were_probed_are_not_offered_again(
    backend: FakeBackend, tmp_path: Path
) -> None:
    first, *rest = kl_spike().score.ranking
    score = replace(kl_spike().score, ranking=(replace(first, rivals=(rest[0].fault,)), *rest))
    still, unset = Direction.UNDETERMINED, float("nan")
    pair = (first.fault, rest[0].fault)
    probe = ProbeResult("greedy", "Greedy", {}, 20, pair, "", (still, still), (unset,) * 3, 0.0, "")
    for name, probes, offered in (("new", (), True), ("probed", (probe,), False)):
        play(Script(tmp_path / name), replace(kl_spike(), score=score, probes=probes))
        app = app_for(backend, tmp_path / name)
        async with app.run_test() as pilot:
            await finished(pilot)
            await until(pilot, lambda: "f" in app.screen.active_bindings, "remedies offered")  # noqa: B023
            assert ("d" in app.screen.active_bindings) is offered


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_a_budget_that_is_too_small_is_said_before_the_start(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    plan = backend.plan(Path("kl_spike.yaml"))
    out = tuple(replace(plan.choices[0], fault=f"fault_{n}") for n in range(19))
    fast = replace(plan, choices=out, race=True, seeds=2, steps=60, workers=2, step_s=0.6, budget_s=120)
    monkeypatch.setattr(backend, "plan", lambda *_: fast)
    app = app_for(backend)
    async with app.run_test(size=size) as pilot:
        await to_candidates(pilot)
        # 120 s of two workers are 6 replays of 36 s, 2 of them healthy.
        assert "⚠ enough for about 4 of 19 candidates; b changes it" in " ".join(screen_text(app).split())
        await pilot.press("b", *["backspace"] * 3, *"600", "enter")
        await until(pilot, lambda: text(app, "#cost").endswith("at most 10 min 0 s"), "enough")
        await pilot.press("b", *["backspace"] * 3, "0", "enter")
        await until(pilot, lambda: text(app, "#cost").endswith("no time limit"), "none")


async def test_without_an_earlier_run_nobody_knows_whether_the_budget_is_enough(backend: FakeBackend) -> None:
    app = app_for(backend)
    async with app.run_test() as pilot:
        await to_candidates(pilot)
        said = " ".join(screen_text(app).split())
        assert "perhaps not enough for all (never run here before); b changes it" in said


async def test_a_stopped_run_shows_its_verdict_on_what_is_done(backend: FakeBackend, tmp_path: Path) -> None:
    script = Script(tmp_path / "old")
    script.begin()
    for fault in (None, "stale_weights"):
        script.start(fault)
        script.steps(fault, STEPS)
        script.finish(fault)
    early = replace(kl_spike(), status="interrupted")
    script.folder.result.write_text(dumps(early))
    script.write(VerdictEvent(verdict=early.score.verdict.value, summary=headline(early)))
    script.end("interrupted", 130)
    app = app_for(backend, tmp_path / "old")
    async with app.run_test() as pilot:
        await until(pilot, lambda: "with a verdict on 2 of 4 replays" in text(app, "#status"), "it says so")
        assert "u" in app.screen.active_bindings
        assert not {"f", "d"} & set(app.screen.active_bindings)  # they would run all that is missing too
        await pilot.press("3")
        shown = " ".join(screen_text(app).split())
        assert "On 2 of 4 replays: the run was stopped. u does the rest" in shown
        assert "The experiment was not completed (interrupted)" in shown and "stale_weights" in shown


@pytest.mark.parametrize("scoring, said", [("", True), ("0123456789abcdef", True), (scoring_key(), False)])
async def test_a_verdict_of_another_scoring_says_so(
    backend: FakeBackend, tmp_path: Path, scoring: str, said: bool
) -> None:
    script = Script(tmp_path / "old")
    script.begin()
    script.verdict(kl_spike(), scoring)
    app = app_for(backend, tmp_path / "old")
    async with app.run_test(size=(200, 50)) as pilot:
        await finished(pilot)
        shown = screen_text(app)
        assert ("another version of the scoring" in shown) is said
        assert ("diagnose score" in shown) is said
        assert re.search(r"old, 01 Jan \d\d:16", shown)  # which run it is, and when it began


async def test_what_came_of_the_remedies_is_announced_and_shown(backend: FakeBackend, tmp_path: Path) -> None:
    script = Script(tmp_path / "old")
    play(script)
    app = app_for(backend, tmp_path / "old")
    async with app.run_test() as pilot:
        await finished(pilot)
        await pilot.press("f")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen), "asked")
        assert "mending the cause" in " ".join(screen_text(app).split())
        await pilot.press("y")
        await until(pilot, lambda: backend.wishes == ["try_fix"], "started")
        script.lock()
        script.write(SessionEvent(name="kl_spike", symptom="kl_divergence_increase", candidates=FAULTS))
        await until(pilot, lambda: "a runner is at work again" in screen_text(app), "at work")
        cured = RemedyResult("stale_weights", "slower", "A quarter of the rate", {}, 0.95, (), "vanishes")
        script.verdict(replace(kl_spike(), remedies=(cured,)))
        await until(pilot, lambda: "Would it help?" in screen_text(app), "in view without a key")
        assert "A quarter of the rate: vanishes" in " ".join(screen_text(app).split())
        pane = app.screen.query_one("#verdict")
        await until(pilot, lambda: pane.scroll_y > 0, "scrolled to")
        await pilot.press("home")
        await until(pilot, lambda: pane.scroll_y == 0, "home goes to the top of the pane")
        await pilot.press("end")
        await until(pilot, lambda: pane.scroll_y > 0, "end to its end")


async def test_what_is_loaded_leaves_the_collectors_rounds_once_a_stage(
    backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(1))  # the tests' own garbage is to go
    play(Script(tmp_path / "old"))
    for owns in (False, True):
        app = app_for(backend, tmp_path / "old")
        app.owns_process = owns
        async with app.run_test() as pilot:
            await finished(pilot)
            await until(pilot, lambda: len(calls) == 3 * owns, "home, run screen and curves")  # noqa: B023
            await pilot.press("escape")
            app.show_run(Launched(RunFolder(tmp_path / "old")))
            await finished(pilot)
            await pilot.pause(0.2)
        assert len(calls) == 3 * owns
