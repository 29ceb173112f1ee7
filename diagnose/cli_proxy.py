"""`diagnose proxy …`: cut a proxy from a checkpoint, and look at what was cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from diagnose.cli_options import (
    CheckpointArgument,
    Experts,
    Json,
    StrategyName,
    Workers,
    terminal_for,
)
from diagnose.errors import DiagnoseError

proxy_app = typer.Typer(help="Build a proxy and look at it.", rich_markup_mode=None)


def _numbers(text: str, what: str) -> list[int]:
    """Return a comma-separated list of whole numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise DiagnoseError(f"{what} takes whole numbers with commas between, not {text!r}") from None


def _floats(text: str, what: str) -> tuple[float, ...]:
    """Return a comma-separated list of numbers."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise DiagnoseError(f"{what} takes numbers with commas between, not {text!r}") from None


@proxy_app.command()
def build(
    checkpoint: CheckpointArgument,
    experts: Annotated[int, typer.Option("--experts", min=1, max=10**6, help="Experts kept a layer.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write.")],
    strategy: StrategyName = "multi_view",
    alpha: Annotated[
        str, typer.Option(help="Weights of router, co-activation and context; auto looks for the best.")
    ] = "1,1,1",
    normalisation: Annotated[str, typer.Option(help="min_max, max or rank.")] = "min_max",
    calibration: Annotated[
        str, typer.Option(help='embedded, or a JSONL file: {"text": …} or {"input_ids": […]} a line.')
    ] = "embedded",
    tokens: Annotated[int, typer.Option(min=1, help="Calibration tokens at most.")] = 65536,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random strategy.")] = 0,
    mtp: Annotated[str, typer.Option(help="Multi-token-prediction layers: drop or prune.")] = "drop",
    test_prompts: Annotated[
        Path | None, typer.Option("--test-prompts", metavar="FILE", help="Warn where calibration has these.")
    ] = None,
    json: Json = False,
) -> None:
    """Cut a proxy from a Mixture-of-Experts checkpoint."""
    from dataclasses import asdict

    from diagnose.jobs import run_job
    from proxy.specs import BuildSpec
    from proxy.work import work_place

    terminal = terminal_for(json)
    if mtp not in ("drop", "prune"):
        raise DiagnoseError(f"--mtp takes drop or prune, not {mtp!r}")
    try:
        weights = tuple(float(part) for part in ("1,1,1" if alpha == "auto" else alpha).split(","))
        if not all(0 <= weight < math.inf for weight in weights):  # nan too is none
            raise ValueError
        router, coactivation, context = (weight / sum(weights) for weight in weights)
    except (ValueError, ZeroDivisionError):
        message = f"--alpha takes three numbers of at least 0 with commas between, or auto, not {alpha!r}"
        raise DiagnoseError(message, "1,1,1 weighs them evenly") from None
    spec = BuildSpec(
        checkpoint,
        str(out),
        experts,
        strategy,
        (router, coactivation, context),
        normalisation,
        calibration,
        tokens,
        seed,
        alpha == "auto",
        mtp,
        str(test_prompts or ""),
    )
    try:
        manifest = run_job("build", asdict(spec), terminal)["manifest"]
    except KeyboardInterrupt:
        if work_place(out).exists():
            terminal.say(f"stopped; the same command goes on from {work_place(out)}")
        raise
    if json:
        terminal.json(manifest)
    else:
        terminal.say(f"wrote {out}")


@proxy_app.command()
def inspect(checkpoint: CheckpointArgument, experts: Experts = None, json: Json = False) -> None:
    """Say what a checkpoint is, from its headers alone, and what a build would make of it."""
    from diagnose import lab

    terminal = terminal_for(json)
    data = lab.inspect(checkpoint, experts)
    if json:
        terminal.json(data)
        return
    from diagnose.report.proxy import checkpoint_facts, proxy_view

    for line in checkpoint_facts(data):
        terminal.data(line)
    plan, made = data.get("plan"), data["manifest"]
    if problem := data["manifest_error"]:
        terminal.warn(problem)
    for warning in plan["warnings"] if plan else ():
        terminal.warn(warning)
    if made:
        terminal.data("\nThis is a proxy.")
        terminal.show(proxy_view(made))
    elif not plan:
        terminal.say("add --experts K to see what a cut to K experts a layer would leave")


@proxy_app.command()
def compare(
    checkpoint: CheckpointArgument,
    experts: Annotated[str, typer.Option("--experts", metavar="K,K", help="Budgets.")] = "12,16",
    strategies: Annotated[
        str, typer.Option("--strategies", metavar="S,S", help="Strategies.")
    ] = "multi_view,router+coactivation,router+context,coactivation+context,frequency,merge,first_k,random",
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 1000,
    json: Json = False,
) -> None:
    """Compare ways of choosing experts by task accuracy (the paper's Tables 3 and 4), as paired differences."""
    from diagnose import lab

    terminal = terminal_for(json)
    spec = {
        "checkpoint": checkpoint,
        "experts": _numbers(experts, "--experts"),
        "strategies": strategies.split(","),
        "prompts": prompts,
    }
    rows = lab.compare(spec, terminal)
    if json:
        terminal.json({"schema": 1, "checkpoint": checkpoint, "prompts": prompts, "rows": rows})
        return
    terminal.table(
        ("strategy", "experts", "accuracy", "against multi_view", "95 % interval"),
        [
            (
                row["strategy"],
                str(row["experts"]),
                f"{row['accuracy']:.3f}",
                "–" if row["difference"] is None else f"{row['difference']:+.3f}",
                "–" if row["low"] is None else f"{row['low']:+.3f} to {row['high']:+.3f}",
            )
            for row in rows
        ],
        numbers=4,
    )


@proxy_app.command()
def dynamics(
    checkpoint: CheckpointArgument,
    experts: Annotated[str, typer.Option("--experts", metavar="K,K", help="Budgets.")] = "12,16",
    strategy: StrategyName = "multi_view",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds of every model.")] = 3,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.")] = None,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Train healthy original and healthy proxies side by side (the paper's Figure 2)."""
    from diagnose import dynamics as healthy
    from diagnose import lab
    from proxy.specs import BuildSpec, Recipe

    terminal = terminal_for(json)
    recipe = lab.changed(Recipe(), [f"steps={steps}"] if steps else [])
    cut = BuildSpec(checkpoint, "", 1, strategy)
    budgets = _numbers(experts, "--experts")
    rows, gains = healthy.dynamics(checkpoint, budgets, cut, recipe, range(1, seeds + 1), workers, terminal)
    if json:
        data = {
            "schema": 1,
            "checkpoint": checkpoint,
            "recipe": recipe.__dict__,
            "rows": rows,
            "gains": gains,
        }
        terminal.json(data)
        return
    terminal.table(
        ("metric", "model", "start", "end", "change", "± s.e."),
        [
            (
                row["metric"],
                row["model"],
                f"{row['start']:.4g}",
                f"{row['end']:.4g}",
                f"{row['change']:+.4g}",
                "–" if row["error"] is None else f"{row['error']:.2g}",
            )
            for row in sorted(rows, key=lambda row: row["metric"])
        ],
        numbers=4,
    )
    terminal.table(
        ("held-out", "model", "start", "gain", "95 % above", "smallest"),
        [
            (
                row["part"],
                row["model"],
                f"{row['start']:.3f}",
                f"{row['gain']:+.3f}",
                "–" if row["low"] is None else f"{row['low']:+.3f}",
                f"{row['smallest']:+.3f}",
            )
            for row in gains
        ],
        numbers=4,
    )


@proxy_app.command()
def cost(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a config.json, or embedded:NAME.")],
    experts: Annotated[str, typer.Option("--experts", metavar="K,K", help="Budgets of proxies.")] = "",
    accelerator: Annotated[str, typer.Option(metavar="KIND", help="Kind of accelerator.")] = "ascend-910c",
    accelerators: Annotated[
        str, typer.Option(metavar="N,N", help="Accelerators of original and proxies [the least].")
    ] = "",
    seconds: Annotated[
        str, typer.Option(metavar="S,S", help="Measured seconds a step of original and proxies [estimated].")
    ] = "",
    tokens: Annotated[int, typer.Option(min=1, max=10**9, help="Tokens of a micro batch.")] = 4096,
    responses: Annotated[int, typer.Option(min=1, max=10**9, help="Responses a step.")] = 1024,
    prompt: Annotated[int, typer.Option(min=1, max=10**9, help="Tokens of a prompt.")] = 512,
    response: Annotated[int, typer.Option(min=1, max=10**9, help="Tokens of a response.")] = 1024,
    json: Json = False,
) -> None:
    """Say what RL training of a model costs, and of its proxies, from config.json alone (the paper's Table 2)."""
    from diagnose import costs
    from proxy.cost import Batch

    order = costs.Order(
        model,
        tuple(_numbers(experts, "--experts")) if experts else (),
        accelerator,
        tokens,
        Batch(responses, prompt, response),
        tuple(_numbers(accelerators, "--accelerators")) if accelerators else (),
        _floats(seconds, "--seconds"),
    )
    rows, terminal = costs.costs(order), terminal_for(json)
    if json:
        terminal.json(costs.data_of(order, rows))
    else:
        costs.show(order, rows, terminal)
