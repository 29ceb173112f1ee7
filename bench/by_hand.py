"""Works one report out by hand: ``python -m bench.by_hand RUN_DIR [--write]`` prints every number with its arithmetic.

Each number is computed a second time here, in plain loops from the curves, and must be what the scoring says. With
``--write`` the text goes between the markers of ``docs/scoring.md``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

from diagnose.calibrations import calibration_for
from diagnose.curves import Array, Curves
from diagnose.result import Candidate, Score
from diagnose.score.align import Clock, transform
from diagnose.score.distance import coordinates
from diagnose.score.experiment import Experiment
from diagnose.score.score import Given, Laid, gather, lay, score
from diagnose.score.settings import Settings
from diagnose.score.specificity import bootstrap
from diagnose.score.verdict import compared
from diagnose.session import load
from diagnose.store import open_folder
from taxonomy.metrics import METRIC_BY_NAME

DOCUMENT = Path(__file__).parents[1] / "docs" / "scoring.md"
BEGIN, END = "<!-- by hand: begin -->", "<!-- by hand: end -->"


def same(ours: float, theirs: float, what: str) -> float:
    """Return a number that was computed twice.

    Raises:
        ValueError: The two differ.
    """
    if not math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-9):
        raise ValueError(f"{what}: by hand {ours}, by the scoring {theirs}")
    return ours


def row(values: Sequence[float] | Array, digits: int = 2) -> str:
    """Return numbers in a row."""
    return " ".join(f"{value:+.{digits}f}" for value in values)


def block_medians(run: Curves, name: str, clock: Clock, epsilon: float | None) -> list[float]:
    """Return the median of g over the finite points of every block."""
    values = transform(METRIC_BY_NAME[name], np.asarray(run.values[name], float), epsilon)
    edges = [clock.start - 1 + b * clock.horizon / clock.blocks for b in range(clock.blocks + 1)]
    return [
        median(
            float(v)
            for step, v in zip(run.steps_N, values, strict=True)
            if edges[b] < step <= edges[b + 1] and math.isfinite(v)
        )
        for b in range(clock.blocks)
    ]


def v(n: int) -> float:
    """Return V(n), the variance of a median of n."""
    return math.pi / (2 * n + (math.pi - 2 if n % 2 else 2 * math.pi - 4))


def one_metric(name: str, given: Given, laid: Laid, candidate: Candidate) -> list[str]:
    """Return one metric of the incident, from its points to direction, onset and trend."""
    case, clock, settings = laid.case, laid.case.original.clock, given.settings
    frame, scale, result = case.frame, case.home.scale, candidate.metrics[name]
    m, B = frame.metrics.index(name), clock.blocks
    epsilon = frame.epsilons.get(name)
    faulty = [block_medians(run, name, clock, epsilon) for run in given.logs]
    healthy = [block_medians(run, name, clock, epsilon) for run in case.home.runs]
    seeds = [block_medians(run, name, clock, epsilon) for run in given.own.seeds]
    o = [median(run[b] for run in faulty) for b in range(B)]
    h = [median(run[b] for run in healthy) for b in range(B)]
    e = [same(o[b] - h[b], result.blocks_original[b], "e") for b in range(B)]
    own = [stdev(run[b] for run in seeds) ** 2 for b in range(B)]
    pooled = [math.sqrt(settings.block_pooling * fmean(own) + (1 - settings.block_pooling) * x) for x in own]
    sigma = [same(pooled[b], float(scale.sigma_MB[m, b]), "σ_b") for b in range(B)]
    variance = v(len(faulty)) + v(len(healthy))
    reading = case.original.reading
    unit = [max(s * math.sqrt(variance), _floor(case.original, m, settings)) for s in sigma]
    z = [same(e[b] / unit[b], float(reading.z_MB[m, b]), "z_b") for b in range(B)]
    late = median(e[B // 2 :])
    lines = [
        f"**{METRIC_BY_NAME[name].title}** (`{name}`, g = {METRIC_BY_NAME[name].transform}). Updates "
        f"{clock.start} to {clock.start + clock.horizon - 1} in {B} blocks. By block, in transformed units:",
        "",
        "```text",
        f"incident, block medians   {row(o, 3)}",
        f"{len(healthy)} healthy runs, median   {row(h, 3)}",
        f"e = difference            {row(e, 3)}",
        f"σ between {len(seeds)} seeds      {row(sigma, 3)}",
        f"z = e / (σ·√v)            {row(z, 1)}",
        "```",
        "",
        f"v = V({len(faulty)}) + V({len(healthy)}) = {v(len(faulty)):.3f} + {v(len(healthy)):.3f} = {variance:.3f}. "
        f"Late half: median of the last {B - B // 2} e = {same(late, result.effect_original, 'late'):+.3f}; its "
        f"standard deviation between seeds is {scale.late_M[m]:.4f}, so z = {late:+.3f} / "
        f"({scale.late_M[m]:.4f}·√{variance:.3f}) = {result.z_original:+.1f}.",
        "",
    ]
    found = []
    for w in range(B // 2 + 1):
        mean, length = fmean(e[w:]), B - w
        z_w = mean / max(
            float(scale.window_MW[m, w]) * math.sqrt(variance), _window_floor(case.original, m, w, settings)
        )
        penalty = settings.window_penalty * math.sqrt(2 * math.log(B / length))
        found.append((abs(z_w) - penalty, length, mean, float(scale.window_MW[m, w]), z_w, penalty))
    pairs = [min(abs(a), abs(b)) if a * b > 0 else 0.0 for a, b in pairwise(z)]
    peak = same(max(max(item[0] for item in found), max(pairs)), abs(float(reading.peak_M[m])), "P")
    lines += [
        "Windows, each `mean e, σ of that mean, |z| − penalty`: "
        + "; ".join(
            f"last {n}: {mean:+.3f}, {s:.4f}, {abs(z_w):.1f} − {p:.2f}" for _, n, mean, s, z_w, p in found
        )
        + f". Best pair of neighbours: {max(pairs):.1f}. P is the largest of all: {peak:.1f}, against the margin "
        f"{laid.margin.c:.2f}: **{result.original}**.",
        "",
    ]
    sums = [sum(z[b:]) ** 2 / (B - b) for b in range(B - 1)]
    crossing = next(
        (b for b in range(B - 1) if min(abs(z[b]), abs(z[b + 1])) > laid.margin.c and z[b] * z[b + 1] > 0),
        None,
    )
    change = max(range(B - 1), key=lambda b: sums[b])
    onset = change if crossing is None else min(change, crossing)
    edges = [clock.start - 1 + b * clock.horizon / B for b in range(B + 1)]
    low, high = math.floor(edges[max(onset - 1, 0)]) + 1, math.floor(edges[onset + 1])
    if (low, high) != result.onset_original:
        raise ValueError(f"onset: by hand {low, high}, by the scoring {result.onset_original}")
    both = [
        _cosine(left, right)
        for left, right in (
            (e, result.blocks_proxy),
            (e[1:], result.blocks_proxy[:-1]),
            (e[:-1], result.blocks_proxy[1:]),
        )
    ]
    trend = same(max(both), result.trend if result.trend is not None else math.nan, "trend")
    lines += [
        f"Onset: the first two neighbours beyond {laid.margin.c:.2f} on one side begin with block "
        f"{'–' if crossing is None else crossing + 1}, (Σz)²/(blocks left) is largest from block {change + 1} on; the "
        f"earlier is block {onset + 1}, so the onset lies in updates {low} to {high}. Type: "
        f"{result.type_original.value}.",
        "",
        f"Trend: the replay's e is {row(result.blocks_proxy, 3)}. Cosines at shifts 0, +1, −1: "
        f"{', '.join(f'{x:.3f}' for x in both)}; the best counts: {trend:.3f}.",
        "",
    ]
    return lines


def _cosine(left: Sequence[float], right: Sequence[float]) -> float:
    dot = sum(a * b for a, b in zip(left, right, strict=True))
    return dot / math.sqrt(sum(a * a for a in left) * sum(b * b for b in right))


def _floor(seen: Experiment, m: int, settings: Settings) -> float:
    return float(seen.floors.metric_M[m]) / settings.min_margin


def _window_floor(seen: Experiment, m: int, w: int, settings: Settings) -> float:
    floors_MW = np.broadcast_to(seen.floors.window_MW, seen.reading.effect.window_MW.shape)
    return float(floors_MW[m, w]) / settings.min_margin


def all_metrics(laid: Laid, replayed: Experiment, candidate: Candidate, settings: Settings) -> list[str]:
    """Return the table that distance, explained share and agreement are made of, and these."""
    case = laid.case
    q = [
        coordinates(item.signature.z_MB, item.signature.event_MB, settings)
        for item in (case.original, replayed)
    ]
    moved = compared(candidate.metrics)
    lines = [
        "| metric | w | ‖q_O‖² | ‖q_O − q_P‖² | z original | z replay | direction | s |",
        "|---|--:|--:|--:|--:|--:|---|--:|",
    ]
    size = distance = agreed = weights = 0.0
    for m, name in enumerate(case.frame.metrics):
        blocks, weight = case.where.mask_MB[m], float(case.where.weight_M[m])
        if not weight:
            continue
        n = int(blocks.sum())
        own = sum(float((q[0][m, b] ** 2).sum()) for b in np.flatnonzero(blocks)) / n
        apart = sum(float(((q[0][m, b] - q[1][m, b]) ** 2).sum()) for b in np.flatnonzero(blocks)) / n
        size, distance = size + weight * own, distance + weight * apart
        item = candidate.metrics[name]
        s = ""
        if name in moved:
            value = 1 if item.proxy is item.original else 0 if item.proxy not in ("up", "down") else -1
            agreed, weights, s = agreed + item.weight * value, weights + item.weight, f"{value:+d}"
            s = f"{s} ×{item.weight}" if item.weight > 1 else s
        lines.append(
            f"| {METRIC_BY_NAME[name].title} | {weight:.3f} | {own:.2f} | {apart:.2f} | {item.z_original:+.1f} | "
            f"{item.z_proxy:+.1f} | {item.original} / {item.proxy} | {s} |"
        )
    d = same(math.sqrt(distance), candidate.distance, "d")
    explained = 1 - distance / size
    lines += [
        "",
        f"Distance: d = √(Σ w·‖q_O − q_P‖²) = √{distance:.4f} = {d:.3f}. A candidate that does nothing is at "
        f"√(Σ w·‖q_O‖²) = √{size:.4f} = {math.sqrt(size):.3f}. Explained: 1 − {distance:.4f} / {size:.4f} = "
        f"{explained:.0%}.",
        "",
        f"Agreement: Σ weight·s / Σ weight over the metrics that moved in the original = {agreed:.0f} / {weights:.0f} "
        f"= {same(agreed / weights if weights else 0.0, candidate.agreement, 'agreement'):.2f}.",
        "",
    ]
    return lines


def doubt(given: Given, laid: Laid, found: Score, seen: Mapping[str, Experiment]) -> list[str]:
    """Return coverage, gap with interval, p and error rates."""
    case, settings, first = laid.case, given.settings, found.ranking[0]
    lines = []
    card = case.library.cards.get(first.fault)
    if card is not None and card.signature:
        there = [item for item in card.signature if item.metric in case.available]
        part, whole = sum(item.weight for item in there), sum(item.weight for item in card.signature)
        covered = same(part / whole, first.coverage, "coverage")
        lines += [
            f"Coverage: of the card's {len(card.signature)} metrics both systems have {len(there)}; weights {part} of "
            f"{whole} = {covered:.0%}.",
            "",
        ]
    names = sorted(seen)
    gaps = bootstrap(
        case.original.signature,
        [seen[name].signature for name in names],
        case.where,
        case.home.scale.bank_KMB,
        case.proxy.scale.bank_KMB,
        case.size,
        settings,
    )
    others = [item for item in found.ranking[1:] if item.fault in seen]
    if others and first.specificity is not None:
        rival = min(others, key=lambda item: item.distance)
        draws = np.sort(gaps.d_DC[:, names.index(rival.fault)] - gaps.d_DC[:, names.index(first.fault)])
        low, high = np.quantile(draws, [gaps.tail, 1 - gaps.tail])
        gap = same(rival.distance - first.distance, first.specificity[0], "gap")
        same(float(low), first.specificity[1], "gap, low")
        same(float(high), first.specificity[2], "gap, high")
        lines += [
            f"Gap: the nearest rival, {rival.title}, is at {rival.distance:.3f}, so the gap is {rival.distance:.3f} − "
            f"{first.distance:.3f} = {gap:.3f}. In {settings.draws} bootstrap draws it lies between {draws[0]:.3f} and "
            f"{draws[-1]:.3f}; the interval leaves {gaps.tail:.0%} on each side: {low:.3f} to {high:.3f}. Told apart "
            f"is what stays beyond {settings.gap_share:g}·{case.size:.3f} = {gaps.least:.3f}.",
            "",
        ]
    maxima = sorted(float(x) for x in case.home.scale.maxima_K)
    if maxima:
        rank = math.ceil((len(maxima) + 1) * (1 - settings.alpha_direction))
        more = sum(x >= case.original.reading.largest for x in maxima)
        margin = max(maxima[rank - 1], settings.min_margin) if rank <= len(maxima) else laid.margin.c
        lines += [
            f"Margin: the {len(maxima)} healthy seeds, each against the others, reach at most "
            f"{', '.join(f'{x:.2f}' for x in maxima)}. For directions number ⌈{len(maxima) + 1}·"
            f"{1 - settings.alpha_direction:g}⌉ = {rank} counts: {same(margin, laid.margin.c, 'margin'):.2f}; to call "
            f"the log faulty (α = {settings.alpha:g}) {laid.margin.fault:.2f}. The incident reaches "
            f"{case.original.reading.largest:.1f}: p = (1 + {more}) / ({len(maxima)} + 1) = "
            f"{(1 + more) / (len(maxima) + 1):.3f}, the smallest possible being 1 / {len(maxima) + 1} = "
            f"{same(1 / (len(maxima) + 1), laid.margin.smallest_p, 'smallest p'):.3f}.",
            "",
        ]
    rates = ", ".join(f"{name} {rate:.3f}" for name, rate in found.error_rates.items())
    return [
        *lines,
        f"Error rates printed: {rates} (from `error_rate_table.py`, the row of this source of noise).",
        "",
    ]


def worked(given: Given, from_step: int | None, found: Score, metric: str = "") -> str:
    """Return the whole text for one scored incident with a twin and calibrated seeds.

    Raises:
        ValueError: A number is not what the scoring says.
    """
    first = found.ranking[0]
    laid = next(
        item
        for item in lay(given, from_step)
        if tuple(item.case.original.reading.effect.e_MB[0])
        == next(iter(first.metrics.values())).blocks_original
    )
    replays = {(given.replays[i].fault, given.replays[i].severity): item for i, item in laid.seen.items()}
    seen = {
        item.fault: replays[item.fault, item.severity] for item in found.ranking if np.isfinite(item.distance)
    }
    moved = compared(first.metrics)
    shown = metric or max(moved, key=lambda name: first.metrics[name].weight)
    parts = one_metric(shown, given, laid, first)
    parts += [f"All metrics of the incident and of the first candidate, {first.title}:", ""]
    parts += all_metrics(laid, seen[first.fault], first, given.settings)
    parts += doubt(given, laid, found, seen)
    return "\n".join(parts).strip() + "\n"


def main(arguments: Sequence[str]) -> None:
    """Work the report of a run folder out; print it, and with ``--write`` put it into the document."""
    from diagnose.scoring import material, planned_runs
    from taxonomy.registry import library

    folder = open_folder(Path(arguments[0]))
    session = load(folder)
    found = material(session, folder, planned_runs(session, folder), {})
    calibration = calibration_for(session, folder)
    stand_in = session.source != "checkpoint"
    curves = (found.faulty, found.healthy, found.proxy_healthy, found.replays, library())
    given = gather(*curves, calibration=calibration, stand_in=stand_in)
    answer = score(*curves, calibration=calibration, from_step=session.onset, stand_in=stand_in)
    text = worked(given, session.onset, answer, "actor/kl_loss")
    print(text)
    if "--write" in arguments:
        document = DOCUMENT.read_text(encoding="utf-8")
        before, after = document.split(BEGIN)[0], document.split(END)[1]
        DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
