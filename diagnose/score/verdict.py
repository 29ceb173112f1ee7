"""Verdicts: from directions, trends, types and distances to one word, with the reasons in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diagnose.result import AnomalyType, Candidate, Direction, MetricResult, Verdict
from diagnose.score.settings import Settings
from diagnose.score.shape import type_agreement
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.registry import FaultCard
from taxonomy.symptoms import SYMPTOMS

MOVED = (Direction.UP, Direction.DOWN)


@dataclass(frozen=True)
class Evidence:
    """What is known of one candidate when its verdict is due.

    Attributes:
        results: By metric.
        against: Metrics that contradict, with how (`experiment.contradictions`).
        excluded: Exact metrics that deny it, with how (`experiment.exclusions`).
        shadows: Candidates that exact metrics deny and that are not shown to be farther otherwise, with these metrics.
        primary: The card's primary metrics.
        explained: 1 − d²/‖q_O‖².
        coverage: Share of the card's metrics that could be compared.
        rivals: Candidates that can't be told apart from this one.
        untried: Look-alikes that its card names and that were not replayed.
        unreached: Candidates that were to be replayed and were not.
        gap: Gap to the nearest rival with its interval, None without a rival.
        alone: Whether nothing else was replayed.
        nearest: Whether it ranks first.
        stand_in: Whether the proxy was not built from the failing model's checkpoint.
    """

    results: Mapping[str, MetricResult]
    against: Mapping[str, str]
    excluded: Mapping[str, str]
    shadows: Mapping[str, tuple[str, ...]]
    primary: tuple[str, ...]
    explained: float
    coverage: float
    rivals: tuple[str, ...]
    untried: tuple[str, ...]
    unreached: tuple[str, ...]
    gap: tuple[float, float, float] | None
    alone: bool
    nearest: bool
    stand_in: bool


def _moved(direction: Direction, kind: AnomalyType) -> bool:
    return direction in MOVED or kind is AnomalyType.NONFINITE


def metric_agreement(result: MetricResult) -> float:
    """Return 1 where the proxy moved as the original did, −1 where it moved the other way, 0 otherwise."""
    if result.type_original is AnomalyType.NONFINITE:
        return float(result.type_proxy is AnomalyType.NONFINITE)
    if result.proxy not in MOVED:
        return 0.0
    return 1.0 if result.proxy is result.original else -1.0


def compared(results: Mapping[str, MetricResult]) -> dict[str, MetricResult]:
    """Return the metrics that moved in the original and that the proxy has."""
    return {
        name: result
        for name, result in results.items()
        if _moved(result.original, result.type_original)
        and (np.isfinite(result.effect_proxy) or result.type_proxy is AnomalyType.NONFINITE)
    }


def weighted(results: Mapping[str, MetricResult], value: Mapping[str, float]) -> float:
    """Return the weighted mean of a value by metric; 0 without any."""
    total = sum(results[name].weight for name in value)
    return sum(results[name].weight * value[name] for name in value) / total if total else 0.0


def agreement(results: Mapping[str, MetricResult]) -> float:
    """Return the weighted agreement in direction over the metrics that moved in the original, in [−1, 1]."""
    return weighted(results, {name: metric_agreement(item) for name, item in compared(results).items()})


def coverage(card: FaultCard | None, available: Sequence[str]) -> float:
    """Return the weighted share of the card's metrics that both systems have; 1 for a card without any."""
    expected = card.signature if card is not None else ()
    total = sum(item.weight for item in expected)
    return sum(item.weight for item in expected if item.metric in available) / total if total else 1.0


def titles(names: Sequence[str], most: int = 4) -> str:
    """Return metric titles as a list in words, cut after `most` of them."""
    words = [METRIC_BY_NAME[name].title for name in names]
    if not words:
        return "nothing"
    if len(words) > most + 1:
        words = [*words[:most], f"{len(words) - most} more"]
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]


def candidate_verdict(e: Evidence, settings: Settings) -> tuple[Verdict, tuple[str, ...], tuple[str, ...]]:
    """Decide one candidate whose injection was witnessed, on a log that can be judged.

    Returns:
        The verdict, its reasons, and where it is reproduced but not specific: what stands in the way, as clauses.
    """
    moved = compared(e.results)
    agreed = agreement(e.results)
    same = [name for name, item in moved.items() if metric_agreement(item) > 0]
    opposite = [name for name, item in moved.items() if metric_agreement(item) < 0]
    disagree = [name for name in e.primary if (name in moved and name not in same) or name in e.against]
    reasons = [
        f"Explains {max(e.explained, 0):.0%} of what the incident did; moves {len(same)} of {len(moved)} moved metrics "
        f"the same way ({titles(same)})."
    ]
    if opposite:
        reasons.append(f"Moves {titles(opposite)} the other way.")
    if disagree:
        reasons.append(f"The metrics that its card leans on disagree: {titles(disagree)}.")
    if e.coverage < settings.coverage:
        reasons.append(f"Only {e.coverage:.0%} of the metrics that its card names could be compared.")
        return Verdict.INCONCLUSIVE, tuple(reasons), ()
    trends = weighted(e.results, {name: item.trend or 0.0 for name, item in moved.items()})
    types = weighted(
        e.results, {name: type_agreement(item.type_original, item.type_proxy) for name, item in moved.items()}
    )
    fits = e.explained >= settings.explained
    if e.excluded:
        reasons.append(
            "It is not the only cause: "
            + "; ".join(f"{METRIC_BY_NAME[name].title} is {how}" for name, how in e.excluded.items())
            + "."
        )
    if (
        fits
        and not e.excluded
        and not disagree
        and agreed >= settings.agreement
        and trends >= settings.trend
        and types >= settings.type_agreement
    ):
        doubts = _doubts(e, settings)
        if doubts:
            said = (*reasons, *(f"{doubt[0].upper()}{doubt[1:]}." for doubt in doubts))
            return Verdict.REPRODUCED_NOT_SPECIFIC, said, doubts
        nearer = "All that was replayed beside it is denied by a metric that can't be wrong."
        if e.gap is not None:
            gap, low, high = e.gap
            nearer = f"Nearer than every rival: gap {gap:.2f} (interval {low:.2f} to {high:.2f})."
        return Verdict.REPRODUCED, (*reasons, nearer), ()
    if not fits:
        reasons.append(f"That is less than the {settings.explained:.0%} an answer must explain.")
    if fits and trends < settings.trend:
        reasons.append(f"The curves run differently over time (similarity {trends:.2f}).")
    if fits and types < settings.type_agreement:
        reasons.append("The anomalies are of other types.")
    half_fits = e.explained >= settings.explained / 2
    if agreed >= settings.partly and half_fits and not set(opposite) & {*e.primary}:
        return Verdict.PARTLY, tuple(reasons), ()
    return Verdict.NOT_REPRODUCED, tuple(reasons), ()


