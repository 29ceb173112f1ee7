"""What every engine offers, and the capability table: which faults an engine can express (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.engines.verl_plugin.table import ANY, HOOKS
from taxonomy.registry import FaultCard
from taxonomy.stages import CHECKPOINT_PARTS, ROLLOUT_TENSORS, Form, Stage


@dataclass(frozen=True)
class Capability:
    """One thing an engine can do to a run.

    Attributes:
        stage: Stage of the step.
        form: Form of injection.
        tensors: Names of the tensors a transform sees there (or that its context shows), or of the settings an
            override may change, or of what an event decides about.
    """

    stage: Stage
    form: Form
    tensors: tuple[str, ...] = ()


CAPABILITIES: dict[str, tuple[Capability, ...]] = {
    "local": (
        Capability(Stage.SYNC, Form.EVENT),
        Capability(Stage.SYNC, Form.TRANSFORM, ("every parameter and buffer, by name",)),
        Capability(Stage.ROLLOUT, Form.TRANSFORM, ROLLOUT_TENSORS),
        Capability(
            Stage.REWARD,
            Form.TRANSFORM,
            ("rewards", "prompts", "responses", "answer_B", "format_B", "lengths_B", "truncated_B"),
        ),
        Capability(Stage.BATCH, Form.TRANSFORM, ("response_mask", "rollout_log_probs")),
        Capability(Stage.REFERENCE, Form.TRANSFORM, ("log_probs",)),
        Capability(Stage.ADVANTAGE, Form.TRANSFORM, ("groups", "advantages")),
        Capability(
            Stage.FORWARD,
            Form.TRANSFORM,
            (
                "inputs",
                "weights",
                "logits",
                "log_probs",
                "routes",
                "reference_routes",
                "router_logits",
                "router_scores",
                "rollout_routes",
                "o_proj",
            ),
        ),
        Capability(Stage.ROLLOUT, Form.OVERRIDES, ("max_new_tokens", "temperature")),
        Capability(
            Stage.LOSS, Form.OVERRIDES, ("kl_coef", "clip_ratio", "epochs", "length_exponent", "aux_coef")
        ),
        Capability(Stage.LOSS, Form.TRANSFORM, ("log_ratio", "kl_gap")),
        Capability(Stage.GRADIENTS, Form.TRANSFORM, ("every gradient, by the name of its parameter",)),
        Capability(Stage.GRADIENTS, Form.OVERRIDES, ("max_grad_norm",)),
        Capability(Stage.OPTIMIZER, Form.OVERRIDES, ("lr", "warmup_steps", "router_lr")),
        Capability(Stage.OPTIMIZER, Form.EVENT),
        Capability(Stage.ROLLOUT, Form.EVENT, ("prefix_cache",)),
        Capability(Stage.CHECKPOINT, Form.TRANSFORM, ("resume", *CHECKPOINT_PARTS)),
    ),
    # With verl's V0 trainer; what the V1 trainer lacks of it is refused when a run starts.
    "verl": tuple(
        Capability(stage, form, hook.tensors if form is not Form.EVENT or len(hook.stages) == 1 else ())
        for hook in HOOKS
        for stage, form in hook.stages
    ),
}


def refusal(engine: str, card: FaultCard) -> str:
    """Return why an engine cannot express a fault, "" where it can."""
    if not card.injectable:
        return f"no engine can inject it: check by hand (diagnose faults {card.id})"
    places = [c for c in CAPABILITIES[engine] if c.stage == card.stage and c.form == card.form]
    if not places:
        return f"the {engine} engine has no {card.form} injection at the {card.stage} stage"
    names = {name for place in places for name in place.tensors}
    missing = [name for name in card.uses if name not in names]
    if missing and not names & set(ANY):
        return f"the {engine} engine gives no access to {', '.join(missing)} at the {card.stage} stage"
    return ""
