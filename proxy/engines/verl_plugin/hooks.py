"""The wrappers around verl's functions, and how they get there: each is put in place when its module is loaded.

verl's processes load different modules, so the same list of hooks serves them all. What is wrapped where stands in
`table.HOOKS`.

Legend of shape suffixes: ``_B`` responses, ``_R`` response positions.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from proxy.engines.verl_plugin.state import blame, process, told
from proxy.engines.verl_plugin.table import DRIVER, HOOKS, ROLLOUT, TRAINER
from taxonomy.stages import Action, Stage

Function = Callable[..., Any]


# trainer: a training worker


def clock(original: Function) -> Function:
    """Note the step: after step n (0: before training) the weights go out for the rollout of step n + 1."""

    @wraps(original)
    async def update_weights(worker: Any, global_steps: int | None = None, *args: Any, **kwargs: Any) -> Any:
        state = process()
        state.kind = TRAINER
        if global_steps is not None:
            state.step = int(global_steps) + 1
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


def optimizer_step(original: Function) -> Function:
    """Stages gradients and optimizer: the clip and the learning rate of this update, and whether it happens."""

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
        skip = state.injector.event(Stage.OPTIMIZER, state.context()) is not Action.DO
        with (
            changed(config, clip_grad=clip),
            changed(optimizer, step=(lambda *_a, **_k: None) if skip else optimizer.step),
        ):
            norm: float = original(engine)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state.updates += 1
        if state.injector.active(state.step):
            state.saw(lr_ratio=used / healthy.lr, clipped_norm=min(norm, clip) / healthy.max_grad_norm)
            state.report()
        return norm

    return step


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
        state.updates = 0
        with changed(config, **settings):
            output = original(worker, data)
        if state.injector.active(state.step):
            state.saw(update_ratio=state.updates / (healthy.epochs * healthy.mini_batches))
            if healthy.kl_coef:
                _kl_witness(tensordict_utils.get(output, "metrics"), healthy.kl_coef)
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


# driver: the loop of the V0 trainer


def loop_clock(original: Function) -> Function:
    """Note the step in the driver, as `clock` does in a worker."""

    @wraps(original)
    def update_weights(manager: Any, global_steps: int | None = None, *args: Any, **kwargs: Any) -> Any:
        state = process()
        state.kind = DRIVER
        if global_steps is not None:
            state.step = int(global_steps) + 1
            state.report()
        return original(manager, global_steps, *args, **kwargs)

    return update_weights


def rewards(original: Function) -> Function:
    """Stage reward: one number a response, at its last token."""

    @wraps(original)
    @told
    def extract_reward(batch: Any) -> Any:
        tensor_BR, extra = original(batch)
        if batch.meta_info.get("validate"):
            return tensor_BR, extra
        state = process()
        rewards_B = tensor_BR.sum(-1)
        changed_B = state.injector.transform(Stage.REWARD, "rewards", rewards_B, state.context())
        if len(rewards_B) % state.recipe.group_size == 0:
            spread_G = changed_B.view(-1, state.recipe.group_size).std(-1)
            state.metrics[state.step]["rollout/zero_std_groups"] = float((spread_G < 1e-6).float().mean())
        if changed_B is not rewards_B:
            last_B = batch.batch["response_mask"].sum(-1).long() - 1
            tensor_BR = torch.zeros_like(tensor_BR)
            tensor_BR[torch.arange(len(last_B)), last_B] = changed_B.to(tensor_BR.dtype)
        state.report()
        return tensor_BR, extra

    return extract_reward


def advantages(original: Function) -> Function:
    """Stage advantage: GRPO has one number a response."""

    @wraps(original)
    @told
    def compute_advantage(*args: Any, **kwargs: Any) -> Any:
        data = original(*args, **kwargs)
        state = process()
        advantages_B = data.batch["advantages"][:, 0]
        changed_B = state.injector.transform(Stage.ADVANTAGE, "advantages", advantages_B, state.context())
        if changed_B is not advantages_B:
            data.batch["advantages"] = changed_B[:, None] * data.batch["response_mask"]
            state.report()
        return data

    return compute_advantage


def _log_probs(stage: Stage, key: str) -> Callable[[Function], Function]:
    def wrapper(original: Function) -> Function:
        @wraps(original)
        @told
        def compute(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            state = process()
            data = result[0] if isinstance(result, tuple) else result
            before_BR: Tensor = data.batch[key]
            after_BR = state.injector.transform(stage, "log_probs", before_BR, state.context())
            if after_BR is not before_BR:
                data.batch[key] = after_BR
                state.report()
            return result

        return compute

    return wrapper


reference_log_probs = _log_probs(Stage.REFERENCE, "ref_log_prob")
trainer_log_probs = _log_probs(Stage.FORWARD, "old_log_probs")


# every process


def register_rollout(_module: ModuleType) -> None:
    """Make the CPU rollout known to verl."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    package = __name__.rpartition(".")[0]
    _ROLLOUT_REGISTRY[(ROLLOUT, "async")] = f"{package}.adapter.Adapter"
    RolloutReplicaRegistry.register(ROLLOUT, lambda: importlib.import_module(f"{package}.adapter").Replica)


def wrap(module: ModuleType, symbol: str, wrapper: Function) -> None:
    """Replace ``function`` or ``Class.method`` of a module by its wrapped self."""
    *path, name = symbol.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, wrapper(getattr(owner, name)))


def _plan() -> dict[str, list[Callable[[ModuleType], None]]]:
    """Return what is to be done after the loading of which module."""
    plan: dict[str, list[Callable[[ModuleType], None]]] = defaultdict(list)
    for hook in HOOKS:
        if hook.module:

            def act(module: ModuleType, symbol: str = hook.symbol, name: str = hook.wrapper) -> None:
                wrap(module, symbol, globals()[name])
                process().hooks.append(f"{module.__name__}:{symbol}")

            plan[hook.module].append(act)
    plan["verl.workers.rollout.replica"].append(register_rollout)
    return plan


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds modules as everybody else does, and acts on those of the plan once they are loaded."""

    def __init__(self, plan: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._plan = plan

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the ordinary spec with a loader that acts afterwards; None for modules without a plan."""
        acts = self._plan.pop(fullname, None)
        if acts is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec and spec.loader, f"verl has no module {fullname}"
        load = spec.loader.exec_module

        @told
        def exec_module(module: ModuleType) -> None:
            load(module)
            for act in acts:
                act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Put every hook in place, now or when its module comes."""
    plan = _plan()
    for name in list(plan):
        if name in sys.modules:
            for act in plan.pop(name):
                act(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(plan))
