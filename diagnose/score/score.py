"""Score an incident: curves in, verdict and ranking out. Pure; nothing is read, written or printed.

The way of the data: `plan` lays the clocks → `align` cuts blocks → `effect` measures against healthy runs → `noise`
says how much is chance → `direction` and `shape` describe each metric → `distance` ranks → `specificity` doubts the
ranking → `verdict` answers.

Legend of shape suffixes: ``_M`` metrics, ``_B`` blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from diagnose.curves import Array, Curves
from diagnose.result import AnomalyType, Candidate, Score, Verdict
from diagnose.score.align import (
    Clock,
    Contrast,
    Frame,
    first_update,
    frame,
    last_step,
    panel,
    ranking_metrics,
    resolutions,
)
from diagnose.score.calibration import Calibration
from diagnose.score.direction import Reading
from diagnose.score.distance import Signature, size, space, units
from diagnose.score.error_rates import error_rates
from diagnose.score.experiment import Experiment, by_level, look
from diagnose.score.gate import Gate, healthy_gate
from diagnose.score.noise import Floors, Margin, Source
from diagnose.score.onset import Onset, find_onset
from diagnose.score.pairs import find_pair, together
from diagnose.score.plan import Plan, Replay, plan, starts
from diagnose.score.ranking import Case, rank, unscored
from diagnose.score.settings import DEFAULT, Settings
from diagnose.score.shape import spike_limit
from diagnose.score.system import Healthy, System, borrowing_system, floors, system
from diagnose.score.verdict import MOVED, incident_verdict, symptoms, titles
from taxonomy.registry import Library

__all__ = ["Replay", "score"]

MOVED_TOLD = 6
"""Metrics that are named as moved, in the order of `taxonomy.metrics`; every one is in the table."""
FAR = 1000
"""Noise units from which an effect is only said to be larger: a metric that hardly varies gives any number."""


def score(
    original_faulty: Sequence[Curves],
    original_healthy: Sequence[Curves],
    proxy_healthy: Sequence[Curves],
    replays: Sequence[Replay],
    library: Library,
    *,
    calibration: Calibration | None = None,
    from_step: int | None = None,
    stand_in: bool = False,
    unreached: Sequence[str] = (),
    settings: Settings = DEFAULT,
) -> Score:
    """Score an incident against replays of candidate faults.

    Args:
        original_faulty: Logs of the incident, one a seed.
        original_healthy: Healthy logs of the original; empty where there is no twin. Seeds need not be paired.
        proxy_healthy: Healthy runs of the proxy; may be empty with a calibration.
        replays: Candidate faults as replayed. Of several strengths of one fault the nearest is ranked.
        library: Fault cards; their weights shape verdicts, never the ranking.
        calibration: Healthy seeds on file, already checked against model and recipe.
        from_step: Step at which the fault became active in the original; None where it isn't known.
        stand_in: Whether the proxy was not built from the failing model's checkpoint.
        unreached: Candidates that were to be replayed and were not; while there are any, no answer is specific.
        settings: Thresholds.

    Returns:
        The verdict with its reasons and the ranking, best first; candidates that could not be scored come last.
    """
    given = gather(
        original_faulty,
        original_healthy,
        proxy_healthy,
        replays,
        library,
        calibration=calibration,
        stand_in=stand_in,
        unreached=unreached,
        settings=settings,
    )
    if not given.other.runs or not ranking_metrics(given.logs):
        missing = "The incident's log has no metric that could be compared."
        missing = missing if given.other.runs else "There is no healthy proxy run to measure replays against."
        return Score(Verdict.INCONCLUSIVE, (missing,), unscored(replays, library))
    outcomes = [_score_from(start, given) for start in _starts(given, from_step)]
    # Two possible activations are two hypotheses about the log; the one that any candidate explains better stands.
    return max(outcomes, key=lambda outcome: outcome[1])[0]


def lay(given: Given, from_step: int | None = None) -> tuple[Laid, ...]:
    """Return the incident and its replays on each clock that it may have; empty where nothing can be compared."""
    if not given.other.runs or not ranking_metrics(given.logs):
        return ()
    return tuple(_lay(start, given) for start in _starts(given, from_step))


def _starts(given: Given, from_step: int | None) -> tuple[int, ...]:
    return starts(given.logs, given.replays, given.onset, from_step, twin=bool(given.own.runs))


def gather(
    original_faulty: Sequence[Curves],
    original_healthy: Sequence[Curves],
    proxy_healthy: Sequence[Curves],
    replays: Sequence[Replay],
    library: Library,
    *,
    calibration: Calibration | None = None,
    stand_in: bool = False,
    unreached: Sequence[str] = (),
    settings: Settings = DEFAULT,
) -> Given:
    """Return what is known before a clock is chosen; arguments as in `score`."""
    logs = [run for run in original_faulty if len(run.steps_N)]
    own = Healthy.of(original_healthy, calibration.original if calibration else None, settings)
    other = Healthy.of(proxy_healthy, calibration.proxy if calibration else None, settings)
    replays = sorted(replays, key=lambda replay: (replay.fault, replay.severity))
    groups = (logs, own.runs, other.runs, *(replay.runs for replay in replays))
    usable = bool(other.runs and ranking_metrics(logs))
    return Given(
        logs,
        own,
        other,
        replays,
        library,
        ranking_metrics(*groups),
        resolutions(*groups),
        find_onset(logs, own, other, settings) if usable else None,
        stand_in,
        tuple(unreached),
        settings,
    )


@dataclass(frozen=True)
class Given:
    """What is known before a clock is chosen."""

    logs: Sequence[Curves]
    own: Healthy
    other: Healthy
    replays: Sequence[Replay]
    library: Library
    metrics: tuple[str, ...]
    digits: Mapping[str, float]
    onset: Onset | None
    stand_in: bool
    unreached: tuple[str, ...]
    settings: Settings


@dataclass(frozen=True)
class Laid:
    """One incident and its replays on one clock, looked at but not yet ranked.

    Attributes:
        plan: The clocks.
        case: What the candidates share.
        seen: What each scorable replay showed, by index of the replay.
        margin: The original's margin.
        gate: Whether the healthy proxy follows the healthy original.
    """

    plan: Plan
    case: Case
    seen: Mapping[int, Experiment]
    margin: Margin
    gate: Gate


def _lay(start: int, given: Given) -> Laid:
    """Put everything on the clock that starts at `start`, and look."""
    logs, own, other, settings = given.logs, given.own, given.other, given.settings
    logged = ranking_metrics(logs)
    laid = plan(logs, own.runs, other.runs, given.replays, start, settings)
    cut = frame(given.metrics, laid.contrast, given.digits, settings)
    home, proxies, floor = _systems(laid, cut, given)
    lender = proxies[min(proxies)]
    unit_O, unit_P = _shared_units(home, proxies, floor, cut)
    margin_O = home.margin(len(logged), settings)
    limits_P = {step: spike_limit(item.runs, item.runs_clock, cut) for step, item in proxies.items()}
    limits_O = spike_limit(home.runs, home.runs_clock, cut)
    original = look(logs, home, margin_O, floor, unit_O, limits_O, cut)
    if laid.contrast is Contrast.START:
        original = by_level(original, logs, cut)
    seen = {
        i: look(
            replay.runs,
            proxies[replay.from_step],
            proxies[replay.from_step].margin(len(logged), settings),
            floor,
            unit_P[replay.from_step],
            limits_P[replay.from_step],
            cut,
        )
        for i, replay in enumerate(given.replays)
        if replay.scorable
    }
    gate = _gate(own, other, cut)
    proxy_has_M = np.asarray(np.isfinite(lender.reference.x_RMB).any((0, 2)))
    where = space(original.signature, proxy_has_M, cut.metrics, settings)
    margin_P = lender.margin(len(logged), settings)
    case = Case(
        frame=cut,
        original=original,
        home=home,
        proxy=lender,
        where=where,
        size=size(original.signature, where, settings),
        settled=_settled(original.reading, laid, margin_O, gate, given.onset),
        evidence=_evidence(laid, (margin_O, margin_P), given.stand_in),
        available=tuple(
            name for name, has in zip(cut.metrics, proxy_has_M, strict=True) if has and name in logged
        ),
        library=given.library,
        stand_in=given.stand_in,
        unreached=given.unreached,
    )
    return Laid(laid, case, seen, margin_O, gate)


def _score_from(start: int, given: Given) -> tuple[Score, float]:
    """Score with the original's clock starting at `start`.

    Returns:
        The score, and the share that the best candidate explains; −∞ where that clock leaves too little to judge.
    """
    everything = _lay(start, given)
    laid, case, margin_O, settings = everything.plan, everything.case, everything.margin, given.settings
    home, pair = case.home, None
    ranking, explained = rank(given.replays, everything.seen, case)
    reasons: tuple[str, ...]
    if case.settled is not None:
        verdict, reasons = case.settled[0], (case.settled[1],)
    else:
        verdict, reasons = incident_verdict(ranking, explained, settings)
        pair = find_pair(
            ranking[: len(explained)], _signatures(ranking, given.replays, everything.seen), case
        )
        if pair is not None:
            verdict, reasons, ranking = together(pair, verdict, ranking)
    rates = error_rates(home.scale.source, home.scale.seeds)
    best = max(explained.values(), default=0.0) if pair is None else pair.explained
    found = Score(
        verdict=verdict,
        reasons=(*reasons, *_account(case, laid, margin_O, given.onset)),
        ranking=ranking,
        symptoms=symptoms(case.frame.metrics, case.original.reading.direction),
        healthy_gate=everything.gate.text,
        error_rates={"smallest p": margin_O.smallest_p, **rates},
        together=pair.faults if pair is not None else (),
    )
    return found, best if laid.enough else -np.inf


def _signatures(
    ranking: Sequence[Candidate], replays: Sequence[Replay], seen: Mapping[int, Experiment]
) -> dict[str, Signature]:
    """Return the signature of every scored candidate at the strength that was ranked, by fault."""
    ranked = {(item.fault, item.severity) for item in ranking if np.isfinite(item.distance)}
    return {
        replays[i].fault: item.signature
        for i, item in seen.items()
        if (replays[i].fault, replays[i].severity) in ranked
    }


def _systems(laid: Plan, cut: Frame, given: Given) -> tuple[System, dict[int, System], Floors]:
    """Return the original's system, the proxy's by injection step, and the floors.

    Two passes, because the floors of shared metrics need the noise of both systems, and the margins the floors.
    """
    settings = given.settings
    proxies = {step: system(given.other, clock, cut) for step, clock in laid.proxy.items()}
    lender = proxies[min(proxies)]
    past_only = laid.contrast is Contrast.PAST
    home = borrowing_system(
        given.own, laid.original, cut, lender, given.other.seeds, given.logs, past_only=past_only
    )
    floor = floors(cut, [home.scale, *(item.scale for item in proxies.values())], given.digits)
    proxies = {step: item.with_maxima(floor, settings) for step, item in proxies.items()}
    lender = proxies[min(proxies)]
    if home.scale.source is Source.STAND_IN:
        home = replace(home, scale=replace(home.scale, maxima_K=lender.scale.maxima_K))
    else:
        home = home.with_maxima(floor, settings)
    return home, proxies, floor


def _shared_units(
    home: System, proxies: Mapping[int, System], floor: Floors, cut: Frame
) -> tuple[Array, dict[int, Array]]:
    """Return noise units of both systems; metrics in absolute units have the larger of all for everybody."""
    unit_O = units(home.scale, floor, cut.settings)
    unit_P = {step: units(item.scale, floor, cut.settings) for step, item in proxies.items()}
    shared_MB = np.maximum.reduce([unit_O, *unit_P.values()])
    absolute = cut.absolute_M[:, None]
    return (
        np.where(absolute, shared_MB, unit_O),
        {step: np.where(absolute, shared_MB, unit) for step, unit in unit_P.items()},
    )


def _gate(own: Healthy, other: Healthy, cut: Frame) -> Gate:
    """Compare the healthy runs of both systems from their first updates on."""
    whole = replace(cut, contrast=Contrast.TWIN)
    first_P, first_O = first_update(other.runs), first_update(own.runs) if own.runs else 0
    horizon = last_step(other.runs) - first_P + 1
    if own.runs:
        horizon = min(horizon, last_step(own.runs) - first_O + 1)
    blocks = cut.settings.max_blocks
    clock_P = Clock(first_P, max(horizon, 1), blocks)
    proxy = system(other, clock_P, whole)
    original = None
    if own.runs:
        clock_O = Clock(first_O, max(horizon, 1), blocks)
        home = borrowing_system(own, clock_O, whole, proxy, other.seeds, (), past_only=False)
        original = (panel(own.runs, clock_O, whole), home.scale)
    return healthy_gate(cut.metrics, original, (proxy.reference, proxy.scale), cut.settings)


def _blocked(laid: Plan) -> str:
    """Return why the plan allows no verdict, "" where it does."""
    return "" if laid.enough and laid.contrast is not Contrast.START else laid.limits[-1]


def _evidence(laid: Plan, margins: tuple[Margin, Margin], stand_in: bool) -> str:
    """Return the evidence class."""
    if stand_in:
        return "stand-in"
    weak = laid.contrast is not Contrast.TWIN or any(margin.weak for margin in margins)
    return "weak" if weak else "strong"


def _settled(
    reading: Reading, laid: Plan, margin: Margin, gate: Gate, onset: Onset | None
) -> tuple[Verdict, str] | None:
    """Return the verdict and its reason where they do not depend on the candidates, else None."""
    if _blocked(laid):
        return Verdict.INCONCLUSIVE, _blocked(laid)
    if reading.largest > margin.fault or (reading.effect.event_MB > 0).any():
        return None if gate.passed else (Verdict.INCONCLUSIVE, gate.text)
    said = f"the largest effect is {reading.largest:.1f} noise units, the margin {margin.fault:.1f}"
    later = _later(laid, onset)
    if later:
        return Verdict.INCONCLUSIVE, (
            f"Within the {laid.original.horizon} updates that were replayed nothing leaves its margin, but later "
            f"{titles(later)} does: replay more steps."
        )
    if laid.contrast is not Contrast.TWIN:
        return Verdict.INCONCLUSIVE, f"Nothing changes against the log's own past: {said}."
    if margin.weak and reading.largest > margin.c:
        return (
            Verdict.INCONCLUSIVE,
            f"Something may have moved, but the noise is not known well enough to say: {said}.",
        )
    return Verdict.NO_FAULT, f"The log does not differ from healthy ones: {said}."


def _account(case: Case, laid: Plan, margin: Margin, onset: Onset | None) -> tuple[str, ...]:
    """Return the sentences that every verdict carries: what moved, against what noise, and what was not seen."""
    reading, metrics = case.original.reading, case.frame.metrics
    words = [
        f"{titles([name])} {direction}"
        for name, direction in zip(metrics, reading.direction, strict=True)
        if direction in MOVED
    ]
    bad = [
        name for name, kind in zip(metrics, case.original.types, strict=True) if kind is AnomalyType.NONFINITE
    ]
    spiky = [
        name for name, kind in zip(metrics, case.original.types, strict=True) if kind is AnomalyType.SPIKE
    ]
    maxima_K = case.home.scale.maxima_K
    said = []
    if case.stand_in:
        said.append(
            "The proxy is a stand-in, not cut from the failing model: the ranking is a lead, and no answer from it "
            "is ever specific."
        )
    if words:
        more = f" and {len(words) - MOVED_TOLD} more" if len(words) > MOVED_TOLD else ""
        far = f"{reading.largest:.1f}" if reading.largest < FAR else f"over {FAR:,}"
        said.append(
            f"The original moved: {', '.join(words[:MOVED_TOLD])}{more} (largest {far} noise units, "
            f"margin {margin.fault:.1f})."
        )
    if bad:
        said.append(f"Non-finite values in the original: {titles(bad)}.")
    if spiky:
        said.append(f"Single steps of {titles(spiky)} stand out in the original; medians don't show them.")
    source = {
        Source.CALIBRATED: f"from {case.home.scale.seeds} healthy seeds of the original",
        Source.OWN_SEEDS: f"from only {case.home.scale.seeds} healthy seeds of the original (t quantile)",
        Source.STAND_IN: f"borrowed from {case.home.scale.seeds} healthy seeds of the proxy and widened",
        Source.WITHIN_RUN: "from within single runs, widened",
    }[case.home.scale.source]
    p = (
        f"; p = {(1 + int((maxima_K >= reading.largest).sum())) / (len(maxima_K) + 1):.3f}, "
        f"smallest possible {margin.smallest_p:.3f}"
        if len(maxima_K)
        else "; too few seeds for a p"
    )
    said.append(f"Noise of the original {source}{p}.")
    said += [limit for limit in laid.limits if limit != _blocked(laid)]
    later = [
        name for name in _later(laid, onset) if name in metrics and not reading.moved_M[metrics.index(name)]
    ]
    if later and (case.settled is None or case.settled[0] is not Verdict.NO_FAULT):
        said.append(
            f"Only after the {laid.original.horizon} updates compared, and not judged: {titles(later)}."
        )
    return tuple(said)


def _later(laid: Plan, onset: Onset | None) -> list[str]:
    """Return the metrics that start to move only beyond the updates that were compared."""
    end = laid.original.start + laid.original.horizon - 1
    return [name for name, (low, _) in onset.metrics.items() if low > end] if onset is not None else []
