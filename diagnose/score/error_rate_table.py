"""Written by ``python -m diagnose.score.error_study 300 --write``; do not edit."""

from diagnose.score.noise import Source

TABLE: dict[tuple[Source, int], tuple[float, float]] = {
    (Source.CALIBRATED, 20): (0.030, 0.110),
    (Source.OWN_SEEDS, 10): (0.000, 0.013),
    (Source.OWN_SEEDS, 5): (0.000, 0.017),
    (Source.STAND_IN, 20): (0.003, 0.013),
    (Source.WITHIN_RUN, 3): (0.010, 0.077),
    (Source.WITHIN_RUN, 2): (0.010, 0.070),
    (Source.WITHIN_RUN, 1): (0.003, 0.030),
}
"""(source, seeds) → share of healthy logs called faulty, and given any direction."""
