"""What every framework calls the canonical metrics: data, one table a framework.

Ranks order the keys that offer the same metric within a run; smaller wins. What looks alike and is not the same
stays out, with the reason where it isn't obvious.
"""

from __future__ import annotations

import re

from diagnose.logs.canonical import Aliases, merged

KL, REWARD, HELD_OUT = "actor/kl_loss", "critic/rewards/mean", "val-core/reward/mean"
LENGTH, CLIPPED = "response_length/mean", "response_length/clip_ratio"

VERL = Aliases(
    names={
        # Until 2025 the mean entropy went by the name of the loss term that it enters.
        "actor/entropy_loss": ("actor/entropy", 1),
        # With the KL in the reward instead of the loss (PPO), the KL to the reference has other names.
        "actor/reward_kl_penalty": (KL, 1),
        "critic/kl": (KL, 2),
        "actor/reward_kl_penalty_coeff": ("actor/kl_coef", 1),
        "critic/kl_coeff": ("actor/kl_coef", 2),
        # 0.6 had the rollout correction metrics under a prefix of their own.
        "mismatch/mismatch_kl": ("rollout_corr/kl", 1),
        "mismatch/mismatch_k3_kl": ("rollout_corr/k3_kl", 1),
        "mismatch/mismatch_log_ppl_abs_diff": ("rollout_corr/log_ppl_abs_diff", 1),
        "mismatch/rollout_is_mean": ("rollout_corr/rollout_is_mean", 1),
        "timing/step": ("timing_s/step", 1),
        "perf/time_per_step": ("timing_s/step", 2),
    },
    patterns=(
        (re.compile(r"val-core/.+/reward/mean@\d+"), HELD_OUT, 1),
        (re.compile(r"val-core/.+/.+/mean@\d+"), HELD_OUT, 2),
        (re.compile(r"(?:val/)?test_score/.+"), HELD_OUT, 3),
    ),
)
"""verl since 2024, for its console, its file logger and everything else that it writes to."""

TRL = Aliases(
    names={
        "reward": (REWARD, 1),
        "reward_std": ("critic/rewards/std", 1),
        "eval_reward": (HELD_OUT, 2),
        "kl": (KL, 1),
        "entropy": ("actor/entropy", 1),
        "grad_norm": ("actor/grad_norm", 1),
        "learning_rate": ("actor/lr", 1),
        "loss": ("actor/loss", 1),
        "clip_ratio/region_mean": ("actor/pg_clipfrac", 1),
        "clip_ratio": ("actor/pg_clipfrac", 2),  # until 0.16
        "completions/mean_length": (LENGTH, 1),
        "completion_length": (LENGTH, 2),  # until 0.16
        "completions/min_length": ("response_length/min", 1),
        "completions/max_length": ("response_length/max", 1),
        "completions/clipped_ratio": (CLIPPED, 1),
        "frac_reward_zero_std": ("rollout/zero_std_groups", 1),
        # A mean of |Δ log p|, and not verl's difference of probabilities.
        "sampling/sampling_logp_difference/mean": ("rollout_corr/logprob_abs_diff", 1),
        # Capped at vllm_importance_sampling_cap before the mean is taken.
        "sampling/importance_sampling_ratio/mean": ("rollout_corr/rollout_is_mean", 1),
        "step_time": ("timing_s/step", 1),
        # PPOTrainer. Its objective/kl is a sum over the tokens of a response and policy/approxkl_avg half the
        # squared log ratio: neither is a mean KL per token, so neither is used.
        "objective/scores": (REWARD, 2),
        "policy/clipfrac_avg": ("actor/pg_clipfrac", 2),
        "policy/entropy_avg": ("actor/entropy", 2),
        "loss/policy_avg": ("actor/pg_loss", 1),
        "lr": ("actor/lr", 2),
    },
    prefixes=("train/",),
    digits={"loss": 1e-4},  # Trainer.log rounds the loss, and nothing else
)
"""TRL, ms-swift and Unsloth: the names that transformers.Trainer logs."""

