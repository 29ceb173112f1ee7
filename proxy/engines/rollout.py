"""Token-by-token decoding with a KV cache: the rollout side of the local engine.

Legend of shape suffixes: ``_B`` responses, ``_P`` padded prompt positions, ``_L`` prompt and response positions,
``_R`` response positions, ``_V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from proxy.engines.policy import Policy, positions_BL

Tap = Callable[[str, Tensor], Tensor]
"""(tensor name, tensor) → what the rollout goes on with; names: scale, attention_mask, logits, log_probs."""


@dataclass(frozen=True)
class Batch:
    """Sampled responses.

    Attributes:
        tokens_BL: Left-padded prompts followed by the responses; finished rows are filled with the pad token.
        mask_BL: 1 for real tokens.
        response_mask_BR: 1 for response tokens, the end token included.
        log_probs_BR: Log-probabilities of the sampled tokens as the rollout reports them, float32.
        sampled_log_probs_BR: The same before the `log_probs` tap touched them.
    """

    tokens_BL: Tensor
    mask_BL: Tensor
    response_mask_BR: Tensor
    log_probs_BR: Tensor
    sampled_log_probs_BR: Tensor


def encode_prompts(policy: Policy, texts: list[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (tokens_BP, mask_BP) of left-padded prompts."""
    rows = [policy.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    width = max(map(len, rows))
    tokens_BP = torch.tensor([[policy.pad] * (width - len(row)) + row for row in rows], device=device)
    mask_BP = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return tokens_BP, mask_BP


@torch.no_grad()
def generate(
    policy: Policy,
    tokens_BP: Tensor,
    mask_BP: Tensor,
    *,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator | Sequence[torch.Generator],
    tap: Tap = lambda _name, tensor: tensor,
    prefix: Policy | None = None,
) -> Batch:
    """Sample one response a row from the softmax of logits / temperature (temperature 0: greedy).

    The randomness is Gumbel noise from `generator`, one draw a row and token, so a run is reproducible whatever the
    batch's other rows do. With a generator for each row it is so whatever other rows there are. With a `prefix` policy
    the keys and values of the prompts (their last token excepted) are that policy's: a cache that older weights made.
    """
    batch, device = len(tokens_BP), tokens_BP.device
    cache = DynamicCache(config=policy.model.config)
    scale = tap(
        "scale", torch.tensor(1 / temperature if temperature else 1.0, dtype=torch.float32, device=device)
    )
    alive_B = torch.ones(batch, dtype=torch.long, device=device)
    tokens, masks, reported, sampled = [tokens_BP], [mask_BP], [], []
    step_BL = tokens_BP
    if prefix is not None:
        fill(prefix, tokens_BP, mask_BP, cache)
        step_BL = tokens_BP[:, -1:]
    for _ in range(max_new_tokens):
        mask_BL = torch.cat(masks, 1)
        logits_BV = policy.model(
            input_ids=step_BL,
            attention_mask=tap("attention_mask", mask_BL),
            position_ids=positions_BL(mask_BL)[:, -step_BL.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        logits_BV = tap("logits", logits_BV.float())
        noise_BV = _exponential_BV(logits_BV.shape, generator)
        true_scale = 1 / temperature if temperature else 1.0
        choice_BV = logits_BV * true_scale - (noise_BV.to(device).log() if temperature else 0)
        next_B = torch.where(alive_B == 1, choice_BV.argmax(-1), policy.pad)
        chosen_B1 = next_B[:, None]
        sampled.append((logits_BV * true_scale).log_softmax(-1).gather(-1, chosen_B1))
        reported.append(tap("log_probs", (logits_BV * scale).log_softmax(-1).gather(-1, chosen_B1)))
        tokens.append(chosen_B1)
        masks.append(alive_B[:, None])
        alive_B = alive_B * (next_B != policy.eos).long()
        step_BL = chosen_B1
        if not alive_B.any():
            break
    return Batch(
        torch.cat(tokens, 1),
        torch.cat(masks, 1),
        torch.cat(masks[1:], 1),
        torch.cat(reported, 1),
        torch.cat(sampled, 1),
    )


def fill(policy: Policy, tokens_BP: Tensor, mask_BP: Tensor, cache: DynamicCache) -> None:
    """Put the keys and values of all prompt tokens but the last into an empty cache."""
    policy.model(
        input_ids=tokens_BP[:, :-1],
        attention_mask=mask_BP[:, :-1],
        position_ids=positions_BL(mask_BP)[:, :-1],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )


@torch.no_grad()
def cache_distance(policy: Policy, prefix: Policy, tokens_BP: Tensor, mask_BP: Tensor) -> float:
    """Return how far the keys and values of a prefix policy are from the policy's own: |difference| / |own|, means."""
    own: Any = DynamicCache(config=policy.model.config)
    other: Any = DynamicCache(config=policy.model.config)
    fill(policy, tokens_BP, mask_BP, own)
    fill(prefix, tokens_BP, mask_BP, other)
    gaps, sizes = [], []
    for mine, theirs in zip(own.layers, other.layers, strict=True):
        for left, right in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            gaps.append((left.float() - right.float()).abs().sum())
            sizes.append(left.float().abs().sum())
    return float(sum(gaps) / sum(sizes))


def _exponential_BV(shape: torch.Size, generator: torch.Generator | Sequence[torch.Generator]) -> Tensor:
    """Return standard exponential noise, from one generator or from one for each row."""
    if isinstance(generator, torch.Generator):
        return torch.empty(shape, dtype=torch.float32).exponential_(generator=generator)
    return torch.stack(
        [torch.empty(shape[1:], dtype=torch.float32).exponential_(generator=row) for row in generator]
    )


def texts(policy: Policy, batch: Batch) -> list[str]:
    """Return the responses as text, end token left out; special tokens inside stay visible."""
    found = []
    response_BR = batch.tokens_BL[:, -batch.response_mask_BR.shape[1] :]
    for row_R, mask_R in zip(response_BR.tolist(), batch.response_mask_BR.tolist(), strict=True):
        ids = [token for token, live in zip(row_R, mask_R, strict=True) if live]
        if ids and ids[-1] == policy.eos:
            ids.pop()
        found.append(policy.tokenizer.decode(ids, skip_special_tokens=False))
    return found
