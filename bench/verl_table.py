"""`python -m bench.verl_table`: the same faults on the local engine and on real verl, metric by metric.

Every run is of the embedded original under one recipe. The tool's own scoring compares the two systems, local as the
original and verl as the proxy: direction, and effect at the end of the run (median over its late half, against the
healthy runs of the same system, in the metric's transformed units). Finished runs are kept in the work folder, so a
second call only computes, and a run that was interrupted is begun again; the tables go between two marks in the page.
Healthy runs of verl are dear: it has few seeds, the local engine as many as a calibration wants.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from diagnose.console import Terminal
from diagnose.curves import Curves
from diagnose.jobs import read_outcome, run_all
from diagnose.result import Candidate, Direction, MetricResult, Verdict
from diagnose.score.calibration import Calibration, SeedSet
from diagnose.score.plan import Replay
from diagnose.score.score import score
from diagnose.scoring import judge_witness
from diagnose.session import fault_spec
from proxy.engines.verl_env import find_python
from proxy.engines.verl_plugin.table import DRIVER, HOOKS, ROLLOUT, SERVER, TRAINER, VLLM, VLLM_HOOKS
from proxy.specs import EngineSpec, Recipe, RunSpec
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.registry import library

MODEL = "embedded:qwen3_moe"
FAULTS = (
    "weight_sync_skipped",
    "prompt_mismatch",
    "logprob_shift",
    "rollout_logprob_precision",
    "rollout_weight_quantization",
    "top_k_mismatch",
    "expert_permutation",
    "router_disagreement",
    "learning_rate_too_high",
    "actor_update_omission",
    "reward_flipped",
    "reward_noise",
    "kl_sign_flipped",
    "group_ids_broken",
)
"""Faults of every category and of every process of verl's."""
SHOWN = (
    "critic/rewards/mean",
    "val-core/reward/mean",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "training/rollout_probs_diff_mean",
    "training/rollout_actor_probs_pearson_corr",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "routing/agreement/mean",
    "rollout/weight_lag",
)
LOGS = 2
"""Healthy logs beside an incident, and healthy replays of a run."""
NAMING = (Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC)
MARK = "<!-- made by bench.verl_table -->"
HOOKED = "<!-- made by bench.verl_table from proxy/engines/verl_plugin/table.py -->"
ARROWS = {Direction.UP: "↑", Direction.DOWN: "↓", Direction.NONE: "–", Direction.UNDETERMINED: "?"}


def hooks_table() -> str:
    """Return the page's table of places in verl (and vLLM), from the plugin's own."""
    processes = {DRIVER: "driver", TRAINER: "training worker", SERVER: "rollout server"}
    lines = ["| stage | form | what a fault sees or changes | process | function |", "|---|---|---|---|---|"]
    for hook in (*HOOKS, *VLLM_HOOKS):
        if not hook.stages:
            continue
        stages = ", ".join(dict.fromkeys(stage.value for stage, _ in hook.stages))
        forms = ", ".join(dict.fromkeys(form.value for _, form in hook.stages))
        file = hook.module.rpartition(".")[2]
        place = f"`{hook.symbol if '.' in hook.symbol else f'{file}.{hook.symbol}'}`"
        place = "the plugin's own server" if hook.rollout == ROLLOUT else place
        only = f" ({hook.trainers[0].upper()})" if len(hook.trainers) == 1 else ""
        where = " (vLLM: not run here)" if hook.rollout == VLLM else ""
        seen = ", ".join(hook.tensors)
        lines.append(f"| {stages} | {forms} | {seen} | {processes[hook.process]} | {place}{only}{where} |")
    return "\n".join(lines)


def between(text: str, mark: str, made: str) -> str:
    """Return a page with what stands between two marks replaced; a page without them gets both at its end."""
    if mark not in text:
        text = f"{text}{mark}\n{mark}\n"
    before, _, rest = text.partition(mark)
    _, _, after = rest.partition(mark)
    return f"{before}{mark}\n{made}\n{mark}{after}"


