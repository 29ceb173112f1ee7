"""One incident diagnosed from the bank: as the product does it, but with replays that are there already.

What differs from `diagnose run` is said here and nowhere else: a replay is injected at the banked step nearest to the
one that the product would take; the original's clock is then put to the product's step, as the product does it
where the two can't be the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diagnose.bank import Bank
from diagnose.calibrations import shipped_calibration
from diagnose.curves import Curves
from diagnose.prepare import injection_step
from diagnose.provenance import scoring_sources
from diagnose.result import Direction, Score, Verdict
from diagnose.score.calibration import Calibration, SeedSet
from diagnose.score.onset import Onset, incident_onset
from diagnose.score.plan import Replay
from diagnose.score.score import score
from diagnose.scoring import judge_witness
from diagnose.selftest import memo
from diagnose.selftest.arena import PROXY, SPINE_CONTROLS, Arena, Lineup, Replays
from diagnose.selftest.detect import Movement, movement
from diagnose.selftest.incidents import DEFAULT, RECIPES, Incident
from diagnose.session import recipe_hash
from diagnose.store import read_json, write_json
from proxy.specs import RunSpec, content_key

MOVED = (Direction.UP, Direction.DOWN)


@dataclass(frozen=True)
class Task:
    """One diagnosis that is asked for.

    Attributes:
        incident: The case.
        lineup: Name of what diagnoses it: `PROXY`, `COMPARED`, `COMPARED_SPINE`, a control, or `LOG_ONLY`.
        without: Faults that are taken out, card and replays.
    """

    incident: Incident
    lineup: str = PROXY
    without: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """A name that is unique within a line-up."""
        return f"{self.incident.id} without {','.join(self.without)}" if self.without else self.incident.id


COMPARED = "compared"
"""The proxy with no more replays and healthy seeds than a control has."""

COMPARED_SPINE = "compared, spine"
"""The same with the faults of the spine as the only candidates."""

LOG_ONLY = "log only"
"""The control without any run: the ranking that the logs alone give."""


@dataclass(frozen=True)
class Trial:
    """What a diagnosis made of an incident.

    Attributes:
        task: What was asked for.
        movement: The incident's own movement, measured before.
        verdict: The verdict.
        ranking: Faults that could be scored, the nearest first.
        categories: Their categories.
        named: The answer: the first fault, and those that can't be told apart from it; or those that act together.
        together: Faults that the answer says act at the same time, none as a rule.
        agreed: Metrics of the truth's own replay whose direction is that of the original.
        compared: Metrics that moved in both.
        severity: Strength at which the first fault is nearest.
        onset: Step at which the replays in use were injected.
    """

    task: Task
    movement: Movement
    verdict: Verdict
    ranking: tuple[str, ...]
    categories: tuple[str, ...]
    named: tuple[str, ...]
    together: tuple[str, ...]
    agreed: int
    compared: int
    severity: float | None
    onset: int

    @property
    def incident(self) -> Incident:
        """The case."""
        return self.task.incident

    @property
    def holds_truth(self) -> bool:
        """Whether the answer holds a true fault."""
        return any(fault in self.named for fault in self.incident.truth)

    @property
    def credit(self) -> float:
        """Top-1: 1 for the truth alone, 1/size for a set that holds it, 0 otherwise."""
        return 1 / len(self.named) if self.holds_truth else 0.0

    @property
    def in_top3(self) -> bool:
        """Whether a true fault is among the first three."""
        return any(fault in self.ranking[:3] for fault in self.incident.truth)

    @property
    def alarm(self) -> bool:
        """Whether the log was called faulty."""
        return self.verdict not in (Verdict.NO_FAULT, Verdict.INCONCLUSIVE)

    @property
    def specific(self) -> bool:
        """Whether one fault was named as the only one."""
        return self.verdict is Verdict.REPRODUCED

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON-able data."""
        return {name: value for name, value in asdict(self).items() if name != "task"}

    @staticmethod
    def from_json(task: Task, raw: Mapping[str, Any]) -> Trial:
        """Return the trial of a task that `to_json` wrote."""
        lists = {name: tuple(raw[name]) for name in ("ranking", "categories", "named", "together")}
        return Trial(
            **dict(raw)
            | lists
            | {"task": task, "movement": Movement(**raw["movement"]), "verdict": Verdict(raw["verdict"])}
        )


