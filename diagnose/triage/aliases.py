"""What a name from some framework's log is called here, for those who type what their dashboard shows."""

from __future__ import annotations


def canonical_names(raw: str) -> tuple[str, ...]:
    """Return the canonical metrics that the log readers know a raw name for, most frameworks first."""
    from collections import Counter

    from diagnose.logs import names

    tables = (
        names.VERL,
        names.TRL,
        names.SLIME,
        names.NEMO_RL,
        names.OPENRLHF,
        names.PRIME_RL,
        names.MINDSPEED_RL,
        names.MEGATRON,
        names.PLAIN,
    )
    spellings = {raw, raw.lower(), raw.lower().replace("-", "_").replace(" ", "_")}
    found = Counter(
        offer.canonical
        for table in tables
        for spelling in sorted(spellings)
        if (offer := table.offer(spelling)) is not None
    )
    return tuple(name for name, _ in found.most_common())
