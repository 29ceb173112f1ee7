"""The verdict and everything it rests on: the frozen dataclasses behind the JSON contract (``"schema": 1``).

Reports, the TUI and the command line only render these; nothing downstream of here computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What the experiment says (*status* says whether it ran)."""

    REPRODUCED = "reproduced"
    """Reproduced and specific: no rival explains the incident as well."""
    REPRODUCED_NOT_SPECIFIC = "reproduced_not_specific"
    PARTLY = "partly"
    NOT_REPRODUCED = "not_reproduced"
    INCONCLUSIVE = "inconclusive"
    INJECTION_FAILED = "injection_failed"
    NO_FAULT = "no_fault"


class Direction(StrEnum):
    """How a metric moved against its healthy level."""

    UP = "up"
    DOWN = "down"
    NONE = "none"
    """Shown, by an equivalence test, not to have moved."""
    UNDETERMINED = "undetermined"


class AnomalyType(StrEnum):
    """Shape of an effect over time (the paper's "anomaly type")."""

    NONE = "none"
    IMMEDIATE = "immediate"
    GRADUAL = "gradual"
    DELAYED = "delayed"
    TRANSIENT = "transient"
    SPIKE = "spike"
    COLLAPSE = "collapse"
    NONFINITE = "nonfinite"


