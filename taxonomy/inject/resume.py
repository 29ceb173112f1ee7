"""Injections at the checkpoint stage: the run is saved, killed and resumed, and a part of its state does not survive.

The engine asks before every step whether the run is resumed here ("resume"), then shows each part as it was read back
from the disk (`model`, `buffers`, `optimizer`, `scheduler`, `reference`); None is a part that is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taxonomy.stages import StageContext, Transform


def losing(*parts: str, interval: int) -> Transform:
    """Resume every `interval` steps, the first time when the fault becomes active, and lose some parts of the state.

    A fault that is active from the very first step has no past to lose: it resumes after the first interval.
    """

    def transform(name: str, state: Any, context: StageContext) -> Any:
        if name == "resume":
            return context.step > 1 and (context.step - context.from_step) % interval == 0
        return None if name in parts else state

    return transform


def reference_reanchored(params: Mapping[str, float]) -> Transform:
    """Take the reference from the resumed policy instead of the base checkpoint."""
    return losing("reference", interval=int(params["interval"]))


def optimizer_state_lost(params: Mapping[str, float]) -> Transform:
    """Resume with a fresh optimizer, and with the schedule at its beginning."""
    return losing("optimizer", "scheduler", interval=int(params["interval"]))


def buffers_lost(params: Mapping[str, float]) -> Transform:
    """Resume without the model's buffers: the routers' balancing bias is back at its initial value."""
    return losing("buffers", interval=int(params["interval"]))


def resumed(params: Mapping[str, float]) -> Transform:
    """Resume and lose nothing: the control that a resume by itself changes nothing."""
    return losing(interval=int(params["interval"]))