def specs(steps: int, seeds: Mapping[str, int], faults: Sequence[str]) -> dict[str, RunSpec]:
    """Return all runs by name, verl's first: they take longest.

    Args:
        steps: Steps of every run.
        seeds: Healthy seeds by engine.
        faults: Fault ids.
    """
    engines = {"verl": EngineSpec("verl"), "local": EngineSpec()}
    recipe = Recipe(steps=steps)
    found = {}
    for name, engine in engines.items():
        for seed in range(1, seeds[name] + 1):
            found[f"{name}-healthy-s{seed}"] = RunSpec(MODEL, recipe, seed, None, engine)
        for fault in faults:
            planned = fault_spec(library()[fault], 1.0)
            found[f"{name}-{fault}"] = RunSpec(MODEL, recipe, 1, planned, engine)
    return found


def compared(curves: Mapping[str, Curves], work: Path, faults: Sequence[str]) -> dict[str, Candidate]:
    """Return, by fault, the comparison of local (as the original) with verl (as the proxy)."""
    cards = library()

    def healthy(engine: str) -> list[Curves]:
        return [run for name, run in curves.items() if name.startswith(f"{engine}-healthy")]

    found = {}
    for fault in faults:
        outcome = read_outcome(work / f"verl-{fault}")
        assert outcome is not None
        witness, seen = judge_witness(cards[fault], [outcome.witness])
        replay = Replay(fault, [curves[f"verl-{fault}"]], witness=witness, witness_ok=seen)
        result = score(
            [curves[f"local-{fault}"]], healthy("local"), healthy("verl"), [replay], cards, from_step=1
        )
        found[fault] = result.ranking[0]
    return found


def diagnosed(curves: Mapping[str, Curves], work: Path, faults: Sequence[str], of: str, by: str) -> list[str]:
    """Return table rows: each incident recorded on engine `of`, diagnosed with the replays of engine `by`."""
    cards = library()

    def runs(engine: str, fault: str) -> list[Curves]:
        return [run for name, run in curves.items() if name.startswith(f"{engine}-{fault}")]

    replays = []
    for fault in faults:
        outcome = read_outcome(work / f"{by}-{fault}")
        assert outcome is not None
        witness, seen = judge_witness(cards[fault], [outcome.witness])
        replays.append(Replay(fault, runs(by, fault), witness=witness, witness_ok=seen))
    # Healthy seeds on file, as `diagnose calibrate` makes them: of the proxy, and of the original where it is ours.
    calibration = Calibration(
        SeedSet.from_curves(runs(by, "healthy")), "", "", SeedSet.from_curves(runs(of, "healthy"))
    )
    rows, first, inside, named = [], 0, 0, 0
    for fault in faults:
        found = score(
            runs(of, fault),
            runs(of, "healthy")[:LOGS],
            runs(by, "healthy")[:LOGS],
            replays,
            cards,
            calibration=calibration,
        )
        top = found.ranking[0]
        rank = [candidate.fault for candidate in found.ranking].index(fault) + 1
        first += rank == 1
        inside += fault in [top.fault, *top.rivals]
        named += fault in [top.fault, *top.rivals] and found.verdict in NAMING
        rows.append(f"| {fault} | {found.verdict.value} | {', '.join([top.fault, *top.rivals])} | {rank} |")
    count = len(faults)
    return [
        f"Incidents recorded on {of}, diagnosed with the {by} engine's replays of {count} faults: the truth is first "
        f"in the ranking in {first} of {count}, in the set that cannot be told from the first in {inside} of {count} "
        f"({inside / count:.0%}), and in a set that the verdict names (reproduced, specific or not) in {named} of "
        f"{count} ({named / count:.0%}); the others end with the verdict listed.",
        "",
        "| incident | verdict | first, and what cannot be told from it | rank of the truth |",
        "|---|---|---|---|",
        *rows,
    ]


def cell(result: MetricResult) -> str:
    """Return both systems' directions and effects of one metric."""
    return (
        f"{ARROWS[result.original]} {result.effect_original:+.3g} / "
        f"{ARROWS[result.proxy]} {result.effect_proxy:+.3g}"
    )


