"""`diagnose selftest`: record, diagnose, count, report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diagnose.bank import Bank
from diagnose.console import Terminal
from diagnose.jobs import cores
from diagnose.selftest import summary
from diagnose.selftest.arena import (
    CONTROLS,
    FULL,
    QUICK,
    SPINE,
    SPINE_CONTROLS,
    Arena,
    open_arena,
)
from diagnose.selftest.fill import fill, plan
from diagnose.selftest.incidents import DEFAULT, Incident
from diagnose.selftest.report import Section, figures, interval, markdown, number, show
from diagnose.selftest.summary import Figure
from diagnose.selftest.trial import COMPARED, COMPARED_SPINE, LOG_ONLY, Task, Trial, trials
from diagnose.store import write_text
from taxonomy.registry import library

SCHEMA = 1
LEFT_OUT = ("numerics", "optimization")
"""Categories whose faults, those of the spine apart, were left out of every choice."""

CHOSEN_ON = (
    f"Thresholds were chosen on simulated curves and on incidents of the spine's {len(SPINE)} faults (other seeds). "
    "Three rules were chosen with incidents of the framework and routing faults in sight: that a candidate which "
    "explains next to nothing is nobody's rival, that exact metrics deny a cause, and how much a second fault must "
    "explain. The other numerics and optimization faults were left out of every choice."
)


@dataclass(frozen=True)
class Order:
    """What was asked for.

    Attributes:
        runs: Folder of the bank.
        quick: A smoke test of a few short runs in place of the whole test.
        workers: Processes, None for the number of cores.
        limit_s: Seconds after which no further run is started, 0 for none; what is there is scored.
        plan: Say how many runs there are, run nothing.
        markdown: File for the report, None for none.
    """

    runs: Path
    quick: bool = False
    workers: int | None = None
    limit_s: float = 0.0
    plan: bool = False
    markdown: Path | None = None

    @property
    def command(self) -> str:
        """The command as a reader would give it."""
        return "diagnose selftest" + (" --quick" if self.quick else "")


def default_bank() -> Path:
    """Return where the runs of a self-test are kept when nobody says where."""
    from platformdirs import user_cache_path

    return user_cache_path("rl-diagnose") / "bank"


def command(order: Order, terminal: Terminal) -> int:
    """Carry out `diagnose selftest`; return its exit code: 1 where a bar of the whole test does not hold."""
    begin = time.monotonic()
    bank = Bank(order.runs / "quick" if order.quick else order.runs, order.workers)
    arena = open_arena(bank, library(), QUICK if order.quick else FULL)
    parts = arena.parts()
    planned = plan(bank, arena, parts, order.workers)
    if order.plan:
        show([planned], terminal)
        return 0
    for row in planned.rows[-1:]:
        terminal.say(f"{row[1]} runs, {row[2]} missing, about {row[3]} min")
    filled = fill(bank, arena, parts, order.limit_s, terminal)
    left_out = sum(item.left_out + len(item.died) for item in filled)
    if left_out:
        terminal.warn(f"{left_out} runs are missing: the test is smaller than planned")
    terminal.say("diagnosing")
    found = diagnose(bank, arena, order.workers or cores())
    categories = {card.id: card.category for card in arena.library.cards.values()}
    keys = {bank.key(run, arena.by_path[run.model]) for runs in parts.values() for run in runs}
    notes = Notes(
        runs=len(keys),
        left_out=left_out,
        wall_s=time.monotonic() - begin,
        cpu_s=sum(outcome.cpu_s for key in keys if (outcome := bank.outcome(key))),
        refused=refused(bank, arena),
    )
    sections = report(found, categories, notes)
    if order.markdown:
        write_text(order.markdown, markdown("The self-test", order.command, sections))
        terminal.say(f"wrote {order.markdown}")
    if terminal.json_only:
        terminal.json(contract(found, categories, notes))
    else:
        show(sections, terminal)
    bars = [item for item in main_figures(found, categories) if item.holds is False]
    return 1 if bars and not order.quick else 0


def refused(bank: Bank, arena: Arena) -> tuple[str, ...]:
    """Return the faults that can't be put into this original."""
    found: dict[str, list[bool]] = {}
    for item in arena.single:
        run = arena.run_of(item)
        outcome = bank.outcome(bank.key(run, arena.by_path[run.model]))
        found.setdefault(item.truth[0], []).append(outcome is not None and outcome.status != "completed")
    return tuple(fault for fault, failed in found.items() if all(failed))


