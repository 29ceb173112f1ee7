"""`diagnose run` and `diagnose score` from playbook to verdict, with a fake worker."""

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from tests.pipeline import fake_worker
from tests.pipeline.lab import RUNS


def test_the_true_fault_comes_first_and_stdout_is_json_alone(done):
    assert done.code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer == done.result()
    assert (answer["schema"], answer["status"], answer["verdict"]) == (1, "completed", "reproduced")
    assert answer["ranking"][0]["fault"] == "learning_rate_too_high"
    assert len(answer["ranking"]) == 3
    assert all(candidate["witness_ok"] for candidate in answer["ranking"])
    assert answer["run_dir"] == str(done.out)
    assert answer["proxy"]["experts"] == 12 and answer["proxy"]["source"] == "checkpoint"


def test_every_replay_was_run_once_healthy_first_then_one_seed_of_each_candidate(done):
    started = done.started()
    assert started[0] == "build build"
    assert len(started) == len(set(started)) == 1 + RUNS
    runs = [event.run for event in done.events() if event.kind == "run" and event.status == "queued"]
    assert runs[:2] == ["healthy-s1", "healthy-s2"]
    assert [run.rsplit("-s", 1)[1] for run in runs[2:]] == ["1", "1", "1", "2", "2", "2"]


def test_the_events_tell_the_whole_story_in_order(done):
    kinds = [event.kind for event in done.events()]
    assert kinds[0] == "session" and kinds[-1] == "end" and kinds[-2] == "verdict"
    stages = [(event.stage, event.status) for event in done.events() if event.kind == "stage"]
    assert [stage for stage, status in stages if status == "done"] == [
        "import",
        "build",
        "replay",
        "score",
        "report",
    ]
    steps = [event for event in done.events() if event.kind == "step"]
    assert len(steps) == RUNS * 24 and all(event.data for event in steps)
    ended = [event for event in done.events() if event.kind == "run" and event.status == "done"]
    assert len(ended) == RUNS
    assert all(event.witness for event in ended if event.fault)
    assert (done.events()[-1].status, done.events()[-1].exit_code) == ("completed", 0)


def test_reports_are_written(done):
    suite = ET.fromstring(done.files["junit"].read_text())
    assert suite.get("failures") == "0" and suite.get("tests") == "4"
    assert done.files["html"].read_text().lstrip().lower().startswith("<!doctype html>")
    assert "Learning rate far too high" in done.files["markdown"].read_text()


def test_narration_is_plain_lines_on_stderr(done):
    assert "\x1b" not in done.stderr
    assert f"run folder: {done.out}" in done.stderr
    assert f"({RUNS}/{RUNS})" in done.stderr


def test_score_recomputes_the_same_verdict_although_the_logs_have_vanished(done):
    for log in done.home.glob("*.jsonl"):
        log.rename(log.with_suffix(".gone"))
    before = done.folder.result.read_bytes()
    code, out, err = done.run("score", done.out, "--json")
    assert code == 0, err
    assert json.loads(out) == done.result()
    assert done.folder.result.read_bytes() == before
    for log in done.home.glob("*.gone"):
        log.rename(log.with_suffix(".jsonl"))


def test_score_of_four_groups_of_logs(done):
    proxy = sorted(done.folder.runs.glob("healthy-*/metrics.jsonl"))
    faulty = sorted(done.folder.runs.glob("learning_rate_too_high-*/metrics.jsonl"))
    options = ["--original-faulty", "incident.jsonl", "--fault", "learning_rate_too_high"]
    for seed in (1, 2):
        options += ["--original-healthy", f"healthy_{seed}.jsonl"]
    options += [word for path in proxy for word in ("--proxy-healthy", path)]
    options += [word for path in faulty for word in ("--proxy-faulty", path)]
    code, out, err = done.run("score", *options, "--json")
    answer = json.loads(out)
    assert code == 0, err
    assert answer["verdict"] == "reproduced_not_specific"  # nothing was compared with it
    assert answer["ranking"][0]["fault"] == "learning_rate_too_high"
    code, _, err = done.run("score", *options[:2])
    assert code == 2 and "--proxy-healthy is missing" in err


def test_a_completed_run_is_only_scored_again(done):
    before = len(done.started())
    code, out, _ = done.run("run", "--resume", done.out, "--json")
    assert code == 0 and len(done.started()) == before
    answer, stored = json.loads(out), json.loads(done.stdout)
    assert answer["ranking"] == stored["ranking"] and answer["verdict"] == stored["verdict"]


def test_expectations_decide_the_exit_code(lab):
    lab.write_playbook(more="expect: {fault: reward_flipped, verdict: reproduced}")
    code, out, _ = lab.run("run", "playbook.yaml", "--out", lab.out, "--json", "--junit", "j.xml")
    assert code == 1 and json.loads(out)["verdict"] == "reproduced"
    assert ET.parse(lab.home / "j.xml").getroot().get("failures") == "1"


def test_too_short_a_log_is_inconclusive(lab):
    fake_worker.write_log(lab.home / "incident.jsonl", "learning_rate_too_high", 7, steps=4)
    code, out, _ = lab.run("run", "playbook.yaml", "--out", lab.out, "--json", "--seeds", "1")
    assert code == 5 and json.loads(out)["verdict"] == "inconclusive"
    assert json.loads(out)["seeds"] == [1]


