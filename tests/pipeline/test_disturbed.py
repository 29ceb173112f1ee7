"""What a run survives: killed viewers, runners and workers, a full disk, Ctrl-C. Nothing is run twice."""

import errno
import json
import os
import re
import shlex
import signal
import time
from collections import Counter

import pytest

from diagnose import pipeline, runner
from diagnose.cli import invoke
from diagnose.errors import RunError
from diagnose.prepare import open_run, prepare
from tests.pipeline.lab import RUNS, wait_for

SLOW = {"FAKE_STEP_S": "0.02"}
"""Half a second a run: time enough to disturb it."""


def done_runs(lab):
    return {event.run for event in lab.events() if event.kind == "run" and event.status == "done"}


def begin(lab, **env):
    """Start a slow run and wait until two replays are done and others under way."""
    viewer = lab.popen("run", "playbook.yaml", "--out", lab.out, "--workers", "2", **SLOW | env)
    wait_for(lambda: len(done_runs(lab)) >= 2)
    return viewer


def runner_pid(lab):
    return int((lab.out / "runner.pid").read_text())


def the_same(answer):
    """The parts of an answer that a disturbance must not change."""
    return {key: answer[key] for key in ("status", "verdict", "reasons", "ranking", "not_tried", "failures")}


@pytest.fixture(scope="session")
def undisturbed(done):
    return the_same(done.result())


def test_a_killed_viewer_changes_nothing(lab, undisturbed):
    viewer = begin(lab, FAKE_STEP_S="0.06")  # still at work when the next viewer comes
    viewer.kill()
    viewer.communicate()
    assert lab.folder.is_alive()
    code, _, err = lab.run("run", "--resume", lab.out)  # joins the runner at work
    assert code == 0 and "joining the runner" in err
    assert the_same(lab.result()) == undisturbed
    assert sorted(Counter(lab.started()).values()) == [1] * (1 + RUNS)


def test_after_a_killed_runner_only_what_is_missing_is_redone(lab, undisturbed):
    viewer = begin(lab)
    finished = done_runs(lab)
    os.kill(runner_pid(lab), signal.SIGKILL)
    _, err = viewer.communicate(timeout=20)
    assert viewer.returncode == 4
    assert "died without a word" in err and f"diagnose run --resume {lab.out}" in err
    wait_for(lambda: not lab.processes())  # the workers went with it
    assert not lab.folder.result.exists()

    assert lab.run("run", "--resume", lab.out)[0] == 0
    assert the_same(lab.result()) == undisturbed
    starts = Counter(lab.started())
    assert starts["build build"] == 1
    assert all(starts[f"run {run}"] == 1 for run in finished)
    again = [start for start, count in starts.items() if count > 1]
    assert 1 <= len(again) <= 2 and set(starts.values()) == {1, 2}
    skipped = [event for event in lab.events() if event.kind == "stage" and event.status == "skipped"]
    assert [event.stage for event in skipped] == ["build"]


@pytest.mark.parametrize("left", [0, 3000])
def test_a_replay_whose_metrics_were_cut_off_is_run_again(lab, undisturbed, left):
    assert lab.run("run", "playbook.yaml", "--out", lab.out)[0] == 0
    metrics = lab.folder.runs / "reward_flipped-x1-s1" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:left])
    lab.folder.result.unlink()
    assert lab.run("run", "--resume", lab.out)[0] == 0
    starts = Counter(lab.started())
    assert starts["run reward_flipped-x1-s1"] == 2 and sorted(starts.values())[-2] == 1
    assert the_same(lab.result()) == undisturbed


def test_ctrl_c_stops_everything_and_prints_the_command_that_resumes(lab, undisturbed):
    viewer = begin(lab)
    viewer.send_signal(signal.SIGINT)
    _, err = viewer.communicate(timeout=20)
    assert viewer.returncode == 130
    assert lab.processes() == []
    assert (lab.events()[-1].kind, lab.events()[-1].status, lab.events()[-1].exit_code) == (
        "end",
        "interrupted",
        130,
    )
    command = shlex.split(re.search(r"resume with: (.*)", err)[1])
    assert command == ["diagnose", "run", "--resume", str(lab.out)]
    assert lab.run(*command[1:])[0] == 0
    assert the_same(lab.result()) == undisturbed


