"""Written by ``python -m diagnose.score.simulate 300 --write``; do not edit."""

from diagnose.score.noise import Source

TABLE: dict[tuple[Source, int], tuple[float, float]] = {
    (Source.CALIBRATED, 20): (0.020, 0.090),
    (Source.OWN_SEEDS, 10): (0.003, 0.030),
    (Source.OWN_SEEDS, 5): (0.003, 0.010),
    (Source.STAND_IN, 20): (0.003, 0.013),
    (Source.WITHIN_RUN, 3): (0.027, 0.090),
    (Source.WITHIN_RUN, 2): (0.017, 0.127),
    (Source.WITHIN_RUN, 1): (0.000, 0.037),
}
"""(source, seeds) → share of healthy logs called faulty, and given any direction."""