class Judge:
    """Diagnoses incidents from a bank; keeps what it has read."""

    def __init__(self, bank: Bank, arena: Arena) -> None:
        self._bank, self._arena = bank, arena
        self._lineups: dict[str, Lineup] = {}
        self._read: dict[str, Curves | None] = {}
        self._seeds: dict[tuple[str, ...], SeedSet | None] = {}
        self._replayed: dict[int, Replay | None] = {}
        self._shipped = (
            shipped_calibration(arena.models[PROXY].hash, recipe_hash(arena.recipe(DEFAULT)))
            if arena.shipped
            else None
        )

    def trial(self, task: Task) -> Trial | None:
        """Return the diagnosis, None where the incident or all that could explain it is not in the bank."""
        arena, incident = self._arena, task.incident
        faulty = self._curves([arena.run_of(incident)])
        twins = self._curves(arena.twins(incident.recipe))
        if not faulty or not twins:
            return None
        if task.lineup == LOG_ONLY:
            return self._log_only(task, faulty, twins)
        lineup = self.lineup(task.lineup)
        healthy = self._curves(lineup.healthy)
        if not healthy:
            return None
        calibration, seeds = self._calibration(task.lineup, incident.recipe)
        onset = incident_onset(faulty, twins, healthy, calibration)
        step, _ = injection_step(onset, faulty, True, arena.recipe(DEFAULT).steps)
        banked = nearest({item.from_step for item in lineup.replays}, step)
        library = arena.library.without(*task.without)
        replays = [
            self._replayed[id(item)] if id(item) in self._replayed else self._replay(item)
            for item in lineup.replays
            if item.from_step == banked and item.fault not in task.without
        ]
        found = score(
            faulty,
            twins,
            healthy,
            [item for item in replays if item is not None],
            library,
            calibration=calibration,
            from_step=clock_start(step, banked, onset),
        )
        return self._judged(task, found, movement(faulty, twins, seeds, incident.from_step), banked)

    def _log_only(self, task: Task, faulty: Sequence[Curves], twins: Sequence[Curves]) -> Trial:
        """Return what the logs alone say, among the faults that the proxy was asked about."""
        from diagnose.triage import rank_faults

        incident, library = task.incident, self._arena.library
        asked = {card.id for card in self._arena.faults} - set(task.without)
        others = [fault for fault in library.cards if fault not in asked]
        ranked = [
            item for item in rank_faults(faulty, twins, cards=library.without(*others)) if not item.ruled_out
        ]
        named = [item.fault for item in ranked if item.score == ranked[0].score or item.tied]
        _, seeds = self._calibration(PROXY, incident.recipe)
        return Trial(
            task=task,
            movement=movement(faulty, twins, seeds, incident.from_step),
            verdict=Verdict.INCONCLUSIVE,
            ranking=tuple(item.fault for item in ranked),
            categories=tuple(item.category for item in ranked),
            named=tuple(named),
            together=(),
            agreed=0,
            compared=0,
            severity=None,
            onset=0,
        )

    def _judged(self, task: Task, found: Score, moved: Movement, banked: int) -> Trial:
        scored = [item for item in found.ranking if item.distance == item.distance]
        named = found.together or ((scored[0].fault, *scored[0].rivals) if scored else ())
        agreed = compared = 0
        for item in scored:
            if item.fault in task.incident.truth:
                both = [row for row in item.metrics.values() if row.original in MOVED and row.proxy in MOVED]
                agreed, compared = sum(row.original == row.proxy for row in both), len(both)
                break
        return Trial(
            task=task,
            movement=moved,
            verdict=found.verdict,
            ranking=tuple(item.fault for item in scored),
            categories=tuple(item.category for item in scored),
            named=named,
            together=found.together,
            agreed=agreed,
            compared=compared,
            severity=scored[0].severity if scored else None,
            onset=banked,
        )

    def _calibration(self, lineup: str, recipe: str) -> tuple[Calibration | None, SeedSet | None]:
        """Return what is on file: for the diagnosis, and of the original alone for the tester's own measure."""
        own = self._shipped.original if self._shipped is not None and recipe == DEFAULT else None
        seeds = own or self._seed_set(self._arena.calibration(recipe))
        on_file = self._shipped.proxy if self._shipped is not None and lineup == PROXY else None
        proxy = on_file or self._seed_set(self.lineup(lineup).healthy)
        return Calibration(proxy, "", "", seeds) if proxy is not None else None, seeds

    def _seed_set(self, runs: Sequence[RunSpec]) -> SeedSet | None:
        keys = tuple(map(self._key, runs))
        if keys not in self._seeds:
            curves = self._curves(runs)
            self._seeds[keys] = SeedSet.from_curves(curves) if curves else None
        return self._seeds[keys]

    def on_file(self) -> str:
        """Return a hash over the shipped healthy seeds in use, "" without any."""
        if self._shipped is None:
            return ""
        sets = [item for item in (self._shipped.proxy, self._shipped.original) if item is not None]
        return digest(b"".join(item.values_SMN.tobytes() for item in sets))

    def lineup(self, name: str) -> Lineup:
        """Return what a line-up has to offer."""
        if name not in self._lineups:
            arena = self._arena
            if name == PROXY:
                found = arena.lineup()
            elif name in (COMPARED, COMPARED_SPINE):
                found = arena.compared(PROXY, spine=name == COMPARED_SPINE)
            else:
                found = arena.compared(name, spine=name in SPINE_CONTROLS)
            self._lineups[name] = found
        return self._lineups[name]

    def _replay(self, item: Replays) -> Replay | None:
        """Return a replay as scoring takes it, None where none of its runs is in the bank."""
        outcomes = {key: self._bank.outcome(key) for key in map(self._key, item.runs)}
        runs = [curves for key in outcomes if (curves := self._curve(key)) is not None]
        witnesses = [end.witness for end in outcomes.values() if end and end.status == "completed"]
        reasons = [end.reason for end in outcomes.values() if end and end.status != "completed"]
        if not runs and not reasons:
            self._replayed[id(item)] = None
            return None
        witness, seen = judge_witness(self._arena.library[item.fault], witnesses)
        found = Replay(
            item.fault,
            runs,
            severity=item.strength,
            from_step=item.from_step,
            witness=witness,
            witness_ok=seen,
            failure="" if runs else reasons[0],
        )
        self._replayed[id(item)] = found  # line-ups live as long as the judge: an id stays its own
        return found

    def _curves(self, runs: Iterable[RunSpec]) -> list[Curves]:
        """Return the curves of those runs that are in the bank and came through."""
        return [curves for run in runs if (curves := self._curve(self._key(run))) is not None]

    def _curve(self, key: str) -> Curves | None:
        if key not in self._read:
            outcome = self._bank.outcome(key)
            done = outcome is not None and outcome.status == "completed"
            self._read[key] = self._bank.curves(key) if done else None
        return self._read[key]

    def _key(self, run: RunSpec) -> str:
        return self._bank.key(run, self._arena.by_path[run.model])


