"""Wrappers inside vLLM's own processes, for a job whose rollout is vLLM (entry point ``vllm.general_plugins``).

vLLM loads general plugins in each of its processes before it builds a model. Here `register` puts the wrappers in place
when their modules are loaded; the step is counted by the weight updates that verl's worker extension receives. They
are Python, so a fault of routes needs ``rollout.enforce_eager=True``: a captured graph replays without them, the
witness stays away, and the run ends as *injection failed*. Not run here (no vLLM takes part in a verl job on a CPU):
written against vLLM's v1 sampler and routers, and tested with stand-ins for them.

Legend of shape suffixes: ``_N`` requests, ``_V`` vocabulary, ``_T`` tokens, ``_K`` experts a token, ``_E`` experts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from proxy.engines.injector import route_agreement
from proxy.engines.verl_plugin import hooks
from proxy.engines.verl_plugin.state import process, told
from proxy.engines.verl_plugin.table import MARKER, SERVER, VLLM
from taxonomy.stages import Stage

Function = Callable[..., Any]


def register() -> None:
    """Put vLLM's hooks in place; called by vLLM, perhaps more than once."""
    if "RL_DIAGNOSE_JOB" not in os.environ or getattr(register, "done", False):
        return
    register.done = True  # type: ignore[attr-defined]
    hooks.install(VLLM)
    print(f"{MARKER} (vLLM, pid {os.getpid()})", file=sys.stderr, flush=True)


def weights_came(original: Function) -> Function:
    """Note the step: weights come before the rollout of each step, the first ones before step 1."""

    @wraps(original)
    @told
    def update_weights_from_ipc(worker: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(worker, *args, **kwargs)
        state = process()
        state.kind = SERVER
        state.step = state.syncs = state.syncs + 1
        state.report()
        return found

    return update_weights_from_ipc


def sampled(original: Function) -> Function:
    """Stage rollout: logits, and what is reported of the sampled tokens: `scale` and `log_probs`."""

    @wraps(original)
    @told
    def forward(sampler: Any, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        state = process()
        if not state.injector.acts(Stage.ROLLOUT, state.step):
            return original(sampler, logits, sampling_metadata, *args, **kwargs)
        context = state.context()
        logits_NV = state.injector.transform(Stage.ROLLOUT, "logits", logits, context)
        kept_NV = logits_NV.float().clone()  # the sampler works in place
        output = original(sampler, logits_NV, sampling_metadata, *args, **kwargs)
        tensors, temperature_N = output.logprobs_tensors, sampling_metadata.temperature
        if tensors is None or temperature_N is None:  # no one asked, or greedy: no scale, nothing to train on
            return output
        scale_N = 1 / temperature_N.float().clamp(min=1e-5)
        changed_N = state.injector.transform(Stage.ROLLOUT, "scale", scale_N, context)
        before_N1 = tensors.logprobs[:, :1]
        after_N1 = before_N1
        if changed_N is not scale_N:
            chosen_N1 = output.sampled_token_ids[:, :1].long()
            after_N1 = (kept_NV * changed_N[:, None]).log_softmax(-1).gather(-1, chosen_N1)
        after_N1 = state.injector.transform(Stage.ROLLOUT, "log_probs", after_N1, context)
        if after_N1 is not before_N1:
            reported = torch.cat([after_N1.to(tensors.logprobs.dtype), tensors.logprobs[:, 1:]], 1)
            output.logprobs_tensors = tensors._replace(logprobs=reported)
        state.report()
        return output

    return forward


def routed(original: Function) -> Function:
    """Stage rollout: router logits, and the routes made of them.

    An expert's healthy share, which some faults are defined by, is counted over the passes before the fault acts.
    """

    @wraps(original)
    @told
    def select_experts(router: Any, hidden_states: Tensor, router_logits: Tensor, *a: Any, **k: Any) -> Any:
        state = process()
        counted_E = state.loads.get(id(router))
        context = state.context(
            top_k=router.top_k,
            num_experts=router.global_num_experts,
            layer=list(state.loads).index(id(router)) if counted_E is not None else len(state.loads),
            routing_share_E=None if counted_E is None else counted_E / counted_E.sum().clamp(min=1),
            router_scores_TE=router_logits.float().softmax(-1),
        )
        acts, plain_TE = state.injector.acts(Stage.ROLLOUT, state.step), router_logits
        if acts:
            router_logits = state.injector.transform(Stage.ROLLOUT, "router_logits", plain_TE, context)
        weights_TK, ids_TK, *rest = original(router, hidden_states, router_logits, *a, **k)
        if router_logits is not plain_TE:
            weights, ids, *_ = original(router, hidden_states, plain_TE, *a, **k)
            changed = 1 - route_agreement((ids, weights), (ids_TK, weights_TK))
            state.injector.note(Stage.ROLLOUT, "routes_changed", changed)
        if not acts:
            load_E = torch.bincount(ids_TK.flatten().long(), minlength=router.global_num_experts).float()
            state.loads[id(router)] = load_E if counted_E is None else counted_E + load_E
            return (weights_TK, ids_TK, *rest)
        routes = (ids_TK, weights_TK)
        ids_TK, weights_TK = state.injector.transform(Stage.ROLLOUT, "routes", routes, context)
        state.report()
        return (weights_TK, ids_TK.to(routes[0].dtype), *rest)

    return select_experts
