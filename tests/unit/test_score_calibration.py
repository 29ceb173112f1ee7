"""Calibrations on file: round trip, refusals, and no pickles."""

import pickle

import numpy as np
import pytest

from diagnose.score.calibration import Calibration, CalibrationMismatch, SeedSet
from diagnose.score.simulate import World

rng = np.random.default_rng(0)
WORLD = World.make()


def made(original=True):
    return Calibration(
        SeedSet.from_curves(WORLD.runs(rng, 3, 30)),
        "proxy-1",
        "recipe-1",
        SeedSet.from_curves(WORLD.runs(rng, 2, 30)) if original else None,
        "original-1" if original else "",
    )


@pytest.mark.parametrize("original", [True, False])
def test_round_trip(tmp_path, original):
    before = made(original)
    before.save(tmp_path / "c.npz")
    after = Calibration.load(tmp_path / "c.npz")
    assert (after.proxy_hash, after.recipe_hash, after.original_hash) == (
        before.proxy_hash,
        before.recipe_hash,
        before.original_hash,
    )
    assert after.proxy.metrics == before.proxy.metrics
    np.testing.assert_array_equal(after.proxy.values_SMN, before.proxy.values_SMN)
    assert (after.original is None) == (not original)
    assert [path.name for path in tmp_path.iterdir()] == ["c.npz"]


def test_curves_come_back_with_holes_and_events():
    run = WORLD.run(rng, 20)
    values = {name: row.copy() for name, row in run.values.items()}
    values["actor/grad_norm"][4] = np.nan
    values["critic/rewards/mean"][6] = np.nan
    broken = type(run)("t", run.steps_N, values, {"actor/grad_norm": (5,)})
    shorter = WORLD.run(rng, 12)
    first, second = SeedSet.from_curves([broken, shorter]).curves()
    assert dict(first.nonfinite) == {"actor/grad_norm": (5,)} and not second.nonfinite
    assert np.isnan(first.values["critic/rewards/mean"][6]) and np.isnan(first.values["actor/grad_norm"][4])
    assert np.isnan(second.values["actor/entropy"][12:]).all()
    np.testing.assert_allclose(
        second.values["actor/entropy"][:12], shorter.values["actor/entropy"], rtol=1e-6
    )


def test_settings_and_costs_are_not_stored():
    run = WORLD.run(rng, 5)
    with_cost = type(run)(
        "t", run.steps_N, {**run.values, "timing_s/step": np.ones(5), "actor/lr": np.ones(5)}
    )
    assert set(SeedSet.from_curves([with_cost]).metrics) == set(WORLD.metrics)


def test_refused_for_another_model_or_recipe():
    calibration = made()
    calibration.check(proxy_hash="proxy-1", recipe_hash="recipe-1", original_hash="original-1")
    calibration.check(proxy_hash="proxy-1", recipe_hash="recipe-1")
    for wrong in (
        {"proxy_hash": "x", "recipe_hash": "recipe-1"},
        {"proxy_hash": "proxy-1", "recipe_hash": "x"},
        {"proxy_hash": "proxy-1", "recipe_hash": "recipe-1", "original_hash": "x"},
    ):
        with pytest.raises(CalibrationMismatch, match="belongs to another"):
            calibration.check(**wrong)


def test_foreign_files_are_refused_and_pickles_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was executed",))

    np.savez(tmp_path / "other.npz", a=np.ones(3))
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Bomb()))
    np.savez(tmp_path / "object.npz", format=np.asarray(1), hashes=np.array([Bomb()] * 3, object))
    for name in ("other", "text", "pickle", "object"):
        with pytest.raises(CalibrationMismatch):
            Calibration.load(tmp_path / f"{name}.npz")
