"""A verl user's project of the smallest size: data, a reward function, and the command that starts a training."""

import json
import shlex

from proxy.embedded import resolve, task
from proxy.engines.verl_job import rows

REWARD = '''import os


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """One for a response that begins with a digit, less with its length."""
    text = solution_str.strip()
    score = (1.0 if text[:1].isdigit() else 0.0) - 0.05 * len(text)
    return {"score": score, "length": float(len(text))}
'''


def project(folder, *more, prompts=8, reward=REWARD):
    """Write the project and return its command: for eight GPUs and vLLM, so that a CPU has something to scale."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = task.drawn("rl", 5, 1, 48)
    (folder / "train.jsonl").write_text(rows(drawn))
    (folder / "test.jsonl").write_text(rows(drawn[:8]))
    (folder / "reward.py").write_text(reward)
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": "train.jsonl",
        "data.val_files": "test.jsonl",
        "data.train_batch_size": prompts * 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 6,
        "actor_rollout_ref.model.path": resolve("embedded:qwen3_moe"),
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.kl_loss_coef": 0.05,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts * 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 4,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
        "reward.custom_reward_function.path": "reward.py",
        "trainer.use_v1": False,
        "trainer.logger": "[console,wandb]",
        "trainer.n_gpus_per_node": 8,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    return shlex.join(["python3", "-m", "verl.trainer.main_ppo", *words, *more])


def logged(folder):
    """Return the metrics of a run by step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["data"] for record in map(json.loads, lines)}
