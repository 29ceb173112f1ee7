"""Build a proxy checkpoint: calibrate → similarity → select → write.

Shape suffixes: E experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proxy.alpha import check_search, search_alpha
from proxy.calibration import collect, uncalibrated, without_tokens
from proxy.checkpoint import CONFIG, Checkpoint, open_checkpoint
from proxy.doubts import of_calibration, of_cut_rows, of_overlap, of_routers
from proxy.embedded import PREFIX, resolve
from proxy.families import Layout, hidden_size, understand
from proxy.layer_stats import LayerStats
from proxy.manifest import (
    MANIFEST,
    RANKING,
    beside_hashes,
    combined_hash,
    file_hashes,
    half_split_jaccard,
    make_manifest,
    ranking_lines,
    rows_hash,
    side_files,
    written_files,
)
from proxy.plan import plan_layout
from proxy.preflight import check_ends, check_possible, check_whole, ignored
from proxy.rows import Rows, calibration_rows, context, cut_rows, file_rows
from proxy.selection import Selection
from proxy.specs import BuildSpec, content_key
from proxy.strategies import Request, Strategy, by_router, check_request, strategy
from proxy.work import check_free, check_space, work_folder
from proxy.writer import Mixture, copy_side_files, edited_config, outputs, write_json, write_weights

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
    layout = understand(checkpoint, spec.mtp)
    plan = plan_layout(checkpoint, layout, spec.experts)
    chosen = strategy(spec.strategy)
    request = Request(spec.experts, layout.groups, spec.alpha, spec.normalisation, spec.seed)
    check_request(chosen, request)
    check_possible(chosen, checkpoint, layout)
    check_space(spec.out, plan.bytes_after, "the proxy's weights")
    tests = file_rows(spec.test_prompts, folder, what="test prompts") if spec.test_prompts else []
    side_files(checkpoint)  # they can be copied
    unchecked = check_whole(checkpoint, layout, needed=chosen.calibrated and stats is None)
    used: Rows | None = None
    given: Sequence[Sequence[int]] = ()
    calibration: dict[str, Any] = {"source": "none", "tokens": 0}
    if stats is not None:
        calibration = {"source": "statistics handed over"}
    elif chosen.calibrated:
        if rows is None:
            progress(f"reading calibration rows ({spec.calibration})")
        source = spec.calibration if rows is None else "rows"
        rows = rows or calibration_rows(spec.calibration, folder, spec.calibration_tokens, spec.seed)
        given = rows
        used = cut_rows(rows, spec.calibration_tokens, checkpoint.config)
        calibration = {"source": source, "rows": len(used), "sha256": rows_hash(used)}
        check_space(spec.out, plan.bytes_after + room_for(checkpoint, used), "the proxy and its calibration")
        check_ends(checkpoint, layout)
    if spec.search_alpha:
        check_search(chosen, len(used) if used is not None else 2)

    early = [*unchecked, *plan.warnings, *ignored(chosen, spec)]
    if used is not None:
        early += [*of_cut_rows(given, context(checkpoint.config)), *of_overlap(used, tests)]
    for warning in early:
        progress(f"warning: {warning}")
    identity, sums = _identity(checkpoint), calibration.get("sha256", "")
    key = content_key(asdict(spec), identity, sums)
    with work_folder(spec.out, key, content_key(identity, sums, chosen.outputs)) as work:
        if used is not None:
            stats = collect(
                folder, used, spec.calibration_tokens, progress, work / "calibration", chosen.outputs
            )
        elif stats is None:
            stats = uncalibrated(checkpoint, layout)
        calibration["tokens"] = stats[0].tokens
        if spec.search_alpha:
            request, calibration["alpha_search"] = search_alpha(
                chosen, request, stats, checkpoint, layout, used
            )
            progress(f"alpha: {', '.join(f'{weight:.2f}' for weight in request.alpha)}")
        selections, agreement = select_layers(chosen, request, stats)
        late = [
            *of_calibration(stats, agreement, spec.experts, layout.top_k),
            *of_routers(stats, selections),
        ]
        for warning in late:
            progress(f"warning: {warning}")
        progress(f"kept {spec.experts} of {layout.experts} experts in {len(layout.moe_layers)} layers")
        hashes, beside = file_hashes(folder), beside_hashes(checkpoint)
        manifest = make_manifest(
            spec,
            layout,
            plan,
            stats,
            selections,
            agreement,
            calibration,
            hashes,
            beside,
            [*early, *late],
            request.alpha if chosen.views else None,
        )
        if spec.test_prompts:
            manifest["test_prompts"] = {"rows": len(tests), "sha256": rows_hash(tests)}
        mixtures = _mixtures(stats, selections) if chosen.merges else None
        lines = [] if chosen.merges else ranking_lines(stats, selections, layout)
        selections |= _behind_the_backbone(checkpoint, layout, request)
        return _write(work / "proxy", checkpoint, layout, selections, mixtures, manifest, lines, progress)


def _identity(checkpoint: Checkpoint) -> list[Any]:
    """Return what tells a change of the checkpoint's files without reading them."""
    stats = {name: (checkpoint.folder / name).stat() for name in (CONFIG, *checkpoint.metadata)}
    return [str(checkpoint.folder.resolve()), *((n, s.st_size, s.st_mtime_ns) for n, s in stats.items())]


def _behind_the_backbone(checkpoint: Checkpoint, layout: Layout, request: Request) -> dict[int, Selection]:
    """Return the experts kept in multi-token-prediction layers, which calibration does not reach."""
    return {
        layer: by_router(without_tokens(checkpoint, layout, layer), request) for layer in layout.mtp_layers
    }


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
    selections: dict[int, Selection] = {}
    halves: list[tuple[Selection, Selection] | None] = []
    for layer in stats:
        selections[layer.layer] = chosen.select(layer, request)
        both = layer.halves if chosen.calibrated else None
        halves.append((chosen.select(both[0], request), chosen.select(both[1], request)) if both else None)
    return selections, half_split_jaccard(halves)


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


def room_for(checkpoint: Checkpoint, rows: Rows) -> int:
    """Return how many bytes of hidden states calibration keeps: those of a layer and of the next, and of experts."""
    return 5 * 4 * hidden_size(checkpoint.config) * sum(map(len, rows))


def _write(
    folder: Path,
    checkpoint: Checkpoint,
    layout: Layout,
    selections: dict[int, Selection],
    mixtures: dict[int, dict[int, Mixture]] | None,
    manifest: dict[str, Any],
    ranking: list[dict[str, Any]],
    progress: Progress,
) -> dict[str, Any]:
    """Write the proxy folder and return the manifest with the proxy's own hash."""
    copy_side_files(folder, checkpoint, layout, selections)
    config = edited_config(checkpoint.config, layout, manifest["experts"]["after"], selections)
    write_json(folder / CONFIG, config)
    write_weights(folder, checkpoint, outputs(checkpoint, layout, selections, mixtures), progress)
    if ranking:  # experts that were averaged can't be had by taking others out
        (folder / RANKING).write_text("".join(json.dumps(line) + "\n" for line in ranking))
    hashes = file_hashes(folder)
    manifest["proxy_hash"] = combined_hash(hashes)
    manifest["files"] = written_files(folder, hashes)
    write_json(folder / MANIFEST, manifest)
    return manifest
