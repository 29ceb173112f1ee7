"""Observations: what somebody, or the log itself, says about a metric of a failing run.

An observation typed from a dashboard (``actor/kl_loss=up:gradual``) and one read out of a log are the same thing, so
that triage has one way to rank faults.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from taxonomy.metrics import METRIC_BY_NAME

DIRECTIONS = {
    "up": "higher than healthy, or rising where a healthy run's does not",
    "down": "lower than healthy, or falling where a healthy run's does not",
    "none": "as in a healthy run",
    "flat": "does not move although a healthy run's would",
    "constant": "stuck at one value",
    "zero": "exactly 0",
    "nan": "not finite",
}
ONSETS = {
    "start": "from the first step, before any update",
    "update": "with the first update that changes weights",
    "immediate": "within a few steps",
    "gradual": "grows step by step",
    "delayed": "after a long quiet time",
    "sudden": "from one step to the next, in the middle of the run",
}
PATTERNS = {
    "sawtooth": "grows and falls back again and again",
    "spikes": "single steps stand out",
    "often": "now and then, not at every step",
}
UNCLEAR = "unclear"
"""Rule of an observation that says no more than: it was looked at, and nothing stood out."""
PHASES = ("start", "update", "resume")
"""When a fault can show first: before any update, with the first one, or at a resume."""

# Different metrics that measure the same thing, each with the sign that its rise has for it. Values are never
# converted into one another; only the statement "it went up" is carried over.
_QUANTITIES = {
    "gap": {
        "training/rollout_probs_diff_mean": 1,
        "training/rollout_probs_diff_max": 1,
        "training/rollout_probs_diff_std": 1,
        "training/rollout_actor_probs_pearson_corr": -1,
        "rollout_corr/kl": 1,
        "rollout_corr/k3_kl": 1,
        "rollout_corr/log_ppl_abs_diff": 1,
        "rollout_corr/chi2_token": 1,
        "rollout_corr/logprob_abs_diff": 1,
        "rollout_corr/mult_prob_error": 1,
        "rollout_corr/rollout_is_mean": -1,
        "rollout_corr/rollout_is_eff_sample_size": -1,
    },
    "late_gap": {"rollout_corr/late_gap": 1},
    "weights": {"rollout/weights_equal": 1},
    "lag": {"rollout/weight_lag": 1},
    "first_ratio": {"actor/first_ratio_deviation": 1},
    "nonfinite": {"actor/nonfinite_grad": 1, "actor/nonfinite_loss": 1},
    "train_held_out": {"val-core/reward_gap": 1},
    "flips": {"routing/flips/mean": 1},
    "routes": {"routing/agreement/mean": 1},
    "load": {"routing/load_max/mean": 1, "routing/load_entropy/mean": -1},
    "reward": {"critic/rewards/mean": 1, "critic/score/mean": 1, "critic/rewards/answer": 1},
    "held_out": {"val-core/reward/mean": 1, "val-core/answer/mean": 1},
    "kl": {"actor/kl_loss": 1},
    "step": {"actor/ppo_kl": 1, "actor/pg_clipfrac": 1},
    "entropy": {"actor/entropy": 1},
    "grad": {"actor/grad_norm": 1},
    "loss": {"actor/pg_loss": 1, "actor/loss": 1},
    "advantage": {"critic/advantages/max": 1, "critic/advantages/min": -1},
    "length": {"response_length/mean": 1, "generations/length": 1},
    "truncation": {"response_length/clip_ratio": 1, "generations/truncated": 1},
    "spread": {"response_length/spread": 1},
    "signal": {"rollout/zero_std_groups": -1, "critic/rewards/std": 1},
    "text": {"generations/gibberish": 1, "generations/single_token": 1, "generations/foreign_script": 1},
    "sameness": {"generations/identical": 1, "generations/repetition": 1},
}
QUANTITY = {metric: (name, sign) for name, metrics in _QUANTITIES.items() for metric, sign in metrics.items()}


class BadObservation(ValueError):
    """An observation that can't be read; the message says what is allowed."""


