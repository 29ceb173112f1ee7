"""Commands that work on checkpoints without an incident: record, calibrate, inspect, compare."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from diagnose.console import Terminal
from diagnose.errors import DiagnoseError, RunError
from diagnose.jobs import model_hash, read_outcome, run_all, run_job
from diagnose.playbook_issues import recipe_issue
from diagnose.scoring import MANIFEST
from diagnose.session import fault_spec, recipe_hash
from diagnose.store import read_json, write_json
from proxy.specs import BuildSpec, EngineSpec, Recipe, RunSpec
from taxonomy.metrics import METRIC_BY_NAME

if TYPE_CHECKING:
    pass

FIRST_CALIBRATION_SEED = 1001
"""Calibration seeds start here, far from the seeds of replays: a margin is not read off the run it judges."""


def changed(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Return a recipe with ``name=value`` settings applied.

    Raises:
        DiagnoseError: A name is no field of the recipe, a value has another type, or one that no recipe may have.
    """
    kinds = {item.name: type(getattr(recipe, item.name)) for item in fields(recipe)}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in kinds:
            raise DiagnoseError(f"the recipe has no setting {name!r}", f"there are: {', '.join(kinds)}")
        try:
            value: Any = {"true": True, "false": False}[text] if kinds[name] is bool else kinds[name](text)
        except (ValueError, KeyError):
            raise DiagnoseError(f"{name} takes a {kinds[name].__name__}, not {text!r}") from None
        recipe = replace(recipe, **{name: value})
    if wrong := recipe_issue(recipe):
        raise DiagnoseError(wrong)
    return recipe


def engine_named(name: str, faults: Sequence[str] = ()) -> EngineSpec:
    """Return an engine by name, ready to run faults of these ids at once.

    Raises:
        DiagnoseError: There is none, or it cannot express a fault, or not so many at once.
        NoVerl: There is no environment with verl.
    """
    from proxy.engines.base import CAPABILITIES, refusal
    from proxy.engines.verl_env import find_python
    from taxonomy.registry import library

    if name not in CAPABILITIES:
        raise DiagnoseError(f"there is no engine {name!r}: there are: {', '.join(CAPABILITIES)}")
    for fault in faults:
        if why := refusal(name, library()[fault]):
            raise DiagnoseError(why)
    if name != "local" and len(faults) > 1:
        raise DiagnoseError(f"the {name} engine injects one fault at a time", "use --engine local")
    return EngineSpec(name, python=str(find_python())) if name == "verl" else EngineSpec()


@dataclass(frozen=True)
class Recording:
    """What `diagnose record` was asked for.

    Attributes:
        checkpoint: A folder, or ``embedded:NAME``.
        recipe: The recipe.
        seed: Seed of the run.
        out: Log to write.
        fault: Fault id, "" for a healthy run.
        strength: Multiple of the card's default.
        from_step: First step at which the fault is active.
        answers: File that remembers the fault; required with one.
        settings: The ``--set`` options as given, for the manifest.
        engine: What runs it.
        also: Further faults, at the same strength and from the same step.
    """

    checkpoint: str
    recipe: Recipe
    seed: int
    out: Path
    fault: str = ""
    strength: float = 1.0
    from_step: int = 1
    answers: Path | None = None
    settings: tuple[str, ...] = ()
    engine: EngineSpec = field(default_factory=EngineSpec)
    also: tuple[str, ...] = ()


