"""Written by ``python -m diagnose.score.error_study 150 --write``; do not edit."""

from diagnose.score.noise import Source

TABLE: dict[tuple[Source, int], tuple[float, float]] = {
    (Source.CALIBRATED, 20): (0.047, 0.147),
    (Source.OWN_SEEDS, 10): (0.000, 0.013),
    (Source.OWN_SEEDS, 5): (0.000, 0.027),
    (Source.STAND_IN, 20): (0.007, 0.013),
    (Source.WITHIN_RUN, 3): (0.013, 0.080),
    (Source.WITHIN_RUN, 2): (0.020, 0.073),
    (Source.WITHIN_RUN, 1): (0.000, 0.040),
}
"""(source, seeds) → share of healthy logs called faulty, and given any direction."""
