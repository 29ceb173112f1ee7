"""From a playbook to a session: logs imported, candidates and injection steps decided, everything checked.

`prepare` reads and decides, `open_run` writes the run folder. In between nothing has happened yet: that is what
`--dry-run` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from diagnose import located
from diagnose.calibrations import calibration_of_original
from diagnose.curves import Curves, median_between
from diagnose.errors import DiagnoseError, LogError, PlaybookError
from diagnose.logs import read, write_curves
from diagnose.own_verl import command_lines, own_verl, side_by_side
from diagnose.own_verl import refused as refused_by_verl
from diagnose.playbook import (
    AUTO,
    FIT,
    CandidateSpec,
    Playbook,
    find,
    load,
    needs_permission,
    resolve_candidates,
)
from diagnose.race import strengths
from diagnose.redact import redact
from diagnose.result import Direction
from diagnose.score.onset import Onset, incident_onset
from diagnose.score.settings import DEFAULT
from diagnose.score.verdict import symptoms as shown_symptoms
from diagnose.session import PlannedFault, Session, fault_spec, plan_runs, recipe_hash
from diagnose.store import RunFolder, create, read_json, write_json, write_text
from diagnose.triage.session import facts_of_context, impossible, symptoms_in
from proxy.embedded import NAMES, PREFIX, resolve
from proxy.engines.base import CAPABILITIES, refusal
from proxy.engines.verl_env import find_python
from proxy.errors import ProxyError
from proxy.plan import make_plan
from proxy.specs import EngineSpec, Recipe
from taxonomy.facts import Facts
from taxonomy.registry import FaultCard, library
from taxonomy.symptoms import SYMPTOM_BY_ID

ENGINES = tuple(CAPABILITIES)
"""Engines of this version."""
EMBEDDED_BUDGET_S = 120.0
"""Seconds for a race on an embedded checkpoint where nobody says otherwise: the first answer comes in two minutes."""
LOOK_ALIKES_OF = 3
"""Of so many of the likeliest candidates the look-alikes race too, whatever their symptoms: no answer is specific
without them."""


@dataclass(frozen=True)
class Overrides:
    """What the command line or the TUI says instead of the playbook; None leaves the playbook's word.

    Attributes:
        engine: Engine name.
        seeds: Number of seeds.
        steps: Training steps of a replay.
        workers: Worker processes.
        symptom: Symptom id.
        faults: Faults to replay; of the playbook's candidates only these.
        strengths: Strength by fault, in multiples of the card's default.
        budget_s: Seconds that the replays may take, 0 for no limit.
    """

    engine: str | None = None
    seeds: int | None = None
    steps: int | None = None
    workers: int | None = None
    symptom: str | None = None
    faults: tuple[str, ...] | None = None
    strengths: Mapping[str, float] | None = None
    budget_s: float | None = None


@dataclass(frozen=True)
class Prepared:
    """A session that could start.

    Attributes:
        path: The playbook file.
        playbook: What it says.
        session: The session; the proxy's place is filled in by `open_run`.
        faulty: The incident's curves.
        healthy: Those of its healthy twins.
        facts: What the playbook's context says of the run, as triage takes it.
        commands: What the playbook would execute, to be allowed first.
        warnings: Sentences about the logs and the choices made.
        scaling: What was scaled in the user's own verl command for the proxy, a line each.
    """

    path: Path
    playbook: Playbook
    session: Session
    faulty: tuple[Curves, ...]
    healthy: tuple[Curves, ...]
    facts: Facts
    commands: tuple[str, ...]
    warnings: tuple[str, ...]
    scaling: tuple[str, ...] = ()


def prepare(playbook: str | Path, overrides: Overrides | None = None) -> Prepared:
    """Read a playbook and the logs it names, and decide everything that a run needs.

    Args:
        playbook: A file, or the name of a shipped playbook.
        overrides: What to change.

    Raises:
        PlaybookError: The playbook is not there or not valid, or no candidate is left.
        LogError: A log is unusable.
        DiagnoseError: The engine is none of this version's, or cannot do what the playbook asks of it.
        NoVerl: The engine is verl and there is no environment with it.
        UnknownCheckpoint: The checkpoint is not there.
    """
    overrides = overrides or Overrides()
    path = find(playbook)
    book = load(path)
    engine = overrides.engine or book.engine.name
    if engine not in ENGINES:
        raise DiagnoseError(
            f"there is no engine {engine!r}: this version's engines are: {', '.join(ENGINES)}"
        )
    warnings: list[str] = []
    spec = _engine(book, engine)
    faulty = tuple(_last_run(file, warnings) for file in book.original.faulty)
    healthy = tuple(_last_run(file, warnings) for file in book.original.healthy)
    recipe = book.recipe.recipe()
    if overrides.steps:
        recipe = replace(recipe, steps=overrides.steps)
    checkpoint = book.proxy.checkpoint or PREFIX + NAMES[0]
    folder = resolve(checkpoint)
    if book.proxy.experts is not None:
        _check_budget(path, folder, book.proxy.experts)
    own = None
    if engine == "verl" and book.engine.own:
        own = own_verl(book.engine, spec, path.parent, folder, book.proxy.experts, recipe.steps)
        spec, recipe = own.spec, own.recipe
        warnings += [*own.warnings, *_replaced(book)]

    facts = facts_of_context(book.original.context)
    model, model_recipe = _papers((*book.original.faulty, *book.original.healthy))
    onset = incident_onset(faulty, healthy, calibration=calibration_of_original(model, model_recipe))
    inject, from_step = injection_step(onset, faulty, bool(healthy), recipe.steps)
    cards = library()
    symptom = overrides.symptom or book.symptom
    seen: tuple[str, ...] = (symptom,)
    if symptom == AUTO:
        triaged = symptoms_in(faulty, healthy, facts, cards)
        seen = tuple(dict.fromkeys((*triaged, *visible_symptoms(onset, faulty, healthy))))
        symptom = seen[0] if seen else AUTO
        warnings.append(f"symptoms in the log: {', '.join(seen) or 'none, so every fault is a candidate'}")
    chosen = book if overrides.symptom is None else book.model_copy(update={"symptom": overrides.symptom})
    wanted = resolve_candidates(chosen, cards, seen)
    race = book.candidates is None
    order = race_order(symptom, onset, faulty, healthy, facts) if race else None
    if overrides.faults is not None:
        wanted = _only(wanted, overrides.faults)
    elif order is not None:
        named = [c.fault for c in wanted]
        wanted = (*wanted, *_look_alikes(order([cards[fault] for fault in named])[:LOOK_ALIKES_OF], named))
    asked = overrides.strengths or {}
    wanted = tuple(
        c.model_copy(update={"strength": asked[c.fault]}) if c.fault in asked else c for c in wanted
    )
    refused = {c.fault: why for c in wanted if (why := refusal(engine, cards[c.fault]))}
    if race and overrides.faults is None:
        refused = impossible([c.fault for c in wanted], faulty, facts) | refused
    candidates = tuple(
        _planned(c, inject, fit=race and c.fault not in asked) for c in wanted if c.fault not in refused
    )
    if own is not None:
        refused |= refused_by_verl(spec, recipe, candidates)
        candidates = tuple(c for c in candidates if c.fault not in refused)
    if order is not None:
        likeliest = order([cards[c.fault] for c in candidates])
        candidates = tuple(sorted(candidates, key=lambda c: likeliest.index(c.fault)))
    if not candidates:
        why = f": {next(iter(refused.values()))}" if refused else f" for the symptom {symptom}"
        raise PlaybookError(f"{path}:1:1: no candidate is left{why}", "name candidates: diagnose faults")

    seeds = tuple(range(1, (overrides.seeds or book.recipe.seeds) + 1))
    session = Session(
        name=book.name,
        symptom=symptom,
        engine=engine,
        source=book.proxy.from_,
        checkpoint=checkpoint if checkpoint.startswith(PREFIX) else str(folder.absolute()),
        build=book.proxy.build_spec(folder.absolute(), Path()) if book.proxy.experts is not None else None,
        recipe=recipe,
        seeds=seeds,
        candidates=candidates,
        not_tried=refused,
        budget_s=_budget(book, engine, race, warnings) if overrides.budget_s is None else overrides.budget_s,
        workers=min(
            side_by_side(spec, book.engine.at_most, overrides.workers), (len(candidates) + 1) * len(seeds)
        ),
        python=book.engine.python if engine == "local" else "",
        engine_spec=spec,
        original_hash=model,
        original_recipe=model_recipe,
        onset=from_step,
        expect=book.expect.model_dump(exclude_none=True) if book.expect else {},
        race=race,
    )
    return Prepared(
        path,
        book,
        session,
        faulty,
        healthy,
        facts,
        tuple(needs_permission(book)),
        tuple(warnings),
        own.scaling if own else (),
    )


def _replaced(book: Playbook) -> list[str]:
    """Say which settings of the playbook's recipe the user's own command replaces."""
    named = sorted(book.recipe.model_fields_set - {"steps", "seeds"})
    return [f"the command's own settings apply, not recipe.{', recipe.'.join(named)}"] if named else []


def _engine(book: Playbook, name: str) -> EngineSpec:
    """Return the engine as workers take it; what can't work is told before anything is built."""
    spec = replace(book.engine.engine_spec(), name=name) if name != "local" else EngineSpec()
    if name != "verl":
        return spec
    if book.engine.own:
        return replace(spec, python=str(find_python(book.engine.python)))
    if book.recipe.exact:
        raise DiagnoseError("verl always has a rollout of its own: recipe.exact is for the local engine")
    if book.recipe.prompts % book.recipe.mini_batches:
        raise DiagnoseError("verl cuts a step by prompts: recipe.prompts must be a multiple of mini_batches")
    python = book.engine.python if book.engine.name == "verl" else ""
    return replace(spec, python=str(find_python(python)))


