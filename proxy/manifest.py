"""The proxy's papers: what it was cut from and how, what stayed, and hashes that tell a change."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proxy.checkpoint import CONFIG, INDEX, Checkpoint, inside, open_checkpoint
from proxy.families import Layout
from proxy.layer_stats import LayerStats
from proxy.plan import Plan
from proxy.selection import Selection, jaccard
from proxy.similarity import EPSILON
from proxy.specs import BuildSpec

MANIFEST = "proxy_manifest.json"
RANKING = "expert_ranking.jsonl"
SCHEMA = 1
MAX_SIDE_FILE_BYTES = 256 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
HASHERS = 8
"""Files that are hashed at the same time, one a processor: a hash is slower than a disk."""


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_hashes(folder: str | Path) -> dict[str, str]:
    """Return the SHA-256 of a checkpoint's config and of each of its safetensors files, by name.

    Raises:
        CheckpointError: The folder is no checkpoint.
    """
    checkpoint = open_checkpoint(folder)
    return _hashes(checkpoint.folder, (CONFIG, *checkpoint.metadata))


def side_files(checkpoint: Checkpoint) -> list[Path]:
    """Return what lies beside the weights (tokenizer, generation config, licence …): plain files, no weights.

    Raises:
        CheckpointError: One of them is a link that leaves the checkpoint's folder.
    """
    made_here = (CONFIG, INDEX, MANIFEST, RANKING)
    return [
        inside(checkpoint.folder, path.name)
        for path in sorted(checkpoint.folder.iterdir())
        if path.name not in made_here
        and not path.name.startswith(".")
        and not path.name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
        and path.is_file()
        and path.stat().st_size <= MAX_SIDE_FILE_BYTES
    ]


def beside_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the SHA-256 of a checkpoint's other files: the index of its shards, and what is copied as it is."""
    index = [INDEX] if checkpoint.sharded else []
    return _hashes(checkpoint.folder, [*index, *(path.name for path in side_files(checkpoint))])


def written_files(folder: Path, known: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of every file of a proxy, its manifest apart.

    Args:
        folder: The proxy.
        known: Hashes that were taken already, by name.
    """
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    hashes = known | _hashes(folder, [name for name in names if name not in known])
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": hashes[name]} for name in names}


def _hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of files, by name."""
    names = sorted(names)
    with ThreadPoolExecutor(min(HASHERS, os.cpu_count() or 1), "hash") as pool:
        return dict(zip(names, pool.map(lambda name: file_hash(folder / name), names), strict=True))


def checkpoint_hash(folder: str | Path) -> str:
    """Return one hash over the content of a checkpoint: its config and its safetensors files.

    Raises:
        CheckpointError: The folder is no checkpoint.
    """
    return combined_hash(file_hashes(folder))


def combined_hash(hashes: dict[str, str]) -> str:
    """Return one hash over named hashes."""
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def rows_hash(rows: Sequence[Sequence[int]]) -> str:
    """Return a hash over calibration rows."""
    return hashlib.sha256(json.dumps([list(map(int, row)) for row in rows]).encode()).hexdigest()


def half_split_jaccard(
    halves: Sequence[tuple[Selection, Selection] | None],
) -> list[float] | None:
    """Return the agreement of the two calibration halves' selections by layer; None without halves."""
    found = [jaccard(pair[0].kept, pair[1].kept) for pair in halves if pair]
    return found if found and len(found) == len(halves) else None


def make_manifest(
    spec: BuildSpec,
    layout: Layout,
    plan: Plan,
    stats: Sequence[LayerStats],
    selections: dict[int, Selection],
    agreement: Sequence[float] | None,
    calibration: dict[str, Any],
    inputs: dict[str, str],
    beside: dict[str, str],
    warnings: Sequence[str],
    alpha: Sequence[float] | None,
) -> dict[str, Any]:
    """Return the manifest, JSON-able; the hash of the proxy itself is added once it is written.

    Args:
        spec: What was asked for.
        layout: The checkpoint's layout.
        plan: Sizes before and after.
        stats: Calibration statistics by layer.
        selections: Experts kept, by layer.
        agreement: Half-split Jaccard of each layer's selection.
        calibration: Where the calibration rows came from.
        inputs: `file_hashes` of the checkpoint.
        beside: `beside_hashes` of it.
        warnings: Plain sentences.
        alpha: Weights of the views that were used; None for a strategy without views, which measures no distance.
    """
    layers = {}
    for position, layer in enumerate(layout.moe_layers):
        chosen, seen = selections[layer], stats[position]
        counts_E = seen.counts_E
        routed = float(counts_E.sum())
        layers[str(layer)] = {
            "clusters": len(chosen.kept),
            "largest_cluster": max(chosen.owner.count(head) for head in chosen.kept),
            "loss_an_expert": chosen.loss / len(chosen.owner) if alpha else None,
            "kept": list(chosen.kept),
            "owner": list(chosen.owner),
            "never_active": int((counts_E == 0).sum()) if seen.tokens else None,
            "routed_share_kept": float(counts_E[list(chosen.kept)].sum()) / routed if routed else None,
            "loss_start": chosen.start_loss if alpha else None,
            "loss": chosen.loss if alpha else None,
            "half_split_jaccard": agreement[position] if agreement else None,
        }
    return {
        "schema": SCHEMA,
        "spec": {**asdict(spec), "alpha": list(spec.alpha)},
        "family": plan.family,
        "source_hash": combined_hash(inputs),
        "inputs": inputs | beside,
        "experts": {"before": plan.experts, "after": plan.kept, "top_k": plan.top_k},
        "groups": {"count": plan.groups, "quota": plan.quota},
        "parameters": {"before": plan.parameters_before, "after": plan.parameters_after},
        "bytes": {"before": plan.bytes_before, "after": plan.bytes_after},
        "mtp_tensors_dropped": plan.mtp_tensors,
        "calibration": calibration,
        "alpha": list(alpha) if alpha else None,
        "epsilon": EPSILON,
        "half_split_jaccard": sum(agreement) / len(agreement) if agreement else None,
        "layers": layers,
        "warnings": list(warnings),
    }


def ranking_lines(
    stats: Sequence[LayerStats], selections: dict[int, Selection], layout: Layout
) -> list[dict[str, Any]]:
    """Return one JSON object a layer for serving stacks that take experts out while they load.

    ``keep`` are the kept experts under their old numbers, ``rank`` all experts, the kept ones first and each part
    by falling frequency.
    """
    lines = []
    for layer in stats:
        kept = set(selections[layer.layer].kept)
        order = sorted(range(layout.experts), key=lambda e: (e not in kept, -layer.counts_E[e], e))
        lines.append(
            {
                "layer": layer.layer,
                "module": layout.block(layer.layer).removesuffix("."),
                "experts": layout.experts,
                "groups": layout.groups,
                "keep": sorted(kept),
                "rank": order,
                "counts": [int(count) for count in layer.counts_E] if layer.tokens else None,
            }
        )
    return lines
