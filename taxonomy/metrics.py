"""Canonical metrics: verl's names, plus our own where verl has none.

Each metric says how it is compared: the transform *g* applied before effects are taken (log10 for quantities that
live on a ratio scale, logit for fractions near 0 or 1, identity otherwise) and the absolute floor, in transformed
units, under which a difference is not worth a claim whatever the noise. Rollout–trainer mismatch metrics stay in
absolute units (nats, probability, share of routes): their healthy level differs by four decades between fp32 and
bf16, and a ratio to a round-off floor would make every mismatch fault look alike.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One canonical metric.

    Attributes:
        name: verl's key, or ours.
        title: Short name for humans.
        unit: Unit of the raw value, "" for none.
        kind: outcome, divergence, optimization, mismatch, routing, length, config, detail or cost. The last three
            never enter a ranking: they give a setting away, only repeat parts of another metric, or depend on the
            machine.
        transform: "identity", "log10" or "logit".
        epsilon: Added before log10, or the clip of a logit.
        floor: Smallest difference, in transformed units, that is ever called a movement.
    """

    name: str
    title: str
    unit: str
    kind: str
    transform: str = "identity"
    epsilon: float = 0.0
    floor: float = 0.0

    @property
    def ranks(self) -> bool:
        """Whether the metric takes part in scoring."""
        return self.kind not in ("config", "detail", "cost")


