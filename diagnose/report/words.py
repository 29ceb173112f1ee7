"""What a result says in plain words: shared by every report and by the TUI, so that they never disagree."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from diagnose.report.text import literal, number, percent
from diagnose.result import AnomalyType, Candidate, Direction, MetricResult, ProbeResult, Result, Verdict
from taxonomy.metrics import METRIC_BY_NAME

VERDICT_SYMBOL = {
    Verdict.REPRODUCED: "✔",
    Verdict.REPRODUCED_NOT_SPECIFIC: "≈",
    Verdict.PARTLY: "~",
    Verdict.NOT_REPRODUCED: "✘",
    Verdict.INCONCLUSIVE: "?",
    Verdict.INJECTION_FAILED: "!",
    Verdict.NO_FAULT: "○",
}
VERDICT_WORD = {
    Verdict.REPRODUCED: "reproduced",
    Verdict.REPRODUCED_NOT_SPECIFIC: "not specific",
    Verdict.PARTLY: "only partly",
    Verdict.NOT_REPRODUCED: "not reproduced",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.INJECTION_FAILED: "not injected",
    Verdict.NO_FAULT: "no fault",
}
VERDICT_TITLE = {
    Verdict.REPRODUCED: "Reproduced and specific",
    Verdict.REPRODUCED_NOT_SPECIFIC: "Reproduced, not specific",
    Verdict.PARTLY: "Only partly reproduced",
    Verdict.NOT_REPRODUCED: "Not reproduced",
    Verdict.INCONCLUSIVE: "Inconclusive",
    Verdict.INJECTION_FAILED: "Injection failed",
    Verdict.NO_FAULT: "No fault",
}
VERDICT_STYLE = {
    Verdict.REPRODUCED: "green",
    Verdict.REPRODUCED_NOT_SPECIFIC: "yellow",
    Verdict.PARTLY: "yellow",
    Verdict.NOT_REPRODUCED: "red",
    Verdict.INCONCLUSIVE: "magenta",
    Verdict.INJECTION_FAILED: "magenta",
    Verdict.NO_FAULT: "green",
}
DIRECTION_WORD = {
    Direction.UP: "▲ up",
    Direction.DOWN: "▼ down",
    Direction.NONE: "= same",
    Direction.UNDETERMINED: "? unclear",
}
NOT_REACHED = "not reached"
"""How the reason begins of a candidate that was to be replayed and was not."""
_VERB = {
    Direction.UP: "rises",
    Direction.DOWN: "falls",
    Direction.NONE: "does not move",
    Direction.UNDETERMINED: "does not clearly move",
}
_MOVED = (Direction.UP, Direction.DOWN)


def metric_title(name: str) -> str:
    """Return the short human name of a canonical metric, the name itself where it is not ours."""
    metric = METRIC_BY_NAME.get(name)
    return metric.title if metric else literal(name, 60)


def best(result: Result) -> Candidate | None:
    """Return the candidate that the verdict is about: the first that shares the verdict, or the first."""
    ranking = result.score.ranking
    same = [candidate for candidate in ranking if candidate.verdict == result.score.verdict]
    return next(iter(same or ranking), None)


def titles(result: Result, faults: tuple[str, ...]) -> str:
    """Return the titles of one or more candidates as a list in words."""
    known = {candidate.fault: candidate.title for candidate in result.score.ranking}
    names = [literal(known.get(fault, fault), 80) for fault in faults]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def headline(result: Result) -> str:
    """Return the one sentence that an engineer should read first."""
    first = best(result)
    title = literal(first.title, 80) if first else ""
    sentence = {
        Verdict.REPRODUCED: f"{title} reproduces the incident, and no other candidate does.",
        Verdict.REPRODUCED_NOT_SPECIFIC: f"{title} reproduces the incident, but {_doubt(result, first)}.",
        Verdict.PARTLY: f"{title} comes nearest but reproduces only a part of the incident: a lead, not "
        "yet a cause.",
        Verdict.NOT_REPRODUCED: f"None of the {len(result.score.ranking)} candidates reproduces the "
        "incident: its cause is probably not among them.",
        Verdict.INCONCLUSIVE: "The evidence does not allow an answer.",
        Verdict.INJECTION_FAILED: "The faults cannot be shown to have taken place in the proxy, so their "
        "replays say nothing.",
        Verdict.NO_FAULT: "The incident log stays within its healthy range: no fault to explain.",
    }[result.score.verdict]
    if result.score.together:
        sentence = (
            f"More than one cause fits together: {titles(result, result.score.together)} explain the incident "
            "clearly better than any of them alone."
        )
    if result.status == "completed":
        return sentence
    return f"The experiment was not completed ({literal(result.status, 30)}). On what there is: {sentence}"


DOUBT = 120
"""Most characters of a doubt in the headline: it may name twenty faults, which stand below."""


def _doubt(result: Result, first: Candidate | None) -> str:
    """Return why a reproduced fault is not specific: its rivals, or that it was not shown to be the only one."""
    if first is not None and first.rivals:
        return f"this evidence cannot tell it from {titles(result, first.rivals)}"
    if first is not None and first.doubts:
        told = "; ".join(literal(doubt, DOUBT) for doubt in first.doubts[:2])
        return f"not as the only cause: {told}".removesuffix(".")
    return "is not shown to be the only fault that does"


def why(result: Result) -> tuple[str, ...]:
    """Return the reasons for the verdict, and what the first candidate did otherwise than the incident."""
    return (*map(literal, result.score.reasons), *against(result))


MOST_AGAINST = 2
"""Metrics that are named as speaking against a candidate, the strongest first."""


def against(result: Result) -> tuple[str, ...]:
    """Return what speaks against the first candidate: metrics that it moves the other way, in words."""
    first = best(result)
    if first is None or result.score.verdict not in (
        Verdict.REPRODUCED,
        Verdict.REPRODUCED_NOT_SPECIFIC,
        Verdict.PARTLY,
    ):
        return ()
    other = [
        name
        for name in key_metrics(first, len(first.metrics))
        if agreement_word(first.metrics[name]) == "opposite"
    ]
    if not other:
        return ()
    named = ", ".join(
        f"{metric_title(name)} ({first.metrics[name].original.value} in the incident, "
        f"{first.metrics[name].proxy.value} in the replay)"
        for name in other[:MOST_AGAINST]
    )
    more = f" and {len(other) - MOST_AGAINST} more" if len(other) > MOST_AGAINST else ""
    return (f"Against {literal(first.title, 80)}: the other way went {named}{more}.",)


def order_note(result: Result) -> str:
    """Return why the ranking is not in the order of the distances, "" where it is."""
    farthest, late = 0.0, []
    for candidate in result.score.ranking:
        if candidate.distance < farthest:
            late.append(candidate.fault)
        elif candidate.distance == candidate.distance:
            farthest = candidate.distance
    if not late:
        return ""
    names = ", ".join(literal(fault, 60) for fault in late)
    return f"Last, however near: {names}. A metric that cannot be wrong speaks against it."


def what_to_do(result: Result) -> tuple[str, ...]:
    """Return the next steps, the most useful first."""
    first, verdict = best(result), result.score.verdict
    steps: list[str] = []
    if result.status != "completed":
        steps.append("Resume the run: what is already done is kept.")
    if result.score.together:
        members = [item for item in result.score.ranking if item.fault in result.score.together]
        steps += [f"For {literal(item.title, 80)}: {literal(item.fix)}" for item in members if item.fix]
        steps.append(
            "Mend one, and diagnose what is left: that both are needed is a prediction from single replays."
        )
    elif first and verdict == Verdict.REPRODUCED:
        steps.append(literal(first.fix))
    elif first and verdict == Verdict.REPRODUCED_NOT_SPECIFIC:
        if first.split_by:
            steps.append(f"To tell them apart, look at: {metric_title(first.split_by)}")
        known = {candidate.fault: candidate for candidate in result.score.ranking}
        suspects = [first, *(known[rival] for rival in first.rivals if rival in known)]
        steps += [f"If it is {literal(c.title, 80)}: {literal(c.fix)}" for c in suspects if c.fix]
        if not first.rivals and not first.doubts:
            steps.append("Replay more seeds and the other candidates to be sure of it.")
    elif first and verdict == Verdict.PARTLY:
        if first.split_by:
            steps.append(f"Look at: {metric_title(first.split_by)}")
        steps.append(
            f"Check {literal(first.title, 80)} by hand before acting on it. {literal(first.fix)}".strip()
        )
    elif verdict == Verdict.NOT_REPRODUCED:
        steps.append("Widen the candidates, or look outside the library: data, reward, infrastructure.")
    elif verdict == Verdict.INCONCLUSIVE and result.failures:
        steps.append("Replays failed: read the workers' logs in the run folder, then resume the run.")
    elif verdict == Verdict.INCONCLUSIVE and result.not_tried and not _replayed(result):
        steps.append("No candidate was replayed in time.")
    elif verdict == Verdict.INCONCLUSIVE:
        steps.append(
            "Give it more to go on: a longer log first of all, then a healthy twin of the run (if there is none), "
            "more seeds, more steps."
        )
    elif verdict == Verdict.INJECTION_FAILED:
        steps.append("Read the workers' logs in the run folder, then resume the run.")
    waiting = any(reason.startswith(NOT_REACHED) for reason in result.not_tried.values())
    if waiting and result.run_dir and result.status == "completed":
        steps.append(f"Give it more time: diagnose run --resume {literal(result.run_dir)} --budget 300")
    if result.not_tried and verdict not in (Verdict.REPRODUCED, Verdict.NO_FAULT):
        steps.append(f"Not replayed yet: {', '.join(literal(fault, 60) for fault in result.not_tried)}.")
    return tuple(step for step in steps if step)


def together(reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return names with their reasons, those that share a reason on one line: "a, b: too far behind"."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return tuple(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def strength_word(candidate: Candidate) -> str:
    """Return the strength that fits best with its interval, in multiples of the card's default."""
    word = f"× {number(candidate.severity)}"
    if candidate.severity_interval is None:
        return word
    low, high = candidate.severity_interval
    if low and high != math.inf:
        return f"{word} (between {number(low, 2)} and {number(high, 2)})"
    if low:
        return f"{word} (at least {number(low, 2)})"
    return (
        f"{word} (at most {number(high, 2)})" if high != math.inf else f"{word} (any strength fits as well)"
    )


