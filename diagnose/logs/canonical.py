"""Raw log keys → canonical metrics (`taxonomy.metrics`): renames, validation keys, scaled keys.

A canonical metric may be offered by several raw keys of a run (``actor/entropy`` and its old name
``actor/entropy_loss``). Each offer has a rank, and the best one wins per run; the others stay unmapped.
KL to the reference policy and KL to the old policy (``actor/ppo_kl``) are different quantities and share
no key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from taxonomy.metrics import METRIC_BY_NAME

_SCALED = re.compile(r"(?P<base>.+)\((?P<scale>[0-9.]+(?:[eE][-+]?[0-9]+)?)\)")


@dataclass(frozen=True)
class Offer:
    """What a raw key can stand for.

    Attributes:
        canonical: Canonical metric.
        rank: Smaller is preferred; 0 is the metric's own name.
        scale: Factor from the logged to the canonical value.
    """

    canonical: str
    rank: int
    scale: float = 1.0


@dataclass(frozen=True)
class Aliases:
    """The alias table of one log format.

    Attributes:
        names: Raw key → (canonical metric, rank).
        patterns: (pattern that the whole raw key must match, canonical metric, rank), tried in order.
    """

    names: Mapping[str, tuple[str, int]]
    patterns: tuple[tuple[re.Pattern[str], str, int], ...] = ()

    def __post_init__(self) -> None:
        targets = [name for name, _ in self.names.values()] + [name for _, name, _ in self.patterns]
        assert all(name in METRIC_BY_NAME for name in targets), targets

    def offer(self, raw: str) -> Offer | None:
        """Return what `raw` stands for, None for a key that is not known."""
        if raw in METRIC_BY_NAME:
            return Offer(raw, 0)
        if raw in self.names:
            return Offer(*self.names[raw])
        for pattern, canonical, rank in self.patterns:
            if pattern.fullmatch(raw):
                return Offer(canonical, rank)
        if scaled := _SCALED.fullmatch(raw):
            scale = _positive(scaled["scale"])
            base = self.offer(scaled["base"]) if scale else None
            return base and Offer(base.canonical, base.rank, base.scale * scale)
        return None


def _positive(text: str) -> float:
    """Return a finite positive number, 0 where the text is none."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


VERL = Aliases(
    names={
        # Until 2025 the mean entropy went by the name of the loss term that it enters.
        "actor/entropy_loss": ("actor/entropy", 1),
        # With the KL in the reward instead of the loss (PPO), the KL to the reference has other names.
        "actor/reward_kl_penalty": ("actor/kl_loss", 1),
        "critic/kl": ("actor/kl_loss", 2),
        "actor/reward_kl_penalty_coeff": ("actor/kl_coef", 1),
        "critic/kl_coeff": ("actor/kl_coef", 2),
        # 0.6 had the rollout correction metrics under a prefix of their own.
        "mismatch/mismatch_kl": ("rollout_corr/kl", 1),
        "mismatch/mismatch_k3_kl": ("rollout_corr/k3_kl", 1),
        "mismatch/mismatch_log_ppl_abs_diff": ("rollout_corr/log_ppl_abs_diff", 1),
        "timing/step": ("timing_s/step", 1),
        "perf/time_per_step": ("timing_s/step", 2),
    },
    patterns=(
        (re.compile(r"val-core/.+/reward/mean@\d+"), "val-core/reward/mean", 1),
        (re.compile(r"val-core/.+/.+/mean@\d+"), "val-core/reward/mean", 2),
        (re.compile(r"(?:val/)?test_score/.+"), "val-core/reward/mean", 3),
    ),
)
"""verl's keys since 2024, for its console, its file logger and everything else that it writes to."""
