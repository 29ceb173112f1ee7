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
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from proxy.embedded import task
from proxy.engines import devices
from proxy.engines.forward import log_probs, seen_weights
from proxy.engines.injector import InjectionRefused, Injector, injector_for
from proxy.engines.metrics import flips, masked_mean, mismatch, routing
from proxy.engines.policy import Policy, Routes, load, token_log_probs
from proxy.engines.resume import State, optimizer_for, persistent_buffers, resume
from proxy.engines.rollout import cache_distance, encode_prompts, generate, texts
from proxy.engines.router import router_parameters
from proxy.engines.taps import RouteLog, Taps, replay
from proxy.engines.update import Experience, update
from proxy.specs import NOTHING_TO_HIT, Recipe, RunOutcome, RunSpec
from taxonomy.stages import Action, Stage, StageContext

OnStep = Callable[[int, dict[str, float]], None]
PROBE_PROMPTS = 32
"""Fixed prompts on which the trainer's routes are compared from step to step."""


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


def advantage_B(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return GRPO's advantage for groups of any make-up; a response alone in its group keeps its reward, as in verl.

    Args:
        rewards_B: Rewards.
        groups_B: Group of each response, any integers.
    """
    advantages_B = rewards_B.clone()
    for group in groups_B.unique():
        members_B = groups_B == group
        if members_B.sum() > 1:
            advantages_B[members_B] = group_advantage_B(rewards_B[members_B], int(members_B.sum()))
    return advantages_B


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


def prompt_routes(policy: Policy, tokens_BL: Tensor, mask_BL: Tensor) -> list[Routes]:
    """Return the routes of prompts, one entry a MoE layer, one row a token."""
    log = RouteLog()

    def tap(position: int, routes: Routes) -> Routes:
        log.add(position, routes, len(tokens_BL))
        return routes

    policy.hook = tap
    with torch.no_grad():
        token_log_probs(policy, tokens_BL, mask_BL, 1, 1.0)
    policy.hook = None
    return log.layers(tokens_BL.shape[1])


def routing_shares(policy: Policy) -> list[Tensor]:
    """Return the healthy share_E of routed tokens by expert, one tensor a MoE layer."""
    prompts = list(task.prompts("calibration")[:256])
    device = next(policy.model.parameters()).device
    tokens_BL, mask_BL = encode_prompts(policy, prompts, device)
    shares = []
    for ids_TK, _ in prompt_routes(policy, tokens_BL, mask_BL):
        counts_E = torch.bincount(ids_TK[mask_BL.flatten() == 1].flatten(), minlength=policy.num_experts)
        shares.append(counts_E / counts_E.sum())
    return shares


def sync_weights(trainer: Policy, rollout: Policy, injector: Injector, context: StageContext) -> None:
    """Copy every parameter and buffer of the trainer into the rollout, in the rollout's precision."""
    target = rollout.model.state_dict()
    for name, value in trainer.model.state_dict().items():
        target[name].copy_(injector.transform(Stage.SYNC, name, value, context))


def weights_equal(trainer: Policy, rollout: Policy) -> float:
    """Return the share of tensors that are equal, bit by bit, in both after the cast to the rollout's precision."""
    target = rollout.model.state_dict()
    same = [torch.equal(v.to(target[n].dtype), target[n]) for n, v in trainer.model.state_dict().items()]
    return sum(same) / len(same)


def copied(policy: Policy, folder: Path, device: torch.device) -> Policy:
    """Return a policy of its own with the present weights and precision of another one of the same checkpoint."""
    made = load(folder, next(policy.model.parameters()).dtype, device)
    made.model.load_state_dict(policy.model.state_dict())
    return made


def refuse_if_nothing_to_lose(injector: Injector, trainer: Policy, first: int) -> None:
    """Raise InjectionRefused where a fault loses the buffers of a model that has none."""
    lost = injector.transform(Stage.CHECKPOINT, "buffers", {}, StageContext(first)) is None
    if lost and not persistent_buffers(trainer.model):
        raise InjectionRefused(f"{NOTHING_TO_HIT} buffers to lose")


def router_steps(trainer: Policy, before: list[Tensor]) -> tuple[float, float]:
    """Return the mean absolute change of router parameters and of all others since `before`."""
    own = router_parameters(trainer)
    moved: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter, old in zip(trainer.model.parameters(), before, strict=True):
        moved[id(parameter) in own].append((parameter.detach() - old).abs().flatten())
    routers, others = (float(torch.cat(moved[kind]).mean()) for kind in (True, False))
    return routers, others


def largest(witness: dict[str, list[float]]) -> dict[str, float]:
    """Return the largest finite number that was measured under each name."""
    finite = {name: [value for value in values if math.isfinite(value)] for name, values in witness.items()}
    return {name: max(values) for name, values in finite.items() if values}


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
    state = State(trainer, reference, optimizer_for(trainer, healthy.lr))
    refuse_if_nothing_to_lose(injector, trainer, spec.fault.from_step if spec.fault else 1)
    taps = Taps(injector, routing_shares(trainer))
    probe = encode_prompts(trainer, list(task.prompts("calibration")[:PROBE_PROMPTS]), device)
    probe_routes = prompt_routes(trainer, *probe)
    batch_size = healthy.prompts * healthy.group_size
    witness: dict[str, list[float]] = defaultdict(list)
    lag = 0
    prefix: Policy | None = (
        None  # the weights that made the prompts' cache, where they are not the rollout's own
    )

    def encode(text: str) -> list[int]:
        return list(trainer.tokenizer.encode(text, add_special_tokens=False).ids)

    paid: list[float] = []  # mean training rewards since the last evaluation

    def held_out() -> dict[str, float]:
        graded = evaluate(
            rollout, "test", healthy.eval_prompts, healthy, spec.seed, greedy=healthy.eval_greedy
        )
        reward = float(graded.total_B.mean())
        gap = {"val-core/reward_gap": reward - sum(paid) / len(paid)} if paid else {}
        paid.clear()
        return gap | {
            "val-core/reward/mean": reward,
            "val-core/answer/mean": float(graded.answer_B.mean()),
            "val-core/format/mean": float(graded.format_B.mean()),
        }

    if healthy.eval_every:
        on_step(0, held_out())

    for step in range(1, healthy.steps + 1):
        step_started = time.monotonic()
        recipe = injector.recipe(healthy, step)
        context = StageContext(
            step, recipe.temperature, trainer.top_k, trainer.num_experts, facts={"encode": encode}
        )

        # checkpoint
        if injector.transform(Stage.CHECKPOINT, "resume", False, context):
            restore = partial(injector.transform, Stage.CHECKPOINT, context=context)
            state, moved = resume(state, folder, recipe, device, restore)
            trainer, reference = state.trainer, state.reference
            rollout = trainer if healthy.exact else load(folder, torch.bfloat16, device)
            for name, distance in moved.items():
                witness[name].append(distance)

        # sync
        if injector.event(Stage.ROLLOUT, context) is Action.DO:
            prefix = None
        elif prefix is None:
            prefix = copied(rollout, folder, device)
        if not healthy.exact:
            if step == 1 or injector.event(Stage.SYNC, context) is Action.DO:
                sync_weights(trainer, rollout, injector, context)
                lag = 0
            else:
                lag += 1
        equal = weights_equal(trainer, rollout)

        # rollout
        drawn = task.drawn("rl", recipe.data_seed or spec.seed, step, recipe.prompts)
        prompts = [p for p in drawn for _ in range(recipe.group_size)]
        rollout_routes = RouteLog()

        masks: list[Tensor] = []

        def tap(
            name: str, tensor: Tensor, context: StageContext = context, masks: list[Tensor] = masks
        ) -> Tensor:
            if name == "attention_mask":
                masks[:] = [tensor]
            changed: Tensor = injector.transform(Stage.ROLLOUT, name, tensor, context)
            return changed

        asked = encode_prompts(rollout, prompts, device)

        def live(tokens: int, masks: list[Tensor] = masks, asked_BP: Tensor = asked[1][:, :-1]) -> Tensor:
            mask_BL = masks[0] if masks else asked_BP  # none yet: older weights fill the prompts' cache
            return mask_BL[:, -(tokens // batch_size) :].flatten()

        if prefix is not None:
            witness["prefix_change"].append(cache_distance(rollout, prefix, *asked))
        with ExitStack() as stack:
            for policy in (rollout, prefix):
                if policy is not None:
                    stack.enter_context(
                        taps.over(
                            policy, Stage.ROLLOUT, context, log=rollout_routes, batch=batch_size, live_T=live
                        )
                    )
            batch = generate(
                rollout,
                *asked,
                max_new_tokens=recipe.max_new_tokens,
                temperature=recipe.temperature,
                generator=seeded("rollout", spec.seed, step),
                tap=tap,
                prefix=prefix,
            )

        # reward
        responses = texts(rollout, batch)
        graded = grade(prompts, responses)
        ended_B = ((batch.tokens_BL == rollout.eos) & (batch.mask_BL == 1)).any(-1)
        facts = {
            "prompts": prompts,
            "responses": responses,
            "answer_B": graded.answer_B,
            "format_B": graded.format_B,
            "lengths_B": batch.response_mask_BR.sum(-1).cpu(),
            "truncated_B": ~ended_B.cpu(),
        }
        rewards_B = injector.transform(
            Stage.REWARD, "rewards", graded.total_B, replace(context, facts=facts)
        ).to(device)
        cut_short = float(
            (~ended_B & (batch.response_mask_BR.sum(-1) < healthy.max_new_tokens)).float().mean()
        )

        # batch
        batch = replace(
            batch,
            response_mask_BR=injector.transform(
                Stage.BATCH, "response_mask", batch.response_mask_BR, context
            ),
        )

        replayed = None
        if injector.acts(Stage.FORWARD, step) and not healthy.exact:
            replayed = replay(rollout_routes, batch.tokens_BL.shape[1])
        live_T = batch.mask_BL.flatten()

        # reference
        mask_BR = batch.response_mask_BR.float()
        scale, length = 1 / recipe.temperature, mask_BR.shape[1]
        with (
            torch.no_grad(),
            seen_weights(reference, injector, context),
            taps.over(reference, Stage.FORWARD, context, prefix="reference_", live_T=live_T),
        ):
            reference_BR, _ = log_probs(
                reference, batch.tokens_BL, batch.mask_BL, length, scale, injector, context
            )
            reference_BR = injector.transform(Stage.REFERENCE, "log_probs", reference_BR, context)

        # advantage
        groups_B = torch.arange(batch_size, device=device) // recipe.group_size
        regrouped_B = injector.transform(Stage.ADVANTAGE, "groups", groups_B, context)
        if regrouped_B is groups_B:
            advantages_B = group_advantage_B(rewards_B, recipe.group_size)
        else:
            advantages_B = advantage_B(rewards_B, regrouped_B)
        advantages_B = injector.transform(Stage.ADVANTAGE, "advantages", advantages_B, context)

        # forward (the trainer's view of the sampled tokens: old log-probabilities, and the mismatch)
        trainer_routes, width = RouteLog(), batch.tokens_BL.shape[1]
        with (
            torch.no_grad(),
            seen_weights(trainer, injector, context),
            taps.over(
                trainer,
                Stage.FORWARD,
                context,
                log=trainer_routes,
                batch=batch_size,
                width=width,
                replayed=replayed,
                live_T=live_T,
            ),
        ):
            trainer_BR, entropy_BR = log_probs(
                trainer, batch.tokens_BL, batch.mask_BL, length, scale, injector, context
            )
            trainer_BR = injector.transform(Stage.FORWARD, "log_probs", trainer_BR, context)
        rollout_BR = trainer_BR if healthy.exact else batch.log_probs_BR
        rollout_BR = injector.transform(Stage.BATCH, "rollout_log_probs", rollout_BR, context)
        old_BR = rollout_BR if recipe.old_log_prob == "rollout" else trainer_BR

        # loss, gradients, optimizer
        state.scheduled += 1
        warm = min(1.0, state.scheduled / recipe.warmup_steps) if recipe.warmup_steps else 1.0
        for group, multiple in zip(state.optimizer.param_groups, (1.0, recipe.router_lr), strict=False):
            group["lr"] = recipe.lr * warm * multiple
        experience = Experience(batch, old_BR, trainer_BR, reference_BR, advantages_B, replayed)
        apart = recipe.router_lr != healthy.router_lr
        start = [parameter.detach().clone() for parameter in trainer.model.parameters()] if apart else []
        sums: dict[str, list[float]] = defaultdict(list)
        for epoch in range(recipe.epochs):
            order = torch.randperm(batch_size, generator=seeded("order", spec.seed, step, epoch)).to(device)
            for rows in order.chunk(recipe.mini_batches):
                found = update(trainer, state.optimizer, experience, rows, recipe, taps, context)
                for name, value in found.items():
                    sums[name].append(value)
        own = {name: sums.pop(name) for name in list(sums) if "/" not in name}
        if apart:
            moved_routers, moved_others = router_steps(trainer, start)
            witness["router_step_ratio"].append(moved_routers / max(moved_others, 1e-30))
            witness["router_still"].append(1 - min(1.0, moved_routers / max(moved_others, 1e-30)))
        if injector.active(step):
            witness["lr_ratio"].append(state.optimizer.param_groups[0]["lr"] / healthy.lr)
            updates = len(sums["actor/loss"]) / (healthy.epochs * healthy.mini_batches)
            witness["update_ratio"].append(updates)
            kl = sum(sums["actor/kl_loss"])
            if kl > 0 and healthy.kl_coef:
                term = sum(t - p for t, p in zip(sums["actor/loss"], sums["actor/pg_loss"], strict=True))
                witness["kl_term_deviation"].append(abs(term / (healthy.kl_coef * kl) - 1))
            witness["clipped_norm"].append(max(own["clipped_norm"]) / healthy.max_grad_norm)
            witness["token_weight_spread"].append(max(own["token_weight_spread"]))
            witness["balancing_term"].append(max(own["balancing_term"]))
            nonfinite = sums["actor/nonfinite_grad"]
            witness["nonfinite_updates"].append(sum(nonfinite) / len(nonfinite))
            witness["cut_short"].append(cut_short)
            witness["weight_lag"].append(float(lag))

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
        before, probe_routes = probe_routes, prompt_routes(trainer, *probe)
        metrics |= flips(before, probe_routes, trainer.layers, probe[1].flatten() == 1)
        paid.append(float(rewards_B.mean()))
        rewards_GN = rewards_B.view(-1, recipe.group_size)
        lengths_B = mask_BR.sum(-1)
        metrics |= {
            "critic/rewards/mean": paid[-1],
            "critic/rewards/std": float(rewards_B.std()),
            "critic/rewards/answer": float(graded.answer_B.mean()),
            "critic/rewards/format": float(graded.format_B.mean()),
            "critic/advantages/max": float(advantages_B.max()),
            "critic/advantages/min": float(advantages_B.min()),
            "actor/entropy": float(masked_mean(entropy_BR, mask_BR)),
            "actor/first_ratio_deviation": own["ratio_deviation"][0],
            "actor/lr": recipe.lr * warm,
            "actor/kl_coef": recipe.kl_coef,
            "rollout/weight_lag": float(lag),
            "rollout/weights_equal": equal,
            "rollout/zero_std_groups": float((rewards_GN.std(-1) < 1e-6).float().mean()),
            "response_length/mean": float(lengths_B.mean()),
            "response_length/min": float(lengths_B.min()),
            "response_length/max": float(lengths_B.max()),
            "response_length/clip_ratio": float((lengths_B >= recipe.max_new_tokens).float().mean()),
        }
        if recipe.eval_every and (step % recipe.eval_every == 0 or step == healthy.steps):
            metrics |= held_out()
        metrics["timing_s/step"] = time.monotonic() - step_started
        on_step(step, metrics)

    return RunOutcome(
        "completed",
        steps=healthy.steps,
        witness=injector.witness() | largest(witness),
        cpu_s=time.process_time() - cpu_started,
        wall_s=time.monotonic() - started,
    )
