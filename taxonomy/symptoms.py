"""Symptoms: what an engineer sees, each under the category whose causes it points at first."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """One observable anomaly.

    Attributes:
        id: Name used in playbooks.
        title: One line for humans.
        category: Category id of the paper's Table 1.
        metric: The canonical metric that shows it best.
        direction: "up" or "down".
    """

    id: str
    title: str
    category: str
    metric: str
    direction: str


SYMPTOMS: tuple[Symptom, ...] = (
    Symptom(
        "rollout_training_divergence",
        "Rollout and trainer disagree on the probability of the sampled tokens",
        "framework",
        "training/rollout_probs_diff_mean",
        "up",
    ),
    Symptom(
        "probability_discrepancy",
        "Log-probabilities deviate, small and steady",
        "numerics",
        "rollout_corr/kl",
        "up",
    ),
    Symptom(
        "gradient_discrepancy",
        "Gradient norm off its healthy level, or spiking",
        "numerics",
        "actor/grad_norm",
        "up",
    ),
    Symptom(
        "routing_shift",
        "Rollout and trainer route tokens to different experts",
        "routing",
        "routing/agreement/mean",
        "down",
    ),
    Symptom(
        "expert_imbalance",
        "A few experts take most of the tokens",
        "routing",
        "routing/load_max/mean",
        "up",
    ),
    Symptom(
        "reward_degradation",
        "Reward falls, or stays flat where it should rise",
        "optimization",
        "critic/rewards/mean",
        "down",
    ),
    Symptom(
        "kl_divergence_increase",
        "KL to the reference climbs or spikes",
        "optimization",
        "actor/kl_loss",
        "up",
    ),
    Symptom(
        "no_learning",
        "Policy does not move: KL to the reference stays at zero",
        "optimization",
        "actor/kl_loss",
        "down",
    ),
    Symptom(
        "training_instability",
        "Entropy or loss runs away",
        "optimization",
        "actor/entropy",
        "up",
    ),
)

SYMPTOM_BY_ID = {symptom.id: symptom for symptom in SYMPTOMS}
