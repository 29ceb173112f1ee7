"""Fitted strengths: the interval holds the true strength as often as it should, and is no wider than it must be."""

import math

import numpy as np
import pytest

from diagnose.score.distance import Signature, Space, size
from diagnose.score.settings import DEFAULT
from diagnose.score.severity import severity_interval
from diagnose.score.specificity import Gaps, bootstrap

M, B, K = 16, 8, 20
TRIED = (0.5, 1.0, 1.4, 2.0, 4.0)


def residuals(rng, n):
    """AR(1) residual curves of unit variance, as healthy seeds have them."""
    x = rng.standard_normal((n, M, B))
    for b in range(1, B):
        x[..., b] = 0.6 * x[..., b - 1] + 0.8 * x[..., b]
    return x


def signature(rng, effect_MB):
    return Signature(effect_MB + residuals(rng, 1)[0], np.zeros((M, B)), np.ones((M, B)))


def fitted(seed, truth, effect=8.0, tried=TRIED):
    """Return (nearest, low, high) for an incident of strength `truth`; half of the metrics move, ramps and steps."""
    rng = np.random.default_rng(seed)
    size_M = effect * rng.uniform(0.3, 1.5, M) * rng.choice([-1, 1], M) * (np.arange(M) < M // 2)
    shape_MB = np.where(rng.random((M, 1)) < 0.5, np.linspace(0.1, 1, B), 1.0)
    pattern_MB = size_M[:, None] * shape_MB
    where = Space(np.ones((M, B), bool), np.full(M, 1 / M))
    original = signature(rng, truth * pattern_MB)
    replays = [signature(rng, s * pattern_MB) for s in tried]
    bank_O, bank_P = residuals(rng, K), residuals(rng, K)
    gaps = bootstrap(original, replays, where, bank_O, bank_P, size(original, where, DEFAULT), DEFAULT)
    return (tried[int(np.argmin(gaps.d_C))], *severity_interval(tried, gaps))


@pytest.mark.parametrize("truth", [0.7, 1.0, 2.0, 2.8])
def test_the_interval_holds_the_true_strength(truth):
    found = [fitted(seed, truth) for seed in range(40)]
    held = sum(low <= truth <= high for _, low, high in found)
    assert held >= 36
    if truth in TRIED:  # otherwise both neighbours fit, and the outermost strength may be one of them
        assert (
            sum(high / max(low, 1e-9) <= 4 for _, low, high in found) >= 24
        )  # two octaves, of the three tried


def test_a_weak_effect_leaves_strengths_open_that_a_strong_one_rules_out():
    wide = [fitted(seed, 1.0, effect=1.5) for seed in range(10)]
    narrow = [fitted(seed, 1.0, effect=20.0) for seed in range(10)]

    def span(found):
        return np.mean([math.log2(min(high, 16) / max(low, 1 / 16)) for _, low, high in found])

    assert span(wide) > 2 * span(narrow)


def test_beyond_the_outermost_strength_tried_the_interval_is_open():
    nearest, low, high = fitted(3, 4.0)
    assert nearest == 4.0 and high == math.inf and 1 < low < 4
    nearest, low, high = fitted(3, 0.3, tried=(0.25, 1.0, 4.0))
    assert nearest == 0.25 and low == 0.0 and high == pytest.approx(0.5)


def test_ends_lie_half_way_to_the_next_strength_that_is_ruled_out():
    d_C = np.array([3.0, 1.0, 1.05, 3.0])
    gaps = Gaps(d_C, d_C + 0.1 * np.random.default_rng(1).standard_normal((200, 4)), 0.02, 0.05)
    assert severity_interval([0.5, 1.0, 2.0, 4.0], gaps) == pytest.approx((math.sqrt(0.5), math.sqrt(8)))
