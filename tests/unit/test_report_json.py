"""The JSON contract: its schema, and that nothing is lost on the way back."""

import json
import math
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnose.report.json import ResultFileError, dumps, from_json, to_json
from diagnose.result import AnomalyType, Direction, Result, Verdict
from tests.fixtures.results import hostile, kl_spike, with_verdict

NUMBER = {"type": ["number", "null"]}
ONSET = {
    "oneOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}]
}
DIRECTION = {"enum": ["up", "down", "none", "undetermined"]}
VERDICT = {
    "enum": [
        "reproduced",
        "reproduced_not_specific",
        "partly",
        "not_reproduced",
        "inconclusive",
        "injection_failed",
        "no_fault",
    ]
}
STRINGS = {"type": "array", "items": {"type": "string"}}
METRIC = {
    "type": "object",
    "required": ["original", "proxy", "trend", "onset_original", "onset_proxy", "weight"],
    "properties": {
        "original": DIRECTION,
        "proxy": DIRECTION,
        "trend": NUMBER,
        "onset_original": ONSET,
        "onset_proxy": ONSET,
        "weight": {"type": "integer"},
        "effect_original": NUMBER,
        "margin_original": NUMBER,
        "blocks_original": {"type": "array", "items": NUMBER},
    },
}
CANDIDATE = {
    "type": "object",
    "required": [
        "fault",
        "category",
        "verdict",
        "evidence",
        "distance",
        "agreement",
        "coverage",
        "specificity",
        "severity",
        "rivals",
        "witness",
        "fix",
        "metrics",
    ],
    "properties": {
        "fault": {"type": "string"},
        "verdict": VERDICT,
        "distance": NUMBER,
        "specificity": {
            "oneOf": [
                {"type": "null"},
                {"type": "object", "required": ["gap", "low", "high"], "additionalProperties": NUMBER},
            ]
        },
        "rivals": STRINGS,
        "witness": {"type": "object", "additionalProperties": NUMBER},
        "metrics": {"type": "object", "additionalProperties": METRIC},
    },
}
SCHEMA = {
    "type": "object",
    "required": [
        "schema",
        "status",
        "verdict",
        "symptom",
        "reasons",
        "ranking",
        "proxy",
        "engine",
        "recipe",
        "seeds",
        "wall_s",
        "run_dir",
    ],
    "properties": {
        "schema": {"const": 1},
        "status": {"type": "string"},
        "verdict": VERDICT,
        "symptom": {"type": "string"},
        "reasons": STRINGS,
        "ranking": {"type": "array", "items": CANDIDATE},
        "proxy": {"type": "object"},
        "engine": {"type": "string"},
        "recipe": {"type": "object"},
        "seeds": {"type": "array", "items": {"type": "integer"}},
        "wall_s": NUMBER,
        "run_dir": {"type": "string"},
    },
}


def same(left: object, right: object) -> bool:
    """Equality under which NaN equals NaN: both sides as text."""
    return repr(left) == repr(right)


@pytest.mark.parametrize("result", [kl_spike(), hostile(), with_verdict(Verdict.REPRODUCED_NOT_SPECIFIC)])
def test_contract_holds(result: Result) -> None:
    jsonschema.validate(to_json(result), SCHEMA)


def test_strict_json_without_nan() -> None:
    text = dumps(kl_spike())
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert data["ranking"][3]["distance"] is None
    assert data["ranking"][0]["metrics"]["actor/kl_loss"]["onset_original"] == [12, 18]


@pytest.mark.parametrize("result", [kl_spike(), with_verdict(Verdict.NO_FAULT)])
def test_round_trip_is_lossless(result: Result) -> None:
    assert same(from_json(json.loads(dumps(result))), result)


@given(
    distance=st.floats(allow_infinity=False),
    trend=st.none() | st.floats(-1, 1),
    direction=st.sampled_from(Direction),
    kind=st.sampled_from(AnomalyType),
    onset=st.none() | st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    reason=st.text(),
)
def test_round_trip_of_any_numbers(distance, trend, direction, kind, onset, reason) -> None:
    base = kl_spike()
    first = base.score.ranking[0]
    metric = replace(
        first.metrics["actor/kl_loss"],
        proxy=direction,
        type_proxy=kind,
        trend=trend,
        onset_proxy=onset,
        effect_proxy=distance,
    )
    first = replace(first, distance=distance, reasons=(reason,), metrics={"actor/kl_loss": metric})
    result = replace(base, score=replace(base.score, ranking=(first,)))
    assert same(from_json(json.loads(dumps(result))), result)


def test_infinities_become_null() -> None:
    first = replace(kl_spike().score.ranking[0], distance=math.inf)
    result = replace(kl_spike(), score=replace(kl_spike().score, ranking=(first,)))
    assert to_json(result)["ranking"][0]["distance"] is None


@pytest.mark.parametrize("broken", [{"schema": 2}, {"verdict": "maybe"}, {"ranking": [{}]}, {"seeds": None}])
def test_foreign_file_is_refused_in_one_line(broken: dict) -> None:
    with pytest.raises(ResultFileError) as error:
        from_json({**to_json(kl_spike()), **broken})
    assert "\n" not in str(error.value)


def test_missing_key_and_wrong_type_are_refused() -> None:
    data = to_json(kl_spike())
    del data["status"]
    for bad in (data, [], None):
        with pytest.raises(ResultFileError):
            from_json(bad)


def test_unknown_keys_are_ignored() -> None:
    assert same(from_json({**to_json(kl_spike()), "later": 1}), kl_spike())
