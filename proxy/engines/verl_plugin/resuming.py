"""The checkpoint stage on verl: a run is saved by verl's own checkpoint manager, made anew, and loaded back in part.

It happens inside the training worker between two steps. What a resumed process has before it loads anything is made
here as verl makes it (a fresh optimizer, a schedule at its beginning), then verl loads what the fault leaves of the
checkpoint (`checkpoint_load_contents`). A reference that is lost is the resumed policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from proxy.engines.injector import InjectionRefused
from proxy.engines.resume import difference, persistent_buffers
from proxy.engines.verl_plugin.passes import own
from proxy.engines.verl_plugin.state import Process
from proxy.specs import INJECTION_FAILED
from taxonomy.stages import CHECKPOINT_PARTS, Stage


def plain(value: Any) -> Any:
    """Return a copy of a nested state with every tensor replaced by this process's part of it."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return own(value.detach()).clone() if isinstance(value, Tensor) else value


def parts_of(worker: Any) -> dict[str, Any]:
    """Return a copy of a worker's state by part."""
    engine, reference = worker.actor.engine, worker.ref
    return {
        "model": plain(dict(engine.module.named_parameters())),
        "buffers": plain(persistent_buffers(engine.module)),
        "optimizer": plain(engine.optimizer.state_dict()["state"]),
        "scheduler": {"last_epoch": engine.lr_scheduler.last_epoch},
        "reference": plain(reference.engine.module.state_dict()) if reference else {},
    }


def resume(worker: Any, state: Process) -> None:
    """Save a training worker's state, build optimizer and schedule anew, load back what the fault leaves.

    Raises:
        InjectionRefused: The fault loses something that this worker doesn't have.
    """
    engine, context = worker.actor.engine, state.context()
    manager = engine.checkpoint_manager
    before = parts_of(worker)
    lost = {
        part
        for part in CHECKPOINT_PARTS
        if state.injector.transform(Stage.CHECKPOINT, part, before[part], context) is None
    }
    if "reference" in lost and worker.ref is None:
        raise InjectionRefused(f"{INJECTION_FAILED}: the reference lives in another worker, out of reach")
    with TemporaryDirectory(prefix="resume-", dir=state.folder) as home:
        engine.save_checkpoint(home, global_step=state.step - 1)
        engine.optimizer = manager.optimizer = engine._build_optimizer(engine.module)
        engine.lr_scheduler = manager.lr_scheduler = engine._build_lr_scheduler(engine.optimizer)
        kept = manager.checkpoint_load_contents
        manager.checkpoint_load_contents = [
            content
            for content, part in (("model", "model"), ("optimizer", "optimizer"), ("extra", "scheduler"))
            if part not in lost
        ]
        engine.load_checkpoint(home, del_local_after_load=False)
        manager.checkpoint_load_contents = kept
    if "buffers" in lost:
        fresh = persistent_buffers(AutoModelForCausalLM.from_config(engine.module.config))
        with torch.no_grad():
            for name, buffer in persistent_buffers(engine.module).items():
                buffer.copy_(fresh[name])
    if "reference" in lost:
        worker.ref.engine.module.load_state_dict(engine.module.state_dict())
    after = parts_of(worker)
    state.saw(**{f"resume_{part}": difference(before[part], after[part]) for part in CHECKPOINT_PARTS})


def refuse_if_nothing_to_lose(worker: Any, state: Process) -> None:
    """Raise InjectionRefused where a fault loses the buffers of a model that has none."""
    if not state.injector.acts(Stage.CHECKPOINT, state.step):
        return
    lost = state.injector.transform(Stage.CHECKPOINT, "buffers", {}, state.context()) is None
    if lost and not persistent_buffers(worker.actor.engine.module):
        raise InjectionRefused(f"{INJECTION_FAILED}: the checkpoint has no buffers to lose")