def replayed(lab):
    """Whether a healthy replay and one with a fault are done, and others are not."""
    done = done_runs(lab)
    return len({run.startswith("healthy") for run in done}) == 2 and len(done) < RUNS


def test_a_stopped_run_leaves_a_verdict_on_what_is_done(lab, undisturbed):
    viewer = lab.popen("run", "playbook.yaml", "--out", lab.out, "--workers", "2", **SLOW)
    wait_for(lambda: replayed(lab))
    viewer.send_signal(signal.SIGINT)
    out, _ = viewer.communicate(timeout=20)
    assert viewer.returncode == 130 and lab.events()[-1].status == "interrupted"
    assert "The experiment was not completed (interrupted). On what there is:" in " ".join(out.split())
    stored = lab.result()
    waiting = {fault for fault, why in stored["not_tried"].items() if "the run was interrupted" in why}
    ranked = {row["fault"] for row in stored["ranking"]}
    assert stored["status"] == "interrupted" and stored["verdict"] != "reproduced"
    assert ranked and waiting and not ranked & waiting
    assert lab.run("run", "--resume", lab.out)[0] == 0
    assert the_same(lab.result()) == undisturbed


def test_a_second_ctrl_c_ends_at_once(lab):
    viewer = begin(lab, FAKE_STEP_S="0.06")
    os.kill(runner_pid(lab), signal.SIGSTOP)  # a runner that takes its time to end
    viewer.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert viewer.poll() is None
    viewer.send_signal(signal.SIGINT)
    _, err = viewer.communicate(timeout=20)
    assert viewer.returncode == 130 and "resume with" in err
    wait_for(lambda: not lab.processes())


def test_stopping_more_work_on_a_finished_run_keeps_its_verdict(lab, undisturbed):
    assert lab.run("run", "playbook.yaml", "--out", lab.out)[0] == 0
    (lab.folder.runs / "reward_flipped-x1-s1" / "outcome.json").unlink()
    viewer = lab.popen("run", "--resume", lab.out, **SLOW)
    wait_for(lambda: lab.started().count("run reward_flipped-x1-s1") == 2)
    viewer.send_signal(signal.SIGINT)
    viewer.communicate(timeout=20)
    assert viewer.returncode == 130
    assert the_same(lab.result()) == undisturbed


def test_after_a_killed_runner_the_viewer_tells_the_verdict_on_what_is_done(lab):
    viewer = lab.popen("run", "playbook.yaml", "--out", lab.out, "--workers", "2", "--json", **SLOW)
    wait_for(lambda: replayed(lab))
    os.kill(runner_pid(lab), signal.SIGKILL)
    out, _ = viewer.communicate(timeout=20)
    assert viewer.returncode == 4 and not lab.folder.result.exists()
    told = json.loads(out)
    assert told["status"] == "failed" and told["ranking"]


def test_a_worker_that_dies_fails_its_run_and_resuming_redoes_it(lab):
    victim = "reward_flipped-x1-s1"
    code, _, err = lab.run("run", "playbook.yaml", "--out", lab.out, FAKE_DIE=victim)
    assert code == 0
    words = "the worker was killed by SIGKILL (often: out of memory): something dreadful"
    assert lab.result()["failures"] == {victim: words}
    assert f"run {victim}: failed" in err and words in err
    assert lab.run("score", lab.out, "-q")[0] == 0

    assert lab.run("run", "--resume", lab.out)[0] == 0
    assert lab.result()["failures"] == {}
    assert Counter(lab.started())[f"run {victim}"] == 2
    assert len(lab.started()) == 1 + RUNS + 1


def test_without_a_healthy_replay_the_run_fails_with_the_reason(lab):
    code, out, err = lab.run(
        "run", "playbook.yaml", "--out", lab.out, "--seeds", "1", "--json", FAKE_FAIL="healthy-s1"
    )
    assert code == 4
    assert "error: no healthy replay came through: no luck" in err
    assert '"status": "failed"' in out and "no luck" in out


