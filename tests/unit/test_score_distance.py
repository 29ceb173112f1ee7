"""The ranking statistic and the doubt about it: properties, and identities that hold exactly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from diagnose.score.distance import Signature, distance, size, space, squash
from diagnose.score.settings import DEFAULT
from diagnose.score.simulate import World
from diagnose.score.specificity import bootstrap, noise_curves, splitting_metric

METRICS = World.make().metrics[:4]
SHAPE = (4, 8)
z_arrays = arrays(float, SHAPE, elements=st.floats(-200, 200))
everywhere = np.ones(4, bool)


def sig(z, event=None, noise=0.0):
    return Signature(np.asarray(z, float), np.zeros(SHAPE) if event is None else event, np.full(SHAPE, noise))


def d(a, b, original=None):
    return distance(a, b, space(original or a, everywhere, METRICS, DEFAULT), DEFAULT)


@settings(max_examples=60, deadline=None)
@given(z_arrays, z_arrays)
def test_distance_is_a_distance(a, b):
    left, right = sig(a), sig(b)
    assert d(left, left) == 0.0
    assert d(left, right) == pytest.approx(d(right, left))
    assert d(left, right) == pytest.approx(d(sig(-a), sig(-b)))
    assert d(left, right) >= 0
    assert size(left, space(left, everywhere, METRICS, DEFAULT), DEFAULT) == pytest.approx(
        d(left, sig(np.zeros(SHAPE)))
    )


@settings(max_examples=60, deadline=None)
@given(z_arrays, z_arrays, z_arrays)
def test_triangle(a, b, c):
    a, b, c = sig(a), sig(b), sig(c)
    where = a
    assert d(a, c, where) <= d(a, b, where) + d(b, c, where) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4))
def test_squash_is_odd_monotone_and_blind_to_noise(a, b):
    low, high = (float(squash(np.array(x), DEFAULT)) for x in sorted((a, b)))
    assert low <= high + 1e-12
    assert float(squash(np.array(-a), DEFAULT)) == pytest.approx(-float(squash(np.array(a), DEFAULT)))
    if abs(a) <= DEFAULT.garrote:
        assert float(squash(np.array(a), DEFAULT)) == 0.0


def test_what_the_original_did_not_log_does_not_count_but_what_only_the_proxy_moves_does():
    still = np.zeros(SHAPE)
    unlogged = still.copy()
    unlogged[3] = np.nan
    moves_first, moves_last = still.copy(), still.copy()
    moves_first[0], moves_last[3] = 20.0, 20.0
    assert d(sig(unlogged), sig(moves_last)) == 0.0
    assert d(sig(still), sig(moves_first)) > 1.0


def test_a_catastrophe_does_not_match_everything():
    """Same directions as the incident, but everything else moves too: farther than a fault that does nothing."""
    incident = np.zeros(SHAPE)
    incident[0] = 5.0
    all_over = np.full(SHAPE, 50.0)
    assert d(sig(incident), sig(all_over)) > d(sig(incident), sig(np.zeros(SHAPE)))


def test_nonfinite_events_are_coordinates():
    quiet = np.zeros(SHAPE)
    event = np.zeros(SHAPE)
    event[1, 4:] = 1.0
    late = np.zeros(SHAPE)
    late[1, 6:] = 1.0
    broken = sig(quiet, event)
    assert d(broken, sig(quiet, event)) == 0.0
    assert 0 < d(broken, sig(quiet, late)) < d(broken, sig(quiet))


def test_many_versions_of_one_quantity_do_not_outvote_the_rest():
    names = ("critic/rewards/mean", "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token")
    weight = space(sig(np.ones(SHAPE)), everywhere, names, DEFAULT).weight_M
    assert weight.sum() == pytest.approx(1.0)
    assert weight[0] == pytest.approx(weight[1] * 3**DEFAULT.family_power)


def gaps(original, candidates, bank=None):
    where = space(original, everywhere, METRICS, DEFAULT)
    bank = np.random.default_rng(0).standard_normal((20, *SHAPE)) if bank is None else bank
    return bootstrap(original, candidates, where, bank, bank, size(original, where, DEFAULT), DEFAULT)


def test_identical_rivals_cannot_be_told_apart_and_different_ones_can():
    incident, other = np.zeros(SHAPE), np.zeros(SHAPE)
    incident[:2], other[2:] = 12.0, 12.0
    found = gaps(
        sig(incident, noise=1.0), [sig(incident, noise=0.7), sig(incident, noise=0.7), sig(other, noise=0.7)]
    )
    assert found.alike(0, 1) and found.alike(1, 0)
    assert not found.alike(0, 2)
    gap, low, high = found.gap(0, 2)
    assert 0 < low <= high and low < gap
    assert found.nearest_rival([0, 1]) in (0, 1)
    mirrored = found.gap(2, 0)
    assert mirrored == pytest.approx((-gap, -high, -low))


def test_bootstrap_noise_keeps_the_seeds_own_correlation_and_has_a_worst_case():
    rng = np.random.default_rng(0)
    level = rng.standard_normal((50, 4, 1)) * np.ones(SHAPE)
    drawn = noise_curves(level, (500, *SHAPE), rng)
    assert np.ptp(drawn, axis=-1).max() == 0.0
    assert abs(drawn.mean()) < 0.1
    without = noise_curves(np.empty((0, *SHAPE)), (500, *SHAPE), rng)
    assert without.shape == (500, *SHAPE) and np.ptp(without, axis=-1).max() == 0.0


def test_the_metric_that_would_split_two_candidates():
    a, b = np.zeros(SHAPE), np.zeros(SHAPE)
    a[1], b[1], b[2] = 10.0, 14.0, 9.0
    assert splitting_metric(sig(a, noise=1.0), sig(b, noise=1.0), METRICS, 3.0)[0] == METRICS[2]
    assert splitting_metric(sig(a, noise=1.0), sig(a, noise=1.0), METRICS, 3.0) is None
    event = np.zeros(SHAPE)
    event[0, 5] = 1.0
    name, apart = splitting_metric(sig(a, event, noise=1.0), sig(b, noise=1.0), METRICS, 3.0)
    assert name == METRICS[0] and np.isinf(apart)
