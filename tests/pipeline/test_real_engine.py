"""The whole way with nothing faked: shipped incident, real build, real training, against the answers kept apart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import playbooks
from diagnose.calibrations import shipped_folder
from diagnose.score.calibration import Calibration
from diagnose.session import recipe_hash
from proxy.embedded import resolve
from proxy.manifest import checkpoint_hash
from proxy.specs import Recipe

ANSWERS = Path(__file__).parents[1] / "fixtures" / "answers"
SHIPPED = Path(playbooks.__file__).parent
SUSPECTS = """
candidates:
  - {fault: kl_sign_flipped}
  - {fault: learning_rate_too_high}
  - {fault: reward_flipped}
"""


def diagnose(*words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "diagnose", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """`kl_spike` with three of its suspects and one seed: six real runs on two cores."""
    home = tmp_path_factory.mktemp("real")
    text = (SHIPPED / "kl_spike.yaml").read_text().replace("logs/", f"{SHIPPED}/logs/")
    (home / "incident.yaml").write_text(
        text.replace("candidates: auto", SUSPECTS).replace("seconds: 120", "seconds: 600")
    )
    found = diagnose("run", home / "incident.yaml", "--seeds", 1, "--out", home / "run", "--json")
    return found, home / "run"


def test_the_hidden_fault_of_the_shipped_incident_comes_first_and_alone(answer):
    found, _ = answer
    wanted = json.loads((ANSWERS / "kl_spike.json").read_text())["incident.jsonl"]
    first = found["ranking"][0]
    assert (first["fault"], first["rivals"]) == (wanted["fault"], [])
    assert first["metrics"]["actor/kl_loss"]["original"] == first["metrics"]["actor/kl_loss"]["proxy"] == "up"
    assert all(item["witness_ok"] for item in found["ranking"])


def test_the_replays_start_where_the_incident_did(answer):
    _, home = answer
    steps = {
        json.loads(path.read_text())["spec"]["fault"]["from_step"]
        for path in home.glob("runs/*/spec.json")
        if json.loads(path.read_text())["spec"]["fault"]
    }
    wanted = json.loads((ANSWERS / "kl_spike.json").read_text())["incident.jsonl"]["from_step"]
    assert len(steps) == 1 and abs(steps.pop() - wanted) <= 5


def test_the_shipped_healthy_seeds_are_in_force(answer):
    _, home = answer
    assert (home / "calibration.npz").exists()


def test_scoring_again_gives_the_same_answer(answer):
    found, home = answer
    again = diagnose("score", home, "--json")
    for moving in ("wall_s",):
        found.pop(moving), again.pop(moving)
    assert again == found


@pytest.mark.parametrize("path", sorted(shipped_folder().glob("*.npz")), ids=lambda path: path.stem)
def test_shipped_healthy_seeds_belong_to_the_shipped_model_and_recipe(path):
    """Whoever changes a model or the default recipe must run `diagnose calibrate` again."""
    stored = Calibration.load(path)
    assert stored.original_hash == checkpoint_hash(resolve(f"embedded:{path.stem.rpartition('-')[0]}"))
    assert stored.recipe_hash == recipe_hash(Recipe())
    assert len(stored.proxy.values_SMN) >= 20
    assert len(stored.original.values_SMN) >= 20
