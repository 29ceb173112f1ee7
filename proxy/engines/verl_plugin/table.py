"""Where each stage of an RL step is hooked in verl 0.9.1: the capability table is generated from this one.

Each row is one function or method of verl that the plugin wraps. Nothing is imported here, so that listing what the
engine can express needs neither torch nor verl.
"""

from __future__ import annotations

from dataclasses import dataclass

from taxonomy.stages import CHECKPOINT_PARTS, ROLLOUT_TENSORS, Form, Stage

JOB_VARIABLE = "RL_DIAGNOSE_JOB"
"""Environment variable that names the job folder in every process."""
MARKER = "rl_diagnose_plugin is in place"
"""What the plugin prints in every process that it was loaded into."""

ROLLOUT = "rl_diagnose_hf"
"""Name of the CPU rollout among verl's rollout backends."""

VLLM = "vllm"
"""Name of vLLM among them."""
VALIDATION = 0
"""Value of `rollout.val_kwargs.top_k` by which the CPU rollout tells held-out requests from those of training."""

ANY = ("every parameter and buffer, by name", "every parameter by checkpoint name")
"""What stands for "whatever the model has" among an engine's tensors."""
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
        wrapper: Name of the wrapper in `worker` or `driver`; "" where another row of the same symbol names it, or the
            place is the plugin's own.
        trainers: verl's trainers (`trainer.use_v1`) that go through it.
        rollout: Rollout backend that it belongs to, "" where it doesn't matter.
    """

    stages: tuple[tuple[Stage, Form], ...]
    tensors: tuple[str, ...]
    process: str
    module: str
    symbol: str
    wrapper: str
    trainers: tuple[str, ...] = ("v0", "v1")
    rollout: str = ""


FSDP = "verl.workers.engine.fsdp.transformer_impl"
WORKERS = "verl.workers.engine_workers"
LOOP = "verl.trainer.ppo.ray_trainer"
LOOP_V1 = "verl.trainer.ppo.v1.trainer_base"
REWARD_FACTS = ("rewards", "prompts", "responses", "answer_B", "format_B", "lengths_B", "truncated_B")

HOOKS: tuple[Hook, ...] = (
    Hook(
        ((Stage.SYNC, Form.EVENT), (Stage.SYNC, Form.TRANSFORM)),
        ("every parameter by checkpoint name",),
        TRAINER,
        FSDP,
        "FSDPEngine.get_per_tensor_param",
        "weight_stream",
    ),
    Hook(
        ((Stage.CHECKPOINT, Form.TRANSFORM),),
        ("resume", *CHECKPOINT_PARTS),
        TRAINER,
        WORKERS,
        "ActorRolloutRefWorker.update_weights",
        "clock",
    ),
    Hook(
        ((Stage.FORWARD, Form.TRANSFORM),),
        ("routes", "reference_routes", "router_logits", "router_scores", "rollout_routes", "o_proj"),
        TRAINER,
        FSDP,
        "FSDPEngineWithLMHead.forward_step",
        "forward_step",
    ),
    Hook(
        ((Stage.FORWARD, Form.TRANSFORM),),
        ("inputs",),
        TRAINER,
        FSDP,
        "FSDPEngineWithLMHead.prepare_model_inputs",
        "model_inputs",
    ),
    Hook(
        ((Stage.FORWARD, Form.TRANSFORM),),
        ("logits",),
        TRAINER,
        FSDP,
        "FSDPEngineWithLMHead.prepare_model_outputs",
        "model_outputs",
    ),
    Hook(
        ((Stage.FORWARD, Form.TRANSFORM),),
        ("weights",),
        TRAINER,
        FSDP,
        "FSDPEngine.forward_backward_batch",
        "forward_batch",
    ),
    Hook(
        ((Stage.LOSS, Form.OVERRIDES),),
        ("kl_coef", "clip_ratio", "epochs"),
        TRAINER,
        WORKERS,
        "TrainingWorker.train_mini_batch",
        "actor_update",
    ),
    Hook(
        ((Stage.LOSS, Form.OVERRIDES),),
        ("length_exponent",),
        TRAINER,
        "verl.trainer.ppo.core_algos",
        "agg_loss",
        "loss_mean",
    ),
    Hook(
        ((Stage.LOSS, Form.OVERRIDES),),
        ("aux_coef",),
        TRAINER,
        FSDP,
        "FSDPEngineWithLMHead.forward_step",
        "",
    ),
    Hook(
        ((Stage.LOSS, Form.TRANSFORM),),
        ("kl_gap",),
        TRAINER,
        "verl.trainer.ppo.core_algos",
        "kl_penalty",
        "kl_term",
    ),
    Hook(
        (
            (Stage.GRADIENTS, Form.TRANSFORM),
            (Stage.GRADIENTS, Form.OVERRIDES),
            (Stage.OPTIMIZER, Form.OVERRIDES),
            (Stage.OPTIMIZER, Form.EVENT),
        ),
        ("every gradient, by the name of its parameter", "lr", "router_lr", "max_grad_norm"),
        TRAINER,
        FSDP,
        "FSDPEngine.optimizer_step",
        "optimizer_step",
    ),
    Hook(((Stage.ROLLOUT, Form.TRANSFORM),), ROLLOUT_TENSORS, SERVER, "", "", "", rollout=ROLLOUT),
    Hook(((Stage.ROLLOUT, Form.OVERRIDES),), ("max_new_tokens",), SERVER, "", "", "", rollout=ROLLOUT),
    Hook(((Stage.ROLLOUT, Form.EVENT),), ("prefix_cache",), SERVER, "", "", "", rollout=ROLLOUT),
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
        REWARD_FACTS,
        DRIVER,
        LOOP,
        "extract_reward",
        "rewards",
        ("v0",),
    ),
    Hook(
        ((Stage.REWARD, Form.TRANSFORM),),
        REWARD_FACTS,
        DRIVER,
        LOOP_V1,
        "PPOTrainer._compute_advantage",
        "queued_rewards",
        ("v1",),
    ),
    Hook(
        ((Stage.BATCH, Form.TRANSFORM),),
        ("response_mask", "rollout_log_probs"),
        DRIVER,
        LOOP,
        "extract_reward",
        "",
        ("v0",),
    ),
    Hook(
        ((Stage.BATCH, Form.TRANSFORM),),
        ("rollout_log_probs",),
        DRIVER,
        LOOP_V1,
        "PPOTrainer._compute_old_log_prob",
        "",
        ("v1",),
    ),
    Hook(
        ((Stage.ADVANTAGE, Form.TRANSFORM),),
        ("groups", "advantages"),
        DRIVER,
        LOOP,
        "compute_advantage",
        "advantages",
    ),
    Hook(
        ((Stage.REFERENCE, Form.TRANSFORM),),
        ("log_probs",),
        DRIVER,
        LOOP,
        "RayPPOTrainer._compute_ref_log_prob",
        "reference_log_probs",
        ("v0",),
    ),
    Hook(
        ((Stage.REFERENCE, Form.TRANSFORM),),
        ("log_probs",),
        DRIVER,
        LOOP_V1,
        "PPOTrainer._compute_ref_log_prob",
        "queued_reference_log_probs",
        ("v1",),
    ),
    Hook(
        ((Stage.FORWARD, Form.TRANSFORM),),
        ("log_probs",),
        DRIVER,
        LOOP,
        "RayPPOTrainer._compute_old_log_prob",
        "trainer_log_probs",
        ("v0",),
    ),
    Hook(
        ((Stage.FORWARD, Form.TRANSFORM),),
        ("log_probs",),
        DRIVER,
        LOOP_V1,
        "PPOTrainer._compute_old_log_prob",
        "queued_trainer_log_probs",
        ("v1",),
    ),
)
"""Every place but vLLM's. The CPU rollout needs none in verl for its own transforms: it is part of the plugin."""

