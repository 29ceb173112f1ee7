"""The user's own verl behind a playbook or a command line: read and scaled before anything is built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnose import located
from diagnose.errors import DiagnoseError
from diagnose.jobs import cores
from proxy.embedded import PREFIX, resolve
from proxy.engines import platforms, verl_config, verl_job
from proxy.engines.verl_env import find_python
from proxy.families import get_key
from proxy.plan import make_plan
from proxy.specs import EngineSpec, FaultSpec, Recipe, RunSpec

if TYPE_CHECKING:
    from diagnose.playbook_model import Engine
    from diagnose.session import PlannedFault, PlannedRun


@dataclass(frozen=True)
class OwnVerl:
    """A verl of the user's, ready for runs.

    Attributes:
        spec: The engine as workers take it.
        recipe: What the user's configuration amounts to; runs train by it.
        scaling: What was changed for the proxy, a line each.
        warnings: Sentences about what may go wrong.
    """

    spec: EngineSpec
    recipe: Recipe
    scaling: tuple[str, ...]
    warnings: tuple[str, ...]


def engine_of(
    command: Sequence[str] = (),
    file: Path | None = None,
    address: str = "",
    platform: str = "",
    scale: str = "",
) -> Engine:
    """Return the engine section that a command line amounts to.

    Args:
        command: The user's own command, empty for none.
        file: YAML file with an engine section, as a playbook has it; what is said beside it goes first.
        address: Ray cluster.
        platform: "cpu", "cuda" or "npu".
        scale: "keep" or "propose".

    Raises:
        DiagnoseError: The file is not there, or something in it is wrong.
    """
    from pydantic import ValidationError

    from diagnose.playbook_model import Engine

    section: dict[str, Any] = {}
    if file is not None:
        try:
            document = located.parse(file.read_bytes())
        except OSError as error:
            raise DiagnoseError(f"{file}: {error.strerror or error}") from error
        if document.issues or not isinstance(document.data, dict):
            what = document.issues[0].message if document.issues else "no mapping"
            raise DiagnoseError(f"{file}: {what}", "it holds what a playbook has under engine:")
        inner = document.data.get("engine")
        section = dict(inner if isinstance(inner, dict) else document.data)
    said = {"command": tuple(command), "address": address, "platform": platform, "scale": scale}
    section |= {name: value for name, value in said.items() if value}
    try:
        base = file.parent if file else Path.cwd()
        return Engine.model_validate({**section, "name": "verl"}, context={"base": base.absolute()})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in ("engine", *first["loc"]))
        raise DiagnoseError(f"{file or 'the command line'}: {place}: {first['msg']}") from error


def own_verl(
    engine: Engine, spec: EngineSpec, folder: Path, checkpoint: Path, experts: int | None, steps: int
) -> OwnVerl:
    """Make the user's verl ready for runs.

    Args:
        engine: The engine section, with a command or a configuration.
        spec: The engine as far as the section alone determines it.
        folder: Folder that the command starts in where the section names none.
        checkpoint: The resolved checkpoint.
        experts: Experts that a proxy keeps, None where the checkpoint is used as it is.
        steps: Training steps.

    Raises:
        NotVerl: The command is none of verl's PPO trainer.
        BadConfig: Hydra refuses the configuration, or its layout does not fit.
        NoVerl: There is no environment with verl.
        ProxyError: The checkpoint is not readable.
    """
    share = 1.0
    if experts is not None:
        plan = make_plan(checkpoint, experts)
        share = plan.parameters_after / plan.parameters_before
    wish = engine.wish()
    prepared = verl_config.prepare(
        replace(wish, directory=wish.directory or str(folder.absolute())),
        find_python(spec.python),
        json.loads((checkpoint / "config.json").read_text(encoding="utf-8")),
        experts or 0,
        share,
        steps,
    )
    trainer = spec.trainer if "trainer" in engine.model_fields_set else prepared.trainer
    return OwnVerl(
        replace(spec, trainer=trainer, launch=prepared.launch),
        prepared.recipe,
        prepared.changes,
        prepared.warnings,
    )


def for_recording(
    engine: Engine, checkpoint: str, steps: int | None, faults: Sequence[FaultSpec]
) -> tuple[OwnVerl, str]:
    """Return a verl of the user's, ready to record the original with faults or without, and its checkpoint.

    Args:
        engine: The engine section, with a command or a configuration.
        checkpoint: The original, "" for the one that the command trains.
        steps: Training steps, None for the default.
        faults: What is to be injected.

    Raises:
        DiagnoseError: verl cannot carry this out with the command.
        ValueError: As `own_verl`, and where the checkpoint is not there.
    """
    wish = engine.wish()
    if not checkpoint:
        python = find_python(engine.python)
        config = verl_config.composed(python, wish.parsed(), wish.directory)[1]
        checkpoint = str(get_key(config, verl_config.MODEL_PATH) or "")
    folder = resolve(checkpoint)
    spec = replace(engine.engine_spec(), python=str(find_python(engine.python)))
    own = own_verl(engine, spec, Path.cwd(), folder, None, steps or Recipe().steps)
    for fault in faults:
        try:
            verl_job.checked(RunSpec("", own.recipe, 1, fault, own.spec))
        except verl_job.CannotExpress as error:
            raise DiagnoseError(str(error)) from error
    return own, checkpoint if checkpoint.startswith(PREFIX) else str(folder.absolute())


def refused(spec: EngineSpec, recipe: Recipe, candidates: Sequence[PlannedFault]) -> dict[str, str]:
    """Return which candidates verl cannot carry out with this command: fault → reason."""
    found = {}
    for candidate in candidates:
        try:
            verl_job.checked(RunSpec("", recipe, 1, candidate.spec, spec))
        except verl_job.CannotExpress as error:
            found[candidate.fault] = str(error)
    return found


def side_by_side(spec: EngineSpec, at_most: int, workers: int | None) -> int:
    """Return how many runs go on at a time.

    Args:
        spec: The engine.
        at_most: Accelerators that runs may take in all, 0 for no such limit.
        workers: What the user says, None for nothing.
    """
    launch = spec.launch
    if launch is None or not launch.accelerators:
        return workers or cores()
    # A cluster's free accelerators are not ours to count: without a limit one run at a time.
    there = at_most or (launch.accelerators if launch.address else len(platforms.devices(launch.platform)))
    fit = max(1, there // launch.accelerators)
    return min(workers, fit) if workers else fit


def command_lines(runs: Sequence[PlannedRun], home: Path, checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Return the exact command line of each verl run, by the run's id; nothing is written or started.

    Args:
        runs: The runs.
        home: Folder of the runs' folders.
        checkpoint: Folder of the model that they train.
    """
    return {
        run.id: verl_job.command_line(
            str(find_python(run.spec.engine.python)), home / run.id / "verl", run.spec, checkpoint
        )
        for run in runs
    }
