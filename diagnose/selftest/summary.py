"""From trials to figures: pure counting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diagnose.result import Verdict
from diagnose.selftest.arena import SPINE
from diagnose.selftest.incidents import DEFAULT
from diagnose.selftest.stats import (
    Estimate,
    confusion,
    least_detectable,
    mean_by_fault,
    paired_by_fault,
    share,
)
from diagnose.selftest.trial import Trial

NOTHING = "(nothing ranked)"


@dataclass(frozen=True)
class Figure:
    """One number with its bar.

    Attributes:
        name: What it is.
        estimate: The number.
        bar: The bar in words, "" where there is none.
        holds: Whether the number holds the bar; None without a bar or without data.
    """

    name: str
    estimate: Estimate
    bar: str = ""
    holds: bool | None = None


def at_least(name: str, estimate: Estimate, limit: float) -> Figure:
    """Return a figure that should not be below a limit."""
    return Figure(name, estimate, f"≥ {limit:g}", estimate.value >= limit if estimate.n else None)


def at_most(name: str, estimate: Estimate, limit: float) -> Figure:
    """Return a figure that should not exceed a limit."""
    return Figure(name, estimate, f"≤ {limit:g}", estimate.value <= limit if estimate.n else None)


def by_fault(
    trials: Iterable[Trial], value: Callable[[Trial], float], *, proportion: bool = True
) -> Estimate:
    """Return the mean of a value over incidents with one fault, clustered by it."""
    return mean_by_fault(
        ((item.incident.truth[0], float(value(item))) for item in trials), proportion=proportion
    )


def detectable(trials: Iterable[Trial]) -> list[Trial]:
    """Return those whose incident moved by more than healthy seeds do."""
    return [item for item in trials if item.movement.detectable]


def right_category(trial: Trial, categories: Mapping[str, str]) -> float:
    """Return the share of the answer that lies in the true fault's category."""
    truth = categories[trial.incident.truth[0]]
    named = [categories[fault] for fault in trial.named]
    return sum(item == truth for item in named) / len(named) if named else 0.0


def named_bars(
    trials: Sequence[Trial], categories: Mapping[str, str], largest_set: float = 2.5
) -> list[Figure]:
    """Return the figures on naming the fault, for detectable incidents with one fault."""
    return [
        at_least("the answer holds the truth", by_fault(trials, lambda item: item.holds_truth), 0.9),
        at_most(
            "faults in the answer",
            by_fault(trials, lambda item: len(item.named), proportion=False),
            largest_set,
        ),
        at_least("top-1 (a set counts 1/size)", by_fault(trials, lambda item: item.credit), 0.85),
        at_least("top-3", by_fault(trials, lambda item: item.in_top3), 0.97),
        at_least(
            "category (share of the answer)",
            by_fault(trials, lambda item: right_category(item, categories)),
            0.95,
        ),
    ]


def _first_category(trial: Trial, categories: Mapping[str, str]) -> bool:
    return categories[trial.incident.truth[0]] in trial.categories[:1]


def further(trials: Sequence[Trial], categories: Mapping[str, str]) -> list[Figure]:
    """Return figures without a bar, for detectable incidents with one fault."""
    moved = [item for item in trials if item.compared]
    wrong = [item for item in trials if item.specific and not item.holds_truth]
    return [
        Figure("first in the ranking", by_fault(trials, lambda i: i.ranking[:1] == i.incident.truth)),
        Figure("category of the first", by_fault(trials, lambda i: _first_category(i, categories))),
        Figure("direction agreement", by_fault(moved, lambda item: item.agreed / item.compared)),
        Figure("called no fault", by_fault(trials, lambda item: item.verdict is Verdict.NO_FAULT)),
        Figure("reproduced", by_fault(trials, lambda item: item.specific)),
        Figure("reproduced, and the wrong fault", share(len(wrong), len(trials))),
    ]


def alarms(trials: Sequence[Trial]) -> Figure:
    """Return the healthy logs that were called faulty; the bar is 4 of 200."""
    return at_most("healthy logs called faulty", share(sum(i.alarm for i in trials), len(trials)), 0.02)


