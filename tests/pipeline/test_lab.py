"""Commands around the incident: logs with papers but without answers, calibrations that later runs find."""

import hashlib
import json

import pytest

from diagnose.cli import invoke
from diagnose.score.calibration import Calibration, CalibrationMismatch
from diagnose.session import recipe_hash
from proxy.specs import Recipe
from taxonomy.registry import library


@pytest.fixture
def here(lab, monkeypatch):
    monkeypatch.chdir(lab.home)
    for name, value in lab.env.items():
        monkeypatch.setenv(name, value)
    return lab


def record(*options):
    return invoke(["record", "--checkpoint", "embedded:qwen3_moe", "--steps", "24", *options])


def test_a_recorded_log_has_papers_and_its_answer_lies_elsewhere(here):
    answers = here.home / "hidden" / "answers.json"
    answers.parent.mkdir()
    fault = ["--fault", "stale_weights", "--strength", "0.5", "--from-step", "9", "--answers", str(answers)]
    assert record("--out", "logs/a.jsonl", "--seed", "3", "--set", "lr=1e-4", *fault) == 0
    assert record("--out", "logs/b.jsonl", "--seed", "4") == 0
    log = here.home / "logs" / "a.jsonl"
    assert len(log.read_text().splitlines()) == 24
    text = log.with_suffix(".manifest.json").read_text()
    manifest = json.loads(text)
    assert manifest["sha256"] == hashlib.sha256(log.read_bytes()).hexdigest()
    assert (manifest["seed"], manifest["model_hash"]) == (3, "fake-original")
    assert (manifest["recipe"]["lr"], manifest["recipe"]["steps"]) == (1e-4, 24)
    assert manifest["command"].endswith("--seed 3 --steps 24 --set lr=1e-4 --out a.jsonl")
    assert not any(word in text for word in ("stale", "fault", "strength", "from_step", str(here.home)))
    assert json.loads(answers.read_text())["a.jsonl"] | {"witness": None} == {
        "fault": "stale_weights",
        "strength": 0.5,
        "from_step": 9,
        "params": library()["stale_weights"].values(0.5),
        "witness": None,
    }
    assert list(json.loads(answers.read_text())) == ["a.jsonl"]


def test_a_calibration_is_found_by_the_runs_it_belongs_to(here):
    home = here.home / "data" / "rl-diagnose" / "calibrations"
    home.mkdir(parents=True)
    options = ["--checkpoint", "embedded:qwen3_moe", "--experts", "12", "--seeds", "20", "--steps", "24"]
    assert invoke(["calibrate", *options, "--out", str(home / "c.npz")]) == 0
    assert sorted(path.name for path in home.iterdir()) == ["c.manifest.json", "c.npz"]
    calibration = Calibration.load(home / "c.npz")
    assert calibration.proxy.values_SMN.shape[0] == calibration.original.values_SMN.shape[0] == 20
    calibration.check(
        proxy_hash="fake", recipe_hash=recipe_hash(Recipe(steps=24)), original_hash="fake-original"
    )
    seeds = {start for start in here.started() if start.startswith("run proxy-s")}
    assert len(seeds) == 20 and "run proxy-s1" not in seeds  # apart from the seeds of replays

    code, _, err = here.run("run", "playbook.yaml", "--out", here.out, "--workers", "2")
    assert code == 0 and "no healthy seeds on file" not in err
    assert (here.out / "calibration.npz").read_bytes() == (home / "c.npz").read_bytes()
    code, _, err = here.run("run", "playbook.yaml", "--steps", "25", "--out", here.home / "other")
    assert code == 0 and "no healthy seeds on file" in err


def test_an_interrupted_calibration_goes_on(here, monkeypatch):
    options = ["--checkpoint", "embedded:qwen3_moe", "--seeds", "3", "--steps", "24", "--out", "c.npz"]
    monkeypatch.setenv("FAKE_DIE", "proxy-s1003")
    assert invoke(["calibrate", *options, "--workers", "1"]) == 4
    monkeypatch.delenv("FAKE_DIE")
    assert invoke(["calibrate", *options, "--workers", "1"]) == 0
    runs = [start for start in here.started() if start.startswith("run")]
    assert runs == ["run proxy-s1001", "run proxy-s1002", "run proxy-s1003", "run proxy-s1003"]
    with pytest.raises(CalibrationMismatch):
        Calibration.load(here.home / "c.npz").check(proxy_hash="fake", recipe_hash="other")


def test_dynamics_are_rows_of_healthy_runs(here, capfd):
    command = ["proxy", "dynamics", "embedded:qwen3_moe", "--experts", "12,16", "--seeds", "2"]
    assert invoke([*command, "--steps", "20", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)["rows"]
    assert {row["model"] for row in rows} == {"original", "proxy-12", "proxy-16"}
    reward = next(row for row in rows if row["metric"] == "critic/rewards/mean")
    assert len(reward["curve"]) == 20 and reward["seeds"] == 2
    assert reward["change"] == pytest.approx(reward["end"] - reward["start"])
    assert reward["change"] > 0.05 and reward["error"] > 0
    assert invoke([*command, "--steps", "20"]) == 0
    assert "critic/rewards/mean" in capfd.readouterr().out


def test_building_reports_what_was_built(here, capfd):
    command = ["proxy", "build", "embedded:qwen3_moe", "--experts", "12", "--alpha", "2,1,1"]
    assert invoke([*command, "--out", "cut", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["spec"]["alpha"] == [0.5, 0.25, 0.25]
    assert invoke([*command[:-1], "1,x,2", "--out", "cut2"]) == 2


@pytest.mark.parametrize("left", [True, False])
def test_a_build_that_is_interrupted_says_how_it_goes_on(here, capfd, monkeypatch, left):
    def stop(*_):
        if left:
            (here.home / ".cut.building").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("diagnose.jobs.run_job", stop)
    command = ["proxy", "build", "embedded:qwen3_moe", "--experts", "12", "--out", "cut"]
    assert invoke(command) == 130
    assert ("the same command goes on" in capfd.readouterr().err) == left


@pytest.mark.parametrize("alpha", ["nan,1,1", "inf,1,1", "-1,1,1", "0,0,0", "1,1", ""])
def test_weights_that_are_none_are_refused_where_they_are_read(here, capfd, alpha):
    command = ["proxy", "build", "embedded:qwen3_moe", "--experts", "12", "--out", "cut"]
    assert invoke([*command, f"--alpha={alpha}"]) == 2
    err = capfd.readouterr().err
    assert "three numbers of at least 0" in err and "mend: 1,1,1" in err and here.started() == []
