"""One experiment as seen by the scoring: faulty runs against healthy ones, read, shaped and made a signature.

Legend of shape suffixes: ``_M`` metrics, ``_B`` blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from diagnose.curves import Array, Curves
from diagnose.result import AnomalyType, Direction, MetricResult
from diagnose.score.align import Clock, Frame, nanmean, panel
from diagnose.score.direction import Reading, read
from diagnose.score.distance import Signature, signature
from diagnose.score.effect import effect
from diagnose.score.noise import Floors, Margin
from diagnose.score.shape import anomaly_type, collapsed, effect_onset, onset_interval, spikes, trend
from diagnose.score.system import System
from taxonomy.registry import FaultCard


@dataclass(frozen=True)
class Experiment:
    """What one experiment showed.

    Attributes:
        clock: Its clock.
        reading: Effects with their noise and directions.
        types: Anomaly type by metric.
        onsets: Onset interval in steps by metric.
        unit_MB: Noise units of the signature, in transformed units.
        signature: The effect in noise units.
        floors: Absolute floors in force.
    """

    clock: Clock
    reading: Reading
    types: tuple[AnomalyType, ...]
    onsets: tuple[tuple[int, int] | None, ...]
    unit_MB: Array
    signature: Signature
    floors: Floors

    @property
    def late(self) -> tuple[Array, Array]:
        """Late-half effects and their standard errors in the signature's noise units, (late_M, se_M)."""
        half = self.unit_MB.shape[1] // 2
        unit_M = nanmean(self.unit_MB[:, half:])
        return self.reading.effect.late_M / unit_M, self.reading.se_late_M / unit_M


def look(
    runs: Sequence[Curves],
    home: System,
    margin: Margin,
    floors: Floors,
    unit_MB: Array,
    limit_M: Array,
    frame: Frame,
) -> Experiment:
    """Look at one experiment.

    Args:
        runs: Faulty runs.
        home: The system they ran on.
        margin: The margin in force.
        floors: Absolute floors.
        unit_MB: Noise units of the signature.
        limit_M: `shape.spike_limit` of the system's healthy runs.
        frame: The comparison's frame.
    """
    settings = frame.settings
    effects = effect(panel(runs, home.clock, frame), home.reference, settings, borrowed=home.borrowed)
    reading = read(effects, home.scale, margin, floors, settings)
    spiky = spikes(runs, home.clock, frame, limit_M)
    types, onsets = [], []
    for m, name in enumerate(frame.metrics):
        z_B = reading.z_MB[m]
        moved = bool(abs(reading.peak_M[m]) > margin.c)
        onset = effect_onset(z_B, margin.c) if moved else None
        bad = np.flatnonzero(effects.event_MB[m] > 0)
        types.append(
            anomaly_type(
                effects.e_MB[m],
                z_B,
                margin.c,
                onset,
                event=bool(len(bad)),
                spike=bool(spiky[m]),
                collapsed=moved and collapsed(runs, home.runs, name, home.clock, home.runs_clock, settings),
                settings=settings,
            )
        )
        onsets.append(onset_interval(int(bad[0]) if len(bad) else onset, home.clock))
    unit_MB = np.sqrt(unit_MB**2 + np.nan_to_num(effects.doubt_MB) ** 2)
    return Experiment(
        home.clock, reading, tuple(types), tuple(onsets), unit_MB, signature(reading, unit_MB), floors
    )


def by_level(seen: Experiment, runs: Sequence[Curves], frame: Frame) -> Experiment:
    """Replace directions by what absolute levels alone can say: "up" beyond a level rule, else undetermined."""
    answer = []
    for name in frame.metrics:
        limit = frame.settings.level_rules.get(name)
        points = [run.values[name] for run in runs if name in run.values]
        values = np.concatenate(points) if points else np.empty(0)
        values = np.abs(values[np.isfinite(values)])
        beyond = limit is not None and len(values) > 0 and float(np.median(values)) > limit
        answer.append(Direction.UP if beyond else Direction.UNDETERMINED)
    return replace(seen, reading=replace(seen.reading, direction=tuple(answer)))


