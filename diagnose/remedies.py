"""Remedies (`--try-fix`): does the fault's effect on the proxy vanish when a remedy is added?

The first candidate is replayed again, with the fault and with one of the remedies that its card names. The fault's
own replays are then the incident, measured against the healthy proxy with the healthy noise, and what is left of
their effect is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from diagnose.curves import Curves
from diagnose.probes import finished
from diagnose.result import RemedyResult, Score
from diagnose.score.calibration import Calibration
from diagnose.score.distance import size
from diagnose.score.plan import Replay
from diagnose.score.score import gather, lay
from diagnose.score.verdict import MOVED
from diagnose.session import PlannedFault, PlannedRun, Session, planned_run
from diagnose.store import RunFolder
from taxonomy.registry import Library
from taxonomy.remedies import Remedy, offered

VANISHED, MOSTLY, PARTLY = 0.9, 0.7, 0.3
"""Shares of the squared effect that must be gone for each word; within `PARTLY` of nothing it does not help."""


def patient(session: Session, score: Score, cards: Library) -> PlannedFault | None:
    """Return the first candidate at the strength that fits it best, None where none was scored."""
    first = next(iter(score.ranking), None)
    if first is None or first.distance != first.distance:
        return None
    own = [item for item in session.candidates if item.fault == first.fault]
    exact = [item for item in own if item.strength == first.severity]
    return (exact or own)[0].at(first.severity, cards[first.fault])


def remedies(session: Session, planned: PlannedFault, cards: Library) -> list[Remedy]:
    """Return the remedies of a fault's card, and on verl verl's own, that change anything in recipe or engine."""
    recipe, engine = asdict(session.recipe), asdict(session.engine_spec)
    return [
        item
        for item in offered(cards[planned.fault].remedies, session.engine)
        if any(recipe[k] != v for k, v in item.overrides(recipe).items())
        or any(engine[k] != v for k, v in item.engine.items())
        or item.hydra
    ]


def plan(session: Session, folder: RunFolder, score: Score, cards: Library) -> list[PlannedRun]:
    """Return the runs that the first candidate's remedies need."""
    planned = patient(session, score, cards)
    if planned is None:
        return []
    return [
        fixed_run(session, folder, planned, item, seed)
        for item in remedies(session, planned, cards)
        if not item.needs
        for seed in session.seeds
    ]


def fixed_run(
    session: Session, folder: RunFolder, planned: PlannedFault, remedy: Remedy, seed: int
) -> PlannedRun:
    """Return one replay of fault and remedy together."""
    recipe = replace(session.recipe, **remedy.overrides(asdict(session.recipe)))
    own, changes = session.engine_spec, dict[str, Any](remedy.engine)
    lines = [f"{name}={value}" for name, value in remedy.hydra.items()]
    engine = replace(own, **changes, hydra=(*own.hydra, *lines))
    run = planned_run(replace(session, recipe=recipe, engine_spec=engine), folder.proxy, planned, seed)
    return replace(run, id=f"fix.{remedy.id}.{run.id}")


def results(
    session: Session,
    folder: RunFolder,
    score: Score,
    healthy: Sequence[Curves],
    calibration: Calibration | None,
    cards: Library,
) -> tuple[RemedyResult, ...]:
    """Return what became of the first candidate's effect, the most helpful remedy first.

    Args:
        session: The session.
        folder: Its folder.
        score: The verdict.
        healthy: Healthy replays.
        calibration: Healthy seeds of the proxy, None without any.
        cards: Fault cards.
    """
    planned = patient(session, score, cards)
    if planned is None:
        return ()
    ill = [
        curves
        for seed in session.seeds
        if (curves := finished(folder.runs / planned_run(session, folder.proxy, planned, seed).id))
        is not None
    ]
    found = []
    for item in remedies(session, planned, cards):
        if item.needs:
            if any(folder.extra.glob("fix.*")):  # remedies were asked for: say why this one has no run
                named = untried(planned, item, asdict(session.recipe))
                found.append(replace(named, outcome=f"needs {item.needs}"))
            continue
        homes = [folder.extra / fixed_run(session, folder, planned, item, seed).id for seed in session.seeds]
        if not any((home / "outcome.json").exists() for home in homes):
            continue
        fixed = [curves for home in homes if (curves := finished(home)) is not None]
        found.append(judge(planned, item, asdict(session.recipe), ill, fixed, healthy, calibration, cards))
    return tuple(sorted(found, key=lambda r: -r.gone if r.gone == r.gone else 1e9))


def untried(planned: PlannedFault, remedy: Remedy, recipe: dict[str, object]) -> RemedyResult:
    """Return the result of a remedy of which there is no run."""
    settings = {**remedy.overrides(recipe), **remedy.engine, **remedy.hydra}
    return RemedyResult(planned.fault, remedy.id, remedy.what, settings, float("nan"), (), "could not be run")


def judge(
    planned: PlannedFault,
    remedy: Remedy,
    recipe: dict[str, object],
    ill: Sequence[Curves],
    fixed: Sequence[Curves],
    healthy: Sequence[Curves],
    calibration: Calibration | None,
    cards: Library,
) -> RemedyResult:
    """Return what became of an effect: the share of ‖q‖² that is gone, and which metrics still leave their margin."""
    empty = untried(planned, remedy, recipe)
    if not ill or not fixed:
        return empty
    own = replace(calibration, original=calibration.proxy) if calibration is not None else None
    replay = Replay(planned.fault, fixed, from_step=planned.spec.from_step)
    found = lay(gather(ill, healthy, healthy, [replay], cards, calibration=own), planned.spec.from_step)
    if not found or 0 not in found[0].seen:
        return empty
    case, after = found[0].case, found[0].seen[0]
    before = size(case.original.signature, case.where, case.frame.settings)
    rest = size(after.signature, case.where, case.frame.settings)
    gone = 1 - (rest / before) ** 2 if before > 0 else float("nan")
    left = tuple(
        name for name, way in zip(case.frame.metrics, after.reading.direction, strict=True) if way in MOVED
    )
    return replace(empty, gone=gone, left=left, outcome=outcome(gone, bool(left)))


def outcome(gone: float, left: bool) -> str:
    """Return in words what a remedy did."""
    if gone >= VANISHED and not left:
        return "vanishes"
    if gone >= MOSTLY:
        return "mostly gone"
    if gone >= PARTLY:
        return "partly gone"
    return "does not help" if gone > -PARTLY else "makes it worse"
