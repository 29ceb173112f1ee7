"""What a run keeps of its forward passes (routes), and where a fault reaches into them.

While a fault acts at the stage at hand it sees, by name: ``routes`` (expert ids and weights), ``router_logits``, and
``o_proj`` (a `Projection`, the attention's output). A healthy pass is only listened to.

Legend of shape suffixes: ``_B`` responses, ``_L`` positions, ``_T`` routed tokens (= B·L), ``_K`` experts a token,
``_E`` experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from proxy.engines.injector import Injector, route_agreement
from proxy.engines.policy import Policy, Routes
from proxy.engines.router import NoRouter, Seen, inside
from taxonomy.stages import Projection, Stage, StageContext


class RouteLog:
    """Collects the routes of one or more forward passes, by MoE layer."""

    def __init__(self) -> None:
        self.passes: dict[int, list[Routes]] = defaultdict(list)

    def add(self, position: int, routes: Routes, batch: int, width: int = 0) -> None:
        """Keep the routes of one forward pass as (ids_BLK, weights_BLK); with `width`, of its last positions only."""
        ids_TK, weights_TK = (tensor.detach() for tensor in routes)
        shape = (batch, -1, ids_TK.shape[-1])
        self.passes[position].append((ids_TK.view(shape)[:, -width:], weights_TK.view(shape)[:, -width:]))

    def joined(self) -> list[Routes]:
        """Return, by layer, (ids_BLK, weights_BLK) of all passes one after the other."""
        found = []
        for position in sorted(self.passes):
            ids, weights = zip(*self.passes[position], strict=True)
            found.append((torch.cat(ids, 1), torch.cat(weights, 1)))
        return found

    def layers(self, length: int) -> list[Routes]:
        """Return, by layer, the routes of the first `length` positions with one row a token."""
        return [
            (ids_BLK[:, :length].flatten(0, 1), weights_BLK[:, :length].flatten(0, 1))
            for ids_BLK, weights_BLK in self.joined()
        ]


def replay(log: RouteLog, length: int) -> list[Routes]:
    """Return the rollout's routes by layer as (ids_BLK, weights_BLK) for `length` positions.

    The last token of a response is never fed to the rollout: its routes repeat those of the token before.
    """

    def filled(tensor_BLK: Tensor) -> Tensor:
        short = length - tensor_BLK.shape[1]
        return (
            torch.cat([tensor_BLK, tensor_BLK[:, -1:].expand(-1, short, -1)], 1) if short > 0 else tensor_BLK
        )

    return [(filled(ids_BLK), filled(weights_BLK)) for ids_BLK, weights_BLK in log.joined()]


@dataclass(frozen=True)
class Taps:
    """Binds the forward passes of one run to its injector.

    Attributes:
        injector: What may change a pass.
        shares: Healthy routing share_E by MoE layer.
    """

    injector: Injector
    shares: Sequence[Tensor]

    @contextmanager
    def over(
        self,
        policy: Policy,
        stage: Stage,
        context: StageContext,
        *,
        prefix: str = "",
        log: RouteLog | None = None,
        batch: int = 0,
        width: int = 0,
        replayed: Sequence[Routes] | None = None,
        live_T: Tensor | Callable[[int], Tensor] | None = None,
    ) -> Iterator[None]:
        """Listen to a policy's passes for the length of a block, and let the fault act where it acts.

        Args:
            policy: The model.
            stage: Stage of the passes.
            context: Context of the stage.
            prefix: Put before the names of the tensors, for a second model at one stage.
            log: Where the routes go.
            batch: Rows of a pass; needed for `log`.
            width: Positions of a pass that are logged, counted from its end; 0 for all.
            replayed: The rollout's routes of the same tokens, (ids_BLK, weights_BLK) by layer.
            live_T: Mask of the real tokens, or what makes it from their number where passes differ in length.
        """
        injector, seen = self.injector, dict[int, Seen]()
        acts = injector.acts(stage, context.step)

        def moment(position: int, tokens: int) -> StageContext:
            routes = replayed[position] if replayed is not None else None
            return replace(
                context,
                top_k=policy.top_k,
                num_experts=policy.num_experts,
                layer=policy.layers[position],
                routing_share_E=self.shares[position],
                router_scores_TE=seen[position].scores_TE if position in seen else None,
                rollout_routes=routes and tuple(tensor.flatten(0, 1) for tensor in routes),
                live_T=live_T(tokens) if callable(live_T) else live_T,
            )

        def route(position: int, routes: Routes) -> Routes:
            if acts:
                routes = injector.transform(
                    stage, f"{prefix}routes", routes, moment(position, len(routes[0]))
                )
            if log is not None:
                log.add(position, routes, batch, width)
            return routes

        def change(position: int, logits_TE: Tensor) -> Tensor:
            here = moment(position, len(logits_TE))
            changed: Tensor = injector.transform(stage, f"{prefix}router_logits", logits_TE, here)
            return changed

        def compare(_position: int, plain: Routes, changed: Routes) -> None:
            injector.note(stage, "routes_changed", 1 - route_agreement(plain, changed))

        def project(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            whole = Projection(args[0], module.weight, output)
            changed = injector.transform(stage, f"{prefix}o_proj", whole, context)
            return None if changed is whole else changed.output

        with ExitStack() as stack:
            if acts:
                try:
                    seen = stack.enter_context(inside(policy, change, compare))
                except NoRouter:  # a fault that needs them finds no scores, and leaves no witness
                    seen = {}
                for name, module in policy.model.named_modules():
                    if name.endswith(".o_proj"):
                        stack.callback(module.register_forward_hook(project).remove)
            policy.hook = route
            try:
                yield
            finally:
                policy.hook = None
