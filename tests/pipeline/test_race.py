"""`candidates: auto`: the race from playbook to verdict with the fake worker, and what it survives."""

import json
import os
import signal
import sys
from collections import Counter

import pytest

from diagnose.report.json import from_json
from tests.pipeline import fake_worker
from tests.pipeline.lab import make_lab, wait_for

TRUTH = "learning_rate_too_high"
PLAYBOOK = """\
version: 1
name: demo
symptom: kl_divergence_increase
original: {{faulty: incident.jsonl, healthy: [healthy_1.jsonl, healthy_2.jsonl]}}
proxy: {{from: checkpoint, checkpoint: "embedded:qwen3_moe", experts: 12}}
recipe: {{steps: 24, seeds: 2}}
candidates: {candidates}
budget: {{seconds: {seconds}}}
"""


def racing(home, strength=2.0, candidates="auto", seconds=600):
    lab = make_lab(home)
    fake_worker.write_log(home / "incident.jsonl", TRUTH, 7, steps=24, strength=strength)
    lab.playbook.write_text(PLAYBOOK.format(candidates=candidates, seconds=seconds))
    return lab


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """A finished race; read only."""
    lab = racing(tmp_path_factory.mktemp("race"))
    lab.code, lab.stdout, lab.stderr = lab.run("run", "playbook.yaml", "--out", lab.out, "--json")
    return lab


def same(answer):
    keys = ("verdict", "reasons", "ranking", "not_tried", "stopped_early", "failures")
    return {key: answer[key] for key in keys}


def replays(lab, fault=TRUTH):
    return sorted(word for word in lab.started() if word.startswith(f"run {fault}-"))


def test_the_strength_of_the_incident_is_found_with_an_interval_and_losers_stop_after_one_replay(raced):
    assert raced.code == 0, raced.stderr
    answer = json.loads(raced.stdout)
    first = answer["ranking"][0]
    assert (first["fault"], first["severity"]) == (TRUTH, 2.0)
    assert first["severity_interval"]["low"] < 2.0 < (first["severity_interval"]["high"] or 9)
    assert TRUTH not in answer["stopped_early"] and len(answer["stopped_early"]) > len(answer["ranking"]) / 2
    assert all(len(replays(raced, fault)) == 1 for fault in answer["stopped_early"])
    assert {"-x0.5-s1", "-x1-s1", "-x2-s1", "-x2-s2"} <= {
        run.removeprefix(f"run {TRUTH}") for run in replays(raced)
    }
    assert set(Counter(raced.started()).values()) == {1}


def test_reports_say_which_strength_and_who_stopped(raced):
    code, out, _ = raced.run("score", raced.out)
    assert code == 0
    assert "Strength that fits best" in out and "high: × 2" in " ".join(out.split())
    assert "Stopped early" in out and "too far behind the nearest" in " ".join(out.split())
    assert from_json(json.loads(raced.stdout)).score.ranking[0].severity_interval is not None


def test_a_finished_race_is_walked_again_without_a_replay_and_to_the_same_end(raced):
    before = len(raced.started())
    code, out, _ = raced.run("run", "--resume", raced.out, "--json")
    assert code == 0 and len(raced.started()) == before
    assert same(json.loads(out)) == same(json.loads(raced.stdout))
    code, out, _ = raced.run("score", raced.out, "--json")
    assert same(json.loads(out)) == same(json.loads(raced.stdout))


