"""A run folder that tests write step by step, and a backend that hands it to the TUI: no runner, no clock."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from diagnose.errors import DiagnoseError
from diagnose.events import (
    EndEvent,
    Event,
    NoteEvent,
    RunEvent,
    SessionEvent,
    StageEvent,
    StepEvent,
    VerdictEvent,
)
from diagnose.provenance import scoring_key
from diagnose.report.json import dumps
from diagnose.report.words import headline
from diagnose.result import Result
from diagnose.store import RunFolder
from diagnose.tui.plan import Choice, Cost, Incident, Launched, Order, PastRun, Plan, PlaybookEntry, Seen
from taxonomy.registry import Expectation, FaultCard, Library, Parameter, Rival, WitnessRule
from taxonomy.stages import Form, Stage
from tests.fixtures.results import GAP, KL, evidence, kl_spike

FAULTS = ("stale_weights", "rollout_precision", "update_omission")
STEPS = 60


def card(fault: str) -> FaultCard:
    return FaultCard(
        id=fault,
        title=fault.replace("_", " ").capitalize(),
        category="framework",
        symptoms=("kl_divergence_increase",),
        mechanism="The rollout goes on with weights that the trainer has left behind.",
        stage=Stage.SYNC,
        form=Form.EVENT,
        inject="nowhere:nothing",
        witness=WitnessRule("sync_skipped", 0, "synchronisations left out"),
        signature=(Expectation(KL, "up", "gradual", 2), Expectation(GAP, "up", "immediate", 2)),
        fix="Synchronise after every update.",
        sources=("a source",),
        parameters=(Parameter("every", 20, "updates between two syncs", "a source", scaling="proportional"),),
        remedies=("old_from_trainer",),
        rivals=(Rival("rollout_precision", GAP, "Precision shows at once."),),
    )


CARDS = Library({fault: card(fault) for fault in FAULTS})


class Script:
    """Writes a run folder the way a runner does, with times that the test chooses."""

    def __init__(self, path: Path, name: str = "kl_spike") -> None:
        self.folder = RunFolder(path)
        self.t = 1000.0
        self._lock: IO[str] | None = None
        for part in ("inputs", "runs"):
            (path / part).mkdir(parents=True, exist_ok=True)
        session = {"name": name, "symptom": "kl_divergence_increase", "expect": {}}
        self.folder.session.write_text(json.dumps(session))
        known = evidence()
        for kind, group in (("faulty", known.original_faulty), ("healthy", known.original_healthy)):
            for index, curves in enumerate(group):
                rows = [
                    {"step": int(step), "data": {m: float(v[i]) for m, v in curves.values.items()}}
                    for i, step in enumerate(curves.steps_N)
                ]
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (self.folder.inputs / f"{kind}_{index}.jsonl").write_text(text)

    def lock(self) -> None:
        """Look alive: hold the lock that a runner holds."""
        self._lock = (self.folder.path / "runner.lock").open("a")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write(self, event: Event, after: float = 1.0) -> None:
        self.t += after
        with self.folder.events.open("a") as file:
            file.write(replace(event, t=self.t).to_line() + "\n")

    def begin(self, seeds: tuple[int, ...] = (1,), faults: tuple[str, ...] = FAULTS) -> None:
        self.lock()
        self.write(
            SessionEvent(
                name="kl_spike",
                symptom="kl_divergence_increase",
                candidates=faults,
                seeds=seeds,
                steps=STEPS,
            )
        )
        self.write(StageEvent(stage="import", status="done", detail="1 faulty, 2 healthy"))
        self.write(StageEvent(stage="build", status="started", detail="8 of 16 experts"))
        self.write(StageEvent(stage="build", status="done"))
        self.write(StageEvent(stage="replay", status="started"))
        for fault in (None, *faults):
            for seed in seeds:
                self.write(RunEvent(run=self.run_id(fault, seed), fault=fault, seed=seed, status="queued"), 0)

    @staticmethod
    def run_id(fault: str | None, seed: int) -> str:
        return f"healthy-s{seed}" if fault is None else f"{fault}-x1-s{seed}"

    def start(self, fault: str | None, seed: int = 1) -> None:
        self.write(RunEvent(run=self.run_id(fault, seed), fault=fault, seed=seed, status="started"))

    def steps(self, fault: str | None, until: int, seed: int = 1, first: int = 1) -> None:
        """Write some steps of a replay: metrics and events, one second each."""
        known = evidence("stale_weights")
        source = (
            known.proxy_healthy[0]
            if fault in (None, "update_omission")
            else known.proxy_faulty["stale_weights"][0]
        )
        run = self.run_id(fault, seed)
        (self.folder.runs / run).mkdir(exist_ok=True)
        with (self.folder.runs / run / "metrics.jsonl").open("a") as file:
            for step in range(first, until + 1):
                data = {m: float(v[step - 1]) for m, v in source.values.items()}
                file.write(json.dumps({"step": step, "data": data}) + "\n")
                self.write(StepEvent(run=run, step=step, steps=STEPS, data={KL: data[KL]}))

    def finish(self, fault: str | None, seed: int = 1, witness: Mapping[str, float] | None = None) -> None:
        found = witness if witness is not None else {} if fault is None else {"sync_skipped": 58.0}
        self.write(
            RunEvent(run=self.run_id(fault, seed), fault=fault, seed=seed, status="done", witness=found)
        )

    def fail(self, fault: str | None, reason: str, seed: int = 1) -> None:
        run = self.run_id(fault, seed)
        self.write(RunEvent(run=run, fault=fault, seed=seed, status="failed", reason=reason))

    def note(self, text: str, level: str = "info") -> None:
        self.write(NoteEvent(text=text, level=level))

    def verdict(self, result: Result, scoring: str | None = None) -> None:
        """Write a result, made by the present scoring unless another is named."""
        result = replace(result, scoring=scoring_key() if scoring is None else scoring)
        for stage in ("replay", "score", "report"):
            self.write(StageEvent(stage=stage, status="done"))
        self.folder.result.write_text(dumps(result))
        self.write(VerdictEvent(verdict=result.score.verdict.value, summary=headline(result)))
        self.end("completed")

    def end(self, status: str, code: int = 0) -> None:
        self.write(EndEvent(status=status, exit_code=code))
        self.unlock()


def play(script: Script, result: Result | None = None) -> None:
    """A whole session at once, with one failed replay."""
    script.begin()
    for fault in (None, "stale_weights", "update_omission"):
        script.start(fault)
        script.steps(fault, STEPS)
        script.finish(fault)
    script.start("rollout_precision")
    script.steps("rollout_precision", 7)
    script.fail("rollout_precision", "worker ended with signal 9")
    script.verdict(result or replace(kl_spike(), run_dir="runs/kl_spike"))


class FakeBackend:
    """Playbooks from a list, runs from `Script`s."""

    def __init__(self, root: Path, commands: tuple[str, ...] = ()) -> None:
        self.root = root
        self.commands = commands
        self.scripts: list[Script] = []
        self.past: list[PastRun] = []
        self.started: list[tuple[Plan, Order]] = []
        self.logs: list[Path] = []
        self.incidents: list[Incident] = []
        self.stopped = 0
        self.paused = False
        self.retried: list[str] = []
        self.wishes: list[str] = []
        self.added: list[float] = []

    def playbooks(self) -> tuple[PlaybookEntry, ...]:
        return (
            PlaybookEntry("kl_spike", Path("kl_spike.yaml"), "kl_divergence_increase"),
            PlaybookEntry("reward_flat", Path("reward_flat.yaml"), "reward_degradation"),
        )

    def past_runs(self) -> tuple[PastRun, ...]:
        return tuple(self.past)

    def recent_logs(self) -> tuple[Path, ...]:
        return tuple(self.logs)

    def keep_pasted(self, text: str) -> Path:
        path = self.root / "pasted.log"
        path.write_text(text)
        return path

    def playbook_for(self, incident: Incident) -> Path:
        self.incidents.append(incident)
        return Path("kl_spike.yaml")

    def plan(self, path: Path, symptom: str | None = None) -> Plan:
        if path.name == "broken.yaml":
            raise DiagnoseError("broken.yaml:3:5: unknown key 'symptm'", "did you mean 'symptom'?")
        mine = "reward_degradation" if path.stem == "reward_flat" else "kl_divergence_increase"
        choices = tuple(
            Choice(
                fault,
                CARDS[fault].title,
                "framework",
                "The log: KL to reference up, as expected.",
                GAP,
                selected=index < 2,
                mechanism=CARDS[fault].mechanism,
            )
            for index, fault in enumerate(FAULTS)
        )
        refused = Choice(
            "expert_swap", "Expert swap", "routing", "Two experts change places.", KL, refused="dense model"
        )
        return Plan(
            path=path,
            name=path.stem,
            symptom=symptom or mine,
            choices=(*choices, refused),
            seeds=1,
            steps=STEPS,
            facts=("1 incident log of 60 steps, 2 healthy twins", "proxy: 8 of 16 experts, engine local"),
            commands=self.commands,
            seen={
                "kl_divergence_increase": Seen("9 times its healthy level", (18, 22), KL),
                "no_learning": Seen("stays where it was", None, "actor/entropy"),
            },
            ruled_out=(("Expert swap", "the model is dense"),),
            advice=("Keep the last checkpoint before step 18.",),
            look="Compare the weights of rollout and trainer.",
            budget_s=120.0,
            evidence=replace(evidence(), proxy_healthy=(), proxy_faulty={}),
        )

    def start(self, plan: Plan, order: Order) -> Launched:
        self.started.append((plan, order))
        script = Script(self.root / f"run{len(self.scripts)}", plan.name)
        self.scripts.append(script)
        script.begin(tuple(range(1, order.seeds + 1)), order.faults)
        return Launched(script.folder)

    def resume(self, folder: RunFolder) -> Launched:
        script = next(script for script in self.scripts if script.folder.path == folder.path)
        script.begin()
        return Launched(folder)

    def pause(self, folder: RunFolder) -> bool:
        self.paused = not self.paused
        return self.paused

    def cost(self, folder: RunFolder, wish: str) -> Cost:
        return Cost(("Halve the learning rate",), 6, 360, 80.0)

    def add_time(self, folder: RunFolder, seconds: float) -> Launched:
        self.added.append(seconds)
        return self.resume(folder)

    def wish(self, folder: RunFolder, wish: str) -> Launched:
        self.wishes.append(wish)
        return Launched(folder)

    def retry(self, folder: RunFolder, run: str) -> Launched:
        self.retried.append(run)
        return self.resume(folder)

    def stop(self, folder: RunFolder) -> bool:
        self.stopped += 1
        for script in self.scripts:
            if script.folder.path == folder.path:
                script.end("interrupted", 130)
        return True

    def close(self) -> None:
        for script in self.scripts:
            with suppress(OSError):
                script.unlock()
