"""What a run adds to the user's command: pure, and nothing of the user's is lost."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from proxy.engines import platforms, verl_job, verl_own
from proxy.engines.verl_command import key
from proxy.specs import EngineSpec, FaultSpec, Launch, Recipe, RunSpec

LAUNCH = Launch(
    flags=("-m", "verl.trainer.main_ppo", "--config-name=mine"),
    overrides=(
        "data.train_files=d.parquet",
        "actor_rollout_ref.model.path=/big",
        "+data.x=1",
        "trainer.logger=[wandb]",
    ),
    environment=(("NCCL_DEBUG", "INFO"), ("VERL_USE_EXTERNAL_MODULES", "my_recipe")),
    platform="cuda",
    accelerators=8,
    directory="/data/project",
    strategy="fsdp2",
    rollout="vllm",
)
SPEC = RunSpec("/proxy", Recipe(steps=5, old_log_prob="trainer"), 7, None, EngineSpec("verl", launch=LAUNCH))
HOME, MODEL = Path("/run/verl"), Path("/proxy")


def with_launch(**changes):
    return replace(SPEC, engine=replace(SPEC.engine, launch=replace(LAUNCH, **changes)))


def settings(spec):
    found = verl_own.overrides(HOME, spec, MODEL)
    names = [key(setting) for setting in found]
    assert len(set(names)) == len(names), "an override is given twice"
    return dict(zip(names, (setting.partition("=")[2] for setting in found), strict=True))


def test_the_model_is_the_proxy_and_the_rest_is_the_users():
    found = settings(SPEC)
    assert found["actor_rollout_ref.model.path"] == "/proxy"
    assert (found["data.train_files"], found["data.x"]) == ("d.parquet", "1")
    assert found["trainer.logger"] == "[console,file]"
    assert found["trainer.total_training_steps"] == "5"
    assert found["data.seed"] == found["actor_rollout_ref.rollout.seed"] == "7"
    assert found["trainer.resume_mode"] == "disable" and found["trainer.save_freq"] == "-1"
    # Nothing of the CPU's needs reaches a GPU.
    assert "actor_rollout_ref.rollout.name" not in found and "trainer.device" not in found


def test_megatron_gets_no_setting_of_fsdp():
    assert not [name for name in settings(with_launch(strategy="megatron")) if "fsdp" in name]


def test_a_cluster_is_not_started_by_the_run():
    assert not [
        name for name in settings(with_launch(address="http://h:8265")) if name.startswith("ray_kwargs")
    ]
    assert settings(SPEC)["ray_kwargs.ray_init.address"] == "local"


@pytest.mark.parametrize("name", platforms.PLATFORMS)
def test_verls_platform_is_always_said(name):
    launch = replace(LAUNCH, platform=name)
    env = verl_own.environment(
        HOME, HOME / "path", "entry", launch, {"VERL_PLATFORM": "huawei", "PATH": "/bin"}
    )
    assert env["VERL_PLATFORM"] == {"cpu": "cpu", "cuda": "nvidia", "npu": "huawei"}[name]
    assert (
        verl_own.job(HOME, HOME / "p", "entry", launch)["env_vars"]["VERL_PLATFORM"] == env["VERL_PLATFORM"]
    )
    assert ("HCCL_HOST_SOCKET_PORT_RANGE" in env) == (name == "npu")


def test_the_users_variables_and_modules_are_kept():
    base = {"PATH": "/bin", "PYTHONPATH": "/mine", "RAY_ADDRESS": "auto", "CUDA_HOME": "/cuda"}
    env = verl_own.environment(HOME, HOME / "path", "entry", LAUNCH, base)
    assert env["PYTHONPATH"] == "/run/verl/path:/mine"
    assert env["VERL_USE_EXTERNAL_MODULES"] == "entry,my_recipe"
    assert (env["NCCL_DEBUG"], env["CUDA_HOME"]) == ("INFO", "/cuda")
    assert "RAY_ADDRESS" not in env and "OMP_NUM_THREADS" not in env


def test_a_job_carries_the_plugin_beside_what_the_user_ships():
    users = {"working_dir": "/w", "py_modules": ["/m"], "env_vars": {"A": "1"}, "pip": ["x"]}
    found = verl_own.job(
        HOME, Path("/run/verl/path/p"), "entry", replace(LAUNCH, runtime_env=json.dumps(users))
    )
    assert found["py_modules"] == ["/m", "/run/verl/path/p"]
    assert (found["working_dir"], found["pip"]) == ("/w", ["x"])
    assert found["env_vars"]["A"] == "1" and found["env_vars"]["RL_DIAGNOSE_JOB"] == "/run/verl"


def test_a_command_line_is_what_would_be_started(tmp_path):
    line = verl_job.command_line("/env/python", HOME, SPEC, MODEL)
    assert line["command"][:4] == ["/env/python", "-m", "verl.trainer.main_ppo", "--config-name=mine"]
    assert f"++trainer.default_local_dir={HOME}/checkpoints" in line["command"]
    far = verl_job.command_line(
        "/env/python", HOME, with_launch(address="http://h:1", entry="python3.10"), MODEL
    )
    assert far["command"][0] == "python3.10" and far["address"] == "http://h:1"
    assert far["runtime_env"] == {"py_modules": ["/run/verl/path/rl_diagnose_plugin"]}
    written = verl_job.write_job(tmp_path / "job", SPEC, MODEL)
    shown = verl_job.command_line("python", tmp_path / "job", SPEC, MODEL)["command"]
    assert shown[4:-1] == written
    job = json.loads((tmp_path / "job" / "job.json").read_text())
    assert job["platform"] == "cuda" and job["by_hydra"] == []
    assert not (tmp_path / "job" / "train.jsonl").exists()


@pytest.mark.parametrize(
    ("fault", "changes", "words"),
    [
        (FaultSpec("f", "transform", "rollout", "a:b"), {"rollout": "sglang"}, "with the sglang rollout"),
        (
            FaultSpec("balancing_misscaled", "overrides", "loss", "a:b"),
            {"strategy": "veomni"},
            "not for veomni",
        ),
        (
            FaultSpec("f", "event", "sync", "a:b"),
            {"strategy": "megatron"},
            "hooked for FSDP alone, not for megatron",
        ),
    ],
)
def test_what_is_not_hooked_in_the_users_engines_is_refused(fault, changes, words):
    spec = replace(with_launch(**changes), fault=fault)
    with pytest.raises(verl_job.CannotExpress, match=words):
        verl_job.checked(spec)
    other = replace(fault, id="f", stage="loss", form="overrides")
    verl_job.checked(replace(with_launch(**changes), fault=other))


def test_a_kl_fault_needs_a_kl_loss():
    fault = FaultSpec(
        "f", "overrides", "loss", "taxonomy.inject.optimization:kl_sign_flipped", {"factor": 1.0}
    )
    spec = replace(SPEC, fault=fault, recipe=replace(SPEC.recipe, kl_coef=0.0))
    with pytest.raises(verl_job.CannotExpress, match="without a KL loss"):
        verl_job.overridden(spec)


def test_a_launch_survives_json_and_is_part_of_a_runs_key():
    assert RunSpec.from_json(json.loads(json.dumps(asdict(SPEC)))) == SPEC
    plain = replace(SPEC, engine=EngineSpec("verl"))
    assert plain.engine.key() == ["verl", "v0", "fp32", "bf16"]
    keys = {
        spec.key("h") for spec in (SPEC, plain, with_launch(overrides=("a=1",)), with_launch(platform="npu"))
    }
    assert len(keys) == 4
    # Where a run is carried out is no part of what it is.
    assert with_launch(address="http://h:1", accelerators=4).key("h") == SPEC.key("h")
