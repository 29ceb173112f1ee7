"""Written by ``python -m diagnose.score.simulate 200 --write``; do not edit."""

from diagnose.score.noise import Source

TABLE: dict[tuple[Source, int], tuple[float, float]] = {}
"""(source, seeds) → share of healthy logs called faulty, and given any direction."""