def nearest(banked: Iterable[int], step: int) -> int:
    """Return the banked injection step that is nearest to a step; of two, the earlier."""
    return min(banked, key=lambda item: (abs(item - step), item))


def clock_start(step: int, banked: int, onset: Onset | None) -> int | None:
    """Return where the original's clock starts, None where scoring decides.

    Scoring decides as in the product where the replays are injected at the product's own step, or inside the
    onset's interval; else the clock is put to the product's step.
    """
    if step == banked or (onset is not None and onset.low <= banked <= onset.high):
        return None
    return step


_judge: Judge | None = None


def _open(bank: Bank, arena: Arena) -> None:
    global _judge
    memo.install()
    _judge = Judge(bank, arena)


def _answer(task: Task) -> Trial | None:
    assert _judge is not None
    return _judge.trial(task)


def trials(bank: Bank, arena: Arena, tasks: Sequence[Task], workers: int) -> list[Trial]:
    """Return the diagnoses that the bank allows, in the order of the tasks, on several processes.

    They are kept in the bank, and found again as long as what they rest on is the same (`fingerprint`).
    """
    marks = {name: fingerprint(bank, arena, name) for name in {task.lineup for task in tasks}}
    kept = {name: read_json(_file(bank, mark)) or {} for name, mark in marks.items()}
    known = {task: kept[task.lineup].get(task.id) for task in tasks}
    missing = [task for task in tasks if known[task] is None]
    if missing:
        with ProcessPoolExecutor(workers, initializer=_open, initargs=(bank, arena)) as pool:
            for task, found in zip(missing, pool.map(_answer, missing, chunksize=8), strict=True):
                if found is not None:
                    kept[task.lineup][task.id] = known[task] = found.to_json()
        for name, mark in marks.items():
            _file(bank, mark).parent.mkdir(exist_ok=True)
            write_json(_file(bank, mark), kept[name])
    return [Trial.from_json(task, raw) for task in tasks if (raw := known[task]) is not None]


def _file(bank: Bank, mark: str) -> Path:
    return bank.home / "trials" / f"{mark}.json"


def fingerprint(bank: Bank, arena: Arena, name: str) -> str:
    """Return a hash over what the diagnoses of a line-up rest on: sources, cards, calibration, runs at hand."""
    import diagnose
    import taxonomy

    ours, theirs = Path(diagnose.__path__[0]), Path(taxonomy.__path__[0])
    parts = [ours / "selftest" / f"{part}.py" for part in ("trial", "detect", "memo", "arena", "incidents")]
    sources = [*scoring_sources(), *ours.glob("triage/*.py"), ours / "prepare.py", *parts]
    sources += [*theirs.glob("*.py"), *theirs.glob("cards/**/*.yaml")]
    judge = Judge(bank, arena)
    lineup = judge.lineup(PROXY if name == LOG_ONLY else name)
    keys = [bank.key(run, arena.by_path[run.model]) for run in lineup.runs]
    own = [arena.twins(recipe) + arena.calibration(recipe) for recipe in RECIPES]
    keys += [bank.key(run, arena.by_path[run.model]) for runs in own for run in runs]
    there = [key for key in keys if bank.outcome(key) is not None]
    files = [(path.name, digest(path.read_bytes())) for path in sorted(sources)]
    return content_key(name, files, judge.on_file(), there)


def digest(data: bytes) -> str:
    """Return a hash over bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
