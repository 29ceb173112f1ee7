"""The command line. Every import that costs time is inside the command that needs it."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from diagnose.cli_options import (
    Anonymize,
    CheckpointOption,
    Experts,
    Html,
    Json,
    Junit,
    Markdown,
    Quiet,
    Settings,
    StrategyName,
    Verbose,
    Workers,
    anonymous,
    terminal_for,
)
from diagnose.cli_proxy import proxy_app
from diagnose.console import Terminal
from diagnose.errors import DiagnoseError, ExitCode

app = typer.Typer(
    help="Find the cause of a failing LLM reinforcement-learning run by injecting faults into a cheap proxy.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(proxy_app, name="proxy")


def main() -> None:
    """Entry point of the command `diagnose`."""
    for stream in (sys.stdout, sys.stderr):  # without UTF-8 an answer with a "?" in it beats none
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
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
        _last_words(arguments, error).error(message, mend)
        return code


def _last_words(arguments: list[str], error: Exception) -> Terminal:
    """Return the terminal that an error is printed on: it may be pasted somewhere, as any answer."""
    if "--anonymize" not in arguments:
        return Terminal()
    from diagnose.anonymize import of_command_line

    return Terminal(anonymizer=of_command_line(arguments, getattr(error, "names", ())))


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


@app.callback(invoke_without_command=True)
def _default(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Show the screen in a browser instead.")] = False,
    host: Annotated[str, typer.Option("--host", help="Address that --serve listens on.")] = "localhost",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of --serve.")] = 8000,
) -> None:
    """Without a command: the screen."""
    if version:
        from importlib.metadata import version as installed

        Terminal().data(installed("rl-diagnose"))
    elif serve:
        from diagnose.tui.serve import serve as serve_tui

        serve_tui(host, port)
        raise typer.Exit
    elif context.invoked_subcommand is None:
        from diagnose.tui.serve import is_served

        if not is_served() and not (sys.stdin.isatty() and sys.stdout.isatty()):
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
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            min=0,
            metavar="SECONDS",
            help="For the replays; 0: no limit. With --resume: so many more.",
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Find the cheapest experiment that splits a set.")
    ] = False,
    try_fix: Annotated[
        bool, typer.Option("--try-fix", help="Try the remedies of the first candidate on the proxy.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run, the newest by default.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False,
    allow_command: Annotated[
        bool, typer.Option("--allow-command", help="Allow the commands that the playbook names.")
    ] = False,
    anonymize: Anonymize = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Build the proxy, inject the candidate faults, score, report."""
    from diagnose import run as running

    terminal = anonymous(terminal_for(json, quiet, verbose), anonymize, target, out)
    files = {"junit": junit, "html": html, "markdown": markdown}
    wishes = tuple(name for name, wanted in (("probe", probe), ("try_fix", try_fix)) if wanted)
    outputs = running.Outputs({name: path for name, path in files.items() if path}, json, wishes)
    if resume:
        if engine or seeds or steps or workers or dry_run:
            raise DiagnoseError(
                "a resumed run keeps its engine, seeds, steps and workers",
                "start a new one for other settings",
            )
        folder = running.find(target, out)
        if budget is not None:
            running.add_time(folder, budget)
        raise typer.Exit(running.carry_on(folder, terminal, outputs))
    if target is None:
        raise DiagnoseError("no playbook named", "diagnose run PLAYBOOK, e.g.: diagnose run kl_spike")
    from diagnose.prepare import Overrides

    overrides = Overrides(engine, seeds, steps, workers, budget_s=budget)
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
    anonymize: Anonymize = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Score without running anything: a run folder again, or logs of an experiment made elsewhere.

    Each log option may be given several times, once for each seed.
    """
    from diagnose import scoring

    given = (
        run_dir,
        *(original_healthy or ()),
        *(original_faulty or ()),
        *(proxy_healthy or ()),
        *(proxy_faulty or ()),
    )
    terminal = anonymous(terminal_for(json, quiet, verbose), anonymize, *given)
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
    log: Annotated[str, typer.Argument(metavar="LOG", help="A training log, or a folder; - is stdin.")],
    log_format: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="Reader to use [found by itself].")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print new points as they come.")] = False,
    anonymize: Anonymize = False,
    json: Json = False,
) -> None:
    """Print what the importer understood of a log."""
    from diagnose.logs import show

    show.command(log, log_format, follow, anonymize, json, terminal_for(json))


@app.command(
    epilog="Facts for --context: framework, model.name, model.moe, device, rollout.backend, rollout.temperature, "
    "rollout.turns, rollout.prefix_caching, weights.equal, resumed, changed and more; docs/triage.md lists all "
    "keys with their values, and a key or value that is not known is warned about."
)
def triage(
    log: Annotated[list[str] | None, typer.Argument(metavar="LOG", help="Training log; - is stdin.")] = None,
    healthy: Annotated[list[str] | None, typer.Option(metavar="LOG", help="Healthy log.")] = None,
    observed: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=DIRECTION[:ONSET]", help="What a dashboard shows, without a log."),
    ] = None,
    context: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A fact of the run.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Resolved configuration.")] = None,
    good_config: Annotated[Path | None, typer.Option(metavar="FILE", help="That of a healthy run.")] = None,
    generations: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Generated responses (verl's rollout_data_dir).")
    ] = None,
    run: Annotated[int | None, typer.Option("--run", min=1, help="Which run of the log [the last].")] = None,
    write_playbook: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the playbook to run next.")
    ] = None,
    fail_on_symptom: Annotated[
        bool, typer.Option("--fail-on-symptom", help="Exit with 1 where there is a symptom.")
    ] = False,
    anonymize: Anonymize = False,
    json: Json = False,
) -> None:
    """Say what happened, since when, what it may be, what it is not, and what to do: from the logs alone.

    Each of LOG, --healthy, --observed and --context may be given several times.
    """
    from diagnose.triage.command import Order, command

    order = Order(
        tuple(log or ()),
        tuple(healthy or ()),
        tuple(observed or ()),
        tuple(context or ()),
        config,
        good_config,
        generations,
        run,
        write_playbook,
        fail_on_symptom,
        json,
        anonymize,
    )
    raise typer.Exit(command(order, terminal_for(json)))


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
        terminal_for(json).json({"schema": show.SCHEMA, "faults": data} if fault is None else data[0])
    elif fault is None:
        show.show_faults(cards, terminal_for())
    else:
        show.show_fault(cards[0], terminal_for())


@app.command()
def record(
    out: Annotated[Path, typer.Option("--out", metavar="FILE.jsonl", help="Log to write.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND]", help="With --engine verl: your own verl command."),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="A folder, or embedded:NAME; by default the command's model.")
    ] = "",
    fault: Annotated[str, typer.Option("--fault", metavar="ID", help="Fault to inject.")] = "",
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="ID", help="A further fault at the same time; repeatable."),
    ] = None,
    strength: Annotated[float, typer.Option("--strength", min=1e-6, help="Multiple of the default.")] = 1.0,
    from_step: Annotated[int, typer.Option("--from-step", min=1, help="First faulty step.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the run.")] = 1,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.")] = None,
    answers: Annotated[
        Path | None, typer.Option("--answers", metavar="FILE", help="Where the fault is written down.")
    ] = None,
    settings: Settings = None,
    engine: Annotated[str, typer.Option("--engine", help="local or verl.")] = "local",
    engine_file: Annotated[
        Path | None,
        typer.Option("--engine-file", metavar="FILE", help="A playbook's engine section for verl, in YAML."),
    ] = None,
    address: Annotated[
        str, typer.Option("--address", metavar="URL", help="Ray cluster to submit the command to as a job.")
    ] = "",
    platform: Annotated[
        str, typer.Option("--platform", help="cpu, cuda or npu; by default what this machine has.")
    ] = "",
    json: Json = False,
) -> None:
    """Run the original, with a fault or without, to make a log (and a manifest beside it)."""
    from diagnose import lab
    from diagnose.session import fault_spec
    from proxy.specs import Recipe
    from taxonomy.registry import library

    terminal = terminal_for(json)
    recipe = lab.changed(Recipe(), [*(settings or ()), *([f"steps={steps}"] if steps else ())])
    ready = lab.engine_named(engine, [name for name in (fault, *(also or ())) if name])
    if command or engine_file:
        from diagnose.own_verl import engine_of, for_recording

        if engine != "verl" or settings:
            raise DiagnoseError("a command of your own is for --engine verl, and has settings of its own")
        planned = [fault_spec(library()[fault], strength, from_step)] if fault else []
        section = engine_of(command or (), engine_file, address, platform, "" if engine_file else "keep")
        own, checkpoint = for_recording(section, checkpoint, steps, planned)
        ready, recipe = own.spec, own.recipe
        for sentence in (*own.warnings, *(f"scaled: {line}" for line in own.scaling)):
            terminal.warn(sentence)
    elif not checkpoint:
        raise DiagnoseError("no checkpoint named", "add: --checkpoint embedded:qwen3_moe, or a folder")
    order = lab.Recording(
        checkpoint,
        recipe,
        seed,
        out,
        fault,
        strength,
        from_step,
        answers,
        tuple(settings or ()),
        ready,
        tuple(also or ()),
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
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Run healthy seeds and store how much a healthy run varies."""
    from diagnose import lab
    from proxy.specs import BuildSpec, Recipe

    terminal = terminal_for(json)
    recipe = lab.changed(Recipe(), [*(settings or ()), *([f"steps={steps}"] if steps else ())])
    cut = BuildSpec(checkpoint, "", experts, strategy) if experts else None
    manifest = lab.calibrate(checkpoint, cut, recipe, seeds, out, original, workers, terminal)
    if json:
        terminal.json(manifest)
    else:
        terminal.say(f"wrote {out}")


