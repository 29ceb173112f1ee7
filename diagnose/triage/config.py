"""Configurations → facts: Hydra dumps and flat argument files of the usual frameworks, and what differs between two.

Only keys that some fault's clues ask for are translated. A key is matched by its last parts, so that a full dump
(``actor_rollout_ref.rollout.temperature``) and a pasted piece of one (``rollout.temperature``) read the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diagnose import located
from diagnose.errors import DiagnoseError
from diagnose.report.text import literal
from taxonomy.clues import all_clues
from taxonomy.facts import Scalar, completed, holds, scalar


class ConfigError(DiagnoseError):
    """A configuration file that can't be read."""


Convert = Callable[[Scalar], Scalar]


def _same(value: Scalar) -> Scalar:
    return value


def _negated(value: Scalar) -> Scalar:
    return not value if isinstance(value, bool) else None


def _given(value: Scalar) -> Scalar:
    """A setting that switches something on by being there."""
    return value not in (None, False, "", "null", "none", 0)


def _multi(value: Scalar) -> Scalar:
    return "multi" if value is True or (isinstance(value, int) and value > 1) else "single"


def _async(value: Scalar) -> Scalar:
    return "async" if value is True or "async" in str(value) else "sync"


def quantization_of(value: Scalar) -> Scalar:
    """Return the format of a quantization setting, "none" for those that mean none."""
    return "none" if value in (None, False, "", "auto", "bfloat16", "bf16", "float16") else value


def dtype_of(value: Scalar) -> Scalar:
    """Return the short name of a number format."""
    return {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}.get(str(value), value)


def _norm(value: Scalar) -> Scalar:
    return "none" if value is None else value


