"""Anomaly types, trends, onsets and directions on curves with a known answer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from diagnose.result import AnomalyType, Direction
from diagnose.score.align import Clock, Contrast, frame
from diagnose.score.direction import directions
from diagnose.score.onset import incident_onset
from diagnose.score.settings import DEFAULT
from diagnose.score.shape import (
    anomaly_type,
    change_point,
    collapsed,
    effect_onset,
    onset_block,
    onset_interval,
    spike_limit,
    spikes,
    trend,
    type_agreement,
)
from diagnose.score.simulate import World

WORLD = World.make()


def kind(curve, *, c=3.0, event=False, spike=False, collapse=False):
    e = np.asarray(curve, float)
    moved = onset_block(e, c) is not None or abs(np.median(e[4:])) > c
    onset = effect_onset(e, c) if moved else None
    return anomaly_type(e, e, c, onset, event=event, spike=spike, collapsed=collapse, settings=DEFAULT)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([0] * 8, AnomalyType.NONE),
        ([9] * 8, AnomalyType.IMMEDIATE),
        ([-9, -8, -9, -10, -9, -8, -9, -9], AnomalyType.IMMEDIATE),
        ([1, 2, 4, 6, 8, 10, 12, 14], AnomalyType.GRADUAL),
        ([5, 8, 11, 14, 17, 20, 23, 26], AnomalyType.GRADUAL),
        ([0, 0, 0, 0, 9, 9, 9, 9], AnomalyType.DELAYED),
        ([0, 9, 9, 9, 1, 0, 0, 0], AnomalyType.TRANSIENT),
        ([9, 9, 9, 0, 0, 1, 0, 0], AnomalyType.TRANSIENT),
    ],
)
def test_types(curve, expected):
    assert kind(curve) is expected


def test_types_that_medians_do_not_show():
    assert kind([9] * 8, event=True) is AnomalyType.NONFINITE
    assert kind([0] * 8, spike=True) is AnomalyType.SPIKE
    assert kind([-9] * 8, collapse=True) is AnomalyType.COLLAPSE


def test_type_agreement_is_symmetric_and_lenient_to_strength():
    for a in AnomalyType:
        assert type_agreement(a, a) == 1.0
        for b in AnomalyType:
            assert type_agreement(a, b) == type_agreement(b, a)
    assert type_agreement(AnomalyType.IMMEDIATE, AnomalyType.GRADUAL) == 0.5
    assert type_agreement(AnomalyType.IMMEDIATE, AnomalyType.TRANSIENT) == 0.0


def test_trend_is_uncentred():
    """Two noisy steps have flat effect curves: alike by cosine, unrelated by correlation."""
    rng = np.random.default_rng(0)
    a, b = 10 + rng.standard_normal(8), 4 + 0.4 * rng.standard_normal(8)
    assert trend(a, b) > 0.98
    assert trend(a, -b) < -0.9
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.7


def test_trend_forgives_one_block():
    a = np.array([0, 0, 0, 1, 2, 3, 4, 5.0])
    assert trend(a[1:], a[:-1]) == pytest.approx(1.0)
    assert trend(np.zeros(8), a) is None


@settings(max_examples=80, deadline=None)
@given(arrays(float, 8, elements=st.floats(-50, 50)), arrays(float, 8, elements=st.floats(-50, 50)))
def test_trend_properties(a, b):
    left, right = trend(a, b), trend(b, a)
    assert (left is None) == (right is None)
    if left is not None:
        assert left == pytest.approx(right)
        assert -1 - 1e-9 <= left <= 1 + 1e-9
        if np.linalg.norm(a) > 1e-3:
            assert trend(a, a) == pytest.approx(1.0)


@settings(max_examples=80, deadline=None)
@given(arrays(float, 8, elements=st.floats(-50, 50)))
def test_the_change_point_is_the_least_squares_step(curve):
    """Against the definition: 0 before block b, the mean from b on, for every b that leaves two blocks."""
    residual = [
        (curve[:b] ** 2).sum() + ((curve[b:] - curve[b:].mean()) ** 2).sum() for b in range(len(curve) - 1)
    ]
    found = change_point(curve)
    assert residual[found] == pytest.approx(min(residual), abs=1e-6)


def test_the_onset_of_a_weak_step_is_its_change_point_and_of_a_strong_one_its_first_block():
    weak = np.array([0.3, -0.4, 0.2, 2.2, 1.9, 2.6, 2.0, 2.4])
    assert onset_block(weak, 3.0) is None and effect_onset(weak, 3.0) == 3
    growing = np.array([0.0, 0.0, 4.0, 6.0, 9.0, 20.0, 40.0, 60.0])
    assert change_point(growing) > effect_onset(growing, 3.0) == 2
    gone = np.array([np.nan, 0.1, np.nan, 2.5, 2.5, np.nan, 2.5, 2.5])
    assert change_point(gone) == 3
    assert change_point(np.full(8, np.nan)) is None


def test_a_weak_lasting_effect_is_no_transient():
    assert kind([2.2, 1.9, 3.4, 3.1, 2.6, 2.0, 2.4, 2.1], c=3.0) is AnomalyType.IMMEDIATE


def test_onset_wants_two_blocks_on_one_side():
    assert onset_block(np.array([0, 9, 0, 9, 9, 0.0]), 3.0) == 3
    assert onset_block(np.array([0, 9, -9, 9.0]), 3.0) is None
    assert onset_interval(None, Clock(1, 40, 8)) is None
    assert onset_interval(3, Clock(1, 40, 8)) == (11, 20)
    assert onset_interval(0, Clock(31, 40, 8)) == (31, 35)


@pytest.mark.parametrize("start", [1, 18, 33, 41, 57])
def test_the_onset_interval_holds_the_step(start):
    rng = np.random.default_rng(start)
    hits = 0
    for _ in range(10):
        faulty = [WORLD.run(rng, 80, {"actor/entropy": 15.0, "actor/pg_loss": -12.0}, start=start)]
        onset = incident_onset(faulty, WORLD.runs(rng, 3, 80), WORLD.runs(rng, 20, 80))
        assert onset is not None and {"actor/entropy", "actor/pg_loss"} <= set(onset.metrics)
        hits += onset.low <= start <= onset.high
    assert hits >= 9


def test_without_a_twin_a_jump_is_found_and_placed_and_a_drift_is_none():
    rng = np.random.default_rng(5)
    healthy = WORLD.runs(rng, 2, 80)
    found = [
        incident_onset(
            [WORLD.run(rng, 80, {"actor/entropy": 20.0, "actor/pg_loss": -20.0}, start=31)], (), healthy
        )
        for _ in range(10)
    ]
    assert sum(item is not None and item.sharp and abs(item.step - 31) <= 1 for item in found) >= 9
    quiet = [incident_onset([WORLD.run(rng, 80)], (), healthy) for _ in range(40)]
    assert sum(item is not None for item in quiet) <= 3


def test_a_nonfinite_value_is_an_onset_of_its_own():
    run = WORLD.run(np.random.default_rng(1), 40)
    values = dict(run.values)
    values["actor/grad_norm"] = np.where(run.steps_N >= 23, np.nan, values["actor/grad_norm"])
    broken = type(run)("t", run.steps_N, values, {"actor/grad_norm": tuple(range(23, 41))})
    onset = incident_onset([broken])
    assert onset is not None and (onset.low, onset.high, onset.step, onset.sharp) == (23, 23, 23, True)


def test_spikes_are_few_points_beyond_anything_healthy():
    rng = np.random.default_rng(2)
    cut, clock = frame(WORLD.metrics, Contrast.TWIN, {}, DEFAULT), Clock(1, 60, 8)
    limit_M = spike_limit(WORLD.runs(rng, 5, 60), clock, cut)
    at = WORLD.metrics.index("actor/entropy")
    curve = np.zeros(60)
    curve[[17, 41]] = 60.0
    spiky = spikes([WORLD.run(rng, 60, {"actor/entropy": curve})], clock, cut, limit_M)
    assert spiky[at] and spiky.sum() <= 2
    assert not spikes([WORLD.run(rng, 60)], clock, cut, limit_M).any()


def test_collapse_is_the_loss_of_the_whole_level():
    rng = np.random.default_rng(3)
    clock, healthy = Clock(1, 60, 8), WORLD.runs(rng, 3, 60)
    sigma = WORLD.sigma_M[0]
    gone = WORLD.run(rng, 60, {"critic/rewards/mean": -(0.5 + 8 * sigma) / sigma})
    values = {name: np.maximum(row, 0.0) for name, row in gone.values.items()}
    gone = type(gone)("t", gone.steps_N, values)
    assert collapsed([gone], healthy, "critic/rewards/mean", clock, clock, DEFAULT)
    assert not collapsed(healthy[:1], healthy[1:], "critic/rewards/mean", clock, clock, DEFAULT)
    assert not collapsed([gone], healthy, "actor/grad_norm", clock, clock, DEFAULT)


FLIP = {Direction.UP: Direction.DOWN, Direction.DOWN: Direction.UP}


@settings(max_examples=120, deadline=None)
@given(
    st.floats(-20, 20),
    st.floats(0, 5),
    st.floats(-20, 20),
    st.floats(0.1, 10),
    st.floats(3, 6),
    st.floats(1, 4),
)
def test_directions_are_antisymmetric(late, se, peak, bound, c, quantile):
    def of(sign):
        return directions(
            np.array([sign * late]), np.array([se]), np.array([sign * peak]), np.array([bound]), c, quantile
        )[0]

    assert of(-1) is FLIP.get(of(1), of(1))


def test_none_is_only_claimed_when_shown():
    def of(late, se):
        return directions(np.array([late]), np.array([se]), np.zeros(1), np.array([3.0]), 4.0, 1.7)[0]

    assert of(0.5, 1.0) is Direction.NONE
    assert of(2.0, 1.0) is Direction.UNDETERMINED
    assert of(0.0, 2.0) is Direction.UNDETERMINED
    assert of(np.nan, 1.0) is Direction.UNDETERMINED
