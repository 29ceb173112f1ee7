"""Distances against plain loops; K-Medoids against exhaustive search; what each strategy keeps."""

from itertools import combinations
from math import sqrt

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.layer_stats import LayerStats
from proxy.selection import attach, by_frequency, jaccard, k_medoids, select_clustered
from proxy.similarity import (
    EPSILON,
    NORMALISATIONS,
    check_alpha,
    coactivation_distance,
    context_distance,
    joint_distance,
    normalise,
    router_distance,
)
from proxy.strategies import Request, strategy

settings.register_profile("patient", deadline=None)  # a crowded machine is no failure
settings.load_profile("patient")

seeds = st.integers(0, 10_000)


def random_stats(seed: int, experts: int = 8, tokens: int = 60, top_k: int = 2, layer: int = 0) -> LayerStats:
    """Statistics of random routing with a few popular experts; some may never be active."""
    rng = np.random.default_rng(seed)
    popularity = rng.random(experts) ** 3 + 1e-3
    chosen = np.zeros((tokens, experts))
    for row in chosen:
        row[rng.choice(experts, top_k, replace=False, p=popularity / popularity.sum())] = 1
    weights = chosen * rng.random((tokens, experts))
    hidden = rng.normal(size=(tokens, 5))
    return LayerStats(
        layer=layer,
        tokens=tokens,
        counts_E=chosen.sum(0),
        coactivation_EE=chosen.T @ chosen,
        weighted_hidden_EH=weights.T @ hidden,
        router_EH=rng.normal(size=(experts, 5)),
    )


def random_distance(seed: int, experts: int) -> np.ndarray:
    points = np.random.default_rng(seed).normal(size=(experts, 3))
    return router_distance(points)


def loss_of(distance: np.ndarray, medoids) -> float:
    return float(distance[:, list(medoids)].min(axis=1).sum())


@given(seeds)
@settings(max_examples=25)
def test_distances_equal_the_papers_equations_in_loops(seed):
    s = random_stats(seed)
    d_r, d_c, d_f = (
        router_distance(s.router_EH),
        coactivation_distance(s.counts_E, s.coactivation_EE),
        context_distance(s.weighted_hidden_EH),
    )
    for i in range(8):
        for j in range(8):
            if i == j:
                continue
            pair = s.coactivation_EE[i, j] / (sqrt(s.counts_E[i] * s.counts_E[j]) + EPSILON)
            units = [v / (sqrt(sum(x * x for x in v)) + EPSILON) for v in s.weighted_hidden_EH[[i, j]]]
            assert d_r[i, j] == pytest.approx(sqrt(sum((s.router_EH[i] - s.router_EH[j]) ** 2)))
            assert d_c[i, j] == pytest.approx(1 - pair)
            assert d_f[i, j] == pytest.approx(sqrt(sum((units[0] - units[1]) ** 2)))


@given(seeds, st.sampled_from(NORMALISATIONS), st.integers(1, 9))
def test_distances_are_symmetric_with_a_zero_diagonal_and_in_range(seed, how, experts):
    s = random_stats(seed, experts, top_k=min(2, experts))
    joint = joint_distance(
        s.router_EH, s.counts_E, s.coactivation_EE, s.weighted_hidden_EH, (0.2, 0.3, 0.5), how
    )
    distances = [
        router_distance(s.router_EH),
        coactivation_distance(s.counts_E, s.coactivation_EE),
        context_distance(s.weighted_hidden_EH),
        joint,
    ]
    for distance in distances:
        assert np.array_equal(distance, distance.T)
        assert not distance.diagonal().any()
    assert (joint >= 0).all() and (joint <= 1 + 1e-12).all()


@given(seeds)
def test_normalisation_keeps_the_order_of_pairs_and_fills_the_unit_interval(seed):
    distance = random_distance(seed, 7)
    pairs = distance[np.triu_indices(7, 1)]
    for how in NORMALISATIONS:
        scaled = normalise(distance, how)[np.triu_indices(7, 1)]
        assert np.array_equal(np.argsort(scaled, kind="stable"), np.argsort(pairs, kind="stable"))
        assert scaled.max() == pytest.approx(1)
        assert scaled.min() == pytest.approx(pairs.min() / pairs.max() if how == "max" else 0)


def test_equal_distances_do_not_divide_by_zero():
    same = np.ones((4, 4)) - np.eye(4)
    assert not normalise(same, "min_max").any()
    assert np.array_equal(normalise(same, "max"), same)
    assert not normalise(np.zeros((4, 4)), "max").any()
    assert normalise(np.zeros((1, 1)), "rank").shape == (1, 1)


