"""The answer of a triage as text for a terminal of 80 columns, and as JSON (``"schema": 1``)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from diagnose.logs.text import count
from diagnose.report.text import literal
from diagnose.triage.advice import Advice
from diagnose.triage.runs import Glance
from taxonomy.assessment import Triage
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.registry import Library

if TYPE_CHECKING:
    from diagnose.triage.config import Difference

SCHEMA = 1
WIDTH = 80
CANDIDATES = 5
REASONS = 3
OTHERS = 6
_ARROW = {
    "up": "▲",
    "down": "▼",
    "nan": "NaN",
    "zero": "0",
    "flat": "flat",
    "constant": "constant",
    "none": "=",
}


Several = Sequence[tuple[str, Sequence[Glance]]]
"""Logs that hold several runs, and these at a glance."""


def as_json(
    answer: Triage,
    advice: Advice,
    source: Sequence[str],
    warnings: Sequence[str],
    diff: Sequence[Difference],
    several: Several = (),
) -> dict[str, Any]:
    """Return the answer as JSON-able data."""
    return {
        "schema": SCHEMA,
        "source": list(source),
        "verdict": answer.verdict,
        "reason": answer.reason,
        "steps": answer.steps,
        "onset": list(answer.onset) if answer.onset else None,
        "symptoms": [
            {
                "id": item.id,
                "category": item.category,
                "metric": item.metric,
                "direction": item.direction,
                "onset": list(item.onset) if item.onset else None,
                "evidence": item.evidence,
            }
            for item in answer.symptoms
        ],
        "observations": [
            {
                "metric": item.metric,
                "direction": item.direction,
                "onset": item.onset,
                "interval": list(item.interval) if item.interval else None,
                "value": item.value,
                "healthy": item.healthy,
                "alarm": item.alarm,
                "evidence": item.evidence,
                "rule": item.rule,
            }
            for item in answer.observations
        ],
        "candidates": [
            {
                "fault": item.fault,
                "category": item.category,
                "score": item.score,
                "tied": item.tied,
                "reasons": list(item.reasons),
                "missing_metrics": list(item.missing),
            }
            for item in answer.candidates
        ],
        "ruled_out": [{"fault": item.fault, "reason": item.ruled_out} for item in answer.ruled_out],
        "missing": list(answer.missing),
        "findings": [{"fault": f.fault, "says": f.says, "source": f.source} for f in answer.findings],
        "differences": [
            {"key": d.key, "good": d.good, "bad": d.bad, "fact": d.fact, "faults": list(d.faults)}
            for d in diff
        ],
        "now": {
            "keep": advice.keep,
            "act": advice.act,
            "look": advice.look,
            "mend": advice.mend,
            "run": advice.run,
        },
        "runs": [
            {
                "log": log,
                "run": item.number,
                "name": item.name,
                "steps": item.steps,
                "verdict": item.verdict,
                "onset": list(item.onset) if item.onset else None,
                "symptoms": list(item.symptoms),
                "judged": item.judged,
            }
            for log, runs in several
            for item in runs
        ],
        "warnings": list(warnings),
    }


def as_text(
    answer: Triage,
    advice: Advice,
    headline: str,
    cards: Library,
    diff: Sequence[Difference] = (),
    several: Several = (),
) -> str:
    """Return the answer as lines of at most 80 columns."""
    return "\n".join(literal_lines(_lines(answer, advice, headline, cards, diff, several))) + "\n"


def literal_lines(lines: Iterator[str]) -> Iterator[str]:
    """Make foreign text harmless, and leave the layout alone."""
    for line in lines:
        body = line.lstrip(" ")
        yield (" " * (len(line) - len(body)) + literal(body)).rstrip()


def _wrap(text: str, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first) if rest is None else rest,
        break_long_words=True,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def _steps(interval: tuple[int, int] | None) -> str:
    if interval is None:
        return ""
    low, high = interval
    return f"step {low}" if low == high else f"steps {low}–{high}"


def _lines(
    answer: Triage,
    advice: Advice,
    headline: str,
    cards: Library,
    diff: Sequence[Difference],
    several: Several,
) -> Iterator[str]:
    since = f", since {_steps(answer.onset)}" if answer.onset and answer.symptoms else ""
    yield from _wrap(f"{answer.verdict.upper()}{since}: {answer.reason}.", "")
    yield from _wrap(headline, "")
    for log, runs in several:
        yield from _runs(log, runs)
    if answer.symptoms:
        yield ""
        yield "What is seen"
        alarms = [item for item in answer.observations if item.alarm]
        for item in alarms[:8]:
            title = METRIC_BY_NAME[item.metric].title
            when = _steps(item.interval) or item.onset
            yield from _wrap(f"{title} {_ARROW[item.direction]}" + (f" {when}" if when else ""), "  ")
            if item.evidence and item.evidence != "as observed":
                yield from _wrap(item.evidence, "      ")
        if len(alarms) > 8:
            yield f"  and {len(alarms) - 8} more metrics (--json lists them)"
        yield from _wrap("symptoms: " + ", ".join(item.id for item in answer.symptoms), "  ")
    if answer.verdict == "faulty" or answer.candidates:
        yield from _candidates(answer, cards)
    if answer.findings:
        yield ""
        yield "In the configuration"
        for finding in answer.findings:
            yield from _wrap(f"{finding.says} ({finding.fault})", "  ")
    if diff:
        yield ""
        yield "What differs from the good configuration"
        for change in diff[:OTHERS]:
            causes = f": could be {', '.join(change.faults[:3])}" if change.faults else ""
            yield from _wrap(f"{change.key}: {change.good} → {change.bad}{causes}", "  ", "      ")
        if len(diff) > OTHERS:
            yield f"  and {len(diff) - OTHERS} more that matter less"
    yield ""
    yield "Do this now"
    for word, text in (
        ("keep", advice.keep),
        ("then", advice.act),
        ("look", advice.look),
        ("if", advice.mend),
        ("run", advice.run),
    ):
        if text:
            yield from _wrap(text, f"  {word:<5}")


def _runs(log: str, runs: Sequence[Glance]) -> Iterator[str]:
    """Yield all runs of a log, a line each; the one that is judged is marked."""
    yield ""
    yield from _wrap(f"Runs in {log} (> is the one judged here; --run N for another)", "")
    for item in runs:
        since = f" since {_steps(item.onset)}" if item.onset else ""
        shows = f": {', '.join(item.symptoms)}" if item.symptoms else ""
        name = f"{item.name}: " if item.name else ""
        what = f"{item.verdict}{since} ({count(item.steps, 'step')}){shows}"
        yield from _wrap(f"{name}{what}", f"{'>' if item.judged else ' '}{item.number:2} ", "     ")


def _candidates(answer: Triage, cards: Library) -> Iterator[str]:
    yield ""
    short = "" if answer.verdict == "faulty" else ", should it stay so"
    if not answer.likeliest:
        yield "What it may be: no fault of the library explains it"
    elif len(answer.likeliest) > 1:
        yield f"What it may be{short} (= cannot be told apart, {len(answer.likeliest)} of them)"
    else:
        yield f"What it may be{short}"
    for place, item in enumerate(answer.candidates[:CANDIDATES], 1):
        mark = "=" if item.tied and len(answer.likeliest) > 1 else " "
        yield from _wrap(
            f"{item.score:+5.2f}  {item.fault}: {cards[item.fault].title}", f"{mark}{place} ", "           "
        )
        shown = item.reasons[: REASONS if item.tied else 1]
        for reason in shown:
            yield from _wrap(reason, "           ", "                ")
        if more := len(item.reasons) - len(shown):
            rest = round(item.score - sum(float(reason.split(" ", 1)[0]) for reason in shown), 2)
            yield f"           {rest + 0.0:+.4g} and {more} more"
    if answer.ruled_out:
        yield ""
        yield f"Ruled out ({len(answer.ruled_out)})"
        reasons: dict[str, list[str]] = {}
        for item in answer.ruled_out:
            reasons.setdefault(item.ruled_out, []).append(item.fault)
        ordered = sorted(reasons.items(), key=lambda entry: -len(entry[1]))
        for reason, faults in ordered[:OTHERS]:
            yield from _wrap(f"{reason}: {', '.join(faults)}", "  ", "      ")
        if rest := sum(len(faults) for _, faults in ordered[OTHERS:]):
            yield f"  and {rest} more (--json lists them)"
    if answer.missing:
        yield ""
        yield from _wrap("Would decide, and is not known: " + ", ".join(answer.missing[:OTHERS]), "", "  ")
