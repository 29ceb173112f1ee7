"""What GRPO post-training of a model costs, from its sizes alone: the paper's Table 2 for the user's model.

Everything is arithmetic; no weights are read and nothing is measured. The formulas stand in ``docs/cost.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from proxy.errors import CheckpointError
from proxy.families import COMPARE
from proxy.sizes import Shape

BYTES = {"weights": 4, "gradients": 4, "optimizer": 8, "reference": 2, "rollout": 2}
"""Bytes a parameter in each state: fp32 weights and gradients, AdamW's two fp32 moments, bf16 reference and rollout."""
USABLE = 0.9
"""Share of an accelerator's memory that can be planned with (vLLM's default gpu_memory_utilization)."""
GIB = 1024**3


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator, from its maker's data sheet.

    Attributes:
        name: Name on the command line.
        memory: GiB of one device.
        node: Devices of one node.
        tflops: Dense bf16 peak of one device, TFLOP/s.
        bandwidth: Memory bandwidth of one device, TB/s.
    """

    name: str
    memory: float
    node: int
    tflops: float
    bandwidth: float


ACCELERATORS = {
    device.name: device
    for device in (
        Accelerator("ascend-910b", 64, 8, 376, 1.6),
        Accelerator("ascend-910c", 64, 16, 376, 1.6),  # one of a package's two dies: what torch_npu counts
        Accelerator("a100", 80, 8, 312, 2.0),
        Accelerator("h100", 80, 8, 989, 3.35),
        Accelerator("h200", 141, 8, 989, 4.8),
        Accelerator("h20", 96, 8, 148, 4.0),
    )
}


def memory(shape: Shape) -> dict[str, int]:
    """Return the bytes of each state of the whole model, by the names of `BYTES`."""
    return {state: size * shape.parameters for state, size in BYTES.items()}


def activations(shape: Shape, tokens: int) -> int:
    """Return the bytes of a device's activations for a micro batch of `tokens`, layers recomputed.

    The input of every layer in bf16, and the logits with their gradient in fp32.
    """
    return tokens * (2 * shape.layers * shape.hidden + 8 * shape.vocabulary)


def counts(node: int) -> list[int]:
    """Return the numbers of devices that a parallel plan can use: powers of two inside a node, then of whole nodes."""
    inside = [1 << power for power in range(node.bit_length()) if 1 << power < node]
    return inside + [node << power for power in range(16)]


def least_accelerators(shape: Shape, device: Accelerator, tokens: int) -> int:
    """Return the least number of devices that hold all states at once, evenly split, beside the activations.

    Raises:
        CheckpointError: The activations alone do not fit.
    """
    room = USABLE * device.memory * GIB - activations(shape, tokens)
    if room <= 0:
        raise CheckpointError(
            f"a micro batch of {tokens} tokens leaves no room on {device.name} ({device.memory:g} GiB)",
            "choose fewer --tokens",
        )
    need = ceil(sum(memory(shape).values()) / room)
    if need > counts(device.node)[-1]:
        raise CheckpointError(f"the model needs {need:,} {device.name}, more than a plan can use", COMPARE)
    return next(count for count in counts(device.node) if count >= need)


@dataclass(frozen=True)
class Batch:
    """One training step.

    Attributes:
        responses: Responses of a step.
        prompt: Tokens of a prompt.
        response: Tokens of a response.
        utilisation: Share of the peak that training reaches (MFU).
        decoding: Share of the memory bandwidth that decoding reaches.
    """

    responses: int = 1024
    prompt: int = 512
    response: int = 1024
    utilisation: float = 0.2
    decoding: float = 0.3


def step_seconds(shape: Shape, device: Accelerator, devices: int, batch: Batch) -> float:
    """Return an estimate of a step's seconds: training and scoring by arithmetic, decoding by memory traffic.

    A token costs 6 FLOP a parameter that it passes through in the update and 2 in each of two scoring passes (old
    and reference log-probabilities). Every decoding step reads all weights once, on each group of devices that holds
    a copy of the model.
    """
    tokens = batch.responses * (batch.prompt + batch.response)
    arithmetic = 10 * shape.active * tokens / (devices * device.tflops * 1e12 * batch.utilisation)
    group = min(devices, ceil(memory(shape)["rollout"] / (USABLE * device.memory * GIB)))
    read = memory(shape)["rollout"] / (group * device.bandwidth * 1e12 * batch.decoding)
    return arithmetic + batch.response * read


def device_hours(devices: int, seconds: float) -> float:
    """Return the device-hours of a step (the paper's NPU-hours)."""
    return devices * seconds / 3600


@dataclass(frozen=True)
class Cost:
    """One row of the table.

    Attributes:
        variant: "original" or "proxy".
        experts: Experts a layer.
        parameters: All parameters.
        active: Parameters a token passes through.
        memory: Bytes by state.
        activations: Bytes of a device's activations.
        devices: Least number of accelerators, or the number that was asked for.
        seconds: Seconds of a step.
        measured: Whether the seconds were given.
        hours: Device-hours of a step.
    """

    variant: str
    experts: int
    parameters: int
    active: int
    memory: dict[str, int]
    activations: int
    devices: int
    seconds: float
    measured: bool
    hours: float


def cost(
    shape: Shape,
    variant: str,
    device: Accelerator,
    tokens: int,
    batch: Batch,
    devices: int = 0,
    seconds: float = 0.0,
) -> Cost:
    """Return a row of the table.

    Args:
        shape: The model.
        variant: "original" or "proxy".
        device: Kind of accelerator.
        tokens: Tokens of a micro batch.
        batch: One training step.
        devices: Number of accelerators, 0 for the least.
        seconds: Measured seconds of a step, 0 for the estimate.

    Raises:
        CheckpointError: The model does not fit.
    """
    count = devices or least_accelerators(shape, device, tokens)
    took = seconds or step_seconds(shape, device, count, batch)
    return Cost(
        variant,
        shape.experts,
        shape.parameters,
        shape.active,
        memory(shape),
        activations(shape, tokens),
        count,
        took,
        bool(seconds),
        device_hours(count, took),
    )
