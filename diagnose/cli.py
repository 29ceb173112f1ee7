"""The command line. Every import that costs time is inside the command that needs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from diagnose.console import Terminal
from diagnose.errors import DiagnoseError, ExitCode

app = typer.Typer(
    help="Find the cause of a failing LLM reinforcement-learning run by injecting faults into a cheap proxy.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
proxy_app = typer.Typer(help="Build a proxy and look at it.", rich_markup_mode=None, no_args_is_help=True)
app.add_typer(proxy_app, name="proxy")

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Details too.")]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one HTML page.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Worker processes [cores].")]
Experts = Annotated[int | None, typer.Option("--experts", min=1, help="Experts kept a layer.")]
StrategyName = Annotated[str, typer.Option("--strategy", help="How the kept experts are chosen.")]
CheckpointArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A folder, or embedded:NAME.")]
CheckpointOption = Annotated[str, typer.Option("--checkpoint", help="A folder, or embedded:NAME.")]


def main() -> None:
    """Entry point of the command `diagnose`."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Run one command line and return its exit code; whatever goes wrong is one line and a mend on stderr."""
    try:
        code = get_command(app).main(arguments, prog_name="diagnose", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        Terminal().error("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `diagnose … | head`: nobody listens any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as error:
        if os.environ.get("DIAGNOSE_DEBUG") == "1":
            import traceback

            traceback.print_exc()
        message, mend, code = explain(error)
        Terminal().error(message, mend)
        return code


def explain(error: Exception) -> tuple[str, str, ExitCode]:
    """Return message, mend and exit code of an error that reached the top."""
    if isinstance(error, DiagnoseError):
        return str(error), error.mend, error.exit_code
    if callable(message := getattr(error, "format_message", None)):  # of the option parser
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "diagnose"
        return message(), f"see: {command} --help", ExitCode.USAGE
    if isinstance(error, ValueError):  # of taxonomy and proxy, which don't know our exit codes
        return str(error), getattr(error, "mend", ""), ExitCode.USAGE
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}", "", ExitCode.RUN_FAILED
    hint = "set DIAGNOSE_DEBUG=1 for the traceback, and report it"
    return f"internal error: {type(error).__name__}: {error}", hint, ExitCode.RUN_FAILED


def _terminal(json: bool = False, quiet: bool = False, verbose: bool = False) -> Terminal:
    return Terminal(verbosity=-1 if quiet else int(verbose), json_only=json)


@app.callback(invoke_without_command=True)
def _default(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Without a command: the screen."""
    if version:
        from importlib.metadata import version as installed

        Terminal().data(installed("rl-diagnose"))
    elif context.invoked_subcommand is None:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise DiagnoseError("the screen needs a terminal", "see: diagnose --help")
        from diagnose.tui.app import run as run_tui

        run_tui()


@app.command()
def run(
    target: Annotated[
        str | None,
        typer.Argument(metavar="PLAYBOOK", help="Playbook file or name; with --resume also a run folder."),
    ] = None,
    json: Json = False,
    junit: Junit = None,
    html: Html = None,
    markdown: Markdown = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Run folder to make.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="local or verl.")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Seeds of every replay.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Training steps of a replay.")] = None,
    workers: Workers = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run, the newest by default.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False,
    allow_command: Annotated[
        bool, typer.Option("--allow-command", help="Allow the commands that the playbook names.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Build the proxy, inject the candidate faults, score, report."""
    from diagnose import run as running

    terminal = _terminal(json, quiet, verbose)
    files = {"junit": junit, "html": html, "markdown": markdown}
    outputs = running.Outputs({name: path for name, path in files.items() if path}, json)
    if resume:
        if engine or seeds or steps or workers or dry_run:
            raise DiagnoseError(
                "a resumed run keeps its engine, seeds, steps and workers",
                "start a new one for other settings",
            )
        raise typer.Exit(running.carry_on(running.find(target, out), terminal, outputs))
    if target is None:
        raise DiagnoseError("no playbook named", "diagnose run PLAYBOOK, e.g.: diagnose run kl_spike")
    from diagnose.prepare import Overrides

    overrides = Overrides(engine, seeds, steps, workers)
    code = running.begin(target, overrides, out, allow_command, dry_run, terminal, outputs)
    raise typer.Exit(code)


@app.command()
def score(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR", help="Run folder whose verdict is recomputed.")
    ] = None,
    original_healthy: Annotated[list[Path] | None, typer.Option(help="Healthy log of the original.")] = None,
    original_faulty: Annotated[list[Path] | None, typer.Option(help="Log of the incident.")] = None,
    proxy_healthy: Annotated[list[Path] | None, typer.Option(help="Healthy log of the proxy.")] = None,
    proxy_faulty: Annotated[list[Path] | None, typer.Option(help="Log of the proxy with a fault.")] = None,
    fault: Annotated[str | None, typer.Option(metavar="ID", help="The fault that was injected.")] = None,
    from_step: Annotated[int, typer.Option(min=1, help="Step from which the proxy has the fault.")] = 1,
    json: Json = False,
    junit: Junit = None,
    html: Html = None,
    markdown: Markdown = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Score without running anything: a run folder again, or logs of an experiment made elsewhere.

    Each log option may be given several times, once for each seed.
    """
    from diagnose import scoring

    terminal = _terminal(json, quiet, verbose)
    files = {"junit": junit, "html": html, "markdown": markdown}
    logs = scoring.Logs(
        tuple(original_healthy or ()),
        tuple(original_faulty or ()),
        tuple(proxy_healthy or ()),
        tuple(proxy_faulty or ()),
        fault or "",
        from_step,
    )
    code = scoring.command(run_dir, logs, {name: path for name, path in files.items() if path}, terminal)
    raise typer.Exit(code)


@app.command()
def logs(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A training log; - is stdin.")],
    json: Json = False,
) -> None:
    """Print what the importer understood of a log."""
    from diagnose.logs import read
    from diagnose.logs.summary import as_json, as_rich

    found = read(log)
    if json:
        _terminal(json).json(as_json(found))
    else:
        _terminal().show(as_rich(found), plain_width=120)


@app.command()
def faults(
    fault: Annotated[str | None, typer.Argument(metavar="ID", help="Fault id; all without one.")] = None,
    json: Json = False,
) -> None:
    """Print the taxonomy and the fault cards."""
    from diagnose import show
    from taxonomy.registry import library

    cards = list(library().cards.values()) if fault is None else [library()[fault]]
    if json:
        data: Any = [show.fault_data(card) for card in cards]
        _terminal(json).json({"schema": show.SCHEMA, "faults": data} if fault is None else data[0])
    elif fault is None:
        show.show_faults(cards, _terminal())
    else:
        show.show_fault(cards[0], _terminal())


@app.command()
def record(
    checkpoint: CheckpointOption,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.jsonl", help="Log to write.")],
    fault: Annotated[str, typer.Option("--fault", metavar="ID", help="Fault to inject.")] = "",
    strength: Annotated[float, typer.Option("--strength", min=0.0, help="Multiple of the default.")] = 1.0,
    from_step: Annotated[int, typer.Option("--from-step", min=1, help="First faulty step.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the run.")] = 1,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.")] = None,
    answers: Annotated[
        Path | None, typer.Option("--answers", metavar="FILE", help="Where the fault is written down.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change the recipe.")
    ] = None,
    json: Json = False,
) -> None:
    """Run the original, with a fault or without, to make a log (and a manifest beside it)."""
    from diagnose import lab
    from proxy.specs import Recipe

    terminal = _terminal(json)
    recipe = lab.changed(Recipe(), [*(settings or ()), *([f"steps={steps}"] if steps else ())])
    order = lab.Recording(
        checkpoint, recipe, seed, out, fault, strength, from_step, answers, tuple(settings or ())
    )
    manifest = lab.record(order, terminal)
    if json:
        terminal.json(manifest)
    else:
        terminal.say(f"wrote {out}")


@app.command()
def calibrate(
    checkpoint: CheckpointOption,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.npz", help="Calibration to write.")],
    experts: Experts = None,
    strategy: StrategyName = "multi_view",
    seeds: Annotated[int, typer.Option("--seeds", min=2, help="Healthy seeds; 20 for honest margins.")] = 20,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.")] = None,
    original: Annotated[bool, typer.Option(help="Run the original's seeds too.")] = True,
    workers: Workers = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change the recipe.")
    ] = None,
    json: Json = False,
) -> None:
    """Run healthy seeds and store how much a healthy run varies."""
    from diagnose import lab
    from proxy.specs import BuildSpec, Recipe

    terminal = _terminal(json)
    recipe = lab.changed(Recipe(), [*(settings or ()), *([f"steps={steps}"] if steps else ())])
    cut = BuildSpec(checkpoint, "", experts, strategy) if experts else None
    manifest = lab.calibrate(checkpoint, cut, recipe, seeds, out, original, workers, terminal)
    if json:
        terminal.json(manifest)
    else:
        terminal.say(f"wrote {out}")


@app.command()
def doctor(json: Json = False) -> None:
    """Say what works on this machine, and the mend for what doesn't."""
    from diagnose import show
    from diagnose.doctor import examine

    checks = examine()
    if json:
        _terminal(json).json(show.doctor_data(checks))
    else:
        show.show_doctor(checks, _terminal())


@app.command()
def schema() -> None:
    """Print the JSON Schema of the playbook."""
    from diagnose import playbook

    _terminal().json(playbook.schema())


def _numbers(text: str, what: str) -> list[int]:
    """Return a comma-separated list of whole numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise DiagnoseError(f"{what} takes whole numbers with commas between, not {text!r}") from None


@proxy_app.command()
def build(
    checkpoint: CheckpointArgument,
    experts: Annotated[int, typer.Option("--experts", min=1, help="Experts kept a layer.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write.")],
    strategy: StrategyName = "multi_view",
    alpha: Annotated[str, typer.Option(help="Weights of router, co-activation and context.")] = "1,1,1",
    normalisation: Annotated[str, typer.Option(help="min_max, max or rank.")] = "min_max",
    calibration: Annotated[str, typer.Option(help="embedded, or a JSONL file of prompts.")] = "embedded",
    tokens: Annotated[int, typer.Option(min=1, help="Calibration tokens at most.")] = 65536,
    seed: Annotated[int, typer.Option(help="Seed of the random strategy.")] = 0,
    json: Json = False,
) -> None:
    """Cut a proxy from a Mixture-of-Experts checkpoint."""
    from dataclasses import asdict

    from diagnose.jobs import run_job
    from proxy.specs import BuildSpec

    terminal = _terminal(json)
    try:
        weights = tuple(float(part) for part in alpha.split(","))
        router, coactivation, context = (weight / sum(weights) for weight in weights)
    except (ValueError, ZeroDivisionError):
        raise DiagnoseError(f"--alpha takes three numbers with commas between, not {alpha!r}") from None
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
    )
    manifest = run_job("build", asdict(spec), terminal)["manifest"]
    if json:
        terminal.json(manifest)
    else:
        terminal.say(f"wrote {out}")


@proxy_app.command()
def inspect(checkpoint: CheckpointArgument, experts: Experts = None, json: Json = False) -> None:
    """Say what a checkpoint is, from its headers alone, and what a build would make of it."""
    from diagnose import lab

    terminal = _terminal(json)
    data = lab.inspect(checkpoint, experts)
    if json:
        terminal.json(data)
        return
    for name in ("family", "experts", "top_k", "groups", "parameters", "tensors"):
        terminal.data(f"{name}: {data[name]}")
    terminal.data(f"moe layers: {len(data['moe_layers'])}")
    if plan := data.get("plan"):
        share = plan["parameters_after"] / plan["parameters_before"]
        terminal.data(
            f"with {plan['kept']} experts: {plan['parameters_after']} parameters ({share:.0%}), "
            f"{plan['bytes_after'] / 1e6:.1f} MB"
        )
        for warning in plan["warnings"]:
            terminal.warn(warning)
    if made := data["manifest"]:
        experts_word = f"{made['experts']['after']} of {made['experts']['before']} experts"
        terminal.data(f"this is a proxy: {experts_word} by {made['spec']['strategy']}")


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

    terminal = _terminal(json)
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
    from diagnose import lab
    from proxy.specs import BuildSpec, Recipe

    terminal = _terminal(json)
    recipe = lab.changed(Recipe(), [f"steps={steps}"] if steps else [])
    cut = BuildSpec(checkpoint, "", 1, strategy)
    budgets = _numbers(experts, "--experts")
    rows = lab.dynamics(checkpoint, budgets, cut, recipe, range(1, seeds + 1), workers, terminal)
    if json:
        terminal.json({"schema": 1, "checkpoint": checkpoint, "recipe": recipe.__dict__, "rows": rows})
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


if __name__ == "__main__":
    main()
