"""The inside of a router, whatever the family's rule: its logits, its dense scores, and the balancing loss on them.

A router is one linear layer and a rule that picks experts from its output. The logits are caught where they leave
that linear layer, so the family's own rule (softmax or sigmoid, bias, groups, normalisation) is never rewritten here.

Legend of shape suffixes: ``_T`` tokens, ``_E`` experts, ``_K`` experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from proxy.engines.policy import Policy, Routes

LogitsHook = Callable[[int, Tensor], Tensor]
"""(index of the MoE layer, logits_TE) → the logits that the router goes on with."""
RoutesHook = Callable[[int, Routes, Routes], None]
"""(index of the MoE layer, routes without the change of the logits, routes with it)."""

_DENSE = {torch.nn.functional.softmax, torch.softmax, Tensor.softmax, torch.sigmoid, Tensor.sigmoid}


class NoRouter(ValueError):
    """The checkpoint's routers are not found beside its experts."""


@dataclass
class Seen:
    """What the router of one layer computed in its latest pass; no scores where the family has no dense ones."""

    logits_TE: Tensor | None = None
    scores_TE: Tensor | None = None
    ids_TK: Tensor | None = None


class _Inside(TorchFunctionMode):
    """Catches the logits of one router call, and the dense scores made of them."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change, self.seen, self.changed = change, Seen(), False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and self.seen.logits_TE is None:
            logits_TE = self.change(out)
            self.changed = logits_TE is not out
            self.seen.logits_TE = out = logits_TE
        elif (
            func in _DENSE
            and self.seen.scores_TE is None
            and self.seen.logits_TE is not None
            and out.shape == self.seen.logits_TE.shape
        ):
            self.seen.scores_TE = out
        return out


def routers(policy: Policy) -> list[Any]:
    """Return the router modules in layer order.

    Raises:
        NoRouter: A layer with experts has no `gate` or `router` beside them.
    """
    found = []
    for name, _module in policy.model.named_modules():
        if name.endswith(".experts"):
            block = policy.model.get_submodule(name.removesuffix(".experts"))
            gate = getattr(block, "gate", None) or getattr(block, "router", None)
            if gate is None:
                raise NoRouter(f"{name.removesuffix('.experts')} has no router that this engine knows")
            found.append(gate)
    return found


def router_parameters(policy: Policy) -> set[int]:
    """Return the ids of all router parameters, empty where routers are not found."""
    try:
        return {id(parameter) for gate in routers(policy) for parameter in gate.parameters()}
    except NoRouter:
        return set()


def picked(output: Any) -> Routes:
    """Return (expert ids_TK, weights_TK) of a router's output (…, weights, ids)."""
    *_, weights_TK, ids_TK = output
    return ids_TK, weights_TK


@contextmanager
def inside(
    policy: Policy, change: LogitsHook | None = None, compare: RoutesHook | None = None
) -> Iterator[dict[int, Seen]]:
    """Open a policy's routers for the length of a block.

    Args:
        policy: The model.
        change: Replaces the logits of a layer.
        compare: Told the routes without and with the change, where there was one.

    Yields:
        By index of the MoE layer, what its router computed last.

    Raises:
        NoRouter: There are no routers to open.
    """
    seen: dict[int, Seen] = {}

    def forward(position: int, plain: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        rule = partial(change, position) if change else (lambda logits_TE: logits_TE)
        with _Inside(rule) as mode:
            output = plain(hidden, *args, **kwargs)
        mode.seen.ids_TK = picked(output)[0]
        seen[position] = mode.seen
        if mode.changed and compare:
            compare(position, picked(plain(hidden, *args, **kwargs)), picked(output))
        return output

    gates = routers(policy)
    before = [gate.forward for gate in gates]
    for position, gate in enumerate(gates):
        gate.forward = partial(forward, position, gate.forward)
    try:
        yield seen
    finally:
        for gate, plain in zip(gates, before, strict=True):
            gate.forward = plain


def balancing_loss(seen: dict[int, Seen], live_T: Tensor, num_experts: int) -> Tensor:
    """Return the auxiliary balancing loss E · Σₑ fₑ Pₑ, averaged over layers (Switch Transformer, eq. 4).

    fₑ is the share of the routed live tokens that go to expert e, Pₑ its mean share of the router's scores; 1 when the
    load is even.

    Args:
        seen: What each router computed.
        live_T: Mask of the real tokens.
        num_experts: E.

    Raises:
        NoRouter: The family's routers have no score for every expert.
    """
    losses = []
    for router in seen.values():
        if router.scores_TE is None or router.ids_TK is None:
            raise NoRouter("a balancing loss needs a score for every expert")
        live = live_T.bool() if len(live_T) == len(router.ids_TK) else slice(None)
        ids_TK, scores_TE = router.ids_TK[live], router.scores_TE[live].float()
        share_E = torch.bincount(ids_TK.flatten(), minlength=num_experts).float() / ids_TK.numel()
        mean_E = (scores_TE / scores_TE.sum(-1, keepdim=True)).mean(0)
        losses.append(num_experts * (share_E * mean_E).sum())
    return torch.stack(losses).mean()