def test_coactivation_carries_no_tilde_and_alpha_weighs_the_views():
    s = random_stats(3)
    args = (s.router_EH, s.counts_E, s.coactivation_EE, s.weighted_hidden_EH)
    assert np.array_equal(joint_distance(*args, (0, 1, 0)), coactivation_distance(*args[1:3]))
    assert np.array_equal(
        joint_distance(*args, (1, 0, 0)), normalise(router_distance(s.router_EH), "min_max")
    )
    views = [joint_distance(*args, tuple(row)) for row in np.eye(3)]
    assert joint_distance(*args, (0.5, 0.2, 0.3)) == pytest.approx(
        0.5 * views[0] + 0.2 * views[1] + 0.3 * views[2]
    )
    assert check_alpha((1.0, 1.0, 2.0), ("router", "context")) == pytest.approx((1 / 3, 0, 2 / 3))


@given(seeds, st.integers(1, 10))
def test_k_medoids_never_ends_above_its_start_and_no_single_swap_improves_it(seed, k):
    distance = random_distance(seed, 10)
    start = [int(i) for i in np.random.default_rng(seed).permutation(10)[:k]]
    found = k_medoids(distance, start)
    assert found.start_loss == pytest.approx(loss_of(distance, start))
    assert found.loss <= found.start_loss
    assert found.loss == pytest.approx(sum(distance[i, found.medoids[c]] for i, c in enumerate(found.labels)))
    assert len(set(found.medoids)) == k
    for out in found.medoids:
        for into in set(range(10)) - set(found.medoids):
            assert loss_of(distance, (set(found.medoids) - {out}) | {into}) >= found.loss - 1e-9


def test_k_medoids_is_near_the_exhaustive_optimum():
    ratios = []
    for seed in range(60):
        experts, k = 6 + seed % 5, 2 + seed % 3
        distance = random_distance(seed, experts)
        best = min(loss_of(distance, medoids) for medoids in combinations(range(experts), k))
        ratios.append(k_medoids(distance, range(k)).loss / best)
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) <= 1.02
    assert np.mean(np.array(ratios) <= 1 + 1e-9) >= 0.75
    assert np.mean(np.array(ratios) <= 1.05) >= 0.9


def test_swaps_leave_a_bad_start():
    points = np.array([[0.0], [0.1], [0.2], [9.0], [9.1], [9.2]])
    found = k_medoids(router_distance(points), [0, 1])  # alternating assignment would keep both on one side
    assert sorted(found.medoids) == [1, 4]
    assert found.swaps >= 1
    assert len({found.labels[i] for i in (0, 1, 2)}) == len({found.labels[i] for i in (3, 4, 5)}) == 1


def test_identical_experts_stay_in_as_many_clusters_as_asked():
    found = k_medoids(np.zeros((4, 4)), [2, 3])
    assert set(found.labels) == {0, 1}


@example(1263, 3)
@given(seeds, st.integers(2, 7))
def test_relabelling_the_experts_changes_nothing_but_their_names(seed, keep):
    s = random_stats(seed, tokens=200)
    counts = s.counts_E + np.linspace(0.1, 0.2, 8)  # no ties
    # Nor any among swaps: either of two experts that are a cluster by themselves is as good a medoid, to the last bit.
    distance = random_distance(seed, 8) + 1e-3 * np.random.default_rng(seed).random((8, 8))
    np.fill_diagonal(distance, 0.0)
    permutation = np.random.default_rng(seed + 1).permutation(8)

    def select(order):
        moved = distance[np.ix_(order, order)]
        return select_clustered(counts[order], moved, lambda some: moved[np.ix_(some, some)], keep)

    plain, moved = select(np.arange(8)), select(permutation)
    assert moved.loss == pytest.approx(plain.loss)
    assert {int(permutation[expert]) for expert in moved.kept} == set(plain.kept)


@given(seeds, st.integers(2, 7))
def test_representatives_are_the_most_frequent_of_their_clusters(seed, keep):
    s = random_stats(seed)
    chosen = strategy("multi_view").select(s, Request(keep))
    assert list(chosen.kept) == sorted(set(chosen.kept)) and len(chosen.kept) == keep
    live = set(np.flatnonzero(s.counts_E))
    for head in chosen.kept:
        members = [expert for expert, owner in enumerate(chosen.owner) if owner == head]
        assert head in members
        assert s.counts_E[head] == max(s.counts_E[members])
    if len(live) >= keep:
        assert set(chosen.kept) <= live