def strengths_found(result: Result) -> tuple[str, ...]:
    """Return the fitted strengths of the first candidate and of those that can't be told from it."""
    first = best(result)
    if first is None:
        return ()
    named = [c for c in result.score.ranking if c.fault in (first.fault, *first.rivals)]
    return tuple(
        f"{literal(c.title, 80)}: {strength_word(c)} of the card's default"
        for c in named
        if c.severity_interval is not None
    )


def remedies_found(result: Result) -> tuple[str, ...]:
    """Return what became of the effect under each remedy, in words."""
    lines = []
    for item in result.remedies:
        line = f"{literal(item.what)}: {literal(item.outcome)}"
        if item.gone == item.gone:
            line += f" ({percent(max(item.gone, -9.99))} of the effect gone)"
        if item.left and item.outcome in ("mostly gone", "partly gone"):
            line += f"; still off: {', '.join(map(metric_title, item.left[:4]))}"
        lines.append(line)
    return tuple(lines)


def probes_found(result: Result) -> tuple[str, ...]:
    """Return the experiments that would split the set; without any the way to look for them."""
    found = _experiments(result)
    first = best(result)
    open_set = first is not None and first.rivals and result.score.verdict == Verdict.REPRODUCED_NOT_SPECIFIC
    if result.probes and not found:
        return (
            f"None of the {len(result.probes)} probes splits the set: on the proxy they all come out alike.",
        )
    if found or not open_set or not result.run_dir:
        return found
    command = f"diagnose run --resume {result.run_dir} --probe"
    return (f"Cheap experiments on your system that would split the set: {literal(command)}",)