@dataclass(frozen=True)
class Notes:
    """What a report says beside its figures.

    Attributes:
        runs: Runs of the whole test.
        left_out: Those that are missing.
        wall_s: Seconds of this call.
        cpu_s: CPU seconds of all runs, those of earlier calls too.
        refused: Faults that can't be put into this original.
    """

    runs: int
    left_out: int
    wall_s: float
    cpu_s: float
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """All diagnoses, by what they are for.

    Attributes:
        single: One fault, diagnosed with the proxy.
        double: Two faults.
        healthy: None.
        open_set: One fault, its card and replays taken out.
        controls: By control, one fault from the first step: (the proxy with as little as a control has, the control).
    """

    single: Sequence[Trial]
    double: Sequence[Trial]
    healthy: Sequence[Trial]
    open_set: Sequence[Trial]
    controls: Mapping[str, tuple[Sequence[Trial], Sequence[Trial]]]

    @property
    def detectable(self) -> list[Trial]:
        """Return the diagnoses of incidents that moved."""
        return summary.detectable(self.single)


def diagnose(bank: Bank, arena: Arena, workers: int) -> Found:
    """Diagnose everything that the bank holds."""
    cases = [*arena.single, *arena.changed]
    groups: dict[str, list[Task]] = {
        "single": [Task(item) for item in cases],
        "double": [Task(item) for item in arena.double],
        "healthy": [Task(item) for item in arena.healthy],
        "open_set": [Task(item, without=item.truth) for item in arena.single],
        **compared_tasks(arena, cases),
    }
    by_task = {
        item.task: item
        for item in trials(bank, arena, [task for tasks in groups.values() for task in tasks], workers)
    }
    got = {name: [by_task[task] for task in tasks if task in by_task] for name, tasks in groups.items()}
    return Found(
        got.pop("single"), got.pop("double"), got.pop("healthy"), got.pop("open_set"), pairs(got, arena)
    )


def compared_tasks(arena: Arena, cases: Sequence[Incident]) -> dict[str, list[Task]]:
    """Return the diagnoses that a comparison of the proxy with its controls takes, by line-up."""
    early = [item for item in cases if item.from_step == 1]
    spine = [item for item in early if item.truth[0] in SPINE]
    tasks = {COMPARED: early, COMPARED_SPINE: spine, LOG_ONLY: early}
    tasks |= {name: spine if name in SPINE_CONTROLS else early for name in arena.scale.controls}
    return {name: [Task(item, name) for item in items] for name, items in tasks.items()}


def pairs(
    got: Mapping[str, Sequence[Trial]], arena: Arena
) -> dict[str, tuple[Sequence[Trial], Sequence[Trial]]]:
    """Return (the proxy's diagnoses, the control's) by control, from diagnoses by line-up."""
    names = [*arena.scale.controls, LOG_ONLY]
    return {name: (got[COMPARED_SPINE if name in SPINE_CONTROLS else COMPARED], got[name]) for name in names}


def main_figures(found: Found, categories: Mapping[str, str]) -> list[Figure]:
    """Return the figures that have a bar."""
    return [
        *summary.named_bars(found.detectable, categories),
        summary.alarms([item for item in found.healthy if item.incident.recipe == DEFAULT]),
        summary.false_specific(summary.detectable(found.open_set)),
    ]


