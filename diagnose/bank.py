"""A bank of finished runs and built proxies, by content key: what studies and the self-test need is made once.

    BANK/ *.lock · models/<build key>/ (a built proxy) · hashes.json · worker_*.log ·
          runs/<key>/{spec.json, metrics.jsonl, outcome.json}

A run is there when its `outcome.json` is; whoever fills the bank can be killed at any time and loses only the
runs in flight. A run that says no (a refused injection) is an outcome like any other; one that broke is not.
"""

from __future__ import annotations

import fcntl
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnose.errors import RunError
from diagnose.jobs import cores, make_ready, read_outcome
from diagnose.store import read_json, write_json
from proxy.api import Done, Failed, Job, Note, WorkerPool
from proxy.embedded import resolve
from proxy.specs import INJECTION_FAILED, BuildSpec, RunOutcome, RunSpec, content_key

if TYPE_CHECKING:
    from diagnose.curves import Curves


@dataclass(frozen=True)
class Model:
    """A checkpoint that runs can be made on.

    Attributes:
        path: Folder, or ``embedded:NAME``.
        hash: Content hash, part of every run's key.
    """

    path: str
    hash: str


@dataclass(frozen=True)
class Progress:
    """How far the filling of a bank is.

    Attributes:
        done: Runs that came to an end in this call.
        total: Runs that this call is to make.
        failed: Of `done`, those that broke or said no.
        left_s: Expected seconds to the end, by the wall time so far; None before the first end.
        cpu_s: CPU seconds of the finished runs.
    """

    done: int
    total: int
    failed: int
    left_s: float | None
    cpu_s: float


@dataclass(frozen=True)
class Filled:
    """What a call of `Bank.fill` did.

    Attributes:
        made: Runs that were made.
        there: Runs that were there before.
        left_out: Runs that the time limit cut off.
        died: Key → why, for runs that broke (their worker died, or met an error of its own); another call tries
            them again.
    """

    made: int
    there: int
    left_out: int
    died: Mapping[str, str]


