"""Lays out the job folder of one verl run: plugin, data, reward function, command line (torch-free).

Under ``path/`` lies the one package that goes on the job's module path: the plugin with copies of the modules that it
shares with the local engine, the injections among them. Their imports are rewritten to the plugin's own name, so that
nothing named ``proxy`` or ``taxonomy`` can meet a package of the user's. `ORIGIN` in the package holds the hashes of
the files it was copied from.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from proxy.embedded import task
from proxy.engines import verl_own
from proxy.engines.verl_command import MODULE, joined
from proxy.engines.verl_plugin.table import ANY, ROLLOUT, VALIDATION, Hook, hooks_of
from proxy.specs import EngineSpec, FaultSpec, Launch, Recipe, RunSpec
from taxonomy.registry import library
from taxonomy.stages import Form

PACKAGE = "rl_diagnose_plugin"
ENTRY = f"{PACKAGE}.proxy.engines.verl_plugin.entry"
VLLM_ENTRY = f"{PACKAGE}.proxy.engines.verl_plugin.vllm_hooks:register"
"""What vLLM's processes find among their plugins: a distribution needs no more than a folder on the module path."""
SHARED = (
    "taxonomy.stages",
    "proxy.specs",
    "proxy.embedded.task",
    "proxy.engines.devices",
    "proxy.engines.forward",
    "proxy.engines.injector",
    "proxy.engines.local",
    "proxy.engines.metrics",
    "proxy.engines.policy",
    "proxy.engines.resume",
    "proxy.engines.rollout",
    "proxy.engines.router",
    "proxy.engines.taps",
    "proxy.engines.update",
)
"""Modules that the plugin shares with the local engine."""

HYDRA = {"lr", "max_grad_norm", "kl_coef", "clip_ratio", "epochs"}
"""Recipe fields that a fault may change by verl's command line alone; the others change inside verl's processes."""

_IMPORT = re.compile(r"^(\s*(?:from|import)\s+)(taxonomy|proxy)\b", re.MULTILINE)
_BF16_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class CannotExpress(ValueError):
    """The verl engine cannot carry out this run; it is never imitated."""


def source_of(module: str) -> Path:
    """Return the file of a module, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise CannotExpress(f"the module {module} is no single Python file that could be carried into verl")
    return Path(spec.origin)


def faults_of(spec: RunSpec) -> tuple[FaultSpec, ...]:
    """Return the faults of a run, none for a healthy one."""
    return (spec.fault, *spec.also) if spec.fault else ()


def backend_of(engine: EngineSpec) -> str:
    """Return the name of the rollout backend that a run has: on a CPU it is ours, whatever the command names."""
    launch = engine.launch
    return launch.rollout if launch and launch.platform != "cpu" else ROLLOUT


def carried(faults: Sequence[FaultSpec] = ()) -> dict[str, Path]:
    """Return the modules that go into the plugin: name → file."""
    plugin = Path(__file__).parent / "verl_plugin"
    found = {f"proxy.engines.verl_plugin.{file.stem}": file for file in sorted(plugin.glob("*.py"))}
    found |= {module: source_of(module) for module in SHARED}
    injections = source_of("taxonomy.inject").parent
    found |= {f"taxonomy.inject.{file.stem}": file for file in sorted(injections.glob("*.py"))}
    for fault in faults:
        if (module := fault.inject.partition(":")[0]) not in found:
            found[module] = source_of(module)
    return found


def rewritten(source: str) -> str:
    """Return a module's source with its imports of our packages made imports of the plugin's."""
    return _IMPORT.sub(rf"\g<1>{PACKAGE}.\g<2>", source)


def write_plugin(home: Path, modules: Mapping[str, Path]) -> None:
    """Write the plugin package, made of `modules` (name → file), into the folder `home`."""
    root = home / PACKAGE
    origin = {}
    for module, file in modules.items():
        source = file.read_text(encoding="utf-8")
        name = module.removesuffix(".__init__").replace(".", "/")
        target = root / (f"{name}/__init__.py" if module.endswith("__init__") else f"{name}.py")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rewritten(source), encoding="utf-8")
        origin[module] = hashlib.sha256(source.encode()).hexdigest()
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").touch()
    info = home / f"{PACKAGE}-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nrl_diagnose = {VLLM_ENTRY}\n")
    (root / "ORIGIN").write_text(json.dumps(origin, indent=1, sort_keys=True))


def rows(prompts: Sequence[str]) -> str:
    """Return prompts as verl's dataset rows, JSON lines."""
    return "".join(
        json.dumps(
            {
                "prompt": [{"role": "user", "content": prompt}],
                "data_source": "arithmetic",
                "reward_model": {"style": "rule", "ground_truth": prompt},
                "extra_info": {"index": index},
            }
        )
        + "\n"
        for index, prompt in enumerate(prompts)
    )


