"""Is a checkpoint whole? What transformers' model of it needs, held against the names and shapes in its files.

No weight is read. A download that stopped early, a conversion that lost a matrix, or a config of another size
would otherwise come out as a proxy that trains on random numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from proxy.checkpoint import Checkpoint
from proxy.companions import is_companion, unquantised
from proxy.errors import CheckpointError
from proxy.families import Layout, Role
from proxy.skeleton import Skeleton


def check_complete(checkpoint: Checkpoint, layout: Layout, skeleton: Skeleton) -> None:
    """Refuse a checkpoint that lacks a tensor of its model, or has one of another shape.

    Raises:
        CheckpointError: It does; the message names the first.
    """
    supplied: dict[str, set[str | None]] = {}
    for name, plain in _names(checkpoint, layout):
        target, pattern = skeleton.renamed(plain)
        if target not in skeleton.meta:
            continue  # what transformers leaves out when it loads
        supplied.setdefault(target, set()).add(pattern)
        shape, expected = checkpoint.tensors[name].shape, tuple(skeleton.meta[target].shape)
        if pattern is None and name == plain and shape != expected:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name!r} has shape {shape}, and by config.json it is {expected}",
                "take config.json and weights from the same source",
            )
    made = {other for target, patterns in supplied.items() for other in _all_made(skeleton, target, patterns)}
    for target, patterns in supplied.items():
        entry = next((skeleton.converters[pattern] for pattern in patterns if pattern), None)
        if entry and (left := set(entry.source_patterns) - patterns):
            raise _lacking(checkpoint, target, f": no tensor is called {_readable(min(left))}")
    optional = skeleton.model._keys_to_ignore_on_load_missing or ()
    for target in skeleton.meta:
        tied = target in skeleton.model.all_tied_weights_keys
        if target not in made and not tied and not any(re.search(one, target) for one in optional):
            raise _lacking(checkpoint, target, "")


def _names(checkpoint: Checkpoint, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield names on disk and what they are called unquantised; of experts, which are alike, only the first."""
    for name, part in layout.parts.items():
        helper = is_companion(name, checkpoint.tensors)
        if part.role is Role.DROP or helper or (part.role is Role.EXPERT and part.expert):
            continue
        yield name, unquantised(name)


def _all_made(skeleton: Skeleton, target: str, patterns: set[str | None]) -> Iterator[str]:
    """Yield the names of the model that a conversion with this first target makes."""
    yield target
    for entry in (skeleton.converters[pattern] for pattern in patterns if pattern):
        first, *others = entry.target_patterns
        yield from (target.replace(first, other) for other in others)


def _readable(pattern: str) -> str:
    """Return a pattern of names without what only a program needs."""
    return repr(re.sub(r"[\\^$]", "", pattern))


def _lacking(checkpoint: Checkpoint, target: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.folder}: nothing in the files gives transformers' model its {target!r}{why}",
        "complete the download; if it is complete, config.json is another model's",
    )
