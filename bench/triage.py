"""`make triage-bars`: what triage promises, measured in one command without a single training run.

    python -m bench.triage [--logs DIR] [--runs DIR] [--gb 1]

Incidents and negatives are the observations of ``tests/fixtures/cases``. Healthy runs are the seeds that the shipped
calibration holds, and recorded ones from a folder. Logs of other people's healthy runs come from a folder, where there
is one: a file counts as healthy when its name says so. Reading a large console log is timed too (`bench.logs`).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.logs import BAR, MEMORY, costs
from diagnose.curves import Curves
from diagnose.errors import DiagnoseError
from diagnose.triage import assess as assess_logs
from taxonomy.assessment import Triage, assess
from taxonomy.observations import Observation
from taxonomy.registry import library

CASES = Path(__file__).parent.parent / "tests" / "fixtures" / "cases"
SPEED = 6.0
STEPS = 500


@dataclass(frozen=True)
class Case:
    """An incident as observations, with its answer.

    Attributes:
        id: Its number.
        observations: What was seen.
        facts: What was known.
        steps: Logged steps, None where unknown.
        faults: Ids of the cards that are right; empty for a negative.
        confirmed: Whether the cause was confirmed.
        verdict: The right verdict.
    """

    id: str
    observations: tuple[Observation, ...]
    facts: Mapping[str, Any]
    steps: int | None
    faults: tuple[str, ...]
    confirmed: bool
    verdict: str


def cases(folder: Path = CASES) -> tuple[Case, ...]:
    """Return the incidents and the negatives."""
    seen, answers, ids = (
        yaml.safe_load((folder / name).read_text(encoding="utf-8"))
        for name in ("observations.yaml", "answers.yaml", "catalogue.yaml")
    )
    found = []
    for raw in (*seen["cases"], *seen["negatives"]):
        observations = tuple(
            Observation(
                item["metric"],
                item["direction"],
                item.get("onset", ""),
                item.get("pattern", ""),
                value=item.get("value"),
                healthy=item.get("healthy"),
                evidence="as observed",
                alarm=item["direction"] != "none",
                exact=item["direction"] in ("nan", "zero"),
            )
            for item in raw["observations"]
        )
        facts = dict(raw["context"]) | {f"logged:{metric}": False for metric in raw.get("not_logged", ())}
        answer = answers["answers"].get(raw["id"])
        faults = tuple(fault for number in answer["faults"] for fault in ids[number]) if answer else ()
        verdict = "faulty" if answer else answers["negatives"][raw["id"]]
        confirmed = bool(answer) and answer["status"] == "confirmed"
        found.append(Case(raw["id"], observations, facts, raw.get("steps"), faults, confirmed, verdict))
    return tuple(found)


def place(answer: Triage, faults: Sequence[str]) -> tuple[int, int]:
    """Return (place of the first right fault, size of the set at the top that holds it); 0 where it is not there."""
    names = [item.fault for item in answer.candidates]
    at = min((names.index(fault) + 1 for fault in faults if fault in names), default=0)
    top = [item.fault for item in answer.likeliest]
    return at, len(top) if set(top) & set(faults) else 0


def judge(case: Case) -> Triage:
    """Return the answer to a case. The steps of an incident are no argument: a person vouches for it."""
    return assess(case.observations, case.facts, steps=case.steps if case.verdict != "faulty" else None)


def weakened(case: Case) -> list[Case]:
    """Return the case without one of its observations, or one of its facts, for each of them."""
    rows = [
        Case(**(vars(case) | {"observations": case.observations[:i] + case.observations[i + 1 :]}))
        for i in range(len(case.observations))
        if len(case.observations) > 1
    ]
    for key in case.facts:
        rows.append(Case(**(vars(case) | {"facts": {k: v for k, v in case.facts.items() if k != key}})))
    return rows


def right(case: Case) -> bool:
    """Whether the right fault is first, or in a set of two at most."""
    at, size = place(judge(case), case.faults)
    return (at == 1 and size in (0, 1)) or 0 < size <= 2


def shipped_healthy() -> list[Curves]:
    """Return the healthy seeds of the shipped calibrations, original and proxy."""
    import proxy.embedded
    from diagnose.score.calibration import Calibration

    runs = []
    for file in sorted((Path(proxy.embedded.__file__).parent / "calibration").glob("*.npz")):
        calibration = Calibration.load(file)
        for system in ("original", "proxy"):
            seeds = getattr(calibration, system)
            if seeds is None:
                continue
            for k in range(len(seeds.values_SMN)):
                values = {
                    name: np.where(np.isfinite(v := seeds.values_SMN[k, m].astype(float)), v, np.nan)
                    for m, name in enumerate(seeds.metrics)
                }
                runs.append(Curves(f"{file.stem}/{system}/{k}", seeds.steps_N.astype(float), values))
    return runs


def recorded_healthy(folder: Path) -> list[Curves]:
    """Return the healthy runs under a folder: finished ones whose spec, where there is one, has no fault."""
    from diagnose.logs import read

    runs = []
    for file in sorted(folder.rglob("metrics.jsonl")):
        spec = file.with_name("spec.json")
        text = json.loads(spec.read_text(encoding="utf-8")) if spec.exists() else {}
        told = text.get("spec", text)
        if told.get("fault") or told.get("also") or not file.with_name("outcome.json").exists():
            continue
        runs.append(read(file).runs[-1].curves)
    return [run for run in runs if len(run.steps_N) >= 30]


def alarms(runs: Sequence[Curves], twins: int) -> list[tuple[str, str]]:
    """Return the healthy runs that triage calls faulty, each with its first evidence.

    The twin of a run is its neighbour of the same system.
    """
    found = []
    groups: dict[str, list[Curves]] = {}
    for run in runs:
        groups.setdefault(
            run.source.rpartition("/")[0] if ".npz" in run.source or "/" in run.source else "", []
        ).append(run)
    for group in groups.values():
        for index, run in enumerate(group):
            others = [group[(index + 1 + k) % len(group)] for k in range(twins)] if len(group) > twins else []
            if twins and not others:
                continue
            answer = assess_logs([run], others)
            if answer.verdict == "faulty":
                first = next(item for item in answer.observations if item.alarm)
                found.append((run.source, f"{first.metric}: {first.evidence}"))
    return found


def other_logs(folder: Path) -> list[tuple[str, str, str]]:
    """Return (name, verdict, symptoms) of every log under a folder that can be read."""
    from diagnose.logs import read

    rows = []
    for file in sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith((".source.txt", "SOURCE.txt"))
    ):
        try:
            found = read(file)
        except DiagnoseError as error:
            rows.append((str(file.relative_to(folder)), "not read", str(error)[:60]))
            continue
        for number, run in enumerate(found.runs, 1):
            answer = assess_logs([run.curves])
            name = str(file.relative_to(folder)) + (f" run {number}" if len(found.runs) > 1 else "")
            likely = ", ".join(item.fault for item in answer.likeliest[:3])
            rows.append(
                (
                    name,
                    answer.verdict,
                    ", ".join(item.id for item in answer.symptoms) + (f" → {likely}" if likely else ""),
                )
            )
    return rows


def speed(repeats: int = 5) -> tuple[float, float]:
    """Return the CPU seconds of ``import numpy`` and of a triage of a 500-step log, the least of some tries each."""

    def cpu(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.jsonl"
        log.write_text(long_log(STEPS), encoding="utf-8")
        pairs = [
            (cpu("-c", "import numpy"), cpu("-m", "diagnose", "triage", str(log))) for _ in range(repeats)
        ]
    return min(a for a, _ in pairs), min(b for _, b in pairs)


def long_log(steps: int) -> str:
    """Return a healthy log of many steps in verl's format: a shipped seed, said again and again."""
    run = shipped_healthy()[0]
    lines = []
    for step in range(1, steps + 1):
        n = 1 + (step - 1) % (len(run.steps_N) - 1)
        data = {name: float(values[n]) for name, values in run.values.items() if np.isfinite(values[n])}
        lines.append(json.dumps({"step": step, "data": data}))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", type=Path, help="folder of other people's logs")
    parser.add_argument("--runs", type=Path, action="append", default=[], help="folder of recorded runs")
    parser.add_argument(
        "--gb", type=float, default=0.1, help="size of the console log whose reading is timed"
    )
    options = parser.parse_args()
    failed = []

    def bar(what: str, got: str, wanted: str, holds: bool) -> None:
        print(f"{'ok  ' if holds else 'MISS'}  {what}: {got} (wanted: {wanted})", flush=True)
        if not holds:
            failed.append(what)

    incidents = [case for case in cases() if case.verdict == "faulty"]
    for case in incidents:
        answer = judge(case)
        at, size = place(answer, case.faults)
        top = ", ".join(item.fault for item in answer.candidates[:3])
        mark = "confirmed" if case.confirmed else "plausible"
        print(
            f"      case {case.id} ({mark}): {' or '.join(case.faults)} at {at or '–'}, set of {size or '–'}; {top}"
        )
    confirmed = [case for case in incidents if case.confirmed]
    good = sum(map(right, confirmed))
    three = sum(1 <= place(judge(case), case.faults)[0] <= 3 for case in confirmed)
    bar("right cause first or in a set of two", f"{good} of {len(confirmed)}", "11", good >= 11)
    bar("right cause in the first three", f"{three} of {len(confirmed)}", "all", three == len(confirmed))
    weak = [item for case in confirmed for item in weakened(case)]
    print(f"      the same with one observation or fact less: {sum(map(right, weak))} of {len(weak)}")
    bare = [Case(**(vars(case) | {"facts": {}})) for case in confirmed]
    print(f"      the same without any fact: {sum(map(right, bare))} of {len(bare)}")
    negatives = [case for case in cases() if case.verdict != "faulty"]
    held = [case for case in negatives if (a := judge(case)).verdict == case.verdict and not a.candidates]
    bar("negatives: nothing invented", f"{len(held)} of {len(negatives)}", "all", len(held) == len(negatives))

    runs = shipped_healthy() + [run for folder in options.runs for run in recorded_healthy(folder)]
    allowed = int(0.02 * len(runs))
    for twins in (0, 1):
        found = alarms(runs, twins)
        what = f"healthy embedded runs called faulty, {'with' if twins else 'without'} a twin"
        bar(what, f"{len(found)} of {len(runs)}", f"at most {allowed}", len(found) <= allowed)
        for name, why in found:
            print(f"      {name}: {why}")
    if options.logs:
        rows = other_logs(options.logs)
        for name, verdict, what in rows:
            print(f"      {name}: {verdict} {what}")
        healthy = [
            row
            for row in rows
            if any(word in row[0].lower() for word in ("healthy", "base_fp32", "v0b", "events.out"))
        ]
        wrong = [name for name, verdict, _ in healthy if verdict == "faulty"]
        bar("healthy logs of others called faulty", f"{len(wrong)} of {len(healthy)}", "none", not wrong)
    base, triage = speed()
    bar(
        f"CPU of a triage of {STEPS} steps, in multiples of import numpy",
        f"{triage / base:.1f}",
        f"{SPEED:g}",
        triage <= SPEED * base,
    )
    for cost in costs(options.gb):
        what = f"CPU of reading a {cost.size:.2g} GB console log, {cost.share:.0%} metric lines, in multiples of grep"
        bar(what, f"{cost.ratio:.1f}", f"{BAR:g}", cost.ratio <= BAR)
        bar(
            "MiB that ten times the bytes take more",
            f"{cost.growth:.0f}",
            f"{MEMORY:g}",
            cost.growth <= MEMORY,
        )
    sys.exit(bool(failed))


if __name__ == "__main__":
    library()
    main()
