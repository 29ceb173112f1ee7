"""Triage: observations and facts → ranked faults, with the reasons and what is ruled out.

One rule, additive, in units of "how much likelier": every observation, every fact and every static check adds or takes
points, written down beside the fault. The weights are set by physical reasoning (a gap that was there before the
first update is not a missing weight sync), not fitted to any incident:

    score = Σ what moved as the fault moves it − Σ what moved otherwise − Σ what should have moved and did not
            − Σ what the fault leaves unexplained + Σ facts that favour it − what it presupposes and nobody knows
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from taxonomy.clues import NO_CLUES, Clues, Sign, all_clues
from taxonomy.facts import Facts, completed, holds
from taxonomy.levels import GAP_LIMITS
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.observations import QUANTITY, UNCLEAR, Observation
from taxonomy.registry import FaultCard, Library, library

AGREES = {1: 1.0, 2: 1.5}
"""A quantity that moved as expected, by the weight of the expectation."""
OPPOSITE = 2.0
MISSED = {1: 0.75, 2: 1.5}
"""A quantity that should have moved, was looked at and did not: absence is evidence."""
HELD = 0.5
"""A quantity that should hold still, and does."""
BROKE = 1.5
"""A quantity that should hold still, and moved."""
UNEXPLAINED = {
    "gap": 2.0,
    "routes": 1.5,
    "lag": 2.0,
    "weights": 1.0,
    "load": 1.0,
    "text": 0.5,
    "loss": 1.0,
    "spread": 1.5,
    "kl": 0.75,
    "length": 0.75,
    "truncation": 1.0,
    "signal": 0.75,
    "held_out": 0.5,
    "entropy": 0.5,
    "sameness": 1.0,
    "reward": 0.4,
    "grad": 0.4,
    "step": 0.25,
    "advantage": 0.1,
}
"""What a fault says nothing about, and moved. Late consequences (reward, gradient norm) count little."""
ONSET = 0.5
PATTERN = 1.0
PHASE = 2.0
SIZE = 0.5
FACT = 1.0
CHECK = 1.5
PRESUPPOSED = 0.25
DIRECT = {"late_gap", "first_ratio", "lag", "weights"}
"""Quantities that show one kind of gap by itself. Averaged over all tokens, the same gap may be within the usual."""
KINDRED = {
    "kl": {"step"},
    "grad": {"loss"},
    "truncation": {"length"},
    "load": {"routes", "flips"},
    "routes": {"load", "flips"},
}
"""Quantities of one subject: while the one is out of order, nobody can be sure by a log that the other is in order."""
TIE = 0.5
"""Candidates this close to the first can't be told apart."""
LEAST = 0.75
"""Score under which a fault does not explain the incident."""

_NEAR = {  # observed onset → how well each expected onset goes with it, −1 to 1
    "start": {"start": 1, "immediate": 1, "update": -1, "gradual": -0.5, "sudden": -1, "delayed": -1},
    "update": {"update": 1, "immediate": 0.5, "gradual": 0.5, "start": -1, "sudden": 0, "delayed": -0.5},
    "immediate": {"immediate": 1, "start": 1, "update": 1, "sudden": 0.5, "gradual": 0, "delayed": -1},
    "gradual": {
        "gradual": 1,
        "update": 0.5,
        "delayed": 0.5,
        "immediate": -0.5,
        "start": -0.5,
        "sudden": -0.5,
    },
    "delayed": {
        "delayed": 1,
        "gradual": 0.5,
        "sudden": 0.5,
        "immediate": -0.5,
        "start": -0.5,
        "update": -0.5,
    },
    "sudden": {"sudden": 1, "immediate": 0.5, "delayed": 0.5, "gradual": 0, "start": 0, "update": 0},
}
_ALIKE = {  # (observed, expected) → how much of an agreement it is
    ("flat", "down"): 1.0,
    ("down", "flat"): 0.5,
    ("zero", "down"): 0.5,
    ("down", "zero"): 0.25,
    ("constant", "flat"): 0.75,
    ("constant", "down"): 0.5,
    ("flat", "constant"): 0.25,
    ("down", "constant"): 0.5,
    ("zero", "flat"): 0.5,
    ("flat", "zero"): 0.5,
    ("nan", "up"): 0.25,
    ("zero", "constant"): 0.5,
    ("up", "nan"): 0.25,
}
_STILL = ("none",)


@dataclass(frozen=True)
class RankedFault:
    """A fault in its place.

    Attributes:
        fault: Fault id.
        category: Category id.
        score: Points; a difference of 1 is clear, one under `TIE` is none.
        tied: Whether it can't be told apart from the first.
        ruled_out: Why it can't be, "" where it can.
        reasons: What counts for and against it, the weightiest first, each with its points.
        missing: Metrics and facts that would decide, and are not known.
    """

    fault: str
    category: str
    score: float
    tied: bool = False
    ruled_out: str = ""
    reasons: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass
