"""A run is saved, killed and resumed: a checkpoint on disk, fresh objects, the state loaded back, part by part.

A healthy resume changes nothing: the run goes on bit for bit as if it had not been interrupted. A fault at the
checkpoint stage sees each part as it comes back from the disk and may lose it (None).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from proxy.engines.policy import Policy, load
from proxy.engines.router import router_parameters
from proxy.specs import Recipe
from taxonomy.stages import CHECKPOINT_PARTS

Restore = Callable[[str, Any], Any]
"""(part, its state as read from disk) → what is restored, None for a part that is lost."""


@dataclass
class State:
    """Everything that training carries from step to step.

    Attributes:
        trainer: The policy being trained.
        reference: The frozen reference.
        optimizer: AdamW; its first group holds everything but the routers, its second the routers.
        scheduled: Steps that the learning-rate schedule has counted.
    """

    trainer: Policy
    reference: Policy
    optimizer: torch.optim.Optimizer
    scheduled: int = 0


def optimizer_for(policy: Policy, lr: float) -> torch.optim.Optimizer:
    """Return a fresh AdamW over a policy's parameters, the routers' in a group of their own."""
    own = router_parameters(policy)
    groups: list[list[Any]] = [[], []]
    for parameter in policy.model.parameters():
        groups[id(parameter) in own].append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=lr, weight_decay=0.01)


def persistent_buffers(model: Any) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, e.g. the routers' balancing bias."""
    kept = set(model.state_dict())
    return {name: value for name, value in model.named_buffers() if name in kept}


def parts_of(state: State) -> dict[str, Any]:
    """Return the live state by part."""
    return {
        "model": dict(state.trainer.model.named_parameters()),
        "buffers": persistent_buffers(state.trainer.model),
        "optimizer": state.optimizer.state_dict(),
        "scheduler": {"scheduled": state.scheduled},
        "reference": state.reference.model.state_dict(),
    }


def numbers(value: Any) -> Iterator[Tensor]:
    """Yield every number of a nested state as a tensor."""
    if isinstance(value, Mapping):
        for key in value:
            yield from numbers(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, Tensor):
        yield value.detach().double().flatten()
    elif isinstance(value, int | float):
        yield torch.tensor([float(value)], dtype=torch.float64)


def difference(before: Any, after: Any) -> float:
    """Return ‖after − before‖ / ‖before‖ of two states of one part; 1 where all of it is gone."""
    left = [t.cpu() for t in numbers(before)]
    right = [t.cpu() for t in numbers(after)]
    if [t.shape for t in left] != [t.shape for t in right]:
        return 1.0
    if not left:
        return 0.0
    old, new = torch.cat(left), torch.cat(right)
    return float((new - old).norm() / old.norm().clamp(min=1e-30))


def resume(
    state: State, folder: Path, recipe: Recipe, device: torch.device, restore: Restore
) -> tuple[State, dict[str, float]]:
    """Save a run's state, build everything anew from the checkpoint folder, and load the state back.

    A lost part is what a process has that never got it: the weights of the first checkpoint, a fresh optimizer, a
    schedule at step 0, buffers as the model's constructor makes them. A lost reference is taken from the policy.

    Args:
        state: The live state; given up.
        folder: The checkpoint that training began with.
        recipe: The recipe.
        device: Where the models live.
        restore: Sees every part on its way back.

    Returns:
        The state after the resume, and by part (``resume_<part>``) how far it is from what was saved.
    """
    with TemporaryDirectory(prefix="diagnose-resume-") as home:
        file = Path(home) / "checkpoint.pt"
        torch.save(parts_of(state), file)
        del state
        saved = torch.load(file, map_location=device, weights_only=True)
    back = {part: restore(part, saved[part]) for part in CHECKPOINT_PARTS}

    trainer = load(folder, torch.float32, device)
    if back["model"] is not None:
        trainer.model.load_state_dict(back["model"], strict=False)
    made = back["buffers"]
    if made is None and saved["buffers"]:
        made = persistent_buffers(AutoModelForCausalLM.from_config(trainer.model.config))
    with torch.no_grad():
        for name, buffer in persistent_buffers(trainer.model).items():
            buffer.copy_(made[name])
    reference = load(folder, torch.float32, device)
    kept = back["reference"]
    reference.model.load_state_dict(trainer.model.state_dict() if kept is None else kept)
    optimizer = optimizer_for(trainer, recipe.lr)
    if back["optimizer"] is not None:
        optimizer.load_state_dict(back["optimizer"])
    scheduled = 0 if back["scheduler"] is None else int(back["scheduler"]["scheduled"])
    resumed = State(trainer, reference, optimizer, scheduled)
    now = parts_of(resumed)
    return resumed, {f"resume_{part}": difference(saved[part], now[part]) for part in CHECKPOINT_PARTS}
