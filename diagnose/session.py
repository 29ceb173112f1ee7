"""A session: all that `diagnose run` was asked to do, resolved once, kept in `session.json`, never changed.

The runner reads nothing else (no playbook, no log, no environment), so a session resumed on another day is
the same session. Planning is pure: `plan_runs` says which replays there are and in which order they start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diagnose.errors import RunError
from diagnose.store import RunFolder, read_json
from proxy.specs import BuildSpec, EngineSpec, FaultSpec, Recipe, RunSpec, content_key
from taxonomy.registry import FaultCard

SCHEMA = 1
LEAST_REPLAYS = 2
"""Replays with a fault that are run even where the budget is spent: the likeliest candidates."""


@dataclass(frozen=True)
class PlannedFault:
    """A candidate at one strength.

    Attributes:
        fault: Fault id.
        strength: Multiple of the card's default.
        spec: The fault as an engine receives it.
        fit: Strengths that may be tried to find the one that matches the incident best, ascending and with
            `strength` among them; empty where the strength was asked for.
    """

    fault: str
    strength: float
    spec: FaultSpec
    fit: tuple[float, ...] = ()

    def at(self, strength: float, card: FaultCard) -> PlannedFault:
        """Return the candidate at another strength."""
        if strength == self.strength:
            return self
        return replace(self, strength=strength, spec=replace(self.spec, params=card.values(strength)))


@dataclass(frozen=True)
class PlannedRun:
    """One replay.

    Attributes:
        id: Name of its folder: ``healthy-s<seed>`` or ``<fault>-x<strength>-s<seed>``.
        seed: Seed.
        planned: The candidate, None for a healthy replay.
        spec: What the engine gets.
    """

    id: str
    seed: int
    planned: PlannedFault | None
    spec: RunSpec

    @property
    def fault(self) -> str | None:
        """Fault id, None for a healthy replay."""
        return self.planned.fault if self.planned else None


@dataclass(frozen=True)
class Session:
    """The content of `session.json`.

    Attributes:
        name: Playbook name.
        symptom: Symptom id.
        engine: Engine name.
        source: Where the proxy comes from: checkpoint, sibling or embedded.
        checkpoint: The checkpoint as the playbook names it.
        build: How the proxy is cut; None: the checkpoint is used as it is (a sibling).
        recipe: The recipe of all replays.
        seeds: Seeds of the replays.
        candidates: Faults to replay, the likeliest first in a race.
        race: Whether candidates race: clear losers stop early. Without it every candidate gets every seed.
        not_tried: Candidates that were left out beforehand, with the reason.
        budget_s: Seconds for the replays, 0 for no limit. Candidates that don't fit are left out.
        workers: Worker processes.
        python: Interpreter of the workers, "" for the present one.
        engine_spec: The engine as workers take it.
        calibration: File of healthy seeds that the margins rest on, "" for whichever belongs to proxy and recipe.
        original_hash: Content hash of the model that made the incident's log, "" where no manifest says so.
        original_recipe: Hash of its recipe, likewise.
        onset: Step at which the fault became active in the original; None where scoring finds it.
        expect: `fault` and `verdict` that a CI job expects.
    """

    name: str
    symptom: str
    engine: str
    source: str
    checkpoint: str
    build: BuildSpec | None
    recipe: Recipe
    seeds: tuple[int, ...]
    candidates: tuple[PlannedFault, ...]
    not_tried: Mapping[str, str] = field(default_factory=dict)
    budget_s: float = 0.0
    workers: int = 2
    python: str = ""
    engine_spec: EngineSpec = field(default_factory=EngineSpec)
    calibration: str = ""
    original_hash: str = ""
    original_recipe: str = ""
    onset: int | None = None
    expect: Mapping[str, str] = field(default_factory=dict)
    race: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the session as JSON-able data."""
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Session:
        """Return the session that `to_json` wrote.

        Raises:
            RunError: It was written by a version with another schema.
        """
        if data.get("schema") != SCHEMA:
            raise RunError(
                f"session.json has schema {data.get('schema')!r}, this version reads {SCHEMA}",
                "resume it with the version that started it",
            )
        values = {key: value for key, value in data.items() if key != "schema"}
        build = values.pop("build")
        return Session(
            **values
            | {
                "build": build and BuildSpec(**build | {"alpha": tuple(build["alpha"])}),
                "recipe": Recipe(**values["recipe"]),
                "engine_spec": EngineSpec(**values.get("engine_spec", {})),
                "seeds": tuple(values["seeds"]),
                "candidates": tuple(
                    PlannedFault(c["fault"], c["strength"], FaultSpec(**c["spec"]), tuple(c.get("fit", ())))
                    for c in values["candidates"]
                ),
            }
        )


def load(folder: RunFolder) -> Session:
    """Return the session of a run folder. Raises RunError where there is none that this version reads."""
    data = read_json(folder.session)
    if not isinstance(data, dict):
        raise RunError(f"{folder.session} is missing or broken")
    return Session.from_json(data)


def fault_spec(card: FaultCard, strength: float, from_step: int = 1) -> FaultSpec:
    """Return a card's fault at a strength, as an engine receives it."""
    return FaultSpec(
        id=card.id,
        form=card.form.value,
        stage=card.stage.value,
        inject=card.inject,
        params=card.values(strength),
        from_step=from_step,
    )


def recipe_hash(recipe: Recipe) -> str:
    """Return the content hash of a recipe; the seed of the prompt order is no part of it."""
    return content_key({name: value for name, value in recipe.key().items() if name != "data_seed"})


def planned_run(session: Session, proxy: Path, planned: PlannedFault | None, seed: int) -> PlannedRun:
    """Return one replay; `planned` None for a healthy one.

    Args:
        session: The session.
        proxy: Folder of the built proxy.
        planned: The candidate at its strength.
        seed: Seed.
    """
    model = session.checkpoint if session.build is None else str(proxy)
    spec = RunSpec(model=model, recipe=session.recipe, seed=seed, engine=session.engine_spec)
    if planned is None:
        return PlannedRun(f"healthy-s{seed}", seed, None, spec)
    name = f"{planned.fault}-x{planned.strength:g}-s{seed}"
    return PlannedRun(name, seed, planned, replace(spec, fault=planned.spec))


def plan_runs(session: Session, proxy: Path) -> list[PlannedRun]:
    """Return the replays that are certain from the start, in the order in which they start.

    The healthy ones come first, because without them nothing can be scored. Then the candidates take turns:
    each gets its first seed before any gets its second, so that a budget cuts depth and not candidates. In a
    race the second seed has to be earned (`diagnose.race`).

    Args:
        session: The session.
        proxy: Folder of the built proxy.
    """
    runs = [planned_run(session, proxy, None, seed) for seed in session.seeds]
    seeds = session.seeds[:1] if session.race else session.seeds
    return runs + [
        planned_run(session, proxy, planned, seed) for seed in seeds for planned in session.candidates
    ]