MOST_EXPERIMENTS = 3
"""Experiments that are told in words; the rest is in the JSON report."""


def _experiments(result: Result) -> tuple[str, ...]:
    """Return one sentence an experiment: the cheapest first, of those the one that tells most faults apart."""
    by_probe: dict[str, list[ProbeResult]] = {}
    for item in result.probes:
        if item.borne_out:
            by_probe.setdefault(item.probe, []).append(item)

    def order(group: list[ProbeResult]) -> tuple[float, ...]:
        return (group[0].steps, len(group[0].settings), -len(group), -max(item.apart for item in group))

    groups = sorted(by_probe.values(), key=order)
    lines = []
    for group in groups[:MOST_EXPERIMENTS]:
        pairs = []
        for item in group:
            sides = [
                f"{number(value)} ({_LEVEL[way]}) if it is {titles(result, (fault,))}"
                for fault, value, way in zip(item.faults, item.values, item.directions, strict=False)
            ]
            pairs.append(
                f"{metric_title(item.metric)} {' or '.join(sides)}; healthy {number(item.values[2])}"
            )
        head = f"{literal(group[0].what)}, everything else as it is, and run {group[0].steps} steps"
        lines.append(f"{head}. The proxy then has: {'. '.join(pairs)}.")
    if len(groups) > MOST_EXPERIMENTS:
        lines.append(f"{len(groups) - MOST_EXPERIMENTS} more experiments are in the JSON report.")
    return tuple(lines)


