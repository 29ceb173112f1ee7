"""What a playbook may say: the models behind it, and the checks on single values and between them.

Validation takes a context: `base` (folder that relative paths start from) and `library` (cards in force).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from diagnose import located
from diagnose.located import unknown
from diagnose.result import Verdict
from proxy import embedded
from proxy.engines import verl_command
from proxy.engines.verl_config import Wish
from proxy.errors import ProxyError
from proxy.specs import BuildSpec, EngineSpec, Recipe
from taxonomy.registry import Library, library
from taxonomy.symptoms import SYMPTOM_BY_ID

AUTO = "auto"
FIT = math.inf
"""The strength of a candidate that is to be fitted; a playbook says ``fit``."""
ENGINES = ("local", "verl")

Scalar = str | int | float | bool | None
Alpha = tuple[float, float, float]


def one_of(value: str, allowed: tuple[str, ...], what: str) -> str:
    """Return `value` if it is allowed; raises ValueError with the near misses and all that is."""
    if value not in allowed:
        raise ValueError(unknown(what, value, allowed))
    return value


def _engine(name: str) -> str:
    """Engines of installed packages count too; their names are known without importing them."""
    others = tuple(point.name for point in entry_points(group="rl_diagnose.engines"))
    return one_of(name, (*ENGINES, *others), "engine")


def _symptom(symptom: str) -> str:
    return one_of(symptom, (AUTO, *SYMPTOM_BY_ID), "symptom")


def _fault(fault: str, info: ValidationInfo) -> str:
    """The cards in force are those that `load` was given."""
    cards: Library = (info.context or {}).get("library") or library()
    return one_of(fault, tuple(cards.cards), "fault")


def _strategy(name: str) -> str:
    if name != BuildSpec.strategy:
        from proxy.strategies import strategy

        try:
            strategy(name)
        except ProxyError as error:
            raise ValueError(f"{error}: {error.mend}" if error.mend else str(error)) from error
    return name


def _alpha(value: Any) -> Alpha | Literal["auto"]:
    """Three weights of the views, which the builder scales to the sum 1, or auto: it looks for the best."""
    if value == "auto":
        return "auto"
    weights = value if isinstance(value, tuple | list) else ()
    numbers = [w for w in weights if isinstance(w, int | float) and not isinstance(w, bool)]
    if len(weights) != 3 or len(numbers) != 3 or not all(0 <= w <= 1e9 for w in numbers) or not sum(numbers):
        raise ValueError("must be auto, or three weights ≥ 0, not all 0: router, co-activation, context")
    router, coactivation, context = map(float, numbers)
    return router, coactivation, context


def _base(info: ValidationInfo) -> Path:
    """Return the folder that relative paths start from: the playbook's."""
    return Path((info.context or {}).get("base", "."))


def _path(text: Any, info: ValidationInfo) -> Any:
    """Resolve a path; what is no text is left to the type check."""
    if not isinstance(text, str):
        return text
    if text in ("", "-"):
        raise ValueError("must be a path")
    try:
        return str(_base(info) / Path(text).expanduser())
    except RuntimeError as error:  # ~name of nobody
        raise ValueError(str(error)) from error


def _checkpoint(text: str, info: ValidationInfo) -> str:
    """``embedded:NAME`` stays as it is (`proxy.embedded.resolve`), anything else is a folder."""
    if text.startswith(embedded.PREFIX):
        one_of(text, tuple(embedded.PREFIX + name for name in embedded.NAMES), "embedded checkpoint")
        return text
    return str(_path(text, info))


def _prompts(text: str, info: ValidationInfo) -> str:
    return text if text == "embedded" else str(_path(text, info))


def _python(text: str, info: ValidationInfo) -> str:
    """A bare name is looked for on the PATH, anything else is a path."""
    return str(_path(text, info)) if "/" in text else text


def _some_path(text: str, info: ValidationInfo) -> str:
    """A path, or nothing."""
    return str(_path(text, info)) if text else text


def _command(value: Any) -> Any:
    """Split a text as a shell does."""
    if isinstance(value, str):
        return verl_command.split(value)
    return tuple(value) if isinstance(value, list) else value


def _listed(value: Any) -> Any:
    """One file or a list of them (a tuple from YAML, a list from JSON)."""
    if not isinstance(value, str | tuple | list):
        raise ValueError("must be a path or a list of paths")
    return (value,) if isinstance(value, str) else tuple(value)


def _some(value: Any) -> Any:
    """Refuse an empty list here: pydantic's own check also counts out the items that are wrong."""
    if isinstance(value, tuple | list) and not value:
        raise ValueError("must not be empty")
    return value


