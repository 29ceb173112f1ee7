"""The assessment: observations and facts → healthy, faulty or inconclusive, with symptoms and ranked faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from taxonomy.clues import all_clues
from taxonomy.facts import Facts, Scalar, completed, holds
from taxonomy.levels import GAP_LIMITS
from taxonomy.observations import Observation
from taxonomy.registry import Library, library
from taxonomy.symptoms import SYMPTOM_BY_ID
from taxonomy.triage import LEAST, RankedFault, moved, rank

MIN_STEPS = 10
"""Logged steps under which only facts (a NaN in loss and gradient) are called a fault."""
FEW_QUANTITIES = 2
"""Quantities up to which a log without an alarm is not called healthy: it does not show enough."""
_LASTING = {"level", "exact_zero", "not_finite", "truncated", "no_signal", "constant"}
"""Rules about levels and facts: what they say of a few steps is true of them, and can be asked for its cause."""

_SYMPTOMS: tuple[tuple[str, str, str], ...] = (
    # quantity, directions, symptom
    ("kl", "nan", "kl_divergence_increase"),
    ("loss", "nan", "training_instability"),
    ("grad", "nan", "gradient_discrepancy"),
    ("entropy", "nan|up", "training_instability"),
    ("routes", "up|down|flat", "routing_shift"),
    ("load", "up|down", "expert_imbalance"),
    ("kl", "up", "kl_divergence_increase"),
    ("kl", "zero|down|flat|constant", "no_learning"),
    ("step", "up|nan", "kl_divergence_increase"),
    ("grad", "up", "gradient_discrepancy"),
    ("grad", "zero|down", "no_learning"),
    ("loss", "zero|constant", "no_learning"),
    ("loss", "up|down", "training_instability"),
    ("reward", "down|flat|constant|zero|nan", "reward_degradation"),
    ("held_out", "down|flat|constant|zero", "reward_degradation"),
    ("signal", "down|zero", "reward_degradation"),
    ("sameness", "up", "reward_degradation"),
    ("spread", "zero|down", "reward_degradation"),
    ("entropy", "down|flat|zero", "reward_degradation"),
    ("length", "up|down", "training_instability"),
    ("truncation", "up", "training_instability"),
    ("text", "up", "training_instability"),
    ("advantage", "up|down", "gradient_discrepancy"),
)
_DRIFTS = {
    ("kl", "up"),
    ("entropy", "down"),
    ("length", "up"),
    ("length", "down"),
    ("signal", "down"),
    ("step", "up"),
}
"""What healthy training does slowly while its reward rises."""


@dataclass(frozen=True)
class Symptom:
    """A symptom as the playbooks know it, with its evidence."""

    id: str
    category: str
    metric: str
    direction: str
    onset: tuple[int, int] | None
    evidence: str


@dataclass(frozen=True)
class Finding:
    """A static check of the configuration that struck."""

    fault: str
    says: str
    source: str


@dataclass(frozen=True)
class Triage:
    """The answer of a triage.

    Attributes:
        verdict: "healthy", "faulty" or "inconclusive".
        reason: One sentence.
        symptoms: Symptoms, the earliest first.
        observations: Everything that was looked at, symptoms first.
        onset: First and last step at which the incident may have begun, None where that is not known.
        candidates: Faults that can be, the likeliest first. Empty where healthy; of a run too short for a verdict those
            that would explain what it shows so far, where that is a level or a fact.
        ruled_out: Faults that can't be, each with the reason.
        missing: What would decide between the likeliest, and is not known.
        findings: Static checks of the configuration that struck, whatever the log shows.
        steps: Logged steps, None for observations without a log.
    """

    verdict: str
    reason: str
    symptoms: tuple[Symptom, ...] = ()
    observations: tuple[Observation, ...] = ()
    onset: tuple[int, int] | None = None
    candidates: tuple[RankedFault, ...] = ()
    ruled_out: tuple[RankedFault, ...] = ()
    missing: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    steps: int | None = None

    @property
    def likeliest(self) -> tuple[RankedFault, ...]:
        """The faults that can't be told apart at the top; empty where none explains the incident."""
        return tuple(item for item in self.candidates if item.tied)


def assess(
    observations: Sequence[Observation],
    facts: Facts | None = None,
    cards: Library | None = None,
    steps: int | None = None,
) -> Triage:
    """Judge an incident by what was seen.

    Args:
        observations: From the log, or typed by a person.
        facts: What is known of the run.
        cards: Fault cards, None for all that are installed.
        steps: Logged steps; None: the observations are somebody's word.
    """
    facts = completed(facts or {})
    cards = library() if cards is None else cards
    if steps is None and isinstance(given := facts.get("steps"), int) and not isinstance(given, bool):
        steps = given
    seen = _without_drift(_without_cosmetics(observations))
    alarms = [item for item in seen if item.alarm and moved(item)]
    seen = (*alarms, *(item for item in seen if item not in alarms))
    findings = _findings(facts, cards)
    symptoms = symptoms_of(alarms)
    verdict, reason = _verdict(seen, alarms, steps)
    asked = verdict == "faulty" or any(item.rule in _LASTING for item in alarms)
    if not asked:
        return Triage(verdict, reason, symptoms, seen, _onset(alarms), findings=findings, steps=steps)
    ranked = rank(seen, facts, cards)
    possible = tuple(item for item in ranked if not item.ruled_out)
    top = [item for item in possible if item.tied]
    missing = tuple(dict.fromkeys(name for item in top[:4] for name in item.missing))
    if not top and verdict == "faulty":
        reason += "; no fault of the library explains it"
    return Triage(
        verdict,
        reason,
        symptoms,
        seen,
        _onset(alarms),
        tuple(item for item in possible if item.score >= LEAST or item.tied),
        tuple(item for item in ranked if item.ruled_out),
        missing,
        findings,
        steps,
    )