def record(order: Recording, terminal: Terminal) -> dict[str, Any]:
    """Run the original, with a fault or without, and keep its log, a manifest and, apart, the answer.

    The manifest says how to make such a log and nothing of the fault: it lies beside an incident that
    somebody is to diagnose. Metrics that only repeat a setting are left out of the log for the same reason.
    Returns the manifest.

    Raises:
        DiagnoseError: There is a fault and no file for the answer, a further fault without a first one or one that
            is named twice, or the log is there already.
        RunError: The run failed.
    """
    from taxonomy.registry import library

    if order.fault and order.answers is None:
        raise DiagnoseError("a log with a fault needs a place for its answer", "add: --answers FILE.json")
    if order.also and len({order.fault, *order.also} - {""}) <= len(order.also):
        raise DiagnoseError("--also adds other faults to that of --fault, each of them once")
    if order.out.exists():
        raise DiagnoseError(
            f"{order.out} is there already", "name another file with --out, or remove it first"
        )
    named = [order.fault, *order.also] if order.fault else []
    faults = [fault_spec(library()[name], order.strength, order.from_step) for name in named]
    fault, also = (faults[0], tuple(faults[1:])) if faults else (None, ())
    spec = RunSpec(order.checkpoint, order.recipe, order.seed, fault, order.engine, also)
    manifest = {
        "schema": 1,
        "log": order.out.name,
        "command": _record_command(order),
        "engine": order.engine.name,
        "checkpoint": order.checkpoint,
        "model_hash": model_hash(order.checkpoint, terminal),
        "seed": order.seed,
        "recipe": asdict(order.recipe),
        "versions": versions(),
    }
    launch = order.engine.launch
    # A cluster's nodes share the folder of the log, hardly this machine's temporary one.
    shared = str(order.out.absolute().parent) if launch and launch.address else None
    order.out.parent.mkdir(parents=True, exist_ok=True)
    home = Path(mkdtemp(prefix="diagnose-record-", dir=shared))
    kept = False
    terminal.say(f"recording {order.recipe.steps} steps with the {order.engine.name} engine")
    try:
        run_all({"record": spec}, home, 1, terminal)
        order.out.write_text(without_settings((home / "record" / "metrics.jsonl").read_text()))
        outcome = read_outcome(home / "record")
        assert outcome is not None
    except RunError:
        kept = (home / "record" / "verl").exists()  # the message names verl's log
        raise
    finally:
        if not kept:
            shutil.rmtree(home, ignore_errors=True)
    manifest["sha256"] = hashlib.sha256(order.out.read_bytes()).hexdigest()
    write_json(order.out.with_suffix(".manifest.json"), manifest)
    if fault is not None and order.answers is not None:
        answers = read_json(order.answers) or {}
        answers[order.out.name] = {
            "fault": order.fault,
            "strength": order.strength,
            "from_step": order.from_step,
            "params": fault.params,
            "witness": outcome.witness,
        }
        if also:
            answers[order.out.name]["also"] = {item.id: item.params for item in also}
        write_json(order.answers, answers)
    return manifest


def without_settings(log: str) -> str:
    """Return a log in verl's file-logger format without the metrics that only repeat a setting.

    A logged learning rate or KL coefficient gives a configuration fault away without any diagnosis.
    """
    lines = []
    for line in log.splitlines():
        record = json.loads(line)
        record["data"] = {
            name: value
            for name, value in record["data"].items()
            if name not in METRIC_BY_NAME or METRIC_BY_NAME[name].kind != "config"
        }
        lines.append(json.dumps(record) + "\n")
    return "".join(lines)


def _record_command(order: Recording) -> str:
    """Return the command that makes a healthy log of this kind: the fault's options are left out."""
    words = ["diagnose", "record", "--checkpoint", order.checkpoint, "--seed", str(order.seed)]
    words += ["--steps", str(order.recipe.steps)]
    words += [word for setting in order.settings for word in ("--set", setting)]
    if order.engine.name != "local":
        words += ["--engine", order.engine.name]
    words += ["--out", order.out.name]
    if launch := order.engine.launch:
        words += ["--platform", launch.platform, *(["--address", launch.address] if launch.address else [])]
        words += ["--", launch.entry, *launch.flags, *launch.overrides]
    return shlex.join(words)