def write_data(home: Path, recipe: Recipe, seed: int) -> None:
    """Write the prompts of all steps in order (the very ones the local engine draws), and the held-out ones."""
    drawn = [
        prompt
        for step in range(1, recipe.steps + 1)
        for prompt in task.drawn("rl", recipe.data_seed or seed, step, recipe.prompts)
    ]
    (home / "train.jsonl").write_text(rows(drawn))
    (home / "test.jsonl").write_text(rows(task.prompts("test")[: recipe.eval_prompts]))


REWARD = f'''from {PACKAGE}.proxy.embedded.task import grade


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Grade one response; verl's reward loop calls this by name."""
    reward = grade(ground_truth, solution_str)
    return {{"score": reward.total, "answer": reward.answer, "format": reward.format}}
'''
"""The reward function's file. verl loads it by path under a name of its own: it can't hold the dataclasses itself."""


def by_hydra(spec: RunSpec) -> bool:
    """Whether a run's fault is a change of settings for the whole run, so that the command line alone makes it."""
    fault = spec.fault
    return (
        fault is not None
        and not spec.also
        and fault.form == Form.OVERRIDES
        and fault.from_step <= 1
        and not fault.until_step
        and fault.probability >= 1
    )


def places_of(fault: FaultSpec, trainer: str, backend: str) -> tuple[Hook, ...]:
    """Return the places in verl that a fault needs: those that show what its card uses, else all of its stage.

    Raises:
        CannotExpress: There are none under this trainer and rollout.
    """
    where = f"at the {fault.stage} stage under the {trainer} trainer with the {backend} rollout"
    hooks = hooks_of(fault.stage, fault.form, trainer, backend)
    if not hooks:
        raise CannotExpress(f"the verl engine has no {fault.form} injection {where}")
    card = library().cards.get(fault.id)
    uses = set(card.uses) if card else set()
    names = {name for hook in hooks for name in hook.tensors}
    if uses - names and not names & set(ANY):
        raise CannotExpress(f"the verl engine gives no access to {', '.join(sorted(uses - names))} {where}")
    return tuple(hook for hook in hooks if uses & set(hook.tensors)) or hooks


def checked(spec: RunSpec) -> None:
    """Raise `CannotExpress` where verl, or this version of the engine, cannot carry out a run."""
    launch, trainer = spec.engine.launch, spec.engine.trainer
    if trainer not in ("v0", "v1"):
        raise CannotExpress(f"verl has no trainer {trainer!r}; there are v0 and v1")
    for dtype in (spec.engine.train_dtype, spec.engine.rollout_dtype):
        if dtype not in _BF16_DTYPES:
            raise CannotExpress(f"the verl engine has no precision {dtype!r}; there are fp32 and bf16")
    if spec.recipe.exact:
        raise CannotExpress("verl always has a rollout of its own: recipe.exact is for the local engine")
    if spec.recipe.prompts % spec.recipe.mini_batches:
        raise CannotExpress("verl cuts a step by prompts: prompts must be a multiple of mini_batches")
    for fault in faults_of(spec):
        found = places_of(fault, trainer, backend_of(spec.engine))
        bound = [hook.symbol for hook in found if ".fsdp." in hook.module]
        if len(bound) == len(found) and launch and not launch.strategy.startswith("fsdp"):
            raise CannotExpress(f"{', '.join(bound)} is hooked for FSDP alone, not for {launch.strategy}")


def overridden(spec: RunSpec) -> dict[str, Any]:
    """Return the recipe fields that the fault changes at its first step.

    Raises:
        CannotExpress: One of them is none that verl can be given.
    """
    fields: dict[str, Any] = {}
    backend = backend_of(spec.engine)
    for fault in faults_of(spec):
        if fault.form != Form.OVERRIDES:
            continue
        module, _, name = fault.inject.partition(":")
        made = getattr(importlib.import_module(module), name)(fault.params, asdict(spec.recipe))
        can = {
            t
            for hook in hooks_of(fault.stage, fault.form, spec.engine.trainer, backend)
            for t in hook.tensors
        }
        if wrong := sorted(set(made) - can - HYDRA):
            raise CannotExpress(f"the verl engine cannot change {', '.join(wrong)}")
        fields |= made
    if spec.engine.launch and "kl_coef" in fields and not spec.recipe.kl_coef:
        raise CannotExpress(
            "the command trains without a KL loss (actor.use_kl_loss): there is none to change"
        )
    return fields


