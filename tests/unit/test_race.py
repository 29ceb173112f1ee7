"""The race: who goes on after each rung, and that the same finished runs always make the same plan."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnose.race import GRID, RUNGS, Entry, Race, Trial, race_of, replayed, rungs, strengths
from diagnose.score.near import Near, Nearness
from diagnose.session import PlannedFault, Session, fault_spec
from proxy.specs import BuildSpec, Recipe
from taxonomy.registry import Parameter, library

CARDS = library()
FIT = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)


def near(distance, *, behind=0.0, reach_behind=None, explained=0.6):
    return Near(distance, behind, distance, behind if reach_behind is None else reach_behind, explained)


def standing(settled="", **replays):
    return Nearness(
        {(name.split("_")[0], float(name.split("_")[1])): item for name, item in replays.items()},
        settled,
        0.05,
    )


def shown(rung):
    return [(t.fault, t.strength, t.seed) for t in rung.trials]


RACE = Race((Entry("a", 1.0, FIT), Entry("b", 1.0, FIT), Entry("c")), (1, 2))


def test_everybody_starts_once_at_the_default_in_the_order_of_the_entries():
    (first,) = rungs(RACE, [])
    assert first.name == "breadth"
    assert shown(first) == [("a", 1.0, 1), ("b", 1.0, 1), ("c", 1.0, 1)]


def test_a_race_from_breadth_to_the_refined_strength():
    history = [standing(a_1=near(1.0), b_1=near(2.0, behind=0.5), c_1=near(1.2, behind=-0.1))]
    plan = rungs(RACE, history)
    assert set(plan[1].stopped) == {"b"} and "too far behind" in plan[1].stopped["b"]
    assert shown(plan[1]) == [("a", 0.5, 1), ("a", 2.0, 1)]  # c has one strength only
    history.append(
        replace(history[0], replays=history[0].replays | {("a", 0.5): near(1.4), ("a", 2.0): near(0.8)})
    )
    plan = rungs(RACE, history)
    assert plan[2].name == "depth" and shown(plan[2]) == [("a", 2.0, 2), ("c", 1.0, 2)]  # the nearest first
    history.append(history[-1])
    plan = rungs(RACE, history)
    assert plan[3].name == "refine" and shown(plan[3]) == [("a", 1.4, 1), ("a", 4.0, 1)]
    history.append(
        replace(history[-1], replays=history[-1].replays | {("a", 1.4): near(0.7), ("a", 4.0): near(3)})
    )
    plan = rungs(RACE, history)
    assert shown(plan[4]) == [("a", 1.4, 2)]
    assert len(rungs(RACE, [*history, history[-1]])) == 5  # and that was it


def test_until_its_neighbours_were_tried_a_candidate_is_judged_by_its_reach():
    behind = near(2.0, behind=0.5, reach_behind=-0.1)
    first = standing(a_1=near(1.0), b_1=behind, c_1=near(3, behind=1.0))
    plan = rungs(RACE, [first])
    assert set(plan[1].stopped) == {"c"}
    assert ("b", 2.0, 1) in shown(plan[1])
    second = replace(first, replays=first.replays | {("b", 2.0): behind, ("b", 0.5): near(2.5, behind=0.6)})
    assert set(rungs(RACE, [first, second])[2].stopped) == {"b"}


def test_what_explains_next_to_nothing_is_not_pursued_although_nobody_is_nearer():
    plan = rungs(RACE, [standing(a_1=near(1.0, explained=0.02), b_1=near(1.0, explained=0.3), c_1=near(1.1))])
    assert set(plan[1].stopped) == {"a"} and "less than 10%" in plan[1].stopped["a"]


def test_nothing_follows_a_healthy_log():
    assert len(rungs(RACE, [standing("The log does not differ.", a_1=near(0.1))])) == 1


def test_a_failed_replay_leads_to_nothing_and_harms_nobody():
    plan = rungs(RACE, [standing(a_1=near(1.0), c_1=near(1.1))])
    assert {t.fault for t in plan[1].trials} == {"a"} and not plan[1].stopped


def test_named_candidates_all_get_all_seeds_and_only_a_fit_goes_on():
    race = Race((Entry("a", 2.0, (2.0,)), Entry("b", 1.0, FIT)), (1, 2), eliminate=False)
    plan = rungs(race, [standing(a_2=near(1.0), b_1=near(9.0, behind=8.0))])
    assert shown(plan[0]) == [("a", 2.0, 1), ("b", 1.0, 1), ("a", 2.0, 2), ("b", 1.0, 2)]
    assert shown(plan[1]) == [("b", 0.5, 1), ("b", 2.0, 1)] and not plan[1].stopped
    assert len(rungs(replace(race, entries=race.entries[:1]), [standing(a_2=near(1.0))])) == 1


entries = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([(1.0,), FIT, (0.5, 1.0), (1.0, 2.0, 4.0)])),
    min_size=1,
    max_size=8,
    unique_by=lambda item: item[0],
)


@settings(max_examples=150, deadline=None)
@given(entries, st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False), st.floats(0.0, 0.6))
def test_a_race_ends_repeats_itself_and_runs_nothing_twice(found, seeds, eliminate, random, failing):
    race = Race(tuple(Entry(f, 1.0, s) for f, s in found), tuple(range(1, seeds + 1)), eliminate)
    allowed = {f: s for f, s in found}
    history, seen, stopped = [], {}, {}
    for _ in range(len(RUNGS) + 1):
        plan = rungs(race, history)
        assert plan == rungs(race, list(history))  # curves alone decide
        assert plan[: len(history)] == rungs(race, history[:-1])[: len(history)] if history else True
        if len(plan) == len(history) or not plan[-1].trials:
            break
        stopped |= plan[-1].stopped
        for trial in plan[-1].trials:
            assert trial.fault not in stopped and trial.strength in allowed[trial.fault]
            if random.random() >= failing:
                d = (
                    seen[trial.fault, trial.strength].distance
                    if (trial.fault, trial.strength) in seen
                    else None
                )
                d = random.uniform(0.1, 3) if d is None else d
                seen[trial.fault, trial.strength] = near(
                    d,
                    behind=random.uniform(-1, 1),
                    reach_behind=random.uniform(-1, 1),
                    explained=random.random(),
                )
        history.append(Nearness(dict(seen), "", 0.05))
    else:
        pytest.fail("the race does not end")
    trials = [trial for rung in rungs(race, history) for trial in rung.trials]
    assert len(trials) == len(set(trials))
    assert {t.fault for t in trials} == set(allowed)
    assert eliminate or not stopped


@settings(max_examples=60, deadline=None)
@given(st.floats(0.26, 3.9))
def test_the_fit_closes_in_on_the_best_strength(best):
    """A distance profile with one valley: the nearest strength tried ends within half an octave of it, or at an end."""
    race = Race((Entry("a", 1.0, FIT),), (1,))
    history = []
    while True:
        plan = rungs(race, history)
        if len(plan) == len(history) or not plan[-1].trials:
            break
        tried = {t.strength for rung in plan for t in rung.trials}
        history.append(Nearness({("a", s): near(abs(math.log(s / best)) + 0.1) for s in tried}, "", 0.05))
    nearest = min(tried, key=lambda s: abs(math.log(s / best)))
    assert abs(math.log2(nearest / best)) <= 0.51
    assert len(tried) <= 5


def test_the_leader_never_stops():
    plan = rungs(RACE, [standing(a_1=near(1.0), b_1=near(1.0), c_1=near(1.0))])
    assert not plan[1].stopped


@pytest.mark.parametrize("fault", sorted(CARDS.cards))
def test_strengths_stay_within_the_limits_of_a_card_and_differ_in_effect(fault):
    card = CARDS[fault]
    found = strengths(card)
    assert 1.0 in found and set(found) <= set(GRID) and list(found) == sorted(found)
    values = [tuple(card.values(strength).values()) for strength in found]
    assert len(set(values)) == len(values)
    for strength in found:
        for parameter in card.parameters:
            assert parameter.minimum <= card.values(strength)[parameter.name] <= parameter.maximum
    if all(parameter.scaling == "none" for parameter in card.parameters):
        assert found == (1.0,)


def test_a_share_that_cannot_grow_is_only_fitted_downwards():
    share = Parameter("share", 1.0, "m", "s", minimum=0.0, maximum=1.0, scaling="proportional")
    card = replace(CARDS["reward_flipped"], parameters=(share,))
    assert strengths(card) == (0.25, 0.35, 0.5, 0.7, 1.0)


def test_a_trial_keeps_window_and_probability_of_its_candidate():
    spec = replace(fault_spec(CARDS["stale_weights"], 1.0, 7), until_step=20, probability=0.5)
    session = Session(
        "x", "s", "local", "checkpoint", "embedded:qwen3_moe", BuildSpec("c", "o", 12), Recipe(), (1, 2),
        (PlannedFault("stale_weights", 1.0, spec, strengths(CARDS["stale_weights"])),), race=True,
    )  # fmt: skip
    assert race_of(session).entries[0].strengths == strengths(CARDS["stale_weights"])
    stronger = replayed(session, Trial("stale_weights", 2.0, 1), CARDS)
    assert (stronger.strength, stronger.spec.params) == (2.0, CARDS["stale_weights"].values(2.0))
    assert (stronger.spec.from_step, stronger.spec.until_step, stronger.spec.probability) == (7, 20, 0.5)
    assert replayed(session, Trial("stale_weights", 1.0, 1), CARDS) == session.candidates[0]
    assert Session.from_json(session.to_json()) == session
