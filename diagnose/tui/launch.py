"""The program behind the screens: the same functions that the command line calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from diagnose.errors import RunError
from diagnose.events import EndEvent, from_line
from diagnose.provenance import outdated
from diagnose.report.text import literal, number
from diagnose.report.words import VERDICT_SYMBOL, VERDICT_WORD
from diagnose.result import Verdict
from diagnose.store import RunFolder, list_runs, read_json, write_json
from diagnose.tui import memory
from diagnose.tui.plan import Choice, Cost, Incident, Launched, Order, PastRun, Plan, PlaybookEntry, Seen

if TYPE_CHECKING:
    from taxonomy.assessment import Triage
    from taxonomy.registry import FaultCard, Library

PAST_RUNS = 30
"""Run folders listed on the first screen, the newest."""


class SessionBackend:
    """The real one: the same functions as `diagnose run`, so that the two never differ in what they do.

    numpy, pydantic and the readers come in with the first playbook that is read, not with the first screen.
    """

    def playbooks(self) -> tuple[PlaybookEntry, ...]:
        """Return the shipped playbooks, then the YAML files of the working folder that look like one."""
        from diagnose.playbook import shipped

        here = sorted(path for path in Path.cwd().glob("*.y*ml") if path.suffix in (".yaml", ".yml"))
        known = shipped()
        entries = [PlaybookEntry(name, path, _symptom_of(path)) for name, path in sorted(known.items())]
        entries += [
            PlaybookEntry(path.name, path, symptom)
            for path in here
            if path.resolve() not in {known_path.resolve() for known_path in known.values()}
            and (symptom := _symptom_of(path))
        ]
        return tuple(entries)

    def past_runs(self) -> tuple[PastRun, ...]:
        """Return the newest run folders with how they stand."""
        return tuple(_past_run(folder) for folder in list_runs()[:PAST_RUNS])

    def recent_logs(self) -> tuple[Path, ...]:
        """Return the logs opened lately."""
        return memory.recent_logs()

    def keep_pasted(self, text: str) -> Path:
        """Write a pasted piece of a log into the state folder."""
        return memory.keep_pasted(text)

    def playbook_for(self, incident: Incident) -> Path:
        """Write a playbook with what is known of a log; the symptom is left to the log itself."""
        return memory.write_playbook(incident)

    def plan(self, path: Path, symptom: str | None = None) -> Plan:
        """Read a playbook and its logs; see `diagnose.prepare.prepare` for what can go wrong."""
        from diagnose.pace import step_pace_s
        from diagnose.prepare import Overrides, prepare
        from diagnose.report.evidence import Evidence
        from diagnose.triage import assess
        from diagnose.triage.advice import advise
        from taxonomy.registry import library

        prepared = prepare(path, Overrides(symptom=symptom))
        session, cards = prepared.session, library()
        answer = assess(prepared.faulty, prepared.healthy, prepared.facts, cards)
        advice = advise(answer, cards, min(int(run.steps_N[0]) for run in prepared.faulty))
        steps = max((int(run.steps_N[-1]) for run in prepared.faulty if len(run.steps_N)), default=0)
        twins = len(prepared.healthy)
        size = f", {session.build.experts} experts by {session.build.strategy}" if session.build else ""
        return Plan(
            path=prepared.path,
            name=session.name,
            symptom=session.symptom,
            choices=_choices(
                {planned.fault: planned.strength for planned in session.candidates},
                session.not_tried,
                session.symptom,
                session.engine,
                cards,
                {item.fault: item.reasons for item in answer.candidates},
                {item.fault: item.ruled_out for item in answer.ruled_out},
                overruled=symptom is not None,
            ),
            seeds=len(session.seeds),
            steps=session.recipe.steps,
            facts=(
                f"incident of {steps} steps, {twins or 'no'} healthy twin{'' if twins == 1 else 's'}; "
                f"proxy from {session.source} {session.checkpoint}{size}; engine {session.engine}",
                *prepared.warnings,
            ),
            commands=prepared.commands,
            seen=_seen(answer),
            ruled_out=tuple((cards[item.fault].title, item.ruled_out) for item in answer.ruled_out),
            advice=(advice.keep, advice.act) if answer.verdict == "faulty" else (),
            look=advice.look if answer.verdict == "faulty" else "",
            budget_s=session.budget_s,
            race=session.race,
            workers=session.workers,
            step_s=step_pace_s(session),
            evidence=Evidence(original_healthy=prepared.healthy, original_faulty=prepared.faulty),
        )

    def start(self, plan: Plan, order: Order) -> Launched:
        """Make a run folder and start its runner."""
        from diagnose.prepare import Overrides, open_run, prepare
        from diagnose.runner import start

        symptom = plan.symptom if plan.symptom != "auto" else None
        overrides = Overrides(
            symptom=symptom,
            faults=order.faults,
            seeds=order.seeds,
            strengths=order.strengths,
            budget_s=order.budget_s,
        )
        folder = open_run(prepare(plan.path, overrides))
        return Launched(folder, start(folder))

    def resume(self, folder: RunFolder) -> Launched:
        """Start a runner, or join the one that somebody else has started meanwhile."""
        from diagnose.runner import start

        return Launched(folder) if folder.is_alive() else Launched(folder, start(folder))

    def pause(self, folder: RunFolder) -> bool:
        """Make or remove the file that the runner heeds."""
        if folder.pause.exists():
            folder.pause.unlink(missing_ok=True)
            return False
        folder.pause.touch()
        return True

    def cost(self, folder: RunFolder, wish: str) -> Cost:
        """Ask the very planner that the runner will ask, and take the pace from the replays that are done."""
        from diagnose import probes, remedies
        from diagnose.jobs import read_outcome
        from diagnose.report.json import from_json
        from diagnose.session import load
        from taxonomy.registry import library

        session, cards = load(folder), library()
        if session.engine != "local":
            raise RunError("probes and remedies are run by the local engine alone")
        score = from_json(read_json(folder.result) or {}).score
        planned = (probes if wish == "probe" else remedies).plan(session, folder, score, cards)
        left = [run for run in planned if read_outcome(folder.extra / run.id) is None]
        done = [found for home in folder.runs.glob("*") if (found := read_outcome(home)) and found.steps]
        pace = sorted(found.wall_s / found.steps for found in done)
        steps = sum(run.spec.recipe.steps for run in left)
        workers = max(1, min(session.workers, len(left)))
        if wish == "probe":
            what = tuple(probe.what for probe in probes.PROBES)
        else:
            patient = remedies.patient(session, score, cards)
            what = tuple(item.what for item in remedies.remedies(session, patient, cards)) if patient else ()
        took = pace[len(pace) // 2] * steps / workers if pace else None
        return Cost(what if planned else (), len(left), steps, took)

    def add_time(self, folder: RunFolder, seconds: float) -> Launched:
        """Write the time down as `diagnose run --resume … --budget` does."""
        from diagnose.run import add_time

        add_time(folder, seconds)
        return self.resume(folder)

    def wish(self, folder: RunFolder, wish: str) -> Launched:
        """Write down the wish where the runner looks for it, as the command line does."""
        write_json(folder.wishes, {wish: True})
        return self.resume(folder)

    def retry(self, folder: RunFolder, run: str) -> Launched:
        """Remove the replay's outcome: a run without one is not finished."""
        (folder.runs / run / "outcome.json").unlink(missing_ok=True)
        return self.resume(folder)

    def stop(self, folder: RunFolder) -> bool:
        """End the runner."""
        return folder.stop()