def versions() -> dict[str, str]:
    """Return the versions that a log depends on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("rl-diagnose", "torch", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def calibrate(
    checkpoint: str,
    cut: BuildSpec | None,
    recipe: Recipe,
    seeds: int,
    out: Path,
    with_original: bool,
    workers: int | None,
    terminal: Terminal,
) -> dict[str, Any]:
    """Run healthy seeds of a proxy (and of its original), store what healthy is like, return the manifest.

    Args:
        checkpoint: The original.
        cut: How the proxy is cut from it; None: the checkpoint itself is what replays run on.
        recipe: The recipe that replays will use.
        seeds: Healthy seeds; 20 are the fewest with an honest 5 % margin.
        out: File to write (``.npz``); the runs lie beside it until it is complete, so that an interrupted
            calibration goes on.
        with_original: Whether to run the original's seeds too.
        workers: Worker processes, None for the number of cores.
        terminal: Narration.

    Raises:
        RunError: A build or a run failed.
    """
    from diagnose.score.calibration import Calibration, SeedSet

    if out.suffix != ".npz":
        raise DiagnoseError(f"{out}: a calibration is an .npz file")
    home = out.with_suffix(".work")
    home.mkdir(parents=True, exist_ok=True)
    model, proxy_hash = checkpoint, ""
    if cut is not None:
        model = str((home / "proxy").absolute())
        manifest = read_json(home / "proxy" / "proxy_manifest.json")
        if manifest is None:
            manifest = run_job("build", asdict(replace(cut, out=model)), terminal)["manifest"]
        proxy_hash = manifest["proxy_hash"]
    original_hash = model_hash(checkpoint, terminal) if cut is None or with_original else ""
    specs = {f"proxy-s{seed}": RunSpec(model, recipe, seed) for seed in _calibration_seeds(seeds)}
    if cut is not None and with_original:
        specs |= {
            f"original-s{seed}": RunSpec(checkpoint, recipe, seed) for seed in _calibration_seeds(seeds)
        }
    curves = run_all(specs, home, workers, terminal)

    def seed_set(kind: str) -> SeedSet:
        return SeedSet.from_curves([run for name, run in curves.items() if name.startswith(f"{kind}-")])

    calibration = Calibration(
        proxy=seed_set("proxy"),
        proxy_hash=proxy_hash or original_hash,
        recipe_hash=recipe_hash(recipe),
        original=seed_set("original") if cut is not None and with_original else None,
        original_hash=original_hash if cut is not None and with_original else "",
    )
    calibration.save(out)
    manifest = {
        "schema": 1,
        "checkpoint": checkpoint,
        "cut": None if cut is None else {**asdict(cut), "out": "", "checkpoint": checkpoint},
        "seeds": list(_calibration_seeds(seeds)),
        "recipe": asdict(recipe),
        "proxy_hash": calibration.proxy_hash,
        "original_hash": calibration.original_hash,
        "recipe_hash": calibration.recipe_hash,
        "versions": versions(),
    }
    write_json(out.with_suffix(".manifest.json"), manifest)
    shutil.rmtree(home)
    return manifest


def _calibration_seeds(count: int) -> range:
    return range(FIRST_CALIBRATION_SEED, FIRST_CALIBRATION_SEED + count)


def inspect(checkpoint: str, experts: int | None) -> dict[str, Any]:
    """Return what a checkpoint is, from its headers alone, and what a build with `experts` would make of it.

    Raises:
        ValueError: The checkpoint is not readable, not understood, or the budget does not fit it.
    """
    from diagnose.proxy_files import damage
    from proxy.checkpoint import open_checkpoint, read_object
    from proxy.embedded import resolve
    from proxy.errors import CheckpointError
    from proxy.families import understand
    from proxy.plan import plan_layout

    folder = resolve(checkpoint)
    opened = open_checkpoint(folder)
    manifest, problem = None, ""
    if (folder / MANIFEST).exists():
        try:
            manifest = read_object(folder / MANIFEST)
            if wrong := damage(folder, manifest):
                problem = f"this is not the proxy that was built: {wrong}"
        except CheckpointError as error:  # the checkpoint is what was asked for
            problem = str(error)
    layout = understand(opened)
    data: dict[str, Any] = {
        "schema": 1,
        "checkpoint": checkpoint,
        "family": layout.family.model_type,
        "moe_layers": list(layout.moe_layers),
        "experts": layout.experts,
        "top_k": layout.top_k,
        "groups": layout.groups,
        "parameters": opened.parameters,
        "tensors": len(opened.tensors),
        "manifest": manifest,
        "manifest_error": problem,
    }
    if experts is not None:
        data["plan"] = asdict(plan_layout(opened, layout, experts))
    return data


def compare(spec: Mapping[str, Any], terminal: Terminal) -> list[Mapping[str, Any]]:
    """Return accuracy by strategy and budget as paired differences (the paper's Tables 3 and 4)."""
    rows: list[Mapping[str, Any]] = run_job("compare", spec, terminal)["rows"]
    return rows
