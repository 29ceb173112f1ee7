"""The wrappers around verl's functions, and how they get there: each is put in place when its module is loaded.

verl's processes load different modules, so the same list of hooks serves them all. What is wrapped where stands in
`table.HOOKS`.

"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from proxy.engines.verl_plugin.state import process, told
from proxy.engines.verl_plugin.table import DRIVER, HOOKS, ROLLOUT, SERVER, TRAINER, VLLM_HOOKS, Hook

Function = Callable[..., Any]


def register_rollout(_module: ModuleType) -> None:
    """Make the CPU rollout known to verl."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    package = __name__.rpartition(".")[0]
    _ROLLOUT_REGISTRY[(ROLLOUT, "async")] = f"{package}.adapter.Adapter"
    RolloutReplicaRegistry.register(ROLLOUT, lambda: importlib.import_module(f"{package}.adapter").Replica)


def wrapper_of(hook: Hook) -> Function:
    """Return a hook's wrapper; its file is imported only now, when verl's own modules are there."""
    home = {DRIVER: "driver", TRAINER: "worker", SERVER: "vllm_hooks"}[hook.process]
    found: Function = getattr(importlib.import_module(f"{__name__.rpartition('.')[0]}.{home}"), hook.wrapper)
    return found


def wrap(module: ModuleType, symbol: str, wrapper: Function) -> None:
    """Replace ``function`` or ``Class.method`` of a module by its wrapped self."""
    *path, name = symbol.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, wrapper(getattr(owner, name)))


def _plan(rollout: str) -> dict[str, list[Callable[[ModuleType], None]]]:
    """Return what is to be done after the loading of which module, in verl's processes or in a rollout's own."""
    plan: dict[str, list[Callable[[ModuleType], None]]] = defaultdict(list)
    trainer = process().job["trainer"]
    for hook in VLLM_HOOKS if rollout else HOOKS:
        if hook.wrapper and trainer in hook.trainers:

            def act(module: ModuleType, hook: Hook = hook) -> None:
                wrap(module, hook.symbol, wrapper_of(hook))
                process().hooks.append(f"{module.__name__}:{hook.symbol}")

            plan[hook.module].append(act)
    if not rollout:
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


def install(rollout: str = "") -> None:
    """Put every hook in place, now or when its module comes; `rollout` names the backend whose process this is."""
    plan = _plan(rollout)
    for name in list(plan):
        if name in sys.modules:
            for act in plan.pop(name):
                act(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(plan))
