"""Noise by request: a response depends on its own seed, not on what else is in the batch."""

import torch

from proxy.embedded import resolve
from proxy.engines.local import seeded
from proxy.engines.policy import load
from proxy.engines.rollout import encode_prompts, generate


def test_a_response_does_not_depend_on_the_rest_of_the_batch():
    policy = load(resolve("embedded:qwen3_moe"), torch.float32, torch.device("cpu"))
    prompts = ["1+2=", "17+48=", "9*33="]

    def responses(order):
        tokens, mask = encode_prompts(policy, [prompts[i] for i in order], torch.device("cpu"))
        generators = [seeded("rollout", 1, i) for i in order]
        batch = generate(policy, tokens, mask, max_new_tokens=5, temperature=0.9, generator=generators)
        width = batch.response_mask_BR.shape[1]
        rows = zip(order, batch.tokens_BL[:, -width:], batch.response_mask_BR.bool(), strict=True)
        return {i: row[live].tolist() for i, row, live in rows}

    together = responses([0, 1, 2])
    assert responses([2, 0, 1]) == together
    assert responses([1]) == {1: together[1]}
    assert len({tuple(row) for row in together.values()}) == 3