OPENRLHF = Aliases(
    names={
        "policy_loss": ("actor/pg_loss", 1),
        "kl": (KL, 1),
        "ppo_kl": ("actor/ppo_kl", 1),  # a mean of −log ratio, as verl's
        "vllm_kl": ("rollout_corr/kl", 1),  # a mean of log p_rollout − log p_trainer: k1
        "ppo_clip_ratio": ("actor/pg_clipfrac", 1),
        "policy_clip_ratio": ("actor/pg_clipfrac", 1),
        "entropy_loss": ("actor/entropy", 1),  # the mean entropy, before its coefficient
        "reward": (REWARD, 1),  # "return" has the KL penalty in it
        "group_reward_std": ("critic/rewards/std", 1),
        "response_length": (LENGTH, 1),
        "truncated": (CLIPPED, 1),
        "actor_grad_norm": ("actor/grad_norm", 1),
        "act_grad_norm": ("actor/grad_norm", 1),
        "actor_lr": ("actor/lr", 1),
        "act_lr": ("actor/lr", 1),
        "kl_coef": ("actor/kl_coef", 1),
        "timing/step_total": ("timing_s/step", 1),
    },
    patterns=((re.compile(r"eval/eval_.+_pass1"), HELD_OUT, 2),),
    prefixes=("train/",),
)

NEMO_RL = Aliases(
    names={
        "loss": ("actor/loss", 1),
        "reward": (REWARD, 1),
        "grad_norm": ("actor/grad_norm", 1),
        "lr": ("actor/lr", 2),
        # Both with NeMo-RL's default estimator, k3, and from the same pair of log-probabilities as verl's.
        "gen_kl_error": ("rollout_corr/k3_kl", 1),
        "kl_penalty": (KL, 1),  # divided by its coefficient before it is logged
        "token_mult_prob_error": ("rollout_corr/mult_prob_error", 1),
        "sampling_importance_ratio": ("rollout_corr/rollout_is_mean", 1),
        "approx_entropy": ("actor/entropy", 2),  # estimated from the sampled tokens
        "mean_gen_tokens_per_sample": (LENGTH, 1),
        "validation/accuracy": (HELD_OUT, 1),
        "timing/train/total_step_time": ("timing_s/step", 1),
        # What its console prints. Not "Avg Filtered Reward": that is after dynamic sampling.
        "Loss": ("actor/loss", 1),
        "Generation KL Error": ("rollout_corr/k3_kl", 1),
        "Avg Reward": (REWARD, 1),
        "Avg Total Reward": (REWARD, 1),
        "Mean Generation Length": (LENGTH, 1),
        "Total step time": ("timing_s/step", 1),
        "Validation/Accuracy": (HELD_OUT, 1),
    },
    prefixes=("train/",),
    digits=dict.fromkeys(
        ("Loss", "Generation KL Error", "Avg Reward", "Avg Total Reward", "Mean Generation Length"), 1e-4
    ),
)

SLIME = Aliases(
    names={
        "train/loss": ("actor/loss", 1),
        "train/pg_loss": ("actor/pg_loss", 1),
        "train/kl_loss": (KL, 1),
        "train/ppo_kl": ("actor/ppo_kl", 1),
        "train/entropy_loss": ("actor/entropy", 1),  # the mean entropy, before its coefficient
        "train/pg_clipfrac": ("actor/pg_clipfrac", 1),
        "train/grad_norm": ("actor/grad_norm", 1),
        "train/lr-pg_0": ("actor/lr", 1),
        # A mean of |Δ log p|, and not verl's difference of probabilities.
        "train/train_rollout_logprob_abs_diff": ("rollout_corr/logprob_abs_diff", 1),
        "train/ois": ("rollout_corr/rollout_is_mean", 1),
        # Not rollout/rewards: those are normalised within their groups already.
        "rollout/raw_reward": (REWARD, 1),
        "rollout/response_lengths": (LENGTH, 1),
        "rollout/response_len/mean": (LENGTH, 2),
        "rollout/response_len/max": ("response_length/max", 1),
        "rollout/response_len/min": ("response_length/min", 1),
        "rollout/truncated_ratio": (CLIPPED, 1),
        "rollout/truncated": (CLIPPED, 2),
        "rollout/zero_std/ratio": ("rollout/zero_std_groups", 1),
        "perf/step_time": ("timing_s/step", 1),
    },
    patterns=((re.compile(r"eval/[^/]+"), HELD_OUT, 3),),
)