def report(found: Found, categories: Mapping[str, str], notes: Notes) -> list[Section]:
    """Return the report."""
    seen = found.detectable
    faults = sorted({item.incident.truth[0] for item in found.single})
    gone = f" Not to be put into this original: {', '.join(notes.refused)}." if notes.refused else ""
    missing = f" {notes.left_out} planned runs are missing." if notes.left_out else ""
    head = (
        f"{len(faults)} faults, each hidden in turn in the embedded original; {len(found.single)} incidents with one "
        f"fault, of which {len(seen)} moved more than healthy seeds of their recipe do (decided before any "
        f"diagnosis); {len(found.double)} with two, {len(found.healthy)} with none. {notes.runs} runs of "
        f"{notes.cpu_s / 3600:.1f} hours of processor time.{gone}{missing}",
        "Seeds are never those of replays; the middle injection step is 24 where replays have 21; the changed recipes "
        "are lr 1.2e-4, group_size 6, temperature 1.0, kl_coef 0.05, and replays never use them. Replays: strengths "
        "½, 1, 2 from step 1 and 1 from step 21, two seeds; the banked step nearest to the product's own is taken.",
    )
    sections = [
        Section("What was tested", head),
        figures(
            "The bars", main_figures(found, categories), "Detectable incidents, all faults as candidates."
        ),
        figures("Beside the bars", [*summary.further(seen, categories), *_changed_alarms(found.healthy)]),
        _groups(seen, categories),
        *pair_sections(found.double, found.single),
        controls("Controls", found.controls),
        _by_fault(found.single, categories),
        _confusions(seen),
        _false_specific(found.open_set),
    ]
    return [item for item in sections if item.text or item.rows]


def _changed_alarms(healthy: Sequence[Trial]) -> list[Figure]:
    """Return the false alarms under changed recipes, whose noise is known from 20 seeds each."""
    changed = [item for item in healthy if item.incident.recipe != DEFAULT]
    if not changed:
        return []
    return [
        replace(
            summary.alarms(changed), name="healthy logs of changed recipes called faulty", bar="", holds=None
        )
    ]


def pair_sections(double: Sequence[Trial], single: Sequence[Trial]) -> list[Section]:
    """Return the sections on incidents with two faults: all, and those in which both show something."""
    seen = summary.detectable(double)
    visible = summary.both_visible(seen, single)
    if not seen:
        return []
    return [
        figures(
            "Two faults at once",
            summary.doubles(seen),
            f"{len(seen)} detectable incidents with two faults of different categories, both in the library.",
        ),
        figures(
            "Two faults at once, each detectable by itself",
            summary.doubles(visible),
            "Of these, the incidents in which neither fault is one that shows nothing alone.",
        ),
    ]


def controls(title: str, found: Mapping[str, tuple[Sequence[Trial], Sequence[Trial]]]) -> Section:
    """Return the section that holds the proxy against its controls."""
    rows, said = [], []
    for name, (ours, theirs) in found.items():
        for what, e in summary.against(summary.detectable(ours), theirs).items():
            if not e.n:
                continue
            cells = (f"{e.value:+.3f}", interval(e, signed=True), f"{e.n} ({e.faults} faults)")
            rows.append((name, what, *cells))
            if summary.added_nothing(e):
                said.append(f"{what}: this proxy added nothing over {name} that could be shown.")
    text = (
        "Difference proxy − control on the same detectable incidents from step 1, each side with one replay seed at "
        "the default strength and the same ten healthy seeds; intervals from resampling whole faults.",
        *(f"{name}: {what}." for name, what in CONTROLS.items() if name in found),
        f"{' and '.join(SPINE_CONTROLS)}: on the {len(SPINE)} faults of the spine, the only candidates there.",
        f"{LOG_ONLY}: the ranking of `diagnose triage`, without any run.",
        *said,
    )
    header = ("control", "figure", "difference", "95 % interval", "n")
    return Section(title, text if rows else (), header, tuple(rows))