def contradictions(original: Experiment, proxy: Experiment, frame: Frame) -> dict[str, str]:
    """Return the metrics on which the two can't be the same fault at another amplitude, each with how.

    A fault may act up to `amplitude` times stronger in one system than in the other. So a metric contradicts when
    the late effect of one side, less `doubt_se` standard errors and divided by `amplitude`, still exceeds what the
    other side shows plus `doubt_se` standard errors (at least `least_se` noise units each, for metrics that hardly
    vary); or when a non-finite value is on one side only.
    """
    settings = frame.settings
    late_O, se_O = original.late
    late_P, se_P = proxy.late
    se_O, se_P = np.fmax(se_O, settings.least_se), np.fmax(se_P, settings.least_se)
    found = {}
    for m, name in enumerate(frame.metrics):
        bad_O, bad_P = (item.types[m] is AnomalyType.NONFINITE for item in (original, proxy))
        if bad_O != bad_P:
            found[name] = f"non-finite in the {'original' if bad_O else 'replay'} only"
            continue
        for strong, se_s, weak, se_w in (
            (late_O[m], se_O[m], late_P[m], se_P[m]),
            (late_P[m], se_P[m], late_O[m], se_O[m]),
        ):
            least = (abs(strong) - settings.doubt_se * se_s) / settings.amplitude
            if least > 0 and np.sign(strong) * weak + settings.doubt_se * se_w < least:
                found[name] = f"{late_O[m]:+.1f} noise units in the original, {late_P[m]:+.1f} in the replay"
    return found


def exclusions(original: Experiment, proxy: Experiment, exact: Sequence[int], frame: Frame) -> dict[str, str]:
    """Return the exact metrics that deny that the two are the same single fault, each with how.

    An exact metric holds its healthy value by construction, so that leaving it needs no test: it denies where one
    side leaves it for at least half of its blocks and the other never does. (Medians of blocks don't see a fault
    that strikes now and then; such a one denies nothing.)

    Args:
        original: The incident.
        proxy: A replay.
        exact: Indices of the metrics that count, see `exact_metrics`.
        frame: The comparison's frame.
    """
    found = {}
    for m in exact:
        left_O, left_P = (_left(item.reading.effect.e_MB[m]) for item in (original, proxy))
        if max(left_O, left_P) >= 0.5 and min(left_O, left_P) == 0:
            found[frame.metrics[m]] = (
                "off its healthy value in the original, never in the replay"
                if left_O
                else "at its healthy value in the original, off it in the replay"
            )
    return found


def _left(e_B: Array) -> float:
    """Return the share of the logged blocks in which an exact metric is not at its healthy value, NaN without any."""
    logged_B = e_B[np.isfinite(e_B)]
    return float(np.mean(logged_B != 0)) if len(logged_B) else np.nan


def results(
    original: Experiment, proxy: Experiment, card: FaultCard | None, metrics: tuple[str, ...]
) -> dict[str, MetricResult]:
    """Return the comparison metric by metric."""
    weight = {item.metric: item.weight for item in card.signature} if card is not None else {}
    table = {}
    for m, name in enumerate(metrics):
        o, p = original.reading, proxy.reading
        involved = (o.direction[m], p.direction[m], original.types[m], proxy.types[m])
        moved = not {Direction.UP, Direction.DOWN, AnomalyType.NONFINITE}.isdisjoint(involved)
        table[name] = MetricResult(
            original=o.direction[m],
            proxy=p.direction[m],
            type_original=original.types[m],
            type_proxy=proxy.types[m],
            trend=_trend(original, proxy, m) if moved else None,
            onset_original=original.onsets[m],
            onset_proxy=proxy.onsets[m],
            effect_original=float(o.effect.late_M[m]),
            effect_proxy=float(p.effect.late_M[m]),
            margin_original=float(o.limit_late_M[m]),
            margin_proxy=float(p.limit_late_M[m]),
            z_original=float(o.z_late_M[m]),
            z_proxy=float(p.z_late_M[m]),
            weight=weight.get(name, 1),
            blocks_original=tuple(float(x) for x in o.effect.e_MB[m]),
            blocks_proxy=tuple(float(x) for x in p.effect.e_MB[m]),
        )
    return table


def _trend(original: Experiment, proxy: Experiment, m: int) -> float | None:
    """Return the similarity of two effect curves, or of when non-finite values came where both have them."""
    o, p = original.reading.effect, proxy.reading.effect
    if original.types[m] is proxy.types[m] is AnomalyType.NONFINITE:
        return trend(o.event_MB[m], p.event_MB[m])
    return trend(o.e_MB[m], p.e_MB[m])
