"""Two faults at once: does a pair of candidates explain the incident clearly better than any single one?

Nothing new is replayed: the effect of a pair is predicted as the sum of its members' effects in transformed units,
before they are squashed. So a pair is a lead to be replayed, never a reproduction.

Legend of shape suffixes: ``_D`` bootstrap draws, ``_C`` signatures, ``_M`` metrics, ``_B`` blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from diagnose.result import Candidate, Verdict
from diagnose.score.distance import Signature, distance
from diagnose.score.ranking import Case
from diagnose.score.specificity import bootstrap
from diagnose.score.verdict import compared, metric_agreement, titles


@dataclass(frozen=True)
class Pair:
    """Two candidates that explain an incident together.

    Attributes:
        faults: Their ids, the one that explains more alone first.
        explained: Share of the incident that the sum of their effects explains.
        alone: Share that each explains by itself.
        gain: By how much `explained` exceeds what any single candidate explains at the strength that suits it best,
            with its interval: (gain, low, high).
        own: Metrics that moved and that only this member moves the right way, by member.
    """

    faults: tuple[str, str]
    explained: float
    alone: tuple[float, float]
    gain: tuple[float, float, float]
    own: tuple[tuple[str, ...], tuple[str, ...]]


def superposed(a: Signature, b: Signature) -> Signature:
    """Return the signature of both at once: effects add up, their noise adds up in squares, events stay events."""
    return Signature(
        z_MB=a.z_MB + b.z_MB,
        event_MB=np.maximum(a.event_MB, b.event_MB),
        noise_MB=np.hypot(a.noise_MB, b.noise_MB),
    )


def scaled(signature: Signature, factor: float) -> Signature:
    """Return a signature whose effect is `factor` times as large."""
    return replace(signature, z_MB=signature.z_MB * factor)


def find_pair(ranking: Sequence[Candidate], signatures: Mapping[str, Signature], case: Case) -> Pair | None:
    """Return the best pair of candidates where two are clearly needed, else None.

    Of all pairs of which each member moves a metric the right way that the other doesn't, the one that is nearest to
    the incident counts, and must explain `explained_specific` of it. Its gain is taken over every single candidate at
    every strength up to `amplitude` times weaker or stronger (its effect multiplied), because a second fault must not
    stand in for a first one that is stronger in the original. The gain must be at least `pair_gain`, and its interval
    (bootstrap over seeds and metrics, as for specificity) must lie above 0.

    Args:
        ranking: Scored candidates.
        signatures: Their signatures by fault.
        case: What they share.
    """
    settings, original = case.frame.settings, case.original.signature
    right = {
        item.fault: {name for name, result in compared(item.metrics).items() if metric_agreement(result) > 0}
        for item in ranking
    }
    pairs = [
        (a.fault, b.fault)
        for a, b in combinations([item for item in ranking if item.fault in signatures], 2)
        if right[a.fault] - right[b.fault] and right[b.fault] - right[a.fault]
    ]
    if not pairs:
        return None

    def far(signature: Signature) -> float:
        return distance(original, signature, case.where, settings)

    first, second = min(pairs, key=lambda pair: far(superposed(*(signatures[fault] for fault in pair))))
    both = superposed(signatures[first], signatures[second])
    if case.explained(far(both)) < settings.explained_specific:
        return None
    factors = settings.amplitude ** np.linspace(-1, 1, 9)
    singles = [
        min((scaled(item, float(factor)) for factor in factors), key=far) for item in signatures.values()
    ]
    nothing = Signature(np.zeros_like(both.z_MB), np.zeros_like(both.event_MB), np.zeros_like(both.noise_MB))
    gaps = bootstrap(
        original,
        [nothing, both, *singles],
        case.where,
        case.home.scale.bank_KMB,
        case.proxy.scale.bank_KMB,
        case.size,
        settings,
    )
    explained_DC = 1 - (gaps.d_DC / gaps.d_DC[:, :1]) ** 2
    gain_D = explained_DC[:, 1] - explained_DC[:, 2:].max(1)
    low, high = np.quantile(gain_D, [gaps.tail, 1 - gaps.tail])
    gain = case.explained(far(both)) - case.explained(min(far(item) for item in singles))
    if gain < settings.pair_gain or low <= 0:
        return None
    alone = {fault: case.explained(far(signatures[fault])) for fault in (first, second)}
    a, b = sorted((first, second), key=lambda fault: -alone[fault])
    return Pair(
        (a, b),
        case.explained(far(both)),
        (alone[a], alone[b]),
        (gain, float(low), float(high)),
        (tuple(sorted(right[a] - right[b])), tuple(sorted(right[b] - right[a]))),
    )


def together(
    pair: Pair, verdict: Verdict, ranking: Sequence[Candidate]
) -> tuple[Verdict, tuple[str, ...], tuple[Candidate, ...]]:
    """Return the incident's verdict, its reasons and the ranking, given that a pair fits better than any candidate.

    No single cause is specific then; and where none reproduces the incident, the pair does so only on paper.
    """
    title = {item.fault: item.title for item in ranking}
    a, b = pair.faults
    reasons = (
        f"More than one cause fits together: {title[a]} and {title[b]}. The sum of their effects explains "
        f"{pair.explained:.0%} of what the incident did; alone they explain {max(pair.alone[0], 0):.0%} and "
        f"{max(pair.alone[1], 0):.0%}.",
        f"Only {a} accounts for {titles(pair.own[0])}, only {b} for {titles(pair.own[1])}. The sum is a prediction: "
        "replay both at once, or mend one and look again.",
    )
    single = "Two faults at once explain the incident clearly better."
    lowered = tuple(
        replace(item, verdict=Verdict.REPRODUCED_NOT_SPECIFIC, reasons=(*item.reasons, single))
        if item.verdict is Verdict.REPRODUCED
        else item
        for item in ranking
    )
    reproduced = (Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC)
    return Verdict.REPRODUCED_NOT_SPECIFIC if verdict in reproduced else Verdict.PARTLY, reasons, lowered
