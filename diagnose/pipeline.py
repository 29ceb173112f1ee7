"""The pipeline of a session: build the proxy, replay the candidates, score, write the answer.

A stage whose result is there is skipped. A replay is there when its `outcome.json` is and its `spec.json` carries
the key of the very run that is planned: same proxy, recipe, seed and fault.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from diagnose import probes, remedies
from diagnose.calibrations import keep_calibration
from diagnose.errors import RunError
from diagnose.events import (
    EventLog,
    NoteEvent,
    RunEvent,
    SessionEvent,
    StageEvent,
    StepEvent,
    Tail,
    VerdictEvent,
)
from diagnose.jobs import make_ready, read_outcome
from diagnose.logs.text import count
from diagnose.proxy_files import damage
from diagnose.race import Race, Rung, race_of, replayed, rungs
from diagnose.report.json import to_json
from diagnose.report.words import headline
from diagnose.result import Result
from diagnose.score.near import Nearness
from diagnose.scoring import MANIFEST, evaluate, so_far, standings, stored_cut
from diagnose.session import LEAST_REPLAYS, PlannedRun, Session, load, planned_run
from diagnose.store import RunFolder, read_json, write_json
from proxy.api import Done, Failed, Job, Note, Started, Step, WorkerPool
from proxy.specs import INJECTION_FAILED, RunOutcome
from taxonomy.registry import library

KEY_METRICS = (
    "critic/rewards/mean",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "training/rollout_probs_diff_mean",
    "rollout_corr/kl",
    "routing/agreement/mean",
    "routing/load_max/mean",
)
"""What a step event carries; the rest is in the run's own metrics file."""

BUILD = "build"


def execute(folder: RunFolder, log: EventLog) -> Result:
    """Carry out a session from wherever it stands; return its result, which is then in `result.json` too.

    Raises:
        RunError: The proxy could not be built, or no healthy replay came through.
        OSError: The disk is full or broken; what is finished stays.
    """
    begin, earlier_s = time.monotonic(), worked_s(folder)
    session = load(folder)
    folder.pause.unlink(missing_ok=True)  # whoever starts a runner wants it to run
    log.append(
        SessionEvent(
            name=session.name,
            symptom=session.symptom,
            candidates=tuple(planned.fault for planned in session.candidates),
            seeds=session.seeds,
            steps=session.recipe.steps,
        )
    )
    log.append(StageEvent(stage="import", status="done", detail=_imported(folder)))
    own = session.python and session.engine == "local"
    command = [session.python, "-P", "-m", "proxy.worker"] if own else None
    with WorkerPool(session.workers, folder.path, command) as pool:
        _build(session, folder, log, pool)
        calibrated = keep_calibration(session, folder, manifest(folder)["proxy_hash"])
        if calibrated is None:
            log.append(NoteEvent(text="no healthy seeds on file for this proxy and recipe: wider margins"))
        replays = Replays(session, folder, log, pool, begin)
        replays.run()
        _extra(session, folder, log, pool, replays.failures)
    log.append(StageEvent(stage="score", status="started"))
    result = evaluate(
        session, folder, replays.failures, earlier_s + time.monotonic() - begin, stored_cut(session, folder)
    )
    log.append(StageEvent(stage="score", status="done"))
    log.append(StageEvent(stage="report", status="started"))
    write_json(folder.result, to_json(result))
    log.append(StageEvent(stage="report", status="done", detail=folder.result.name))
    log.append(VerdictEvent(verdict=result.score.verdict.value, summary=headline(result)))
    return result


def conclude_early(folder: RunFolder, log: EventLog, status: str) -> None:
    """Score what a session has done that was stopped or failed, unless an earlier runner's verdict on all is there.

    Args:
        folder: The run folder.
        log: Its event file.
        status: "interrupted" or "failed".

    Raises:
        RunError: The folder is not a run folder of this version.
        LogError: The curves of the incident are missing.
        OSError: The disk is full or broken; what is finished stays.
    """
    before = read_json(folder.result)
    if isinstance(before, dict) and before.get("status") == "completed":
        return
    result = so_far(folder, status, worked_s(folder))
    if result is None:
        log.append(NoteEvent(text="no verdict yet: it takes a healthy replay and one with a fault"))
        return
    write_json(folder.result, to_json(result))
    log.append(VerdictEvent(verdict=result.score.verdict.value, summary=headline(result)))


