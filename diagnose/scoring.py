"""From files to a verdict: gathers curves and witnesses, calls `diagnose.score`, and computes nothing itself.

Two ways in: a run folder (what the runner has made, complete or not), or the logs of an experiment that was run
elsewhere. Neither imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from diagnose import probes, remedies
from diagnose.calibrations import calibration_for
from diagnose.console import Terminal
from diagnose.curves import Curves
from diagnose.errors import DiagnoseError, LogError
from diagnose.jobs import read_outcome
from diagnose.logs import read, read_curves
from diagnose.provenance import scoring_key
from diagnose.race import Trial, replayed
from diagnose.report.evidence import Evidence, read_evidence
from diagnose.report.words import NOT_REACHED
from diagnose.result import Result
from diagnose.score.near import Nearness, nearness
from diagnose.score.score import Replay, gather, score
from diagnose.session import PlannedFault, PlannedRun, Session, load, plan_runs, planned_run
from diagnose.store import RunFolder, open_folder, read_json
from proxy.specs import RunOutcome
from taxonomy.registry import FaultCard, library

MANIFEST = "proxy_manifest.json"
GIVEN = "given"
"""Stands for the fault of logs that were given without naming one."""


@dataclass(frozen=True)
class Logs:
    """The logs of an experiment made elsewhere, each group one file a seed.

    Attributes:
        original_healthy: Healthy twins, may be empty.
        original_faulty: The incident.
        proxy_healthy: The proxy without a fault.
        proxy_faulty: The proxy with the fault.
        fault: The injected fault, "" where it is none of the library.
        from_step: Step from which the proxy has the fault.
    """

    original_healthy: tuple[Path, ...]
    original_faulty: tuple[Path, ...]
    proxy_healthy: tuple[Path, ...]
    proxy_faulty: tuple[Path, ...]
    fault: str = ""
    from_step: int = 1


def describe_proxy(session: Session, folder: RunFolder) -> dict[str, Any]:
    """Return what a report says of the proxy; the hash is "" before it is built."""
    manifest = read_json(folder.proxy / MANIFEST)
    known = manifest if isinstance(manifest, dict) else {}
    return {
        "source": session.source,
        "checkpoint": session.checkpoint,
        "experts": session.build.experts if session.build else None,
        "strategy": session.build.strategy if session.build else "uncut",
        "manifest": str(folder.proxy / MANIFEST) if known else "",
        "hash": known.get("proxy_hash", ""),
    }


@dataclass(frozen=True)
class Material:
    """What a run folder holds for the scoring.

    Attributes:
        faulty: The incident.
        healthy: Its healthy twins.
        proxy_healthy: Healthy replays.
        replays: Candidates by strength, those with at least one run that came to an end.
        failed: Run id → why it failed.
    """

    faulty: Sequence[Curves]
    healthy: Sequence[Curves]
    proxy_healthy: Sequence[Curves]
    replays: Sequence[Replay]
    failed: Mapping[str, str]


def planned_runs(session: Session, folder: RunFolder) -> list[PlannedRun]:
    """Return the replays of a session as far as they are planned: in a race, those that it has come to."""
    kept = read_json(folder.race)
    if not isinstance(kept, dict):
        return plan_runs(session, folder.proxy)
    cards = library()
    runs = [planned_run(session, folder.proxy, None, seed) for seed in session.seeds]
    for trial in (Trial(*item) for item in kept["trials"]):
        runs.append(planned_run(session, folder.proxy, replayed(session, trial, cards), trial.seed))
    return runs


def material(
    session: Session, folder: RunFolder, runs: Sequence[PlannedRun], failures: Mapping[str, str]
) -> Material:
    """Return what a run folder holds of some replays.

    Args:
        session: Its session.
        folder: The run folder.
        runs: The replays to look at.
        failures: Run id → why it failed, for runs whose own files don't say.

    Raises:
        LogError: The curves of the incident are missing.
    """
    faulty, healthy = (
        [read_curves(path) for path in sorted(folder.inputs.glob(f"{kind}_*.jsonl"), key=_number)]
        for kind in ("faulty", "healthy")
    )
    if not faulty:
        raise LogError(f"{folder.inputs} holds no curves of the incident", "start the run anew")
    outcomes = {run.id: outcome for run in runs if (outcome := read_outcome(folder.runs / run.id))}
    failed = dict(failures) | {
        run: outcome.reason or outcome.status
        for run, outcome in outcomes.items()
        if outcome.status != "completed"
    }
    done = {run.id: _curves(folder, run) for run in runs if run.id in outcomes and run.id not in failed}
    by_candidate: dict[tuple[str, float], list[PlannedRun]] = {}
    for run in runs:
        if run.planned is not None:
            by_candidate.setdefault((run.planned.fault, run.planned.strength), []).append(run)
    return Material(
        faulty=faulty,
        healthy=healthy,
        proxy_healthy=[done[run.id] for run in runs if run.planned is None and run.id in done],
        replays=[
            _replay(own[0].planned, own, done, outcomes, failed)
            for own in by_candidate.values()
            if own[0].planned is not None and any(run.id in done or run.id in failed for run in own)
        ],
        failed=failed,
    )


def standings(
    session: Session, folder: RunFolder, runs: Sequence[PlannedRun], failures: Mapping[str, str]
) -> Nearness:
    """Return where the candidates stand after some replays, for the race."""
    found = material(session, folder, runs, failures)
    given = gather(
        found.faulty,
        found.healthy,
        found.proxy_healthy,
        found.replays,
        library(),
        calibration=calibration_for(session, folder),
        stand_in=session.source != "checkpoint",
    )
    return nearness(given, session.onset)


def evaluate(
    session: Session, folder: RunFolder, failures: Mapping[str, str], wall_s: float, cut: str
) -> Result:
    """Score what a run folder holds.

    Args:
        session: Its session.
        folder: The run folder.
        failures: Run id → why it failed, for runs whose own files don't say.
        wall_s: Seconds that the result took.
        cut: Why a replay that was planned was not run, as the end of a sentence.

    Raises:
        LogError: The curves of the incident are missing.
    """
    runs = planned_runs(session, folder)
    found = material(session, folder, runs, failures)
    tried = {item.fault for item in found.replays}
    kept = read_json(folder.race) or {}
    stopped = dict(kept.get("stopped", {})) | {
        fault: f"further seeds and strengths were left out: {cut}"
        for fault in kept.get("racing", ())
        if fault in tried
    }
    cards, calibration = library(), calibration_for(session, folder)
    unreached = [item.fault for item in session.candidates if item.fault not in tried]
    answer = score(
        found.faulty,
        found.healthy,
        found.proxy_healthy,
        found.replays,
        cards,
        calibration=calibration,
        from_step=session.onset,
        stand_in=session.source != "checkpoint",
        unreached=unreached,
    )
    extra: dict[str, Any] = {}
    if folder.extra.is_dir():
        logged = [name for run in found.faulty for name in run.metrics]
        extra = {
            "probes": probes.results(session, folder, answer, logged, cards),
            "remedies": remedies.results(session, folder, answer, found.proxy_healthy, calibration, cards),
        }
    return Result(
        status="completed",
        score=answer,
        symptom=session.symptom,
        name=session.name,
        proxy=describe_proxy(session, folder),
        engine=session.engine,
        recipe=asdict(session.recipe),
        seeds=session.seeds,
        not_tried=dict(session.not_tried) | {fault: f"{NOT_REACHED}: {cut}" for fault in unreached},
        failures=dict(found.failed),
        wall_s=wall_s,
        run_dir=str(folder.path),
        stopped_early=stopped,
        scoring=scoring_key(),
        **extra,
    )


def _number(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _curves(folder: RunFolder, run: PlannedRun) -> Curves:
    """Return the curves of a finished replay."""
    path = folder.runs / run.id / "metrics.jsonl"
    return _read_once(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=512)
def _read_once(path: Path, _mtime_ns: int) -> Curves:
    """A race looks at its first replays again after every rung."""
    return read(path).runs[-1].curves


def _replay(
    planned: PlannedFault,
    runs: Sequence[PlannedRun],
    done: Mapping[str, Curves],
    outcomes: Mapping[str, RunOutcome],
    failed: Mapping[str, str],
) -> Replay:
    """Join the seeds of one candidate."""
    own = [run.id for run in runs if run.id in done]
    reasons = [failed[run.id] for run in runs if run.id in failed]
    witness, seen = judge_witness(library()[planned.fault], [outcomes[run].witness for run in own])
    return Replay(
        fault=planned.fault,
        runs=[done[run] for run in own],
        severity=planned.strength,
        from_step=planned.spec.from_step,
        witness=witness,
        witness_ok=seen,
        failure="" if own else reasons[0],
    )


def judge_witness(card: FaultCard, witnesses: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], bool]:
    """Return the witness over all seeds (the least of each number), and whether every seed proves the injection."""
    rule = card.witness
    seen = bool(witnesses) and all(
        rule.name in witness and witness[rule.name] > rule.above for witness in witnesses
    )
    common = set.intersection(*(set(witness) for witness in witnesses)) if witnesses else set()
    return {name: min(witness[name] for witness in witnesses) for name in sorted(common)}, seen


def rescore(folder: RunFolder) -> Result:
    """Return the verdict that a run folder's files support now; nothing is run or written.

    Raises:
        RunError: The folder is not a run folder of this version.
        LogError: Its curves are missing.
    """
    stored = read_json(folder.result)
    before = stored if isinstance(stored, dict) else {}
    session = load(folder)
    return evaluate(
        session,
        folder,
        before.get("failures", {}),
        before.get("wall_s") or 0.0,
        stored_cut(session, folder),
    )


def so_far(folder: RunFolder, status: str, wall_s: float) -> Result | None:
    """Return the verdict on what a session has done that did not come to its end; None where that is too little.

    Too little: no healthy replay, or none with a fault. Nothing is written.

    Args:
        folder: The run folder.
        status: How the session ended: "interrupted" or "failed".
        wall_s: Seconds that it worked.

    Raises:
        RunError: The folder is not a run folder of this version.
        LogError: The curves of the incident are missing.
    """
    session = load(folder)
    outcomes = [(run, read_outcome(folder.runs / run.id)) for run in planned_runs(session, folder)]
    kinds = {run.planned is None for run, found in outcomes if found and found.status == "completed"}
    if kinds != {True, False}:
        return None
    return replace(evaluate(session, folder, {}, wall_s, stored_cut(session, folder)), status=status)


def stored_cut(session: Session, folder: RunFolder) -> str:
    """Return why planned replays of a session are missing, as the end of a sentence."""
    kept = read_json(folder.race)
    if session.budget_s and isinstance(kept, dict) and kept.get("left_out"):
        return f"the budget of {round(session.budget_s + folder.added_s(), 1):g} s was spent"
    return "the run was interrupted"


def read_logs(logs: Logs) -> Evidence:
    """Return the curves of an experiment that was made elsewhere.

    Raises:
        DiagnoseError: A group that scoring needs is missing.
        LogError: A log is unusable.
    """
    for name in ("original_faulty", "proxy_healthy", "proxy_faulty"):
        if not getattr(logs, name):
            option = "--" + name.replace("_", "-")
            raise DiagnoseError(f"{option} is missing", "see: diagnose score --help")
    original_healthy, original_faulty, proxy_healthy, proxy_faulty = (
        tuple(_newest(path) for path in group)
        for group in (logs.original_healthy, logs.original_faulty, logs.proxy_healthy, logs.proxy_faulty)
    )
    return Evidence(original_healthy, original_faulty, proxy_healthy, {logs.fault or GIVEN: proxy_faulty})


def score_logs(logs: Logs, curves: Evidence) -> Result:
    """Score the logs of an experiment that was made elsewhere.

    The proxy is taken for a stand-in: nothing in the logs says what it was cut from. Nor do they prove that the
    fault took place: that is taken as given.

    Raises:
        UnknownFault: The fault is not in the library.
    """
    if logs.fault:
        library()[logs.fault]
    fault = logs.fault or GIVEN
    found = score(
        curves.original_faulty,
        curves.original_healthy,
        curves.proxy_healthy,
        [Replay(fault, curves.proxy_faulty[fault], from_step=logs.from_step)],
        library(),
        stand_in=True,
    )
    return Result(
        status="completed",
        score=found,
        symptom="",
        name=logs.original_faulty[0].stem,
        proxy={"source": "given", "experts": None, "strategy": "", "manifest": ""},
        engine="given",
        recipe={},
        seeds=(),
        not_tried={},
        failures={},
        wall_s=0.0,
        run_dir="",
        scoring=scoring_key(),
    )


def _newest(path: Path) -> Curves:
    """Return the last run of a log: a file to which a restarted job appended holds several."""
    return read(path).runs[-1].curves


def command(run_dir: Path | None, logs: Logs, files: Mapping[str, Path], terminal: Terminal) -> int:
    """Carry out `diagnose score`; return its exit code."""
    from diagnose.answer import exit_code, write_answer

    groups = (logs.original_healthy, logs.original_faulty, logs.proxy_healthy, logs.proxy_faulty)
    if run_dir is not None and any(groups):
        raise DiagnoseError("give a run folder or logs, not both", "see: diagnose score --help")
    if run_dir is None and not any(groups):
        raise DiagnoseError("nothing to score", "diagnose score RUN_DIR, or: diagnose score --help")
    if run_dir is None:
        curves = read_logs(logs)
        result = score_logs(logs, curves)
        write_answer(result, {}, lambda: curves, files, terminal.json_only, terminal)
        return exit_code(result)
    folder = open_folder(run_dir)
    result, expect = rescore(folder), load(folder).expect
    write_answer(result, expect, lambda: read_evidence(folder.path), files, terminal.json_only, terminal)
    return exit_code(result, expect)