class _Tally:
    """Points of one fault, while they are counted."""

    points: list[tuple[float, str]] = field(default_factory=list)
    ruled_out: str = ""

    def add(self, points: float, why: str) -> None:
        if points:
            self.points.append((points, why))

    @property
    def score(self) -> float:
        return sum(points for points, _ in self.points)

    def reasons(self) -> tuple[str, ...]:
        ordered = sorted(self.points, key=lambda item: -abs(item[0]))
        return tuple(f"{points:+.4g} {why}" for points, why in ordered)


def rank(
    observations: Sequence[Observation],
    facts: Facts | None = None,
    cards: Library | None = None,
    clues: Mapping[str, Clues] | None = None,
) -> tuple[RankedFault, ...]:
    """Rank every fault: those that can be, the likeliest first, then those that are ruled out.

    Args:
        observations: What was seen (`taxonomy.features.observe`, or typed by a person).
        facts: What is known of the run.
        cards: The cards, None for all that are installed.
        clues: What triage knows beyond the cards, None for what is shipped.
    """
    known = completed(facts or {})
    cards = library() if cards is None else cards
    clues = all_clues() if clues is None else clues
    seen = _by_quantity(observations)
    sure = {quantity for quantity in seen if _surely_healthy(quantity, observations)}
    found = []
    expectations = {}
    for card in cards.cards.values():
        clue = clues.get(card.id, NO_CLUES)
        expected = expectations[card.id] = expected_signs(card, clue)
        tally = _Tally()
        _weigh_observations(tally, seen, sure, expected, clue)
        _weigh_facts(tally, known, clue)
        if known.get(f"changed:{card.id}"):
            tally.add(FACT, "the configuration differs from the good one in what it takes")
        found.append(
            RankedFault(
                card.id, card.category, round(tally.score, 2), False, tally.ruled_out, tally.reasons()
            )
        )
    found.sort(key=lambda item: (bool(item.ruled_out), -item.score))
    best = found[0].score if found and not found[0].ruled_out else float("-inf")
    return tuple(
        RankedFault(
            item.fault,
            item.category,
            item.score,
            not item.ruled_out and item.score >= max(best - TIE, LEAST),
            item.ruled_out,
            item.reasons,
            _missing(expectations[item.fault], seen, known, clues.get(item.fault, NO_CLUES)),
        )
        for item in found
    )


def expected_signs(card: FaultCard, clue: Clues) -> dict[str, Sign]:
    """Return what a fault does, by quantity: the clues' signs, and the card's signature for the rest."""
    signs = {sign.of: sign for sign in clue.signs}
    for item in sorted(card.signature, key=lambda item: -item.weight):
        quantity, sign = QUANTITY.get(item.metric, (item.metric, 1))
        direction = item.direction
        if direction != "none" and (sign < 0) != (item.metric == "rollout_corr/kl" and direction == "down"):
            direction = "down" if direction == "up" else "up"  # any signed gap is a gap
        signs.setdefault(quantity, Sign(quantity, direction, (item.onset,), weight=item.weight))
    return signs


def _by_quantity(observations: Sequence[Observation]) -> dict[str, Observation]:
    """Return the observation that speaks for each quantity: symptoms first, exact ones first."""
    seen: dict[str, Observation] = {}
    order = sorted(
        observations,
        key=lambda item: (
            not item.alarm,
            not item.exact,
            item.rule == UNCLEAR,
            item.metric == "rollout_corr/kl",
            not item.onset,
        ),
    )
    for item in order:
        seen.setdefault(item.quantity, item)
    return seen


def moved(item: Observation) -> bool:
    """Whether an observation says that something is out of order, or at least not as in a healthy run."""
    return item.direction not in _STILL


def _surely_healthy(quantity: str, observations: Sequence[Observation]) -> bool:
    """Whether a quantity is known to be as in a healthy run, well enough to rule a fault out.

    A person's word is. A log's is where every metric of the quantity is in order beyond doubt and nothing kindred is a
    symptom; else what should have moved it only loses points.
    """
    mine = [item for item in observations if item.quantity == quantity]
    if any(moved(item) or item.doubt for item in mine) or all(item.rule == UNCLEAR for item in mine):
        return False
    told = all(item.rule == "" for item in mine)
    kindred = KINDRED.get(quantity, set())
    return told or not any(item.alarm and moved(item) and item.quantity in kindred for item in observations)


