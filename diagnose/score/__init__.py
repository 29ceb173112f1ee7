"""Scoring: curves in, verdict and ranking out, as pure functions. ``docs/scoring.md`` has the formulas."""
