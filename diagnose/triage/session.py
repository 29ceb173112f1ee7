"""What a session takes from triage: the symptoms of ``symptom: auto``, and the candidates that the context leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diagnose.curves import Curves
from diagnose.triage import assess, facts_of_logs
from taxonomy.assessment import possible_by_facts
from taxonomy.facts import Facts, Scalar, completed
from taxonomy.registry import Library


def facts_of_context(context: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the facts of a playbook's context: short names as they are, a Hydra dump translated."""
    if not context:
        return {}
    from diagnose.triage.config import facts_of

    return dict(context) | facts_of(context)


def symptoms_in(
    faulty: Sequence[Curves], healthy: Sequence[Curves], facts: Facts, cards: Library
) -> tuple[str, ...]:
    """Return the ids of the symptoms that the logs show, in the order in which they matter.

    The first is the one that the likeliest fault has, so that a session is named after what it is about.
    """
    answer = assess(faulty, healthy, facts, cards)
    if answer.verdict != "faulty":
        return ()
    seen = [item.id for item in answer.symptoms]
    likely = [id_ for item in answer.candidates[:1] for id_ in cards[item.fault].symptoms if id_ in seen]
    return tuple(dict.fromkeys((*likely, *seen)))


def impossible(faults: Sequence[str], faulty: Sequence[Curves], facts: Facts) -> dict[str, str]:
    """Return the faults that the context rules out, each with the reason."""
    known = completed(facts_of_logs(faulty) | dict(facts))
    return {
        fault: f"ruled out by the context: {why}"
        for fault in faults
        if (why := possible_by_facts(fault, known))
    }
