"""The proxy's manifest in words: what was kept of each layer, how steady the choice is, and what it costs.

A manifest is a file that anybody may have written: what is missing or of another shape is left out, not fatal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diagnose.report.text import literal, number, percent

CLUSTERS_SHOWN = 8
"""Clusters of a layer that are spelt out, the largest first."""
COLUMNS = {
    "routed kept": "routed_share_kept",
    "halves agree": "half_split_jaccard",
    "distance": "loss_an_expert",
    "never used": "never_active",
}
"""Columns of the table of layers, and what the manifest calls them."""
LEGEND = (
    "routed kept: share of the original's routing that went to the kept experts. "
    "halves agree: of the experts that either half of the calibration texts would keep, the share that both would; "
    "below 0.6 on average use more texts. "
    "distance: from an expert to the one that stands for it, on average; 0 is the same, – is not measured. "
    "never used: experts that no calibration token reached."
)


def proxy_view(manifest: Mapping[str, Any]) -> RenderableType:
    """Return a proxy for humans: sizes, the experts kept in each layer, the largest clusters, warnings."""
    parts: list[RenderableType] = [Text(line) for line in facts(manifest)]
    layers = {literal(layer, 8): _mapping(raw) for layer, raw in _mapping(manifest.get("layers")).items()}
    if layers:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        for name in ("layer", *COLUMNS):
            table.add_column(name, justify="right", no_wrap=True)
        for layer, one in layers.items():
            table.add_row(Text(layer), *(_share(one.get(key)) for key in COLUMNS.values()))
        parts += [Text(), table, Text(), Text(LEGEND)]
        for layer, one in layers.items():
            kept = " ".join(str(expert) for expert in _ints(one.get("kept")))
            parts += [Text(), Text(f"Layer {layer} keeps {kept}")]
            parts += [
                Text(f"for others (kept ← others): {'; '.join(found)}") for found in [clusters(one)] if found
            ]
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
    if weights := _weights(manifest):
        lines.append(weights)
    counts = [_count(experts.get(key)) for key in ("after", "before", "top_k")]
    if None not in counts:
        lines.append(f"{counts[0]} of {counts[1]} experts a layer, {counts[2]} a token as before")
    before, after = _count(sizes.get("before")), _count(sizes.get("after"))
    if before and after is not None:
        share = percent(after / before)
        memory = _mapping(manifest.get("bytes"))
        held, left = _count(memory.get("before")), _count(memory.get("after"))
        room = f", {size(left)} of {size(held)}" if held is not None and left is not None else ""
        lines.append(f"{after:,} of {before:,} parameters ({share} of the original{room})")
    if (tokens := _count(calibration.get("tokens"))) is not None:
        source = literal(calibration.get("source", "?"), 80)
        lines.append(f"Calibrated on {tokens:,} tokens ({source})")
    return lines


def _weights(manifest: Mapping[str, Any]) -> str:
    """Return how the views were weighed, and what a search for the weights found."""
    alpha = manifest.get("alpha")
    if (
        not isinstance(alpha, list)
        or len(alpha) != 3
        or not all(isinstance(one, int | float) for one in alpha)
    ):
        return ""
    names = zip(("router", "co-activation", "context"), alpha, strict=True)
    text = "Views: " + ", ".join(f"{name} {number(float(one), 2)}" for name, one in names)
    search = _mapping(_mapping(manifest.get("calibration")).get("alpha_search"))
    found = search.get("finalists")
    best = [one for one in found if _mapping(one).get("alpha") == alpha] if isinstance(found, list) else []
    if not best:
        return text
    agreement = _mapping(best[0]).get("agreement")
    if isinstance(agreement, float):
        text += (
            f", found by --alpha auto: on held-out rows {percent(agreement)} of the original's next tokens"
        )
    else:
        text += ", found by --alpha auto by held-out routing alone"
    return text


def clusters(layer: Mapping[str, Any]) -> list[str]:
    """Return the largest clusters of a layer as "kept ← members", those of one expert left out."""
    members: dict[int, list[int]] = {}
    for expert, chief in enumerate(_ints(layer.get("owner"))):
        if chief >= 0 and chief != expert:
            members.setdefault(chief, []).append(expert)
    order = sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{chief} ← {' '.join(map(str, others))}" for chief, others in order[:CLUSTERS_SHOWN]]


def checkpoint_facts(data: Mapping[str, Any]) -> list[str]:
    """Return what `lab.inspect` found in a few lines for humans, each a name and what it is."""
    groups = f" in {data['groups']} groups" if data["groups"] > 1 else ""
    lines = [
        f"family      {data['family']}",
        f"experts     {data['experts']} a layer{groups}, {data['top_k']} of them for each token",
        f"MoE layers  {len(data['moe_layers'])} ({spans(data['moe_layers'])})",
        f"parameters  {data['parameters']:,} in {data['tensors']:,} tensors",
    ]
    if plan := data.get("plan"):
        share = percent(plan["parameters_after"] / plan["parameters_before"])
        quota = f", {plan['quota']} of each group" if plan["groups"] > 1 else ""
        lines += [
            "",
            f"cut to {plan['kept']} experts a layer{quota}: {plan['parameters_after']:,} parameters ({share}), "
            f"{size(plan['bytes_after'])} of {size(plan['bytes_before'])}",
        ]
        if plan["mtp_tensors"]:
            lines.append(
                f"{plan['mtp_tensors']:,} tensors of multi-token prediction are dropped (--mtp prune keeps them)"
            )
    return lines


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers in words: "0 to 3, 5"."""
    runs: list[list[int]] = []
    for one in numbers:
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)


def size(count: int) -> str:
    """Return a number of bytes for people: "1.4 MB", "61.1 GB"."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> int | None:
    """Return a count, None where it is none."""
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else None


def _ints(value: Any) -> list[int]:
    """Return the counts of a list. An owner of -1 is no count: nobody stands for that expert."""
    return (
        [item for item in value if _count(item) is not None or item == -1] if isinstance(value, list) else []
    )


def _share(value: Any) -> Text:
    sound = isinstance(value, float) or _count(value) is not None
    return Text(number(value, 2) if sound else "–", justify="right")
