"""The race: which replays to run next, given where those that ran stand. Pure, and blind to time.

A race goes in rungs. After each of them all replays so far are compared with the incident, and the next rung
follows from the curves alone: whoever has the same finished runs comes to the same plan, after a `kill -9` too.
Only the budget depends on the clock, and all it can do is end the race early.

    breadth   every candidate once, at the card's default strength
    bracket   those still in the race: a weaker and a stronger one
    depth     further seeds, at the strength that came nearest
    refine    strengths on either side of the nearest, or beyond the outermost
    depth     further seeds where another strength is now the nearest

After every rung the clear losers stop: those whose distance is behind the leader's by more than chance can make up,
and those that explain next to nothing. As long as a candidate's neighbouring strengths were not tried it is given
the amplitude that would suit it best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diagnose.score.near import Nearness
from diagnose.session import PlannedFault, Session
from taxonomy.registry import FaultCard, Library

GRID = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Strengths that are ever fitted: a log grid of half octaves around the card's default."""

RUNGS = ("breadth", "bracket", "depth", "refine", "depth of the refined")


LEAST_EXPLAINED = 0.1
"""A candidate that explains less of the incident than this at the amplitude that suits it best is not pursued."""


@dataclass(frozen=True)
class Entry:
    """A candidate in the race.

    Attributes:
        fault: Fault id.
        strength: Strength to begin with.
        strengths: Strengths that may be tried, ascending, `strength` among them.
    """

    fault: str
    strength: float = 1.0
    strengths: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        assert self.strength in self.strengths, self


@dataclass(frozen=True, order=True)
class Trial:
    """One replay: a fault at a strength with a seed."""

    fault: str
    strength: float
    seed: int


@dataclass(frozen=True)
class Rung:
    """What is to be run before anything is compared again.

    Attributes:
        name: One of `RUNGS`.
        trials: Replays, in the order in which they start; none of them was in an earlier rung.
        stopped: Candidates that leave the race before this rung, with the reason.
    """

    name: str
    trials: tuple[Trial, ...]
    stopped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Race:
    """Who races, and by which rules.

    Attributes:
        entries: Candidates, the likeliest first.
        seeds: Seeds of the replays.
        eliminate: Whether clear losers stop. Without it every candidate gets all seeds in the first rung, as
            somebody who named the candidates asked for, and only strengths are fitted.
    """

    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    eliminate: bool = True


def race_of(session: Session) -> Race:
    """Return the race that a session asks for."""
    entries = tuple(Entry(c.fault, c.strength, c.fit or (c.strength,)) for c in session.candidates)
    return Race(entries, session.seeds, session.race)


def replayed(session: Session, trial: Trial, cards: Library) -> PlannedFault:
    """Return the candidate of a session that a trial replays, at the trial's strength."""
    own = [item for item in session.candidates if item.fault == trial.fault]
    exact = [item for item in own if item.strength == trial.strength]
    return (exact or own)[0].at(trial.strength, cards[trial.fault])


def strengths(card: FaultCard) -> tuple[float, ...]:
    """Return the strengths of the grid that are distinct for a card: within its limits, and after rounding.

    Of strengths that come to the same parameter values the one nearest to the default stands for all.
    """
    found: dict[tuple[float, ...], float] = {}
    for strength in sorted(GRID, key=lambda s: (abs(math.log(s)), s)):
        found.setdefault(tuple(card.values(strength).values()), strength)
    return tuple(sorted(found.values()))


