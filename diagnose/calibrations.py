"""Which healthy seeds on file belong to a session: found by the hashes of proxy and recipe, kept in the run folder.

The seeds of the *original* count only for a log that is known to come from the same checkpoint under the same
recipe (its manifest says so): another system's healthy runs are no twin of the incident.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import proxy.embedded
from diagnose.score.calibration import Calibration, CalibrationMismatch
from diagnose.session import Session, recipe_hash
from diagnose.store import RunFolder

KEPT = "calibration.npz"


def user_folder() -> Path:
    """Return where `diagnose calibrate` puts calibrations that later runs find by themselves."""
    from platformdirs import user_data_path

    return user_data_path("rl-diagnose") / "calibrations"


def shipped_folder() -> Path:
    """Return where the calibrations of the embedded originals lie."""
    return Path(proxy.embedded.__file__).parent / "calibration"


def keep_calibration(session: Session, folder: RunFolder, proxy_hash: str) -> Path | None:
    """Copy the calibration that belongs to a session into its run folder; return where it came from, if anywhere.

    Raises:
        CalibrationMismatch: The session names one, and it belongs to another proxy or recipe.
    """
    kept = folder.path / KEPT
    if kept.exists():
        return kept
    if session.engine != "local" and not session.calibration:
        return None  # what is on file was computed by the local engine
    if session.calibration:
        source = Path(session.calibration)
        Calibration.load(source).check(proxy_hash=proxy_hash, recipe_hash=recipe_hash(session.recipe))
    else:
        found = next(_matching(proxy_hash, recipe_hash(session.recipe)), None)
        if found is None:
            return None
        source = found
    partial = kept.with_suffix(".part")
    shutil.copyfile(source, partial)
    partial.replace(kept)
    return source


def _matching(proxy_hash: str, recipe: str) -> Iterator[Path]:
    """Yield calibrations on file for a proxy and a recipe, the user's own first."""
    for home in (user_folder(), shipped_folder()):
        for path in sorted(home.glob("*.npz")):
            try:
                Calibration.load(path).check(proxy_hash=proxy_hash, recipe_hash=recipe)
            except CalibrationMismatch:
                continue
            yield path


def shipped_calibration(proxy_hash: str, recipe: str) -> Calibration | None:
    """Return the shipped calibration of a proxy and a recipe, None where there is none; the user's own don't count."""
    for path in sorted(shipped_folder().glob("*.npz")):
        found = Calibration.load(path)
        if (found.proxy_hash, found.recipe_hash) == (proxy_hash, recipe):
            return found
    return None


def calibration_of_original(model_hash: str, recipe: str) -> Calibration | None:
    """Return a calibration on file whose original seeds are of a model and a recipe, None where there is none."""
    if not model_hash:
        return None
    for home in (user_folder(), shipped_folder()):
        for path in sorted(home.glob("*.npz")):
            try:
                found = Calibration.load(path)
            except CalibrationMismatch:
                continue
            if found.original and (found.original_hash, found.recipe_hash) == (model_hash, recipe):
                return found
    return None


def calibration_for(session: Session, folder: RunFolder) -> Calibration | None:
    """Return the calibration kept in a run folder, None where there is none."""
    kept = folder.path / KEPT
    if not kept.exists():
        return None
    calibration = Calibration.load(kept)
    same = (session.original_hash, session.original_recipe) == (
        calibration.original_hash,
        calibration.recipe_hash,
    )
    return calibration if same else replace(calibration, original=None, original_hash="")
