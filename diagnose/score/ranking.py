"""From distances to ranked candidates: one per fault, each with its rivals, its verdict and its reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diagnose.result import Candidate, MetricResult, Verdict
from diagnose.score.align import Contrast, Frame
from diagnose.score.distance import Space, distance
from diagnose.score.experiment import Experiment, contradictions, exclusions, results
from diagnose.score.plan import Replay
from diagnose.score.severity import severity_interval
from diagnose.score.specificity import Gaps, bootstrap, splitting_metric
from diagnose.score.system import System
from diagnose.score.verdict import Evidence, agreement, candidate_verdict, coverage
from proxy.specs import INJECTION_FAILED
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.registry import FaultCard, Library

SPLITS_TOLD = 3
"""Members of a set for which it is said what would split them off."""


@dataclass(frozen=True)
class Case:
    """What the candidates of one incident share.

    Attributes:
        frame: The comparison's frame.
        original: The incident.
        home: The original's system.
        proxy: The proxy's system.
        where: Coordinates and weights of the distance.
        size: ‖q_O‖.
        settled: The verdict where it does not depend on any candidate, with the reason; else None.
        evidence: Evidence class.
        available: Metrics that both systems have.
        library: Fault cards.
        stand_in: Whether the proxy is a stand-in.
        unreached: Candidates that were to be replayed and were not.
    """

    frame: Frame
    original: Experiment
    home: System
    proxy: System
    where: Space
    size: float
    settled: tuple[Verdict, str] | None
    evidence: str
    available: tuple[str, ...]
    library: Library
    stand_in: bool
    unreached: tuple[str, ...] = ()

    @property
    def exact(self) -> tuple[int, ...]:
        """Indices of the exact metrics that count: those that no healthy run of either system ever moved."""
        if self.frame.contrast is not Contrast.TWIN:
            return ()  # a log's own past may have the fault in it
        return tuple(
            m
            for m, name in enumerate(self.frame.metrics)
            if name in self.frame.settings.exact_metrics
            and name in self.available
            and not any(_varies(item, m) for item in (self.home, self.proxy))
        )

    def exclusions(self, item: Experiment) -> dict[str, str]:
        """Return the exact metrics that deny that a replay is the incident's only cause, each with how."""
        return exclusions(self.original, item, self.exact, self.frame)

    def explained(self, d: float) -> float:
        """Return 1 − d² / ‖q_O‖², the share of the incident that a candidate at distance d explains."""
        return 1 - (d / self.size) ** 2 if self.size > 0 else 0.0


def _varies(system: System, m: int) -> bool:
    """Whether a metric varies over a system's healthy runs, those at hand or those on file."""
    x_RB = system.reference.x_RMB[:, m]
    values = x_RB[np.isfinite(x_RB)]
    return bool(np.nan_to_num(system.scale.sigma_MB[m]).any() or (len(values) and np.ptp(values) > 0))


def rank(
    replays: Sequence[Replay], seen: Mapping[int, Experiment], case: Case
) -> tuple[tuple[Candidate, ...], dict[str, float]]:
    """Rank the candidates.

    Args:
        replays: Replays in an order that does not depend on the caller's.
        seen: What each scorable replay showed, by index.
        case: What they share.

    Returns:
        The ranking, unscorable candidates last, and the explained share by fault.
    """
    settings = case.frame.settings
    far = {
        i: distance(case.original.signature, item.signature, case.where, settings) for i, item in seen.items()
    }
    denied = {i: case.exclusions(item) for i, item in seen.items()}
    best: dict[str, int] = {}
    for i in far:
        fault = replays[i].fault
        if fault not in best or (bool(denied[i]), far[i]) < (bool(denied[best[fault]]), far[best[fault]]):
            best[fault] = i
    order = sorted(best.values())
    gaps = bootstrap(
        case.original.signature,
        [seen[i].signature for i in order],
        case.where,
        case.home.scale.bank_KMB,
        case.proxy.scale.bank_KMB,
        case.size,
        settings,
    )
    scored = [_candidate(c, order, replays, seen, denied, gaps, case) for c in range(len(order))]
    failed = [
        _failed(replay, case.library)
        for replay in {item.fault: item for item in replays if item.fault not in best}.values()
    ]
    # A fault that an exact metric denies comes after all others, however near.
    scored.sort(key=lambda item: (bool(denied[best[item.fault]]), item.distance, item.fault))
    explained = {item.fault: case.explained(item.distance) for item in scored}
    return (*scored, *failed), explained


