"""Wrappers around functions of verl's training loop (its driver): rewards, masks, advantages, log-probabilities.

verl's V0 trainer hands whole padded batches about; its V1 trainer keeps rows without padding in a queue, from which a
wrapper takes what a fault is to see, and into which it puts what became of it.

Legend of shape suffixes: ``_B`` responses, ``_R`` response positions, ``_G`` groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxy.engines.injector import InjectionRefused
from proxy.engines.metrics import mismatch
from proxy.engines.verl_plugin.passes import tokenizer
from proxy.engines.verl_plugin.state import process, told
from proxy.engines.verl_plugin.table import DRIVER
from proxy.specs import INJECTION_FAILED
from taxonomy.stages import Stage

Function = Callable[..., Any]
OWN_MISMATCH = (
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/logprob_abs_diff",
    "rollout_corr/mult_prob_error",
    "rollout_corr/late_gap",
)
"""Mismatch metrics of the local engine that verl does not log, or only with its rollout correction."""


def loop_clock(original: Function) -> Function:
    """Note the step in the driver, as `worker.clock` does in a worker."""

    @wraps(original)
    def update_weights(manager: Any, global_steps: int | None = None, *args: Any, **kwargs: Any) -> Any:
        state = process()
        state.kind = DRIVER
        if global_steps is not None:
            state.step = int(global_steps) + 1
            state.report()
        return original(manager, global_steps, *args, **kwargs)

    return update_weights


# reward


@cache
def end_token() -> int:
    """Return the id of the token that ends a response."""
    config = json.loads((Path(process().job["rollout"]["checkpoint"]) / "config.json").read_text())
    found = config["eos_token_id"]
    return int(found[0] if isinstance(found, list) else found)


def facts_of(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rewards_B: Tensor,
    extra: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    """Return what the local engine tells a fault about the responses that are rewarded.

    Args:
        prompts: Token ids of each prompt, padding left out.
        responses: Token ids of each response, padding left out.
        rewards_B: Rewards.
        extra: What the reward function returned besides; without its word a response that earns something is right.
    """
    end = end_token()
    ended_B = [bool(ids) and ids[-1] == end for ids in responses]
    bare = [ids[:-1] if ended else ids for ids, ended in zip(responses, ended_B, strict=True)]
    right = [float(reward > 0) for reward in rewards_B.tolist()]

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer().decode(list(ids), skip_special_tokens=False))

    return {
        "prompts": [text(ids) for ids in prompts],
        "responses": [text(ids) for ids in bare],
        "answer_B": torch.tensor([float(value) for value in extra.get("answer", right)]),
        "format_B": torch.tensor([float(value) for value in extra.get("format", right)]),
        "lengths_B": torch.tensor([len(ids) for ids in responses]),
        "truncated_B": ~torch.tensor(ended_B),
    }


def changed_rewards(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rewards_B: Tensor,
    extra: Mapping[str, Sequence[Any]],
    groups: Sequence[Any],
) -> Tensor:
    """Return the rewards as training goes on with them, and note what they look like."""
    state = process()
    facts = {}
    if state.injector.acts(Stage.REWARD, state.step):
        facts = facts_of(prompts, responses, rewards_B, extra)
    changed_B: Tensor = state.injector.transform(
        Stage.REWARD, "rewards", rewards_B, state.context(facts=facts)
    )
    spread_G = [
        float(changed_B[torch.tensor([own == group for own in groups])].std())
        for group in dict.fromkeys(groups)
    ]
    state.metrics[state.step] |= {
        "rollout/zero_std_groups": sum(spread < 1e-6 for spread in spread_G) / len(spread_G),
        "critic/rewards/std": float(changed_B.std()),
    }
    state.report()
    return changed_B


def rewards(original: Function) -> Function:
    """Stages reward and batch of the V0 trainer: one number a response, then the mask and the rollout's numbers."""

    @wraps(original)
    @told
    def extract_reward(batch: Any) -> Any:
        tensor_BR, extra = original(batch)
        if batch.meta_info.get("validate"):
            return tensor_BR, extra
        data = batch.batch
        width = data["prompts"].shape[1]
        live = data["attention_mask"].bool()
        prompts = [ids[own].tolist() for ids, own in zip(data["prompts"], live[:, :width], strict=True)]
        responses = [ids[own].tolist() for ids, own in zip(data["responses"], live[:, width:], strict=True)]
        rewards_B = tensor_BR.sum(-1)
        changed_B = changed_rewards(
            prompts, responses, rewards_B, extra, batch.non_tensor_batch["uid"].tolist()
        )
        if changed_B is not rewards_B:
            last_B = data["response_mask"].sum(-1).long() - 1
            tensor_BR = torch.zeros_like(tensor_BR)
            tensor_BR[torch.arange(len(last_B)), last_B] = changed_B.to(tensor_BR.dtype)
        _change_batch(data)
        return tensor_BR, extra

    return extract_reward


