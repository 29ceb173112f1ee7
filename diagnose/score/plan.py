"""The plan of a comparison: which contrast, which clocks, how many blocks, and what that rules out.

Pure bookkeeping: no effect is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diagnose.curves import Curves
from diagnose.score.align import Clock, Contrast, block_count, first_update, last_step, points
from diagnose.score.onset import Onset
from diagnose.score.settings import Settings
from proxy.specs import INJECTION_FAILED, NOTHING_TO_HIT


@dataclass(frozen=True)
class Replay:
    """One fault replayed on the proxy at one strength.

    Attributes:
        fault: Fault id.
        runs: The replays' curves, one a seed.
        severity: Strength in multiples of the card's default.
        from_step: First step at which the fault was active in the replays (1 is the first).
        witness: Numbers that prove the injection.
        witness_ok: Whether they do.
        failure: Why there is no usable run, "" where there is one.
    """

    fault: str
    runs: Sequence[Curves]
    severity: float = 1.0
    from_step: int = 1
    witness: Mapping[str, float] = field(default_factory=dict)
    witness_ok: bool = True
    failure: str = ""

    @property
    def scorable(self) -> bool:
        """Whether there is a witnessed run to look at."""
        return self.witness_ok and not self.failure and any(len(run.steps_N) for run in self.runs)

    @property
    def impossible(self) -> bool:
        """Whether the model has nothing that the fault could break: then it isn't the cause either."""
        return self.failure.startswith(NOTHING_TO_HIT)

    @property
    def broke(self) -> bool:
        """Whether the replay came to nothing for a reason that says nothing of the fault, such as a dead worker."""
        return bool(self.failure) and not self.failure.startswith(INJECTION_FAILED)


@dataclass(frozen=True)
class Plan:
    """How the runs are compared.

    Attributes:
        contrast: What blocks are measured against.
        original: Clock of the original.
        proxy: Clock of the proxy by `Replay.from_step`.
        enough: Whether there are enough blocks for a verdict.
        limits: Sentences on what the comparison can't say.
    """

    contrast: Contrast
    original: Clock
    proxy: Mapping[int, Clock]
    enough: bool
    limits: tuple[str, ...]


def starts(
    faulty: Sequence[Curves],
    replays: Sequence[Replay],
    onset: Onset | None,
    from_step: int | None,
    *,
    twin: bool,
) -> tuple[int, ...]:
    """Return the steps of the original at which the fault may have become active, the likeliest first.

    The known one; else where replays were injected in the middle of their runs (or the incident's own sharp onset,
    when they were injected inside its interval); else the beginning of the log. A sharp onset in the middle is a
    second possibility with a twin: a fault that struck there and one that was active from the beginning and broke
    out there look alike in one log. Without a twin, where the past is all there is to measure against, it is the
    only one.
    """
    first = first_update(faulty)
    sharp = onset.step if onset is not None and onset.sharp else None
    injected = {replay.from_step for replay in replays if replay.scorable}
    if from_step is not None:
        return (max(from_step, first),)
    if len(injected) == 1 and first < min(injected) <= last_step(faulty):
        step = min(injected)
        return (
            sharp if onset is not None and sharp is not None and onset.low <= step <= onset.high else step,
        )
    if sharp is None or sharp <= first:
        return (first,)
    return (first, sharp) if twin else (sharp,)


def plan(
    faulty: Sequence[Curves],
    healthy: Sequence[Curves],
    proxy_healthy: Sequence[Curves],
    replays: Sequence[Replay],
    start: int,
    settings: Settings,
) -> Plan:
    """Lay the clocks. The horizon is the shortest of the four groups of runs, counted from each one's activation.

    Args:
        faulty: Faulty runs of the original (at least one).
        healthy: Healthy runs of the original; without any there is no twin.
        proxy_healthy: Healthy runs of the proxy (at least one).
        replays: Replays; those that aren't scorable are ignored.
        start: Step at which the original's clock starts.
        settings: Thresholds.
    """
    limits: list[str] = []
    scorable = [replay for replay in replays if replay.scorable]
    first_O, first_P = first_update(faulty), first_update(proxy_healthy)
    steps_P = {replay.from_step: max(replay.from_step, first_P) for replay in scorable} or {1: first_P}
    baseline = 0
    contrast = Contrast.TWIN
    if not healthy:
        before = min(
            points(faulty, first_O, start - 1),
            *(points(proxy_healthy, first_P, start_P - 1) for start_P in steps_P.values()),
        )
        if before >= settings.min_baseline:
            contrast = Contrast.PAST
            baseline = min(start - first_O, *(start_P - first_P for start_P in steps_P.values()))
            limits.append("No healthy twin: the log was measured against its own past.")
        else:
            contrast = Contrast.START
            limits.append(
                "No healthy twin, and no common past before the fault to measure against: "
                "give a healthy log, or replay with the injection at the incident's onset."
            )
    horizon = last_step(faulty) - start + 1
    if healthy:
        horizon = min(horizon, last_step(healthy) - start + 1)
    for start_P in steps_P.values():
        horizon = min(horizon, last_step(proxy_healthy) - start_P + 1)
        reached = [
            last_step(item.runs) - start_P + 1 for item in scorable if steps_P[item.from_step] == start_P
        ]
        horizon = min(horizon, max(reached, default=horizon))
    horizon = max(horizon, 1)
    counts = [points(runs, start, start + horizon - 1) for runs in (faulty, healthy) if runs]
    counts += [points(proxy_healthy, start_P, start_P + horizon - 1) for start_P in steps_P.values()]
    # One replay that died early does not shorten the comparison for the others.
    replayed = [
        points(item.runs, steps_P[item.from_step], steps_P[item.from_step] + horizon - 1) for item in scorable
    ]
    n = min([*counts, max(replayed)] if replayed else counts)
    blocks = block_count(n, settings)
    enough = n // settings.points_a_block >= settings.min_blocks
    if not enough:
        limits.append(
            f"Too short to judge: {n} common points since the fault, "
            f"{settings.min_blocks * settings.points_a_block} are needed."
        )
    return Plan(
        contrast=contrast,
        original=Clock(start, horizon, blocks, baseline),
        proxy={step: Clock(start_P, horizon, blocks, baseline) for step, start_P in steps_P.items()},
        enough=enough,
        limits=tuple(limits),
    )
