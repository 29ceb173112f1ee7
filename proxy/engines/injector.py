"""A fault bound to a run: when it is active, what it does at each stage, and the numbers that prove it took place."""

from __future__ import annotations

import importlib
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from proxy.specs import FaultSpec, Recipe, RunSpec
from taxonomy.stages import Action, Compound, EventRule, Form, Projection, Stage, StageContext, Transform


class InjectionRefused(ValueError):
    """The injection can't be resolved, or the engine cannot express it."""


def resolve(path: str) -> Callable[..., Any]:
    """Return the function behind ``module:function``.

    Raises:
        InjectionRefused: There is no such function.
    """
    module, _, name = path.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InjectionRefused(f"injection {path!r} cannot be resolved: {error}") from error
    return found


class Injector:
    """Applies one fault, or none, and keeps its witness.

    A transform's witness is measured on the tensors themselves (`transform_change`, the mean relative change over all
    calls; for routes `routes_changed`, the share of expert choices that differ, and `route_weights_changed`;
    for a forward pass's inputs `attended_change`, the relative change of the number of tokens that are attended to;
    `nonfinite_made`, the number of values made infinite or NaN), an event's by counting (`events_skipped`), an
    override's by the engine, which reads the settings back from where they act.
    """

    def __init__(self, fault: FaultSpec | None, seed: int) -> None:
        self.fault = fault
        self._seed = seed
        self._sums: dict[str, float] = defaultdict(float)
        self._calls: dict[str, int] = defaultdict(int)
        self._override: Callable[..., Mapping[str, Any]] | None = None
        self._transforms: Mapping[Stage, Transform] = {}
        self._events: Mapping[Stage, EventRule] = {}
        if fault is None:
            return
        if fault.form == Form.NONE:
            raise InjectionRefused(f"{fault.id} cannot be injected: it is checked by hand")
        made = resolve(fault.inject)
        if fault.form == Form.OVERRIDES:
            self._override = made
            return
        acts = made(fault.params)
        if isinstance(acts, Compound):
            self._override = (lambda _params, _recipe: acts.overrides) if acts.overrides else None
            self._transforms, self._events = acts.transforms, acts.events
        elif fault.form == Form.TRANSFORM:
            self._transforms = {Stage(fault.stage): acts}
        else:
            self._events = {Stage(fault.stage): acts}

    def active(self, step: int) -> bool:
        """Return whether the fault acts in this step (window, then a draw that depends on seed and step alone)."""
        fault = self.fault
        if fault is None or step < fault.from_step or (fault.until_step and step > fault.until_step):
            return False
        return fault.probability >= 1 or random.Random(f"{self._seed}/{step}").random() < fault.probability

    def acts(self, stage: Stage, step: int) -> bool:
        """Return whether a transform of the fault sees the tensors of a stage in this step."""
        return stage in self._transforms and self.active(step)

    def recipe(self, healthy: Recipe, step: int) -> Recipe:
        """Return the recipe of this step."""
        if self._override is None or not self.active(step):
            return healthy
        assert self.fault
        return replace(healthy, **self._override(self.fault.params, asdict(healthy)))

    def transform(self, stage: Stage, name: str, tensor: Any, context: StageContext) -> Any:
        """Return the tensor (or the routes) as the stage goes on with it."""
        rule = self._transforms.get(stage)
        if rule is None or not self.active(context.step):
            return tensor
        assert self.fault
        changed = rule(name, tensor, replace(context, from_step=self.fault.from_step))
        if name.endswith("routes"):
            # Order among the chosen experts does not matter, and a weight of 0 is an expert not chosen.
            self._note("routes_changed", 1 - route_agreement(tensor, changed))
            self._note("route_weights_changed", weight_change(tensor, changed))
        elif changed is tensor:
            pass
        elif isinstance(tensor, Projection):
            self._note_change(tensor.output.detach().float(), changed.output.detach().float())
        elif name == "inputs":
            attended = float(tensor[1].sum())
            self._note("attended_change", abs(float(changed[1].sum()) - attended) / attended)
        elif isinstance(tensor, Tensor):
            self._note_change(tensor.detach().float(), changed.detach().float())
        return changed

    def _note_change(self, before: Tensor, after: Tensor) -> None:
        """Note by how much a tensor was changed, and how many of its values are no longer finite."""
        finite = before.isfinite() & after.isfinite()
        made = int((before.isfinite() & ~after.isfinite()).sum())
        if made:
            self._note("nonfinite_made", made)
        if not finite.all():
            before, after = before[finite], after[finite]
        if before.numel():
            scale = before.abs().mean().clamp(min=1e-12)
            self._note("transform_change", float((after - before).abs().mean() / scale))

    def event(self, stage: Stage, context: StageContext) -> Action:
        """Return what happens at this stage now."""
        rule = self._events.get(stage)
        if rule is None or not self.active(context.step):
            return Action.DO
        assert self.fault
        action = rule(replace(context, from_step=self.fault.from_step))
        self._sums["events_skipped"] += action is Action.SKIP
        self._calls["events_skipped"] = 1
        return action

    def note(self, stage: Stage, key: str, value: float) -> None:
        """Keep a number that the engine measured about what the fault does at a stage."""
        if stage in self._transforms:
            self._note(key, value)

    def _note(self, key: str, value: float) -> None:
        self._sums[key] += value
        self._calls[key] += 1

    def tally(self) -> dict[str, tuple[float, int]]:
        """Return what the witness is made of, name → (sum, calls), so that several processes can be merged."""
        return {key: (total, self._calls[key]) for key, total in self._sums.items()}

    def witness(self) -> dict[str, float]:
        """Return the numbers measured so far."""
        return {key: total / self._calls[key] for key, total in self._sums.items()}


