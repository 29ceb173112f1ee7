"""What differs between two configurations, without the words of either: for what leaves the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diagnose.triage.context import is_public
from taxonomy.facts import scalar

if TYPE_CHECKING:
    from diagnose.triage.config import Difference


def without_values(change: Difference) -> Difference:
    """Return a difference whose values stay where they are numbers, switches or words that triage knows.

    The key of a setting that no clue asks for goes too: whoever added it named it.
    """

    def shown(value: str) -> str:
        return value if value == "‹absent›" or is_public(change.fact, scalar(value)) else "‹value›"

    key = change.key if change.fact else "‹a setting›"
    return replace(change, key=key, good=shown(change.good), bad=shown(change.bad))