def test_a_killed_race_goes_on_where_it_stood(tmp_path, raced):
    lab = racing(tmp_path)
    viewer = lab.popen("run", "playbook.yaml", "--out", lab.out, "--workers", "2", FAKE_STEP_S="0.01")
    breadth = 2 + sum(word.endswith("-x1-s1") for word in raced.started())
    wait_for(lambda: sum(e.kind == "run" and e.status == "done" for e in lab.events()) > breadth)
    finished = {e.run for e in lab.events() if e.kind == "run" and e.status == "done"}
    os.kill(int((lab.out / "runner.pid").read_text()), signal.SIGKILL)
    viewer.communicate(timeout=20)
    wait_for(lambda: not lab.processes())
    code, out, err = lab.run("run", "--resume", lab.out, "--json")
    assert code == 0, err
    assert same(json.loads(out)) == same(json.loads(raced.stdout))
    starts = Counter(lab.started())
    assert all(starts[f"run {run}"] == 1 for run in finished)
    assert sum(count - 1 for count in starts.values()) <= 2  # what the two workers had in hand


def test_the_number_of_workers_does_not_change_the_race(tmp_path, raced):
    lab = racing(tmp_path)
    code, out, _ = lab.run("run", "playbook.yaml", "--out", lab.out, "--json", "--workers", "1")
    assert code == 0 and same(json.loads(out)) == same(json.loads(raced.stdout))


def test_a_spent_budget_ends_the_race_and_stays_spent(tmp_path):
    lab = racing(tmp_path, seconds=0.1)
    _, out, _ = lab.run("run", "playbook.yaml", "--out", lab.out, "--json", "--workers", "1")
    answer = json.loads(out)
    assert len(answer["ranking"]) == 1  # one worker: the likeliest candidate is replayed whatever it costs
    assert all("budget of 0.1 s" in reason for reason in answer["not_tried"].values())
    rungs = json.loads(lab.folder.race.read_text())["rungs"]
    assert list(rungs) == ["breadth"]  # no strength or seed more while candidates wait for their first replay
    before = len(lab.started())
    _, again, _ = lab.run("run", "--resume", lab.out, "--json")
    assert same(json.loads(again)) == same(answer) and len(lab.started()) == before


def test_a_spent_budget_can_be_raised_when_the_run_is_resumed(tmp_path, raced):
    lab = racing(tmp_path, seconds=0.1)
    lab.run("run", "playbook.yaml", "--out", lab.out, "--json", "--workers", "1")
    before = lab.started()
    slow = lab.folder.runs / "healthy-s1" / "outcome.json"
    slow.write_text(json.dumps(json.loads(slow.read_text()) | {"wall_s": 50.0}))
    code, out, _ = lab.run("run", "--resume", lab.out, "--json", "--budget", "600")
    assert code == 0 and same(json.loads(out)) == same(json.loads(raced.stdout))
    assert lab.started()[: len(before)] == before and len(set(lab.started())) == len(lab.started())
    added = lab.folder.added_s()  # on top of what was spent, not of the budget that should have been enough
    assert added == pytest.approx(649.9, abs=5)
    code, _, err = lab.run("run", "--resume", lab.out, "--budget", "0")
    assert code == 4 and "above 0" in err and lab.folder.added_s() == added


def test_the_command_line_sets_the_budget(tmp_path):
    lab = racing(tmp_path, seconds=0.1)
    code, out, _ = lab.run("run", "playbook.yaml", "--dry-run", "--json", "--budget", "7")
    plan = json.loads(out)
    assert code == 0 and plan["budget_s"] == 7 and plan["race"]
    assert [run for run in plan["runs"] if run.endswith("-s2")] == ["healthy-s2"]
    code, out, _ = lab.run("run", "playbook.yaml", "--dry-run", "--budget", "0")
    assert "no time limit" in out and "strengths and further seeds" in out


def test_an_embedded_original_has_two_minutes_where_nobody_says_otherwise(tmp_path):
    lab = racing(tmp_path)
    text = lab.playbook.read_text().replace("budget: {seconds: 600}\n", "")
    lab.playbook.write_text(text)
    assert json.loads(lab.run("run", "playbook.yaml", "--dry-run", "--json")[1])["budget_s"] == 120
    lab.playbook.write_text(text.replace("auto", f"[{{fault: {TRUTH}}}]"))
    assert json.loads(lab.run("run", "playbook.yaml", "--dry-run", "--json")[1])["budget_s"] is None


