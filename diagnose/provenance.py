"""Which scoring made an answer: an answer of other rules may read differently today."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path

from proxy.specs import content_key


def scoring_sources() -> list[Path]:
    """Return the files that scoring rests on; the table of error rates is only quoted by it."""
    home = Path(__file__).parent / "score"
    return sorted(path for path in home.glob("*.py") if path.name != "error_rate_table.py")


@cache
def scoring_key() -> str:
    """Return a hash over the scoring: its thresholds and its sources."""
    from diagnose.score.settings import DEFAULT

    sources = [(path.name, path.read_text(encoding="utf-8")) for path in scoring_sources()]
    return content_key(asdict(DEFAULT), sources)


def outdated(key: str) -> bool:
    """Whether an answer was made by another scoring than the present one; those of before keys were kept were."""
    return key != scoring_key()
