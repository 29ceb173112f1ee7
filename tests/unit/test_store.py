"""The run folder: atomic files, one runner at a time, an honest `is_alive`."""

import json
import signal
import subprocess
import sys
import time

import pytest

from diagnose.errors import RunError
from diagnose.store import RunFolder, create, list_runs, open_folder, read_json, write_json, write_text

HOLDER = """
import signal, sys, time
from pathlib import Path
from diagnose.store import RunFolder
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with RunFolder(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    started = []

    def start(mood="polite"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), mood], stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError):
        write_json(path, {"new": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert json.loads(path.read_text()) == {"old": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["x.json"]


def test_reading_what_is_not_there_or_torn_is_none(tmp_path):
    assert read_json(tmp_path / "none.json") is None
    (tmp_path / "torn.json").write_text('{"a": ')
    assert read_json(tmp_path / "torn.json") is None
    assert read_json(tmp_path / "torn.json" / "below") is None


def test_a_lock_ends_with_its_process_even_when_killed(tmp_path, holder):
    folder = RunFolder(tmp_path)
    assert not folder.is_alive()
    process = holder()
    assert folder.is_alive()
    with pytest.raises(RunError, match="already at work"), folder.locked():
        pass
    process.kill()
    process.wait()
    assert not folder.is_alive()
    with folder.locked():
        assert folder.is_alive()


def test_stopping_is_by_sigterm_then_by_force(tmp_path, holder):
    folder = RunFolder(tmp_path)
    assert not folder.stop()
    process = holder()
    assert folder.stop()
    assert process.wait() == -signal.SIGTERM
    process = holder("deaf")
    begin = time.monotonic()
    assert folder.stop(patience_s=0.3)
    assert process.wait() == -signal.SIGKILL
    assert time.monotonic() - begin >= 0.3


def test_a_named_folder_must_be_empty(tmp_path):
    folder = create("x", tmp_path / "new" / "deep")
    assert folder.inputs.is_dir() and folder.runs.is_dir()
    with pytest.raises(RunError, match="not an empty folder") as caught:
        create("x", folder.path)
    assert caught.value.mend == "name another one with --out"  # nothing in it that could go on
    write_json(folder.session, {})
    with pytest.raises(RunError, match="not an empty folder") as caught:
        create("x", folder.path)
    assert "--resume" in caught.value.mend


def test_default_folders_are_distinct_and_listed_newest_first(tmp_path, monkeypatch):
    monkeypatch.setattr("diagnose.store.default_parent", lambda: tmp_path / "runs")
    assert list_runs() == []
    folders = [create("my run/../x") for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3
    assert all(folder.path.parent == (tmp_path / "runs").resolve() for folder in folders)
    assert list_runs() == []  # none has a session yet
    for folder in folders:
        write_json(folder.session, {})
        time.sleep(0.02)
    assert [run.path for run in list_runs()] == [folder.path for folder in reversed(folders)]


def test_a_folder_without_a_session_is_none(tmp_path):
    with pytest.raises(RunError, match="not a run folder"):
        open_folder(tmp_path)
    write_text(tmp_path / "session.json", '{"a": ')
    with pytest.raises(RunError, match="is broken"):
        open_folder(tmp_path)