def _budget(book: Playbook, engine: str, race: bool, warnings: list[str]) -> float:
    """Return the seconds that replays may take. A budget is meant for the engine that the playbook names."""
    if book.budget is None:
        quick = race and engine == "local" and book.proxy.checkpoint.startswith(PREFIX)
        return EMBEDDED_BUDGET_S if quick else 0.0
    if engine != book.engine.name:
        warnings.append(
            f"the playbook's budget of {book.budget.seconds:g} s is for the engine {book.engine.name}: none applies"
        )
        return 0.0
    return book.budget.seconds


def _check_budget(path: Path, folder: Path, experts: int) -> None:
    """Refuse a budget that the checkpoint's headers already rule out, at its place in the playbook.

    Raises:
        PlaybookError: The budget does not fit the checkpoint, or there is no readable checkpoint.
    """
    try:
        make_plan(folder, experts)
    except ProxyError as error:
        place = located.parse(path.read_bytes()).place(("proxy", "experts"))
        raise PlaybookError(f"{path}:{place.line}:{place.col}: {error}", error.mend) from error


def open_run(prepared: Prepared, out: Path | None = None) -> RunFolder:
    """Make the run folder of a prepared session: curves, playbook copy, session.

    Raises:
        RunError: `out` is not empty.
        OSError: The disk is full or broken.
    """
    folder = create(prepared.session.name, out)
    for kind, group in (("faulty", prepared.faulty), ("healthy", prepared.healthy)):
        for index, curves in enumerate(group):
            write_curves(curves, folder.inputs / f"{kind}_{index}.jsonl")
    write_text(folder.playbook, redact(prepared.path.read_text(encoding="utf-8")))
    session = prepared.session
    if session.build is not None:
        session = replace(session, build=replace(session.build, out=str(folder.proxy)))
    write_json(folder.session, session.to_json())  # last: a folder with a session is complete
    return folder


