"""Forward passes of the training side (trainer and frozen reference), and what a fault does to them.

Legend of shape suffixes: ``_B`` responses, ``_L`` padded positions, ``_R`` response positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from proxy.engines.injector import Injector
from proxy.engines.policy import Policy, token_log_probs
from taxonomy.stages import Stage, StageContext


def log_probs(
    policy: Policy,
    tokens_BL: Tensor,
    mask_BL: Tensor,
    response: int,
    scale: float,
    injector: Injector,
    context: StageContext,
) -> tuple[Tensor, Tensor]:
    """Return what `token_log_probs` returns, as the training framework of the fault computes it.

    A fault sees the `inputs` (tokens and attention mask, which it may widen to the left: the last R positions are the
    response) and the `logits`.
    """
    tokens_BL, mask_BL = injector.transform(Stage.FORWARD, "inputs", (tokens_BL, mask_BL), context)

    def tap(logits_BRV: Tensor) -> Tensor:
        changed: Tensor = injector.transform(Stage.FORWARD, "logits", logits_BRV, context)
        return changed

    return token_log_probs(policy, tokens_BL, mask_BL, response, scale, tap)


@contextmanager
def seen_weights(policy: Policy, injector: Injector, context: StageContext) -> Iterator[None]:
    """Let the passes inside see what a fault makes of the weights (``weights/<name>``).

    The parameters themselves come back afterwards, and gradients are theirs (straight through).
    """
    kept = []
    for name, parameter in policy.model.named_parameters():
        value = parameter.data
        changed = injector.transform(Stage.FORWARD, f"weights/{name}", value, context)
        if changed is not value:
            kept.append((parameter, value))
            parameter.data = changed
    try:
        yield
    finally:
        for parameter, value in kept:
            parameter.data = value