# (end of a dotted key, as a pattern) → fact. The first that matches counts.
_KEYS: tuple[tuple[str, str, Convert], ...] = (
    (r"rollout\.name|generation\.backend|rollout_backend|inference_backend", "rollout.backend", _same),
    (
        r"(?:rollout|generation|sampling)\.temperature|rollout_temperature|^temperature",
        "rollout.temperature",
        _same,
    ),
    (r"(?:rollout|vllm|vllm_cfg|vllm_kwargs)\.logprobs_mode|^logprobs_mode", "rollout.logprobs_mode", _same),
    (
        r"rollout\.quantization|vllm_cfg\.precision|vllm_cfg\.quantization",
        "rollout.quantization",
        quantization_of,
    ),
    (r"rollout\.free_cache_engine", "rollout.free_cache_engine", _same),
    (r"enable_prefix_caching", "rollout.prefix_caching", _same),
    (r"reset_prefix_cache", "rollout.reset_prefix_cache", _same),
    (r"disable_cascade_attn", "rollout.cascade_attention", _negated),
    (r"enable_sleep_mode", "rollout.sleep", _given),
    (r"sleep_level", "rollout.sleep_level", _same),
    (r"rollout\.expert_parallel_size|vllm_cfg\.expert_parallel_size", "rollout.expert_parallel", _same),
    (r"multi_turn\.enable|max_rollout_turns|max_turns", "rollout.turns", _multi),
    (r"enable_rollout_routing_replay|use_rollout_routing_replay", "rollout.routing_replay", _same),
    (r"router_replay\.mode", "rollout.routing_replay", lambda value: str(value).upper() == "R3"),
    (r"async_grpo\.enabled|trainer_mode|async_training\.enabled", "rollout.mode", _async),
    (
        r"staleness_threshold|max_async_level|max_head_offpolicyness|max_trajectory_age_steps|max_off_policy_steps",
        "rollout.staleness",
        _same,
    ),
    (r"rollout_correction\.rollout_is|use_tis|use_importance_sampling_correction", "loss.rollout_is", _given),
    (r"vllm_importance_sampling_correction|tis_imp_ratio_cap", "loss.rollout_is", _given),
    (r"(?:actor\.strategy|trainer\.backend)$", "trainer.backend", _same),
    (r"megatron_cfg\.enabled|megatron\.enabled", "trainer.megatron", _same),
    (
        r"(?:actor\.megatron|dtensor_cfg|megatron_cfg|trainer)\.tensor_(?:model_)?parallel_size|^tensor_model_parallel_size",
        "trainer.tensor_parallel",
        _same,
    ),
    (r"mixed_precision\.param_dtype|policy\.precision|^dtype|torch_dtype", "trainer.dtype", dtype_of),
    (r"mixed_precision\.reduce_dtype", "trainer.reduce_dtype", dtype_of),
    (r"use_remove_padding|sequence_packing\.enabled|^packing|padding_free", "trainer.packing", _same),
    (r"critic_warmup", "trainer.critic_warmup", _same),
    (r"trainer\.device|^device", "device", lambda value: {"cuda": "gpu"}.get(str(value), value)),
    (r"lora_rank|lora_r|lora\.rank", "trainer.lora", _given),
    (r"moe_expert_capacity_factor|moe_capacity_factor", "trainer.moe_capacity_factor", _norm),
    (r"use_kl_loss", "actor.use_kl_loss", _same),
    (r"use_kl_in_reward", "actor.kl_in_reward", _same),
    (r"kl_loss_coef|reference_policy_kl_penalty|init_kl_coef|^beta|\.beta$", "actor.kl_coef", _same),
    (r"kl_ctrl\.kl_coef", "actor.kl_coef_in_reward", _same),
    (
        r"(?:actor\.optim|optimizer\.kwargs|optimizer|optim)\.lr|^learning_rate|^lr|actor_learning_rate",
        "actor.lr",
        _same,
    ),
    (
        r"optim\.clip_grad|max_grad_norm|^clip_grad|actor\.grad_clip|gradient_clipping",
        "actor.max_grad_norm",
        _norm,
    ),
    (r"ppo_epochs|num_iterations|^num_ppo_epochs", "actor.epochs", _same),
    (r"actor\.clip_ratio|ratio_clip_min|eps_clip|^epsilon", "actor.clip_ratio", _same),
    (r"loss_agg_mode|loss_type", "loss.aggregation", _same),
    (r"entropy_coeff?|entropy_loss_coef", "loss.entropy_coef", _same),
    (r"mask_truncated_completions|overlong_filtering", "loss.mask_truncated", _same),
    (r"adv_estimator", "algorithm", _same),
    (r"custom_reward_function\.path", "reward.custom", _given),
    (r"max_response_length|max_completion_length|max_new_tokens", "data.response_cap", _same),
    (r"shuffle$", "data.shuffle", _same),
    (
        r"actor_rollout_ref\.model\.path|model_name_or_path|policy\.model_name|hf_checkpoint|^model\.path|model\.name",
        "model.name",
        _same,
    ),
    (r"checkpoint\.load_contents", "checkpoint.contents", _same),
    (r"resume_from_checkpoint|resume_from_path", "resumed", _given),
)
_COMPILED = tuple(
    (
        re.compile(rf"(?:^|\.)(?:{pattern})$" if not pattern.startswith("^") else rf"(?:{pattern})$"),
        fact,
        convert,
    )
    for pattern, fact, convert in _KEYS
)
_DULL = re.compile(
    r"(?i)path|dir|name|project|experiment|logger|seed$|port|host|wandb|save|_freq|nnodes|n_gpus|num_workers"
)


@dataclass(frozen=True)
class Difference:
    """A setting in which the good and the bad configuration differ.

    Attributes:
        key: The raw key.
        good: Its value in the good one, "‹absent›" where it is not there.
        bad: Its value in the bad one.
        fact: The fact that it decides, "" where no clue asks for it.
        faults: Faults that the bad value makes possible or likelier, and the good one did not.
    """

    key: str
    good: str
    bad: str
    fact: str
    faults: tuple[str, ...]


def read_settings(path: Path) -> dict[str, Scalar]:
    """Read a YAML or JSON configuration as dotted keys.

    Raises:
        ConfigError: The file can't be read, or holds no mapping.
    """
    name = literal(str(path))
    try:
        with path.open("rb") as file:
            found = located.parse(file.read(located.MAX_BYTES + 1))
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from error
    if found.issues or not isinstance(found.data, dict):
        what = (
            f"{found.issues[0].line}:{found.issues[0].col}: {found.issues[0].message}"
            if found.issues
            else "no mapping"
        )
        raise ConfigError(
            f"{name}: {what}", "give the YAML or JSON that the framework resolved its settings to"
        )
    return located.flatten(found.data)


