"""Windows of lasting effects against closed forms and Monte Carlo."""

import numpy as np
import pytest

from diagnose.score.effect import effect
from diagnose.score.noise import Panel
from diagnose.score.settings import DEFAULT
from diagnose.score.simulate import ar1
from diagnose.score.windows import penalties, starts, window_effects, window_means, window_variance

rng = np.random.default_rng(11)


def blocks_of(seeds, metrics, phi):
    """Blocks that are themselves an AR(1) series, x_KMB."""
    return np.stack([ar1(rng, np.full(metrics, phi), 8) for _ in range(seeds)])


def test_windows_run_from_the_whole_run_to_the_late_half():
    assert starts(8).tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(window_means(np.arange(8.0)), [3.5, 4.0, 4.5, 5.0, 5.5])
    assert starts(1).tolist() == [0] and starts(2).tolist() == [0, 1]


def test_the_penalty_is_nothing_for_the_whole_run_and_grows():
    found = penalties(8, DEFAULT)
    assert found[0] == 0 and (np.diff(found) > 0).all()
    assert found[-1] == pytest.approx(DEFAULT.window_penalty * np.sqrt(2 * np.log(2)))


def test_a_window_with_a_missing_block_is_not_judged():
    reference, e = np.zeros((1, 8)), np.ones((1, 8))
    e[0, 2] = np.nan
    assert np.isnan(window_effects(e, reference)[0]).tolist() == [True, True, True, False, False]
    # What the healthy runs lack as well is no loss.
    reference[0, 2] = np.nan
    assert (window_effects(e, reference) == 1).all()


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_window_variance_is_that_of_the_means(phi):
    truth_W = window_means(blocks_of(20_000, 1, phi)).var(0)[0]
    x_KMB = blocks_of(20, 400, phi)
    found_MW = window_variance(x_KMB - x_KMB.mean(0), DEFAULT)
    np.testing.assert_allclose(found_MW.mean(0) / truth_W, 1.0, atol=0.12)


def test_the_model_steadies_and_its_misfit_is_put_right():
    """Less spread than 20 seeds' own variances; no bias where seeds differ in level, which AR(1) can't express."""
    for level in (0.0, 1.0):
        x_KMB = blocks_of(20, 400, 0.3) + level * rng.standard_normal((20, 400, 1))
        truth = 8**-2 * (8 + 2 * sum((8 - k) * 0.3**k for k in range(1, 8))) + level**2
        own = window_means(x_KMB).var(0, ddof=1)[:, 0] / truth
        found = window_variance(x_KMB - x_KMB.mean(0), DEFAULT)[:, 0] / truth
        if not level:
            assert found.std() < 0.9 * own.std()
        assert found.mean() == pytest.approx(1.0, abs=0.1)


def test_a_step_shows_in_the_windows_and_in_no_block():
    healthy = Panel(("critic/rewards/mean",), rng.standard_normal((200, 1, 8)), np.zeros((200, 1, 8)))
    faulty = Panel(("critic/rewards/mean",), 1.8 + np.zeros((1, 1, 8)), np.zeros((1, 1, 8)))
    found = effect(faulty, healthy, DEFAULT)
    sigma_W = np.sqrt(window_variance(healthy.x_RMB - healthy.x_RMB.mean(0), DEFAULT))[0]
    assert found.e_MB.max() < 2.2
    assert found.window_MW[0, 0] / sigma_W[0] > 4.5