def write_job(home: Path, spec: RunSpec, checkpoint: Path) -> list[str]:
    """Lay out the folder `home` (made anew) and return the overrides of verl's command line.

    Raises:
        CannotExpress: verl cannot carry out this run.
    """
    checked(spec)
    settled, modules = settled_by_hydra(spec), carried(faults_of(spec))
    launch = spec.engine.launch
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    write_plugin(home / "path", modules)
    if launch is None:  # the user's own command has data and a reward of its own
        write_data(home, spec.recipe, spec.seed)
        (home / "reward.py").write_text(REWARD)
    faults = [asdict(replace(fault, inject=f"{PACKAGE}.{fault.inject}")) for fault in faults_of(spec)]
    job = {
        "recipe": asdict(spec.recipe),
        "seed": spec.seed,
        "faults": faults,
        "by_hydra": sorted(settled),
        "trainer": spec.engine.trainer,
        "backend": backend_of(spec.engine),
        "platform": launch.platform if launch else "cpu",
        "rollout": {"checkpoint": str(checkpoint), "dtype": _BF16_DTYPES[spec.engine.rollout_dtype]},
    }
    (home / "job.json").write_text(json.dumps(job, indent=1))
    return settings_of(home, spec, checkpoint, settled)


def settings_of(home: Path, spec: RunSpec, checkpoint: Path, fields: Mapping[str, Any]) -> list[str]:
    """Return the Hydra overrides of a run.

    Args:
        home: Job folder.
        spec: The run.
        checkpoint: Folder of the model.
        fields: What the fault changes of the recipe by the command line.
    """
    if spec.engine.launch is not None:
        further = [f"++{setting}" for setting in spec.engine.hydra]
        return list(joined(verl_own.overrides(home, spec, checkpoint), further))
    return overrides(home, replace(spec.recipe, **fields), spec.seed, spec.engine, checkpoint)


def settled_by_hydra(spec: RunSpec) -> dict[str, Any]:
    """Return what the command line changes of the recipe. With the user's own it is the plugin that changes it."""
    fields = overridden(spec)
    if spec.engine.launch is not None or not by_hydra(spec):
        return {}
    return {name: value for name, value in fields.items() if name in HYDRA}


def flags_of(spec: RunSpec) -> tuple[str, ...]:
    """Return what stands between interpreter and overrides."""
    return spec.engine.launch.flags if spec.engine.launch else ("-m", MODULE)