def _weigh_observations(
    tally: _Tally,
    seen: Mapping[str, Observation],
    sure: Collection[str],
    expected: Mapping[str, Sign],
    clue: Clues,
) -> None:
    for quantity, item in seen.items():
        title = METRIC_BY_NAME[item.metric].title
        said = f"{title} {item.sense}" + (f" ({item.onset})" if item.onset else "")
        sense = "up" if item.metric == "rollout_corr/kl" and item.sense == "down" else item.sense
        sign = expected.get(quantity)
        if not moved(item):
            clear = item.rule != UNCLEAR
            factor = 1.0 if clear else 0.5
            if quantity in clue.requires and quantity in sure and not _shown_directly(seen, expected):
                why = f"{title} is as in a healthy run, and this fault moves it"
                tally.ruled_out = tally.ruled_out or why
            elif sign is not None and sign.is_ == "none":
                tally.add(factor * HELD, f"{title} holds still, as it would")
            elif sign is not None and (
                clear or sign.is_ != "flat"
            ):  # by its past alone, flat and calm look the same
                tally.add(-factor * MISSED[sign.weight], f"{title} should go {sign.is_} and does not")
            continue
        weight = 1.0 if item.alarm else 0.5
        if sign is None:
            tally.add(-weight * UNEXPLAINED.get(quantity, 0.25), f"{said} is not explained")
            continue
        if sign.is_ == "none":
            tally.add(-weight * BROKE, f"{said}, where this fault leaves it alone")
            continue
        alike = 1.0 if sense == sign.is_ else _ALIKE.get((sense, sign.is_), 0.0)
        if not alike:
            tally.add(-weight * OPPOSITE, f"{said}, where this fault makes it go {sign.is_}")
            continue
        tally.add(weight * alike * AGREES[sign.weight], f"{said}, as expected")
        _weigh_onset(tally, item, sign, clue, title)


def _shown_directly(seen: Mapping[str, Observation], expected: Mapping[str, Sign]) -> bool:
    """Whether one of the quantities in `DIRECT` is out of order, and in the way that the fault puts it so."""
    return any(
        (item := seen.get(name)) is not None
        and item.alarm
        and (sign := expected.get(name)) is not None
        and sign.is_ == item.sense
        for name in DIRECT
    )


def _weigh_onset(tally: _Tally, item: Observation, sign: Sign, clue: Clues, title: str) -> None:
    """Add points for when it began, how it goes on, and how large it is."""
    if item.onset and item.onset == "start" and clue.phase in ("update", "resume"):
        tally.add(-PHASE, f"{title} was off before the first update, where this fault can't show yet")
    elif item.onset == "update" and clue.phase == "start":
        tally.add(-PHASE / 2, f"{title} was in order before the first update, where this fault would show")
    elif item.onset == "sudden" and clue.phase == "start" and "sudden" not in sign.when:
        # Only a restart or a change of settings could bring such a fault in later.
        tally.add(-ONSET, f"{title} was in order at first, where this fault shows from the start")
    elif item.onset and sign.when:
        near = max(_NEAR[item.onset].get(word, 0) for word in sign.when)
        tally.add(ONSET * near, f"{title}: onset {item.onset}, expected {' or '.join(sign.when)}")
    if item.pattern and item.pattern == sign.pattern:
        tally.add(PATTERN, f"{title} goes in {item.pattern}, as it would")
    limit = GAP_LIMITS.get(item.metric)
    if sign.size and limit is not None and item.value is not None:
        away = abs(item.value - limit.neutral)
        large = away > abs(limit.alarm - limit.neutral)
        fits = large == (sign.size == "large")
        tally.add(
            SIZE if fits else -SIZE, f"a {'large' if large else 'small'} gap, expected a {sign.size} one"
        )


def _weigh_facts(tally: _Tally, facts: Facts, clue: Clues) -> None:
    for key, condition in clue.needs.items():
        if key not in facts:
            tally.add(-PRESUPPOSED * (3 if key == "resumed" else 1), f"presupposes {key}: {condition}")
        elif holds(condition, facts[key]) is False:
            tally.ruled_out = tally.ruled_out or f"{key} is {facts[key]}: needs {condition}"
    for key, condition in clue.excludes.items():
        if key in facts and holds(condition, facts[key]):
            tally.ruled_out = tally.ruled_out or f"{key} is {facts[key]}"
    for key, condition in clue.favours.items():
        if key in facts and holds(condition, facts[key]):
            tally.add(FACT, f"{key} is {facts[key]}")
    for check in clue.checks:
        if check.found(facts):
            tally.add(CHECK, check.says)


def _missing(
    expected: Mapping[str, Sign], seen: Mapping[str, Observation], facts: Facts, clue: Clues
) -> tuple[str, ...]:
    """Return what would speak for or against a fault and is not known: metrics of weight, then facts."""
    metrics = [quantity for quantity, sign in expected.items() if quantity not in seen and sign.weight >= 2]
    metrics += [quantity for quantity in clue.requires if quantity not in seen and quantity not in metrics]
    names = [
        next((metric for metric, (name, _) in QUANTITY.items() if name == quantity), quantity)
        for quantity in metrics
    ]
    return (*names, *(key for key in clue.needs if key not in facts))
