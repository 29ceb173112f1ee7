"""How large verl's run of a proxy is: world size, parallel plan and batches, scaled from the original's (torch-free).

A proxy has fewer experts, so it needs fewer accelerators, and what divided the original's experts, heads or batch may
not divide what is left. `check` holds verl 0.9.1's own rules (its ``validate_config``, its engines' assertions), which
verl applies minutes into a start; `scaled` proposes the layout nearest to the original that meets them all. Kept
whatever happens: responses a prompt (a group is what GRPO compares) and optimizer updates a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import ceil, gcd
from typing import Any

from proxy.families import get_key

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
MEGATRON = "megatron"


@dataclass(frozen=True)
class Model:
    """What a parallel plan divides; 0 where it is not known.

    Attributes:
        experts: Routed experts a layer.
        heads: Attention heads.
        layers: Decoder layers.
    """

    experts: int = 0
    heads: int = 0
    layers: int = 0

    @staticmethod
    def of(config: Mapping[str, Any], experts: int = 0) -> Model:
        """Return it from a Hugging Face configuration, with another number of experts where one is given."""
        inner = config.get("text_config")
        merged = {**config, **inner} if isinstance(inner, dict) else dict(config)

        def first(*names: str) -> int:
            return next((int(v) for name in names if isinstance(v := merged.get(name), int)), 0)

        found = first("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
        return Model(experts or found, first("num_attention_heads"), first("num_hidden_layers"))


@dataclass(frozen=True)
class Layout:
    """Sizes of a run, by verl's settings; a parallel size that a strategy doesn't have is 1, a size not set 0.

    Attributes:
        strategy: ``actor.strategy``.
        dynamic: ``actor.use_dynamic_bsz``: micro batches are cut by tokens, their sizes mean nothing.
        nodes: ``trainer.nnodes``.
        per_node: ``trainer.n_gpus_per_node``.
        prompts: ``data.train_batch_size``.
        group: ``rollout.n``, responses a prompt.
        mini: ``actor.ppo_mini_batch_size``, prompts an optimizer update.
        micro: ``actor.ppo_micro_batch_size_per_gpu``, responses.
        ref_micro: ``ref.log_prob_micro_batch_size_per_gpu``.
        rollout_micro: ``rollout.log_prob_micro_batch_size_per_gpu``.
        tensor, pipeline, context, expert, expert_tensor: Sizes of Megatron's parallelism.
        sequence: ``ulysses_sequence_parallel_size`` of FSDP.
        shard: ``fsdp_size``, -1 for all.
        rollout_tensor, rollout_data, rollout_expert: Sizes of the rollout engine's parallelism.
        agents: ``rollout.agent.num_workers``: a step's requests are dealt to them evenly.
    """

    strategy: str = "fsdp"
    dynamic: bool = False
    nodes: int = 1
    per_node: int = 8
    prompts: int = 1024
    group: int = 1
    mini: int = 256
    micro: int = 0
    ref_micro: int = 0
    rollout_micro: int = 0
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: int = 1
    shard: int = -1
    rollout_tensor: int = 2
    rollout_data: int = 1
    rollout_expert: int = 1
    agents: int = 8

    @property
    def world(self) -> int:
        """Accelerators in all."""
        return self.nodes * self.per_node

    @property
    def replicas(self) -> int:
        """Data-parallel replicas of the training model."""
        parts = self.tensor * self.pipeline * self.context if self.strategy == MEGATRON else self.sequence
        return max(1, self.world // parts)

    @property
    def updates(self) -> int:
        """Optimizer updates a step (and pass)."""
        return max(1, self.prompts // self.mini)


_MEGATRON = f"{ACTOR}.megatron"
SETTINGS: dict[str, tuple[str, ...]] = {
    "nodes": ("trainer.nnodes",),
    "per_node": ("trainer.n_gpus_per_node",),
    "prompts": ("data.train_batch_size",),
    "group": (f"{ROLLOUT}.n",),
    "mini": (f"{ACTOR}.ppo_mini_batch_size",),
    "micro": (f"{ACTOR}.ppo_micro_batch_size_per_gpu",),
    "ref_micro": (f"{REF}.log_prob_micro_batch_size_per_gpu",),
    "rollout_micro": (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",),
    "tensor": (f"{_MEGATRON}.tensor_model_parallel_size", f"{REF}.megatron.tensor_model_parallel_size"),
    "pipeline": (f"{_MEGATRON}.pipeline_model_parallel_size", f"{REF}.megatron.pipeline_model_parallel_size"),
    "context": (f"{_MEGATRON}.context_parallel_size", f"{REF}.megatron.context_parallel_size"),
    "expert": (f"{_MEGATRON}.expert_model_parallel_size", f"{REF}.megatron.expert_model_parallel_size"),
    "expert_tensor": (
        f"{_MEGATRON}.expert_tensor_parallel_size",
        f"{REF}.megatron.expert_tensor_parallel_size",
    ),
    "sequence": (f"{ACTOR}.ulysses_sequence_parallel_size", f"{REF}.ulysses_sequence_parallel_size"),
    "shard": (f"{ACTOR}.fsdp_config.fsdp_size", f"{REF}.fsdp_config.fsdp_size"),
    "rollout_tensor": (f"{ROLLOUT}.tensor_model_parallel_size",),
    "rollout_data": (f"{ROLLOUT}.data_parallel_size",),
    "rollout_expert": (f"{ROLLOUT}.expert_parallel_size",),
    "agents": (f"{ROLLOUT}.agent.num_workers",),
}
"""Where each size stands in verl's configuration; the first is read, all are written."""


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Return the sizes that a composed configuration asks for."""
    strategy = str(get_key(config, f"{ACTOR}.strategy") or "fsdp")
    found: dict[str, Any] = {
        "strategy": strategy,
        "dynamic": bool(get_key(config, f"{ACTOR}.use_dynamic_bsz")),
    }
    for name, paths in SETTINGS.items():
        value = get_key(config, paths[0])
        megatron = paths[0].startswith(_MEGATRON)
        if isinstance(value, int) and not isinstance(value, bool) and megatron <= (strategy == MEGATRON):
            found[name] = value
    if strategy == MEGATRON and "expert_tensor" not in found:
        found["expert_tensor"] = found.get("tensor", 1)  # Megatron's own default
    return Layout(**found)


def _divides(part: int, whole: int) -> bool:
    return not whole or whole % part == 0


def check(layout: Layout, model: Model) -> list[str]:
    """Return which of verl's rules a layout breaks, a sentence each."""
    at = layout
    world, replicas = at.world, at.replicas
    found = []

    def rule(good: bool, sentence: str) -> None:
        if not good:
            found.append(sentence)

    if at.strategy == MEGATRON:
        parts = at.tensor * at.pipeline * at.context
        rule(
            world % parts == 0,
            f"tensor × pipeline × context parallel ({parts}) must divide the world size ({world})",
        )
        experts = at.expert_tensor * at.expert * at.pipeline
        rule(
            world % experts == 0,
            f"expert × expert-tensor × pipeline ({experts}) must divide the world size ({world})",
        )
        rule(
            _divides(at.expert, model.experts),
            f"expert parallel ({at.expert}) must divide {model.experts} experts",
        )
        rule(
            _divides(at.tensor, model.heads), f"tensor parallel ({at.tensor}) must divide {model.heads} heads"
        )
        rule(
            _divides(at.pipeline, model.layers), f"pipeline ({at.pipeline}) must divide {model.layers} layers"
        )
    else:
        rule(
            world % at.sequence == 0,
            f"sequence parallel ({at.sequence}) must divide the world size ({world})",
        )
        rule(
            _divides(at.sequence, model.heads),
            f"sequence parallel ({at.sequence}) must divide {model.heads} heads",
        )
        rule(
            at.shard < 1 or world % at.shard == 0,
            f"fsdp_size ({at.shard}) must divide the world size ({world})",
        )
    serving = at.rollout_tensor * at.rollout_data
    rule(
        world % serving == 0,
        f"rollout tensor × data parallel ({serving}) must divide the world size ({world})",
    )
    rule(serving % min(serving, at.per_node) == 0, f"a rollout replica ({serving}) must fill whole nodes")
    rule(
        _divides(at.rollout_tensor, model.heads),
        f"rollout tensor parallel ({at.rollout_tensor}) must divide {model.heads} heads",
    )
    rule(
        at.rollout_expert == 1 or at.rollout_expert == serving,
        f"rollout expert parallel ({at.rollout_expert}) must be tensor × data parallel ({serving})",
    )
    rule(
        _divides(at.rollout_expert, model.experts),
        f"rollout expert parallel ({at.rollout_expert}) must divide {model.experts} experts",
    )
    rule(
        at.mini <= at.prompts,
        f"ppo_mini_batch_size ({at.mini}) must not exceed train_batch_size ({at.prompts})",
    )
    responses = at.mini * at.group
    rule(
        responses % replicas == 0, f"a mini batch ({responses} responses) must divide by {replicas} replicas"
    )
    rule(
        at.prompts * at.group % at.agents == 0, f"{at.agents} agent workers must divide the step's responses"
    )
    if not at.dynamic:
        unit = replicas * max(1, at.micro) if at.strategy == MEGATRON else world
        rule(
            at.prompts * at.group % unit == 0,
            f"a step ({at.prompts * at.group} responses) must divide by {unit}",
        )
        share = responses // replicas
        rule(
            at.micro < 1 or share % at.micro == 0,
            f"the micro batch ({at.micro}) must divide {share} responses",
        )
        step = at.prompts * at.group // replicas
        for size, what in ((at.ref_micro, "ref"), (at.rollout_micro, "rollout")):
            rule(
                size < 1 or step % size == 0,
                f"{what}'s log_prob micro batch ({size}) must divide {step} responses",
            )
    return found