def agreement(found: Mapping[str, Candidate], margin: bool) -> tuple[int, int]:
    """Return (metrics with the same direction, metrics that moved on both).

    Args:
        found: Comparisons by fault.
        margin: Count what the scoring calls a movement; else whatever lies over the metric's floor on both.
    """
    same = both = 0
    for candidate in found.values():
        for name, result in candidate.metrics.items():
            effects = (result.effect_original, result.effect_proxy)
            if not all(map(math.isfinite, effects)):
                continue
            moved = {Direction.UP, Direction.DOWN}
            if margin:
                counts = result.original in moved and result.proxy in moved
            else:
                counts = min(map(abs, effects)) > METRIC_BY_NAME[name].floor
            both += counts
            same += counts and (effects[0] > 0) == (effects[1] > 0)
    return same, both


def page(curves: Mapping[str, Curves], found: Mapping[str, Candidate], command: str, work: Path) -> str:
    """Return the generated part of the page."""
    lines = [f"Made by `{command}`.", ""]
    lines += [
        "Healthy runs, mean over seeds of the last step's fifth:",
        "",
        "| metric | local | verl |",
        "|---|---|---|",
    ]
    for name in SHOWN:
        values = []
        for engine in ("local", "verl"):
            runs = [run for key, run in curves.items() if key.startswith(f"{engine}-healthy")]
            ends = [_end(run, name) for run in runs if name in run.values]
            values.append(f"{sum(ends) / len(ends):.4g}" if ends else "–")
        lines.append(f"| {METRIC_BY_NAME[name].title} | {values[0]} | {values[1]} |")
    lines += ["", "Effects, local / verl (↑ ↓ moved, – not, ? can't be told):", ""]
    lines += [
        "| fault | witness on verl | " + " | ".join(METRIC_BY_NAME[name].title for name in SHOWN) + " |"
    ]
    lines += ["|---" * (len(SHOWN) + 2) + "|"]
    for fault, candidate in found.items():
        rule = library()[fault].witness
        cells = [cell(candidate.metrics[name]) if name in candidate.metrics else "" for name in SHOWN]
        measured = candidate.witness.get(rule.name, float("nan"))
        lines.append(f"| {fault} | {rule.name} {measured:.3g} | " + " | ".join(cells) + " |")
    for margin, what in (
        (True, "that moved on both engines by the scoring's margins"),
        (False, "over their floor on both"),
    ):
        same, both = agreement(found, margin)
        share = f" ({same / both:.0%})" if both else ""
        lines += ["", f"Same direction: {same} of {both} metrics {what}{share}."]
    for of, by in (("verl", "local"), ("local", "verl")):
        lines += ["", *diagnosed(curves, work, list(found), of, by)]
    lines += ["", "| run | steps | wall s | CPU s |", "|---|---|---|---|"]
    for name in curves:
        outcome = read_outcome(work / name)
        if outcome and name.startswith("verl"):
            lines.append(f"| {name} | {outcome.steps} | {outcome.wall_s:.0f} | {outcome.cpu_s:.0f} |")
    return "\n".join(lines)


def _end(run: Curves, name: str) -> float:
    """Return the mean of a metric over the last fifth of the steps."""
    values = [value for value in run.values[name] if math.isfinite(value)]
    last = values[-max(1, len(values) // 5) :]
    return float(sum(last) / len(last))


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--work", type=Path, default=Path("build/verl_table"), help="folder of the runs")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=6, help="healthy seeds of verl")
    parser.add_argument("--local-seeds", type=int, default=20, help="healthy seeds of the local engine")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--page", type=Path, default=Path("docs/verl.md"))
    parser.add_argument("--hooks", action="store_true", help="only the table of places in verl")
    arguments = parser.parse_args()
    if arguments.hooks:
        arguments.page.write_text(between(arguments.page.read_text(), HOOKED, hooks_table()))
        return
    faults = arguments.faults.split(",")
    work = arguments.work.absolute()
    find_python()
    seeds = {"verl": arguments.seeds, "local": arguments.local_seeds}
    planned = specs(arguments.steps, seeds, faults)
    curves = run_all(planned, work, arguments.workers, Terminal())
    found = compared(curves, work, faults)
    command = shlex.join(["python", "-m", "bench.verl_table", *sys.argv[1:]])
    made = page(curves, found, command, work)
    text = arguments.page.read_text() if arguments.page.exists() else ""
    arguments.page.write_text(between(between(text, HOOKED, hooks_table()), MARK, made))
    print(made)


if __name__ == "__main__":
    main()