@dataclass(frozen=True)
class Observation:
    """One statement about one metric.

    Attributes:
        metric: Canonical metric.
        direction: A key of `DIRECTIONS`.
        onset: A key of `ONSETS`, "" where it is not known.
        pattern: A key of `PATTERNS`, "" for none.
        interval: First and last step at which it may have begun.
        value: The value that it has now, raw units.
        healthy: The value that it had before, or has in a healthy run.
        evidence: One sentence.
        alarm: Whether it is a symptom by itself. What is no alarm still weighs in the ranking of faults.
        exact: Whether it is a fact (a NaN, an exact zero) that one value proves, and no estimate.
        rule: Name of the rule that found it, "" where a person said so.
        doubt: Whether "none" means no more than that nothing was found. It then counts against what would move the
            metric, and rules nothing out.
    """

    metric: str
    direction: str
    onset: str = ""
    pattern: str = ""
    interval: tuple[int, int] | None = None
    value: float | None = None
    healthy: float | None = None
    evidence: str = ""
    alarm: bool = True
    exact: bool = False
    rule: str = ""
    doubt: bool = False

    @property
    def quantity(self) -> str:
        """What the metric measures; metrics of the same quantity say the same thing twice."""
        return QUANTITY.get(self.metric, (self.metric, 1))[0]

    @property
    def sense(self) -> str:
        """The direction, in terms of the quantity: a falling correlation is a rising gap."""
        sign = QUANTITY.get(self.metric, ("", 1))[1]
        if sign > 0 or self.direction not in ("up", "down"):
            return self.direction
        return "down" if self.direction == "up" else "up"


def _nothing(_: str) -> Sequence[str]:
    return ()


def _named_like(name: str) -> list[str]:
    """Return the metrics that have a name as one of their words, then those that are spelt like it."""
    word = name.strip().lower()
    having = [metric for metric in METRIC_BY_NAME if word in re.split(r"[/_]", metric)]
    return [*having, *difflib.get_close_matches(word, METRIC_BY_NAME, 3, 0.4)]


def contradiction(observations: Sequence[Observation]) -> tuple[Observation, Observation] | None:
    """Return two observations that can't both be true of one metric, None where there are none."""
    for index, one in enumerate(observations):
        for other in observations[:index]:
            if one.metric == other.metric and _exclude_each_other(one.direction, other.direction):
                return other, one
    return None


def _exclude_each_other(one: str, other: str) -> bool:
    both = {one, other}
    return len(both) == 2 and ("none" in both or both in ({"up", "down"}, {"up", "flat"}, {"down", "flat"}))


def parse_observation(text: str, suggest: Callable[[str], Sequence[str]] = _nothing) -> Observation:
    """Read ``METRIC=DIRECTION[:ONSET[:PATTERN]]``; ONSET may also be a step, such as ``actor/kl_loss=up:120``.

    Args:
        text: What was typed.
        suggest: Returns the metrics that an unknown name is known to stand for elsewhere.

    Raises:
        BadObservation: The text has another form, or names something that does not exist.
    """
    metric, found, rest = text.partition("=")
    metric = metric.strip()
    direction, onset, pattern, *more = [*(part.strip().lower() for part in rest.split(":")), "", "", ""][:4]
    if not found or not direction or any(more):
        raise BadObservation(
            f"{text!r} is not METRIC=DIRECTION[:ONSET[:PATTERN]], as in actor/kl_loss=up:gradual"
        )
    if metric not in METRIC_BY_NAME:
        near = dict.fromkeys((*suggest(metric), *_named_like(metric)))
        hint = f"; did you mean {', '.join([*near][:4])}?" if near else ""
        raise BadObservation(f"there is no metric {metric!r}{hint}")
    interval = None
    if onset.isdecimal():
        interval, onset = (int(onset), int(onset)), ""
    if onset in PATTERNS and not pattern:
        onset, pattern = "", onset
    for word, allowed, what in (
        (direction, DIRECTIONS, "direction"),
        (onset, ONSETS, "onset"),
        (pattern, PATTERNS, "pattern"),
    ):
        if word and word not in allowed:
            raise BadObservation(f"{text!r}: there is no {what} {word!r}; there are: {', '.join(allowed)}")
    return Observation(
        metric,
        direction,
        onset,
        pattern,
        interval,
        evidence="as observed",
        exact=direction in ("nan", "zero"),
    )
