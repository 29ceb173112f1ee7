"""How near replays are while the race is still on: distances with their doubt, without verdicts and reports.

The same clocks, signatures and distance as the score itself; what is left out is everything that only a reader
needs. Pure.

Legend of shape suffixes: ``_D`` bootstrap draws, ``_C`` replays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from diagnose.score.distance import Signature, distance
from diagnose.score.ranking import Case
from diagnose.score.score import Given, Laid, lay
from diagnose.score.specificity import bootstrap
from taxonomy.metrics import METRIC_BY_NAME

AMPLITUDES: tuple[float, ...] = tuple(2.0 ** (k / 2) for k in range(-4, 5))
"""Factors on a replay's effect under which its reach is looked for: as far as strengths are ever fitted."""


@dataclass(frozen=True)
class Near:
    """Where one replay stands.

    Attributes:
        distance: Its distance to the incident.
        behind: Lower end of the interval of how much farther it is than the nearest replay that nothing denies.
        reach: The distance that its effect would have at the amplitude that suits the incident best: what another
            strength could come to, if a strength only makes the same effect larger or smaller.
        reach_behind: Lower end of the interval of how much farther that is than the nearest replay.
        explained: Share of the incident that it then explains.
        denied: Exact metrics that deny it as the only cause, in words; "" where none does.
    """

    distance: float
    behind: float
    reach: float
    reach_behind: float
    explained: float
    denied: str = ""


@dataclass(frozen=True)
class Nearness:
    """Where all replays stand.

    Attributes:
        replays: (fault, strength) → where it stands; replays without a witnessed run are missing.
        settled: Why the incident needs no candidate to be judged (it is healthy, or nothing can be said); "" where
            it does.
        least: The smallest difference in distance that means anything.
    """

    replays: Mapping[tuple[str, float], Near]
    settled: str
    least: float


def nearness(given: Given, from_step: int | None = None, tail: float = 0.02) -> Nearness:
    """Return where the replays stand.

    Args:
        given: Curves and replays, from `score.gather`.
        from_step: Step at which the fault became active in the original; None where it isn't known.
        tail: Probability below the lower end of an interval.
    """
    laid = lay(given, from_step)
    if not laid:
        return Nearness({}, "nothing can be compared", 0.0)
    # As in `score`: of two possible activations, the one that any candidate explains better stands.
    return max((_nearness(item, given, tail) for item in laid), key=lambda found: found[1])[0]


def _nearness(laid: Laid, given: Given, tail: float) -> tuple[Nearness, float]:
    case, settings = laid.case, given.settings
    settled = case.settled[1] if case.settled is not None else ""
    order = sorted(laid.seen)
    if not order:
        return Nearness({}, settled, 0.0), -np.inf
    signatures = [laid.seen[i].signature for i in order]
    amplitudes = [_best_amplitude(item, case) for item in signatures]
    scaled = [scale(item, a) for item, a in zip(signatures, amplitudes, strict=True)]
    gaps = bootstrap(
        case.original.signature,
        [*signatures, *scaled],
        case.where,
        case.home.scale.bank_KMB,
        case.proxy.scale.bank_KMB,
        case.size,
        settings,
    )
    n = len(order)
    denied = [" and ".join(METRIC_BY_NAME[m].title for m in case.exclusions(laid.seen[i])) for i in order]
    first = min(range(n), key=lambda c: (bool(denied[c]), gaps.d_C[c]))
    behind_C = np.quantile(gaps.d_DC - gaps.d_DC[:, first : first + 1], tail, axis=0)
    replays = {
        (given.replays[i].fault, given.replays[i].severity): Near(
            distance=float(gaps.d_C[c]),
            behind=float(behind_C[c]),
            reach=float(gaps.d_C[n + c]),
            reach_behind=float(behind_C[n + c]),
            explained=case.explained(float(gaps.d_C[n + c])),
            denied=denied[c],
        )
        for c, i in enumerate(order)
    }
    best = case.explained(float(gaps.d_C[first])) if laid.plan.enough else -np.inf
    return Nearness(replays, settled, gaps.least), best


def scale(signature: Signature, factor: float) -> Signature:
    """Return a signature whose effect is `factor` times as large; events and noise stay what they were."""
    return replace(signature, z_MB=signature.z_MB * factor)


def _best_amplitude(signature: Signature, case: Case) -> float:
    def d(amplitude: float) -> float:
        scaled = scale(signature, amplitude)
        return float(distance(case.original.signature, scaled, case.where, case.frame.settings))

    return min(AMPLITUDES, key=d)