PRIME_RL = Aliases(
    names={
        # The console.
        "Loss": ("actor/loss", 1),
        "Entropy": ("actor/entropy", 1),
        "Mismatch KL": ("rollout_corr/k3_kl", 1),  # w − log w − 1
        "Grad. Norm": ("actor/grad_norm", 1),
        "LR": ("actor/lr", 1),
        "Reward": (REWARD, 1),
        "Seq. Length": (LENGTH, 2),  # prompt included, so only for want of a better one
        "Truncation": (CLIPPED, 1),
        "Throughput": ("perf/throughput", 1),
        "Time": ("timing_s/step", 1),
        # What it sends to trackers.
        "loss/mean": ("actor/loss", 1),
        "entropy/mean": ("actor/entropy", 2),
        "entropy/all/mean": ("actor/entropy", 1),
        "mismatch_kl/mean": ("rollout_corr/k3_kl", 2),
        "mismatch_kl/all/mean": ("rollout_corr/k3_kl", 1),
        "optim/grad_norm": ("actor/grad_norm", 1),
        "optim/lr": ("actor/lr", 1),
        "reward/mean": (REWARD, 1),
        "reward/all/mean": (REWARD, 1),
    },
    digits=dict.fromkeys(("Loss", "Entropy", "Mismatch KL", "Grad. Norm", "Reward"), 1e-4),
)

MINDSPEED_RL = Aliases(
    names={
        "grpo/rewards/mean": (REWARD, 1),
        "grpo/score/mean": (REWARD, 2),
        "dapo/rewards/mean": (REWARD, 1),
        "ppo/rewards/mean": (REWARD, 1),
        "grad_norm": ("actor/grad_norm", 1),
        "actor/pg_clipfrac": ("actor/pg_clipfrac", 1),
        "timing/all": ("timing_s/step", 1),
        "e2e_tps": ("perf/throughput", 1),
    },
    patterns=VERL.patterns,
)

MEGATRON = Aliases(
    names={
        "lm loss": ("actor/loss", 1),
        "lm-loss": ("actor/loss", 1),
        "lm_loss": ("actor/loss", 1),
        "grad-norm": ("actor/grad_norm", 1),
        "grad norm": ("actor/grad_norm", 1),
        "learning-rate": ("actor/lr", 1),
        "learning rate": ("actor/lr", 1),
        "iteration-time": ("timing_s/step", 1),
        "iteration_timing_avg": ("timing_s/step", 2),
        "elapsed time per iteration (ms)": ("timing_s/step", 1),
    },
    scales={"elapsed time per iteration (ms)": 1e-3},
)
"""Golden values of Megatron-LM's tests, and its TensorBoard names."""

PLAIN = Aliases(
    names={
        "mean_reward": (REWARD, 3),
        "reward_mean": (REWARD, 3),
        "avg_reward": (REWARD, 3),
        "train_reward": (REWARD, 3),
        "rewards/mean": (REWARD, 3),
        "accuracy": (HELD_OUT, 5),
        "eval/accuracy": (HELD_OUT, 4),
        "eval_accuracy": (HELD_OUT, 4),
        "eval/reward": (HELD_OUT, 4),
        "kl_loss": (KL, 3),
        "kl_to_ref": (KL, 3),
        "pg_loss": ("actor/pg_loss", 3),
        "clip_frac": ("actor/pg_clipfrac", 3),
        "clipfrac": ("actor/pg_clipfrac", 3),
        "pg_clipfrac": ("actor/pg_clipfrac", 3),
        "mean_response_length": (LENGTH, 3),
        "response_length_mean": (LENGTH, 3),
    },
)
"""Names that scripts of one's own tend to use. Not "kl_div" or "approx_kl": those are as often to the old policy."""

EVERY = merged((VERL, TRL, SLIME, NEMO_RL, OPENRLHF, PRIME_RL, MINDSPEED_RL, MEGATRON, PLAIN))
"""For containers that any framework writes to."""
