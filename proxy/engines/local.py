"""GRPO in plain PyTorch, one device, read from top to bottom: the embedded default engine.

What it does in one step, by stage: *sync* the trainer's weights into the rollout copy (bf16) · *rollout* with a KV
cache · *reward* · *reference* log-probabilities · *advantage* relative to the group · *forward* of the trainer (old
log-probabilities and the mismatch) · *loss* (clipped ratio and k3 KL to the frozen reference) · *gradients* clipped ·
*optimizer*.

Deviations from verl's GRPO: the ratio is taken against the rollout's own log-probabilities unless
`recipe.old_log_prob` is "trainer"; the KL coefficient is constant; there is no entropy bonus; one device.

Legend of shape suffixes: ``_B`` responses (= prompts × group), ``_L`` positions, ``_R`` response positions, ``_K``
experts a token, ``_E`` experts, ``_G`` groups.
"""

from __future__ import annotations

import copy
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from proxy.embedded import task
from proxy.engines import devices
from proxy.engines.injector import Injector, injector_for
from proxy.engines.metrics import masked_mean, mismatch, routing
from proxy.engines.policy import Policy, Routes, load, token_log_probs
from proxy.engines.rollout import encode_prompts, generate, texts
from proxy.engines.update import update
from proxy.specs import Recipe, RunOutcome, RunSpec
from taxonomy.stages import Action, Stage, StageContext

OnStep = Callable[[int, dict[str, float]], None]


class RouteLog:
    """Collects the routes of one or more forward passes, by MoE layer."""

    def __init__(self) -> None:
        self.passes: dict[int, list[Routes]] = defaultdict(list)

    def add(self, position: int, routes: Routes, batch: int) -> None:
        """Keep the routes of one forward pass as (ids_BLK, weights_BLK)."""
        ids_TK, weights_TK = (tensor.detach() for tensor in routes)
        shape = (batch, -1, ids_TK.shape[-1])
        self.passes[position].append((ids_TK.view(shape), weights_TK.view(shape)))

    def layers(self, length: int) -> list[Routes]:
        """Return, by layer, the routes of the first `length` positions with one row a token."""
        joined = []
        for position in sorted(self.passes):
            ids, weights = zip(*self.passes[position], strict=True)
            joined.append(
                (
                    torch.cat(ids, 1)[:, :length].flatten(0, 1),
                    torch.cat(weights, 1)[:, :length].flatten(0, 1),
                )
            )
        return joined


@dataclass(frozen=True)
class Graded:
    """Rewards of a batch: total and its two parts, each (B,)."""

    total_B: Tensor
    answer_B: Tensor
    format_B: Tensor


def grade(prompts: list[str], responses: list[str]) -> Graded:
    """Grade every response of a batch."""
    rewards = [task.grade(p, r) for p, r in zip(prompts, responses, strict=True)]
    return Graded(
        torch.tensor([r.total for r in rewards]),
        torch.tensor([r.answer for r in rewards]),
        torch.tensor([r.format for r in rewards]),
    )


def group_advantage_B(rewards_B: Tensor, group_size: int) -> Tensor:
    """Return (reward − group mean) / (group standard deviation + 1e-6), GRPO's advantage."""
    rewards_GN = rewards_B.view(-1, group_size)
    spread_G1 = rewards_GN.std(-1, keepdim=True)
    return ((rewards_GN - rewards_GN.mean(-1, keepdim=True)) / (spread_G1 + 1e-6)).flatten()


def seeded(*parts: object) -> torch.Generator:
    """Return a generator whose state depends on the parts alone."""
    return torch.Generator().manual_seed(random.Random("/".join(map(str, parts))).getrandbits(62))


def evaluate(
    policy: Policy, split: str, count: int, recipe: Recipe, seed: int, *, greedy: bool = False
) -> Graded:
    """Grade one response to each of the first `count` prompts of a split.

    The prompts and the noise are the same at every call with the same seed: differences are paired.
    """
    prompts = list(task.prompts(split)[:count])
    device = next(policy.model.parameters()).device
    batch = generate(
        policy,
        *encode_prompts(policy, prompts, device),
        max_new_tokens=recipe.max_new_tokens,
        temperature=0.0 if greedy else recipe.temperature,
        generator=seeded("evaluate", seed),
    )
    return grade(prompts, texts(policy, batch))