class Combination(Injector):
    """Applies several faults at once, in the order given, and keeps their witnesses apart (`fault/name`)."""

    def __init__(self, faults: Sequence[FaultSpec], seed: int) -> None:
        super().__init__(None, seed)
        self.parts = [Injector(fault, seed) for fault in faults]

    def active(self, step: int) -> bool:
        """Return whether any of the faults acts in this step."""
        return any(part.active(step) for part in self.parts)

    def acts(self, stage: Stage, step: int) -> bool:
        """Return whether a transform of any of the faults sees the tensors of a stage in this step."""
        return any(part.acts(stage, step) for part in self.parts)

    def note(self, stage: Stage, key: str, value: float) -> None:
        """Keep a number that the engine measured, for every fault that acts at the stage."""
        for part in self.parts:
            part.note(stage, key, value)

    def recipe(self, healthy: Recipe, step: int) -> Recipe:
        """Return the recipe of this step, each override applied to what the one before it left."""
        return reduce(lambda recipe, part: part.recipe(recipe, step), self.parts, healthy)

    def transform(self, stage: Stage, name: str, tensor: Any, context: StageContext) -> Any:
        """Return the tensor (or the routes) after all faults of this stage."""
        return reduce(lambda value, part: part.transform(stage, name, value, context), self.parts, tensor)

    def event(self, stage: Stage, context: StageContext) -> Action:
        """Return what happens at this stage now: skipped where any fault skips it."""
        actions = [part.event(stage, context) for part in self.parts]
        return next((action for action in actions if action is not Action.DO), Action.DO)

    def tally(self) -> dict[str, tuple[float, int]]:
        """Return the tallies of all faults by `fault/name`."""
        return {
            f"{part.fault.id}/{name}": value
            for part in self.parts
            if part.fault
            for name, value in part.tally().items()
        }

    def witness(self) -> dict[str, float]:
        """Return the numbers measured so far by `fault/name`."""
        return {name: total / calls for name, (total, calls) in self.tally().items()}


def injector_for(spec: RunSpec) -> Injector:
    """Return the injector of a run's fault, of its faults, or of none.

    Raises:
        InjectionRefused: An injection can't be resolved.
    """
    if spec.fault is not None and spec.also:
        return Combination((spec.fault, *spec.also), spec.seed)
    return Injector(spec.fault, spec.seed)


def weight_change(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> float:
    """Return the mean relative change of the experts' weights, place by place."""
    before_TK, after_TK = left[1].detach().float(), right[1].detach().float()
    return float((after_TK - before_TK).abs().mean() / before_TK.abs().mean().clamp(min=1e-12))


def route_agreement(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> float:
    """Return the share of the left side's experts that the right side also uses, averaged over tokens.

    Args:
        left: (expert ids_TK, weights_TK).
        right: The same of the other side; experts with weight 0 are not used.
    """
    (left_TK, left_weight_TK), (right_TK, right_weight_TK) = left, right
    same_TKK = (left_TK[:, :, None] == right_TK[:, None, :]) & (right_weight_TK[:, None, :] != 0)
    used_TK = left_weight_TK != 0
    shared_TK = same_TKK.any(-1) & used_TK
    return float(shared_TK.sum() / torch.clamp(used_TK.sum(), min=1))
