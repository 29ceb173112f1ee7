"""What the stages of the proxy package hand each other: frozen, torch-free, hashable by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

INJECTION_FAILED = "injection failed"
"""How the reason of a run begins in which the fault could not be put in place."""
NOTHING_TO_HIT = f"{INJECTION_FAILED}: the checkpoint has no"
"""How it begins where the model lacks what the fault breaks: the original, of which it was cut, lacks it too."""


def content_key(*parts: Any) -> str:
    """Return a short hash of JSON-able parts, the key under which a stage's result is stored."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Recipe:
    """Settings of one GRPO run, under verl's words where verl has one.

    Attributes:
        steps: Training steps (one rollout batch each).
        prompts: Prompts a step (`data.train_batch_size`).
        group_size: Responses a prompt (`rollout.n`).
        mini_batches: Optimizer updates a step (train_batch_size / ppo_mini_batch_size).
        epochs: Passes over the batch (`actor.ppo_epochs`).
        lr: Learning rate of AdamW.
        kl_coef: Coefficient of the k3 KL loss to the frozen reference (`actor.kl_loss_coef`).
        clip_ratio: PPO clip.
        max_grad_norm: Gradient clipping (`actor.optim.clip_grad`).
        temperature: Sampling temperature.
        max_new_tokens: Response cap.
        old_log_prob: "rollout" or "trainer": whose log-probabilities the ratio is taken against.
        exact: Rollout = the trainer's own weights and forward in full precision (mismatch exactly 0).
        eval_every: Steps between held-out evaluations, the first before training and one after the last step; 0: never.
        eval_prompts: Held-out prompts of one evaluation.
        data_seed: Seed of the prompt order, 0 for "follow the run's seed".
        skip_nonfinite: Leave an update out whose gradient norm is not finite, as verl does.
        length_exponent: A token's weight in the loss is its response's length to the power of minus this:
            0 is verl's ``token-mean``, 1 is its ``seq-mean-token-mean``.
        warmup_steps: Steps over which the learning rate rises linearly to `lr`, 0 for none.
        aux_coef: Coefficient of the routers' balancing loss (`moe_aux_loss_coeff`), 0 for none as verl has it.
        router_lr: Learning rate of the routers in multiples of `lr`.
        importance_cap: Largest importance weight, the trainer's probability of a token over the rollout's, with which
            the token counts in the policy loss (truncated importance sampling: verl's `rollout_is_threshold` at
            token level); 0 for none.
        eval_greedy: Held-out responses are the likeliest ones instead of sampled ones.
    """

    steps: int = 60
    prompts: int = 12
    group_size: int = 8
    mini_batches: int = 2
    epochs: int = 1
    lr: float = 8e-5
    kl_coef: float = 0.1
    clip_ratio: float = 0.2
    max_grad_norm: float = 1.0
    temperature: float = 0.9
    max_new_tokens: int = 6
    old_log_prob: str = "rollout"
    exact: bool = False
    eval_every: int = 10
    eval_prompts: int = 96
    data_seed: int = 0
    skip_nonfinite: bool = True
    length_exponent: float = 0.0
    warmup_steps: int = 0
    aux_coef: float = 0.0
    router_lr: float = 1.0
    importance_cap: float = 0.0
    eval_greedy: bool = False

    def key(self) -> dict[str, Any]:
        """Return the settings that go into content keys: younger fields only where they differ from the default."""
        young = (
            "skip_nonfinite",
            "length_exponent",
            "warmup_steps",
            "aux_coef",
            "router_lr",
            "importance_cap",
            "eval_greedy",
        )
        fields = asdict(self)
        return {n: v for n, v in fields.items() if n not in young or v != getattr(Recipe(), n)}


@dataclass(frozen=True)
class FaultSpec:
    """A fault as an engine receives it.

    Attributes:
        id: Fault id of the card.
        form: overrides, transform or event.
        stage: Stage it attaches to.
        inject: Dotted path ``module:function`` of the injection, resolved only inside a worker.
        params: Parameter values.
        from_step: First step at which the fault is active (1 is the first).
        until_step: Last active step, 0 for none.
        probability: Chance that the fault is active in a step of that window.
    """

    id: str
    form: str
    stage: str
    inject: str
    params: dict[str, float] = field(default_factory=dict)
    from_step: int = 1
    until_step: int = 0
    probability: float = 1.0