def rungs(race: Race, history: Sequence[Nearness]) -> list[Rung]:
    """Return the rungs so far and the next one; the next is missing when the race is over.

    Args:
        race: Who races.
        history: Where everybody stood after each finished rung; entry i rests on the trials of rungs 0 … i and on
            no others.
    """
    first = race.seeds[:1] if race.eliminate else race.seeds
    found = [Rung(RUNGS[0], tuple(Trial(e.fault, e.strength, s) for s in first for e in race.entries))]
    racing = list(race.entries)
    tried = set(found[0].trials)
    number = 1
    for standing in history:
        if standing.settled:
            return found
        stopped = _losers(racing, standing, number) if race.eliminate else {}
        racing = [entry for entry in racing if entry.fault not in stopped]
        near = sorted(
            (entry for entry in racing if _best(entry, standing) is not None),
            key=lambda entry: standing.replays[entry.fault, _best(entry, standing) or 0.0].distance,
        )
        trials: tuple[Trial, ...] = ()
        while number < len(RUNGS) and not trials:
            trials = _trials(number, near, race.seeds, standing, tried)
            number += 1
        if not trials:
            if stopped:
                found.append(Rung(RUNGS[-1], (), stopped))
            return found
        tried |= set(trials)
        found.append(Rung(RUNGS[number - 1], trials, stopped))
    return found


def _best(entry: Entry, standing: Nearness) -> float | None:
    """Return the strength of a candidate that came nearest, None where none was seen."""
    seen = {strength: near for (fault, strength), near in standing.replays.items() if fault == entry.fault}
    return min(seen, key=lambda s: (bool(seen[s].denied), seen[s].distance, s), default=None)


def _losers(racing: Sequence[Entry], standing: Nearness, number: int) -> dict[str, str]:
    """Return who stops, with the reason: clear losers, and those that explain next to nothing."""
    stopped = {}
    leader = min(standing.replays.values(), key=lambda item: (bool(item.denied), item.distance), default=None)
    for entry in racing:
        best = _best(entry, standing)
        if best is None:
            continue  # a failed replay tells nothing, and nothing follows from it
        near = standing.replays[entry.fault, best]
        # Until both neighbours were tried, another strength may still come nearer.
        open_ = len(entry.strengths) > 1 and number <= RUNGS.index("bracket")
        behind = min(near.behind, near.reach_behind) if open_ else near.behind
        if near.denied and leader is not None and not leader.denied:
            stopped[entry.fault] = f"denied as the only cause by {near.denied}"
        elif open_ and near.explained < LEAST_EXPLAINED:
            stopped[entry.fault] = f"explains less than {LEAST_EXPLAINED:.0%} even at another amplitude"
        elif leader is not None and behind > standing.least:
            stopped[entry.fault] = "too far behind the nearest" + (
                ", even at another amplitude" if open_ else ""
            )
    return stopped


def _trials(
    number: int, near: Sequence[Entry], seeds: Sequence[int], standing: Nearness, tried: set[Trial]
) -> tuple[Trial, ...]:
    """Return what a rung runs, nearest candidate first."""
    wanted: list[Trial] = []
    for entry in near:
        best = _best(entry, standing)
        assert best is not None
        done = sorted({trial.strength for trial in tried if trial.fault == entry.fault})
        if RUNGS[number].startswith("depth"):
            wanted += [Trial(entry.fault, best, seed) for seed in seeds]
        elif RUNGS[number] == "bracket":
            around = (_closest(entry, best / 2, 0.0, best), _closest(entry, best * 2, best, math.inf))
            wanted += [Trial(entry.fault, s, seeds[0]) for s in around if s is not None]
        else:
            wanted += [Trial(entry.fault, s, seeds[0]) for s in _refined(entry, best, done)]
    return tuple(dict.fromkeys(trial for trial in wanted if trial not in tried))


def _refined(entry: Entry, best: float, done: Sequence[float]) -> list[float]:
    """Return the strengths half way to the tried neighbours of the nearest, or the next beyond the outermost."""
    below = max((s for s in done if s < best), default=None)
    above = min((s for s in done if s > best), default=None)
    low = (
        _closest(entry, math.sqrt(below * best), below, best)
        if below
        else _closest(entry, best / 2, 0.0, best)
    )
    high = (
        _closest(entry, math.sqrt(above * best), best, above)
        if above
        else _closest(entry, best * 2, best, math.inf)
    )
    return [s for s in (low, high) if s is not None]


def _closest(entry: Entry, aim: float, low: float, high: float) -> float | None:
    """Return the allowed strength inside (low, high) that is closest to `aim` on a log scale, None without any."""
    inside = [s for s in entry.strengths if low < s < high]
    return min(inside, key=lambda s: (abs(math.log(s / aim)), s), default=None)
