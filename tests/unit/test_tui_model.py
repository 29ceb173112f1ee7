"""The view-model of the run screen, without Textual: events in, words out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnose.events import (
    EndEvent,
    Event,
    NoteEvent,
    RunEvent,
    SessionEvent,
    StageEvent,
    StepEvent,
    VerdictEvent,
)
from diagnose.tui.follow import Follower, MetricsTail
from diagnose.tui.model import RunView, fold
from tests.fixtures.results import KL, kl_spike
from tests.tui.synthetic import FAULTS, STEPS, Script, play


def run(status: str, t: float, run_id: str = "stale-x1-s1", **more: object) -> RunEvent:
    return RunEvent(t=t, run=run_id, fault="stale", seed=1, status=status, **more)


SESSION = SessionEvent(name="n", symptom="s", candidates=("stale",), seeds=(1,), steps=60)


def test_eta_is_the_pace_so_far() -> None:
    view = fold(RunView(), [SESSION, run("queued", 0), run("started", 100)])
    assert view.rows[0].eta_s is None
    view = fold(view, [StepEvent(t=110, run="stale-x1-s1", step=20, steps=60)])
    assert view.rows[0].eta_s == pytest.approx(20.0)
    assert view.rows[0].state == "▶ step 20/60, 20 s left"
    assert view.eta_s == pytest.approx(20.0)


def test_eta_of_the_whole_counts_what_is_queued() -> None:
    view = fold(
        RunView(),
        [
            SESSION,
            run("queued", 0),
            run("queued", 0, "stale-x1-s2"),
            run("started", 100),
            StepEvent(t=130, run="stale-x1-s1", step=30, steps=60),
        ],
    )
    assert view.eta_s == pytest.approx(90.0)


def test_a_failed_row_says_why() -> None:
    view = fold(RunView(), [SESSION, run("started", 1), run("failed", 2, reason="out of\x1b[31m memory")])
    assert view.rows[0].state == "✘ failed: out of memory"


def test_resumption_keeps_what_is_done_and_forgets_the_end() -> None:
    view = fold(
        RunView(),
        [
            SESSION,
            run("done", 5, witness={"w": 1.0}),
            run("started", 6, "stale-x1-s2"),
            StepEvent(t=9, run="stale-x1-s2", step=3, steps=60),
            EndEvent(t=10, status="interrupted", exit_code=130),
        ],
    )
    assert view.end == "interrupted" and [row.status for row in view.rows] == ["done", "queued"]
    assert "u resumes" in view.status_line(alive=False)
    again = fold(view, [SESSION])
    assert again.end == "" and again.rows[0].status == "done" and again.rows[1].step == 0


def test_what_was_never_run_is_left_out_in_the_end() -> None:
    view = fold(RunView(), [SESSION, run("queued", 0), EndEvent(status="completed", exit_code=0)])
    assert view.rows[0].state == "– left out"


def test_status_line_tells_a_dead_runner_from_a_live_one() -> None:
    view = fold(RunView(), [SESSION, StageEvent(stage="build", status="started", detail="8 experts")])
    assert view.status_line(alive=True) == "Build under way: 8 experts"
    assert "gone without a last word" in view.status_line(alive=False)


def test_failure_is_told_with_its_mend() -> None:
    note = NoteEvent(text="the disk is full", level="error", mend="make room")
    view = fold(RunView(), [SESSION, note, EndEvent(status="failed", exit_code=4)])
    assert view.status_line(alive=False) == "Failed. the disk is full make room"


def test_stage_line_shows_signs_not_colours() -> None:
    view = fold(
        RunView(),
        [SESSION, StageEvent(stage="import", status="done"), StageEvent(stage="build", status="failed")],
    )
    assert view.stage_line() == "✔ import  ✘ build  · replay  · score  · report"


@given(
    st.lists(
        st.one_of(
            st.just(SESSION),
            st.builds(
                RunEvent,
                run=st.sampled_from(["a-x1-s1", "b-x1-s1"]),
                fault=st.none() | st.text(),
                seed=st.integers(),
                status=st.sampled_from(["queued", "started", "done", "failed", "odd"]),
                reason=st.text(),
                t=st.floats(0, 1e9),
            ),
            st.builds(
                StepEvent,
                run=st.sampled_from(["a-x1-s1", "c"]),
                step=st.integers(0, 99),
                steps=st.integers(0, 99),
                t=st.floats(0, 1e9),
            ),
            st.builds(StageEvent, stage=st.text(), status=st.text()),
            st.builds(
                EndEvent, status=st.sampled_from(["completed", "failed", "x"]), exit_code=st.integers()
            ),
            st.builds(VerdictEvent, verdict=st.text()),
            st.builds(NoteEvent, text=st.text()),
        )
    )
)
def test_any_order_of_events_gives_one_row_a_run_and_printable_words(events: list[Event]) -> None:
    view = fold(RunView(), events)
    assert len({row.run for row in view.rows}) == len(view.rows)
    assert fold(fold(RunView(), events[:3]), events[3:]) == view
    words = [
        view.stage_line(),
        view.status_line(True),
        view.status_line(False),
        *(r.state for r in view.rows),
    ]
    assert all("\x1b" not in word and "\n" not in word for word in words)


def test_follower_sees_a_session_grow(tmp_path: Path) -> None:
    script = Script(tmp_path)
    follower = Follower(script.folder)
    first = follower.poll()
    assert first is not None and not first.alive and len(first.evidence.original_healthy) == 2
    assert follower.poll() is None
    script.begin()
    script.start("stale_weights")
    script.steps("stale_weights", 5)
    snapshot = follower.poll()
    assert snapshot is not None and snapshot.alive and snapshot.result is None
    assert len(snapshot.evidence.proxy_faulty["stale_weights"][0].steps_N) == 5
    script.steps("stale_weights", 9, first=6)
    script.finish("stale_weights")
    script.verdict(kl_spike())
    last = follower.poll()
    assert last is not None and not last.alive and last.view.end == "completed"
    assert last.result is not None and last.result.name == "kl_spike"
    assert follower.poll() is None
    assert len(snapshot.evidence.proxy_faulty["stale_weights"][0].steps_N) == 5, "snapshots never change"


def test_follower_survives_half_a_line_a_broken_result_and_a_vanished_folder(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    script.begin()
    with script.folder.events.open("a") as file:
        file.write('{"kind": "run", "ru')
    script.folder.result.write_text('{"schema": 1, "stat')
    follower = Follower(script.folder)
    snapshot = follower.poll()
    assert snapshot is not None and snapshot.result is None and len(snapshot.view.rows) == 1 + len(FAULTS)
    script.unlock()
    for path in sorted((tmp_path / "run").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "run").rmdir()
    snapshot = follower.poll()
    assert snapshot is not None and "is gone" in snapshot.problem


def test_follower_says_what_cannot_be_read(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.folder.events.mkdir()
    (script.folder.runs / "odd-x.-s1").mkdir()
    (script.folder.runs / "odd-x.-s1" / "metrics.jsonl").write_text('{"step": 1, "data": {"m": 1}}\n')
    snapshot = Follower(script.folder).poll()
    assert snapshot is not None and "cannot be read" in snapshot.problem


def test_metrics_tail_starts_again_when_a_run_is_redone(tmp_path: Path) -> None:
    path = tmp_path / "healthy-s1" / "metrics.jsonl"
    path.parent.mkdir()
    tail = MetricsTail(path)
    assert tail.poll() is False and tail.curves is None

    def lines(first: int, last: int) -> str:
        return "".join(json.dumps({"step": n, "data": {KL: n / 10}}) + "\n" for n in range(first, last))

    path.write_text(lines(1, 9) + '{"step": 9, "da')
    assert tail.poll() and tail.curves is not None and len(tail.curves.steps_N) == 8
    with path.open("a") as file:
        file.write('ta": {"x": 1}}\n')
    assert tail.poll() and len(tail.curves.steps_N) == 9
    path.unlink()
    path.write_text(lines(1, 3))
    assert tail.poll() and len(tail.curves.steps_N) == 2


def test_a_whole_session_folds_to_its_end(tmp_path: Path) -> None:
    script = Script(tmp_path)
    play(script)
    snapshot = Follower(script.folder).poll()
    assert snapshot is not None
    states = {row.fault: row.state for row in snapshot.view.rows}
    assert states["stale_weights"] == "✔ done" and "signal 9" in states["rollout_precision"]
    assert {row.step for row in snapshot.view.rows} == {STEPS, 7}