def _context(value: Any, info: ValidationInfo) -> Any:
    """Flatten a context; a text is the path of a Hydra dump."""
    if isinstance(value, str):
        path = Path(_path(value, info))
        try:
            with path.open("rb") as file:
                dump = located.parse(file.read(located.MAX_BYTES + 1))
        except OSError as error:
            raise ValueError(f"{value}: {error.strerror or error}") from error
        if dump.issues or not isinstance(dump.data, dict):
            what = dump.issues[0].message if dump.issues else "no mapping"
            raise ValueError(f"{value}: {what}")
        value = dump.data
    if not isinstance(value, dict):
        return value
    facts = located.flatten(value)
    for key, fact in facts.items():
        if isinstance(fact, float) and not math.isfinite(fact):
            raise ValueError(f"{key} must be a finite number, not {fact}")
    return facts


def _strength(value: Any, number: ValidatorFunctionWrapHandler) -> float:
    """A number, or "fit"."""
    return FIT if value == "fit" else float(number(value))


def _candidates(value: Any) -> Any:
    """None stands for "auto": every card that has the symptom."""
    if value == "auto":
        return None
    if isinstance(value, str):
        raise ValueError('must be "auto" or a list of {fault, strength, from_step, until_step, probability}')
    return _some(tuple(value) if isinstance(value, list) else value)


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
FilesInput = str | Annotated[list[str], Field(min_length=1)]
Files = Annotated[
    tuple[Annotated[Path, BeforeValidator(_path), Strict(False)], ...],
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]
MAX_COUNT = 10**9
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
FaultId = Annotated[str, AfterValidator(_fault)]


class Part(BaseModel):
    """Base of the models: nothing unknown, nothing converted, nothing changed later."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Original(Part):
    """The incident's logs, and what is known about the run."""

    faulty: Annotated[Files, BeforeValidator(_some, json_schema_input_type=FilesInput)]
    """Log of the failing run; a list means several seeds."""
    healthy: Files = ()
    """Logs of healthy twins, where there are any."""
    context: Annotated[
        dict[str, Scalar], BeforeValidator(_context, json_schema_input_type=dict[str, Any] | str)
    ] = Field(default={})
    """Facts about the run (rollout.backend: vllm, device: npu, …), or the path of a Hydra dump."""


class Calibration(Part):
    """The text that expert statistics are taken from."""

    prompts: Annotated[str, AfterValidator(_prompts)] = BuildSpec.calibration
    """"embedded", or a JSONL file of token-id lists or texts."""
    tokens: Positive = BuildSpec.calibration_tokens
    """Tokens used at most."""


class Proxy(Part):
    """The cheap stand-in on which faults are replayed."""

    from_: Literal["checkpoint", "sibling", "embedded"] = Field(alias="from")
    """checkpoint: cut from the failing model; sibling: a smaller model of its family; embedded: the shipped one."""
    checkpoint: Annotated[str, AfterValidator(_checkpoint)] = f"{embedded.PREFIX}{embedded.NAMES[0]}"
    """Folder in Hugging Face layout, or embedded:NAME."""
    experts: Positive | None = None
    """Experts kept in each layer."""
    strategy: Annotated[str, AfterValidator(_strategy)] = BuildSpec.strategy
    """multi_view, some of router+coactivation+context, frequency, reap, random, first_k, merge."""
    alpha: Annotated[
        Alpha | Literal["auto"],
        BeforeValidator(_alpha, json_schema_input_type=Alpha | Literal["auto"]),
    ] = BuildSpec.alpha
    """Weights of the three views: router, co-activation, context; auto looks for the best."""
    normalisation: Literal["min_max", "max", "rank"] = "min_max"
    """How the three distances are made comparable."""
    calibration: Calibration = Calibration()

    def build_spec(self, checkpoint: Path, out: Path) -> BuildSpec:
        """Return the build that this asks for.

        Args:
            checkpoint: The resolved checkpoint folder (`proxy.embedded.resolve`).
            out: Folder to write.
        """
        assert self.experts is not None, "only a sibling is used uncut"
        return BuildSpec(
            checkpoint=str(checkpoint),
            out=str(out),
            experts=self.experts,
            strategy=self.strategy,
            alpha=BuildSpec.alpha if self.alpha == "auto" else self.alpha,
            search_alpha=self.alpha == "auto",
            normalisation=self.normalisation,
            calibration=self.calibration.prompts,
            calibration_tokens=self.calibration.tokens,
        )


class Scale(Part):
    """The size of a replay, where it is not the one that is proposed."""

    accelerators: Count = 0
    """World size; 0: as proposed, by the proxy's share of the parameters."""
    prompts: Count = 0
    """Prompts a step, rounded up to what the world size divides; 0: by the share of the world size."""


