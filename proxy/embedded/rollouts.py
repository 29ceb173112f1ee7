"""Calibration rows of the embedded task: prompts of its own split, each answered by the checkpoint itself."""

from __future__ import annotations

from pathlib import Path

import torch

from proxy.embedded import task
from proxy.engines import devices
from proxy.engines.local import seeded
from proxy.engines.policy import load
from proxy.engines.rollout import encode_prompts, generate
from proxy.specs import Recipe

BATCH = 256


def calibration_rows(folder: Path, max_tokens: int, seed: int = 0) -> list[list[int]]:
    """Return token rows (prompt, sampled response) without padding, about `max_tokens` tokens in all.

    The prompts come from the `calibration` split, which neither RL nor the test set shares; they are gone through as
    often as the budget asks, with fresh samples.
    """
    device = devices.pick()
    policy = load(folder, torch.float32, device)
    recipe = Recipe()
    pool = task.prompts("calibration")
    rows: list[list[int]] = []
    tokens = part = 0
    while tokens < max_tokens:
        start = part * BATCH % len(pool)
        prompts = [pool[(start + i) % len(pool)] for i in range(BATCH)]
        batch = generate(
            policy,
            *encode_prompts(policy, prompts, device),
            max_new_tokens=recipe.max_new_tokens,
            temperature=recipe.temperature,
            generator=seeded("calibration", seed, part),
        )
        live = batch.mask_BL.bool()
        rows += [row[mask].tolist() for row, mask in zip(batch.tokens_BL, live, strict=True)]
        tokens = sum(map(len, rows))
        part += 1
    return rows
