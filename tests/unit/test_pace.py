"""What a budget is enough for, and where the pace comes from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diagnose.pace import candidates_in_time, shortage


def carried_out(budget_s: float, run_s: float, workers: int, seeds: int, each: int) -> int:
    """Count by hand: workers take runs in turn, those that end within the budget count."""
    runs, free = 0, [0.0] * workers
    while min(free) + run_s <= budget_s + 1e-9:
        free[free.index(min(free))] += run_s
        runs += 1
    return max(0, (runs - seeds) // each)


@given(
    budget=st.integers(1, 600),
    steps=st.integers(1, 60),
    workers=st.integers(1, 4),
    candidates=st.integers(1, 20),
    seeds=st.integers(1, 4),
    each=st.integers(1, 4),
)
def test_as_many_as_by_hand(
    budget: int, steps: int, workers: int, candidates: int, seeds: int, each: int
) -> None:
    found = candidates_in_time(budget, 0.5, steps, workers, candidates, seeds, each)
    by_hand = carried_out(budget, 0.5 * steps, workers, seeds, each)
    assert found <= candidates
    # Workers that run side by side end together; the estimate may count the replays under way at the end.
    assert min(by_hand, candidates) <= found <= max(min(by_hand + workers, candidates), min(workers, 2))


def test_words() -> None:
    assert shortage(0, 0.5, 60, 2, (15, 2, 1)) == ""
    assert shortage(600, 0.5, 60, 2, (15, 2, 1)) == ""
    assert shortage(120, 0.5, 60, 2, (15, 2, 1)) == "enough for about 6 of 15 candidates"
    assert shortage(120, 0.5, 60, 2, (15, 2, 2)) == "enough for about 3 of 15 candidates"
    assert (
        shortage(1, 0.5, 60, 2, (15, 2, 1)) == "enough for about 2 of 15 candidates"
    )  # run whatever it costs
    assert "never run here" in shortage(600, None, 60, 2, (15, 2, 1))
