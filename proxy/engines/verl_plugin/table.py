"""Where each stage of an RL step is hooked in verl 0.9.1: the capability table is generated from this one.

Each row is one function or method of verl that the plugin wraps. Nothing is imported here, so that listing what the
engine can express needs neither torch nor verl.
"""

from __future__ import annotations

from dataclasses import dataclass

from taxonomy.stages import Form, Stage

JOB_VARIABLE = "RL_DIAGNOSE_JOB"
"""Environment variable that names the job folder in every process."""
MARKER = "rl_diagnose_plugin is in place"
"""What the plugin prints in every process that it was loaded into."""

ROLLOUT = "rl_diagnose_hf"
"""Name of the CPU rollout among verl's rollout backends."""

DRIVER, TRAINER, SERVER = "driver", "trainer", "server"
"""The three kinds of processes: the loop, a training worker, a rollout server."""


@dataclass(frozen=True)
class Hook:
    """One place in verl.

    Attributes:
        stages: Stage and form of injection that act there.
        tensors: Names of the tensors a transform sees, or of the settings that an override may change during a run.
        process: Kind of process it lives in.
        module: verl's module.
        symbol: Function, or Class.method, in it.
        wrapper: Name of the wrapper in `hooks`.
        trainers: verl's trainers (`trainer.use_v1`) that go through it.
    """

    stages: tuple[tuple[Stage, Form], ...]
    tensors: tuple[str, ...]
    process: str
    module: str
    symbol: str
    wrapper: str
    trainers: tuple[str, ...] = ("v0", "v1")


HOOKS: tuple[Hook, ...] = (
    Hook(
        ((Stage.SYNC, Form.EVENT), (Stage.SYNC, Form.TRANSFORM)),
        ("every parameter by checkpoint name",),
        TRAINER,
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine.get_per_tensor_param",
        "weight_stream",
    ),
    Hook(
        (),
        (),
        TRAINER,
        "verl.workers.engine_workers",
        "ActorRolloutRefWorker.update_weights",
        "clock",
    ),
    Hook(
        ((Stage.OPTIMIZER, Form.EVENT), (Stage.OPTIMIZER, Form.OVERRIDES), (Stage.GRADIENTS, Form.OVERRIDES)),
        ("lr", "max_grad_norm"),
        TRAINER,
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine.optimizer_step",
        "optimizer_step",
    ),
    Hook(
        ((Stage.LOSS, Form.OVERRIDES),),
        ("kl_coef", "clip_ratio", "epochs"),
        TRAINER,
        "verl.workers.engine_workers",
        "TrainingWorker.train_mini_batch",
        "actor_update",
    ),
    Hook(
        ((Stage.ROLLOUT, Form.TRANSFORM),),
        ("scale", "attention_mask", "logits", "log_probs", "routes"),
        SERVER,
        "",
        "",
        "",
    ),
    Hook(
        (),
        (),
        DRIVER,
        "verl.checkpoint_engine.base",
        "CheckpointEngineManager.update_weights",
        "loop_clock",
    ),
    Hook(
        ((Stage.REWARD, Form.TRANSFORM),),
        ("rewards",),
        DRIVER,
        "verl.trainer.ppo.ray_trainer",
        "extract_reward",
        "rewards",
        ("v0",),
    ),
    Hook(
        ((Stage.ADVANTAGE, Form.TRANSFORM),),
        ("advantages",),
        DRIVER,
        "verl.trainer.ppo.ray_trainer",
        "compute_advantage",
        "advantages",
        ("v0",),
    ),
    Hook(
        ((Stage.REFERENCE, Form.TRANSFORM),),
        ("log_probs",),
        DRIVER,
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._compute_ref_log_prob",
        "reference_log_probs",
        ("v0",),
    ),
    Hook(
        ((Stage.FORWARD, Form.TRANSFORM),),
        ("log_probs",),
        DRIVER,
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._compute_old_log_prob",
        "trainer_log_probs",
        ("v0",),
    ),
)
"""Every place. The rollout's own transforms need no place in verl: the CPU rollout server is part of the plugin."""


def hooks_of(stage: str, form: str, trainer: str) -> tuple[Hook, ...]:
    """Return the places where a fault of this stage and form acts under one of verl's trainers."""
    return tuple(
        hook
        for hook in HOOKS
        if trainer in hook.trainers and any((s.value, f.value) == (stage, form) for s, f in hook.stages)
    )
