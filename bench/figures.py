"""`make figures`: the paper's Figures 3 and 4 on the embedded model, every curve really trained.

Figure 3: rollout–trainer log-probability discrepancy and KL, healthy and with the Rollout LogP Precision fault.
Figure 4: reward, healthy and with actor updates omitted. Original against three proxies of the same size: ours
(multi_view), frequency-only selection, and merged experts. Writes two SVGs and `figures.md` with the numbers.

Legend of shape suffixes: ``_N`` logged steps.
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from diagnose.bank import Bank, Progress
from diagnose.curves import Curves
from diagnose.report.evidence import line
from diagnose.report.svg import Series, chart
from diagnose.report.text import number, percent
from diagnose.report.words import VERDICT_WORD
from diagnose.score.score import Replay, score
from diagnose.session import fault_spec
from diagnose.store import write_text
from proxy.specs import BuildSpec, Recipe, RunSpec
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.registry import library

ORIGINAL = "embedded:qwen3_moe"
EXPERTS = 12
STRATEGIES = {"ours": "multi_view", "frequency-only": "frequency", "merged": "merge"}
SEEDS = (1, 2)
"""Those of the self-test, whose bank then has most of the runs already."""
FIGURES = {
    3: (
        "rollout_logprob_precision",
        ("rollout_corr/log_ppl_abs_diff", "rollout_corr/k3_kl", "actor/kl_loss"),
    ),
    4: ("actor_update_omission", ("critic/rewards/mean",)),
}
WINDOWS = {"original": 15, "proxy": 9}
"""Steps of the centred rolling mean of the rewards; the original's is wider, as in the paper."""
WIDTH, HEIGHT = 420, 240
STYLE = """
text{fill:#566273;font:11px system-ui,sans-serif} text.title{fill:#1c2430;font-size:13px}
text.head{fill:#1c2430;font-size:15px} .grid{stroke:#c9d1da;stroke-width:.5} .frame{fill:none;stroke:#c9d1da}
.line{fill:none;stroke-width:2} .line.healthy{stroke:#1f5fa8;stroke-dasharray:6 4} .line.faulty{stroke:#b8400a}
.band{opacity:.15} .band.healthy{fill:#1f5fa8} .band.faulty{fill:#b8400a}
.mark.healthy{fill:#fff;stroke:#1f5fa8;stroke-width:1.5} .mark.faulty{fill:#b8400a}
"""

Runs = Mapping[tuple[str, str], Sequence[Curves]]
"""(model, fault or "healthy") → one run a seed."""


def train(home: Path, workers: int | None, steps: int, seeds: Sequence[int]) -> Runs:
    """Build the proxies and train what is not in the bank yet."""
    bank = Bank(home, workers)
    wanted: dict[str, str | BuildSpec] = {"original": ORIGINAL}
    wanted |= {name: BuildSpec(ORIGINAL, "", EXPERTS, strategy) for name, strategy in STRATEGIES.items()}
    models = bank.models(wanted)
    recipe = replace(Recipe(), steps=steps)
    cards = library()
    specs: dict[tuple[str, str], list[RunSpec]] = {}
    for name, model in models.items():
        specs[name, "healthy"] = [RunSpec(model.path, recipe, seed) for seed in seeds]
        for fault, _ in FIGURES.values():
            spec = fault_spec(cards[fault], 1.0)
            specs[name, fault] = [RunSpec(model.path, recipe, seed, spec) for seed in seeds]
    by_path = {model.path: model for model in models.values()}

    def progress(at: Progress) -> None:
        print(f"{at.done} of {at.total} runs, {at.failed} failed", flush=True)

    filled = bank.fill([s for group in specs.values() for s in group], by_path, progress=progress)
    print(f"{filled.made} runs made, {filled.there} were there, {len(filled.died)} died", flush=True)
    return {
        key: [
            bank.curves(run)
            for spec in group
            if (outcome := bank.outcome(run := bank.key(spec, by_path[spec.model]))) is not None
            and outcome.status == "completed"
        ]
        for key, group in specs.items()
    }


def smoothed(run: Curves, metric: str, window: int) -> Curves:
    """Return a run with one metric alone, as a centred rolling mean over its finite values."""
    values_N = run.values[metric]
    keep_N = np.isfinite(values_N)
    values_N, steps_N = values_N[keep_N], run.steps_N[keep_N]
    half = window // 2
    mean_N = np.array([values_N[max(0, i - half) : i + half + 1].mean() for i in range(len(values_N))])
    return Curves(run.source, steps_N, {metric: mean_N})


