"""The stages of an RL step, the three forms of injection, and what an injection looks like to an engine.

Only protocols and plain data live here: listing the faults must not import torch, so tensors are `Any`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """The stages every RL framework runs through in one step; faults attach to them."""

    SYNC = "sync"
    ROLLOUT = "rollout"
    REWARD = "reward"
    BATCH = "batch"
    REFERENCE = "reference"
    ADVANTAGE = "advantage"
    FORWARD = "forward"
    LOSS = "loss"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"


class Form(StrEnum):
    """How an injection acts on an engine."""

    OVERRIDES = "overrides"
    """Settings alone."""
    TRANSFORM = "transform"
    """A pure function over a named tensor of a stage."""
    EVENT = "event"
    """Something that does or doesn't happen."""


class Action(StrEnum):
    """What an event injection decides for one occurrence of its stage."""

    DO = "do"
    SKIP = "skip"
    RELOAD = "reload"


@dataclass(frozen=True)
class StageContext:
    """What an injection may know about the moment it is called in.

    Attributes:
        step: Training step, counted from 1.
        temperature: Sampling temperature of the run.
        top_k: Experts a token is routed to (0 for a dense model).
        num_experts: Experts of the layer at hand (0 outside a router).
        layer: Index of the decoder layer at hand, -1 where the tensor belongs to none.
        routing_share_E: Healthy share of the routed tokens by expert of the layer at hand, as a tensor,
            None before anything was routed. Expert faults are defined by this share, never by expert index.
    """

    step: int
    temperature: float = 1.0
    top_k: int = 0
    num_experts: int = 0
    layer: int = -1
    routing_share_E: Any = None


Overrides = Callable[[Mapping[str, float], Mapping[str, Any]], dict[str, Any]]
"""(fault parameters, healthy recipe) → the changed recipe fields."""
Transform = Callable[[str, Any, StageContext], Any]
"""(tensor name, tensor, context) → the tensor, changed or not. Never changes its input in place."""
EventRule = Callable[[StageContext], Action]
"""context → what happens."""
