"""Noise scales and margins against Monte Carlo and closed forms."""

import numpy as np
import pytest
from scipy import stats

from diagnose.score.align import Clock, Contrast, Panel, frame, panel
from diagnose.score.direction import read
from diagnose.score.effect import effect, late, median_variance
from diagnose.score.noise import (
    Floors,
    Margin,
    Source,
    leave_one_out,
    margin,
    maximum_quantile,
    noise_units,
    peak,
    seed_scale,
    stand_in_scale,
    t_quantile,
    wiggle,
    within_run_scale,
)
from diagnose.score.settings import DEFAULT
from diagnose.score.simulate import World
from diagnose.score.system import Healthy, borrowing_system, floors, system

rng = np.random.default_rng(7)
WORLD = World.make()
CUT = frame(WORLD.metrics, Contrast.TWIN, {}, DEFAULT)
CLOCK = Clock(1, 60, 8)


def noise_panel(seeds, metrics=20, blocks=8):
    return Panel(
        WORLD.metrics[:metrics],
        rng.standard_normal((seeds, metrics, blocks)),
        np.zeros((seeds, metrics, blocks)),
    )


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 21])
def test_variance_of_a_median(n):
    measured = np.median(rng.standard_normal((200_000, n)), 1).var()
    assert median_variance(np.array(n)) == pytest.approx(measured, rel=0.04)


def test_t_quantile_is_scipys():
    for alpha, dof in ((0.05, 4), (1e-4, 12), (0.3, 2)):
        assert t_quantile(alpha, dof) == pytest.approx(stats.t.isf(alpha, dof))


def test_seed_scale_finds_the_standard_deviation():
    scale = seed_scale(noise_panel(400), DEFAULT)
    np.testing.assert_allclose(scale.sigma_MB, 1.0, atol=0.12)
    expected = late(rng.standard_normal((100_000, 8))).std()
    np.testing.assert_allclose(scale.late_M, expected, atol=0.07)
    assert scale.source is Source.CALIBRATED


def test_within_run_scale_ignores_a_trend_and_finds_independent_noise():
    made = noise_panel(3)
    trended = Panel(made.metrics, made.x_RMB + 5.0 * np.arange(8), made.event_RMB)
    scale = within_run_scale(trended, DEFAULT)
    assert np.median(scale.late_M) == pytest.approx(DEFAULT.residual_inflation, rel=0.15)
    np.testing.assert_allclose(scale.late_M, within_run_scale(made, DEFAULT).late_M)


def test_leave_one_out_maxima_hold_their_error_on_a_new_seed():
    """The quantile of the maxima of 20 seeds is exceeded by a 21st about as often as it says."""
    exceeded = []
    none = Floors(np.zeros(20), np.zeros((20, 1)))
    for _ in range(150):
        seeds = noise_panel(21)
        past = Panel(seeds.metrics, seeds.x_RMB[:20], seeds.event_RMB[:20])
        scale = seed_scale(past, DEFAULT)
        maxima_K = leave_one_out(past, none, DEFAULT)
        limit = Margin(maximum_quantile(maxima_K, DEFAULT.alpha_direction), np.inf, 1 / 21, weak=False)
        new = Panel(seeds.metrics, seeds.x_RMB[20:], seeds.event_RMB[20:])
        exceeded.append(read(effect(new, past, DEFAULT), scale, limit, none, DEFAULT).moved_M.any())
    assert 0.04 <= np.mean(exceeded) <= 0.16


def test_leave_one_out_is_each_seed_read_against_the_others():
    """All seeds at once give what `read` gives for one seed after the other."""
    seeds = noise_panel(6)
    none = Floors(np.zeros(20), np.zeros((20, 1)))
    maxima_K = leave_one_out(seeds, none, DEFAULT)
    for k in range(6):
        others = Panel(seeds.metrics, np.delete(seeds.x_RMB, k, 0), np.delete(seeds.event_RMB, k, 0))
        one = Panel(seeds.metrics, seeds.x_RMB[k : k + 1], seeds.event_RMB[k : k + 1])
        limit = Margin(np.inf, np.inf, 1.0, weak=True)
        seen = read(effect(one, others, DEFAULT), seed_scale(others, DEFAULT), limit, none, DEFAULT)
        assert maxima_K[k] == pytest.approx(seen.largest)


def test_maximum_quantile_is_conformal_where_there_are_enough_seeds():
    maxima = np.arange(1.0, 100.0)
    assert maximum_quantile(maxima, 0.1) == 90.0
    few = np.arange(1.0, 21.0)
    assert maximum_quantile(few, 0.02) >= 20.0


def test_fewer_seeds_make_wider_margins_and_say_so():
    margins = [margin(seed_scale(noise_panel(k), DEFAULT), 20, DEFAULT) for k in (5, 10, 15)]
    assert margins[0].c > margins[1].c > margins[2].c > DEFAULT.min_margin
    assert all(item.weak and item.c <= item.fault and item.smallest_p == 1.0 for item in margins)


