"""Injections of the reward stage: what is paid is not what is wanted (category "optimisation and training stability").

They read what the stage knows about the responses from `StageContext.facts`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from taxonomy.stages import StageContext, Transform, on


def share_of(text: str, step: int) -> float:
    """Return a number in [0, 1) that depends on the text and the step alone."""
    return zlib.crc32(f"{step}/{text}".encode()) / 2**32


def reward_parser_failure(params: Mapping[str, float]) -> Transform:
    """Pay nothing for a `share` of the prompts, whatever the response: their answers cannot be parsed."""
    share = params["share"]

    def change(rewards_B: Any, context: StageContext) -> Any:
        parsed = [share_of(prompt, 0) >= share for prompt in context.facts["prompts"]]
        return rewards_B * rewards_B.new_tensor(parsed)

    return on("rewards", change)


def reward_noise(params: Mapping[str, float]) -> Transform:
    """Pay nothing for a `share` of the right answers, drawn anew for every response and step."""
    share = params["share"]

    def change(rewards_B: Any, context: StageContext) -> Any:
        facts = context.facts
        missed = [
            right > 0 and share_of(f"{place}/{response}", context.step) < share
            for place, (right, response) in enumerate(
                zip(facts["answer_B"].tolist(), facts["responses"], strict=True)
            )
        ]
        return rewards_B * (1 - rewards_B.new_tensor(missed))

    return on("rewards", change)


def reward_pays_for_length(params: Mapping[str, float]) -> Transform:
    """Add a bonus in proportion to the length, `bonus` for the longest response of the batch."""
    bonus = params["bonus"]

    def change(rewards_B: Any, context: StageContext) -> Any:
        lengths_B = context.facts["lengths_B"].to(rewards_B)
        return rewards_B + bonus * lengths_B / lengths_B.max()

    return on("rewards", change)


def reward_by_class(params: Mapping[str, float]) -> Transform:
    """Pay by the class a response falls into, `prior` for one and 1 − `prior` for the other, whatever was asked.

    The class is the parity of the last character: in a task whose answers are numbers, even or odd.
    """
    prior, share = params["prior"], params["share"]

    def change(rewards_B: Any, context: StageContext) -> Any:
        paid = [
            (1 - prior if ord(response[-1]) % 2 else prior) if response[-1:].isdigit() else 0.0
            for response in context.facts["responses"]
        ]
        return (1 - share) * rewards_B + share * rewards_B.new_tensor(paid)

    return on("rewards", change)
