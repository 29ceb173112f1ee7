"""The user's verl command, made ready for replays of a proxy: composed, scaled, turned into a `Launch` (torch-free).

`prepare` is the one entry: it has verl's environment compose the configuration (a second, nothing is started), so that
whatever Hydra refuses is told before a proxy is built.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxy.engines import platforms, verl_command, verl_compose, verl_plan
from proxy.engines.verl_command import Command
from proxy.engines.verl_env import TESTED
from proxy.engines.verl_plan import ACTOR, ROLLOUT, Layout, Model
from proxy.families import get_key
from proxy.specs import Launch, Recipe

PATIENCE_S = 120.0
MODEL_PATH = "actor_rollout_ref.model.path"
KEEP, PROPOSE = "keep", "propose"


class BadConfig(ValueError):
    """The user's verl configuration cannot be used for a replay; `mend` says what to do."""

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(" ".join(message.split()))
        self.mend = mend


@dataclass(frozen=True)
class Wish:
    """What the user says about a verl of his own.

    Attributes:
        command: The command's words, empty for a configuration file alone.
        config: Configuration file (a Hydra dump will do), "" for verl's own.
        overrides: Hydra overrides that come last.
        platform: "cpu", "cuda", "npu" or "" for whatever this machine has.
        address: Ray cluster, "" for this machine.
        runtime_env: Ray's runtime environment of a job.
        directory: Folder that the command starts in.
        scale: "keep" the layout or "propose" one.
        accelerators: World size, 0 for what is proposed.
        prompts: Prompts a step, 0 for what is proposed.
    """

    command: tuple[str, ...] = ()
    config: str = ""
    overrides: tuple[str, ...] = ()
    platform: str = ""
    address: str = ""
    runtime_env: Mapping[str, Any] | None = None
    directory: str = ""
    scale: str = PROPOSE
    accelerators: int = 0
    prompts: int = 0

    def parsed(self) -> Command:
        """Return the command taken apart, with the configuration file in it.

        Raises:
            NotVerl: It is none of verl's PPO trainer.
        """
        command = (
            verl_command.parse(self.command)
            if self.command
            else Command("python3", ("-m", verl_command.MODULE), ())
        )
        if self.config:
            file = Path(self.config).absolute()
            if command.config():
                raise verl_command.NotVerl(
                    "the command chooses a configuration, and there is another besides"
                )
            if not file.is_file():
                raise BadConfig(f"{file} is not there", "name a YAML file: verl's own, or the dump of a run")
            flags = (f"--config-path={file.parent}", f"--config-name={file.stem}")
            command = replace(command, flags=(*command.flags, *flags))
        return replace(command, overrides=verl_command.joined(command.overrides, self.overrides))


