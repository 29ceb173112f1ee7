"""The report that is worked out by hand, on synthetic incidents: every number there is computed twice."""

import numpy as np
import pytest

from bench.by_hand import same, worked
from diagnose.score.calibration import Calibration, SeedSet
from diagnose.score.plan import Replay
from diagnose.score.score import gather, score
from diagnose.score.simulate import World
from taxonomy.registry import Library

WORLD = World.make()
FAULTS = {
    "a": {"actor/entropy": 14.0, "actor/kl_loss": 20 * np.linspace(0, 1, 60), "actor/pg_loss": 3.0},
    "b": {"actor/entropy": -12.0, "actor/grad_norm": 9.0},
}


@pytest.mark.parametrize("metric", ["actor/entropy", "actor/kl_loss"])
def test_by_hand_is_what_the_scoring_says(metric):
    rng = np.random.default_rng(3)
    own, other = (SeedSet.from_curves(WORLD.runs(rng, 20, 60)) for _ in range(2))
    curves = (
        WORLD.runs(rng, 1, 60, FAULTS["a"]),
        WORLD.runs(rng, 2, 60),
        WORLD.runs(rng, 2, 60),
        [Replay(name, WORLD.runs(rng, 2, 60, effect)) for name, effect in FAULTS.items()],
        Library(),
    )
    calibration = Calibration(other, "", "", own)
    found = score(*curves, calibration=calibration)
    text = worked(gather(*curves, calibration=calibration), None, found, metric)
    assert found.ranking[0].fault == "a"
    assert f"= {found.ranking[0].distance:.3f}." in text
    assert "P is the largest of all: " in text and "**up**" in text


def test_a_number_that_is_not_the_scorings_is_refused():
    with pytest.raises(ValueError, match="d: by hand"):
        same(1.0, 1.001, "d")
