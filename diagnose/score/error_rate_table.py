"""Written by ``python -m diagnose.score.simulate 400 --write``; do not edit."""

from diagnose.score.noise import Source

TABLE: dict[tuple[Source, int], tuple[float, float]] = {
    (Source.CALIBRATED, 20): (0.033, 0.098),
    (Source.OWN_SEEDS, 10): (0.013, 0.033),
    (Source.OWN_SEEDS, 5): (0.005, 0.018),
    (Source.STAND_IN, 20): (0.005, 0.025),
    (Source.WITHIN_RUN, 3): (0.058, 0.107),
    (Source.WITHIN_RUN, 2): (0.050, 0.150),
    (Source.WITHIN_RUN, 1): (0.010, 0.048),
}
"""(source, seeds) → share of healthy logs called faulty, and given any direction."""