def routing_shares(policy: Policy, recipe: Recipe, seed: int) -> list[Tensor]:
    """Return the healthy share_E of routed tokens by expert, one tensor a MoE layer."""
    log = RouteLog()
    prompts = list(task.prompts("calibration")[:256])
    device = next(policy.model.parameters()).device
    tokens_BL, mask_BL = encode_prompts(policy, prompts, device)

    def tap(position: int, routes: Routes) -> Routes:
        log.add(position, routes, len(prompts))
        return routes

    policy.hook = tap
    with torch.no_grad():
        token_log_probs(policy, tokens_BL, mask_BL, 1, 1 / recipe.temperature)
    policy.hook = None
    shares = []
    for ids_TK, _ in log.layers(tokens_BL.shape[1]):
        counts_E = torch.bincount(ids_TK[mask_BL.flatten() == 1].flatten(), minlength=policy.num_experts)
        shares.append(counts_E / counts_E.sum())
    return shares


def sync_weights(trainer: Policy, rollout: Policy, injector: Injector, context: StageContext) -> None:
    """Copy every parameter and buffer of the trainer into the rollout, in the rollout's precision."""
    target = rollout.model.state_dict()
    for name, value in trainer.model.state_dict().items():
        target[name].copy_(injector.transform(Stage.SYNC, name, value, context))