def test_constant_metrics_have_no_noise_and_do_no_harm():
    x = np.zeros((20, 2, 8))
    x[:, 1] = rng.standard_normal((20, 8))
    constant = Panel(("rollout/weight_lag", "critic/rewards/mean"), x, np.zeros_like(x))
    scale = seed_scale(constant, DEFAULT)
    assert (scale.sigma_MB[0] == 0).all() and np.isfinite(scale.bank_KMB).all()
    some = Floors(np.array([0.5, 0.02]), np.array([[0.5], [0.02]]))
    assert np.isfinite(leave_one_out(constant, some, DEFAULT)).all()


def test_peak_wants_two_neighbours_on_one_side_or_a_window():
    def of(curve, windows=(0.0, 0.0, 0.0)):
        return float(peak(np.array([curve], float), np.array([windows]), DEFAULT)[0])

    assert of([0, 9, 0, 0]) == 0.0
    assert of([0, 9, 5, 0]) == 5.0
    assert of([0, -9, -5, 0]) == -5.0
    assert of([0, 9, -9, 0]) == 0.0
    assert of([0, 9, 5, np.nan], (-6.0, 0.0, 0.0)) == -6.0
    penalty = DEFAULT.window_penalty * np.sqrt(2 * np.log(2))
    assert of([0, 1, 1, 0], (0.0, 0.0, -6.0)) == pytest.approx(penalty - 6.0)
    assert of([0, 1, 1, 0], (0.0, 0.0, penalty / 2)) == 1.0


def test_nothing_within_its_floor_ever_leaves_a_margin():
    e, se = np.array([0.9, 1.1, 5.0, -5.0, np.nan]), np.array([0.0, 0.0, 0.0, 5.0, 1.0])
    z = noise_units(e, se, np.ones(5), DEFAULT)
    assert abs(z[0]) < DEFAULT.min_margin < z[1] < z[2] < np.inf
    assert z[3] == -1.0 and np.isnan(z[4])


def test_a_borrowed_scale_follows_the_borrowers_own_step_noise():
    quiet = WORLD.runs(rng, 20, 60)
    loud_world = World(WORLD.metrics, WORLD.phi_M, 2.5 * WORLD.sigma_M, WORLD.level_M, WORLD.drift_M)
    loud = loud_world.runs(rng, 2, 60)
    lent = seed_scale(panel(quiet, CLOCK, CUT), DEFAULT)
    scale = stand_in_scale(lent, panel(loud, CLOCK, CUT), wiggle(loud, CUT), wiggle(quiet, CUT), DEFAULT)
    ratio = np.median(scale.late_M / lent.late_M)
    assert 2.2 * DEFAULT.stand_in_inflation <= ratio <= 2.8 * DEFAULT.stand_in_inflation
    assert scale.source is Source.STAND_IN


@pytest.mark.parametrize(
    ("own", "other", "source"),
    [
        (20, 20, Source.CALIBRATED),
        (6, 20, Source.OWN_SEEDS),
        (6, 2, Source.OWN_SEEDS),
        (2, 20, Source.STAND_IN),
        (2, 2, Source.WITHIN_RUN),
    ],
)
def test_the_best_scale_there_is(own, other, source):
    lender_runs = Healthy.of(WORLD.runs(rng, other, 60), None, DEFAULT)
    lender = system(lender_runs, CLOCK, CUT)
    mine = Healthy.of(WORLD.runs(rng, own, 60), None, DEFAULT)
    made = borrowing_system(
        mine, CLOCK, CUT, lender, lender_runs.seeds, WORLD.runs(rng, 1, 60), past_only=False
    )
    assert made.scale.source is source and not made.borrowed


def test_without_healthy_runs_scale_and_reference_are_borrowed():
    lender_runs = Healthy.of(WORLD.runs(rng, 20, 60), None, DEFAULT)
    lender = system(lender_runs, CLOCK, CUT)
    made = borrowing_system(
        Healthy((), ()), CLOCK, CUT, lender, lender_runs.seeds, WORLD.runs(rng, 1, 60), past_only=False
    )
    assert made.borrowed and made.reference is lender.reference and made.scale.source is Source.STAND_IN


def test_mismatch_metrics_share_the_larger_floor():
    names = ("training/rollout_probs_diff_mean", "critic/rewards/mean")
    cut = frame(names, Contrast.TWIN, {}, DEFAULT)
    exact = seed_scale(Panel(names, 1e-8 * rng.standard_normal((20, 2, 8)), np.zeros((20, 2, 8))), DEFAULT)
    bf16 = seed_scale(Panel(names, 2e-3 * rng.standard_normal((20, 2, 8)), np.zeros((20, 2, 8))), DEFAULT)
    quiet, both = floors(cut, [exact], {}), floors(cut, [exact, bf16], {})
    np.testing.assert_allclose(quiet.metric_M, [1e-3, 0.02])
    np.testing.assert_allclose(both.metric_M, [DEFAULT.floor_multiple * bf16.late_M[0], 0.02])
    np.testing.assert_allclose(both.window_MW[0], DEFAULT.floor_multiple * bf16.window_MW[0])
    assert (both.window_MW[1] == 0.02).all()