def _candidate(
    c: int,
    order: Sequence[int],
    replays: Sequence[Replay],
    seen: Mapping[int, Experiment],
    denied: Mapping[int, Mapping[str, str]],
    gaps: Gaps,
    case: Case,
) -> Candidate:
    """Build the candidate at place `c` of `order`."""
    settings, metrics = case.frame.settings, case.frame.metrics
    replay, experiment = replays[order[c]], seen[order[c]]
    card = case.library.cards.get(replay.fault)
    table = results(case.original, experiment, card, metrics)
    excluded = denied[order[c]]
    # Whom an exact metric denies is nobody's rival among those that it doesn't deny, and the other way round.
    others = [k for k in range(len(order)) if k != c and bool(denied[order[k]]) == bool(excluded)]
    d = float(gaps.d_C[c])
    # What explains next to nothing has no rivals worth naming, and is none: all such candidates look alike.
    able = [k for k in range(len(order)) if case.explained(float(gaps.d_C[k])) >= settings.explained / 2]
    alike = sorted(
        (k for k in others if {c, k} <= set(able) and gaps.alike(c, k)), key=lambda k: float(gaps.d_C[k])
    )
    rivals = tuple(replays[order[k]].fault for k in alike)
    nearest = gaps.nearest_rival(others)
    gap = gaps.gap(c, nearest) if nearest is not None else None
    first = min(range(len(order)), key=lambda k: (bool(denied[order[k]]), gaps.d_C[k], k)) == c
    shadows = {
        replays[order[k]].fault: tuple(denied[order[k]])
        for k in able
        if denied[order[k]] and not excluded and gaps.gap(c, k)[1] <= gaps.least
    }
    covered = coverage(card, case.available)
    tried = {replays[k].fault for k in order}
    impossible = {item.fault for item in replays if item.impossible}
    reasons: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    if case.settled is not None:
        verdict, reasons = case.settled[0], (case.settled[1],)
    else:
        evidence = Evidence(
            results=table,
            against=contradictions(case.original, experiment, case.frame),
            excluded=excluded,
            shadows=shadows,
            alone=len(order) == 1,
            primary=card.primary if card is not None else (),
            explained=case.explained(d),
            coverage=covered,
            rivals=rivals,
            untried=tuple(fault for fault in _look_alikes(card) if fault not in tried | impossible),
            unreached=tuple(
                fault
                for fault in (*case.unreached, *(item.fault for item in replays if item.broke))
                if fault not in {*tried, *_look_alikes(card)}
            ),
            gap=gap,
            nearest=first,
            stand_in=case.stand_in,
        )
        verdict, reasons, doubts = candidate_verdict(evidence, settings)
    strengths = sorted({item.severity for item in replays if item.fault == replay.fault})
    if len(strengths) > 1:
        reasons = (*reasons, f"The nearest of {len(strengths)} strengths is {replay.severity:g}.")
    splits = [
        _split(replay.fault, replays[order[k]].fault, experiment, seen[order[k]], case)
        for k in alike[:SPLITS_TOLD]
    ]
    split = next((metric for metric, _ in splits if metric), "")
    return Candidate(
        fault=replay.fault,
        title=card.title if card is not None else replay.fault,
        category=card.category if card is not None else "",
        verdict=verdict,
        evidence=case.evidence,
        distance=d,
        agreement=agreement(table),
        coverage=covered,
        specificity=gap,
        severity=replay.severity,
        rivals=rivals,
        split_by=split,
        witness=dict(replay.witness),
        witness_ok=replay.witness_ok,
        fix=card.fix if card is not None else "",
        reasons=(*reasons, *(advice for _, advice in splits)),
        metrics=table,
        severity_interval=_interval(replay.fault, replays, seen, case),
        doubts=doubts,
    )


def _look_alikes(card: FaultCard | None) -> tuple[str, ...]:
    return tuple(item.fault for item in card.rivals) if card is not None else ()


def _interval(
    fault: str, replays: Sequence[Replay], seen: Mapping[int, Experiment], case: Case
) -> tuple[float, float] | None:
    """Return the interval of a fault's strength, None where it was replayed at one alone."""
    own = sorted((i for i in seen if replays[i].fault == fault), key=lambda i: replays[i].severity)
    if len(own) < 2:
        return None
    gaps = bootstrap(
        case.original.signature,
        [seen[i].signature for i in own],
        case.where,
        case.home.scale.bank_KMB,
        case.proxy.scale.bank_KMB,
        case.size,
        case.frame.settings,
    )
    return severity_interval([replays[i].severity for i in own], gaps)


def _split(fault: str, rival: str, a: Experiment, b: Experiment, case: Case) -> tuple[str, str]:
    """Return (metric, sentence) on what would split two candidates; no metric where nothing is known to.

    What their replays say comes first, then the card of either.
    """
    found = splitting_metric(a.signature, b.signature, case.frame.metrics, case.frame.settings.min_margin)
    if found is not None:
        name, apart = found
        title = METRIC_BY_NAME[name].title
        much = "a non-finite value" if np.isinf(apart) else f"{apart:.0f} noise units"
        if name in case.available:
            return (
                name,
                f"{title} would split it from {rival} ({much} apart in the proxy): replay at other strengths.",
            )
        return (
            name,
            f"{title} would split it from {rival} ({much} apart in the proxy): log it in the original.",
        )
    for this, other in ((fault, rival), (rival, fault)):
        card = case.library.cards.get(this)
        for item in card.rivals if card is not None else ():
            if item.fault == other:
                return item.metric, f"The card of {this} names what splits it from {other}: {item.why}"
    return "", (
        f"No metric of the replays splits it from {rival}, and no card names one: --probe looks for a setting under "
        "which they differ."
    )


def _failed(replay: Replay, library: Library) -> Candidate:
    """Build a candidate that could not be scored."""
    card = library.cards.get(replay.fault)
    injected = bool(replay.failure) or not any(len(run.steps_N) for run in replay.runs)
    refused = replay.failure.startswith(INJECTION_FAILED)
    nothing: dict[str, MetricResult] = {}
    return Candidate(
        fault=replay.fault,
        title=card.title if card is not None else replay.fault,
        category=card.category if card is not None else "",
        verdict=Verdict.INCONCLUSIVE if injected and not refused else Verdict.INJECTION_FAILED,
        evidence="weak",
        distance=float("nan"),
        agreement=0.0,
        coverage=0.0,
        specificity=None,
        severity=replay.severity,
        rivals=(),
        split_by="",
        witness=dict(replay.witness),
        witness_ok=replay.witness_ok,
        fix=card.fix if card is not None else "",
        reasons=(
            f"It could not be replayed: {replay.failure or 'there is no run'}."
            if injected
            else "The witness does not show that the fault took place in the replay.",
        ),
        metrics=nothing,
    )


def unscored(replays: Sequence[Replay], library: Library) -> tuple[Candidate, ...]:
    """Return candidates of an incident on which nothing can be computed."""
    return tuple(_failed(replay, library) for replay in {item.fault: item for item in replays}.values())
