"""Every threshold of the scoring, in one place, each with its reason.

Nothing else in `diagnose.score` holds a number that could have been another one. The formulas are in
``docs/scoring.md``, which names these fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """Thresholds of the scoring. Units are given where there are any; z means "in noise units".

    Attributes:
        max_blocks: Blocks at most. Eight medians keep a trend's shape and hold the false-positive rate of a trend
            test near its nominal value on autocorrelated noise, where raw points do not.
        points_a_block: Logged points a block needs: below five, a median is hardly better than a point.
        min_blocks: Fewer blocks than this make every verdict inconclusive: no late half, no onset.
        onset_blocks: Blocks at most when the onset of an incident is looked for over a whole log (finer clock,
            since the answer is where to put the injection).
        jump_inflation: Factor on the margin of a jump that a log makes against its own past.
        min_baseline: Points before the fault that make a baseline for a run without a healthy twin.

        calibrated_seeds: Healthy seeds from which margins are read off the seeds themselves: the smallest honest
            p at K seeds is 1/(K + 1), and K = 20 is the first that reaches 0.05.
        own_seeds: Healthy seeds from which a standard deviation across seeds is taken (4 degrees of freedom).
        alpha: Chance that a healthy log is called faulty, over all its metrics together. Nominal: a margin from
            20 seeds is itself uncertain, and at most 4 of 200 healthy logs may be called faulty.
        alpha_direction: Chance that any metric of a healthy run is given a direction. Larger than `alpha`,
            because directions are only asked for once a log is faulty, and their misses cost answers. With weak
            evidence, a log between the two margins is neither healthy nor faulty.
        tests_a_metric: Tests that a metric counts for in a Bonferroni margin: two sides, and half as many again
            because pairs of blocks are looked at beside the late half.
        window_penalty: Factor on the penalty of short windows. 1 is the multiscale form, all for effects that last from
            the beginning; 0 treats all windows alike. Half way, effects that grow or set in later lose little.
        window_dof: Degrees of freedom that the AR(1) model of a window's noise is worth beside the seeds' own.
        min_margin: z under which nothing counts as a movement, however quiet the seeds were.
        block_pooling: Share of a metric's mean variance over blocks in the variance of one block: the noise of one
            block is estimated from few seeds, but it does change along the run.
        prior_dof: Degrees of freedom that a stand-in or within-run scale is worth when it steadies one from few seeds.
        stand_in_inflation: Factor on a noise scale lent by the other system.
        wiggle_floor: Smallest factor by which a lent scale is adapted to the step-to-step noise of the system
            that borrows it: larger batches make quieter steps, but not quieter seeds to the same degree.
        residual_inflation: Factor on a noise scale taken from within a single run: at autocorrelation 0.95 the
            medians of neighbouring blocks differ by about half of what seeds differ by.
        few_inflation: Factor on such a scale when two to four seeds gave it its size instead.
        drift_doubt: Share of the healthy proxy's own drift that counts as doubt where it stands in for the
            drift that the original would have had.
        absolute_kinds: Kinds of metrics that are compared in absolute units above one floor for both systems.
        absolute_metrics: Single metrics treated so.
        floor_multiple: Noise units that a metric's absolute floor is worth in a signature.

        equivalence: "None" means: the effect is smaller than so many standard deviations between seeds.
        equivalence_alpha: One-sided error of that claim.
        garrote: z up to which a block is noise to a signature; beyond, the garrote lets it pass nearly unshrunk.
        event_size: Squashed size of a block with non-finite values: as far from 0 as an effect of 27 sigma.
        family_power: A kind with k metrics in the signature weighs k^(1 − power): 0 lets eight versions of the
            probability gap outvote the reward, 1 lets them count as one.

        draws: Bootstrap draws.
        interval: Coverage of bootstrap intervals.
        gap_share: Share of the incident's own size that a gap in distance must exceed, at the interval's lower
            end, to tell two candidates apart.
        seed: Seed of the bootstrap; fixed, so that a report can be recomputed.

        explained: Share of the incident's squared signature that a candidate must explain to be an answer at all.
        explained_specific: The same for an answer that is called specific.
        pair_gain: Share of the incident that two faults at once must explain beyond any single one to be reported.
        agreement: Agreement in direction for "reproduced".
        partly: Agreement in direction for "partly".
        trend: Mean trend similarity for "reproduced".
        type_agreement: Mean agreement of anomaly types for "reproduced".
        coverage: Share of a card's metrics that the log must have.
        contradiction: Share of the moved metrics that may contradict a specific answer.
        exact_metrics: Metrics whose healthy value holds by construction, whatever is learned. Where the incident keeps
            it and a replay leaves it for at least half of its blocks, or the other way round, that fault alone is not
            the cause.
        amplitude: Factor by which one fault may act stronger in one system than in the other, in noise units.
        doubt_se: Standard errors that a contradiction must leave on both sides.
        least_se: Smallest standard error of a late effect, in noise units, for that purpose.

        passed_share: Share of its peak under which an effect has passed, where that is less than the margin.
        sudden: Share of its largest effect that a metric must gain within the blocks around its onset to be
            "immediate" or "delayed", and an onset to be sharp.
        delayed_blocks: Quiet blocks before a "delayed" effect.
        collapsed: Share of its healthy level under which a metric has collapsed.
        collapsing_metrics: Metrics that can collapse: positive ones whose loss is a failure.
        spike: Multiple of the largest healthy single-point excursion that makes a spike.
        spike_few: The same where fewer than `own_seeds` healthy runs say how large healthy excursions get.
        gate_z: z of the healthy reward's change that counts as learning.
        gate_metric: The metric by which a healthy proxy must follow the healthy original.
        level_rules: Metric → absolute level that no healthy system has; all that can be said of a log without a
            twin and without a past.
        core_metrics: Metrics whose non-finite values are never cosmetic.
    """

    max_blocks: int = 8
    points_a_block: int = 5
    min_blocks: int = 4
    onset_blocks: int = 16
    jump_inflation: float = 1.25
    min_baseline: int = 10

    calibrated_seeds: int = 20
    own_seeds: int = 5
    alpha: float = 0.01
    alpha_direction: float = 0.1
    tests_a_metric: float = 3.0
    window_penalty: float = 0.5
    window_dof: float = 20.0
    min_margin: float = 3.0
    block_pooling: float = 0.5
    prior_dof: float = 8.0
    stand_in_inflation: float = 1.4
    wiggle_floor: float = 0.5
    residual_inflation: float = 2.0
    few_inflation: float = 1.6
    drift_doubt: float = 0.5
    absolute_kinds: tuple[str, ...] = ("mismatch",)
    absolute_metrics: tuple[str, ...] = ("routing/agreement/mean",)
    floor_multiple: float = 3.0

    equivalence: float = 3.0
    equivalence_alpha: float = 0.05
    garrote: float = 2.0
    event_size: float = 4.0
    family_power: float = 0.5

    draws: int = 300
    interval: float = 0.9
    gap_share: float = 0.02
    seed: int = 20

    explained: float = 0.5
    explained_specific: float = 0.8
    pair_gain: float = 0.03
    agreement: float = 0.7
    partly: float = 0.4
    trend: float = 0.5
    type_agreement: float = 0.5
    coverage: float = 0.5
    contradiction: float = 0.1
    exact_metrics: tuple[str, ...] = ("rollout/weight_lag", "rollout/weights_equal")
    amplitude: float = 3.0
    doubt_se: float = 2.0
    least_se: float = 0.5

    passed_share: float = 0.5
    sudden: float = 0.5
    delayed_blocks: int = 2
    collapsed: float = 0.1
    collapsing_metrics: tuple[str, ...] = (
        "critic/rewards/mean",
        "val-core/reward/mean",
        "response_length/mean",
        "actor/entropy",
    )
    spike: float = 3.0
    spike_few: float = 6.0
    gate_z: float = 2.0
    gate_metric: str = "critic/rewards/mean"
    level_rules: Mapping[str, float] = field(
        default_factory=lambda: {
            "training/rollout_probs_diff_mean": 0.1,
            "rollout_corr/kl": 0.1,
            "rollout_corr/log_ppl_abs_diff": 0.1,
        }
    )
    core_metrics: tuple[str, ...] = ("actor/grad_norm", "actor/pg_loss", "actor/loss")


DEFAULT = Settings()