class Bank:
    """A folder of runs and proxies.

    Args:
        home: The folder; it is made when something is put in.
        workers: Worker processes, None for the number of cores.
        command: Worker command, None for the usual one.
    """

    def __init__(self, home: Path, workers: int | None = None, command: Sequence[str] | None = None) -> None:
        self.home = home.absolute()
        self._workers = workers or cores()
        self._command = command

    def key(self, spec: RunSpec, model: Model) -> str:
        """Return the key under which a run is kept; the model's place plays no part in it."""
        return spec.key(model.hash)

    def folder(self, key: str) -> Path:
        """Return the folder of a run."""
        return self.home / "runs" / key

    def outcome(self, key: str) -> RunOutcome | None:
        """Return how a run ended, None where it is not there."""
        return read_outcome(self.folder(key))

    def curves(self, key: str) -> Curves:
        """Return the curves of a run that is there.

        Raises:
            LogError: Its metrics are unusable.
        """
        from diagnose.logs import read

        return read(self.folder(key) / "metrics.jsonl").runs[-1].curves

    def models(self, wanted: Mapping[str, str | BuildSpec]) -> dict[str, Model]:
        """Return checkpoints by name: those given as a folder or ``embedded:NAME`` hashed, the others built.

        Args:
            wanted: Name → checkpoint, or how to cut one (`BuildSpec.out` is ignored).

        Raises:
            RunError: A build or a hash failed, or another process is at it.
        """
        found: dict[str, Model] = {}
        jobs: dict[str, Job] = {}
        known = read_json(self.home / "hashes.json") or {}
        for name, item in wanted.items():
            if isinstance(item, BuildSpec):
                out = self.home / "models" / build_key(item)
                manifest = read_json(out / "proxy_manifest.json")
                if manifest is None:
                    jobs[name] = Job(name, "build", asdict(replace(item, out=str(out))))
                else:
                    found[name] = Model(str(out), str(manifest["proxy_hash"]))
            elif (mark := _mark(item)) in known:
                found[name] = Model(item, known[mark])
            else:
                jobs[name] = Job(name, "hash", {"model": item})
        if not jobs:
            return found
        logs = self.home / "models"
        with self._locked("models"), WorkerPool(min(self._workers, len(jobs)), logs, self._command) as pool:
            for job in jobs.values():
                pool.submit(job)
            for event in pool.events():
                item = wanted[event.id]
                if isinstance(event, Failed):
                    raise RunError(f"{event.id}: {event.reason}")
                if not isinstance(event, Done):
                    continue
                if isinstance(item, BuildSpec):
                    path = str(self.home / "models" / build_key(item))
                    found[event.id] = Model(path, str(event.result["manifest"]["proxy_hash"]))
                else:
                    found[event.id] = Model(item, str(event.result["hash"]))
                    known[_mark(item)] = event.result["hash"]
            write_json(self.home / "hashes.json", known)
        return found

    def missing(self, specs: Iterable[RunSpec], models: Mapping[str, Model]) -> dict[str, RunSpec]:
        """Return the runs that are not there, by key, in the order given.

        Args:
            specs: Runs; `RunSpec.model` is the path of one of `models`.
            models: Checkpoints by path.
        """
        wanted = {self.key(spec, models[spec.model]): spec for spec in specs}
        return {key: spec for key, spec in wanted.items() if self.outcome(key) is None}

    def fill(
        self,
        specs: Iterable[RunSpec],
        models: Mapping[str, Model],
        *,
        limit_s: float = 0.0,
        progress: Callable[[Progress], None] = lambda _: None,
        note: Callable[[str], None] = lambda _: None,
    ) -> Filled:
        """Make the runs that are not there, in the order given, as many at a time as there are workers.

        Args:
            specs: Runs; `RunSpec.model` is the path of one of `models`.
            models: Checkpoints by path.
            limit_s: Seconds after which no further run is started, 0 for no limit.
            progress: Called after every run.
            note: Called with what workers say for humans.

        Raises:
            RunError: Another process is filling this bank.
        """
        wanted = {self.key(spec, models[spec.model]): spec for spec in specs}
        if not self.missing(wanted.values(), models):  # nothing to do, whoever else is at work here
            return Filled(0, len(wanted), 0, {})
        with self._locked("runs"):
            todo = deque(self.missing(wanted.values(), models).items())
            there, total = len(wanted) - len(todo), len(todo)
            begin, ended, failed, cpu_s = time.monotonic(), 0, 0, 0.0
            died: dict[str, str] = {}
            with WorkerPool(max(1, min(self._workers, total)), self.home, self._command) as pool:
                while todo or pool.outstanding:
                    while todo and pool.free:
                        if limit_s and time.monotonic() - begin >= limit_s:
                            break
                        self._submit(pool, *todo.popleft())
                    if not pool.outstanding:
                        break
                    for event in pool.poll():
                        if isinstance(event, Note):
                            note(f"{event.id}: {event.text}")
                        if not isinstance(event, Done | Failed):
                            continue
                        outcome = self.outcome(event.id)
                        if outcome is None and isinstance(event, Failed) and _said_no(event):
                            outcome = RunOutcome("failed", event.reason)
                            write_json(self.folder(event.id) / "outcome.json", asdict(outcome))
                        if outcome is None:
                            died[event.id] = event.reason if isinstance(event, Failed) else "no outcome"
                        ended += 1
                        failed += outcome is None or outcome.status != "completed"
                        cpu_s += outcome.cpu_s if outcome else 0.0
                        left_s = (time.monotonic() - begin) / ended * (total - ended)
                        progress(Progress(ended, total, failed, left_s, cpu_s))
        return Filled(ended - len(died), there, len(todo), died)

    def strangers(self, keys: Iterable[str]) -> int:
        """Return how many of these runs were made by other engine sources than the present ones."""
        code = engine_code()
        return sum((read_json(self.folder(key) / "spec.json") or {}).get("code") != code for key in keys)

    def cost_s(self, sample: int = 50) -> float | None:
        """Return the median CPU seconds of some finished runs, None without any: what a plan is priced with."""
        costs = []
        for path in sorted((self.home / "runs").glob("*/outcome.json"))[:sample]:
            raw = read_json(path)
            if isinstance(raw, dict) and raw.get("cpu_s"):
                costs.append(float(raw["cpu_s"]))
        return statistics.median(costs) if costs else None

    def _submit(self, pool: WorkerPool, key: str, spec: RunSpec) -> None:
        home = self.folder(key)
        make_ready(home, {"key": key, "code": engine_code(), "spec": asdict(spec)})
        pool.submit(Job(key, "run", asdict(spec), str(home)))

    @contextmanager
    def _locked(self, part: str) -> Iterator[None]:
        """Be the only process that puts anything into a part of this bank."""
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / f"{part}.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"another process is making {part} in {self.home}", "wait for it, or name another folder"
                ) from None
            yield


def _said_no(event: Failed) -> bool:
    """Whether a run ended because its fault can't be put into this model, which another try won't change."""
    return event.reason.startswith(INJECTION_FAILED) and not event.died


@cache
def engine_code() -> str:
    """Return a hash over the sources that decide what a run of the local engine computes."""
    import proxy
    import taxonomy

    sources = [
        path
        for package, parts in ((proxy, ("engines", "embedded")), (taxonomy, ("inject",)))
        for part in parts
        for path in sorted((Path(package.__path__[0]) / part).glob("*.py"))
    ]
    return content_key([(path.name, path.read_text(encoding="utf-8")) for path in sources])


def build_key(spec: BuildSpec) -> str:
    """Return the key under which a built proxy is kept; where it is written plays no part in it."""
    return content_key({**asdict(spec), "out": ""})


def _mark(checkpoint: str) -> str:
    """Return what tells a checkpoint's files from others without reading them: names, sizes, times."""
    folder = resolve(checkpoint)
    files: list[Any] = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.iterdir())
        if path.suffix in (".json", ".safetensors")
    ]
    return content_key(json.dumps([checkpoint, *files]))
