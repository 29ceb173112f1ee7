"""verl's own remedies against the installed verl: its configuration has every setting, its classes take the values."""

import json
import subprocess

import pytest

from taxonomy.remedies import OF_VERL

COMPOSE = """
import json, os, sys
from pathlib import Path
import verl
from hydra import compose, initialize_config_dir
home = Path(verl.__file__).parent / "trainer" / "config"
found = {}
with initialize_config_dir(str(home), version_base=None):
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold, _parse_rollout_rs_thresholds
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.utils.config import omega_conf_to_dataclass
    for name, trainer, overrides in json.load(sys.stdin):
        config = compose(trainer, overrides=overrides)
        settings = omega_conf_to_dataclass(config.algorithm.rollout_correction, RolloutCorrectionConfig)
        bounds = _parse_rollout_is_threshold(settings.rollout_is_threshold)
        if settings.rollout_rs:
            _parse_rollout_rs_thresholds([settings.rollout_rs], settings.rollout_rs_threshold)
        found[name] = [settings.rollout_is, list(bounds), settings.rollout_rs,
                       bool(config.actor_rollout_ref.rollout.enable_rollout_routing_replay)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def composed(verl_python):
    asked = [
        (
            remedy.id,
            "ppo_megatron_trainer" if remedy.needs else "ppo_trainer",
            [f"{name}={value}" for name, value in remedy.hydra.items()],
        )
        for remedy in OF_VERL
    ]
    done = subprocess.run(
        [str(verl_python), "-c", COMPOSE], input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_verls_configuration_has_every_setting(composed):
    assert set(composed) == {remedy.id for remedy in OF_VERL}


def test_the_settings_mean_what_the_remedy_says(composed):
    level, bounds, rejected, replay = zip(
        *(composed[name] for name in ("sequence_weights", "masked_weights", "rejection", "router_replay")),
        strict=True,
    )
    assert level == ("sequence", "token", None, None)
    assert bounds[0] == [2.0, None] and bounds[1] == [5.0, 0.5]
    assert rejected == (None, None, "seq_mean_k3", None)
    assert replay == (False, False, False, True)
