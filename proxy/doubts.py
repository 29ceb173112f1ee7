"""What may make a proxy worthless although it was built: plain sentences, each with the number behind it.

Shape suffixes: E experts, H hidden size, K kept experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from proxy.layer_stats import LayerStats
from proxy.selection import Selection

FEW_TOKENS = 32
"""Calibration tokens an expert, on average, below which counts and contexts are mostly noise."""
UNSTABLE = 0.6
"""Half-split Jaccard below which other calibration rows would have chosen other experts."""
PARALLEL = 0.98
"""Cosine of two router rows above which a router hardly tells the experts apart."""


def of_calibration(
    stats: Sequence[LayerStats], agreement: Sequence[float] | None, experts: int, top_k: int
) -> list[str]:
    """Return what calibration leaves in doubt.

    Args:
        stats: Statistics by layer.
        agreement: Half-split Jaccard of each layer's selection, None without halves.
        experts: Experts kept a layer.
        top_k: Experts a token is routed to.
    """
    doubts = []
    starved = [layer.layer for layer in stats if layer.tokens and (layer.counts_E > 0).sum() < experts]
    if starved:
        doubts.append(
            f"fewer than {experts} experts were ever active in layers {starved}: "
            "the rest was chosen by router distance alone"
        )
    each = min((layer.tokens * top_k / len(layer.counts_E) for layer in stats if layer.tokens), default=None)
    if each is not None and each < FEW_TOKENS:
        doubts.append(
            f"calibration has {each:.0f} tokens an expert, fewer than {FEW_TOKENS}: use more calibration tokens"
        )
    if agreement and sum(agreement) / len(agreement) < UNSTABLE:
        worst = int(np.argmin(agreement))
        doubts.append(
            f"the two calibration halves would keep other experts: of all that either keeps, both keep "
            f"{sum(agreement) / len(agreement):.0%} (layer {stats[worst].layer}: {agreement[worst]:.0%}): "
            "calibrate on more tokens"
        )
    return doubts


def of_routers(stats: Sequence[LayerStats], selections: Mapping[int, Selection]) -> list[str]:
    """Return layers in which two kept experts have nearly parallel router rows."""
    twins = []
    for layer in stats:
        kept = list(selections[layer.layer].kept)
        row_KH = layer.router_EH[kept]
        unit_KH = row_KH / np.maximum(np.linalg.norm(row_KH, axis=1, keepdims=True), 1e-30)
        cosine_KK = unit_KH @ unit_KH.T - 2 * np.eye(len(kept))
        if len(kept) > 1 and cosine_KK.max() > PARALLEL:
            a, b = np.unravel_index(np.argmax(cosine_KK), cosine_KK.shape)
            twins.append((layer.layer, kept[min(a, b)], kept[max(a, b)], float(cosine_KK.max())))
    if not twins:
        return []
    at, first, second, cosine = max(twins, key=lambda twin: twin[3])
    return [
        f"router rows of kept experts are nearly parallel in {len(twins)} layers (layer {at}, experts {first} "
        f"and {second}: cosine {cosine:.3f}): routing between them is close to a coin toss"
    ]


def of_cut_rows(rows: Sequence[Sequence[int]], context: int) -> list[str]:
    """Return how many calibration rows are longer than the model's context (0: unknown), so that they are cut."""
    longer = sum(len(row) > context for row in rows) if context else 0
    if not longer:
        return []
    return [
        f"{longer} of {len(rows)} calibration rows are longer than the model's {context} tokens and are cut"
    ]


def of_overlap(rows: Sequence[Sequence[int]], tests: Sequence[Sequence[int]]) -> list[str]:
    """Return how many calibration rows begin with a test prompt, token by token."""
    by_length: dict[int, set[tuple[int, ...]]] = {}
    for test in tests:
        if test:
            by_length.setdefault(len(test), set()).add(tuple(test))
    overlapping = sum(
        any(tuple(row[:length]) in prompts for length, prompts in by_length.items()) for row in rows
    )
    if not overlapping:
        return []
    return [
        f"{overlapping} of {len(rows)} calibration rows begin with a test prompt: what is measured on those "
        "prompts flatters the proxy"
    ]