METRICS: tuple[Metric, ...] = (
    Metric("critic/rewards/mean", "reward", "", "outcome", floor=0.02),
    Metric("val-core/reward/mean", "held-out reward", "", "outcome", floor=0.02),
    Metric("actor/kl_loss", "KL to reference", "nat", "divergence", "log10", 1e-4, 0.05),
    Metric("actor/ppo_kl", "KL to old policy", "nat", "divergence", floor=1e-3),
    Metric("actor/entropy", "entropy", "nat", "divergence", floor=0.02),
    Metric("actor/grad_norm", "gradient norm", "", "optimization", "log10", 1e-6, 0.05),
    Metric("actor/pg_loss", "policy loss", "", "optimization", floor=5e-3),
    Metric("actor/pg_clipfrac", "clipped share", "share", "optimization", floor=5e-3),
    Metric("critic/advantages/max", "largest advantage", "", "optimization", floor=0.05),
    Metric("critic/advantages/min", "smallest advantage", "", "optimization", floor=0.05),
    Metric(
        "training/rollout_probs_diff_mean", "rollout–trainer probability gap", "prob.", "mismatch", floor=1e-3
    ),
    Metric("training/rollout_probs_diff_max", "largest probability gap", "prob.", "mismatch", floor=2e-2),
    Metric(
        "training/rollout_probs_diff_std", "spread of the probability gap", "prob.", "mismatch", floor=1e-3
    ),
    Metric(
        "training/rollout_actor_probs_pearson_corr", "rollout–trainer correlation", "", "mismatch", floor=2e-3
    ),
    Metric("rollout_corr/kl", "rollout–trainer KL (k1)", "nat", "mismatch", floor=1e-3),
    Metric("rollout_corr/k3_kl", "rollout–trainer KL (k3)", "nat", "mismatch", floor=1e-3),
    Metric("rollout_corr/log_ppl_abs_diff", "log-perplexity gap", "nat", "mismatch", floor=1e-3),
    Metric("rollout_corr/chi2_token", "rollout–trainer chi²", "", "mismatch", floor=2e-3),
    Metric("routing/agreement/mean", "route agreement", "share", "routing", floor=2e-3),
    Metric("routing/load_entropy/mean", "expert-load entropy", "nat", "routing", floor=0.01),
    Metric("routing/load_max/mean", "largest expert load", "× mean", "routing", floor=0.05),
    Metric("rollout/weight_lag", "weight lag", "updates", "mismatch", floor=0.5),
    Metric("response_length/mean", "response length", "tokens", "length", floor=0.05),
    Metric("response_length/clip_ratio", "truncated share", "share", "length", floor=0.01),
    Metric("rollout/zero_std_groups", "groups without a signal", "share", "outcome", floor=0.02),
    Metric("critic/rewards/std", "spread of the rewards", "", "outcome", floor=0.02),
    # New ranking metrics come last: simulated worlds take the first twenty.
    # Means over the sampled tokens of |log p_rollout − log p_trainer| (TRL, slime, vime), of its exponential
    # (NeMo-RL), and of the importance weight p_trainer / p_rollout: three different things, none merged.
    Metric(
        "rollout_corr/logprob_abs_diff", "rollout–trainer log-probability gap", "nat", "mismatch", floor=1e-3
    ),
    Metric("rollout_corr/mult_prob_error", "rollout–trainer probability ratio", "×", "mismatch", floor=1e-3),
    Metric("rollout_corr/rollout_is_mean", "mean importance weight", "", "mismatch", floor=0.02),
    # Metrics that tell look-alikes apart. Shares and nats on their own scale, as all mismatch metrics.
    # 1 / mean((w / mean w)²) of those weights, verl's name: how much of the sample would be left after weighting.
    Metric("rollout_corr/rollout_is_eff_sample_size", "effective sample", "share", "mismatch", floor=0.02),
    # |log-probability gap| of late positions minus that of early ones: an error that grows with length, or packing.
    Metric("rollout_corr/late_gap", "late less early gap", "nat", "mismatch", floor=5e-3),
    # Tensors that are equal in both after the cast: exactly 1 unless the sync is skipped or changes what it carries.
    Metric("rollout/weights_equal", "equal tensors", "share", "mismatch", floor=0.02),
    # |ratio − 1| before a step's first update, against the trainer's own log-probabilities with the same weights:
    # round-off of one forward pass against another (1e-8 in fp32), however large the mismatch with the rollout is.
    Metric("actor/first_ratio_deviation", "first-step ratio off 1", "", "mismatch", floor=1e-4),
    # Expert choices of fixed prompts that one step's updates changed: 0 where the policy or its routers do not move.
    Metric("routing/flips/mean", "routes changed by a step", "share", "routing", floor=5e-3),
    # Held-out reward minus the mean training reward since the evaluation before: negative where the training reward
    # pays for something else, or less than what is wanted.
    Metric("val-core/reward_gap", "held-out less training reward", "", "outcome", floor=0.03),
    # Updates whose gradient norm, or loss, is infinite or NaN. The norm itself is then missing from the log.
    Metric("actor/nonfinite_grad", "updates without a finite gradient", "share", "optimization", floor=0.05),
    Metric("actor/nonfinite_loss", "updates without a finite loss", "share", "optimization", floor=0.05),
    Metric("response_length/min", "shortest response", "tokens", "detail"),
    Metric("response_length/max", "longest response", "tokens", "detail"),
    Metric("response_length/spread", "longest less shortest response", "tokens", "detail"),
    Metric("actor/lr", "learning rate", "", "config"),
    Metric("actor/kl_coef", "KL coefficient", "", "config"),
    Metric("actor/loss", "total loss", "", "detail"),
    Metric("critic/rewards/answer", "right answers", "share", "detail"),
    Metric("critic/rewards/format", "right formats", "share", "detail"),
    Metric("val-core/answer/mean", "held-out right answers", "share", "detail"),
    Metric("val-core/format/mean", "held-out right formats", "share", "detail"),
    # What sampled text looks like, read from generations on disk and not from the log.
    Metric("generations/gibberish", "responses that are no text", "share", "detail"),
    Metric("generations/single_token", "responses of one repeated token", "share", "detail"),
    Metric("generations/repetition", "responses that repeat themselves", "share", "detail"),
    Metric("generations/identical", "most frequent response", "share", "detail"),
    Metric("generations/truncated", "responses cut off", "share", "detail"),
    Metric("generations/foreign_script", "responses in another script than the prompts", "share", "detail"),
    Metric("generations/length", "length of the responses", "characters", "detail"),
    Metric("critic/score/mean", "score", "", "config"),
    Metric("timing_s/step", "time a step", "s", "cost"),
    Metric("perf/throughput", "throughput", "tokens/s", "cost"),
)

METRIC_BY_NAME = {metric.name: metric for metric in METRICS}
