"""The stages of an RL step, the three forms of injection, and what an injection looks like to an engine.

Only protocols and plain data live here: listing the faults must not import torch, so tensors are `Any`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


CHECKPOINT_PARTS = ("model", "buffers", "optimizer", "scheduler", "reference")
"""What a training checkpoint holds, in the order in which it is restored."""

ROLLOUT_TENSORS = (
    "scale",
    "attention_mask",
    "logits",
    "log_probs",
    "routes",
    "router_logits",
    "router_scores",
    "o_proj",
)
"""What a transform of the rollout's forward may touch."""


class Form(StrEnum):
    """How an injection acts on an engine."""

    OVERRIDES = "overrides"
    """Settings alone."""
    TRANSFORM = "transform"
    """A pure function over a named tensor of a stage."""
    EVENT = "event"
    """Something that does or doesn't happen."""
    NONE = "none"
    """Not injectable by any engine: the card says what to check by hand."""


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
        from_step: First step at which the fault is active.
        router_scores_TE: The router's score of every expert for the tokens at hand (softmax or sigmoid of its
            logits, before Top-k), None outside a router or where the family has none.
        rollout_routes: (expert ids_TK, weights_TK) that the rollout used for the same tokens, None where there are
            none or the tokens are not the same.
        live_T: Mask of the tokens at hand, 0 for padding; None where it is not known.
        facts: What else is known at the stage, by name. At the reward stage of the local engine: `prompts` and
            `responses` (texts), `answer_B` and `format_B` (the parts of the reward), `lengths_B`, `truncated_B`.
    """

    step: int
    temperature: float = 1.0
    top_k: int = 0
    num_experts: int = 0
    layer: int = -1
    routing_share_E: Any = None
    from_step: int = 1
    router_scores_TE: Any = None
    rollout_routes: Any = None
    live_T: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Projection:
    """One application of a linear layer, as a transform sees it; only its output goes on.

    Attributes:
        input: (…, in) tensor.
        weight: (out, in) tensor.
        output: (…, out) tensor, input · weightᵀ.
    """

    input: Any
    weight: Any
    output: Any


Overrides = Callable[[Mapping[str, float], Mapping[str, Any]], dict[str, Any]]
"""(fault parameters, healthy recipe) → the changed recipe fields."""
Transform = Callable[[str, Any, StageContext], Any]
"""(tensor name, tensor, context) → the tensor, changed or not. Never changes its input in place."""
Change = Callable[[Any, StageContext], Any]
"""(tensor, context) → the tensor, changed or not."""
EventRule = Callable[[StageContext], Action]
"""context → what happens."""


def on(tensor: str, change: Change) -> Transform:
    """Return the transform that changes the one tensor with this name and lets every other pass."""

    def transform(name: str, value: Any, context: StageContext) -> Any:
        return change(value, context) if name == tensor else value

    return transform


@dataclass(frozen=True)
class Compound:
    """What a transform or event injection may return in place of one function: a fault that acts in several places.

    The card's stage and form name the place that matters most.

    Attributes:
        overrides: Recipe fields that change while the fault is active.
        transforms: What it does to the tensors of each stage.
        events: What it decides at each stage.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    transforms: Mapping[Stage, Transform] = field(default_factory=dict)
    events: Mapping[Stage, EventRule] = field(default_factory=dict)
