"""Wrappers around functions of verl's training worker: weights on their way out, forward passes, loss, optimizer.

What is wrapped where stands in `table.HOOKS`.

Legend of shape suffixes: ``_B`` responses, ``_R`` response positions, ``_L`` positions, ``_T`` tokens (= B·L), ``_V``
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from proxy.engines import local
from proxy.engines.injector import InjectionRefused
from proxy.engines.policy import Routes, positions_BL
from proxy.engines.router import Seen, balancing_loss, inside, router_parameters
from proxy.engines.taps import RouteLog, Taps
from proxy.engines.update import token_weights_BR
from proxy.engines.verl_plugin import passes, resuming
from proxy.engines.verl_plugin.state import blame, process, told
from proxy.engines.verl_plugin.table import TRAINER
from proxy.specs import INJECTION_FAILED
from taxonomy.stages import Action, Stage

Function = Callable[..., Any]
_EXTRA = "rl_diagnose_extra"
"""Under this name a pass notes how many positions a fault put before its tokens."""


@contextmanager
def changed(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes for the length of a block, also on frozen objects."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        object.__setattr__(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(target, name, value)


def clock(original: Function) -> Function:
    """Note the step: after step n (0: before training) the weights go out for the rollout of step n + 1.

    Stage checkpoint: between the two the run may be resumed.
    """

    @told
    def begin(worker: Any, step: int) -> None:
        state = process()
        state.step = step
        resuming.refuse_if_nothing_to_lose(worker, state)
        if state.injector.transform(Stage.CHECKPOINT, "resume", False, state.context()):
            resuming.resume(worker, state)
            state.report()

    @wraps(original)
    async def update_weights(worker: Any, global_steps: int | None = None, *args: Any, **kwargs: Any) -> Any:
        process().kind = TRAINER
        if global_steps is not None:
            begin(worker, int(global_steps) + 1)
        return await original(worker, global_steps, *args, **kwargs)

    return update_weights


def weight_stream(original: Function) -> Function:
    """Stage sync: the stream of weights on its way to the rollout, with its tensors changed, or empty."""

    def stream(parameters: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        state = process()
        context = state.context()
        try:
            for name, tensor in parameters:
                yield name, state.injector.transform(Stage.SYNC, name, tensor, context)
        except Exception as error:
            blame(error)
            raise
        state.report()

    @wraps(original)
    @told
    def get_per_tensor_param(engine: Any, *args: Any, **kwargs: Any) -> Any:
        state = process()
        parameters, adapter = original(engine, *args, **kwargs)
        # The first sync always happens: a rollout without weights is another fault.
        if state.step > 1 and state.injector.event(Stage.SYNC, state.context()) is not Action.DO:
            state.report()
            return iter(()), adapter
        return stream(parameters), adapter

    return get_per_tensor_param


# forward passes, of the policy and of the reference


def forward_batch(original: Function) -> Function:
    """Stage forward: the weights that the passes of a batch see."""

    @wraps(original)
    @told
    def forward_backward_batch(engine: Any, *args: Any, **kwargs: Any) -> Any:
        state = process()
        with passes.seen_weights(engine, state, state.context()):
            return original(engine, *args, **kwargs)

    return forward_backward_batch


def model_inputs(original: Function) -> Function:
    """Stage forward: the tokens and the mask that the model reads."""

    @wraps(original)
    @told
    def prepare_model_inputs(engine: Any, micro_batch: Any) -> Any:
        inputs, notes = original(engine, micro_batch)
        state = process()
        if not state.injector.acts(Stage.FORWARD, state.step):
            return inputs, notes
        before = inputs["input_ids"], inputs["attention_mask"]
        if before[1] is None:  # packed rows: there is no mask to change; a fault that needs none goes on
            return inputs, notes
        context = state.context(facts={"encode": passes.encode})
        after = state.injector.transform(Stage.FORWARD, "inputs", before, context)
        if after is not before:
            tokens_BL, mask_BL = after
            inputs |= {
                "input_ids": tokens_BL,
                "attention_mask": mask_BL,
                "position_ids": positions_BL(mask_BL),
            }
            notes[_EXTRA] = tokens_BL.shape[1] - before[0].shape[1]
        return inputs, notes

    return prepare_model_inputs


def model_outputs(original: Function) -> Function:
    """Stage forward: the logits of the model, those of the micro batch's own positions."""

    @wraps(original)
    @told
    def prepare_model_outputs(engine: Any, output: Any, output_args: Any, *args: Any, **kwargs: Any) -> Any:
        state = process()
        if state.injector.acts(Stage.FORWARD, state.step) and getattr(output, "logits", None) is not None:
            logits_BLV = output.logits[:, output_args.pop(_EXTRA, 0) :]
            output.logits = state.injector.transform(Stage.FORWARD, "logits", logits_BLV, state.context())
        return original(engine, output, output_args, *args, **kwargs)

    return prepare_model_outputs


