"""Clocks, blocks, transforms and events against what can be counted by hand."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from diagnose.curves import Curves
from diagnose.score.align import (
    Clock,
    Contrast,
    block_count,
    first_update,
    frame,
    nanmean,
    nanmedian,
    panel,
    transform,
)
from diagnose.score.plan import Replay, plan
from diagnose.score.settings import DEFAULT
from taxonomy.metrics import METRIC_BY_NAME

REWARD, KL, GRAD = "critic/rewards/mean", "actor/kl_loss", "actor/grad_norm"


def run(values, steps=None, nonfinite=None, name=REWARD, **kwargs):
    values = np.asarray(values, float)
    steps = np.arange(1, len(values) + 1) if steps is None else np.asarray(steps)
    return Curves("test", steps.astype(float), {name: values}, nonfinite or {}, **kwargs)


def cut(*names, contrast=Contrast.TWIN, digits=None):
    return frame(names or (REWARD,), contrast, digits or {}, DEFAULT)


@settings(max_examples=60, deadline=None)
@given(
    arrays(float, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(-1e6, 1e6)),
    st.data(),
)
def test_finite_medians_and_means_equal_numpys(x, data):
    holes = data.draw(arrays(bool, x.shape))
    x = np.where(holes, np.nan, x)
    for axis in (0, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected_median, expected_mean = np.nanmedian(x, axis), np.nanmean(x, axis)
        np.testing.assert_allclose(nanmedian(x, axis), expected_median)
        np.testing.assert_allclose(nanmean(x, axis), expected_mean)


@pytest.mark.parametrize(
    ("n", "blocks"), [(300, 8), (40, 8), (39, 7), (20, 4), (19, 4), (8, 4), (5, 2), (1, 1)]
)
def test_number_of_blocks(n, blocks):
    assert block_count(n, DEFAULT) == blocks


def test_blocks_are_medians_of_the_updates_since_activation():
    values = np.arange(1.0, 101.0)
    made = panel([run(values)], Clock(start=21, horizon=40, blocks=8), cut())
    expected = [np.median(values[20 + 5 * b : 25 + 5 * b]) for b in range(8)]
    np.testing.assert_allclose(made.x_RMB[0, 0], expected)


def test_every_step_lies_in_exactly_one_block():
    values = np.ones(60)
    for horizon in range(8, 60):
        made = Clock(start=1, horizon=horizon, blocks=8)
        cuts = np.searchsorted(np.arange(1, 61), made.edges_B1, side="right")
        assert np.diff(cuts).sum() == horizon
        assert np.isfinite(panel([run(values)], made, cut()).x_RMB).all()


def test_past_contrast_takes_off_the_median_before_the_fault():
    values = np.r_[np.full(20, 3.0), np.full(40, 5.0)]
    made = panel([run(values)], Clock(21, 40, 8, baseline=10), cut(contrast=Contrast.PAST))
    np.testing.assert_allclose(made.x_RMB, 2.0)


def test_start_contrast_leaves_metrics_in_absolute_units_alone():
    gap = "training/rollout_probs_diff_mean"
    both = Curves("t", np.arange(1.0, 41.0), {REWARD: np.full(40, 0.4), gap: np.full(40, 0.02)})
    made = panel([both], Clock(1, 40, 8), cut(REWARD, gap, contrast=Contrast.START))
    np.testing.assert_allclose(made.x_RMB[0, 0], 0.0)
    np.testing.assert_allclose(made.x_RMB[0, 1], 0.02)


def test_a_run_that_ended_early_has_no_later_blocks():
    made = panel([run(np.ones(22))], Clock(1, 40, 8), cut())
    assert np.isfinite(made.x_RMB[0, 0]).tolist() == [True] * 4 + [False] * 4


def test_sparse_metrics_fill_the_blocks_they_were_logged_in():
    made = panel([run([1.0, 2.0, 3.0], steps=[5, 25, 40])], Clock(1, 40, 8), cut())
    np.testing.assert_allclose(made.x_RMB[0, 0, [0, 4, 7]], [1, 2, 3])
    assert np.isnan(made.x_RMB[0, 0, [1, 2, 3, 5, 6]]).all()


def test_runs_logged_at_different_steps_come_out_as_if_alone():
    a, b = run(np.arange(40.0)), run(np.arange(20.0), steps=np.arange(2, 42, 2))
    clock = Clock(1, 40, 8)
    together = panel([a, b, a], clock, cut()).x_RMB
    for r, one in enumerate((a, b, a)):
        np.testing.assert_array_equal(together[r], panel([one], clock, cut()).x_RMB[0])


def test_nonfinite_values_are_events_and_never_enter_a_median():
    values = np.ones(40)
    values[20:] = np.nan
    bad = run(values, nonfinite={GRAD: tuple(range(21, 41))}, name=GRAD)
    made = panel([bad], Clock(1, 40, 8), cut(GRAD))
    assert made.event_RMB[0, 0].tolist() == [0] * 4 + [1] * 4
    assert np.isfinite(made.x_RMB[0, 0]).tolist() == [True] * 4 + [False] * 4


def test_a_single_skipped_step_is_an_event_without_costing_its_block():
    values = np.ones(40)
    values[12] = np.nan
    made = panel([run(values, nonfinite={GRAD: (13,)}, name=GRAD)], Clock(1, 40, 8), cut(GRAD))
    assert made.event_RMB[0, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert np.isfinite(made.x_RMB).all()


def test_a_nan_beside_finite_loss_and_gradients_is_cosmetic():
    values = {KL: np.r_[np.nan, np.ones(39)], GRAD: np.ones(40)}
    steps = np.arange(1.0, 41.0)
    alone = Curves("t", steps, values, {KL: (1,)})
    broken = Curves("t", steps, values, {KL: (1,), "actor/pg_loss": (1,)})
    assert not panel([alone], Clock(1, 40, 8), cut(KL)).event_RMB.any()
    assert panel([broken], Clock(1, 40, 8), cut(KL)).event_RMB.any()


def test_transforms():
    kl = METRIC_BY_NAME[KL]
    np.testing.assert_allclose(transform(kl, np.array([0.0, 0.0099])), [-4.0, -2.0])
    np.testing.assert_allclose(transform(kl, np.array([0.0]), 1e-3), [-3.0])
    np.testing.assert_allclose(transform(METRIC_BY_NAME[REWARD], np.array([-0.5])), [-0.5])


def test_a_log_that_rounds_makes_both_logs_blind_below_its_last_digit():
    exact = run(np.full(40, 2e-4), name=KL)
    rounded = run(np.zeros(40), name=KL, resolution={KL: 1e-2})
    made = panel([exact, rounded], Clock(1, 40, 8), cut(KL, digits={KL: 1e-2}))
    assert abs(made.x_RMB[0] - made.x_RMB[1]).max() < 0.01


@pytest.mark.parametrize(
    ("steps", "first"),
    [
        (range(0, 50), 1),
        (range(1, 50), 1),
        (range(5, 50, 5), 1),
        (range(10, 500, 10), 1),
        (range(300, 350), 300),
    ],
)
def test_where_a_log_starts(steps, first):
    steps = list(steps)
    assert first_update([run(np.ones(len(steps)), steps=steps)]) == first


def test_horizon_is_the_shortest_since_each_ones_own_activation():
    long, short = run(np.ones(500)), run(np.ones(60))
    laid = plan([long], [long], [short], [Replay("f", [short], from_step=11)], 301, DEFAULT)
    assert (laid.original.start, laid.proxy[11].start) == (301, 11)
    assert laid.original.horizon == laid.proxy[11].horizon == 50
    assert laid.enough and laid.contrast is Contrast.TWIN


def test_one_replay_that_died_early_does_not_shorten_the_comparison():
    whole, dead = run(np.ones(60)), run(np.ones(7))
    laid = plan([whole], [whole], [whole], [Replay("a", [whole]), Replay("b", [dead])], 1, DEFAULT)
    assert laid.original.horizon == 60


def test_past_needs_a_baseline_on_both_sides():
    whole = run(np.ones(80))
    at_onset = plan([whole], [], [whole], [Replay("a", [whole], from_step=31)], 31, DEFAULT)
    at_start = plan([whole], [], [whole], [Replay("a", [whole])], 31, DEFAULT)
    assert (at_onset.contrast, at_onset.original.baseline) == (Contrast.PAST, 30)
    assert at_start.contrast is Contrast.START