def overrides(home: Path, recipe: Recipe, seed: int, engine: EngineSpec, checkpoint: Path) -> list[str]:
    """Return Hydra overrides that make verl's GRPO the recipe, on a CPU."""
    model, actor, ref, rollout = (
        f"actor_rollout_ref.{part}" for part in ("model", "actor", "ref", "rollout")
    )
    batch = recipe.prompts * recipe.group_size
    settings: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_files": home / "train.jsonl",
        "data.val_files": home / "test.jsonl",
        "data.train_batch_size": recipe.prompts,
        "data.shuffle": False,
        "data.max_prompt_length": 16,
        "data.max_response_length": recipe.max_new_tokens,
        "data.dataloader_num_workers": 0,
        f"{model}.path": checkpoint,
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": False,
        f"+{model}.override_config.attn_implementation": "eager",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.fsdp_config.seed": seed,
        f"+{actor}.fsdp_config.mixed_precision.param_dtype": engine.train_dtype,
        f"{actor}.ppo_mini_batch_size": recipe.prompts // recipe.mini_batches,
        f"{actor}.ppo_micro_batch_size_per_gpu": batch // recipe.mini_batches,
        f"{actor}.ppo_epochs": recipe.epochs,
        f"{actor}.shuffle": True,
        f"{actor}.data_loader_seed": seed,
        f"{actor}.use_kl_loss": True,
        f"{actor}.kl_loss_type": "low_var_kl",
        f"{actor}.kl_loss_coef": recipe.kl_coef,
        f"{actor}.clip_ratio": recipe.clip_ratio,
        f"{actor}.clip_ratio_low": recipe.clip_ratio,
        f"{actor}.clip_ratio_high": recipe.clip_ratio,
        f"{actor}.optim.lr": recipe.lr,
        f"{actor}.optim.clip_grad": recipe.max_grad_norm,
        f"{actor}.optim.betas": "[0.9,0.999]",
        f"{actor}.optim.weight_decay": 0.01,
        f"{actor}.optim.lr_warmup_steps": recipe.warmup_steps or -1,
        f"{ref}.strategy": "fsdp2",
        f"{ref}.use_torch_compile": False,
        f"{ref}.fsdp_config.use_torch_compile": False,
        f"+{ref}.fsdp_config.mixed_precision.param_dtype": engine.train_dtype,
        f"{ref}.log_prob_micro_batch_size_per_gpu": batch,
        f"{rollout}.name": ROLLOUT,
        f"{rollout}.n": recipe.group_size,
        f"{rollout}.temperature": recipe.temperature,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.dtype": _BF16_DTYPES[engine.rollout_dtype],
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.full_determinism": True,
        f"{rollout}.seed": seed,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": batch,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.val_kwargs.temperature": 0.0 if recipe.eval_greedy else recipe.temperature,
        f"{rollout}.val_kwargs.top_k": VALIDATION,
        f"{rollout}.val_kwargs.do_sample": not recipe.eval_greedy,
        f"{rollout}.val_kwargs.n": 1,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": home / "reward.py",
        "trainer.use_v1": engine.trainer == "v1",
        "trainer.logger": "[console,file]",
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.balance_batch": False,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": recipe.steps,
        "trainer.val_before_train": bool(recipe.eval_every),
        "trainer.test_freq": recipe.eval_every or -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.project_name": "rl_diagnose",
        "trainer.default_local_dir": home / "checkpoints",
        "ray_kwargs.ray_init.num_cpus": 12,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "+ray_kwargs.ray_init.address": "local",
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 200_000_000,
        "hydra.run.dir": home / "hydra",
        "hydra.output_subdir": "null",
    }
    if recipe.importance_cap:
        settings |= {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": recipe.importance_cap,
        }
    if engine.trainer == "v1":
        settings |= {
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
            "transfer_queue.backend.SimpleStorage.total_storage_size": 4000,
        }
    settings |= dict(setting.split("=", 1) for setting in engine.hydra)
    return [f"{name}={value}" for name, value in settings.items()]


def environment(home: Path, base: Mapping[str, str], launch: Launch | None = None) -> dict[str, str]:
    """Return the environment of a command: nothing of ours but the plugin.

    Without a command of the user's the model and its data are ours, and nothing needs a network.
    """
    if launch is not None:
        return verl_own.environment(home, home / "path", ENTRY, launch, base)
    kept = {name: value for name, value in base.items() if not name.startswith(verl_own.INHERITED)}
    return (
        kept
        | verl_own.variables(home, ENTRY)
        | {
            "PYTHONPATH": str(home / "path"),
            "VERL_USE_EXTERNAL_PLUGINS": "none",
            "RAY_USAGE_STATS_ENABLED": "0",
            **verl_own.FRUGAL,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(home / "hf"),
        }
    )


def command_line(
    python: str, home: Path, spec: RunSpec, checkpoint: Path, base: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the command line of a run and what it is started with, as ``--dry-run`` prints it. Nothing is written.

    Args:
        python: Interpreter of verl's environment on this machine.
        home: Job folder of the run.
        spec: The run.
        checkpoint: Folder of the model.
        base: Environment to start from, None for an empty one: then only what a run sets is shown.

    Returns:
        ``command`` (words), ``environment``; for a Ray job also ``address`` and ``runtime_env``.

    Raises:
        CannotExpress: verl cannot carry out this run.
    """
    checked(spec)
    launch = spec.engine.launch
    words = [*flags_of(spec), *settings_of(home, spec, checkpoint, settled_by_hydra(spec))]
    if launch and launch.address:
        runtime = verl_own.job(home, home / "path" / PACKAGE, ENTRY, launch)
        return {
            "command": [launch.entry, *words],
            "environment": runtime["env_vars"],
            "address": launch.address,
            "runtime_env": {name: value for name, value in runtime.items() if name != "env_vars"},
        }
    words.append(f"++ray_kwargs.ray_init._temp_dir={verl_own.TEMP_PLACE}")
    return {"command": [python, *words], "environment": environment(home, base or {}, launch)}