def logged_steps(metrics: Path) -> int:
    """Return the last step that a replay's metrics file holds whole, 0 for none: it may have been cut off since."""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue
    return 0


def worked_s(folder: RunFolder) -> float:
    """Return the seconds that earlier runners worked in a folder, by their first and last events."""
    total, first, last = 0.0, 0.0, 0.0
    for event in Tail(folder.events).poll():
        if isinstance(event, SessionEvent):
            total += last - first
            first = event.t
        last = event.t
    return total + last - first


def _imported(folder: RunFolder) -> str:
    """Say what was imported; raises RunError when the run folder lost it."""
    faulty, healthy = (len(list(folder.inputs.glob(f"{kind}_*.jsonl"))) for kind in ("faulty", "healthy"))
    if not faulty:
        raise RunError(f"{folder.inputs} holds no curves of the incident", "start the run anew")
    return f"{faulty} faulty, {healthy} healthy"


def _build(session: Session, folder: RunFolder, log: EventLog, pool: WorkerPool) -> None:
    """Build the proxy, unless it is there (it appears under its name only when it is complete).

    A sibling that is used uncut is hashed instead, so that its runs have keys.
    """
    spec = session.build
    what = (
        f"{spec.experts} experts by {spec.strategy} from {session.checkpoint}" if spec else session.checkpoint
    )
    if (folder.proxy / MANIFEST).is_file():
        harm = damage(folder.proxy, read_json(folder.proxy / MANIFEST))
        if not harm:
            log.append(StageEvent(stage="build", status="skipped", detail=what))
            return
        log.append(NoteEvent(level="warn", text=f"the proxy is damaged ({harm}): it is built anew"))
        shutil.rmtree(folder.proxy)
    log.append(StageEvent(stage="build", status="started", detail=what))
    if spec:
        own = {"out": str(folder.proxy)}  # the session's is where the folder was made: it may have been moved
        pool.submit(Job(BUILD, "build", asdict(spec) | own))
    else:
        pool.submit(Job(BUILD, "hash", {"model": session.checkpoint}))
    for event in pool.events():
        if isinstance(event, Note):
            log.append(NoteEvent(text=event.text))
        elif isinstance(event, Failed):
            log.append(StageEvent(stage="build", status="failed", detail=event.reason))
            raise RunError(
                f"the proxy could not be built: {event.reason}",
                f"see {folder.path}/worker_0.log" if event.died else "",
            )
        elif isinstance(event, Done) and spec is None:
            folder.proxy.mkdir(exist_ok=True)
            content = {"proxy_hash": event.result["hash"], "source_hash": event.result["hash"]}
            write_json(folder.proxy / MANIFEST, content | {"uncut": session.checkpoint})
    log.append(StageEvent(stage="build", status="done", detail=what))


def manifest(folder: RunFolder) -> dict[str, Any]:
    """Return the manifest of the built proxy. Raises RunError where there is none."""
    found = read_json(folder.proxy / MANIFEST)
    if not isinstance(found, dict):
        raise RunError(f"{folder.proxy} holds no proxy", "start the run anew")
    return found


def _extra(
    session: Session, folder: RunFolder, log: EventLog, pool: WorkerPool, failures: Mapping[str, str]
) -> None:
    """Run the probes and remedies that were asked for. They are no replays: no budget counts them."""
    wishes = read_json(folder.wishes) or {}
    if not wishes.get("probe") and not wishes.get("try_fix"):
        return
    if session.engine != "local" and wishes.get("probe"):
        log.append(NoteEvent(level="warn", text="probes are run by the local engine alone"))
        wishes = {**wishes, "probe": False}
    score, cards = evaluate(session, folder, failures, 0.0, "").score, library()
    runs: list[PlannedRun] = []
    for wish, planner, what in (
        ("probe", probes.plan, "nothing to probe: there is no set to split"),
        ("try_fix", remedies.plan, "no remedy to try: the card of the first candidate names none"),
    ):
        if wishes.get(wish):
            planned = planner(session, folder, score, cards)
            runs += planned
            log.append(NoteEvent(text=f"{wish.replace('_', ' ')}: {len(planned)} runs" if planned else what))
    Replays(session, folder, log, pool, time.monotonic(), folder.extra).carry_out(runs)


PAUSE_POLL_S = 0.2


