"""Where replays stand during a race is what the score would say of them."""

from dataclasses import replace

import pytest

from diagnose.score.near import nearness, scale
from diagnose.score.score import gather
from tests.unit.test_score import FAULTS, LIBRARY, Case


def standings(case, replays=None):
    replays = case.replays if replays is None else replays
    given = gather(case.faulty, case.healthy, case.proxy, replays, LIBRARY, calibration=case.calibration)
    return nearness(given)


def test_distances_are_those_of_the_score():
    case = Case(11, "stale")
    found = standings(case)
    ranked = {item.fault: item.distance for item in case.score().ranking}
    assert {fault: item.distance for (fault, _), item in found.replays.items()} == pytest.approx(ranked)
    assert found.settled == "" and found.least > 0


@pytest.mark.parametrize("truth", FAULTS)
def test_the_truth_leads_and_unlike_faults_are_behind_by_more_than_chance(truth):
    found = standings(Case(12, truth)).replays
    leader = min(found, key=lambda key: found[key].distance)
    assert leader == (truth, 1.0) and found[leader].behind == 0
    others = [item.behind for key, item in found.items() if key != leader]
    assert sum(behind > 0 for behind in others) >= len(others) - 1
    assert all(item.reach <= item.distance + 1e-9 for item in found.values())


def test_a_replay_that_is_far_too_weak_reaches_the_incident_at_another_amplitude():
    case = Case(13, "lr", gain=1.0)
    weak = case.replay("lr", 0.25)
    found = standings(case, [weak, *case.replays[:1]]).replays["lr", 1.0]
    assert found.reach < 0.85 * found.distance
    assert found.reach_behind < found.behind + 1e-9


def test_an_unwitnessed_replay_is_missing_and_a_healthy_log_is_settled():
    case = Case(14, None)
    case.replays[0] = replace(case.replays[0], witness_ok=False)
    found = standings(case)
    assert (case.replays[0].fault, 1.0) not in found.replays and found.settled
    assert standings(case, []).replays == {}


def test_scaling_leaves_events_and_noise():
    case = Case(15, "lr")
    given = gather(case.faulty, case.healthy, case.proxy, case.replays, LIBRARY, calibration=case.calibration)
    from diagnose.score.score import lay

    before = lay(given)[0].seen[0].signature
    after = scale(before, 2.0)
    assert after.noise_MB is before.noise_MB and after.event_MB is before.event_MB
