"""What a run adds to the user's own verl command: pure functions from a `RunSpec` to words and variables (torch-free).

Replaced is the model's path; set are the seeds, the number of steps, the file logger, and that nothing is saved or
resumed. On a CPU come the settings without which verl does not run there. Everything else is the user's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.engines.platforms import PLATFORMS
from proxy.engines.verl_command import joined
from proxy.engines.verl_plugin.table import JOB_VARIABLE, ROLLOUT
from proxy.specs import EngineSpec, Launch, RunSpec

MODEL, ACTOR, REF, SERVING = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "ref", "rollout"))
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
INHERITED = ("PYTHON", "RAY_", "VERL_", "HYDRA_", "DIAGNOSE_")
"""Variables of this process that no job gets: they are ours, or another job's."""
TEMP_PLACE = "RAY_TEMP"
"""Stands for Ray's temporary folder where no run has made one."""


def launched(spec: RunSpec) -> Launch:
    """Return the user's command of a run that has one."""
    assert spec.engine.launch is not None
    return spec.engine.launch


def overrides(home: Path, spec: RunSpec, checkpoint: Path) -> tuple[str, ...]:
    """Return the Hydra overrides of a run: the user's, with ours in force.

    Args:
        home: Job folder.
        spec: The run.
        checkpoint: Folder of the model.
    """
    launch, seed = launched(spec), spec.seed
    settings: dict[str, Any] = {
        f"{MODEL}.path": checkpoint,
        f"{SERVING}.calculate_log_probs": True,
        f"{SERVING}.seed": seed,
        f"{ACTOR}.data_loader_seed": seed,
        "data.seed": seed,
        "trainer.logger": "[console,file]",
        "trainer.total_training_steps": spec.recipe.steps,
        # An epoch has at least one step; the number of steps ends the run.
        "trainer.total_epochs": spec.recipe.steps,
        "trainer.use_v1": spec.engine.trainer == "v1",
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": home / "checkpoints",
    }
    if launch.strategy.startswith("fsdp"):
        settings[f"{ACTOR}.fsdp_config.seed"] = seed
    if spec.recipe.importance_cap:
        settings |= {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": spec.recipe.importance_cap,
        }
    if launch.platform == "cpu":
        settings |= _cpu(spec.engine)
    if not launch.address:
        settings |= {"ray_kwargs.ray_init.address": "local", "ray_kwargs.ray_init.include_dashboard": False}
    ours = [f"++{name}={value}" for name, value in settings.items()]
    return joined(launch.overrides, [*ours, f"hydra.run.dir={home / 'hydra'}", "hydra.output_subdir=null"])


def _cpu(engine: EngineSpec) -> dict[str, Any]:
    """Return the settings without which verl does not run on a CPU; see docs/verl.md for each."""
    launch = engine.launch
    assert launch is not None
    settings: dict[str, Any] = {
        f"{MODEL}.use_remove_padding": False,
        f"{MODEL}.enable_gradient_checkpointing": False,
        f"{MODEL}.override_config.attn_implementation": "eager",
        f"{ACTOR}.strategy": "fsdp2",
        f"{ACTOR}.use_torch_compile": False,
        f"{ACTOR}.fsdp_config.use_torch_compile": False,
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": engine.train_dtype,
        f"{ACTOR}.optim.betas": "[0.9,0.999]",
        f"{REF}.strategy": "fsdp2",
        f"{REF}.use_torch_compile": False,
        f"{REF}.fsdp_config.use_torch_compile": False,
        f"{REF}.fsdp_config.mixed_precision.param_dtype": engine.train_dtype,
        f"{SERVING}.name": ROLLOUT,
        f"{SERVING}.dtype": DTYPES[engine.rollout_dtype],
        f"{SERVING}.full_determinism": True,
        f"{SERVING}.agent.num_workers": 1,
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 1,
        "trainer.device": "cpu",
        "trainer.balance_batch": False,
    }
    if not launch.address:
        settings |= {
            "ray_kwargs.ray_init.num_cpus": 12,
            "ray_kwargs.ray_init.num_gpus": 1,
            "ray_kwargs.ray_init.object_store_memory": 200_000_000,
        }
    if engine.trainer == "v1":
        settings |= {
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
            "transfer_queue.backend.SimpleStorage.total_storage_size": 4000,
        }
    return settings


def variables(home: Path, entry: str, launch: Launch | None = None) -> dict[str, str]:
    """Return the variables that make a process of verl one of the job's, whatever else is in its environment."""
    platform = PLATFORMS[launch.platform if launch else "cpu"]
    users = dict(launch.environment) if launch else {}
    modules = [entry, *filter(None, [users.pop("VERL_USE_EXTERNAL_MODULES", "")])]
    return {
        **users,
        JOB_VARIABLE: str(home),
        "PYTHONUNBUFFERED": "1",
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        "VERL_PLATFORM": platform.vendor,
        "VERL_FILE_LOGGER_PATH": str(home / "verl.jsonl"),
        "RAY_DEDUP_LOGS": "0",
        "WANDB_MODE": "disabled",
        **dict(platform.environment),
    }


def environment(
    home: Path, plugin: Path, entry: str, launch: Launch, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a command that is started here.

    Args:
        home: Job folder.
        plugin: Folder that goes on the module path.
        entry: The plugin's entry module.
        launch: The user's command.
        base: Environment of this process.
    """
    kept = {name: value for name, value in base.items() if not name.startswith(INHERITED)}
    ours = variables(home, entry, launch)
    path = [str(plugin), *filter(None, [ours.get("PYTHONPATH") or base.get("PYTHONPATH", "")])]
    return kept | ours | {"PYTHONPATH": ":".join(path), "RAY_USAGE_STATS_ENABLED": "0", **_frugal(launch)}


FRUGAL = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",
    # Workers that Ray starts in advance are of no use to verl, whose actors have an environment of their own: a
    # seventh of a short run's CPU time.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
"""On a CPU the processes of a run share a few cores: one thread each, none too many, and nobody steps back."""


def _frugal(launch: Launch) -> dict[str, str]:
    return FRUGAL if launch.platform == "cpu" else {}


def job(home: Path, package: Path, entry: str, launch: Launch) -> dict[str, Any]:
    """Return Ray's runtime environment of a job: the user's, with the plugin and our variables in it.

    Args:
        home: Job folder; on a file system that the cluster's nodes share.
        package: Folder of the plugin package; Ray carries it to every node and puts it on the module path.
        entry: The plugin's entry module.
        launch: The user's command.
    """
    users: dict[str, Any] = json.loads(launch.runtime_env)
    ours = variables(home, entry, launch) | _frugal(launch)
    modules = [*users.get("py_modules", []), str(package)]
    return users | {"py_modules": modules, "env_vars": {**users.get("env_vars", {}), **ours}}