class Replays:
    """The replay stage: runs what the race calls for, as many at a time as there are workers."""

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        log: EventLog,
        pool: WorkerPool,
        begin: float,
        home: Path | None = None,
    ) -> None:
        self._session, self._folder, self._log, self._pool = session, folder, log, pool
        self._home = home or folder.runs
        self._planned: dict[str, PlannedRun] = {}
        self._model_hash = manifest(folder)["proxy_hash"]
        self._durations: list[float] = []
        self._taken_up: set[str] = set()
        self._spent_before = 0.0
        self._begin = begin
        self._budget_s = session.budget_s + folder.added_s() if session.budget_s else 0.0
        kept = read_json(folder.race)
        kept = kept if isinstance(kept, dict) else {}
        # More time than the earlier runner had: what it left out for want of it is due again.
        more = self._budget_s > kept.get("budget_s", session.budget_s)
        self._left_out: set[str] = set(() if more else kept.get("left_out", ()))
        self.failures: dict[str, str] = {}

    def run(self) -> None:
        """Run what is missing and the budget allows, rung by rung.

        What an earlier runner left out because the budget was spent stays left out, unless there is more of it now:
        the same race is walked again.

        Raises:
            RunError: No healthy replay came through, or none with a fault although some were tried. Replays whose
                injection failed are an answer of their own.
        """
        race, cards = race_of(self._session), library()
        runs = [planned_run(self._session, self._folder.proxy, None, seed) for seed in self._session.seeds]
        history: list[Nearness] = []
        started = False
        while True:
            plan = rungs(race, history)
            over = len(plan) == len(history) or not plan[-1].trials
            self._keep(race, plan, over)
            if over:
                break
            runs += [
                planned_run(
                    self._session, self._folder.proxy, replayed(self._session, trial, cards), trial.seed
                )
                for trial in plan[-1].trials
            ]
            new = [run for run in runs if run.id not in self._planned]
            self._planned |= {run.id: run for run in new}
            missing = deque(run for run in new if not self._is_there(run) and run.id not in self._left_out)
            if missing and not started:
                started = True
                self._stage("started", f"{len(missing)} runs")
            elif missing:
                gone = f", {count(len(plan[-1].stopped), 'candidate')} stopped" if plan[-1].stopped else ""
                self._log.append(
                    NoteEvent(text=f"{plan[-1].name}: {count(len(missing), 'further replay')}{gone}")
                )
            self._run_all(missing)
            self._keep(race, plan, over)
            # Nobody gets another strength or seed while another candidate waits for its first replay.
            if self._left_out.intersection(run.id for run in new):
                break
            history.append(standings(self._session, self._folder, runs, self.failures))
        self._conclude(started)

    def carry_out(self, runs: Sequence[PlannedRun]) -> None:
        """Run what is missing of some runs, whatever they cost."""
        self._planned |= {run.id: run for run in runs}
        self._run_all(deque(run for run in runs if not self._is_there(run)), whatever=True)

    def _keep(self, race: Race, plan: Sequence[Rung], over: bool) -> None:
        """Write down how far the race has come."""
        stopped = {fault: reason for rung in plan for fault, reason in rung.stopped.items()}
        write_json(
            self._folder.race,
            {
                "schema": 1,
                "rungs": {rung.name: len(rung.trials) for rung in plan},
                "trials": [astuple(trial) for rung in plan for trial in rung.trials],
                "stopped": stopped,
                "racing": [e.fault for e in race.entries if e.fault not in stopped] if not over else [],
                "left_out": sorted(self._left_out),
                "budget_s": self._budget_s,
            },
        )

    def _conclude(self, started: bool) -> None:
        """Tell how the stage ended; raises RunError where nothing came of it."""
        done, left_out = len(self._durations), len(self._left_out)
        if not started:
            self._stage("skipped", f"{len(self._planned)} runs are there")
        elif left_out:
            budget = f"{left_out} left out, the budget of {round(self._budget_s, 1):g} s is spent"
            self._stage("done", f"{done} of {len(self._planned)} runs, {budget}")
        else:
            self._stage("done", f"{done} of {len(self._planned)} runs")
        for kind in (True, False):
            runs = [run.id for run in self._planned.values() if (run.planned is None) == kind]
            failed = [self.failures[run] for run in runs if run in self.failures]
            broken = all(reason.startswith(INJECTION_FAILED) for reason in failed)
            if failed and len(failed) == len(runs) and not (broken and not kind):
                what = "healthy replay" if kind else "replay with a fault"
                raise RunError(
                    f"no {what} came through: {failed[0]}", f"see the workers' logs in {self._folder.path}"
                )

    def _stage(self, status: str, detail: str) -> None:
        self._log.append(StageEvent(stage="replay", status=status, detail=detail))

    def _is_there(self, run: PlannedRun) -> bool:
        """Whether the very run was finished before; tells the viewers, either way."""
        home = self._home / run.id
        outcome = read_outcome(home)
        same = (read_json(home / "spec.json") or {}).get("key") == run.spec.key(self._model_hash)
        if outcome and same and logged_steps(home / "metrics.jsonl") >= outcome.steps:
            self._note_end(run, outcome)
            self._taken_up.add(run.id)
            self._spent_before += outcome.wall_s / self._session.workers
            return True
        self._tell(run, "queued")
        return False

    def _run_all(self, missing: deque[PlannedRun], *, whatever: bool = False) -> None:
        """Run all of `missing` that the budget allows (or whatever it costs); note what it did not."""
        while missing or self._pool.outstanding:
            while missing and self._pool.free and not self._is_paused():
                run = missing.popleft()
                if run.planned is None or whatever or self._is_due() or self._fits():
                    self._submit(run)
                else:
                    self._left_out.add(run.id)
            for event in self._pool.poll():
                self._take(event)

    def _is_paused(self) -> bool:
        """Whether a viewer has asked for a pause; waits a little where nothing else is to be waited for."""
        if not self._folder.pause.exists():
            return False
        if not self._pool.outstanding:
            self._log.append(NoteEvent(text="paused: what is done is kept, no further replay starts"))
            began = time.monotonic()
            while self._folder.pause.exists():
                time.sleep(PAUSE_POLL_S)
            self._begin += time.monotonic() - began  # a pause costs nothing of the budget
            self._log.append(NoteEvent(text="going on"))
            return False
        return True

    def _is_due(self) -> bool:
        """Whether a replay runs whatever it costs: without a candidate or two there is no answer at all."""
        candidates = sum(1 for run in self._taken_up if self._planned[run].planned is not None)
        return candidates < min(self._session.workers, LEAST_REPLAYS)

    def _fits(self) -> bool:
        """Whether a further replay is likely to end within the budget."""
        if not self._budget_s:
            return True
        spent = self._spent_before + time.monotonic() - self._begin
        expected = statistics.median(self._durations) if self._durations else 0.0
        return spent + expected <= self._budget_s

    def _submit(self, run: PlannedRun) -> None:
        home = self._home / run.id
        make_ready(home, {"key": run.spec.key(self._model_hash), "spec": asdict(run.spec)})
        self._taken_up.add(run.id)
        self._pool.submit(Job(run.id, "run", asdict(run.spec), str(home)))

    def _take(self, event: Any) -> None:
        """Pass one worker event on to the event file."""
        run = self._planned[event.id]
        match event:
            case Started():
                self._tell(run, "started")
            case Step():
                data = {name: event.data[name] for name in KEY_METRICS if name in event.data}
                self._log.append(StepEvent(run=run.id, step=event.step, steps=event.steps, data=data))
            case Note():
                self._log.append(NoteEvent(text=f"{run.id}: {event.text}"))
            case Done():
                outcome = read_outcome(self._home / run.id)
                if outcome is None:
                    self._fail(run, "the worker reported an end but wrote no outcome.json")
                else:
                    self._note_end(run, outcome)
            case Failed():
                self._fail(run, event.reason)

    def _note_end(self, run: PlannedRun, outcome: RunOutcome) -> None:
        if outcome.status != "completed":
            self._fail(run, outcome.reason or outcome.status)
            return
        self._durations.append(outcome.wall_s)
        self._tell(run, "done", witness=outcome.witness)

    def _fail(self, run: PlannedRun, reason: str) -> None:
        self.failures[run.id] = reason
        self._tell(run, "failed", reason)

    def _tell(
        self, run: PlannedRun, status: str, reason: str = "", witness: Mapping[str, float] | None = None
    ) -> None:
        self._log.append(
            RunEvent(
                run=run.id,
                fault=run.fault,
                seed=run.seed,
                status=status,
                reason=reason,
                witness=witness or {},
            )
        )
