"""Build a proxy checkpoint: calibrate → similarity → select → write.

Shape suffixes: E experts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from proxy.calibration import calibration_rows, collect, cut_rows, uncalibrated
from proxy.checkpoint import CONFIG, Checkpoint, open_checkpoint
from proxy.embedded import PREFIX, resolve
from proxy.errors import BuildError
from proxy.families import Layout, understand
from proxy.layer_stats import LayerStats
from proxy.manifest import (
    MANIFEST,
    checkpoint_hash,
    file_hashes,
    half_split_jaccard,
    make_manifest,
    rows_hash,
)
from proxy.plan import plan_layout
from proxy.selection import Selection
from proxy.specs import BuildSpec
from proxy.strategies import Request, Strategy, check_request, strategy
from proxy.writer import (
    Mixture,
    check_free,
    copy_side_files,
    edited_config,
    new_folder,
    outputs,
    write_json,
    write_weights,
)

Progress = Callable[[str], None]


def _silent(_: str) -> None:
    """Take a progress sentence and do nothing."""


def build(
    spec: BuildSpec,
    progress: Progress = _silent,
    *,
    rows: Sequence[Sequence[int]] | None = None,
    stats: Sequence[LayerStats] | None = None,
) -> dict[str, Any]:
    """Build the proxy that `spec` describes; `spec.out` appears complete or not at all.

    Args:
        spec: What to build.
        progress: Called with sentences for humans.
        rows: Calibration rows, instead of those that `spec.calibration` names.
        stats: Calibration statistics, instead of collecting them (several builds of one checkpoint).

    Returns:
        The manifest, as written to ``proxy_manifest.json``.

    Raises:
        CheckpointError: The checkpoint cannot be read, is not understood, or holds NaN or infinity.
        BuildError: Budget, strategy, calibration or output folder do not work out.
    """
    check_free(spec.out)
    folder = resolve_folder(spec.checkpoint)
    checkpoint = open_checkpoint(folder)
    layout = understand(checkpoint)
    plan = plan_layout(checkpoint, layout, spec.experts)
    chosen = strategy(spec.strategy)
    request = Request(spec.experts, layout.groups, spec.alpha, spec.normalisation, spec.seed)
    check_request(chosen, request)
    _check_space(Path(spec.out), plan.bytes_after)
    warnings = list(plan.warnings)

    calibration: dict[str, Any] = {"source": "none", "tokens": 0}
    if stats is None and chosen.calibrated:
        source = spec.calibration if rows is None else "rows"
        if rows is None:
            progress(f"reading calibration rows ({spec.calibration})")
            rows = calibration_rows(spec.calibration, folder, spec.calibration_tokens, spec.seed)
        used = cut_rows(rows, spec.calibration_tokens, checkpoint.config)
        stats = collect(folder, used, spec.calibration_tokens, progress)
        calibration = {"source": source, "rows": len(used), "sha256": rows_hash(used)}
    elif stats is None:
        stats = uncalibrated(checkpoint, layout)
    else:
        calibration = {"source": "statistics handed over"}
    calibration["tokens"] = stats[0].tokens

    selections, agreement = select_layers(chosen, request, stats)
    warnings += _warn_of_calibration(stats, agreement, spec.experts)
    for warning in warnings:
        progress(warning)
    progress(f"kept {spec.experts} of {layout.experts} experts in {len(layout.moe_layers)} layers")
    manifest = make_manifest(
        spec, layout, plan, stats, selections, agreement, calibration, file_hashes(folder), warnings
    )
    mixtures = _mixtures(stats, selections) if chosen.merges else None
    return _write(spec, checkpoint, layout, selections, mixtures, manifest, progress)


def resolve_folder(checkpoint: str) -> Path:
    """Return the folder of a checkpoint given as a path or as ``embedded:NAME``."""
    return resolve(checkpoint) if checkpoint.startswith(PREFIX) else Path(checkpoint).expanduser()


def select_layers(
    chosen: Strategy, request: Request, stats: Sequence[LayerStats]
) -> tuple[dict[int, Selection], list[float] | None]:
    """Select the experts of every layer, and once more on each half of the calibration rows.

    Args:
        chosen: The strategy.
        request: Budget and options.
        stats: Statistics of each layer.

    Returns:
        Selections by layer, and the half-split Jaccard of each layer (None where there are no halves).
    """
    selections = {layer.layer: chosen.select(layer, request) for layer in stats}
    halves = [
        (chosen.select(layer.halves[0], request), chosen.select(layer.halves[1], request))
        if layer.halves and chosen.calibrated
        else None
        for layer in stats
    ]
    return selections, half_split_jaccard(halves)


def _warn_of_calibration(
    stats: Sequence[LayerStats], agreement: Sequence[float] | None, experts: int
) -> list[str]:
    """Return what calibration leaves in doubt."""
    warnings = []
    starved = [layer.layer for layer in stats if layer.tokens and (layer.counts_E > 0).sum() < experts]
    if starved:
        warnings.append(
            f"fewer than {experts} experts were ever active in layers {starved}: "
            "the rest was chosen by router distance alone"
        )
    if agreement and sum(agreement) / len(agreement) < 0.5:
        warnings.append(
            f"the two calibration halves agree on {sum(agreement) / len(agreement):.0%} of the kept experts "
            "only: calibrate on more tokens"
        )
    return warnings


def _mixtures(stats: Sequence[LayerStats], selections: dict[int, Selection]) -> dict[int, dict[int, Mixture]]:
    """Return what each kept expert is averaged from: its cluster, weighted by frequency.

    A cluster in which no expert was ever active is averaged evenly.
    """
    mixtures: dict[int, dict[int, Mixture]] = {}
    for layer in stats:
        owner = selections[layer.layer].owner
        mixtures[layer.layer] = {}
        for kept in selections[layer.layer].kept:
            members = [expert for expert, head in enumerate(owner) if head == kept]
            counts = [float(layer.counts_E[expert]) for expert in members]
            if not sum(counts):
                counts = [1.0] * len(members)
            mixtures[layer.layer][kept] = tuple(
                (expert, count / sum(counts)) for expert, count in zip(members, counts, strict=True) if count
            )
    return mixtures


def _check_space(out: Path, size: int) -> None:
    """Refuse a build that the disk cannot hold."""
    home = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(home).free
    if free < size:
        raise BuildError(f"the proxy needs {size / 1e9:.1f} GB, and {home} has {free / 1e9:.1f} GB left")


def _write(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    layout: Layout,
    selections: dict[int, Selection],
    mixtures: dict[int, dict[int, Mixture]] | None,
    manifest: dict[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    """Write the proxy folder and return the manifest with the proxy's own hash."""
    with new_folder(spec.out) as folder:
        copy_side_files(folder, checkpoint)
        write_json(folder / CONFIG, edited_config(checkpoint.config, layout, spec.experts, selections))
        write_weights(folder, checkpoint, outputs(checkpoint, layout, selections, mixtures), progress)
        manifest["proxy_hash"] = checkpoint_hash(folder)
        write_json(folder / MANIFEST, manifest)
    return manifest