def facts_of(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the facts that a configuration states."""
    facts: dict[str, Scalar] = {}
    for key, value in settings.items():
        clean = key.replace("-", "_")
        for pattern, fact, convert in _COMPILED:
            if pattern.search(clean):
                if (converted := convert(scalar(value))) is not None or value is None:
                    facts.setdefault(fact, converted)
                break
        else:
            if "." in key and re.match(
                r"(?:rollout|trainer|actor|model|data|reward|loss|library|device|mismatch)\.", key
            ):
                facts.setdefault(key, scalar(value))
    return _resolved(facts, settings)


def _resolved(facts: dict[str, Scalar], settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Settle what takes more than one key."""
    if facts.pop("trainer.megatron", None):
        facts["trainer.backend"] = "megatron"
    in_reward = facts.pop("actor.kl_coef_in_reward", None)
    if facts.get("actor.use_kl_loss") is False:
        facts.pop("actor.kl_coef", None)
        if facts.get("actor.kl_in_reward") and in_reward is not None:
            facts["actor.kl_coef"] = in_reward
    elif "actor.use_kl_loss" not in facts and "actor.kl_coef" in facts:
        facts["actor.use_kl_loss"] = facts["actor.kl_coef"] not in (0, 0.0, None)  # TRL's beta is both in one
    if "checkpoint.contents" in facts:
        facts["checkpoint.loads_optimizer"] = "optim" in str(facts.pop("checkpoint.contents"))
    elif parts := [
        str(value) for key, value in settings.items() if re.search(r"checkpoint\.load_contents\.\d+$", key)
    ]:
        facts["checkpoint.loads_optimizer"] = "optimizer" in parts
    if settings.get("use_vllm") is True:
        facts.setdefault("rollout.backend", "vllm")
    for flag in ("fp16", "bf16"):
        if settings.get(flag) is True:
            facts.setdefault("trainer.dtype", flag)
    if any(key.startswith("actor_rollout_ref.") for key in settings):
        facts.setdefault("framework", "verl")
        facts.setdefault("loss.rollout_is", False)
    return facts


def differences(good: Mapping[str, Scalar], bad: Mapping[str, Scalar]) -> tuple[Difference, ...]:
    """Return the settings that differ, those that can cause the most first, names and paths last."""
    facts_good, facts_bad = completed(facts_of(good)), completed(facts_of(bad))
    found = []
    for key in dict.fromkeys((*bad, *good)):
        old, new = good.get(key, "‹absent›"), bad.get(key, "‹absent›")
        if old == new:
            continue
        fact = next((name for pattern, name, _ in _COMPILED if pattern.search(key.replace("-", "_"))), "")
        fact = {"actor.kl_coef_in_reward": "actor.kl_coef", "trainer.megatron": "trainer.backend"}.get(
            fact, fact
        )
        faults = _caused(fact, facts_good, facts_bad) if fact else ()
        found.append(Difference(key, str(old), str(new), fact, faults))
    return tuple(
        sorted(found, key=lambda d: -len(d.faults) if d.faults else bool(_DULL.search(d.key)) + (not d.fact))
    )


def _caused(fact: str, good: Mapping[str, Scalar], bad: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Return the faults for which the bad value of a fact fulfils a condition that the good one did not."""
    faults = []
    for fault, clue in all_clues().items():
        conditions = [group[fact] for group in (clue.needs, clue.favours) if fact in group]
        conditions += [check.when[fact] for check in clue.checks if fact in check.when]
        lifted = (
            fact in clue.excludes
            and holds(clue.excludes[fact], good.get(fact))
            and not holds(clue.excludes[fact], bad.get(fact))
        )
        if lifted or any(
            holds(c, bad.get(fact)) and not (fact in good and holds(c, good[fact])) for c in conditions
        ):
            faults.append(fault)
    return tuple(faults)