def _groups(seen: Sequence[Trial], categories: Mapping[str, str]) -> Section:
    rows = []
    for name, items in summary.groups(seen, categories).items():
        values = [figure.estimate.value for figure in summary.named_bars(items, categories)]
        rows.append((name, str(len(items)), *(number(value) for value in values)))
    header = ("incidents", "n", "holds truth", "set size", "top-1", "top-3", "category")
    return Section("By kind of incident", (CHOSEN_ON,), header, tuple(rows))


def _by_fault(single: Sequence[Trial], categories: Mapping[str, str]) -> Section:
    least = summary.strengths(single)
    rows = []
    for fault, strength in sorted(least.items(), key=lambda pair: (categories[pair[0]], pair[0])):
        items = [item for item in single if item.incident.truth[0] == fault]
        seen = summary.detectable(items)
        values = [figure.estimate.value for figure in summary.named_bars(seen, categories)]
        cells = [number(value, 2) for value in values] if seen else ["–"] * 5
        least_text = "–" if strength is None else f"{strength:g}"
        rows.append((fault, categories[fault], f"{len(seen)}/{len(items)}", least_text, *cells))
    text = "Least strength: the smallest from which on every incident from step 1 was detectable (– : none)."
    header = (
        "fault",
        "category",
        "detectable",
        "least strength",
        "holds truth",
        "set size",
        "top-1",
        "top-3",
        "cat.",
    )
    return Section("By fault", (text,), header, tuple(rows))


def _confusions(seen: Sequence[Trial]) -> Section:
    rows = []
    for truth, named in summary.confusions(seen).items():
        right = named.get(truth, 0)
        others = sorted(((n, fault) for fault, n in named.items() if fault != truth), reverse=True)
        if others:
            words = ", ".join(f"{fault} {n}" for n, fault in others)
            rows.append((truth, f"{right}/{sum(named.values())}", words))
    text = "First in the ranking, for faults that did not always come first; the whole matrix is in the JSON."
    return Section("Confusions", (text,), ("truth", "first", "others that came first"), tuple(rows))


def _false_specific(open_set: Sequence[Trial]) -> Section:
    wrong = [item for item in open_set if item.specific]
    rows = tuple((item.incident.id, item.named[0]) for item in wrong)
    text = "The true fault's card and replays were taken out, and the answer was still called specific:"
    return Section("False specifics", (text,) if rows else (), ("incident", "named"), rows)


def contract(found: Found, categories: Mapping[str, str], notes: Notes) -> dict[str, Any]:
    """Return the public JSON."""
    seen = found.detectable
    bars = {item.name: item for item in main_figures(found, categories)}
    beside = {item.name: item for item in summary.further(seen, categories)}
    return {
        "schema": SCHEMA,
        "faults": sorted({item.incident.truth[0] for item in found.single}),
        "runs": notes.runs,
        "left_out": notes.left_out,
        "refused": list(notes.refused),
        "wall_s": notes.wall_s,
        "cpu_s": notes.cpu_s,
        "top1": bars["top-1 (a set counts 1/size)"].estimate.to_json(),
        "top3": bars["top-3"].estimate.to_json(),
        "category": bars["category (share of the answer)"].estimate.to_json(),
        "set_holds_truth": bars["the answer holds the truth"].estimate.to_json(),
        "set_size": bars["faults in the answer"].estimate.to_json(),
        "direction_agreement": beside["direction agreement"].estimate.to_json(),
        "false_alarms": bars["healthy logs called faulty"].estimate.to_json(),
        "false_specific": bars["reproduced although the truth was gone"].estimate.to_json(),
        "figures": summary.figures_json([*bars.values(), *beside.values()]),
        "two_faults": summary.figures_json(summary.doubles(found.double)),
        "undetectable": sorted(item.incident.id for item in found.single if not item.movement.detectable),
        "least_strength": summary.strengths(found.single),
        "confusion": summary.confusions(seen),
        "controls": {
            name: {what: e.to_json() for what, e in summary.against(summary.detectable(ours), theirs).items()}
            for name, (ours, theirs) in found.controls.items()
        },
    }