def largest(size: int, *wholes: int) -> int:
    """Return the largest divisor of a size that divides every whole; a whole of 0 is not known and divides."""
    return max(d for d in range(1, size + 1) if size % d == 0 and all(_divides(d, whole) for whole in wholes))


def proposed_world(layout: Layout, share: float) -> int:
    """Return a world size for a proxy with a share of the original's parameters: a divisor of the original's.

    The memory of weights, gradients and optimizer is proportional to the parameters; the smallest divisor of the
    original's world size that holds the share leaves each accelerator with no more of them than it had.
    """
    least = min(layout.world, max(1, ceil(layout.world * share - 1e-9)))
    return min(d for d in range(least, layout.world + 1) if layout.world % d == 0)


def nodes_for(world: int, per_node: int) -> tuple[int, int]:
    """Return (nodes, accelerators a node) that make a world size, with no node fuller than it was."""
    size = max(d for d in range(1, min(world, per_node) + 1) if world % d == 0)
    return world // size, size


def scaled(layout: Layout, model: Model, world: int, prompts: int = 0) -> Layout:
    """Return the layout for another world size (or model) that breaks none of the rules of `check`.

    A parallel size becomes its largest divisor that divides what it has to. The batch follows the world size, so
    that an accelerator has as much to do as before, and is rounded up where it has to be.

    Args:
        layout: The original's.
        model: What is left to divide.
        world: Accelerators in all.
        prompts: Prompts a step that the user wants, 0 for the share of the world size. It is rounded up likewise.
    """
    assert world >= 1
    nodes, per_node = (layout.nodes, layout.per_node)
    if world != layout.world:
        nodes, per_node = nodes_for(world, layout.per_node)
    new = replace(layout, nodes=nodes, per_node=per_node)
    if layout.strategy == MEGATRON:
        tensor = largest(layout.tensor, world, model.heads)
        pipeline = largest(layout.pipeline, world // tensor, model.layers)
        context = largest(layout.context, world // (tensor * pipeline))
        rest = world // pipeline
        expert = largest(layout.expert, rest, model.experts)
        expert_tensor = largest(min(layout.expert_tensor, tensor), rest // expert)
        new = replace(
            new, tensor=tensor, pipeline=pipeline, context=context, expert=expert, expert_tensor=expert_tensor
        )
    else:
        new = replace(
            new,
            sequence=largest(layout.sequence, world, model.heads),
            shard=gcd(layout.shard, world) if layout.shard > 0 else layout.shard,
        )
    new = _serving(new, layout, model)
    # A step's responses are dealt to all accelerators (cut by tokens, or by Megatron, to the replicas alone).
    unit = new.replicas if layout.dynamic or layout.strategy == MEGATRON else world
    quantum = unit // gcd(unit, layout.group)
    if world == layout.world and not prompts and layout.prompts % layout.mini == 0 == layout.mini % quantum:
        mini = layout.mini
    else:
        wanted = (prompts or layout.prompts * world / layout.world) / layout.updates
        mini = max(1, ceil(wanted / quantum - 1e-9)) * quantum
    step = mini * layout.updates
    share, dealt = mini * layout.group // new.replicas, step * layout.group // new.replicas
    return replace(
        new,
        mini=mini,
        prompts=step,
        micro=_fitting(layout.micro, share),
        ref_micro=_fitting(layout.ref_micro, dealt),
        rollout_micro=_fitting(layout.rollout_micro, dealt),
        agents=largest(layout.agents, step),
    )


def _fitting(micro: int, share: int) -> int:
    """Return a micro batch, not larger than it was, that divides a share; 0 (not set) stays."""
    return max(d for d in range(1, min(micro, share) + 1) if share % d == 0) if micro > 0 else micro


def _serving(new: Layout, old: Layout, model: Model) -> Layout:
    """Return the layout with the rollout's sizes scaled."""
    world, per_node = new.world, new.per_node
    experts = model.experts if old.rollout_expert > 1 else 0
    best = (1, 1)
    for tensor in (d for d in range(1, old.rollout_tensor + 1) if old.rollout_tensor % d == 0):
        for data in (d for d in range(1, old.rollout_data + 1) if old.rollout_data % d == 0):
            size = tensor * data
            fits = world % size == 0 and size % min(size, per_node) == 0
            if fits and _divides(tensor, model.heads) and _divides(size, experts):
                best = max(best, (tensor, data))
    tensor, data = best
    return replace(
        new,
        rollout_tensor=tensor,
        rollout_data=data,
        rollout_expert=tensor * data if old.rollout_expert > 1 else old.rollout_expert,
    )


def changes(old: Layout, new: Layout) -> list[str]:
    """Return the Hydra overrides that make one layout of another."""
    found = []
    for item in fields(Layout):
        if item.name in SETTINGS and getattr(old, item.name) != (value := getattr(new, item.name)):
            found += [f"++{path}={value}" for path in SETTINGS[item.name]]
    if new.pipeline != old.pipeline:  # a virtual size belongs to the pipeline that it was made for
        found += [f"++{part}.megatron.virtual_pipeline_model_parallel_size=null" for part in (ACTOR, REF)]
    return found


def told(old: Layout, new: Layout) -> list[str]:
    """Return the change of each size for the user, a line each."""
    return [
        f"{SETTINGS[item.name][0]}: {before} → {after}"
        for item in fields(Layout)
        if item.name in SETTINGS and (before := getattr(old, item.name)) != (after := getattr(new, item.name))
    ]
