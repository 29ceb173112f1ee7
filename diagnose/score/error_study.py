"""Healthy logs: how often one is called faulty, reproduced, or given any direction, by what is known of the noise.

``python -m diagnose.score.error_study [REPEATS] [--write]`` measures the rates that reports print, and with
``--write`` puts them into ``error_rate_table.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diagnose.result import Direction, Verdict
from diagnose.score.calibration import Calibration, SeedSet
from diagnose.score.noise import Source
from diagnose.score.plan import Replay
from diagnose.score.score import gather, lay, score
from diagnose.score.settings import DEFAULT, Settings
from diagnose.score.simulate import World
from taxonomy.registry import Library


@dataclass(frozen=True)
class Setup:
    """How much is known of the noise.

    Attributes:
        source: Where the original's scale comes from.
        seeds: Healthy seeds behind it.
        original_healthy: Healthy logs of the original.
        proxy_calibration: Seeds in the proxy's calibration, 0 for none.
        original_calibration: Seeds in the original's calibration, 0 for none.
    """

    source: Source
    seeds: int
    original_healthy: int
    proxy_calibration: int = 0
    original_calibration: int = 0


SETUPS = (
    Setup(Source.CALIBRATED, 20, 3, 20, 20),
    Setup(Source.OWN_SEEDS, 10, 10),
    Setup(Source.OWN_SEEDS, 5, 5),
    Setup(Source.STAND_IN, 20, 1, 20),
    Setup(Source.WITHIN_RUN, 3, 3),
    Setup(Source.WITHIN_RUN, 2, 2),
    Setup(Source.WITHIN_RUN, 1, 1),
)
SEEDS = {setup.seeds: setup for setup in SETUPS if setup.source is not Source.STAND_IN}
"""K → the setup with K healthy seeds of the original and nothing to borrow from."""
WORLDS = (((0.5, 0.8, 0.95), 60), ((0.95,), 60), ((0.95,), 100), ((0.5,), 40))
"""(autocorrelations of the metrics, updates); the table in the reports holds the worst of them."""


@dataclass(frozen=True)
class HealthyErrors:
    """One row of the table of errors on healthy logs: counts out of `repeats`.

    Attributes:
        source: Where the noise scale comes from.
        seeds: Healthy seeds behind it.
        phi: Autocorrelations that the metrics have in turn.
        updates: Updates of every run.
        repeats: Simulated incidents without a fault, each with new seeds for everything.
        faulty: Called faulty.
        open: Left open (inconclusive).
        reproduced: Called reproduced, specific or not, with two unrelated faults as candidates.
        direction: Given a direction on any of 20 metrics.
    """

    source: str
    seeds: int
    phi: tuple[float, ...]
    updates: int
    repeats: int
    faulty: int
    open: int
    reproduced: int
    direction: int


def healthy_errors(
    setup: Setup,
    phi: Sequence[float],
    updates: int,
    repeats: int,
    seed: int = 0,
    settings: Settings = DEFAULT,
) -> HealthyErrors:
    """Count what healthy logs are taken for.

    Two faults with effects on four metrics each stand by as candidates. They are only replayed where the log is
    called faulty: before that they have no say.
    """
    rng = np.random.default_rng(seed)
    world = World.make(phi)
    faulty = left_open = reproduced = direction = 0
    for _ in range(repeats):
        proxy, own = (
            SeedSet.from_curves(world.runs(rng, count, updates)) if count else None
            for count in (setup.proxy_calibration, setup.original_calibration)
        )
        calibration = Calibration(proxy, "", "", own) if proxy is not None else None
        log, twins, others = (world.runs(rng, k, updates) for k in (1, setup.original_healthy, 2))
        given = gather(log, twins, others, [], Library(), calibration=calibration, settings=settings)
        case = lay(given)[0].case
        direction += not {Direction.UP, Direction.DOWN}.isdisjoint(case.original.reading.direction)
        if case.settled is not None:
            left_open += case.settled[0] is Verdict.INCONCLUSIVE
            continue
        faulty += 1
        replays = [
            Replay(
                name,
                world.runs(rng, 2, updates, dict.fromkeys(rng.choice(world.metrics, 4, replace=False), 8.0)),
            )
            for name in ("a", "b")
        ]
        found = score(log, twins, others, replays, Library(), calibration=calibration, settings=settings)
        reproduced += found.verdict in (Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC)
    return HealthyErrors(
        str(setup.source),
        setup.seeds,
        tuple(phi),
        updates,
        repeats,
        faulty,
        left_open,
        reproduced,
        direction,
    )


def main(arguments: Sequence[str]) -> None:
    """Measure every setup in every world; print, and write the worst with ``--write``."""
    repeats = int(next((item for item in arguments if item.isdigit()), "200"))
    rows = []
    for setup in SETUPS:
        found = []
        for phi, n in WORLDS:
            found.append(healthy_errors(setup, phi, n, repeats))
            print(found[-1], flush=True)
        worst = (
            max(item.faulty for item in found) / repeats,
            max(item.direction for item in found) / repeats,
        )
        rows.append(f"    (Source.{setup.source.name}, {setup.seeds}): ({worst[0]:.3f}, {worst[1]:.3f}),")
    if "--write" in arguments:
        text = (
            '"""Written by ``python -m diagnose.score.error_study '
            f'{repeats} --write``; do not edit."""\n\nfrom diagnose.score.noise import Source\n\n'
            "TABLE: dict[tuple[Source, int], tuple[float, float]] = {\n" + "\n".join(rows) + "\n}\n"
            '"""(source, seeds) → share of healthy logs called faulty, and given any direction."""\n'
        )
        Path(__file__).with_name("error_rate_table.py").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
