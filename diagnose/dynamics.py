"""Healthy training dynamics of an original and its proxies: the paper's Figure 2 as numbers, and what was learned.

Legend of shape suffixes: ``_S`` seeds, ``_N`` logged steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from diagnose.console import Terminal
from diagnose.jobs import run_all, run_job
from proxy.embedded.task import ANSWER_WEIGHT, FORMAT_WEIGHT
from proxy.specs import BuildSpec, Recipe, RunSpec

if TYPE_CHECKING:
    from diagnose.curves import Curves

METRICS = (
    "critic/rewards/mean",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "response_length/mean",
    "training/rollout_probs_diff_mean",
    "routing/load_entropy/mean",
)
"""Metrics of the healthy training dynamics, where they were logged."""

GAINS = {
    "reward": ("val-core/reward/mean", 1.0),
    "of it answers": ("val-core/answer/mean", ANSWER_WEIGHT),
    "of it format": ("val-core/format/mean", FORMAT_WEIGHT),
}
"""Parts of the held-out reward: metric, and its weight in the reward."""

HELD_OUT_PROMPTS = 512


def dynamics(
    checkpoint: str,
    budgets: Sequence[int],
    cut: BuildSpec,
    recipe: Recipe,
    seeds: Sequence[int],
    workers: int | None,
    terminal: Terminal,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train the healthy original and healthy proxies at several budgets.

    The held-out reward is measured before the first and after the last step, on the same prompts.

    Returns:
        Rows of the dynamics, one a model and metric (`dynamics_rows`), and rows of the gains, one a model and part of
        the held-out reward (`gain_rows`).

    Raises:
        RunError: A build or a run failed.
    """
    recipe = replace(recipe, eval_every=recipe.steps, eval_prompts=HELD_OUT_PROMPTS)
    with TemporaryDirectory(prefix="diagnose-dynamics-") as scratch:
        home = Path(scratch)
        models = {"original": checkpoint}
        for budget in budgets:
            name = f"proxy-{budget}"
            spec = replace(cut, checkpoint=checkpoint, experts=budget, out=str(home / name))
            terminal.say(f"building the proxy with {budget} experts")
            models[name] = str(run_job("build", asdict(spec), terminal)["path"])
        specs = {
            f"{name}-s{seed}": RunSpec(model, recipe, seed)
            for name, model in models.items()
            for seed in seeds
        }
        curves = run_all(specs, home / "runs", workers, terminal)
    runs = {name: [curves[f"{name}-s{seed}"] for seed in seeds] for name in models}
    return (
        [row for name in models for row in dynamics_rows(name, runs[name])],
        [row for name in models for row in gain_rows(name, runs[name])],
    )


def dynamics_rows(model: str, runs: Sequence[Curves]) -> list[dict[str, Any]]:
    """Return one row a metric for the healthy runs of one model.

    Start and end are medians over the first and the last fifth of the steps, means over seeds; the change comes with
    its standard error over seeds.
    """
    import numpy as np

    rows = []
    for metric in METRICS:
        if not all(metric in run.values for run in runs):
            continue
        curves_SN = np.stack([run.values[metric] for run in runs])
        curves_SN = curves_SN[:, np.isfinite(curves_SN).any(axis=0)]  # step 0 has the held-out reward alone
        fifth = max(1, curves_SN.shape[1] // 5)
        start_S = np.nanmedian(curves_SN[:, :fifth], axis=1)
        end_S = np.nanmedian(curves_SN[:, -fifth:], axis=1)
        change_S = end_S - start_S
        rows.append(
            {
                "model": model,
                "metric": metric,
                "start": float(start_S.mean()),
                "end": float(end_S.mean()),
                "change": float(change_S.mean()),
                "error": float(change_S.std(ddof=1) / len(runs) ** 0.5) if len(runs) > 1 else None,
                "seeds": len(runs),
                "curve": [float(value) for value in np.nanmean(curves_SN, axis=0)],
            }
        )
    return rows


def gain_rows(model: str, runs: Sequence[Curves]) -> list[dict[str, Any]]:
    """Return what the held-out reward and its parts gained from first to last evaluation, in units of reward.

    `low` is the lower end of the two-sided 95 % t interval of the mean over seeds; None with one seed.
    """
    import numpy as np
    from scipy.special import stdtrit

    rows = []
    for part, (metric, weight) in GAINS.items():
        if not all(metric in run.values for run in runs):
            continue
        ends_S = [run.values[metric][np.isfinite(run.values[metric])][[0, -1]] for run in runs]
        gain_S = weight * np.array([last - first for first, last in ends_S])
        seeds = len(runs)
        error = gain_S.std(ddof=1) / seeds**0.5 if seeds > 1 else None
        rows.append(
            {
                "model": model,
                "part": part,
                "start": weight * float(np.mean([first for first, _ in ends_S])),
                "gain": float(gain_S.mean()),
                "low": None if error is None else float(gain_S.mean() - stdtrit(seeds - 1, 0.975) * error),
                "smallest": float(gain_S.min()),
                "seeds": seeds,
            }
        )
    return rows
