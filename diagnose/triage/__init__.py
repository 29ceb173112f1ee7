"""Triage: what happened, since when, what it is likely to be, what can be ruled out, what to do now. No run needed.

The knowledge and the rules are in `taxonomy` (features, clues, triage, assessment); here logs, configurations and
generated text become observations and facts, and the answer becomes text, JSON or a playbook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diagnose.curves import Curves
from taxonomy.assessment import Triage
from taxonomy.assessment import assess as _assess
from taxonomy.facts import Facts, Scalar
from taxonomy.features import observe
from taxonomy.observations import Observation
from taxonomy.registry import Library
from taxonomy.triage import RankedFault, rank

__all__ = ["RankedFault", "Triage", "assess", "facts_of_logs", "rank_faults"]


def assess(
    faulty: Sequence[Curves],
    healthy: Sequence[Curves] = (),
    context: Facts | None = None,
    cards: Library | None = None,
    more: Sequence[Observation] = (),
) -> Triage:
    """Judge an incident by its logs.

    Args:
        faulty: Logs of the incident; several are seeds of it.
        healthy: Logs of healthy twins, perhaps none.
        context: What is known of the run (`taxonomy.facts`).
        cards: Fault cards, None for all that are installed.
        more: Observations from elsewhere (generated text, a person's word); they stand above the logs'.
    """
    facts = facts_of_logs(faulty) | dict(context or {})
    said = {item.metric for item in more}
    seen = [*more, *(item for item in observe(faulty, healthy, facts) if item.metric not in said)]
    steps = max((len(run.steps_N) for run in faulty), default=0)
    return _assess(seen, facts, cards, steps)


def rank_faults(
    faulty: Sequence[Curves],
    healthy: Sequence[Curves] = (),
    context: Facts | None = None,
    cards: Library | None = None,
) -> tuple[RankedFault, ...]:
    """Rank every fault by the logs alone, whatever the verdict: those that can be first, then those ruled out."""
    facts = facts_of_logs(faulty) | dict(context or {})
    return rank(observe(faulty, healthy, facts), facts, cards)


def facts_of_logs(runs: Sequence[Curves]) -> dict[str, Scalar]:
    """Return what the logs say about the run besides the metrics: whether it was resumed, what is not logged."""
    facts: dict[str, Scalar] = {}
    if any(kind == "resume" for run in runs for kind, _ in run.events):
        facts["resumed"] = True
    if runs and not any("actor/kl_loss" in run.values for run in runs):
        facts["logged:actor/kl_loss"] = False  # trainers print the KL to the reference where they use it
    if any(name.startswith("routing/") for run in runs for name in run.values):
        facts["model.moe"] = True
    return facts


def merged(*contexts: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the facts of several sources, later ones above earlier ones."""
    return {key: value for context in contexts for key, value in context.items()}
