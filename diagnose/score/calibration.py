"""Healthy seeds on file: what a system does when nothing is wrong, and how much it varies while doing it.

Legend of shape suffixes: ``_S`` seeds, ``_M`` metrics, ``_N`` steps.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diagnose.curves import Curves
from diagnose.errors import DiagnoseError, ExitCode
from taxonomy.metrics import METRIC_BY_NAME

FORMAT = 1


class CalibrationMismatch(DiagnoseError):
    """A calibration that belongs to another model or recipe, or a file that is none."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True)
class SeedSet:
    """Healthy runs of one system on common steps.

    Attributes:
        metrics: Canonical names of the ranking metrics that were logged.
        steps_N: Steps, strictly increasing.
        values_SMN: Raw values. NaN: not logged at that step. Infinite: logged as non-finite.
    """

    metrics: tuple[str, ...]
    steps_N: NDArray[np.float64]
    values_SMN: NDArray[np.float32]

    def __post_init__(self) -> None:
        assert self.values_SMN.shape[1:] == (len(self.metrics), len(self.steps_N)), self.values_SMN.shape

    @classmethod
    def from_curves(cls, runs: Sequence[Curves]) -> SeedSet:
        """Stack healthy runs; metrics that do not rank are left out, missing steps become NaN."""
        assert runs, "no healthy runs"
        steps_N = np.unique(np.concatenate([run.steps_N for run in runs]))
        names = tuple(
            name
            for name, metric in METRIC_BY_NAME.items()
            if metric.ranks and any(name in run.values for run in runs)
        )
        values_SMN = np.full((len(runs), len(names), len(steps_N)), np.nan, np.float32)
        for s, run in enumerate(runs):
            at = np.searchsorted(steps_N, run.steps_N)
            for m, name in enumerate(names):
                if name in run.values:
                    values_SMN[s, m, at] = run.values[name]
                bad = np.searchsorted(steps_N, np.asarray(run.nonfinite.get(name, ()), float))
                values_SMN[s, m, bad] = np.inf
        return cls(names, steps_N, values_SMN)

    def curves(self) -> tuple[Curves, ...]:
        """Return the seeds as curves."""
        runs = []
        for s, values_MN in enumerate(self.values_SMN.astype(np.float64)):
            bad_MN = np.isinf(values_MN)
            finite_MN = np.where(bad_MN, np.nan, values_MN)
            runs.append(
                Curves(
                    source=f"calibration seed {s}",
                    steps_N=self.steps_N,
                    values=dict(zip(self.metrics, finite_MN, strict=True)),
                    nonfinite={
                        name: tuple(int(step) for step in self.steps_N[bad_N])
                        for name, bad_N in zip(self.metrics, bad_MN, strict=True)
                        if bad_N.any()
                    },
                )
            )
        return tuple(runs)


@dataclass(frozen=True)
class Calibration:
    """Healthy seeds of the proxy and, where they could be afforded, of the original.

    Attributes:
        proxy: Healthy proxy seeds; at least 20 for margins that are read off the seeds.
        proxy_hash: Content hash of the proxy's weights.
        recipe_hash: Content hash of the recipe, seeds left out.
        original: Healthy seeds of the original under the same recipe, or None.
        original_hash: Content hash of the original's weights, "" without `original`.
    """

    proxy: SeedSet
    proxy_hash: str
    recipe_hash: str
    original: SeedSet | None = None
    original_hash: str = ""

    def check(self, *, proxy_hash: str, recipe_hash: str, original_hash: str | None = None) -> None:
        """Refuse a calibration of something else.

        Args:
            proxy_hash: Hash of the proxy in use.
            recipe_hash: Hash of the recipe in use.
            original_hash: Hash of the original; None where it is not known (a foreign log).

        Raises:
            CalibrationMismatch: A hash differs.
        """
        pairs = {
            "proxy": (self.proxy_hash, proxy_hash),
            "recipe": (self.recipe_hash, recipe_hash),
        }
        if original_hash is not None and self.original is not None:
            pairs["original"] = (self.original_hash, original_hash)
        for what, (ours, theirs) in pairs.items():
            if ours != theirs:
                raise CalibrationMismatch(
                    f"the calibration belongs to another {what}: it has {ours}, this run has {theirs}",
                    mend="compute it anew with `diagnose calibrate`",
                )

    def save(self, path: Path) -> None:
        """Write the calibration as a compressed NumPy archive without pickles, atomically."""
        arrays = {
            "format": np.asarray(FORMAT),
            "hashes": np.asarray([self.proxy_hash, self.recipe_hash, self.original_hash]),
        }
        for name, seeds in (("proxy", self.proxy), ("original", self.original)):
            if seeds is not None:
                arrays[f"{name}_metrics"] = np.asarray(seeds.metrics)
                arrays[f"{name}_steps"] = seeds.steps_N
                arrays[f"{name}_values"] = seeds.values_SMN
        partial = path.with_name(path.name + ".part")
        with partial.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # the stub knows no mapping of arrays
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a calibration.

        Raises:
            CalibrationMismatch: The file is no calibration, or of another version.
        """
        try:
            with np.load(path, allow_pickle=False) as archive:
                if int(archive["format"]) != FORMAT:
                    raise ValueError("format")
                proxy_hash, recipe_hash, original_hash = (str(item) for item in archive["hashes"])
                sets = {
                    name: SeedSet(
                        tuple(str(item) for item in archive[f"{name}_metrics"]),
                        archive[f"{name}_steps"].astype(np.float64),
                        archive[f"{name}_values"].astype(np.float32),
                    )
                    for name in ("proxy", "original")
                    if f"{name}_values" in archive.files
                }
            return cls(sets["proxy"], proxy_hash, recipe_hash, sets.get("original"), original_hash)
        except (ValueError, KeyError, EOFError, AssertionError, zipfile.BadZipFile) as error:
            raise CalibrationMismatch(
                f"{path}: not a calibration of this version", mend="compute it anew with `diagnose calibrate`"
            ) from error