class Engine(Part):
    """What runs the proxy."""

    name: Annotated[str, AfterValidator(_engine)] = "local"
    """local, verl, or an engine of an installed package."""
    command: Annotated[
        tuple[str, ...], BeforeValidator(_command, json_schema_input_type=str | list[str])
    ] = ()
    """Your own verl command, as text or as a list of arguments. It runs only after it was shown and allowed."""
    config: Annotated[str, AfterValidator(_some_path)] = ""
    """A Hydra configuration of verl's trainer, or the dump of one; in place of a command or beside it."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides for the replays, after all others."""
    platform: Literal["", "cpu", "cuda", "npu"] = ""
    """What the replays run on; by default whatever this machine has. A cluster has to be told."""
    address: str = ""
    """Ray cluster that replays are submitted to as jobs: its dashboard, http://HOST:8265."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of the jobs; the plugin and the variables of a run are added."""
    directory: Annotated[str, AfterValidator(_some_path)] = ""
    """Folder that the command starts in; the playbook's by default."""
    scale: Literal["propose", "keep"] | Scale = "propose"
    """The size of a replay: propose a layout for what is left of the model, keep the command's, or a rule."""
    at_most: Count = 0
    """Accelerators that replays may take at a time, together; 0: this machine's, on a cluster one replay's."""
    limit_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that one replay may take, 0 for no limit."""
    python: Annotated[str, AfterValidator(_python)] = ""
    """Python interpreter that starts the engine. It runs only after it was shown and allowed."""
    trainer: Literal["v0", "v1"] = "v0"
    """verl's trainer: v0 (trainer.use_v1=False) or v1."""
    train_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of verl's training forward."""
    rollout_dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of verl's rollout."""

    def engine_spec(self) -> EngineSpec:
        """Return the engine as workers take it; what concerns verl is left out of the local one."""
        if self.name == "local":
            return EngineSpec()
        return EngineSpec(
            self.name,
            self.python,
            self.trainer,
            self.train_dtype,
            self.rollout_dtype,
            self.limit_s,
        )

    @property
    def own(self) -> bool:
        """Whether verl is started as the user does it."""
        return bool(self.command or self.config)

    def wish(self) -> Wish:
        """Return what the section says about a verl of the user's."""
        rule = self.scale if isinstance(self.scale, Scale) else Scale()
        return Wish(
            command=self.command,
            config=self.config,
            overrides=self.overrides,
            platform=self.platform,
            address=self.address,
            runtime_env=self.runtime_env,
            directory=self.directory,
            scale=self.scale if isinstance(self.scale, str) else "propose",
            accelerators=rule.accelerators,
            prompts=rule.prompts,
        )


class RecipeSettings(Part):
    """The replays' recipe: the fields of `proxy.specs.Recipe`, and how many seeds."""

    seeds: Annotated[int, Field(ge=1, le=1000)] = 2
    """Seeds of every replay."""
    steps: Annotated[int, Field(ge=1, le=1_000_000)] = Recipe.steps
    """Training steps of every replay."""
    prompts: Positive = Recipe.prompts
    """Prompts a step."""
    group_size: Positive = Recipe.group_size
    """Responses a prompt."""
    mini_batches: Positive = Recipe.mini_batches
    """Optimizer updates a step."""
    epochs: Positive = Recipe.epochs
    """Passes over the batch."""
    lr: Annotated[float, Field(gt=0)] = Recipe.lr
    """Learning rate."""
    kl_coef: Annotated[float, Field(ge=0)] = Recipe.kl_coef
    """Coefficient of the KL loss to the reference."""
    clip_ratio: Annotated[float, Field(gt=0)] = Recipe.clip_ratio
    """PPO clip."""
    max_grad_norm: Annotated[float, Field(gt=0)] = Recipe.max_grad_norm
    """Gradient clipping."""
    temperature: Annotated[float, Field(gt=0)] = Recipe.temperature
    """Sampling temperature."""
    max_new_tokens: Positive = Recipe.max_new_tokens
    """Longest response."""
    old_log_prob: Literal["rollout", "trainer"] = "rollout"
    """Whose log-probabilities the ratio is taken against."""
    exact: bool = Recipe.exact
    """Rollout with the trainer's own weights and forward, without any mismatch."""
    eval_every: Count = Recipe.eval_every
    """Steps between held-out evaluations, 0 for none."""
    eval_prompts: Positive = Recipe.eval_prompts
    """Prompts of an evaluation."""
    data_seed: Count = Recipe.data_seed
    """Seed of the prompt order, 0 for the run's own."""
    skip_nonfinite: bool = Recipe.skip_nonfinite
    """Leave an update out whose gradient norm is not finite."""
    length_exponent: Annotated[float, Field(ge=0)] = Recipe.length_exponent
    """A token's weight in the loss is its response's length to the power of minus this."""
    warmup_steps: Count = Recipe.warmup_steps
    """Steps over which the learning rate rises linearly, 0 for none."""
    aux_coef: Annotated[float, Field(ge=0)] = Recipe.aux_coef
    """Coefficient of the routers' balancing loss, 0 for none."""
    router_lr: Annotated[float, Field(ge=0)] = Recipe.router_lr
    """Learning rate of the routers in multiples of the others'."""
    importance_cap: Annotated[float, Field(ge=0)] = Recipe.importance_cap
    """Cap of the importance weights between rollout and trainer, 0 for no weights."""
    eval_greedy: bool = Recipe.eval_greedy
    """Held-out responses are the likeliest ones instead of sampled ones."""

    def recipe(self) -> Recipe:
        """Return the recipe as engines take it."""
        return Recipe(**self.model_dump(exclude={"seeds"}))