VLLM_HOOKS: tuple[Hook, ...] = (
    Hook(
        (),
        (),
        SERVER,
        "verl.workers.rollout.vllm_rollout.utils",
        "vLLMColocateWorkerExtension.update_weights_from_ipc",
        "weights_came",
        rollout=VLLM,
    ),
    Hook(
        ((Stage.ROLLOUT, Form.TRANSFORM),),
        ("scale", "logits", "log_probs"),
        SERVER,
        "vllm.v1.sample.sampler",
        "Sampler.forward",
        "sampled",
        rollout=VLLM,
    ),
    Hook(
        ((Stage.ROLLOUT, Form.TRANSFORM),),
        ("routes", "router_logits", "router_scores"),
        SERVER,
        "vllm.model_executor.layers.fused_moe.router.base_router",
        "BaseRouter.select_experts",
        "routed",
        rollout=VLLM,
    ),
)
"""Places in vLLM's processes, where the rollout is vLLM: not run here. What it has no place for (`attention_mask`:
paged attention has none; `o_proj`; the prefix cache; the length cap) is refused."""


def hooks_of(stage: str, form: str, trainer: str, rollout: str = ROLLOUT) -> tuple[Hook, ...]:
    """Return the places where a fault of this stage and form acts under one of verl's trainers and rollouts."""
    return tuple(
        hook
        for hook in (*HOOKS, *VLLM_HOOKS)
        if trainer in hook.trainers
        and hook.rollout in ("", rollout)
        and any((s.value, f.value) == (stage, form) for s, f in hook.stages)
    )
