"""Is a checkpoint whole? What transformers' model of it needs, held against the names and shapes in its files.

No weight is read. A download that stopped early, a conversion that lost a matrix, or a config of another size
would otherwise come out as a proxy that trains on random numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from proxy.checkpoint import FP8, PLAIN_FLOATS, Checkpoint
from proxy.companions import is_companion, unquantised
from proxy.errors import CheckpointError
from proxy.families import Layout, Role
from proxy.skeleton import Skeleton

_UNKNOWN = -(1 << 80)
"""Number of values of a packed tensor, so that no sum with it counts."""


def check_complete(checkpoint: Checkpoint, layout: Layout, skeleton: Skeleton) -> str:
    """Refuse a checkpoint that lacks a tensor of its model, or has one of another shape.

    Returns:
        A tensor of an expert for which the model has no place, because transformers keeps experts in another way
        than this checkpoint: then they are not checked. Empty as a rule.

    Raises:
        CheckpointError: It does; the message names the first.
    """
    supplied: dict[str, set[str | None]] = {}
    values: dict[str, int] = {}
    placed, homeless = False, ""
    for name, plain in _names(checkpoint, layout):
        target, pattern = skeleton.renamed(plain)
        expert = layout.parts[name].role in (Role.EXPERT, Role.FUSED)
        placed |= expert and target in skeleton.meta
        homeless = homeless or (name if expert else "")
        if target not in skeleton.meta:
            continue  # what transformers leaves out when it loads
        info, expected = checkpoint.tensors[name], tuple(skeleton.meta[target].shape)
        as_it_is = name == plain and info.dtype in (*PLAIN_FLOATS, *FP8)
        if pattern is None and as_it_is and info.shape != expected:
            raise _other(
                checkpoint, f"tensor {name!r} has shape {info.shape}, and by config.json it is {expected}"
            )
        supplied.setdefault(target, set()).add(pattern)
        times = layout.experts if layout.parts[name].role is Role.EXPERT else 1
        values[target] = values.get(target, 0) + (times * info.numel if as_it_is else _UNKNOWN)
    made: set[str] = set()
    for target, patterns in supplied.items():
        together = set(_all_made(skeleton, target, patterns)) & set(skeleton.meta)
        made |= together
        entry = next((skeleton.converters[pattern] for pattern in patterns if pattern), None)
        if not entry:
            continue
        if left := set(entry.source_patterns) - patterns:
            raise _lacking(checkpoint, target, f": no tensor is called {_readable(min(left))}")
        count, given = sum(skeleton.meta[name].numel() for name in together), values[target]
        # A model may hold room for experts without weights too.
        if given >= 0 and count not in (
            given,
            given // layout.experts * (layout.experts + layout.extra_rows),
        ):
            what = f"the tensors for transformers' {target!r} have {given:,} values"
            raise _other(checkpoint, f"{what}, and by config.json they are {count:,}")
    optional = skeleton.model._keys_to_ignore_on_load_missing or ()
    for target in skeleton.meta:
        tied = target in skeleton.model.all_tied_weights_keys
        if not placed and ".experts." in target:
            continue
        if target not in made and not tied and not any(re.search(one, target) for one in optional):
            raise _lacking(checkpoint, target, "")
    return "" if placed else homeless


def _names(checkpoint: Checkpoint, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield names on disk and what they are called unquantised; of experts, which are alike, only the first.

    Quantisations that are not known here (GPTQ, AWQ, …) have several tensors in the place of a weight.
    """
    tensors = checkpoint.tensors
    for name, part in layout.parts.items():
        if part.role is Role.DROP or (part.role is Role.EXPERT and part.expert):
            continue
        if not is_companion(name, tensors):
            yield name, unquantised(name, tensors[name].dtype)
        weight = f"{name.partition('.weight.')[0] if '.weight.' in name else name.rpartition('.')[0]}.weight"
        if tensors[name].dtype not in PLAIN_FLOATS and weight not in tensors:
            yield name, weight


def _all_made(skeleton: Skeleton, target: str, patterns: set[str | None]) -> Iterator[str]:
    """Yield the names of the model that a conversion with this first target makes."""
    yield target
    for entry in (skeleton.converters[pattern] for pattern in patterns if pattern):
        first, *others = entry.target_patterns
        yield from (target.replace(first, other) for other in others)


def _readable(pattern: str) -> str:
    """Return a pattern of names without what only a program needs."""
    return repr(re.sub(r"[\\^$]", "", pattern))


def _other(checkpoint: Checkpoint, what: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.folder}: {what}", "take config.json and weights from the same source"
    )


def _lacking(checkpoint: Checkpoint, target: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.folder}: nothing in the files gives transformers' model its {target!r}{why}",
        "complete the download; if it is complete, config.json is another model's",
    )
