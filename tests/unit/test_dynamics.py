import numpy as np
import pytest
from scipy import stats

from diagnose.curves import Curves
from diagnose.dynamics import dynamics_rows, gain_rows

STARTS, ENDS = [0.40, 0.42, 0.38, 0.41], [0.60, 0.70, 0.55, 0.66]


def run(start, end):
    steps = np.arange(11.0)
    held_out = np.full(11, np.nan)
    held_out[[0, 10]] = start, end
    training = np.r_[np.nan, np.linspace(start, end, 10)]
    values = {
        "val-core/reward/mean": held_out,
        "val-core/answer/mean": held_out,
        "critic/rewards/mean": training,
    }
    return Curves("run", steps, values)


RUNS = [run(start, end) for start, end in zip(STARTS, ENDS, strict=True)]


def test_the_gain_is_the_mean_over_seeds_with_its_t_interval():
    reward, answers = gain_rows("m", RUNS)
    gains = np.array(ENDS) - STARTS
    assert reward["gain"] == pytest.approx(gains.mean())
    assert reward["low"] == pytest.approx(stats.ttest_1samp(gains, 0).confidence_interval(0.95).low)
    assert reward["smallest"] == pytest.approx(gains.min())
    assert answers["gain"] == pytest.approx(0.8 * gains.mean())


def test_one_seed_has_no_interval():
    assert gain_rows("m", RUNS[:1])[0]["low"] is None


def test_dynamics_leave_out_the_step_before_training():
    (row,) = dynamics_rows("m", RUNS)
    assert len(row["curve"]) == 10 and np.isfinite(row["curve"]).all()
    assert row["change"] == pytest.approx(row["end"] - row["start"])