def _seen(answer: Triage) -> dict[str, Seen]:
    """Return the symptoms that triage found, each with the metric that shows it.

    Triage names the earliest; where the metric that a symptom is named after shows it too, that one is told: nobody
    should read "KL to the reference climbs" and be shown another metric.
    """
    from taxonomy.assessment import symptom_of
    from taxonomy.observations import QUANTITY
    from taxonomy.symptoms import SYMPTOM_BY_ID

    def nearness(metric: str, named: str) -> int:
        same = QUANTITY.get(metric, (metric, 1))[0] == QUANTITY.get(named, (named, 1))[0]
        return 0 if metric == named else 1 if same else 2

    found = {}
    for symptom in answer.symptoms:
        named = SYMPTOM_BY_ID[symptom.id].metric
        alarms = [item for item in answer.observations if item.alarm and symptom_of(item) == symptom.id]
        own = min(alarms, key=lambda item: nearness(item.metric, named), default=None)
        if own is None or nearness(own.metric, named) >= nearness(symptom.metric, named):
            found[symptom.id] = Seen(symptom.evidence, symptom.onset, symptom.metric)
        else:
            found[symptom.id] = Seen(own.evidence, own.interval, own.metric)
    return found


def _symptom_of(path: Path) -> str:
    """Return the symptom that a file names if it looks like a playbook, "" otherwise; it is not validated here."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(65536).splitlines()
    except OSError:
        return ""
    if not any(line.startswith("version:") for line in lines):
        return ""
    found = [
        line.partition(":")[2].partition("#")[0].strip() for line in lines if line.startswith("symptom:")
    ]
    return literal(found[0], 60) if found else ""


def _past_run(folder: RunFolder) -> PastRun:
    session = read_json(folder.session)
    name = str(session.get("name", "")) if isinstance(session, dict) else ""
    return PastRun(folder.path, name, _state(folder))


def _state(folder: RunFolder) -> str:
    """Return how a run stands, from its lock and the last line of its event file."""
    if folder.is_alive():
        return "▶ running"
    try:
        with folder.events.open("rb") as file:
            file.seek(max(0, folder.events.stat().st_size - 4096))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    end = from_line(lines[-1]) if lines else None
    found = read_json(folder.result)
    result = found if isinstance(found, dict) else {}
    said = result.get("verdict")
    verdict = f"{VERDICT_SYMBOL[Verdict(said)]} {VERDICT_WORD[Verdict(said)]}" if said in set(Verdict) else ""
    if verdict and outdated(str(result.get("scoring", ""))):
        verdict += " (by another version)"
    if not isinstance(end, EndEvent) or end.status == "interrupted":
        return f"↻ resumable, so far: {verdict}" if verdict else "↻ resumable"
    if end.status != "completed":
        return "✘ failed, ↻ resumable"
    return f"finished: {verdict}" if verdict else "finished"


def _choices(
    planned: dict[str, float],
    refused: Mapping[str, str],
    symptom: str,
    engine: str,
    cards: Library,
    reasons: Mapping[str, tuple[str, ...]],
    ruled_out: Mapping[str, str],
    *,
    overruled: bool,
) -> tuple[Choice, ...]:
    """Return what can be marked: the playbook's candidates and every other card with the symptom.

    Those that the logs speak for (`reasons`, the likeliest first) lead. Marked from the start are the playbook's; where
    the engineer overruled its symptom, those that have the new one.
    """
    from proxy.engines.base import refusal

    with_symptom = [fault for fault, card in cards.cards.items() if symptom in card.symptoms]
    order = dict.fromkeys([*with_symptom, *planned] if overruled else [*planned, *with_symptom])
    marked = set(with_symptom) if overruled else set(planned)
    place = {fault: index for index, fault in enumerate(reasons)}
    faults = sorted(
        [*order, *(fault for fault in refused if fault not in order)],
        key=lambda fault: place.get(fault, len(place)),
    )
    return tuple(
        Choice(
            fault=fault,
            title=cards[fault].title,
            category=cards[fault].category,
            why=f"The log: {'; '.join(reasons[fault][:2])}." if reasons.get(fault) else "",
            metric=_discriminating(cards[fault], set(faults)),
            strength=planned.get(fault, 1.0),
            selected=fault in marked,
            refused=refused.get(fault) or refusal(engine, cards[fault]),
            mechanism=_mechanism(cards[fault]),
            ruled_out=ruled_out.get(fault, ""),
        )
        for fault in faults
    )


def _mechanism(card: FaultCard) -> str:
    """Return what a fault is, with the values that its strength stands for."""
    values = card.values()
    strength = ", ".join(f"{p.name} = {number(values[p.name])} {p.unit}".strip() for p in card.parameters)
    return f"{card.mechanism} ({strength})" if strength else card.mechanism


def _discriminating(card: FaultCard, among: set[str]) -> str:
    """Return the metric that tells a fault from a look-alike that is a candidate too, else its first primary one."""
    told = [rival.metric for rival in card.rivals if rival.fault in among] or list(card.primary)
    return told[0] if told else ""
