"""What one process of a verl job knows and leaves behind: the job, the fault, the step, and its report.

A job folder holds ``job.json``; each process writes ``reports/<kind>-<pid>.json`` there (hooks that are in place,
witness sums, steps' own metrics, an error), in one move, after every hook that changed something. The launcher merges
them. Nothing is left to the end of a process: Ray kills its workers.
"""

from __future__ import annotations

import json
import os
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

from proxy.engines.injector import Combination, Injector
from proxy.engines.verl_plugin.table import JOB_VARIABLE
from proxy.specs import FaultSpec, Recipe
from taxonomy.stages import StageContext


class Process:
    """This process's side of the job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job: dict[str, Any] = json.loads((folder / "job.json").read_text())
        self.recipe = Recipe(**self.job["recipe"])
        self.seed = int(self.job["seed"])
        faults = [FaultSpec(**fault) for fault in self.job["faults"]]
        self.injector = (
            Combination(faults, self.seed)
            if len(faults) > 1
            else Injector(faults[0] if faults else None, self.seed)
        )
        self.step = 1
        """Training step that is going on or comes next."""
        self.norms: list[float] = []
        """Gradient norm of each optimizer update of this step so far."""
        self.probe: Any = None
        self.syncs = 0
        """Weight updates so far, counted in vLLM's processes."""
        self.loads: dict[int, Any] = {}
        """Tokens by expert of each of vLLM's routers, while the fault does not act."""
        self._shares: Any = None
        self._tally: tuple[int, Any] = (0, None)
        self.kind = "other"
        self.hooks: list[str] = []
        self.largest: dict[str, float] = {}
        self.metrics: dict[int, dict[str, float]] = defaultdict(dict)
        self.error = ""

    def context(self, at: int = 0, **more: Any) -> StageContext:
        """Return the context of an injection at this step, or at step `at`."""
        return StageContext(at or self.step, self.recipe.temperature, **more)

    def shares(self, measure: Callable[[], Any]) -> Any:
        """Return the healthy routing shares by layer, measured at the first call."""
        if self._shares is None:
            self._shares = measure()
        return self._shares

    def tally(self, make: Callable[[], Any]) -> Any:
        """Return the routing sums of this step, begun anew with every step."""
        if self._tally[0] != self.step:
            self._tally = (self.step, make())
        return self._tally[1]

    def saw(self, **numbers: float) -> None:
        """Keep the largest value of each number that was measured while the fault was active."""
        for name, value in numbers.items():
            self.largest[name] = max(value, self.largest.get(name, value))

    def report(self) -> None:
        """Write this process's report, whole or not at all."""
        data = {
            "kind": self.kind,
            "hooks": self.hooks,
            "witness": self.injector.tally(),
            "largest": self.largest,
            "metrics": self.metrics,
            "error": self.error,
        }
        home = self.folder / "reports"
        home.mkdir(exist_ok=True)
        path = home / f"{self.kind}-{os.getpid()}.json"
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(data))
        draft.replace(path)


@cache
def process() -> Process:
    """Return this process's state, read from the folder that the environment names."""
    return Process(Path(os.environ[JOB_VARIABLE]))


def blame(error: BaseException) -> None:
    """Report an exception of ours before it takes verl down: verl's own last words would hide it.

    An exception is ours when it was raised by the plugin or below it, not in the function of verl that it wraps.
    """
    own = Path(__file__).parents[3].name
    frames = traceback.extract_tb(error.__traceback__)
    known = [frame for frame in frames if {own, "verl"} & set(Path(frame.filename).parts)]
    if not known or own not in Path(known[-1].filename).parts:
        return
    state = process()
    where = f"{Path(known[-1].filename).name}:{known[-1].lineno}"
    state.error = state.error or f"{type(error).__name__}: {error} ({where})"
    state.report()


def told(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Have an exception in a hook reported; it goes on its way."""

    @wraps(hook)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            blame(error)
            raise

    return wrapper
