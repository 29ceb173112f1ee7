"""Compare ways of choosing experts by task accuracy: the paper's Tables 3 and 4, with intervals.

All proxies answer the same prompts, so their differences are taken prompt by prompt; the interval says how
far the difference depends on which prompts were asked.

Shape suffixes: P prompts, S seeds, B bootstrap resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from proxy.build import build, resolve_folder
from proxy.calibration import collect, uncalibrated
from proxy.checkpoint import open_checkpoint
from proxy.errors import BuildError
from proxy.families import understand
from proxy.layer_stats import LayerStats
from proxy.plan import check_budget
from proxy.preflight import check_possible
from proxy.rows import calibration_rows
from proxy.specs import BuildSpec
from proxy.strategies import Request, check_request, strategy

REFERENCE = "multi_view"
ORIGINAL = "original"
RESAMPLES = 2000

Evaluate = Callable[[Path], NDArray[np.float64]]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        strategy: Strategy, or "original".
        experts: Experts a layer.
        accuracy: Share of the prompts that were answered correctly (mean over seeds for `random`).
        difference: Accuracy minus that of multi_view with as many experts; None for the original.
        low: Lower end of the difference's 95 % interval.
        high: Upper end.
    """

    strategy: str
    experts: int
    accuracy: float
    difference: float | None = None
    low: float | None = None
    high: float | None = None


def compare(
    checkpoint: str | Path,
    budgets: Sequence[int],
    strategies: Sequence[str],
    evaluate: Evaluate,
    seeds: Sequence[int] = (0, 1, 2, 3),
    *,
    rows: Sequence[Sequence[int]] | None = None,
    calibration: str = "embedded",
    calibration_tokens: int = 65536,
    workdir: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Build a proxy by each strategy at each budget, evaluate it, and set it against multi_view.

    Args:
        checkpoint: Checkpoint folder, or ``embedded:NAME``.
        budgets: Numbers of experts to keep a layer.
        strategies: See `proxy.strategies.strategy`; multi_view is added where it is missing.
        evaluate: Returns 0 or 1 for each prompt, always the same prompts in the same order.
        seeds: Seeds of `random`, over which it is averaged.
        rows: Calibration rows, instead of those that `calibration` names.
        calibration: As in `BuildSpec`.
        calibration_tokens: As in `BuildSpec`.
        workdir: Where proxies are built; each is removed once it is evaluated. None for the system's place.
        progress: Called with sentences for humans.

    Returns:
        The original's row, then for each budget multi_view and the others in the given order.

    Raises:
        CheckpointError: See `build`.
        BuildError: See `build`; also when there is no seed, or `evaluate` returns something else.
    """
    folder = resolve_folder(str(checkpoint))
    opened = open_checkpoint(folder)
    layout = understand(opened)
    names = list(dict.fromkeys((REFERENCE, *strategies)))
    for name in names:
        check_request(strategy(name), Request(keep=layout.experts))
        check_possible(strategy(name), opened, layout)
    for budget in budgets:
        check_budget(layout, budget)
    if not seeds:
        raise BuildError("there is no seed for the random strategy", "give at least one seed")
    if rows is None:
        rows = calibration_rows(calibration, folder, calibration_tokens)
    stats = collect(
        folder, rows, calibration_tokens, progress, outputs=any(strategy(name).outputs for name in names)
    )
    bare = uncalibrated(opened, layout)

    def answers(name: str, budget: int, seed: int) -> NDArray[np.float64]:
        if progress:
            progress(f"{name} with {budget} experts" + (f", seed {seed}" if name == "random" else ""))
        with TemporaryDirectory(dir=workdir, prefix="proxy-") as scratch:
            spec = BuildSpec(str(folder), str(Path(scratch) / "proxy"), budget, strategy=name, seed=seed)
            given: Sequence[LayerStats] = stats if strategy(name).calibrated else bare
            build(spec, stats=given)
            return _checked(evaluate(Path(spec.out)))

    original_P = _checked(evaluate(folder))
    table = [Row(ORIGINAL, layout.experts, float(original_P.mean()))]
    for budget in budgets:
        correct = {
            name: _same_prompts(
                [answers(name, budget, seed) for seed in (seeds if name == "random" else seeds[:1])],
                len(original_P),
            )
            for name in names
        }
        for name, correct_P in correct.items():
            difference_P = correct_P - correct[REFERENCE]
            low, high = bootstrap(difference_P)
            accuracy, difference = float(correct_P.mean()), float(difference_P.mean())
            table.append(Row(name, budget, accuracy, difference, low, high))
    return table


def bootstrap(
    values_P: NDArray[np.float64], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean under resampling of prompts.

    Args:
        values_P: One value a prompt.
        resamples: Number of resamples.
        seed: Seed of the resampling.
    """
    index_BP = np.random.default_rng(seed).integers(0, len(values_P), (resamples, len(values_P)))
    low, high = np.quantile(values_P[index_BP].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def _same_prompts(runs: list[NDArray[np.float64]], prompts: int) -> NDArray[np.float64]:
    """Return the mean over runs, prompt by prompt."""
    for run_P in runs:
        if len(run_P) != prompts:
            raise BuildError(
                f"the evaluation gave {len(run_P)} answers for a proxy, {prompts} for the original",
                "ask every model the same prompts",
            )
    return np.asarray(np.stack(runs).mean(axis=0), np.float64)


def _checked(correct_P: NDArray[np.float64]) -> NDArray[np.float64]:
    """Refuse an evaluation that is not one 0 or 1 a prompt."""
    correct_P = np.asarray(correct_P, np.float64)
    if correct_P.ndim != 1 or not correct_P.size or not np.isin(correct_P, (0.0, 1.0)).all():
        raise BuildError(
            "the evaluation did not give one 0 or 1 for each prompt", "return one 0 or 1 a prompt"
        )
    return correct_P