@dataclass(frozen=True)
class MetricResult:
    """One metric of one candidate: what it did in the original and in the proxy.

    Attributes:
        original: Direction in the original.
        proxy: Direction in the proxy.
        type_original: Anomaly type in the original.
        type_proxy: Anomaly type in the proxy.
        trend: Uncentred cosine of the two effect curves in [−1, 1]; None where neither moved.
        onset_original: Onset interval in updates since the start, (low, high); None without an onset.
        onset_proxy: The same for the proxy.
        effect_original: Median effect over the late half, in transformed units.
        effect_proxy: The same for the proxy.
        margin_original: Margin that an effect must exceed to count as a movement, in transformed units.
        margin_proxy: The same for the proxy.
        z_original: Late effect in noise units.
        z_proxy: The same for the proxy.
        weight: 2 for a primary metric of the card, 1 otherwise.
        blocks_original: Effect by block, for the curves of a report.
        blocks_proxy: The same for the proxy.
    """

    original: Direction
    proxy: Direction
    type_original: AnomalyType
    type_proxy: AnomalyType
    trend: float | None
    onset_original: tuple[int, int] | None
    onset_proxy: tuple[int, int] | None
    effect_original: float
    effect_proxy: float
    margin_original: float
    margin_proxy: float
    z_original: float
    z_proxy: float
    weight: int
    blocks_original: tuple[float, ...] = ()
    blocks_proxy: tuple[float, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """One fault that was replayed on the proxy, with its score.

    Attributes:
        fault: Fault id.
        title: Card title.
        category: Category id.
        verdict: The candidate's own verdict.
        evidence: "strong", "weak" or "stand-in", with the reason in `reasons`.
        distance: The ranking statistic; smaller is more alike. NaN where the replay could not be scored.
        agreement: Share of the moved metrics (weighted) whose direction agrees, in [−1, 1].
        coverage: Share of the card's metrics (weighted) that the incident's log has.
        specificity: Gap in distance to the nearest rival (positive: this one is nearer), with a bootstrap interval.
        severity: Strength at which it was replayed, in multiples of the card's default; of several, the nearest.
        severity_interval: Strengths that are not shown to be farther from the incident, (low, high): 0 or infinity
            where the end is open. None where only one strength was replayed.
        rivals: Faults that cannot be told apart from this one on this evidence.
        split_by: The metric or probe that would split the set.
        witness: Numbers that prove the injection took place.
        witness_ok: Whether they do.
        fix: What to do about it.
        reasons: Plain sentences.
        metrics: By canonical metric.
        doubts: Clauses on what keeps a reproduced fault from being specific, the weightiest first.
    """

    fault: str
    title: str
    category: str
    verdict: Verdict
    evidence: str
    distance: float
    agreement: float
    coverage: float
    specificity: tuple[float, float, float] | None
    severity: float
    rivals: tuple[str, ...]
    split_by: str
    witness: dict[str, float]
    witness_ok: bool
    fix: str
    reasons: tuple[str, ...]
    metrics: dict[str, MetricResult] = field(default_factory=dict)
    severity_interval: tuple[float, float] | None = None
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """What scoring says of an incident, without a word on how the runs were made.

    Attributes:
        verdict: The verdict on the incident.
        reasons: Plain sentences, the most important first.
        ranking: Candidates, best first.
        symptoms: Symptom ids that the original shows.
        healthy_gate: Whether the healthy proxy follows the healthy original, in words ("" where there is no twin).
        error_rates: Printed error rates of the margins in force (name → share).
        together: The faults that explain the incident together and clearly better than any of them alone; empty
            where one is enough, or nothing fits.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    ranking: tuple[Candidate, ...]
    symptoms: tuple[str, ...] = ()
    healthy_gate: str = ""
    error_rates: dict[str, float] = field(default_factory=dict)
    together: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbeResult:
    """A cheap experiment on the original that would tell two faults apart, with what the proxy predicts for it.

    Attributes:
        probe: Probe id.
        what: What to change in the recipe, for humans.
        settings: Recipe fields that the probe sets.
        steps: Steps that it takes.
        faults: The two faults.
        metric: The metric that decides; "" where the proxy shows no difference.
        directions: Which way it goes under each fault, against a healthy run with the same settings.
        values: Its late median under each fault and without one, in raw units.
        apart: Distance of the two on it, in noise units.
        advice: The sentence that says what to run and how to read it.
    """

    probe: str
    what: str
    settings: dict[str, Any]
    steps: int
    faults: tuple[str, str]
    metric: str
    directions: tuple[Direction, Direction]
    values: tuple[float, float, float]
    apart: float
    advice: str

    @property
    def borne_out(self) -> bool:
        """Whether the late medians say what the directions say: what is called up lies above a healthy run's value."""
        *values, healthy = self.values
        return bool(self.metric) and all(
            (value > healthy) if way is Direction.UP else (value < healthy) if way is Direction.DOWN else True
            for way, value in zip(self.directions, values, strict=True)
        )


@dataclass(frozen=True)
class RemedyResult:
    """What became of a fault's effect on the proxy when a remedy was added.

    Attributes:
        fault: Fault id.
        remedy: Remedy id.
        what: What was changed, for humans.
        settings: Recipe fields that it sets.
        gone: Share of the squared effect that is gone; negative where it grew. NaN without a usable run.
        left: Metrics that still leave the healthy margin.
        outcome: "vanishes", "mostly gone", "partly gone", "does not help", "makes it worse" or "could not be run".
    """

    fault: str
    remedy: str
    what: str
    settings: dict[str, Any]
    gone: float
    left: tuple[str, ...]
    outcome: str


@dataclass(frozen=True)
class Result:
    """The whole answer of `diagnose run` and `diagnose score`: the JSON contract.

    Attributes:
        status: "completed", "interrupted" or "failed".
        score: The verdict and the ranking.
        symptom: The symptom that was asked about.
        name: Playbook name.
        proxy: experts, strategy, source, manifest path.
        engine: Engine name.
        recipe: The recipe that the runs used.
        seeds: Seeds of the replays.
        not_tried: Candidates that were not replayed, with the reason.
        failures: Runs that failed, with the reason.
        wall_s: Seconds from start to verdict.
        run_dir: The run folder.
        stopped_early: Candidates that were replayed but left the race before all seeds and strengths, with the reason.
        probes: Experiments that would split the set, the most telling first; empty unless asked for.
        remedies: Remedies tried on the first candidate; empty unless asked for.
        scoring: Hash of the scoring that made it (`diagnose.provenance`), "" where that was not written down.
    """

    status: str
    score: Score
    symptom: str
    name: str
    proxy: dict[str, Any]
    engine: str
    recipe: dict[str, Any]
    seeds: tuple[int, ...]
    not_tried: dict[str, str]
    failures: dict[str, str]
    wall_s: float
    run_dir: str
    stopped_early: dict[str, str] = field(default_factory=dict)
    probes: tuple[ProbeResult, ...] = ()
    remedies: tuple[RemedyResult, ...] = ()
    scoring: str = ""