@dataclass(frozen=True)
class Prepared:
    """A verl command that is ready for replays.

    Attributes:
        launch: What runs take.
        recipe: What the configuration amounts to, under the words of our recipes.
        trainer: "v0" or "v1".
        before: The layout that the command asks for.
        after: The layout of a replay.
        changes: What was scaled, a line each.
        warnings: Sentences about what may go wrong.
    """

    launch: Launch
    recipe: Recipe
    trainer: str
    before: Layout
    after: Layout
    changes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def composed(python: Path, command: Command, directory: str = "") -> tuple[str, dict[str, Any]]:
    """Return (verl's version, configuration) of a command, by Hydra in verl's environment.

    Raises:
        BadConfig: Hydra refuses; the message is its own.
    """
    asked = {"options": command.config(), "overrides": list(command.overrides)}
    done = subprocess.run(
        [str(python), verl_compose.__file__],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=directory or None,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BadConfig(
            f"{python} cannot compose a Hydra configuration: {words}", "is it verl's interpreter?"
        )
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise BadConfig(
            f"Hydra refuses the verl command: {answer['error']}",
            "correct the override; a setting that verl's own configuration lacks needs a + in front",
        )
    return str(answer["verl"]), answer["config"]


def recipe_of(config: Mapping[str, Any], steps: int) -> Recipe:
    """Return what a configuration amounts to in the words of our recipes.

    `old_log_prob` is always the trainer's: verl itself sees to its ``bypass_mode``, the plugin leaves it alone.
    """
    layout = verl_plan.layout_of(config)

    def number(path: str, default: float) -> float:
        value = get_key(config, path)
        return float(value) if isinstance(value, int | float) else default

    test_freq = int(number("trainer.test_freq", -1))
    uses_kl = bool(get_key(config, f"{ACTOR}.use_kl_loss"))
    return Recipe(
        steps=steps,
        prompts=layout.prompts,
        group_size=layout.group,
        mini_batches=layout.updates,
        epochs=int(number(f"{ACTOR}.ppo_epochs", 1)),
        lr=number(f"{ACTOR}.optim.lr", 1e-6),
        kl_coef=number(f"{ACTOR}.kl_loss_coef", 0.001) if uses_kl else 0.0,
        clip_ratio=number(f"{ACTOR}.clip_ratio", 0.2),
        max_grad_norm=number(f"{ACTOR}.optim.clip_grad", 1.0),
        temperature=number(f"{ROLLOUT}.temperature", 1.0),
        max_new_tokens=int(number("data.max_response_length", 512)),
        old_log_prob="trainer",
        eval_every=max(0, test_freq),
    )


def prepare(
    wish: Wish,
    python: Path,
    model: Mapping[str, Any],
    experts: int,
    share: float,
    steps: int,
) -> Prepared:
    """Make the user's verl ready for replays of a proxy.

    Args:
        wish: What the user says.
        python: Interpreter of verl's environment on this machine.
        model: Hugging Face configuration of the checkpoint.
        experts: Experts that the proxy keeps, 0 for all.
        share: The proxy's parameters over the original's.
        steps: Training steps of a replay.

    Raises:
        NotVerl: The command is none of verl's PPO trainer.
        BadConfig: Hydra refuses it, or the layout that is to be kept breaks a rule of verl's.
    """
    command = wish.parsed()
    address = wish.address or command.address
    warnings: list[str] = []
    if address and "://" not in address:
        address = f"http://{address}"
    if address and not address.startswith(("http://", "https://")):
        raise BadConfig(f"{address} is no address for Ray jobs", "name the dashboard: http://HEAD:8265")
    if address and not wish.platform:
        raise BadConfig(
            "the accelerators of a cluster can't be asked before a job runs there",
            "say engine.platform: cuda, npu or cpu",
        )
    platform = wish.platform or platforms.detect()
    version, config = composed(python, command, wish.directory)
    if version != TESTED:
        warnings.append(
            f"verl {version} in {python.parent.parent}: the plugin's hooks were written for {TESTED}; "
            "a hook that finds no place ends a run as injection failed"
        )
    before = verl_plan.layout_of(config)
    if platform == "cpu" and not before.strategy.startswith("fsdp"):
        raise BadConfig(
            f"a CPU runs verl's FSDP engine alone, this command asks for {before.strategy}",
            "run it on its accelerators (engine.platform, engine.address), or drop model_engine",
        )
    after = _layout(wish, before, Model.of(model, experts), share, platform, warnings)
    overrides = verl_command.joined(command.overrides, verl_plan.changes(before, after))
    directory = wish.directory or str(Path.cwd())
    launch = Launch(
        flags=command.flags,
        overrides=overrides,
        environment=command.environment,
        platform=platform,
        accelerators=0 if platform == "cpu" else after.world,
        directory=directory,
        address=address,
        entry=command.interpreter,
        runtime_env=json.dumps(dict(wish.runtime_env or {}), sort_keys=True),
        trained=str(get_key(config, MODEL_PATH) or ""),
        strategy=before.strategy,
        rollout=str(get_key(config, f"{ROLLOUT}.name") or ""),
    )
    recipe = replace(
        recipe_of(config, steps),
        prompts=after.prompts,
        group_size=after.group,
        mini_batches=after.updates,
    )
    return Prepared(
        launch,
        recipe,
        "v1" if get_key(config, "trainer.use_v1") in (True, None) else "v0",
        before,
        after,
        tuple(verl_plan.told(before, after)),
        tuple(warnings),
    )


def _layout(
    wish: Wish, before: Layout, model: Model, share: float, platform: str, warnings: list[str]
) -> Layout:
    """Return the layout of replays by the user's rule, or as it is proposed."""
    if wish.scale == KEEP and platform != "cpu":
        if broken := verl_plan.check(before, model):
            raise BadConfig(
                f"the command's own layout does not fit the proxy: {'; '.join(broken)}",
                "engine.scale: propose",
            )
        return before
    world = wish.accelerators or verl_plan.proposed_world(before, share)
    here = len(platforms.devices(platform)) if not wish.address else 0
    if platform == "cpu":
        world = 1
        if wish.scale == KEEP:
            wish = replace(wish, prompts=before.prompts)
    elif here and world > here:
        warnings.append(f"{world} accelerators would be the proxy's share, this machine has {here}")
        world = here
    return verl_plan.scaled(before, model, world, wish.prompts)