def forward_step(original: Function) -> Function:
    """Stage forward: routes, router logits and projections of one pass; the routing metrics; the balancing loss."""

    @wraps(original)
    @told
    def step(engine: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        state = process()
        policy = passes.policy_of(engine)
        if policy is None:
            return original(engine, micro_batch, loss_function, forward_only)
        reference = bool(engine.engine_config.forward_only)
        recipe = state.injector.recipe(state.recipe, state.step)
        acts = state.injector.acts(Stage.FORWARD, state.step)
        balanced = bool(recipe.aux_coef) and not forward_only
        heard = forward_only and not reference and micro_batch.get("routed_experts", None) is not None
        if not (acts or balanced or heard):
            return original(engine, micro_batch, loss_function, forward_only)
        from verl.utils import tensordict_utils

        packed = tensordict_utils.get_non_tensor_data(micro_batch, "use_remove_padding", default=False)
        if packed and acts:
            raise InjectionRefused(
                f"{INJECTION_FAILED}: faults of the forward pass need use_remove_padding=False"
            )
        if packed and not balanced:
            return original(engine, micro_batch, loss_function, forward_only)
        lengths_B = micro_batch["input_ids"].offsets().diff()
        length = int(lengths_B.max())
        live_T = (torch.arange(length) < lengths_B[:, None].cpu()).flatten()
        known = None if packed or reference else passes.rollout_routes(micro_batch, length)
        log = RouteLog() if known and forward_only else None
        replayed: list[Routes] | None = None
        if known and acts:
            shape = len(lengths_B), length, -1
            replayed = [(ids_TK.view(shape), torch.ones(ids_TK.shape).view(shape)) for ids_TK in known[0]]
        shares = state.shares(lambda: local.routing_shares(policy)) if acts else [torch.empty(0)] * 999
        with ExitStack() as stack:
            stack.enter_context(
                Taps(state.injector, shares).over(
                    policy,
                    Stage.FORWARD,
                    state.context(top_k=policy.top_k, num_experts=policy.num_experts),
                    prefix="reference_" if reference else "",
                    log=log,
                    batch=len(lengths_B),
                    width=length,
                    replayed=replayed,
                    live_T=live_T,
                )
            )
            routers: dict[int, Seen] = {}
            if balanced:
                routers = stack.enter_context(inside(policy))
            loss, output = original(engine, micro_batch, loss_function, forward_only)
            if routers:
                share = float(micro_batch["loss_mask"].sum()) / float(micro_batch["batch_num_tokens"])
                scale = recipe.aux_coef * share * float(micro_batch["dp_size"])
                term = scale * balancing_loss(routers, live_T, policy.num_experts)
                loss = loss + term
                output["loss"] += float(term.detach())
                if state.injector.active(state.step):
                    state.saw(balancing_term=float(term.detach()))
        if log is not None and known:
            tally = state.tally(lambda: passes.RoutingTally(policy.layers, policy.num_experts))
            tally.add(log.layers(length), known[0], live_T & known[1])
            state.metrics[state.step] |= tally.metrics()
        if acts:
            state.report()
        return loss, output

    return step


# loss


def kl_term(original: Function) -> Function:
    """Stage loss: the exponent of the k3 KL term, which verl clamps; a fault sees it and may leave the clamp."""

    @wraps(original)
    @told
    def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
        state = process()
        wanted = state.kind == TRAINER and state.injector.acts(Stage.LOSS, state.step)
        if not wanted or kl_penalty not in ("low_var_kl", "k3"):
            unchanged: Tensor = original(logprob, ref_logprob, kl_penalty)
            return unchanged
        gap_BR = (ref_logprob - logprob).clamp(-20, 20)
        gap_BR = state.injector.transform(Stage.LOSS, "kl_gap", gap_BR, state.context())
        value_BR: Tensor = gap_BR.exp() - gap_BR - 1
        return value_BR.clamp(-10, 10)

    return kl_penalty


def loss_mean(original: Function) -> Function:
    """Stage loss: the weight of a token by the length of its response (`length_exponent`)."""

    @wraps(original)
    @told
    def agg_loss(loss_mat: Tensor, loss_mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state = process()
        recipe = state.injector.recipe(state.recipe, state.step)
        if recipe.length_exponent and state.kind == TRAINER:
            weights_BR = token_weights_BR(loss_mask.float(), recipe.length_exponent)
            used = weights_BR[loss_mask > 0]
            if state.injector.active(state.step):
                state.saw(token_weight_spread=float(used.max() / used.min()))
            loss_mat = loss_mat * weights_BR
        loss: Tensor = original(loss_mat, loss_mask, *args, **kwargs)
        return loss

    return agg_loss


def actor_update(original: Function) -> Function:
    """Stage loss: old log-probabilities, KL coefficient, clip and number of passes of this step's updates."""

    @wraps(original)
    @told
    def train_mini_batch(worker: Any, data: Any) -> Any:
        state = process()
        loss = getattr(worker, "loss_fn", None)
        config = getattr(loss, "keywords", {}).get("config")
        if config is None or not hasattr(config, "kl_loss_coef"):  # a critic
            return original(worker, data)
        from verl.utils import tensordict_utils

        healthy, recipe = state.recipe, state.injector.recipe(state.recipe, state.step)
        policy = passes.policy_of(worker.engine)
        if state.probe is None:
            state.probe = passes.probe_of(worker.engine, policy)
        if recipe.old_log_prob == "rollout":
            # What verl's bypass mode trains on. The mode itself would also leave out the trainer's own
            # log-probabilities, and with them entropy and every mismatch metric.
            data["old_log_probs"] = data["rollout_log_probs"]
        # What the fault leaves alone is left alone: a command of the user's may have settings that no recipe knows.
        settings = {}
        if recipe.kl_coef != healthy.kl_coef and "kl_coef" not in state.job["by_hydra"]:
            settings["kl_loss_coef"] = recipe.kl_coef
        if recipe.clip_ratio != healthy.clip_ratio and "clip_ratio" not in state.job["by_hydra"]:
            factor = recipe.clip_ratio / healthy.clip_ratio
            for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
                settings[name] = getattr(config, name) * factor
        if recipe.epochs != healthy.epochs and "epochs" not in state.job["by_hydra"]:
            tensordict_utils.assign_non_tensor(data, epochs=recipe.epochs)
        state.norms.clear()
        apart = recipe.router_lr != healthy.router_lr
        start = [passes.own(p.detach()).clone() for p in worker.engine.module.parameters()] if apart else []
        with changed(config, **settings):
            output = original(worker, data)
        if apart and policy is not None:
            _router_witness(worker.engine, policy, start)
        if state.injector.active(state.step):
            updates = len(state.norms)
            wrong = sum(not math.isfinite(norm) for norm in state.norms)
            state.saw(
                update_ratio=updates / (healthy.epochs * healthy.mini_batches),
                nonfinite_updates=wrong / max(1, updates),
            )
            if healthy.kl_coef:
                _kl_witness(tensordict_utils.get(output, "metrics"), healthy.kl_coef)
        if state.probe is not None:
            state.metrics[state.step] |= state.probe.flips()
        state.report()
        return output

    return train_mini_batch


def _kl_witness(metrics: Any, coefficient: float) -> None:
    """Measure how far the KL term in the loss is from what the recipe asks for."""

    def total(name: str) -> float:
        found = next((metrics[key] for key in (name, f"actor/{name}") if key in metrics), 0.0)
        values = found if isinstance(found, list) else [found]
        return float(sum(float(getattr(value, "aggregate", lambda v=value: v)()) for value in values))

    if total("kl_loss") > 0:
        deviation = (total("loss") - total("pg_loss")) / (coefficient * total("kl_loss")) - 1
        process().saw(kl_term_deviation=abs(deviation))


def _router_witness(engine: Any, policy: Any, start: list[Tensor]) -> None:
    """Measure how far the routers' parameters moved in this step, against all others."""
    routers = router_parameters(policy)
    moved: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter, before in zip(engine.module.parameters(), start, strict=True):
        moved[id(parameter) in routers].append((passes.own(parameter.detach()) - before).abs().flatten())
    ratio = float(torch.cat(moved[True]).mean()) / max(float(torch.cat(moved[False]).mean()), 1e-30)
    process().saw(router_step_ratio=ratio, router_still=1 - min(1.0, ratio))


# gradients and optimizer


def optimizer_step(original: Function) -> Function:
    """Stages gradients and optimizer: gradients, clip and learning rate of this update, and whether it happens."""

    @wraps(original)
    @told
    def step(engine: Any) -> float:
        state = process()
        healthy, recipe = state.recipe, state.injector.recipe(state.recipe, state.step)
        optimizer, config = engine.optimizer, engine.optimizer_config
        rates = [group["lr"] for group in optimizer.param_groups]
        clip = config.clip_grad
        if "lr" not in state.job["by_hydra"]:
            for group in optimizer.param_groups:
                group["lr"] *= recipe.lr / healthy.lr
        if "max_grad_norm" not in state.job["by_hydra"]:
            clip *= recipe.max_grad_norm / healthy.max_grad_norm
        used = optimizer.param_groups[0]["lr"]
        if state.injector.acts(Stage.GRADIENTS, state.step):
            _change_gradients(engine)
        skip = state.injector.event(Stage.OPTIMIZER, state.context()) is not Action.DO
        routers = _router_shards(engine) if recipe.router_lr != 1 else []
        before = [shard.clone() for shard in routers]
        with ExitStack() as stack:
            stack.enter_context(changed(config, clip_grad=clip))
            if skip:
                stack.enter_context(changed(optimizer, step=lambda *_a, **_k: None))
            elif not recipe.skip_nonfinite:
                # verl clears the gradients in place of a step whose norm is not finite.
                stack.enter_context(changed(optimizer, zero_grad=_stepping(optimizer)))
            norm: float = original(engine)
        # AdamW's step, its weight decay included, is proportional to the learning rate.
        for shard, value in zip(routers, before, strict=True):
            shard.copy_(value + recipe.router_lr * (shard - value))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state.norms.append(norm)
        if state.injector.active(state.step):
            state.saw(lr_ratio=used / healthy.lr, clipped_norm=min(norm, clip) / healthy.max_grad_norm)
            state.report()
        return norm

    return step


def _stepping(optimizer: Any) -> Function:
    plain = optimizer.zero_grad

    def step_then_clear(*args: Any, **kwargs: Any) -> None:
        optimizer.step()
        plain(*args, **kwargs)

    return step_then_clear


@torch.no_grad()
def _change_gradients(engine: Any) -> None:
    """Show every gradient to the fault, in this process's part of it."""
    state = process()
    for name, parameter in engine.module.named_parameters():
        if parameter.grad is not None:
            shard = passes.own(parameter.grad)
            shard.copy_(state.injector.transform(Stage.GRADIENTS, name, shard, state.context()))


def _router_shards(engine: Any) -> list[Tensor]:
    """Return this process's part of every router parameter.

    Raises:
        InjectionRefused: The model has no routers that are known.
    """
    policy = passes.policy_of(engine)
    routers = router_parameters(policy) if policy is not None else set()
    if not routers:
        raise InjectionRefused(f"{INJECTION_FAILED}: the model has no routers to treat apart")
    return [passes.own(p.data) for p in engine.module.parameters() if id(p) in routers]
