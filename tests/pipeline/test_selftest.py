"""`diagnose selftest` and `make study` around the fake worker: plan, fill, diagnose, report, resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diagnose.cli import invoke


@pytest.fixture
def here(lab, monkeypatch):
    monkeypatch.chdir(lab.home)
    for name, value in lab.env.items():
        monkeypatch.setenv(name, value)
    return lab


def test_the_smoke_test_answers_as_the_contract_says_and_resumes(here, capfd):
    assert invoke(["selftest", "--quick", "--runs", "bank", "--plan"]) == 0
    assert "replays" in capfd.readouterr().out
    assert not [start for start in here.started() if start.startswith("run ")]
    assert invoke(["selftest", "--quick", "--runs", "bank", "--json", "--markdown", "page.md"]) == 0
    data = json.loads(capfd.readouterr().out)
    for name in ("top1", "top3", "category", "direction_agreement", "false_alarms"):
        assert set(data[name]) == {"value", "n", "interval_95"}
    assert data["schema"] == 1 and len(data["faults"]) == 3 and data["left_out"] == 0
    assert data["top1"]["n"] == sum(sum(row.values()) for row in data["confusion"].values()) > 0
    assert data["false_alarms"]["n"] == 2
    page = (here.home / "page.md").read_text()
    assert "`diagnose selftest --quick`" in page and str(here.home) not in page
    runs = [start for start in here.started() if start.startswith("run ")]
    assert len(runs) == len(set(runs)) == data["runs"]
    assert invoke(["selftest", "--quick", "--runs", "bank", "--json"]) == 0
    assert [start for start in here.started() if start.startswith("run ")] == runs
    assert json.loads(capfd.readouterr().out)["confusion"] == data["confusion"]


def test_a_time_limit_leaves_a_smaller_test_and_says_so(here, capfd, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    assert invoke(["selftest", "--quick", "--runs", "bank", "--limit", "3", "--json"]) == 0
    out, err = capfd.readouterr()
    data = json.loads(out)
    assert data["left_out"] > 0 and f"{data['left_out']} runs are missing" in err


def test_the_study_runs_its_parts_on_the_same_bank(here):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.study",
            "--quick",
            "--runs",
            "bank",
            "--only",
            "open",
            "--only",
            "healthy",
        ],
        cwd=here.home,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Open set" in done.stdout and "Healthy incidents" in done.stdout, done.stderr
    assert not (here.home / "docs").exists()  # a smoke test leaves the page alone
