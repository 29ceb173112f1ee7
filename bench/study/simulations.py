"""The parts of the study that rest on simulated curves."""

from __future__ import annotations

from bench.study.incidents import Study
from diagnose.selftest.report import Section


def sections(study: Study) -> list[Section]:
    """Return the error rates, the planted effects and the onsets."""
    return []