def figure(runs: Runs, which: int) -> str:
    """Return a figure as an SVG: a row for each model, a column for each metric."""
    fault, metrics = FIGURES[which]
    panels = []
    for row, model in enumerate(("original", *STRATEGIES)):
        for column, metric in enumerate(metrics):
            series = []
            for style, kind in (("healthy", "healthy"), ("faulty", fault)):
                group = runs[model, kind]
                if which == 4:
                    window = WINDOWS["original" if model == "original" else "proxy"]
                    group = [smoothed(run, metric, window) for run in group]
                curve = line(group, metric)
                if curve is not None:
                    series.append(Series(kind, style, curve))
            known = METRIC_BY_NAME[metric]
            name = model if model == "original" else f"proxy, {EXPERTS} experts, {model}"
            drawn = chart(
                series,
                title=f"{name}: {known.title}",
                y_label=known.unit,
                log_epsilon=known.epsilon if known.transform == "log10" else None,
            )
            place = f'<svg x="{column * WIDTH}" y="{40 + row * HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            panels.append(drawn.replace("<svg ", place, 1))
    width, height = WIDTH * len(metrics), 40 + HEIGHT * (1 + len(STRATEGIES))
    head = f"{library()[fault].title}: healthy dashed, faulty solid; median and extremes of the seeds"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text class="head" x="12" y="24">{html.escape(head)}</text>{"".join(panels)}</svg>\n'
    )


def late(runs: Sequence[Curves], metric: str) -> tuple[float, float]:
    """Return mean and standard deviation over seeds of a metric's median over the last third of the steps."""
    found = []
    for run in runs:
        values_N = run.values[metric][run.steps_N > run.steps_N[-1] * 2 / 3]
        found.append(float(np.nanmedian(values_N)))
    spread = float(np.std(found, ddof=1)) if len(found) > 1 else float("nan")
    return (float(np.mean(found)), spread) if found else (float("nan"), float("nan"))


def numbers(runs: Runs, which: int) -> list[str]:
    """Return a figure's numbers as Markdown lines."""
    fault, metrics = FIGURES[which]
    cards = library()
    lines = [
        f"## Figure {which}: {cards[fault].title}",
        "",
        f"![Figure {which}](figure_{which}.svg)",
        "",
        "Mean over seeds of the median over the last third of the steps, ± standard deviation over seeds.",
        "",
        "| model | metric | healthy | faulty | runs |",
        "|---|---|---|---|---|",
    ]
    for model in ("original", *STRATEGIES):
        for metric in metrics:
            cells = [
                f"{number(mean)} ± {number(spread, 2)}"
                for mean, spread in (late(runs[model, "healthy"], metric), late(runs[model, fault], metric))
            ]
            count = f"{len(runs[model, 'healthy'])}, {len(runs[model, fault])}"
            lines.append(f"| {model} | {METRIC_BY_NAME[metric].title} | {cells[0]} | {cells[1]} | {count} |")
    lines += [
        "",
        "All metrics together, by the scoring of `diagnose` (type, direction and trend; the original's runs are the",
        "incident, the proxy's the replay; no calibration, so the noise comes from these seeds alone):",
        "",
        "| proxy | distance | of nothing at all | agreement in direction | verdict |",
        "|---|---|---|---|---|",
    ]
    for name in STRATEGIES:
        healthy, faulty = runs[name, "healthy"], runs[name, fault]
        if not healthy or not faulty:
            lines.append(f"| {name} | – | – | – | no run came through |")
            continue
        given = (runs["original", fault], runs["original", "healthy"], healthy)
        found = score(*given, [Replay(fault, faulty), Replay("nothing", healthy)], cards)
        by_name = {item.fault: item for item in found.ranking}
        own, none = by_name[fault], by_name["nothing"]
        lines.append(
            f"| {name} | {number(own.distance)} | {number(none.distance)} | {percent(own.agreement)} | "
            f"{VERDICT_WORD[own.verdict]} |"
        )
    return [*lines, ""]


def main() -> None:
    """Train, draw, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("build/bank"), help="where runs are kept")
    parser.add_argument("--workers", type=int, default=None, metavar="N")
    parser.add_argument("--steps", type=int, default=Recipe.steps, metavar="N")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), metavar="N")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder to write")
    arguments = parser.parse_args()
    seeds = tuple(range(1, arguments.seeds + 1))
    runs = train(arguments.runs, arguments.workers, arguments.steps, seeds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Figures 3 and 4 of the paper, on the embedded model",
        "",
        f"Made by `make figures`: {ORIGINAL} (32 experts a layer) against proxies with {EXPERTS}, {arguments.steps} "
        f"steps, {len(seeds)} seeds, faults active from the first step.",
        "",
    ]
    for which in FIGURES:
        write_text(arguments.out / f"figure_{which}.svg", figure(runs, which))
        lines += numbers(runs, which)
    page = arguments.out / "figures.md"
    kept = page.read_text(encoding="utf-8").partition(READING)[2] if page.exists() else ""
    write_text(page, "\n".join(lines) + (READING + kept if kept else ""))
    print(f"wrote {arguments.out}")


READING = "## How to read them\n"
"""What stands below this heading is written by hand, and survives."""


if __name__ == "__main__":
    main()
