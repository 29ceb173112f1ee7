"""`make bench`: what the spine costs, as ratios to a plain training loop timed in the same run.

The plain loop is what anybody would write first with transformers: sample with the cache, one forward and backward of
a policy-gradient loss, one optimizer step; no reference model, no metrics, no routes, no precision mix. Absolute
seconds depend on the machine and its mood, ratios hardly.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from proxy.build import build
from proxy.embedded import resolve, task
from proxy.engines import local
from proxy.engines.policy import Policy, load, token_log_probs
from proxy.engines.rollout import encode_prompts
from proxy.specs import BuildSpec, Recipe, RunSpec

STEPS = 12
ROUNDS = 3
CPU = torch.device("cpu")


def plain_step(policy: Policy, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Make one step of the plain loop on as many samples as a step of the engine has."""
    prompts = [p for p in task.prompts("rl")[: recipe.prompts] for _ in range(recipe.group_size)]
    tokens_BP, mask_BP = encode_prompts(policy, prompts, CPU)
    with torch.no_grad():
        tokens_BL = policy.model.generate(
            tokens_BP, attention_mask=mask_BP, max_new_tokens=recipe.max_new_tokens, do_sample=True
        )
    response = tokens_BL.shape[1] - tokens_BP.shape[1]
    mask_BL = torch.cat([mask_BP, torch.ones(len(prompts), response, dtype=mask_BP.dtype)], 1)
    log_probs_BR, _ = token_log_probs(policy, tokens_BL, mask_BL, response, 1 / recipe.temperature)
    optimizer.zero_grad()
    (-log_probs_BR.mean()).backward()
    optimizer.step()


def cpu_seconds(function: object, repeats: int) -> float:
    """Return the CPU seconds of one call, from `repeats` calls."""
    started = time.process_time()
    for _ in range(repeats):
        function()  # type: ignore[operator]
    return (time.process_time() - started) / repeats


def engine_step(folder: Path, recipe: Recipe) -> float:
    """Return the CPU seconds of one step of the local engine, start-up taken out."""
    marks: list[float] = []
    local.run(
        RunSpec(str(folder), recipe, 1), folder, lambda _step, _metrics: marks.append(time.process_time())
    )
    return statistics.median(b - a for a, b in itertools.pairwise(marks))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    original, recipe = resolve("embedded:qwen3_moe"), Recipe(steps=STEPS)
    table = Table("what", "CPU s", "ratio to the plain step", title=f"medians of {ROUNDS} rounds")
    with tempfile.TemporaryDirectory() as scratch:
        proxy = Path(scratch) / "proxy"
        spec = BuildSpec("embedded:qwen3_moe", str(proxy), 12, calibration_tokens=32768)
        started = time.process_time()
        build(spec)
        build_s = time.process_time() - started
        rows: dict[str, list[float]] = {"plain": [], "original": [], "proxy": []}
        for _ in range(ROUNDS):
            policy = load(original, torch.float32, CPU)
            optimizer = torch.optim.AdamW(policy.model.parameters(), lr=recipe.lr)
            plain_step(policy, optimizer, recipe)
            rows["plain"].append(cpu_seconds(lambda p=policy, o=optimizer: plain_step(p, o, recipe), STEPS))
            rows["original"].append(engine_step(original, recipe))
            rows["proxy"].append(engine_step(proxy, recipe))
    plain_s = statistics.median(rows["plain"])
    for name, label in (
        ("plain", "plain step (original, fp32)"),
        ("original", "engine step, original"),
        ("proxy", "engine step, proxy with 12 of 32 experts"),
    ):
        seconds = statistics.median(rows[name])
        table.add_row(label, f"{seconds:.3f}", f"{seconds / plain_s:.2f}")
    table.add_row("build of that proxy, calibration included", f"{build_s:.2f}", f"{build_s / plain_s:.0f}")
    with tempfile.TemporaryDirectory() as scratch:
        started = time.monotonic()
        command = [sys.executable, "-m", "diagnose", "run", "kl_spike", "--out", f"{scratch}/run"]
        code = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
        wall_s = time.monotonic() - started
    table.add_row(f"diagnose run kl_spike, wall (exit {code})", f"{wall_s:.1f}", f"{wall_s / plain_s:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
