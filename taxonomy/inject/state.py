"""Injections of the category "framework and model-state consistency"."""

from __future__ import annotations

from collections.abc import Mapping

from taxonomy.stages import Action, EventRule


def weight_sync_skipped(_params: Mapping[str, float]) -> EventRule:
    """Never refresh the rollout's weights while the fault is active."""
    return lambda _context: Action.SKIP


def stale_weights(params: Mapping[str, float]) -> EventRule:
    """Refresh the rollout's weights only every `interval` steps."""
    interval = int(params["interval"])
    return lambda context: Action.DO if context.step % interval == 0 else Action.SKIP