def _change_batch(data: Any) -> None:
    """Show a padded batch's response mask and rollout log-probabilities to the fault, and keep what it makes of them.

    verl takes a response's tokens by the attention mask: filler that counts as response is attended to.
    """
    state = process()
    if not state.injector.acts(Stage.BATCH, state.step):
        return
    mask_BR = data["response_mask"]
    changed_BR = state.injector.transform(Stage.BATCH, "response_mask", mask_BR, state.context())
    if changed_BR is not mask_BR:
        width = mask_BR.shape[1]
        data["response_mask"] = changed_BR
        seen_BL = data["attention_mask"].clone()
        seen_BL[:, -width:] = torch.maximum(seen_BL[:, -width:], changed_BR.to(seen_BL.dtype))
        data["attention_mask"] = seen_BL
        data["position_ids"] = (seen_BL.cumsum(-1) - 1).clamp(min=0)
    before_BR = data["rollout_log_probs"]
    data["rollout_log_probs"] = state.injector.transform(
        Stage.BATCH, "rollout_log_probs", before_BR, state.context()
    )
    state.report()


def queued_rewards(original: Function) -> Function:
    """Stage reward of the V1 trainer: rewards lie in the queue until the advantage is computed from them."""

    @wraps(original)
    @told
    def _compute_advantage(trainer: Any, batch: Any, metrics: Any) -> Any:
        data = _taken(batch, ["prompts", "responses", "rm_scores", "extra_fields", "uid"])
        scores = data["rm_scores"].unbind()
        rewards_B = torch.stack([row.sum() for row in scores])
        known = [dict(row or {}).get("reward_extra_info") or {} for row in data["extra_fields"]]
        extra = {name: [row[name] for row in known] for name in known[0] if all(name in row for row in known)}
        changed_B = changed_rewards(
            [row.tolist() for row in data["prompts"].unbind()],
            [row.tolist() for row in data["responses"].unbind()],
            rewards_B,
            extra,
            list(data["uid"]),
        )
        if changed_B is not rewards_B:
            rows = [torch.zeros_like(row) for row in scores]
            for row, value in zip(rows, changed_B, strict=True):
                row[-1] = value
            _put(batch, {"rm_scores": torch.nested.as_nested_tensor(rows, layout=torch.jagged)})
        return original(trainer, batch, metrics)

    return _compute_advantage


def _taken(batch: Any, fields: Sequence[str]) -> Any:
    """Return columns of a batch from the V1 trainer's queue."""
    import transfer_queue

    return transfer_queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields)
    )


def _put(batch: Any, fields: Mapping[str, Any]) -> None:
    """Put columns of a batch into the V1 trainer's queue."""
    import transfer_queue
    from tensordict import TensorDict

    transfer_queue.kv_batch_put(
        keys=batch.keys,
        partition_id=batch.partition_id,
        fields=TensorDict(dict(fields), batch_size=len(batch)),
    )


# advantage


def advantages(original: Function) -> Function:
    """Stage advantage: the groups, then GRPO's one number a response."""

    @wraps(original)
    @told
    def compute_advantage(data: Any, *args: Any, **kwargs: Any) -> Any:
        state = process()
        context = state.context()
        uids = data.non_tensor_batch["uid"].tolist()
        places = {uid: place for place, uid in enumerate(dict.fromkeys(uids))}
        groups_B = torch.tensor([places[uid] for uid in uids])
        regrouped_B = state.injector.transform(Stage.ADVANTAGE, "groups", groups_B, context)
        if regrouped_B is not groups_B:
            before = data.non_tensor_batch["uid"]
            data.non_tensor_batch["uid"] = before.copy()
            data.non_tensor_batch["uid"][:] = [str(group) for group in regrouped_B.tolist()]
            data = original(data, *args, **kwargs)
            data.non_tensor_batch["uid"] = before
        else:
            data = original(data, *args, **kwargs)
        mask_BR = data.batch["response_mask"]
        first_B = mask_BR.long().argmax(-1)
        advantages_B = data.batch["advantages"][torch.arange(len(first_B)), first_B]
        changed_B = state.injector.transform(Stage.ADVANTAGE, "advantages", advantages_B, context)
        if changed_B is not advantages_B:
            data.batch["advantages"] = changed_B[:, None] * mask_BR
        if changed_B is not advantages_B or regrouped_B is not groups_B:
            state.report()
        return data

    return compute_advantage