def run(spec: RunSpec, folder: Path, on_step: OnStep) -> RunOutcome:
    """Train `spec.recipe.steps` steps and report each through `on_step(step, metrics)`.

    Deterministic for a seed on one device and thread.

    Args:
        spec: The run.
        folder: Checkpoint folder, already resolved.
        on_step: Called after each step; step 0 is the held-out evaluation before training, where one was asked for.

    Raises:
        InjectionRefused: The injection cannot be resolved.
        NotAMoE: The checkpoint is not one this engine runs.
    """
    started, cpu_started = time.monotonic(), time.process_time()
    device = devices.pick()
    healthy = spec.recipe
    injector = injector_for(spec)
    trainer = load(folder, torch.float32, device)
    reference = copy.deepcopy(trainer)
    rollout = trainer if healthy.exact else load(folder, torch.bfloat16, device)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=healthy.lr, weight_decay=0.01)
    shares = routing_shares(trainer, healthy, spec.seed)
    batch_size = healthy.prompts * healthy.group_size
    witness: dict[str, list[float]] = defaultdict(list)
    lag = 0

    def held_out() -> dict[str, float]:
        graded = evaluate(rollout, "test", healthy.eval_prompts, healthy, spec.seed)
        return {
            "val-core/reward/mean": float(graded.total_B.mean()),
            "val-core/answer/mean": float(graded.answer_B.mean()),
            "val-core/format/mean": float(graded.format_B.mean()),
        }

    if healthy.eval_every:
        on_step(0, held_out())

    for step in range(1, healthy.steps + 1):
        step_started = time.monotonic()
        recipe = injector.recipe(healthy, step)
        context = StageContext(step, recipe.temperature, trainer.top_k, trainer.num_experts)

        # sync
        if not healthy.exact:
            if step == 1 or injector.event(Stage.SYNC, context) is Action.DO:
                sync_weights(trainer, rollout, injector, context)
                lag = 0
            else:
                lag += 1

        # rollout
        drawn = task.drawn("rl", recipe.data_seed or spec.seed, step, recipe.prompts)
        prompts = [p for p in drawn for _ in range(recipe.group_size)]
        rollout_routes = RouteLog()

        def rollout_hook(
            position: int, routes: Routes, step: int = step, log: RouteLog = rollout_routes
        ) -> Routes:
            moment = StageContext(
                step,
                healthy.temperature,
                rollout.top_k,
                rollout.num_experts,
                rollout.layers[position],
                shares[position],
            )
            routes = injector.transform(Stage.ROLLOUT, "routes", routes, moment)
            log.add(position, routes, batch_size)
            return routes

        def tap(name: str, tensor: Tensor, context: StageContext = context) -> Tensor:
            changed: Tensor = injector.transform(Stage.ROLLOUT, name, tensor, context)
            return changed

        rollout.hook = rollout_hook
        batch = generate(
            rollout,
            *encode_prompts(rollout, prompts, device),
            max_new_tokens=recipe.max_new_tokens,
            temperature=recipe.temperature,
            generator=seeded("rollout", spec.seed, step),
            tap=tap,
        )
        rollout.hook = None

        # reward
        graded = grade(prompts, texts(rollout, batch))
        rewards_B = injector.transform(Stage.REWARD, "rewards", graded.total_B, context).to(device)

        # reference
        mask_BR = batch.response_mask_BR.float()
        scale, length = 1 / recipe.temperature, mask_BR.shape[1]
        with torch.no_grad():
            reference_BR, _ = token_log_probs(reference, batch.tokens_BL, batch.mask_BL, length, scale)
            reference_BR = injector.transform(Stage.REFERENCE, "log_probs", reference_BR, context)

        # advantage
        advantages_B = group_advantage_B(rewards_B, recipe.group_size)
        advantages_B = injector.transform(Stage.ADVANTAGE, "advantages", advantages_B, context)

        # forward (the trainer's view of the sampled tokens: old log-probabilities, and the mismatch)
        trainer_routes = RouteLog()

        def trainer_hook(position: int, routes: Routes, log: RouteLog = trainer_routes) -> Routes:
            log.add(position, routes, batch_size)
            return routes

        trainer.hook = trainer_hook
        with torch.no_grad():
            trainer_BR, entropy_BR = token_log_probs(trainer, batch.tokens_BL, batch.mask_BL, length, scale)
            trainer_BR = injector.transform(Stage.FORWARD, "log_probs", trainer_BR, context)
        trainer.hook = None
        rollout_BR = trainer_BR if healthy.exact else batch.log_probs_BR
        old_BR = rollout_BR if recipe.old_log_prob == "rollout" else trainer_BR

        # loss, gradients, optimizer
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr
        sums: dict[str, list[float]] = defaultdict(list)
        for epoch in range(recipe.epochs):
            order = torch.randperm(batch_size, generator=seeded("order", spec.seed, step, epoch)).to(device)
            for rows in order.chunk(recipe.mini_batches):
                for name, value in update(
                    trainer,
                    optimizer,
                    batch,
                    rows,
                    old_BR,
                    reference_BR,
                    advantages_B,
                    recipe,
                    injector,
                    context,
                ).items():
                    sums[name].append(value)
        if injector.active(step):
            witness["lr_ratio"].append(optimizer.param_groups[0]["lr"] / healthy.lr)
            updates = len(sums["actor/loss"]) / (healthy.epochs * healthy.mini_batches)
            witness["update_ratio"].append(updates)
            kl = sum(sums["actor/kl_loss"])
            if kl > 0 and healthy.kl_coef:
                term = sum(t - p for t, p in zip(sums["actor/loss"], sums["actor/pg_loss"], strict=True))
                witness["kl_term_deviation"].append(abs(term / (healthy.kl_coef * kl) - 1))
            witness["clipped_norm"].append(max(sums.pop("clipped_norm")) / healthy.max_grad_norm)
            witness["weight_lag"].append(float(lag))
        sums.pop("clipped_norm", None)

        # metrics
        fed = batch.tokens_BL.shape[1] - 1
        metrics = {name: sum(values) / len(values) for name, values in sums.items()}
        metrics |= mismatch(rollout_BR, trainer_BR, batch.response_mask_BR)
        metrics |= routing(
            trainer_routes.layers(fed) if healthy.exact else rollout_routes.layers(fed),
            trainer_routes.layers(fed),
            trainer.layers,
            batch.mask_BL[:, :fed].flatten() == 1,
            trainer.num_experts,
        )
        rewards_GN = rewards_B.view(-1, recipe.group_size)
        lengths_B = mask_BR.sum(-1)
        metrics |= {
            "critic/rewards/mean": float(rewards_B.mean()),
            "critic/rewards/answer": float(graded.answer_B.mean()),
            "critic/rewards/format": float(graded.format_B.mean()),
            "critic/advantages/max": float(advantages_B.max()),
            "critic/advantages/min": float(advantages_B.min()),
            "actor/entropy": float(masked_mean(entropy_BR, mask_BR)),
            "actor/lr": recipe.lr,
            "actor/kl_coef": recipe.kl_coef,
            "rollout/weight_lag": float(lag),
            "rollout/zero_std_groups": float((rewards_GN.std(-1) < 1e-6).float().mean()),
            "response_length/mean": float(lengths_B.mean()),
            "response_length/clip_ratio": float((lengths_B >= recipe.max_new_tokens).float().mean()),
        }
        if recipe.eval_every and (step % recipe.eval_every == 0 or step == healthy.steps):
            metrics |= held_out()
        metrics["timing_s/step"] = time.monotonic() - step_started
        on_step(step, metrics)

    return RunOutcome(
        "completed",
        steps=healthy.steps,
        witness=injector.witness() | {name: max(values) for name, values in witness.items()},
        cpu_s=time.process_time() - cpu_started,
        wall_s=time.monotonic() - started,
    )