def test_experts_never_active_are_attached_by_router_distance():
    counts = np.array([5.0, 4.0, 0.0, 3.0, 0.0])
    rows = np.array([[0.0], [1.0], [10.1], [10.0], [0.2]])
    d = router_distance(rows)
    chosen = select_clustered(counts, d, lambda some: d[np.ix_(some, some)], 2)
    assert chosen.kept == (0, 3)
    assert chosen.owner == (0, 0, 3, 3, 0)


def test_when_too_few_are_active_the_farthest_others_fill_up():
    counts = np.array([0.0, 7.0, 0.0, 0.0])
    rows = np.array([[0.1], [0.0], [50.0], [51.0]])
    d = router_distance(rows)

    def refuse(_):
        raise AssertionError("nothing to cluster")

    chosen = select_clustered(counts, d, refuse, 2)
    assert chosen.kept == (1, 2)
    assert chosen.owner == (1, 1, 2, 2)
    assert select_clustered(np.zeros(4), d, refuse, 4).kept == (0, 1, 2, 3)


def test_ties_in_frequency_go_to_the_more_central_expert():
    distance = random_distance(0, 5)
    order = by_frequency(np.array([1.0, 2.0, 2.0, 2.0, 1.0]), distance)
    central = sorted((1, 2, 3), key=lambda e: distance[e].sum())
    assert order[:3] == central
    assert by_frequency(np.array([1.0, 2.0, 2.0])) == [1, 2, 0]


@pytest.mark.parametrize(
    "name",
    ["multi_view", "router", "coactivation", "context+router", "frequency", "random", "first_k", "merge"],
)
def test_every_strategy_keeps_an_equal_quota_of_each_group(name):
    for seed in range(5):
        chosen = strategy(name).select(random_stats(seed, experts=12), Request(6, groups=3, seed=seed))
        assert [sum(4 * g <= e < 4 * g + 4 for e in chosen.kept) for g in range(3)] == [2, 2, 2]
        assert all(expert // 4 == owner // 4 for expert, owner in enumerate(chosen.owner))


def test_the_baselines_keep_what_their_names_say():
    s = random_stats(1)
    assert strategy("first_k").select(s, Request(3)).kept == (0, 1, 2)
    top = sorted(range(8), key=lambda e: (-s.counts_E[e], e))[:3]
    assert strategy("frequency").select(s, Request(3)).kept == tuple(sorted(top))
    draws = {strategy("random").select(s, Request(3, seed=seed)).kept for seed in range(20)}
    assert len(draws) > 5
    assert strategy("random").select(s, Request(3, seed=4)) == strategy("random").select(
        s, Request(3, seed=4)
    )


def test_view_subsets_are_the_ablations_of_alpha():
    for seed in range(10):
        s = random_stats(seed)
        by_name = strategy("context+router").select(s, Request(3))
        by_alpha = strategy("multi_view").select(s, Request(3, alpha=(1.0, 0.0, 1.0)))
        assert by_name == by_alpha
        assert strategy("router+coactivation+context").select(s, Request(3)) == strategy("multi_view").select(
            s, Request(3)
        )


def test_the_views_choose_differently():
    names = ("router", "coactivation", "context", "frequency")
    chosen = {
        n: [strategy(n).select(random_stats(seed), Request(3)).kept for seed in range(10)] for n in names
    }
    assert all(chosen[a] != chosen[b] for a, b in combinations(names, 2))


def test_attach_and_jaccard():
    d = router_distance(np.array([[0.0], [1.0], [5.0]]))
    assert attach([2, 0], d).owner == (0, 0, 2)
    assert jaccard((1, 2, 3), (2, 3, 4)) == pytest.approx(0.5)


def test_experts_never_active_do_not_stretch_the_scale_of_the_others():
    for seed in range(20):
        live = random_stats(seed, tokens=400)
        experts = len(live.counts_E)
        outliers = np.vstack((live.router_EH, 1e3 * np.eye(2, 5)))  # would flatten all other router distances
        with_dead = LayerStats(
            layer=0,
            tokens=live.tokens,
            counts_E=np.pad(live.counts_E, (0, 2)),
            coactivation_EE=np.pad(live.coactivation_EE, (0, 2)),
            weighted_hidden_EH=np.pad(live.weighted_hidden_EH, ((0, 2), (0, 0))),
            router_EH=outliers,
        )
        plain, more = (strategy("multi_view").select(s, Request(4)) for s in (live, with_dead))
        assert more.kept == plain.kept and more.owner[:experts] == plain.owner