@pytest.fixture
def inside(lab, monkeypatch):
    """A run folder, and the environment to carry it out inside this process."""
    monkeypatch.chdir(lab.home)
    for name, value in lab.env.items():
        monkeypatch.setenv(name, value)
    open_run(prepare(lab.playbook), lab.out)
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    yield lab
    for number, handler in handlers:
        signal.signal(number, handler)


def full(*_arguments, **_options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "result.json")


def test_on_a_full_disk_the_run_fails_and_keeps_what_is_finished(inside, monkeypatch, undisturbed, capfd):
    with monkeypatch.context() as patch:
        write = pipeline.write_json
        patch.setattr(
            pipeline,
            "write_json",
            lambda path, value: full() if path.name == "result.json" else write(path, value),
        )
        assert runner.main([str(inside.out)]) == 4
    note = next(event for event in inside.events() if event.kind == "note" and event.level == "error")
    assert note.text == "No space left on device: result.json" and note.mend
    assert (inside.events()[-1].status, inside.events()[-1].exit_code) == ("failed", 4)
    assert len(done_runs(inside)) == RUNS and not inside.folder.is_alive()

    assert invoke(["run", "--resume", str(inside.out), "--quiet"]) == 0
    assert the_same(inside.result()) == undisturbed
    assert len(inside.started()) == 1 + RUNS


def test_a_disk_that_takes_no_event_ends_the_runner_and_its_workers(inside, monkeypatch):
    appended = []

    def append(self, event):
        appended.append(event)
        if len(appended) > 10:
            full()

    monkeypatch.setattr("diagnose.events.EventLog.append", append)
    assert runner.main([str(inside.out)]) == 4
    assert not inside.folder.is_alive()


def test_two_runners_never_share_a_folder(inside):
    with inside.folder.locked(), pytest.raises(RunError, match="already at work"):
        runner.main([str(inside.out)])
    assert inside.started() == []


def test_a_run_of_another_recipe_is_not_taken_for_finished(inside):
    assert runner.main([str(inside.out)]) == 0
    path = inside.out / "session.json"
    path.write_text(path.read_text().replace('"lr": 8e-05', '"lr": 9e-05'))
    assert runner.main([str(inside.out)]) == 0
    assert len(inside.started()) == 1 + 2 * RUNS  # the proxy is the same, every replay is another one


def test_a_playbook_may_leave_the_weights_of_the_views_to_the_builder(lab):
    text = lab.playbook.read_text()
    assert "experts: 12" in text
    lab.playbook.write_text(text.replace("experts: 12", "experts: 12, alpha: auto"))
    assert lab.run("run", "playbook.yaml", "--out", lab.out)[0] == 0
    asked = json.loads((lab.folder.proxy / "proxy_manifest.json").read_text())["spec"]
    assert asked["search_alpha"] and asked["alpha"] == [1 / 3] * 3


@pytest.mark.parametrize(
    "left, words", [(b"{", "has 1 bytes, and was written with 2"), (b"[]", "is not what")]
)
def test_a_damaged_proxy_is_built_anew(inside, left, words):
    assert runner.main([str(inside.out)]) == 0
    config = inside.folder.proxy / "config.json"
    config.write_bytes(left)
    inside.folder.result.unlink()
    assert runner.main([str(inside.out)]) == 0
    assert config.read_bytes() == b"{}"
    assert inside.started().count("build build") == 2
    assert any(words in event.text for event in inside.events() if event.kind == "note")


def test_a_moved_run_folder_builds_its_proxy_where_it_is_now(inside, tmp_path):
    moved = tmp_path / "moved"
    inside.out.rename(moved)
    assert runner.main([str(moved)]) == 0
    assert (moved / "proxy" / "proxy_manifest.json").is_file()
    assert not inside.out.exists()


def test_a_pause_lets_no_further_replay_start_and_changes_nothing(lab, undisturbed):
    viewer = begin(lab)
    lab.folder.pause.touch()
    wait_for(lambda: any("paused" in getattr(event, "text", "") for event in lab.events()))
    before = lab.started()
    assert len(done_runs(lab)) == len(before) - 1 < RUNS  # all that was taken up but the build is done
    lab.folder.pause.unlink()
    viewer.communicate()
    assert the_same(lab.result()) == undisturbed
    assert len(lab.started()) == 1 + RUNS
