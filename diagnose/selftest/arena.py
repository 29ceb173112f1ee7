"""What is run for the self-test: the incidents on the original, and the replays on the proxy and on its controls.

A plan is a list of parts in the order of their worth, so that a filling that is cut short leaves a smaller test and
not half of everything. Each part is a list of runs; the bank makes each of them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from diagnose.bank import Bank, Model
from diagnose.selftest.incidents import (
    CALIBRATION_SEEDS,
    CHANGED,
    DEFAULT,
    HEALTHY_CHANGED_SEEDS,
    HEALTHY_SEEDS,
    RECIPES,
    TWIN_SEEDS,
    Incident,
    changed_incidents,
    double_incidents,
    healthy_incidents,
    plain_incidents,
)
from diagnose.session import fault_spec
from proxy.specs import BuildSpec, Recipe, RunSpec
from taxonomy.registry import FaultCard, Library

ORIGINAL = "embedded:qwen3_moe"
OTHER = "embedded:deepseek_v3"
EXPERTS = 12
PROXY = "proxy"
CONTROLS: Mapping[str, str] = {
    "random experts": "as many experts, drawn by lot",
    "other base": "a proxy of the other embedded original",
    "frequency only": "the most frequent experts",
    "merged": "experts averaged within their clusters",
}
"""Proxies that the proxy has to beat, with what they are."""

SPINE = (
    "weight_sync_skipped",
    "stale_weights",
    "rollout_logprob_precision",
    "rollout_weight_quantization",
    "actor_update_omission",
    "learning_rate_too_high",
    "kl_sign_flipped",
    "reward_flipped",
    "excess_inner_epochs",
    "expert_permutation",
    "top_k_mismatch",
)
"""The faults of the first release. Incidents of these were looked at while thresholds were chosen; all others are
unseen."""

SPINE_CONTROLS = ("frequency only", "merged")
"""Controls that are held against the proxy on the faults of the spine alone."""

STRENGTHS = (0.5, 1.0, 2.0)
ONSETS = (1, 21)
REPLAY_SEEDS = (1, 2)
CONTROL_HEALTHY_SEEDS = (1, 2, *range(1001, 1009))
"""Healthy seeds of a control; the proxy has the same ones where it is compared with controls."""


def proxies() -> dict[str, BuildSpec]:
    """Return how the proxy and its controls are cut."""
    cut = BuildSpec(ORIGINAL, "", EXPERTS)
    return {
        PROXY: cut,
        "random experts": replace(cut, strategy="random"),
        "other base": replace(cut, checkpoint=OTHER),
        "frequency only": replace(cut, strategy="frequency"),
        "merged": replace(cut, strategy="merge"),
    }


@dataclass(frozen=True)
class Scale:
    """How much of the test is run: everything, or a smoke test.

    Attributes:
        faults: Fault ids, empty for all that the local engine injects.
        steps: Steps of every run, 0 for the recipe's own.
        healthy: Healthy incidents.
        healthy_changed: Healthy incidents of each changed recipe.
        calibration: Healthy seeds of a changed recipe, and of the default one where none are shipped.
        single: Incidents of each fault under the replays' recipe.
        pairs: Two-fault incidents.
        strengths: Strengths of replays injected from the start.
        onsets: Injection steps of replays; all but the first at the default strength alone.
        replay_seeds: Seeds of replays.
        controls: Control proxies.
        changed: Whether incidents under changed recipes take part.
    """

    faults: tuple[str, ...] = ()
    steps: int = 0
    healthy: int = len(HEALTHY_SEEDS)
    healthy_changed: int = len(HEALTHY_CHANGED_SEEDS)
    calibration: int = len(CALIBRATION_SEEDS)
    single: int = 4
    pairs: int = 24
    strengths: tuple[float, ...] = STRENGTHS
    onsets: tuple[int, ...] = ONSETS
    replay_seeds: tuple[int, ...] = REPLAY_SEEDS
    controls: tuple[str, ...] = tuple(CONTROLS)
    changed: bool = True


FULL = Scale()
QUICK = Scale(
    faults=("learning_rate_too_high", "actor_update_omission", "weight_sync_skipped"),
    steps=20,
    healthy=2,
    healthy_changed=0,
    calibration=4,
    single=1,
    pairs=1,
    strengths=(1.0,),
    onsets=(1,),
    replay_seeds=(1,),
    controls=(),
    changed=False,
)


@dataclass(frozen=True)
class Replays:
    """One fault, strength and injection step on one proxy."""

    fault: str
    strength: float
    from_step: int
    runs: tuple[RunSpec, ...]


@dataclass(frozen=True)
class Lineup:
    """What one proxy has to offer to a diagnosis.

    Attributes:
        name: `PROXY` or a control.
        healthy: Its healthy runs.
        replays: Its replays.
    """

    name: str
    healthy: tuple[RunSpec, ...]
    replays: tuple[Replays, ...]

    @property
    def runs(self) -> list[RunSpec]:
        """All runs."""
        return [*self.healthy, *(run for item in self.replays for run in item.runs)]


@dataclass(frozen=True)
class Arena:
    """Models, incidents, line-ups: everything that is run, and nothing of what comes out.

    Attributes:
        library: Cards in force.
        scale: How much is run.
        models: Checkpoint by name: "original", `PROXY` and the controls.
    """

    library: Library
    scale: Scale
    models: Mapping[str, Model]
    _recipes: Mapping[str, Recipe] = field(default_factory=lambda: RECIPES)

    @cached_property
    def faults(self) -> tuple[FaultCard, ...]:
        """Return the faults that take part."""
        from diagnose.selftest.incidents import injectable

        cards = injectable(self.library)
        return tuple(card for card in cards if not self.scale.faults or card.id in self.scale.faults)

    @property
    def by_path(self) -> dict[str, Model]:
        """Return the models by their path, as a bank wants them."""
        return {model.path: model for model in self.models.values()}

    @property
    def recipes(self) -> list[str]:
        """Return the names of the recipes that take part."""
        return [name for name in RECIPES if name == DEFAULT or self.scale.changed]

    def recipe(self, name: str) -> Recipe:
        """Return a recipe by name, at the length of this test."""
        found = self._recipes[name]
        return replace(found, steps=self.scale.steps) if self.scale.steps else found

    @cached_property
    def single(self) -> tuple[Incident, ...]:
        """Return the incidents with one fault under the replays' recipe."""
        return tuple(plain_incidents(self.faults, self.scale.single))

    @cached_property
    def changed(self) -> tuple[Incident, ...]:
        """Return the incidents with one fault under other recipes."""
        return tuple(changed_incidents(self.faults)) if self.scale.changed else ()

    @cached_property
    def double(self) -> tuple[Incident, ...]:
        """Return the incidents with two faults."""
        return tuple(double_incidents(self.faults, self.scale.pairs))

    @cached_property
    def healthy(self) -> tuple[Incident, ...]:
        """Return the healthy runs that play incidents."""
        found = list(healthy_incidents(HEALTHY_SEEDS[: self.scale.healthy]))
        for name in CHANGED if self.scale.changed else ():
            found += healthy_incidents(HEALTHY_CHANGED_SEEDS[: self.scale.healthy_changed], name)
        return tuple(found)

    def run_of(self, incident: Incident) -> RunSpec:
        """Return the run that records an incident."""
        specs = [
            fault_spec(self.library[fault], incident.strength, incident.from_step) for fault in incident.truth
        ]
        run = RunSpec(self.models["original"].path, self.recipe(incident.recipe), incident.seed)
        return replace(run, fault=specs[0], also=tuple(specs[1:])) if specs else run

    def twins(self, recipe: str) -> list[RunSpec]:
        """Return the healthy logs that incidents of a recipe come with."""
        return self._healthy("original", TWIN_SEEDS, recipe)

    def calibration(self, recipe: str) -> list[RunSpec]:
        """Return the healthy seeds of the original under a recipe, from which detectability is decided."""
        return self._healthy("original", CALIBRATION_SEEDS[: self.scale.calibration], recipe)

    def lineup(self) -> Lineup:
        """Return what the proxy offers: all strengths from the start, the default one also in the middle."""
        scale = self.scale
        grid = [(strength, scale.onsets[0]) for strength in scale.strengths]
        grid += [(1.0, onset) for onset in scale.onsets[1:]]
        return self._lineup(PROXY, scale.replay_seeds, scale.replay_seeds, grid)

    def compared(self, name: str, *, spine: bool = False) -> Lineup:
        """Return what the proxy or a control offers where they are compared: one seed, the default strength.

        Args:
            name: `PROXY` or a control.
            spine: Whether only the faults of the spine are candidates.
        """
        found = self._lineup(name, self.scale.replay_seeds[:1], CONTROL_HEALTHY_SEEDS, [(1.0, 1)])
        return replace(found, replays=tuple(i for i in found.replays if i.fault in SPINE)) if spine else found

    def parts(self) -> dict[str, list[RunSpec]]:
        """Return all runs by part, the most valuable part first."""
        twins = {name: [*self.twins(name), *self.calibration(name)] for name in self.recipes}
        parts = {
            "replays": self.lineup().runs,
            "twins": twins.pop(DEFAULT)[: len(TWIN_SEEDS) if self.shipped else None],
            "single": self.runs_of(self.single),
            "healthy": self.runs_of(item for item in self.healthy if item.recipe == DEFAULT),
            "double": self.runs_of(self.double),
            "recipes": [run for runs in twins.values() for run in runs],
            "changed": self.runs_of(self.changed),
            **{name: self.compared(name, spine=name in SPINE_CONTROLS).runs for name in self.scale.controls},
            "healthy, changed": self.runs_of(item for item in self.healthy if item.recipe != DEFAULT),
        }
        if self.scale.controls:
            parts["replays"] = [*parts["replays"], *self.compared(PROXY).healthy]
        return {name: runs for name, runs in parts.items() if runs}

    @property
    def shipped(self) -> bool:
        """Whether shipped healthy seeds belong to the default recipe of this test."""
        return not self.scale.steps

    def runs_of(self, incidents: Iterable[Incident]) -> list[RunSpec]:
        """Return the runs that record incidents."""
        return [self.run_of(item) for item in incidents]

    def _healthy(self, model: str, seeds: Sequence[int], recipe: str = DEFAULT) -> list[RunSpec]:
        return [RunSpec(self.models[model].path, self.recipe(recipe), seed) for seed in seeds]

    def _lineup(
        self,
        name: str,
        seeds: Sequence[int],
        healthy: Sequence[int],
        grid: Sequence[tuple[float, int]],
    ) -> Lineup:
        path, recipe = self.models[name].path, self.recipe(DEFAULT)
        replays, known = [], set()
        for strength, step in grid:
            for card in self.faults:
                fault = fault_spec(card, strength, step)
                runs = tuple(RunSpec(path, recipe, seed, fault) for seed in seeds)
                mark = tuple(self._mark(run) for run in runs)
                if mark in known:  # a fault without a scale is the same at every strength
                    continue
                known.add(mark)
                replays.append(Replays(card.id, strength, step, runs))
        return Lineup(name, tuple(self._healthy(name, healthy)), tuple(replays))

    def _mark(self, run: RunSpec) -> str:
        return run.key(self.by_path[run.model].hash)


def open_arena(bank: Bank, library: Library, scale: Scale) -> Arena:
    """Return the arena, its models built.

    Raises:
        RunError: A build failed.
    """
    wanted: dict[str, str | BuildSpec] = {"original": ORIGINAL}
    wanted |= {name: cut for name, cut in proxies().items() if name == PROXY or name in scale.controls}
    return Arena(library, scale, bank.models(wanted))
