"""Error rates of the margins in force, as measured by simulation for that source of noise and that many seeds."""

from __future__ import annotations

from diagnose.score.error_rate_table import TABLE
from diagnose.score.noise import Source


def error_rates(source: Source, seeds: int) -> dict[str, float]:
    """Return the rates of the table's row with the most seeds that are not more than `seeds`.

    Worst of several autocorrelations (0.5 to 0.95) and lengths (40 to 100 updates), 20 metrics.
    """
    rows = sorted(row for row in TABLE if row[0] is source)
    fitting = [row for row in rows if row[1] <= seeds] or rows[:1]
    if not fitting:
        return {}
    called, direction = TABLE[fitting[-1]]
    return {
        "healthy log called faulty (simulated)": called,
        "healthy log given any direction (simulated)": direction,
    }