def test_a_spent_budget_lists_what_was_not_tried(lab):
    lab.write_playbook(more="budget: {seconds: 0.1}")
    _, out, err = lab.run("run", "playbook.yaml", "--out", lab.out, "--json", FAKE_STEP_S="0.01")
    answer = json.loads(out)
    assert set(answer["not_tried"]) == {"reward_flipped"}  # the first two are run whatever they cost
    assert {item["fault"] for item in answer["ranking"]} == {"excess_inner_epochs", "learning_rate_too_high"}
    assert all("budget of 0.1 s" in reason for reason in answer["not_tried"].values())
    assert sorted(run for run in lab.started() if "healthy" in run) == ["run healthy-s1", "run healthy-s2"]
    assert "left out" in err


def test_a_dry_run_touches_nothing(lab):
    code, out, _ = lab.run("run", "playbook.yaml", "--dry-run", "--json", "--workers", "1", "--steps", "30")
    plan = json.loads(out)
    assert code == 0 and len(plan["runs"]) == RUNS and plan["workers"] == 1
    assert plan["recipe"]["steps"] == 30
    assert not (lab.home / "state").exists() and lab.started() == []


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["run", "broken.yaml"], 2, "broken.yaml:1:1: "),
        (["run", "nowhere.yaml"], 2, "no playbook"),
        (["run", "playbook.yaml", "--engine", "vllm"], 2, "this version's engines are: local, verl"),
        (["run", "no_log.yaml"], 3, "gone.jsonl: No such file"),
        (
            ["run", "too_many.yaml"],
            2,
            "too_many.yaml:5:70: cannot keep 33 experts a layer: the checkpoint has 32",
        ),
        (["record", "--checkpoint", "x", "--out", "incident.jsonl"], 2, "incident.jsonl is there already"),
        (["run", "playbook.yaml", "--out", "."], 4, "not an empty folder"),
        (["run", "--resume"], 4, "there is no run to resume"),
        (["run", "--resume", "--seeds", "3"], 2, "keeps its engine, seeds, steps"),
        (["score", "playbook.yaml"], 4, "not a run folder"),
        (["score"], 2, "nothing to score"),
        (["faults", "no_such_fault"], 2, "unknown fault"),
        (["logs", "gone.jsonl"], 3, "gone.jsonl: No such file"),
        ([], 2, "needs a terminal"),
        (["rum"], 2, "No such command 'rum'"),
        (["run", "playbook.yaml", "--seeds", "0"], 2, "see: diagnose run --help"),
        (["proxy", "inspect", "embedded:nothing"], 2, "unknown embedded checkpoint"),
        (["record", "--checkpoint", "x", "--out", "o.jsonl", "--fault", "stale_weights"], 2, "--answers"),
        (["record", "--checkpoint", "x", "--out", "o.jsonl", "--set", "speed=1"], 2, "no setting 'speed'"),
        (["record", "--checkpoint", "x", "--out", "o.jsonl", "--set", "lr=nan"], 2, "lr must be"),
        (
            ["record", "--checkpoint", "x", "--out", "o.jsonl", "--set", "prompts=0"],
            2,
            "prompts must be at least 1",
        ),
        (
            ["record", "--checkpoint", "x", "--out", "o.jsonl", "--set", "temperature=0"],
            2,
            "temperature must be",
        ),
        (
            ["calibrate", "--checkpoint", "x", "--out", "o.npz", "--set", "group_size=-1"],
            2,
            "group_size must be",
        ),
        (["proxy", "compare", "x", "--experts", "a"], 2, "whole numbers"),
    ],
)
def test_errors_are_a_line_and_a_mend_without_a_traceback(lab, monkeypatch, capfd, options, code, words):
    from diagnose.cli import invoke

    (lab.home / "broken.yaml").write_text("nonsense: 1\n")
    (lab.home / "too_many.yaml").write_text(lab.playbook.read_text().replace("experts: 12", "experts: 33"))
    (lab.home / "no_log.yaml").write_text(lab.playbook.read_text().replace("incident", "gone"))
    monkeypatch.chdir(lab.home)
    for name, value in lab.env.items():
        monkeypatch.setenv(name, value)
    assert invoke(options) == code
    out, err = capfd.readouterr()
    assert words in err and err.startswith("error: ") and "Traceback" not in err
    assert out == ""
    assert lab.started() == []


def test_the_mend_for_a_log_that_is_not_there_does_not_send_one_to_read_it(lab):
    lab.playbook.write_text(lab.playbook.read_text().replace("incident", "gone"))
    code, _, err = lab.run("run", "playbook.yaml", "--dry-run")
    assert code == 3 and "correct its path" in err and "diagnose logs" not in err


def test_an_answer_is_printed_even_where_the_encoding_lacks_its_characters(done):
    code, out, err = done.run("score", done.out, PYTHONIOENCODING="ascii")
    assert code == 0, err
    assert "Learning rate far too high" in out


def test_scoring_a_run_folder_that_lost_the_incident_says_so(done, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(done.out, copy)
    for path in (copy / "inputs").glob("faulty_*"):
        path.unlink()
    code, out, err = done.run("score", copy)
    assert (code, out) == (3, "") and "holds no curves of the incident" in err


def test_scoring_never_loads_torch(done):
    code = (
        "import sys; from diagnose.cli import invoke; code = invoke(sys.argv[1:]);"
        "sys.exit(code or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", code, "score", str(done.out), "--quiet"]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