@dataclass(frozen=True)
class Launch:
    """The user's own verl: what stands on its command line besides what a run adds, and where it is started.

    Attributes:
        flags: What stands before the overrides: ``-m verl.trainer.main_ppo`` and Hydra's options.
        overrides: Hydra overrides: the user's, then those of the scaled plan.
        environment: Variables of the user's: (name, value).
        platform: "cpu", "cuda" or "npu".
        accelerators: Accelerators that a run takes; 0 on a CPU.
        directory: Folder that the command is started in, "" for the job's own.
        address: Ray cluster that runs are submitted to as jobs (``http://HOST:8265``), "" to start verl here.
        entry: Interpreter on the cluster.
        runtime_env: Ray's runtime environment of a job, as JSON; ours is added.
        trained: Path of the model in the user's command, which a run replaces.
        strategy: Training engine that the configuration asks for.
        rollout: Rollout engine, likewise.
    """

    flags: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    platform: str = "cpu"
    accelerators: int = 0
    directory: str = ""
    address: str = ""
    entry: str = "python3"
    runtime_env: str = "{}"
    trained: str = ""
    strategy: str = "fsdp2"
    rollout: str = ""

    def __post_init__(self) -> None:
        """Make tuples of JSON's lists again."""
        for name in ("flags", "overrides"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "environment", tuple((n, v) for n, v in self.environment))

    def key(self) -> list[Any]:
        """Return what tells two runs apart; where they are carried out does not."""
        return [self.flags, self.overrides, self.environment, self.platform, self.directory]


@dataclass(frozen=True)
class EngineSpec:
    """What runs a run, and how; everything but the name concerns verl.

    Attributes:
        name: "local" or "verl".
        python: Interpreter of verl's environment, "" for the one that `proxy.engines.verl_env` finds.
        trainer: verl's trainer: "v0" (`trainer.use_v1=False`) or "v1".
        train_dtype: Precision of verl's training forward: "fp32", or "bf16" (verl's own default).
        rollout_dtype: Precision of the rollout's weights: "bf16" or "fp32".
        limit_s: Seconds that a run may take, 0 for no limit.
        launch: The user's own command; None: verl is started with settings that make it the recipe.
        hydra: Further settings of verl's command line, ``name=value``; they come after all others.
    """

    name: str = "local"
    python: str = ""
    trainer: str = "v0"
    train_dtype: str = "fp32"
    rollout_dtype: str = "bf16"
    limit_s: float = 0.0
    launch: Launch | None = None
    hydra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Make a `Launch` and a tuple of what JSON has for them."""
        object.__setattr__(self, "hydra", tuple(self.hydra))
        if isinstance(self.launch, Mapping):
            object.__setattr__(self, "launch", Launch(**self.launch))

    def key(self) -> list[Any]:
        """Return what distinguishes the runs of two engines, empty for the local one."""
        if self.name == "local":
            return []
        own = [self.launch.key()] if self.launch else []
        return [self.name, self.trainer, self.train_dtype, self.rollout_dtype, *own, *self.hydra]


@dataclass(frozen=True)
class RunSpec:
    """One run: model, recipe, seed, fault or none, engine; `also` holds the further faults of a run with several."""

    model: str
    recipe: Recipe
    seed: int
    fault: FaultSpec | None = None
    engine: EngineSpec = EngineSpec()
    also: tuple[FaultSpec, ...] = ()

    def __post_init__(self) -> None:
        assert self.fault is not None or not self.also, "further faults without a first one"

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> RunSpec:
        """Return the spec whose `asdict` went through JSON; fields that an older version lacks have their default."""
        fault = raw.get("fault")
        return RunSpec(
            raw["model"],
            Recipe(**raw["recipe"]),
            raw["seed"],
            FaultSpec(**fault) if fault else None,
            EngineSpec(**raw.get("engine", {})),
            tuple(FaultSpec(**item) for item in raw.get("also", ())),
        )

    def key(self, model_hash: str) -> str:
        """Return the content key of this run for a model with the given hash."""
        fault = self.fault and asdict(self.fault)
        also = [asdict(item) for item in self.also]
        return content_key(model_hash, self.recipe.key(), self.seed, fault, *also, *self.engine.key())


@dataclass(frozen=True)
class BuildSpec:
    """One proxy build.

    Attributes:
        checkpoint: Folder in Hugging Face layout.
        out: Folder to write.
        experts: Experts kept a layer (K).
        strategy: multi_view, a "+"-joined subset of router, coactivation, context, or frequency, reap, random,
            first_k, merge.
        alpha: Weights of the three views (router, co-activation, context).
        normalisation: The tilde of the joint distance: min_max, max or rank.
        calibration: "embedded" or a JSONL file of token-id lists or texts.
        calibration_tokens: Tokens used at most.
        seed: Seed of the `random` strategy and of calibration rollouts.
        search_alpha: Look for the weights that do best on held-out calibration rows, instead of `alpha`.
        mtp: "drop" multi-token-prediction layers, or "prune" their experts too.
        test_prompts: JSONL file of prompts that calibration may not contain, "" for none.
    """

    checkpoint: str
    out: str
    experts: int
    strategy: str = "multi_view"
    alpha: tuple[float, float, float] = (1 / 3, 1 / 3, 1 / 3)
    normalisation: str = "min_max"
    calibration: str = "embedded"
    calibration_tokens: int = 65536
    seed: int = 0
    search_alpha: bool = False
    mtp: str = "drop"
    test_prompts: str = ""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        status: "completed" or "failed".
        reason: Why it failed, one line.
        steps: Steps that were completed.
        witness: Numbers measured during the run (see the cards' witness rules).
        cpu_s: CPU seconds of the run.
        wall_s: Seconds of the run.
    """

    status: str
    reason: str = ""
    steps: int = 0
    witness: dict[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    wall_s: float = 0.0