def test_named_candidates_are_run_as_asked_and_fitted_only_where_it_says_so(tmp_path):
    lab = racing(
        tmp_path, candidates=f"[{{fault: {TRUTH}, strength: fit}}, {{fault: reward_flipped, strength: 0.5}}]"
    )
    code, out, _ = lab.run("run", "playbook.yaml", "--out", lab.out, "--json")
    answer = json.loads(out)
    assert code == 0 and answer["stopped_early"] == {}
    assert replays(lab, "reward_flipped") == ["run reward_flipped-x0.5-s1", "run reward_flipped-x0.5-s2"]
    assert (answer["ranking"][0]["fault"], answer["ranking"][0]["severity"]) == (TRUTH, 2.0)
    assert answer["ranking"][1]["severity_interval"] is None


def test_a_healthy_log_costs_one_replay_a_candidate(tmp_path):
    lab = racing(tmp_path)
    fake_worker.write_log(lab.home / "incident.jsonl", None, 7, steps=24)
    _, out, _ = lab.run("run", "playbook.yaml", "--out", lab.out, "--json")
    answer = json.loads(out)
    assert answer["verdict"] in ("no_fault", "inconclusive")
    assert all(len(replays(lab, c["fault"])) == 1 for c in answer["ranking"])


def test_the_first_replays_are_of_the_faults_whose_cards_fit_the_log_best(raced):
    order = [word.split("-x")[0] for word in raced.started() if "-x1-s1" in word]
    assert order.index(f"run {TRUTH}") <= 2


def test_probes_and_remedies_are_run_when_asked_for_and_only_then(raced, tmp_path):
    candidates = f"[{{fault: {TRUTH}}}, {{fault: excess_inner_epochs}}, {{fault: kl_sign_flipped}}]"
    lab = racing(tmp_path, strength=1.0, candidates=candidates)
    code, out, _ = lab.run("run", "playbook.yaml", "--out", lab.out, "--json", "--try-fix", "--probe")
    answer = json.loads(out)
    assert code == 0
    assert json.loads(raced.stdout)["remedies"] == [] == json.loads(raced.stdout)["probes"]
    outcomes = {item["remedy"]: item["outcome"] for item in answer["remedies"]}
    assert outcomes, "the card of the first candidate names no remedy"
    assert set(outcomes.values()) == {"does not help"}  # the fake engine knows of none
    assert not list(lab.folder.runs.glob("fix.*"))
    code, text, _ = lab.run("score", lab.out)
    assert "Would it help?" in text and "does not help" in text
    before = len(lab.started())
    assert lab.run("run", "--resume", lab.out, "--quiet")[0] == 0 and len(lab.started()) == before


def test_on_verl_its_own_remedies_are_tried_and_what_its_engine_lacks_is_named(tmp_path, monkeypatch):
    python = tmp_path / "env" / "bin" / "python"
    version = tmp_path / "env" / "lib" / "python3" / "site-packages" / "verl" / "version" / "version"
    for file in (python, version):
        file.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    version.write_text("0.9.1")
    monkeypatch.setenv("DIAGNOSE_VERL_PYTHON", str(python))
    lab = racing(tmp_path, candidates="[{fault: weight_sync_skipped}, {fault: kl_sign_flipped}]")
    fake_worker.write_log(lab.home / "incident.jsonl", "weight_sync_skipped", 7, steps=24)
    order = ["run", "playbook.yaml", "--out", lab.out, "--json", "--engine", "verl", "--try-fix", "--probe"]
    code, out, err = lab.run(*order)
    assert code == 0, err
    assert "probes are run by the local engine alone" in err
    outcomes = {item["remedy"]: item["outcome"] for item in json.loads(out)["remedies"]}
    assert outcomes["sequence_weights"] == outcomes["same_precision"] == "does not help"
    assert outcomes["router_replay"].startswith("needs verl's Megatron")
    assert not [word for word in lab.started() if "router_replay" in word]