def symptoms_of(alarms: Sequence[Observation]) -> tuple[Symptom, ...]:
    """Return one symptom for each kind that the alarms show, the earliest first."""
    found: dict[str, Symptom] = {}
    for item in sorted(alarms, key=lambda item: (item.interval or (0, 0))[1]):
        id_ = symptom_of(item)
        if id_ and id_ not in found:
            found[id_] = Symptom(
                id_, SYMPTOM_BY_ID[id_].category, item.metric, item.direction, item.interval, item.evidence
            )
    return tuple(found.values())


def symptom_of(item: Observation) -> str:
    """Return the id of the symptom that an observation is, "" for none."""
    if item.quantity == "gap":
        limit = GAP_LIMITS.get(item.metric)
        small = (
            limit is not None and item.value is not None and (abs(item.value) < limit.alarm) == limit.above
        )
        return "probability_discrepancy" if small else "rollout_training_divergence"
    return next(
        (id_ for name, ways, id_ in _SYMPTOMS if name == item.quantity and item.sense in ways.split("|")), ""
    )


def _verdict(
    seen: Sequence[Observation], alarms: Sequence[Observation], steps: int | None
) -> tuple[str, str]:
    """Return the verdict and its reason."""
    few = steps is not None and steps < MIN_STEPS
    broken = {item.quantity for item in alarms if item.direction == "nan"}
    if few and not broken >= {"loss", "grad"}:
        what = "; what it shows so far is listed" if alarms else ""
        return "inconclusive", f"too few steps: {steps}, where {MIN_STEPS} are the least{what}"
    if not alarms:
        if not seen:
            return "inconclusive", "nothing to judge by: no metric was looked at"
        known = sorted({item.quantity for item in seen})
        if steps is not None and len(known) <= FEW_QUANTITIES and not any(item.rule == "" for item in seen):
            return (
                "inconclusive",
                f"too little to say: nothing stands out, but only {' and '.join(known)} can be seen",
            )
        return "healthy", "nothing here that healthy runs don't show"
    return "faulty", f"{len(alarms)} of {len(seen)} metrics do what no healthy run's do"


def _onset(alarms: Sequence[Observation]) -> tuple[int, int] | None:
    """Return the earliest onset, narrowed by every other interval that holds its end."""
    known = [item.interval for item in alarms if item.interval is not None]
    if not known:
        return None
    end = min(high for _, high in known)
    return max(low for low, _ in known if low <= end), end


def _without_cosmetics(observations: Sequence[Observation]) -> list[Observation]:
    """Take the alarm from NaNs that stand alone while loss and gradient are known to be in order."""
    fine = {item.quantity for item in observations if item.direction == "none"}
    core = {"loss", "grad"}
    return [
        replace(item, alarm=False)
        if item.direction == "nan" and item.quantity not in core and core <= fine
        else item
        for item in observations
    ]


def _without_drift(observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """Take the alarm from slow drifts that somebody noted while the reward rises and the held-out one doesn't fall.

    Only for what people typed: the rules that read logs know drifts. A reward that rises is no symptom either.
    """
    sense = {item.quantity: item.sense for item in observations}
    learns = sense.get("reward") == "up" and sense.get("held_out") in (None, "up", "none")
    better = {("reward", "up"), ("held_out", "up")}

    def harmless(item: Observation) -> bool:
        if item.rule:
            return False
        large = item.quantity == "kl" and (item.value or 0.0) > 1.0
        slow = learns and item.onset == "gradual" and (item.quantity, item.sense) in _DRIFTS and not large
        return slow or (item.quantity, item.sense) in better

    return tuple(replace(item, alarm=False) if harmless(item) else item for item in observations)


def _findings(facts: Facts, cards: Library) -> tuple[Finding, ...]:
    return tuple(
        Finding(fault, check.says, check.source)
        for fault, clue in all_clues().items()
        if fault in cards.cards
        for check in clue.checks
        if check.found(facts)
    )


def possible_by_facts(fault: str, facts: dict[str, Scalar]) -> str:
    """Return why the facts alone rule a fault out, "" where they don't."""
    clue = all_clues().get(fault)
    known = completed(facts)
    if clue is None:
        return ""
    for key, condition in clue.needs.items():
        if key in known and holds(condition, known[key]) is False:
            return f"{key} is {known[key]}: needs {condition}"
    for key, condition in clue.excludes.items():
        if key in known and holds(condition, known[key]):
            return f"{key} is {known[key]}"
    return ""
