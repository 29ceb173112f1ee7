"""The parts of the study that rest on recorded incidents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from diagnose.bank import Bank
from diagnose.selftest import summary
from diagnose.selftest.arena import SPINE, Arena
from diagnose.selftest.command import CHOSEN_ON, LEFT_OUT, compared_tasks, pair_sections, pairs
from diagnose.selftest.command import controls as controls_section
from diagnose.selftest.report import Section, figures, number
from diagnose.selftest.summary import Figure
from diagnose.selftest.trial import Task, Trial, trials

WRONG = ("incident", "named instead", "movement (noise units)")


@dataclass
class Study:
    """What the parts of one call share: the bank, and diagnoses that are made once."""

    bank: Bank
    arena: Arena | None
    workers: int
    quick: bool = False
    _known: dict[Task, Trial] = field(default_factory=dict)

    def diagnose(self, tasks: Sequence[Task]) -> list[Trial]:
        """Return the diagnoses that the bank allows, in the order of the tasks."""
        assert self.arena is not None
        new = [task for task in tasks if task not in self._known]
        for item in trials(self.bank, self.arena, new, self.workers):
            self._known[item.task] = item
        return [self._known[task] for task in tasks if task in self._known]


def healthy(study: Study) -> list[Section]:
    """Healthy logs as incidents, against twins, with every candidate's replays at hand."""
    assert study.arena is not None
    found = study.diagnose([Task(item) for item in study.arena.healthy])
    wrong = [(item.incident.id, item.verdict.value, ", ".join(item.named)) for item in found if item.alarm]
    return [
        figures(
            "Healthy incidents",
            [summary.alarms(found)],
            f"{len(found)} healthy seeds of the original that nothing else has seen, each with two healthy twins, "
            f"scored against the replays of {len(study.arena.faults)} faults.",
        ),
        Section("Healthy logs called faulty", (), ("incident", "verdict", "named"), tuple(wrong)),
    ][: 2 if wrong else 1]


def open_set(study: Study) -> list[Section]:
    """Incidents whose fault is taken out of the library, near twins and pairs of faults among them."""
    arena = study.arena
    assert arena is not None
    found = study.diagnose([Task(item, without=item.truth) for item in arena.single])
    double = study.diagnose([Task(item) for item in arena.double])
    pairs_gone = study.diagnose([Task(item, without=item.truth) for item in arena.double])
    here = {card.id for card in arena.faults}
    twins = [
        item
        for item in found
        if here.intersection(rival.fault for rival in arena.library[item.incident.truth[0]].rivals)
    ]
    unseen = [item for item in found if item.incident.truth[0] not in SPINE]
    rows = [
        summary.false_specific(found),
        summary.false_specific(
            summary.detectable(found), "the same, incidents that moved more than healthy seeds"
        ),
        summary.false_specific(
            unseen, "the same, faults that were not looked at while thresholds were chosen"
        ),
        summary.false_specific(twins, "the same, faults with a look-alike that stays in the library"),
        summary.false_specific(pairs_gone, "two faults at once, both taken out"),
    ]
    wrong = [
        (item.incident.id, item.named[0], number(item.movement.largest, 1)) for item in found if item.specific
    ]
    return [
        figures(
            "Open set",
            rows,
            f"{len(found)} incidents, {len(here)} faults at half, once and twice the default strength from the first "
            "step and once in the middle; the true fault's card and replays are taken out. No other card is, though "
            "some share a mechanism with it at another place (the table below names what was taken for what).",
        ),
        *([Section("False specifics", (), WRONG, tuple(wrong))] if wrong else []),
        *pair_sections(double, study.diagnose([Task(item) for item in arena.single])),
    ]


def spine(study: Study) -> list[Section]:
    """The faults of the spine, with the whole library as candidates."""
    assert study.arena is not None
    found = study.diagnose([Task(item) for item in study.arena.single])
    categories = {card.id: card.category for card in study.arena.faults}
    seen = summary.detectable(found)
    own = [item for item in seen if item.incident.truth[0] in SPINE]
    others = [item for item in seen if item.incident.truth[0] not in SPINE]

    def bars(items: Sequence[Trial]) -> list[Figure]:
        truth, size, top1 = summary.named_bars(items, categories, largest_set=2.0)[:3]
        return [truth, size, replace(top1, bar="", holds=None), *summary.further(items, categories)]

    text = f"Candidates are all {len(study.arena.faults)} faults. Detectable incidents only. {CHOSEN_ON}"
    untouched = [item for item in others if categories[item.incident.truth[0]] in LEFT_OUT]
    return [
        figures(f"The {len(SPINE)} faults of the spine", bars(own), text),
        *([figures("All other faults", bars(others))] if others else []),
        *([figures("Of these, the families left out of every choice", bars(untouched))] if untouched else []),
    ]


def controls(study: Study) -> list[Section]:
    """The same incidents with other proxies, and with none."""
    arena = study.arena
    assert arena is not None
    groups = compared_tasks(arena, arena.single)
    got = {name: study.diagnose(tasks) for name, tasks in groups.items()}
    every = pairs(got, arena)
    spine_only = {
        name: ([item for item in ours if item.incident.truth[0] in SPINE], theirs)
        for name, (ours, theirs) in every.items()
    }
    return [
        controls_section("Controls, all faults", every),
        controls_section("Controls, the faults of the spine", spine_only),
    ]
