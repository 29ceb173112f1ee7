"""What a viewer shows: plain lines, literal strings, and nothing for what goes without saying."""

import pytest

from diagnose.console import Terminal
from diagnose.events import EndEvent, EventLog, NoteEvent, RunEvent, SessionEvent, StageEvent, StepEvent
from diagnose.store import RunFolder
from diagnose.viewer import describe, follow

STORY = (
    SessionEvent(name="x", symptom="s", candidates=("a",), seeds=(1,), steps=40),
    StageEvent(stage="replay", status="started", detail="2 runs"),
    RunEvent(run="healthy-s1", fault=None, seed=1, status="queued"),
    RunEvent(run="a-x1-s1", fault="a", seed=1, status="queued"),
    RunEvent(run="healthy-s1", fault=None, seed=1, status="started"),
    StepEvent(run="healthy-s1", step=20, steps=40, data={"actor/kl_loss": 0.5, "actor/entropy": None}),
    RunEvent(run="healthy-s1", fault=None, seed=1, status="done"),
    RunEvent(run="a-x1-s1", fault="a", seed=1, status="failed", reason="\x1b[31m[bold]no\nluck"),
    EndEvent(status="completed", exit_code=5),
)


def folder_with(tmp_path, *events):
    folder = RunFolder(tmp_path)
    log = EventLog(folder.events)
    for event in events:
        log.append(event)
    log.close()
    return folder


@pytest.mark.parametrize("verbosity", [-1, 0, 1])
def test_plain_lines(tmp_path, capsys, verbosity):
    watched = follow(folder_with(tmp_path, *STORY), Terminal(verbosity))
    assert watched.end.exit_code == 5 and watched.problem is None
    out, err = capsys.readouterr()
    steps = ["run healthy-s1: step 20/40 KL to reference 0.5"] if verbosity == 1 else []
    lines = [
        "x: s, 1 candidate, 1 seed, 40 steps",
        "replay … 2 runs",
        "run healthy-s1: started (0/2)",
        *steps,
        "run healthy-s1: done (1/2)",
        "run a-x1-s1: failed (2/2): [bold]no luck",
    ]
    assert out == "" and err.splitlines() == (lines if verbosity >= 0 else [])


def test_bars_take_strings_literally(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Terminal, "live", True)
    watched = follow(folder_with(tmp_path, *STORY), Terminal())
    assert watched.end.exit_code == 5
    _, err = capsys.readouterr()
    assert "[bold]no luck" in err and "\x1b[31m" not in err


def test_the_problem_is_that_of_the_last_runner(tmp_path):
    problem = NoteEvent(level="error", text="why", mend="how")
    failed = (STORY[0], problem, EndEvent(status="failed", exit_code=4))
    folder = folder_with(tmp_path, *failed)
    assert follow(folder, Terminal(-1)).problem == ("why", "how")
    folder = folder_with(tmp_path, STORY[0], EndEvent(status="completed", exit_code=0))
    assert follow(folder, Terminal(-1)).problem is None


def test_a_runner_without_a_last_word_is_noticed(tmp_path):
    folder = folder_with(tmp_path, EndEvent(status="interrupted", exit_code=130), STORY[0])
    assert follow(folder, Terminal(-1)).end is None


def test_moving_displays_only_where_they_are_welcome(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    assert Terminal().live and not Terminal(-1).live
    monkeypatch.setenv("CI", "true")
    assert not Terminal().live
    monkeypatch.setenv("CI", "false")
    monkeypatch.setenv("TERM", "dumb")
    assert not Terminal().live


def test_stages_say_what_they_did():
    assert (
        describe(StageEvent(stage="build", status="skipped", detail="it is there"))
        == "build: skipped (it is there)"
    )
    assert describe(NoteEvent(level="warn", text="x")) == "warning: x"
    assert describe(EndEvent(status="completed", exit_code=0)) == ""
    assert describe(EndEvent(status="interrupted", exit_code=130)) == "interrupted"


def test_a_long_replay_is_told_of_once_a_minute(tmp_path, capsys):
    told = [RunEvent(t=100.0, run="a-x1-s1", fault="a", seed=1, status="started")]
    told += [
        StepEvent(t=100.0 + 25 * step, run="a-x1-s1", step=step, steps=8, data={}) for step in range(1, 9)
    ]
    folder = RunFolder(tmp_path)
    folder.events.write_text("".join(event.to_line() + "\n" for event in told))
    follow(folder, Terminal())
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert lines == ["run a-x1-s1: started (0/1)", "run a-x1-s1: step 3/8", "run a-x1-s1: step 6/8"]