_LEVEL = {
    Direction.UP: "▲ above healthy",
    Direction.DOWN: "▼ below healthy",
    Direction.NONE: "= as healthy",
    Direction.UNDETERMINED: "? not clearly off healthy",
}


def _replayed(result: Result) -> bool:
    """Whether any candidate has a replay that could be scored."""
    return any(candidate.metrics for candidate in result.score.ranking)


def movement(direction: Direction, kind: AnomalyType) -> str:
    """Return a direction and, where there is one, the shape of the effect: "▲ up gradual"."""
    shape = "" if kind == AnomalyType.NONE else f" {kind.value}"
    return f"{DIRECTION_WORD[direction]}{shape}"


def agreement_word(metric: MetricResult) -> str:
    """Return in a word whether the proxy did what the original did.

    "silent": only the original moved; "extra": only the proxy did; "unclear": one of them is undetermined.
    """
    original, proxy = metric.original, metric.proxy
    if Direction.UNDETERMINED in (original, proxy):
        return "unclear"
    if original == proxy:
        return "agrees"
    if Direction.NONE not in (original, proxy):
        return "opposite"
    return "silent" if proxy == Direction.NONE else "extra"


def onset_word(onset: tuple[int, int] | None) -> str:
    """Return an onset interval in updates, "–" where there is none."""
    if onset is None:
        return "–"
    low, high = onset
    return f"{low}" if low == high else f"{low}–{high}"


def describe(name: str, metric: MetricResult) -> str:
    """Return the text that stands beside a metric's chart and says all that the chart shows."""

    def side(direction: Direction, kind: AnomalyType, onset: tuple[int, int] | None) -> str:
        shape = f" ({kind.value})" if kind != AnomalyType.NONE else ""
        since = f" from update {onset_word(onset)}" if onset else ""
        return f"{_VERB[direction]}{since}{shape}"

    trend = (
        "" if metric.trend is None else f" Similarity of the two effect curves: {number(metric.trend, 2)}."
    )
    original = side(metric.original, metric.type_original, metric.onset_original)
    proxy = side(metric.proxy, metric.type_proxy, metric.onset_proxy)
    sizes = (
        f"Effect {number(metric.effect_original)} against a margin of {number(metric.margin_original)} "
        f"(original), {number(metric.effect_proxy)} against {number(metric.margin_proxy)} (proxy){_unit(name)}."
    )
    title, agreement = metric_title(name), agreement_word(metric)
    return f"{title} {original} in the original and {proxy} in the proxy: {agreement}.{trend} {sizes}"


def _unit(name: str) -> str:
    """Return in which units effects of a metric are given, where these are not the metric's own."""
    metric = METRIC_BY_NAME.get(name)
    return ", in powers of ten" if metric is not None and metric.transform == "log10" else ""


def key_metrics(candidate: Candidate, limit: int = 6) -> tuple[str, ...]:
    """Return the metrics to show first: primary ones, then those that moved most in the original."""

    def weight(name: str) -> tuple[float, ...]:
        metric = candidate.metrics[name]
        z = metric.z_original if metric.z_original == metric.z_original else 0.0
        return (-metric.weight, metric.original not in _MOVED, -abs(z))

    return tuple(sorted(candidate.metrics, key=weight)[:limit])


def witness_word(candidate: Candidate) -> str:
    """Return whether the injection was proved, in a word."""
    if candidate.witness_ok:
        return "seen"
    return "not seen" if candidate.witness else "missing"


_RUN = re.compile(r"(?P<fault>.+)-x(?P<strength>\d+(?:\.\d+)?(?:e[+-]?\d+)?)-s\d+", re.DOTALL)


def fault_of_run(run: str) -> str | None:
    """Return the fault in a run id (`<fault>-x<strength>-s<seed>`), None for a healthy run."""
    match = _RUN.fullmatch(run)
    return match["fault"] if match else None


def replay_name(fault: str, strength: float) -> str:
    """Return the name of a fault at a strength: the fault itself at the card's default, "fault ×2" otherwise."""
    return fault if float(strength) == 1 else f"{fault} ×{strength:g}"


def replay_of_run(run: str) -> str | None:
    """Return the name (`replay_name`) of the replay that a run id belongs to, None for a healthy run."""
    match = _RUN.fullmatch(run)
    return replay_name(match["fault"], float(match["strength"])) if match else None
