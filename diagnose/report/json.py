"""The result as JSON: the public contract, `"schema": 1`, and its inverse for the viewers.

NaN and infinities become null (JSON has neither); reading turns null back into NaN where a number is due.
Keys may be added within a schema version, never renamed or removed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from diagnose.errors import DiagnoseError
from diagnose.result import (
    AnomalyType,
    Candidate,
    Direction,
    MetricResult,
    ProbeResult,
    RemedyResult,
    Result,
    Score,
    Verdict,
)

SCHEMA = 1


class ResultFileError(DiagnoseError):
    """A result file that this version cannot read."""


def finite(value: Any) -> Any:
    """Return `value` with every tuple as a list and every non-finite number as None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def to_json(result: Result) -> dict[str, Any]:
    """Return the result as JSON-able data in the shape of the public contract."""
    score = result.score
    data = {
        "schema": SCHEMA,
        "status": result.status,
        "verdict": score.verdict.value,
        "name": result.name,
        "symptom": result.symptom,
        "symptoms": score.symptoms,
        "reasons": score.reasons,
        "ranking": [_candidate_to_json(candidate) for candidate in score.ranking],
        "healthy_gate": score.healthy_gate,
        "error_rates": score.error_rates,
        "together": list(score.together),
        "not_tried": result.not_tried,
        "stopped_early": result.stopped_early,
        "probes": [asdict(item) for item in result.probes],
        "remedies": [asdict(item) for item in result.remedies],
        "failures": result.failures,
        "proxy": result.proxy,
        "engine": result.engine,
        "recipe": result.recipe,
        "seeds": result.seeds,
        "wall_s": result.wall_s,
        "run_dir": result.run_dir,
        "scoring": result.scoring,
    }
    clean: dict[str, Any] = finite(data)
    return clean


def dumps(result: Result) -> str:
    """Return the contract as text, one key a line, strict JSON."""
    return json.dumps(to_json(result), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(data: Mapping[str, Any]) -> Result:
    """Return the result that `to_json` wrote; keys it doesn't know are ignored.

    Raises:
        ResultFileError: Another schema version, or a key of the contract is missing or malformed.
    """
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        raise ResultFileError(f"result has schema {found!r}, this version reads {SCHEMA}")
    try:
        score = Score(
            verdict=Verdict(data["verdict"]),
            reasons=tuple(data["reasons"]),
            ranking=tuple(_candidate_from_json(item) for item in data["ranking"]),
            symptoms=tuple(data.get("symptoms", ())),
            healthy_gate=data.get("healthy_gate", ""),
            error_rates={name: _float(value) for name, value in data.get("error_rates", {}).items()},
            together=tuple(data.get("together", ())),
        )
        return Result(
            status=data["status"],
            score=score,
            symptom=data["symptom"],
            name=data["name"],
            proxy=dict(data["proxy"]),
            engine=data["engine"],
            recipe=dict(data["recipe"]),
            seeds=tuple(data["seeds"]),
            not_tried=dict(data["not_tried"]),
            failures=dict(data["failures"]),
            wall_s=_float(data["wall_s"]),
            run_dir=data["run_dir"],
            stopped_early=dict(data.get("stopped_early", {})),
            probes=tuple(_probe_from_json(item) for item in data.get("probes", ())),
            remedies=tuple(
                RemedyResult(**item | {"gone": _float(item["gone"]), "left": tuple(item["left"])})
                for item in data.get("remedies", ())
            ),
            scoring=data.get("scoring", ""),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultFileError(f"result does not follow its schema: {error!r}") from error


def _probe_from_json(item: Mapping[str, Any]) -> ProbeResult:
    first, second = item["faults"]
    down, up = (Direction(word) for word in item["directions"])
    a, b, healthy = (_float(value) for value in item["values"])
    known = {
        "faults": (first, second),
        "directions": (down, up),
        "values": (a, b, healthy),
        "apart": math.inf if item["apart"] is None else float(item["apart"]),
    }
    return ProbeResult(**{**item, **known})


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _pair(value: list[int] | None) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))


def _interval(value: Mapping[str, float | None] | None) -> tuple[float, float] | None:
    """Return an interval of strengths; its open upper end was written as null."""
    if value is None:
        return None
    return _float(value["low"]), math.inf if value["high"] is None else float(value["high"])


def _candidate_to_json(candidate: Candidate) -> dict[str, Any]:
    data = {name: value for name, value in asdict(candidate).items() if name != "metrics"}
    if candidate.specificity is not None:
        gap, low, high = candidate.specificity
        data["specificity"] = {"gap": gap, "low": low, "high": high}
    if candidate.severity_interval is not None:
        low, high = candidate.severity_interval
        data["severity_interval"] = {"low": low, "high": high}
    data["metrics"] = {name: asdict(metric) for name, metric in candidate.metrics.items()}
    return data


def _candidate_from_json(data: Mapping[str, Any]) -> Candidate:
    specificity = data["specificity"]
    return Candidate(
        fault=data["fault"],
        title=data["title"],
        category=data["category"],
        verdict=Verdict(data["verdict"]),
        evidence=data["evidence"],
        distance=_float(data["distance"]),
        agreement=_float(data["agreement"]),
        coverage=_float(data["coverage"]),
        specificity=specificity
        and (_float(specificity["gap"]), _float(specificity["low"]), _float(specificity["high"])),
        severity=_float(data["severity"]),
        rivals=tuple(data["rivals"]),
        split_by=data["split_by"],
        witness={name: _float(value) for name, value in data["witness"].items()},
        witness_ok=bool(data["witness_ok"]),
        fix=data["fix"],
        reasons=tuple(data["reasons"]),
        metrics={name: _metric_from_json(item) for name, item in data["metrics"].items()},
        severity_interval=_interval(data.get("severity_interval")),
        doubts=tuple(data.get("doubts", ())),
    )


def _metric_from_json(data: Mapping[str, Any]) -> MetricResult:
    numbers = (
        "effect_original",
        "effect_proxy",
        "margin_original",
        "margin_proxy",
        "z_original",
        "z_proxy",
    )
    return MetricResult(
        original=Direction(data["original"]),
        proxy=Direction(data["proxy"]),
        type_original=AnomalyType(data["type_original"]),
        type_proxy=AnomalyType(data["type_proxy"]),
        trend=data["trend"],
        onset_original=_pair(data["onset_original"]),
        onset_proxy=_pair(data["onset_proxy"]),
        weight=int(data["weight"]),
        blocks_original=tuple(_float(value) for value in data.get("blocks_original", ())),
        blocks_proxy=tuple(_float(value) for value in data.get("blocks_proxy", ())),
        **{name: _float(data[name]) for name in numbers},
    )
