"""The proxy's manifest in words: what was kept of each layer, how steady the choice is, and what it costs.

A manifest is a file that anybody may have written: what is missing or of another shape is left out, not fatal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diagnose.report.text import literal, number, percent

CLUSTERS_SHOWN = 8
"""Clusters of a layer that are spelt out, the largest first."""


def proxy_view(manifest: Mapping[str, Any]) -> RenderableType:
    """Return a proxy for humans: sizes, the experts kept in each layer, the largest clusters, warnings."""
    parts: list[RenderableType] = [Text(line) for line in facts(manifest)]
    layers = _mapping(manifest.get("layers"))
    if layers:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        table.add_column("layer", justify="right")
        table.add_column("routed kept", justify="right", no_wrap=True)
        table.add_column("halves agree", justify="right", no_wrap=True)
        table.add_column("experts kept", overflow="fold")
        table.add_column("largest clusters (kept ← others it stands for)", overflow="fold")
        for layer, raw in layers.items():
            one = _mapping(raw)
            table.add_row(
                Text(literal(layer, 8)),
                _share(one.get("routed_share_kept")),
                _share(one.get("half_split_jaccard")),
                Text(" ".join(str(expert) for expert in _ints(one.get("kept")))),
                Text("; ".join(clusters(one)) or "–"),
            )
        parts += [Text(), table]
    warnings = manifest.get("warnings")
    if isinstance(warnings, list) and warnings:
        parts += [Text(), Text("Warnings", "bold"), *(Text(f"• {literal(item)}") for item in warnings)]
    return Group(*parts)


def facts(manifest: Mapping[str, Any]) -> list[str]:
    """Return the proxy in a few sentences."""
    spec, experts = _mapping(manifest.get("spec")), _mapping(manifest.get("experts"))
    sizes, calibration = _mapping(manifest.get("parameters")), _mapping(manifest.get("calibration"))
    lines = []
    if uncut := manifest.get("uncut"):
        lines.append(f"Used as it is, nothing was cut: {literal(uncut)}")
    if spec:
        lines.append(
            f"Cut from {literal(spec.get('checkpoint', '?'), 200)} by {literal(spec.get('strategy'))}"
        )
    if {"before", "after", "top_k"} <= set(experts):
        text = (
            f"{experts['after']} of {experts['before']} experts a layer, {experts['top_k']} a token as before"
        )
        lines.append(literal(text))
    if isinstance(sizes.get("before"), int) and isinstance(sizes.get("after"), int) and sizes["before"]:
        before, after = sizes["before"], sizes["after"]
        lines.append(
            f"{after:,} of {before:,} parameters: {percent(after / before)} of the original's memory"
        )
    if isinstance(calibration.get("tokens"), int):
        source = literal(calibration.get("source", "?"), 80)
        lines.append(f"Calibrated on {calibration['tokens']:,} tokens ({source})")
    return lines


def clusters(layer: Mapping[str, Any]) -> list[str]:
    """Return the largest clusters of a layer as "kept ← members", those of one expert left out."""
    members: dict[int, list[int]] = {}
    for expert, chief in enumerate(_ints(layer.get("owner"))):
        if chief >= 0 and chief != expert:
            members.setdefault(chief, []).append(expert)
    order = sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{chief} ← {' '.join(map(str, others))}" for chief, others in order[:CLUSTERS_SHOWN]]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _ints(value: Any) -> list[int]:
    return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []


def _share(value: Any) -> Text:
    return Text(number(value, 2) if isinstance(value, int | float) else "–", justify="right")
