"""What to do now: keep the evidence, stop or roll back, and the one check that costs least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taxonomy.assessment import MIN_STEPS, Triage
from taxonomy.clues import NO_CLUES, all_clues
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.registry import FaultCard, Library


@dataclass(frozen=True)
class Advice:
    """Three sentences for somebody who was woken up.

    Attributes:
        keep: What would be lost otherwise.
        act: Whether to stop, and where to go back to.
        look: The check that costs least, for the likeliest fault; it changes nothing.
        mend: What to do once that check has confirmed the fault, "" where none is suspected.
        run: The experiment that settles it, "" where none is due.
    """

    keep: str
    act: str
    look: str
    mend: str = ""
    run: str = ""


_FATAL = {"nan", "zero"}
_SPOILS = {"reward", "held_out", "text", "sameness", "loss", "grad"}


def advise(answer: Triage, cards: Library, first_step: int | None = None) -> Advice:
    """Return what to do about a triage's answer.

    Args:
        answer: The answer.
        cards: Fault cards.
        first_step: First step of the log, None without one.
    """
    if answer.verdict == "healthy":
        return Advice(
            "nothing needs to be kept",
            "let it run",
            "a fault that was there from the first step may show only against a healthy run (--healthy)",
        )
    if answer.verdict == "inconclusive" and answer.steps is not None and answer.steps >= MIN_STEPS:
        return Advice(
            "the log and the configuration",
            "let it run, and look at what is not in this log: reward, KL, entropy, gradient norm, response length",
            "log more metrics, or give a healthy log of the same recipe (--healthy)",
        )
    if answer.verdict == "inconclusive":
        later = "let it run on, if nothing is broken by it, and ask again from ten steps on"
        if answer.candidates:
            return Advice(_keep(answer, first_step), later, _look(answer, cards), _mend(answer, cards))
        return Advice(
            "the log and the configuration",
            later,
            "a healthy log of the same recipe (--healthy) makes an answer possible earlier",
        )
    return Advice(
        _keep(answer, first_step),
        _act(answer, first_step),
        _look(answer, cards),
        _mend(answer, cards),
        "diagnose triage … --write-playbook FILE, then: diagnose run FILE",
    )


def _good_step(answer: Triage, first_step: int | None) -> int | None:
    """Return the step before which the run was in order, None where it never was, or nobody knows."""
    if answer.onset is None or answer.onset[0] <= (first_step or 1) + 1:
        return None
    return answer.onset[0]


def _begins_late(first_step: int | None) -> bool:
    """Whether the log leaves out the run's first steps, so that the incident may be older than it."""
    return first_step is not None and first_step > 1


def _keep(answer: Triage, first_step: int | None) -> str:
    step = _good_step(answer, first_step)
    which = "the first checkpoint there is"
    if step:
        which = f"the last checkpoint before step {step} and the first after it"
    elif _begins_late(first_step):
        which = f"the checkpoints from before step {first_step}, where the log begins,"
    return f"copy log, resolved configuration and library versions; keep {which} from being rotated away"


def _act(answer: Triage, first_step: int | None) -> str:
    alarms = [item for item in answer.observations if item.alarm]
    spoilt = any(item.direction in _FATAL or item.quantity in _SPOILS for item in alarms)
    step = _good_step(answer, first_step)
    where = "the log begins with the fault, so none of its checkpoints is good"
    if step:
        where = f"once the cause is found, go back to the last checkpoint before step {step}"
    elif _begins_late(first_step):
        where = (
            f"the log does not show the steps before {first_step}: look there for a good one to go back to"
        )
    elif answer.onset is None and not any(item.onset in ("start", "immediate") for item in alarms):
        where = "since when is not known, so look for a good step to go back to"
    if spoilt:
        return f"stop the run, it learns nothing good any more; {where}"
    if any(item.quantity in ("gap", "routes") for item in alarms):
        return f"pause the run at its next checkpoint, its updates rest on samples of another policy; {where}"
    return f"it may run on while you look, but trust no result; {where}"


def _look(answer: Triage, cards: Library) -> str:
    likeliest = answer.likeliest
    if not likeliest:
        return "compare configuration and versions with the last healthy run: --config and --good-config"
    card = cards[likeliest[0].fault]
    tied = {item.fault for item in likeliest[1:]}
    for rival in card.rivals:
        if rival.fault in tied:
            return f"{METRIC_BY_NAME[rival.metric].title} tells {card.id} from {rival.fault}: {rival.why}"
    check = all_clues().get(card.id, NO_CLUES).look or first_sentence(card.check_by_hand)
    return (
        check or f"diagnose faults {card.id} tells what it does and who saw it: see whether that is your case"
    )


def _mend(answer: Triage, cards: Library) -> str:
    """Return the mend of the likeliest fault as what it is: nothing to do before the fault is confirmed."""
    if not answer.likeliest:
        return ""
    card = cards[answer.likeliest[0].fault]
    return f"{card.id} is confirmed, and not before: {first_sentence(card.fix)}"


def first_sentence(text: str) -> str:
    """Return the first sentence of a text."""
    head, dot, _ = text.partition(". ")
    return head + "." if dot else text


def injectable(answer: Triage, cards: Library) -> Sequence[FaultCard]:
    """Return the cards of the candidates that can be replayed at all, in the order of the ranking."""
    return [cards[item.fault] for item in answer.candidates if cards[item.fault].injectable]