def injection_step(
    onset: Onset | None, faulty: Sequence[Curves], twin: bool, steps: int
) -> tuple[int, int | None]:
    """Decide where replays are injected, for candidates that don't say.

    A fault that struck in the middle of a run is replayed in the middle, where the log shows a sharp onset and the
    replay goes far enough. Without a twin the replay needs a past to be measured against, as the original does;
    where the onset lies beyond the replay's horizon, its past is as long as can be afforded.

    Args:
        onset: The incident's onset, None where it has none.
        faulty: The incident's curves.
        twin: Whether there is a healthy twin.
        steps: Steps of a replay.

    Returns:
        The first faulty step of replays, and the first of the original where that is another one.
    """
    horizon = DEFAULT.min_blocks * DEFAULT.points_a_block
    if onset is None:
        return 1, None
    first = int(min(run.steps_N[0] for run in faulty))
    fits = onset.high <= steps - horizon
    if twin:  # the middle of the interval: nothing is measured against the steps before
        return ((onset.low + onset.high + 1) // 2, None) if onset.sharp and fits else (1, None)
    if onset.low - first < DEFAULT.min_baseline:
        return 1, None
    if fits:
        return onset.low, None
    past = min(max(DEFAULT.min_baseline + 1, steps // 3), max(steps - horizon, 1))
    return past, onset.low


def visible_symptoms(
    onset: Onset | None, faulty: Sequence[Curves], healthy: Sequence[Curves]
) -> tuple[str, ...]:
    """Return the ids of the symptoms that the logs show: metrics that moved, by the way they went since the onset.

    Against the healthy twins over the same steps, or against the log's own past where there are none.
    """
    changes = movements(onset, faulty, healthy)
    return shown_symptoms(tuple(changes), list(changes.values()))


def movements(
    onset: Onset | None, faulty: Sequence[Curves], healthy: Sequence[Curves]
) -> dict[str, Direction]:
    """Return which way the metrics went that moved since the onset, against twins or the log's own past."""
    found = {}
    for name in onset.metrics if onset is not None else ():
        assert onset is not None
        after = median_between(faulty, name, onset.low)
        before = (
            median_between(healthy, name, onset.low)
            if healthy
            else median_between(faulty, name, 0, onset.low)
        )
        change = after - before
        found[name] = (
            Direction.UNDETERMINED
            if np.isnan(change) or change == 0
            else Direction.UP
            if change > 0
            else Direction.DOWN
        )
    return found


def race_order(
    symptom: str,
    onset: Onset | None,
    faulty: Sequence[Curves],
    healthy: Sequence[Curves],
    facts: Facts,
) -> Callable[[Sequence[FaultCard]], list[str]]:
    """Return what puts cards into the order in which their faults are to race, as ids: by the sum of two ranks.

    One is the triage's, whose rules come from incidents on many systems, the other (`prior`) asks only how far the
    log meets the card. On recorded incidents of the embedded model the sum does better than either.
    """
    from diagnose.triage import rank_faults

    triage = [item.fault for item in rank_faults(faulty, healthy, facts)]
    changes = movements(onset, faulty, healthy)

    def likeliest_first(cards: Sequence[FaultCard]) -> list[str]:
        fit = [
            card.id for card in sorted(cards, key=lambda c: prior(c, symptom, changes, faulty), reverse=True)
        ]
        return sorted(fit, key=lambda fault: (fit.index(fault) + triage.index(fault), fit.index(fault)))

    return likeliest_first


def prior(
    card: FaultCard, symptom: str, changes: Mapping[str, Direction], faulty: Sequence[Curves]
) -> tuple[float, bool]:
    """Return how likely a card makes its fault before anything is run; larger is likelier.

    First the share of the card's expectations, by weight, that the log meets (a movement that is not there counts
    half against it, one the other way fully); then whether its category is the one that the symptom points at.
    """
    logged = {name for run in faulty for name in run.metrics}
    total = met = 0.0
    for item in card.signature:
        if item.metric not in logged or item.direction == "none":
            continue
        total += item.weight
        change = changes.get(item.metric, Direction.UNDETERMINED).value
        if change in ("up", "down"):
            met += item.weight if change == item.direction else -item.weight
        else:
            met -= item.weight / 2
    known = SYMPTOM_BY_ID.get(symptom)
    return met / total if total else 0.0, known is not None and known.category == card.category


def _last_run(path: Path, warnings: list[str]) -> Curves:
    """Return the curves of a log; of several runs in it the last, with a warning."""
    try:
        log = read(path)
    except LogError as error:
        mend = error.mend or f"diagnose logs {path} shows what is in it"
        raise LogError(str(error), mend if path.exists() else "correct its path", error.names) from error
    if len(log.runs) > 1:
        warnings.append(f"{log.source} holds {len(log.runs)} runs; the last one is taken")
    return log.runs[-1].curves


def _look_alikes(likeliest: Sequence[str], wanted: Sequence[str]) -> tuple[CandidateSpec, ...]:
    """Return candidates for the look-alikes that some faults' cards name, as far as they are not wanted already."""
    cards = library()
    named = dict.fromkeys(rival.fault for fault in likeliest for rival in cards[fault].rivals)
    return tuple(
        CandidateSpec.model_construct(fault=fault)
        for fault in named
        if fault not in wanted and fault in cards.cards
    )


def _only(wanted: Sequence[CandidateSpec], faults: Sequence[str]) -> tuple[CandidateSpec, ...]:
    """Return the candidates for some faults: as the playbook has them, by default values where it doesn't."""
    cards = library()
    found: list[CandidateSpec] = []
    for fault in faults:
        own = [candidate for candidate in wanted if candidate.fault == fault]
        found += own or [CandidateSpec.model_construct(fault=cards[fault].id)]
    return tuple(found)


def _planned(candidate: CandidateSpec, inject: int, *, fit: bool) -> PlannedFault:
    """Resolve a candidate; `fit` where nobody asked for a strength."""
    card = library()[candidate.fault]
    fit = fit or candidate.strength == FIT
    strength = 1.0 if fit else candidate.strength
    spec = fault_spec(card, strength, candidate.from_step or inject)
    spec = replace(spec, until_step=candidate.until_step, probability=candidate.probability)
    return PlannedFault(candidate.fault, strength, spec, strengths(card) if fit else ())


def _papers(logs: Sequence[Path]) -> tuple[str, str]:
    """Return model and recipe hash from a manifest beside a log that `diagnose record` made, else two blanks.

    The manifest of a healthy twin will do: a twin is the same model under the same recipe. Logs of another
    engine have none: its healthy runs vary in a way of their own.
    """
    for log in logs:
        manifest = read_json(log.with_suffix(".manifest.json"))
        try:
            if manifest.get("engine", "local") != "local":  # type: ignore[union-attr]
                continue
            return str(manifest["model_hash"]), recipe_hash(Recipe(**manifest["recipe"]))  # type: ignore[index]
        except (AttributeError, KeyError, TypeError):  # no mapping, or one of somebody else
            continue
    return "", ""


RUN_DIR = Path("RUN_DIR")
"""Stands in printed command lines for the run folder where none is named."""


def plan_data(prepared: Prepared, out: Path | None = None) -> dict[str, Any]:
    """Return what a run would do, as data for ``--dry-run --json``.

    Args:
        prepared: The session that could start.
        out: The run folder that is asked for.
    """
    session = prepared.session
    home = out.absolute() if out else RUN_DIR
    model = home / "proxy" if session.build else resolve(session.checkpoint).absolute()
    runs = plan_runs(session, model)
    verl = {}
    if session.engine == "verl":
        verl = {
            "scaling": list(prepared.scaling),
            "command_lines": command_lines(runs, home / "runs", model),
        }
    return {
        "schema": 1,
        "name": session.name,
        "symptom": session.symptom,
        "engine": session.engine,
        "proxy": {"source": session.source, "checkpoint": session.checkpoint}
        | ({"experts": session.build.experts, "strategy": session.build.strategy} if session.build else {}),
        "recipe": asdict(session.recipe),
        "seeds": list(session.seeds),
        "workers": session.workers,
        "budget_s": session.budget_s or None,
        "race": session.race,
        "candidates": [
            {
                "fault": c.fault,
                "strength": c.strength,
                "from_step": c.spec.from_step,
                "params": c.spec.params,
                "fit": list(c.fit),
            }
            for c in session.candidates
        ],
        "runs": [run.id for run in runs],
        "not_tried": dict(session.not_tried),
        "commands": list(prepared.commands),
        "warnings": list(prepared.warnings),
        **verl,
    }
