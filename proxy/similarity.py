"""The three expert distances of the paper and their fusion: pure functions on float64 arrays.

Equations: the paper's "Multi-View Expert Similarity" (D_r, D_c, D_f, D_joint). Every distance
is symmetric with a zero diagonal.

Shape suffixes: E experts, H hidden size; `_EE` is a square over experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist, squareform
from scipy.stats import rankdata

from proxy.errors import BuildError

Array = NDArray[np.float64]

EPSILON = 1e-8
NORMALISATIONS = ("min_max", "max", "rank")
VIEWS = ("router", "coactivation", "context")


def router_distance(router_EH: Array) -> Array:
    """Return D_r(i, j) = ‖w_i − w_j‖₂ between router rows, [E, E]."""
    return _pairwise(router_EH)


def coactivation_distance(counts_E: Array, coactivation_EE: Array) -> Array:
    """Return D_c(i, j) = 1 − n_ij / (√(n_i · n_j) + ε), in [0, 1].

    Args:
        counts_E: Tokens routed to each expert.
        coactivation_EE: Tokens routed to both experts of a pair; the diagonal is not looked at.
    """
    distance_EE = 1.0 - coactivation_EE / (np.sqrt(np.outer(counts_E, counts_E)) + EPSILON)
    np.fill_diagonal(distance_EE, 0.0)
    return distance_EE


def context_distance(weighted_hidden_EH: Array) -> Array:
    """Return D_f(i, j) = ‖s_i / (‖s_i‖ + ε) − s_j / (‖s_j‖ + ε)‖₂, in [0, 2].

    Args:
        weighted_hidden_EH: s_i = Σ_t p_{t,i} h_t, the routed context of each expert.
    """
    norm_E1 = np.linalg.norm(weighted_hidden_EH, axis=1, keepdims=True)
    return _pairwise(weighted_hidden_EH / (norm_E1 + EPSILON))


def normalise(distance_EE: Array, how: str) -> Array:
    """Bring a distance to [0, 1] (the tilde of D_joint); the diagonal stays 0.

    Args:
        distance_EE: A distance.
        how: "min_max" over the off-diagonal pairs, "max" (divide by the largest) or "rank" (average ranks).
            Distances that are all equal become 0: such a view tells no two experts apart.
    """
    assert how in NORMALISATIONS, how
    pairs = squareform(distance_EE, checks=False)
    if pairs.size == 0:
        return np.zeros_like(distance_EE)
    low, high = pairs.min(), pairs.max()
    if how == "max":
        scaled = pairs / high if high > 0 else np.zeros_like(pairs)
    elif high == low:
        scaled = np.zeros_like(pairs)
    elif how == "min_max":
        scaled = (pairs - low) / (high - low)
    else:
        scaled = (rankdata(pairs) - 1) / (pairs.size - 1)
    return np.asarray(squareform(scaled), np.float64)


def joint_distance(
    router_EH: Array,
    counts_E: Array,
    coactivation_EE: Array,
    weighted_hidden_EH: Array,
    alpha: tuple[float, float, float],
    normalisation: str = "min_max",
) -> Array:
    """Return D_joint = α_r·D̃_r + α_c·D_c + α_f·D̃_f, [E, E]; as in the paper, D_c carries no tilde.

    Args:
        router_EH: Router rows.
        counts_E: Tokens routed to each expert.
        coactivation_EE: Tokens routed to both experts of a pair.
        weighted_hidden_EH: Routed context of each expert.
        alpha: Weights (α_r, α_c, α_f) of the views; see `check_alpha`.
        normalisation: See `normalise`.
    """
    alpha_r, alpha_c, alpha_f = alpha
    joint_EE = np.zeros((len(counts_E), len(counts_E)))
    if alpha_r:
        joint_EE += alpha_r * normalise(router_distance(router_EH), normalisation)
    if alpha_c:
        joint_EE += alpha_c * coactivation_distance(counts_E, coactivation_EE)
    if alpha_f:
        joint_EE += alpha_f * normalise(context_distance(weighted_hidden_EH), normalisation)
    return joint_EE


def check_alpha(
    alpha: tuple[float, float, float], views: tuple[str, ...] = VIEWS
) -> tuple[float, float, float]:
    """Return the weights with those of unused views set to 0, scaled to the sum 1.

    Raises:
        BuildError: A weight is negative or not finite, or nothing is left.
    """
    if len(alpha) != len(VIEWS) or not all(np.isfinite(a) and a >= 0 for a in alpha):
        raise BuildError(
            f"alpha is {tuple(alpha)}, expected three weights of at least 0", "1,1,1 weighs the views evenly"
        )
    used = [weight if view in views else 0.0 for view, weight in zip(VIEWS, alpha, strict=True)]
    if not sum(used) > 0:
        raise BuildError(
            f"alpha {tuple(alpha)} leaves the views {'+'.join(views)} without any weight",
            "give one of them a weight, or choose another --strategy",
        )
    a, b, c = (float(weight) / sum(used) for weight in used)
    return a, b, c


def _pairwise(points_EH: Array) -> Array:
    """Return Euclidean distances between rows, exactly symmetric with an exactly zero diagonal."""
    return np.asarray(squareform(pdist(points_EH.astype(np.float64, copy=False))), np.float64)