def _doubts(e: Evidence, settings: Settings) -> tuple[str, ...]:
    """Return what keeps a reproduced fault from being specific, as clauses; empty where nothing does."""
    counted = [
        name
        for name, item in e.results.items()
        if _moved(item.original, item.type_original) or _moved(item.proxy, item.type_proxy)
    ]
    share = weighted(e.results, {name: float(name in e.against) for name in counted})
    found = []
    if e.stand_in:
        found.append(
            "the proxy is a stand-in, not cut from the failing model, and its evidence is never specific"
        )
    if e.rivals:
        found.append(f"it can't be told apart from: {', '.join(e.rivals)}")
    elif e.alone:
        found.append("no rival was replayed, so nothing says that only this fault would do it")
    elif not e.nearest:
        found.append("another candidate is nearer to the incident")
    if e.shadows:
        metrics = tuple(dict.fromkeys(name for names in e.shadows.values() for name in names))
        found.append(f"only {titles(metrics)} tells it from: {', '.join(e.shadows)}")
    if e.untried:
        found.append(f"its card names look-alikes that were not replayed: {', '.join(e.untried)}")
    if e.unreached:
        found.append(
            f"{_candidates(len(e.unreached))} not replayed, and any of them may do the same: {', '.join(e.unreached)}"
        )
    if share > settings.contradiction:
        found.append(
            "too much speaks against it as the only cause: "
            + "; ".join(f"{METRIC_BY_NAME[name].title}: {how}" for name, how in list(e.against.items())[:3])
        )
    if e.explained < settings.explained_specific:
        found.append(
            f"it explains {max(e.explained, 0):.0%}, and a specific answer must explain "
            f"{settings.explained_specific:.0%}"
        )
    return tuple(found)


def _candidates(number: int) -> str:
    return "1 candidate was" if number == 1 else f"{number} candidates were"


ORDER = (
    Verdict.REPRODUCED,
    Verdict.REPRODUCED_NOT_SPECIFIC,
    Verdict.PARTLY,
    Verdict.NOT_REPRODUCED,
    Verdict.INCONCLUSIVE,
    Verdict.INJECTION_FAILED,
)


def incident_verdict(
    ranking: Sequence[Candidate], explained: Mapping[str, float], settings: Settings
) -> tuple[Verdict, tuple[str, ...]]:
    """Decide the incident from its ranked candidates, on a log that can be judged.

    The first candidate answers, with those that can't be told apart from it; a fault further down never does.
    """
    scored = [item for item in ranking if np.isfinite(item.distance)]
    if not scored:
        if any(item.verdict is Verdict.INJECTION_FAILED for item in ranking):
            return Verdict.INJECTION_FAILED, ("No replay shows a witness of its injection.",)
        return Verdict.INCONCLUSIVE, ("No replay could be scored.",)
    best = scored[0]
    together = [best, *(item for item in scored[1:] if item.fault in best.rivals)]
    verdict = min((item.verdict for item in together), key=ORDER.index)
    if verdict is Verdict.REPRODUCED:
        return verdict, (
            f"{best.title} reproduces the incident, and no rival explains it as well.",
            "A second fault behind it, drowned by its effects, would not show: look again once it is mended.",
        )
    if verdict is Verdict.REPRODUCED_NOT_SPECIFIC:
        names = [item.title for item in together if item.verdict is verdict]
        if len(names) == 1:
            doubts = next(item.doubts for item in together if item.verdict is verdict)
            why = f": {doubts[0]}" if doubts else ""
            return verdict, (
                f"{names[0]} reproduces the incident, but is not shown to be the only one to do so{why}.",
            )
        return verdict, (f"These reproduce the incident and can't be told apart: {'; '.join(names)}.",)
    share = max(explained[best.fault], 0.0)
    if share < settings.explained:
        return verdict, (
            f"None of these: the nearest, {best.title}, explains {share:.0%} of what the incident did, "
            f"and an answer must explain {settings.explained:.0%}.",
        )
    if verdict is Verdict.PARTLY:
        return verdict, (f"{best.title} comes nearest, but reproduces the incident only in part.",)
    return verdict, (f"{best.title} comes nearest, but does not reproduce the incident.",)


def symptoms(names: Sequence[str], directions: Sequence[Direction]) -> tuple[str, ...]:
    """Return the ids of the symptoms that the original shows."""
    shown = dict(zip(names, directions, strict=True))
    return tuple(item.id for item in SYMPTOMS if shown.get(item.metric) == Direction(item.direction))
