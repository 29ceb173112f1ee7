"""The TUI's real backend: the session, runner and verdict of `diagnose run`, with a worker that makes up curves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnose.curves import Curves
from diagnose.errors import PlaybookError
from diagnose.prepare import prepare
from diagnose.session import load
from diagnose.store import RunFolder
from diagnose.triage import assess
from diagnose.tui.app import DiagnoseApp
from diagnose.tui.launch import SessionBackend
from diagnose.tui.plan import Incident, Order
from diagnose.tui.screens.run import RunScreen
from taxonomy.registry import library
from tests.pipeline.lab import Lab, make_lab
from tests.tui.test_flows import screen_text, to_candidates, until


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    lab = make_lab(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diagnose.playbook.shipped", dict)
    for name, value in lab.env.items():
        monkeypatch.setenv(name, value)
    yield lab
    for run in SessionBackend().past_runs():
        RunFolder(run.path).stop()


def wait(condition, patience_s: float = 20.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_playbooks_of_the_working_folder_are_listed_and_other_files_are_not(lab: Lab) -> None:
    (lab.home / "config.yaml").write_text("trainer: {symptom: none}\n")
    (entry,) = SessionBackend().playbooks()
    assert (entry.name, entry.symptom) == ("playbook.yaml", "kl_divergence_increase")


def test_plan_offers_the_playbooks_candidates_marked_and_their_look_alikes_unmarked(lab: Lab) -> None:
    plan = SessionBackend().plan(lab.playbook)
    marked = [choice.fault for choice in plan.choices if choice.selected]
    assert sorted(marked) == ["excess_inner_epochs", "learning_rate_too_high", "reward_flipped"]
    others = {choice.fault for choice in plan.choices if not choice.selected}
    assert others and all(choice.mechanism and choice.metric for choice in plan.choices)
    assert (plan.seeds, plan.steps) == (2, 24)


def test_another_symptom_marks_the_faults_that_have_it(lab: Lab) -> None:
    plan = SessionBackend().plan(lab.playbook, "no_learning")
    assert plan.symptom == "no_learning"
    assert "actor_update_omission" in {choice.fault for choice in plan.choices if choice.selected}
    assert "excess_inner_epochs" in {choice.fault for choice in plan.choices if not choice.selected}


def test_a_broken_playbook_is_one_error_with_its_place(lab: Lab) -> None:
    lab.write_playbook(more="budget: {secnds: 3}")
    with pytest.raises(PlaybookError, match=r"playbook\.yaml:\d+:\d+"):
        SessionBackend().plan(lab.playbook)


def test_start_outlives_us_and_states_follow(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    backend = SessionBackend()
    plan = backend.plan(lab.playbook)
    assert plan.step_s is None  # nothing was ever replayed
    launched = backend.start(plan, Order(("learning_rate_too_high", "reward_flipped"), 1))
    wait(launched.folder.is_alive)
    assert backend.past_runs()[0].state == "▶ running"
    session = load(launched.folder)
    assert session.seeds == (1,)
    assert {planned.fault for planned in session.candidates} == {"learning_rate_too_high", "reward_flipped"}
    assert backend.stop(launched.folder)
    assert launched.process is not None and launched.process.wait(10) is not None
    assert backend.past_runs()[0].state == "↻ resumable"
    monkeypatch.setenv("FAKE_STEP_S", "0")
    resumed = backend.resume(launched.folder)
    assert resumed.process is not None and resumed.process.wait(20) is not None
    assert backend.past_runs()[0].state.startswith("finished")
    outcomes = [json.loads(path.read_text()) for path in launched.folder.runs.glob("*/outcome.json")]
    paces = [one["wall_s"] / one["steps"] for one in outcomes]
    step_s = backend.plan(lab.playbook).step_s
    assert step_s is not None and min(paces) <= step_s <= max(paces)


def test_what_the_log_rules_out_is_said_beside_the_candidate(lab: Lab) -> None:
    plan = SessionBackend().plan(lab.playbook)
    told = {choice.fault: choice.ruled_out for choice in plan.choices if choice.ruled_out}
    prepared = prepare(lab.playbook)
    answer = assess(prepared.faulty, prepared.healthy, prepared.facts, library())
    expected = {item.fault: item.ruled_out for item in answer.ruled_out}
    assert told == {fault: why for fault, why in expected.items() if fault in {c.fault for c in plan.choices}}
    assert told


async def test_the_whole_way_with_the_real_runner(lab: Lab) -> None:
    app = DiagnoseApp(SessionBackend(), poll_s=0.1)
    async with app.run_test() as pilot:
        await to_candidates(pilot)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen), "run screen", patience=10)
        await until(pilot, lambda: "Finished" in screen_text(app), "the end", patience=20)
        assert "✔ replay 8/8" in screen_text(app)
        await pilot.press("3")
        await until(pilot, lambda: "learning_rate_too_high" in screen_text(app), "the ranking")
    (folder,) = app.watched
    assert not folder.is_alive() and folder.result.is_file()


def test_a_bare_log_becomes_a_playbook_that_can_be_planned_and_is_remembered(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diagnose.tui.memory.home", lambda: lab.home / "opened")
    backend = SessionBackend()
    session = backend.plan(lab.playbook)
    assert session.evidence is not None
    log = lab.home / "my incident.jsonl"
    log.write_text("".join(_lines(session.evidence.original_faulty[0])))
    written = backend.playbook_for(Incident(log))
    plan = backend.plan(written)
    assert plan.choices and "embedded" in plan.facts[0] and plan.budget_s == 120
    assert backend.recent_logs() == (log,)
    log.unlink()
    assert backend.recent_logs() == ()


def test_strength_and_budget_of_an_order_reach_the_session(lab: Lab) -> None:
    backend = SessionBackend()
    order = Order(("learning_rate_too_high",), 1, {"learning_rate_too_high": 2.0}, 77.0)
    launched = backend.start(backend.plan(lab.playbook), order)
    session = load(launched.folder)
    assert [c.strength for c in session.candidates] == [2.0] and session.budget_s == 77
    backend.stop(launched.folder)
    assert launched.process is not None and launched.process.wait(20) is not None


def _lines(curves: Curves) -> list[str]:
    return [
        json.dumps({"step": int(step), "data": {m: float(v[i]) for m, v in curves.values.items()}}) + "\n"
        for i, step in enumerate(curves.steps_N)
    ]