class CandidateSpec(Part):
    """A fault to replay."""

    fault: FaultId
    """Fault id (`diagnose faults`)."""
    strength: Annotated[
        float, Field(gt=0), WrapValidator(_strength, json_schema_input_type=float | Literal["fit"])
    ] = 1.0
    """Multiple of the card's default; fit: the one that matches the incident best."""
    from_step: Positive | None = None
    """First step with the fault. Without it: the first step, or the incident's onset when there is no twin."""
    until_step: Count = 0
    """Last step with the fault, 0 for none."""
    probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Chance that the fault is active in a step of that window."""


CandidateList = Annotated[list[CandidateSpec], Field(min_length=1)]


class Budget(Part):
    """What the replays may cost. What was not tried is listed."""

    seconds: Annotated[float, Field(gt=0)]
    """Seconds for all replays."""


class Expect(Part):
    """What a CI job expects; anything else ends with exit code 1."""

    fault: FaultId | None = None
    """Fault that must be ranked first."""
    verdict: Annotated[Verdict, Strict(False)] | None = None
    """Verdict that must come out."""


class Playbook(Part):
    """A playbook of `diagnose run`."""

    version: Literal[1]
    """Version of this format."""
    name: Name
    """Short name, for run folders and reports."""
    title: str = ""
    """One line for humans."""
    description: str = ""
    """What happened."""
    symptom: Annotated[
        str, AfterValidator(_symptom), Field(json_schema_extra={"enum": [AUTO, *SYMPTOM_BY_ID]})
    ]
    """What is wrong; auto: read it from the logs."""
    original: Original
    proxy: Proxy
    engine: Engine = Engine()
    recipe: RecipeSettings = RecipeSettings()
    candidates: Annotated[
        tuple[CandidateSpec, ...] | None,
        BeforeValidator(_candidates, json_schema_input_type=Literal["auto"] | CandidateList),
    ] = Field(default=None, json_schema_extra={"default": AUTO})
    """Faults to replay; auto: every card that has the symptom."""
    budget: Budget | None = None
    expect: Expect | None = None


def cross_checks(data: Mapping[str, Any]) -> Iterator[tuple[located.Path, str]]:
    """Yield (path, complaint) for what only shows between fields.

    Works on the raw document, so it finds its share also when other fields are wrong. A path whose last key is
    absent names a missing key.
    """

    def part(name: str) -> Mapping[str, Any]:
        value = data.get(name)
        return value if isinstance(value, dict) else {}

    proxy, engine = part("proxy"), part("engine")
    kind = proxy.get("from")
    if kind in ("checkpoint", "sibling") and proxy.get("checkpoint") is None:
        yield ("proxy", "checkpoint"), f'missing required key "checkpoint": from: {kind} needs one'
    if kind in ("checkpoint", "embedded") and proxy.get("experts") is None:
        yield ("proxy", "experts"), 'missing required key "experts": how many to keep in each layer'
    if engine.get("name", "local") == "local":
        for name, what in (("command", "command"), ("config", "configuration"), ("address", "cluster")):
            if engine.get(name):
                yield ("engine", name), f"the local engine takes no {what}"
    if data.get("expect") == {}:
        yield ("expect",), "must name a fault, a verdict or both"
    steps = part("recipe").get("steps", Recipe.steps)
    candidates = data.get("candidates")
    seen: dict[tuple[Any, Any], int] = {}
    for index, item in enumerate(candidates if isinstance(candidates, tuple) else ()):
        if not isinstance(item, dict):
            continue
        strength = item.get("strength", 1.0)
        key = (str(item.get("fault")), strength if isinstance(strength, int | float) else str(strength))
        if "fault" in item and seen.setdefault(key, index) != index:
            yield ("candidates", index), f"the same fault and strength as candidate {seen[key] + 1}"
        first, last = item.get("from_step"), item.get("until_step")
        if isinstance(first, int) and isinstance(steps, int) and first > steps > 0:
            yield ("candidates", index, "from_step"), f"after the last step of the recipe ({steps})"
        if isinstance(first, int) and isinstance(last, int) and 0 < last < first:
            yield ("candidates", index, "until_step"), f"before from_step ({first})"
