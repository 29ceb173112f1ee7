"""``--alpha auto``: weights of the three views that do best on calibration rows which the selection did not see.

The weights are gone through on a grid over the simplex. Each selects experts from one half of the rows; what
share of the other half's routed choices falls on those experts is its *routed mass*. The best few then run: the
original with all other experts masked out of the choice predicts the next token on held-out rows, and how
often it says what the whole original says is its *agreement*. The sum of both decides. This costs one more pass
over the checkpoint for each of them; without rows (statistics handed over) routed mass decides alone.

Shape suffixes: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.checkpoint import Checkpoint
from proxy.errors import BuildError, CannotPredict
from proxy.families import Layout
from proxy.layer_stats import LayerStats
from proxy.rows import Rows, cut_rows
from proxy.selection import Selection
from proxy.strategies import Alpha, Request, Strategy

STEPS = 3
"""Steps of the grid from 0 to 1: ten points."""
FINALISTS = 3
AGREEMENT_TOKENS = 2048


def simplex(steps: int = STEPS) -> list[Alpha]:
    """Return the grid's points, the centre first, so that ties stay with the paper's even weights."""
    points = [
        (a / steps, b / steps, (steps - a - b) / steps)
        for a in range(steps + 1)
        for b in range(steps + 1 - a)
    ]
    return sorted(points, key=lambda point: (max(point) - min(point), point))


def search_alpha(
    chosen: Strategy,
    request: Request,
    stats: Sequence[LayerStats],
    checkpoint: Checkpoint,
    layout: Layout,
    rows: Rows | None,
) -> tuple[Request, dict[str, Any]]:
    """Return the request with the weights that did best, and what was found, JSON-able.

    Args:
        chosen: The strategy, which has to use all three views.
        request: Budget and options.
        stats: Statistics by layer, with halves.
        checkpoint: The checkpoint.
        layout: Its layout.
        rows: Calibration rows; their odd ones are the half that selection does not see.

    Raises:
        BuildError: The strategy has no weights to look for, or there is one calibration row only.
    """
    check_search(chosen, min(2 if layer.halves else 1 for layer in stats))
    found: dict[tuple[tuple[int, ...], ...], tuple[Alpha, float, dict[int, Selection]]] = {}
    for alpha in simplex():
        if layout.top_k == 1 and alpha[1]:
            continue  # no two experts are ever active together
        asked = replace(request, alpha=alpha)
        picked = {s.layer: chosen.select(s.halves[0], asked) for s in stats if s.halves}
        key = tuple(selection.kept for selection in picked.values())
        found.setdefault(key, (alpha, routed_mass(stats, picked), picked))
    best = sorted(found.values(), key=lambda one: -one[1])[:FINALISTS]
    report: list[dict[str, Any]] = [{"alpha": list(alpha), "routed_mass": mass} for alpha, mass, _ in best]
    by_mass: dict[str, Any] = {"alpha": list(best[0][0]), "finalists": report}
    if rows is None or len(best) == 1 or layout.family.tap != "experts":
        return replace(request, alpha=best[0][0]), by_mass
    held_out = cut_rows(rows[1::2], AGREEMENT_TOKENS, checkpoint.config)
    try:
        whole = predictions(checkpoint, layout, held_out, None)
    except CannotPredict as error:
        return replace(request, alpha=best[0][0]), by_mass | {"by_routed_mass_alone": str(error)}
    scores = []
    for entry, (_, mass, picked) in zip(report, best, strict=True):
        masked = predictions(checkpoint, layout, held_out, picked)
        agreement = sum(a == b for a, b in zip(whole, masked, strict=True)) / len(whole)
        entry["agreement"] = agreement
        scores.append(mass + agreement)
    winner = best[scores.index(max(scores))][0]
    return replace(request, alpha=winner), {"alpha": list(winner), "finalists": report, "tokens": len(whole)}


def check_search(chosen: Strategy, rows: int) -> None:
    """Refuse a search that cannot be made, before any work is done.

    Args:
        chosen: The strategy.
        rows: Number of calibration rows.

    Raises:
        BuildError: The strategy has no weights to look for, or there is one calibration row only.
    """
    if len(chosen.views) < 3:
        raise BuildError(
            f"strategy {chosen.name} has no three views to weigh", "leave --alpha out, or use multi_view"
        )
    if rows < 2:
        raise BuildError("one calibration row cannot be split into halves", "calibrate on more rows")


def routed_mass(stats: Sequence[LayerStats], picked: Mapping[int, Selection]) -> float:
    """Return the share of the second half's routed choices that falls on the picked experts, over all layers."""
    shares = []
    for layer in stats:
        assert layer.halves is not None
        counts_E = layer.halves[1].counts_E
        if counts_E.sum():
            shares.append(float(counts_E[list(picked[layer.layer].kept)].sum() / counts_E.sum()))
    return sum(shares) / len(shares) if shares else 0.0


def predictions(
    checkpoint: Checkpoint, layout: Layout, rows: Rows, picked: Mapping[int, Selection] | None
) -> list[int]:
    """Return the most likely next token after every token of the rows; `picked` masks other experts."""
    from proxy.walk import Pass

    return Pass(checkpoint, layout, rows).predict(picked)