def false_specific(trials: Sequence[Trial], name: str = "reproduced although the truth was gone") -> Figure:
    """Return the incidents that were called specific although their fault was taken out; the bar is 4 of 200."""
    return at_most(name, share(sum(item.specific for item in trials), len(trials)), 0.02)


def against(ours: Sequence[Trial], theirs: Sequence[Trial]) -> dict[str, Estimate]:
    """Return proxy − control for top-1 and for holding the truth, on the incidents that both diagnosed."""
    other = {item.incident: item for item in theirs}
    pairs = [(item, other[item.incident]) for item in ours if item.incident in other]
    return {
        "top-1": paired_by_fault((a.incident.truth[0], a.credit, b.credit) for a, b in pairs),
        "holds the truth": paired_by_fault(
            (a.incident.truth[0], float(a.holds_truth), float(b.holds_truth)) for a, b in pairs
        ),
    }


def added_nothing(difference: Estimate) -> bool:
    """Whether the interval of a difference contains 0 (or there is none)."""
    return not (difference.low > 0 or difference.high < 0)


def confusions(trials: Iterable[Trial]) -> dict[str, dict[str, int]]:
    """Return truth → first in the ranking → incidents."""
    return confusion([(i.incident.truth[0], i.ranking[0] if i.ranking else NOTHING) for i in trials])


def strengths(trials: Iterable[Trial]) -> dict[str, float | None]:
    """Return fault → smallest strength from which on every incident from the first step was detectable."""
    seen: dict[str, dict[float, list[bool]]] = {}
    for item in trials:
        if item.incident.from_step == 1:
            rows = seen.setdefault(item.incident.truth[0], {})
            rows.setdefault(item.incident.strength, []).append(item.movement.detectable)
    return {fault: least_detectable(rows) for fault, rows in seen.items()}


def both_visible(double: Sequence[Trial], single: Sequence[Trial]) -> list[Trial]:
    """Return incidents with two faults each of which was detectable in an incident of its own, same strength and step.

    Where one of the two shows nothing by itself, naming the other alone is all that can be asked for.
    """
    seen = {
        (item.incident.truth[0], item.incident.strength, item.incident.from_step)
        for item in single
        if item.movement.detectable and item.incident.recipe == DEFAULT
    }
    return [
        item
        for item in double
        if all(
            (fault, item.incident.strength, item.incident.from_step) in seen for fault in item.incident.truth
        )
    ]


def doubles(trials: Sequence[Trial]) -> list[Figure]:
    """Return the figures on incidents with two faults."""
    n = len(trials)
    both = sum(set(i.incident.truth) <= set(i.together) for i in trials)
    return [
        Figure("more than one cause was named", share(sum(bool(i.together) for i in trials), n)),
        Figure("both true ones were named together", share(both, n)),
        Figure(
            "one of the two comes first",
            share(sum(set(i.ranking[:1]) <= set(i.incident.truth) and bool(i.ranking) for i in trials), n),
        ),
        Figure("called one specific fault", share(sum(i.specific for i in trials), n)),
    ]


def groups(trials: Sequence[Trial], categories: Mapping[str, str]) -> dict[str, list[Trial]]:
    """Return trials by how their incident differs from the replays, and by category."""
    found: dict[str, list[Trial]] = {}
    for item in trials:
        case = item.incident
        found.setdefault(f"recipe: {case.recipe}", []).append(item)
        found.setdefault(f"strength {case.strength:g}", []).append(item)
        found.setdefault(f"from step {case.from_step}", []).append(item)
        found.setdefault(f"category: {categories[case.truth[0]]}", []).append(item)
        seen = "seen" if case.truth[0] in SPINE else "unseen"
        found.setdefault(f"faults {seen} when thresholds were chosen", []).append(item)
    order = {f"recipe: {DEFAULT}": 0}
    return dict(sorted(found.items(), key=lambda pair: (order.get(pair[0], 1), pair[0])))


def figures_json(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """Return figures as JSON-able data."""
    return [
        {"name": item.name, **item.estimate.to_json(), "bar": item.bar or None, "holds": item.holds}
        for item in figures
    ]
