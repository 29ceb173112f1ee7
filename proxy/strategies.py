"""The ways of choosing experts: the paper's method, its ablations and its baselines.

Shape suffixes: E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from proxy.errors import BuildError
from proxy.layer_stats import LayerStats
from proxy.selection import Indices, Selection, attach, by_frequency, fill, select_clustered
from proxy.similarity import NORMALISATIONS, VIEWS, check_alpha, joint_distance, router_distance

Alpha = tuple[float, float, float]


@dataclass(frozen=True)
class Request:
    """What a strategy needs to know beside a layer's statistics.

    Attributes:
        keep: Experts to keep a layer (K), a multiple of `groups`.
        groups: Expert groups; each keeps the same number.
        alpha: Weights of the three views (router, co-activation, context).
        normalisation: The tilde: min_max, max or rank.
        seed: Seed of `random`.
    """

    keep: int
    groups: int = 1
    alpha: Alpha = (1 / 3, 1 / 3, 1 / 3)
    normalisation: str = "min_max"
    seed: int = 0


@dataclass(frozen=True)
class Strategy:
    """One way of choosing experts.

    Attributes:
        name: Its name.
        calibrated: Whether it needs statistics beyond the router rows.
        merges: Whether the experts of a cluster are averaged instead of represented.
        select: Chooses the experts of one layer.
        views: Views of the joint distance that it uses.
        outputs: Whether it needs the experts' outputs (`LayerStats.saliency_E`).
    """

    name: str
    calibrated: bool
    merges: bool
    select: Callable[[LayerStats, Request], Selection]
    views: tuple[str, ...] = ()
    outputs: bool = False


def strategy(name: str) -> Strategy:
    """Return the strategy of that name.

    Args:
        name: multi_view, any "+"-joined subset of router, coactivation and context, frequency, reap, random,
            first_k or merge (clusters as multi_view does, then averages).

    Raises:
        BuildError: There is no such strategy.
    """
    if name in ("multi_view", "merge"):
        return Strategy(name, True, name == "merge", _clustered(VIEWS), VIEWS)
    if name in _PLAIN:
        return _PLAIN[name]
    views = name.split("+")
    if len(set(views)) == len(views) and set(views) <= set(VIEWS):
        used = tuple(view for view in VIEWS if view in views)
        return Strategy(name, True, False, _clustered(used), used)
    raise BuildError(
        f"unknown strategy {name!r}",
        f"choose multi_view, merge, {', '.join(_PLAIN)}, or some of {'+'.join(VIEWS)} joined by '+'",
    )


def check_request(chosen: Strategy, request: Request) -> None:
    """Refuse weights and normalisations that are none, before any work is done.

    Raises:
        BuildError: The view weights or the normalisation are not usable.
    """
    if request.normalisation not in NORMALISATIONS:
        raise BuildError(
            f"unknown normalisation {request.normalisation!r}", f"choose one of {', '.join(NORMALISATIONS)}"
        )
    if chosen.views:
        check_alpha(request.alpha, chosen.views)


def _clustered(views: tuple[str, ...]) -> Callable[[LayerStats, Request], Selection]:
    """Return the paper's method on some of its views."""

    def select(stats: LayerStats, request: Request) -> Selection:
        alpha = check_alpha(request.alpha, views)
        # The tilde is taken over all active experts of the layer, also where groups are clustered apart.
        live = np.flatnonzero(stats.counts_E > 0)
        joint_EE = np.full((len(stats.counts_E), len(stats.counts_E)), np.nan)
        joint_EE[np.ix_(live, live)] = joint_distance(
            stats.router_EH[live],
            stats.counts_E[live],
            stats.coactivation_EE[np.ix_(live, live)],
            stats.weighted_hidden_EH[live],
            alpha,
            request.normalisation,
        )
        router_EE = router_distance(stats.router_EH)

        def in_group(members: Indices, keep: int) -> Selection:
            def joint_of(some: Indices) -> np.ndarray:
                return joint_EE[np.ix_(members[some], members[some])]

            return select_clustered(
                stats.counts_E[members], router_EE[np.ix_(members, members)], joint_of, keep
            )

        return _by_group(stats, request, in_group)

    return select


def _frequency(stats: LayerStats, request: Request) -> Selection:
    """Keep the most frequent experts of each group."""
    return _ordered(stats, request, lambda members: by_frequency(stats.counts_E[members]))


def _reap(stats: LayerStats, request: Request) -> Selection:
    """Keep the experts of each group with the largest p·‖f(h)‖ on average over the tokens that chose them.

    Source: Lasby et al., "REAP the Experts" (2025), router-weighted expert activation pruning.
    """
    if stats.saliency_E is None:
        raise BuildError(
            "reap weighs experts by the size of their outputs, which were not computed",
            "calibrate for it: leave the statistics to the build; it does not work for a family whose experts "
            "can only run all together",
        )
    mean_E = stats.saliency_E / np.maximum(stats.counts_E, 1)
    return _ordered(stats, request, lambda members: by_frequency(mean_E[members]))


def by_router(stats: LayerStats, request: Request) -> Selection:
    """Keep experts of each group so that all are near a kept one by their router rows, without calibration."""
    router_EE = router_distance(stats.router_EH)
    nobody = np.array([], np.intp)

    def in_group(members: Indices, keep: int) -> Selection:
        distance_EE = router_EE[np.ix_(members, members)]
        return attach(fill(nobody, distance_EE, keep), distance_EE)

    return _by_group(stats, request, in_group)


def _first_k(stats: LayerStats, request: Request) -> Selection:
    """Keep the first experts of each group."""
    return _ordered(stats, request, lambda members: list(range(len(members))))


def _random(stats: LayerStats, request: Request) -> Selection:
    """Keep random experts of each group, others in each layer."""
    generator = np.random.default_rng([request.seed, stats.layer])
    return _ordered(stats, request, lambda members: generator.permutation(len(members)).tolist())


def _ordered(stats: LayerStats, request: Request, order: Callable[[Indices], list[int]]) -> Selection:
    """Keep the head of an order over each group's members."""
    router_EE = router_distance(stats.router_EH)
    return _by_group(
        stats,
        request,
        lambda members, keep: attach(order(members)[:keep], router_EE[np.ix_(members, members)]),
    )


def _by_group(
    stats: LayerStats, request: Request, in_group: Callable[[Indices, int], Selection]
) -> Selection:
    """Select the same number in each of the contiguous groups and join the selections."""
    experts = len(stats.counts_E)
    size, quota = experts // request.groups, request.keep // request.groups
    assert size * request.groups == experts and quota * request.groups == request.keep
    whole = Selection((), ())
    for group in range(request.groups):
        members = np.arange(group * size, (group + 1) * size)
        part = in_group(members, quota)
        whole = replace(
            whole,
            kept=whole.kept + tuple(int(members[e]) for e in part.kept),
            owner=whole.owner + tuple(int(members[e]) for e in part.owner),
            start_loss=whole.start_loss + part.start_loss,
            loss=whole.loss + part.loss,
        )
    return whole


_PLAIN = {
    "frequency": Strategy("frequency", True, False, _frequency),
    "reap": Strategy("reap", True, False, _reap, outputs=True),
    "random": Strategy("random", False, False, _random),
    "first_k": Strategy("first_k", False, False, _first_k),
}