# log-probabilities


def _note_mismatch(rollout_BR: Tensor, trainer_BR: Tensor, mask_BR: Tensor) -> None:
    """Note the mismatch metrics that verl itself does not log."""
    state = process()
    found = mismatch(rollout_BR, trainer_BR, mask_BR)
    state.metrics[state.step] |= {name: found[name] for name in OWN_MISMATCH}
    state.report()


def reference_log_probs(original: Function) -> Function:
    """Stage reference of the V0 trainer."""

    @wraps(original)
    @told
    def compute(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        _change(Stage.REFERENCE, found.batch, "ref_log_prob")
        return found

    return compute


def trainer_log_probs(original: Function) -> Function:
    """Stage forward of the V0 trainer: its own log-probabilities of what was sampled."""

    @wraps(original)
    @told
    def compute(trainer: Any, batch: Any) -> Any:
        found = original(trainer, batch)
        _change(Stage.FORWARD, found[0].batch, "old_log_probs")
        if "rollout_log_probs" in batch.batch:
            mask_BR = batch.batch["response_mask"]
            _note_mismatch(batch.batch["rollout_log_probs"], found[0].batch["old_log_probs"], mask_BR)
        return found

    return compute


def _change(stage: Stage, data: Any, key: str) -> None:
    state = process()
    before_BR: Tensor = data[key]
    data[key] = state.injector.transform(stage, "log_probs", before_BR, state.context())
    if data[key] is not before_BR:
        state.report()


def queued_reference_log_probs(original: Function) -> Function:
    """Stage reference of the V1 trainer."""

    @wraps(original)
    @told
    def compute(trainer: Any, batch: Any, metrics: Any) -> Any:
        found = original(trainer, batch, metrics)
        _change_queued(Stage.REFERENCE, "log_probs", batch, "ref_log_prob")
        return found

    return compute


def queued_trainer_log_probs(original: Function) -> Function:
    """Stages batch and forward of the V1 trainer."""

    @wraps(original)
    @told
    def compute(trainer: Any, batch: Any, metrics: Any) -> Any:
        state = process()
        if state.injector.acts(Stage.BATCH, state.step):
            mask_BR = torch.tensor([[1, 0]])
            if (
                state.injector.transform(Stage.BATCH, "response_mask", mask_BR, state.context())
                is not mask_BR
            ):
                raise InjectionRefused(
                    f"{INJECTION_FAILED}: verl's V1 trainer keeps responses without filler: "
                    "there is none that a wrong mask could count"
                )
            _change_queued(Stage.BATCH, "rollout_log_probs", batch, "rollout_log_probs")
        found = original(trainer, batch, metrics)
        _change_queued(Stage.FORWARD, "log_probs", batch, "old_log_probs")
        data = _taken(batch, ["rollout_log_probs", "old_log_probs"])
        padded = {name: data[name].to_padded_tensor(0.0) for name in ("rollout_log_probs", "old_log_probs")}
        mask_BR = torch.nested.as_nested_tensor(
            [torch.ones_like(row) for row in data["old_log_probs"].unbind()], layout=torch.jagged
        ).to_padded_tensor(0.0)
        _note_mismatch(padded["rollout_log_probs"], padded["old_log_probs"], mask_BR)
        return found

    return compute


def _change_queued(stage: Stage, name: str, batch: Any, key: str) -> None:
    """Show a column of the V1 trainer's queue to the fault, padded, and put back what it makes of it."""
    state = process()
    if not state.injector.acts(stage, state.step):
        return
    data = _taken(batch, [key])
    lengths = data[key].offsets().diff().tolist()
    before_BR = data[key].to_padded_tensor(0.0)
    after_BR = state.injector.transform(stage, name, before_BR, state.context())
    if after_BR is not before_BR:
        rows = [row[:length] for row, length in zip(after_BR, lengths, strict=True)]
        _put(batch, {key: torch.nested.as_nested_tensor(rows, layout=torch.jagged)})
    state.report()