@app.command()
def selftest(
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test: a few short runs.")] = False,
    runs: Annotated[
        Path | None, typer.Option("--runs", metavar="DIR", help="Where runs are kept and found again.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print how many runs it takes; run nothing.")] = False,
    limit: Annotated[
        float, typer.Option("--limit", min=0, metavar="SECONDS", help="Start no further run after that.")
    ] = 0.0,
    markdown: Markdown = None,
    workers: Workers = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Hide every fault in turn in the embedded original, diagnose it, and print how often that was right.

    The whole test takes hours of processor time; it goes on where it was stopped.
    """
    from diagnose.selftest.command import Order, command, default_bank

    order = Order(runs or default_bank(), quick, workers, limit, plan, markdown)
    raise typer.Exit(command(order, terminal_for(json, quiet, verbose)))


@app.command()
def doctor(json: Json = False) -> None:
    """Say what works on this machine, and the mend for what doesn't."""
    from diagnose import show
    from diagnose.doctor import examine

    checks = examine()
    if json:
        terminal_for(json).json(show.doctor_data(checks))
    else:
        show.show_doctor(checks, terminal_for())


@app.command()
def schema() -> None:
    """Print the JSON Schema of the playbook."""
    from diagnose import playbook

    terminal_for().json(playbook.schema())


if __name__ == "__main__":
    main()
