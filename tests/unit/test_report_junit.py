"""JUnit: what is a failure, an error, a skip, and that every document parses."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from diagnose.report.junit import to_junit, unmet
from diagnose.result import Verdict
from tests.fixtures.results import hostile, kl_spike, with_verdict


def parse(text: str) -> tuple[ET.Element, dict[str, ET.Element]]:
    suite = ET.fromstring(text)
    return suite, {case.get("name", ""): case for case in suite.findall("testcase")}


def kinds(case: ET.Element) -> list[str]:
    return [child.tag for child in case if child.tag in ("failure", "error", "skipped")]


def test_one_case_a_candidate_and_one_for_the_verdict() -> None:
    suite, cases = parse(to_junit(kl_spike()))
    assert list(cases) == [
        "verdict",
        "stale_weights",
        "rollout_precision",
        "update_omission",
        "expert_swap",
        "reward_flip",
    ]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
        "6",
        "0",
        "1",
        "1",
    )


def test_an_innocent_candidate_is_no_failure() -> None:
    _, cases = parse(to_junit(kl_spike()))
    assert kinds(cases["update_omission"]) == []
    assert kinds(cases["expert_swap"]) == ["error"]
    assert kinds(cases["reward_flip"]) == ["skipped"]
    assert "signal 9" in (cases["expert_swap"].findtext("system-err") or "")


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict.REPRODUCED, []),
        (Verdict.REPRODUCED_NOT_SPECIFIC, []),
        (Verdict.NO_FAULT, []),
        (Verdict.PARTLY, ["failure"]),
        (Verdict.NOT_REPRODUCED, ["failure"]),
        (Verdict.INCONCLUSIVE, ["error"]),
        (Verdict.INJECTION_FAILED, ["error"]),
    ],
)
def test_verdict_decides_the_answer(verdict: Verdict, expected: list[str]) -> None:
    _, cases = parse(to_junit(with_verdict(verdict)))
    assert kinds(cases["verdict"]) == expected


def test_expect_replaces_the_verdict() -> None:
    negative_control = with_verdict(Verdict.NOT_REPRODUCED)
    _, cases = parse(to_junit(negative_control, {"verdict": "not_reproduced"}))
    assert kinds(cases["expect"]) == [] and "verdict" not in cases
    _, cases = parse(to_junit(kl_spike(), {"fault": "update_omission"}))
    assert kinds(cases["expect"]) == ["failure"]


def test_unmet_says_what() -> None:
    assert unmet(kl_spike(), {"fault": "stale_weights", "verdict": "reproduced"}) == ()
    (fault,) = unmet(kl_spike(), {"fault": "other"})
    assert "other" in fault and "stale_weights" in fault
    assert len(unmet(kl_spike(), {"fault": "other", "verdict": "partly"})) == 2
    assert unmet(replace(kl_spike(), status="interrupted"), {})


def test_an_unfinished_experiment_is_an_error_even_with_expect() -> None:
    result = replace(kl_spike(), status="interrupted")
    for expect in (None, {"fault": "stale_weights"}):
        _, cases = parse(to_junit(result, expect))
        assert kinds(cases["expect" if expect else "verdict"]) == ["error"]


def test_a_fault_whose_runs_all_failed_is_an_error() -> None:
    base = kl_spike()
    result = replace(base, failures={"lost_fault-x0.5-s1": "out of memory", "healthy-s1": "disk full"})
    _, cases = parse(to_junit(result))
    assert kinds(cases["lost_fault"]) == ["error"] and kinds(cases["healthy proxy"]) == ["error"]


def test_hostile_strings_parse_and_come_out_literally() -> None:
    _, cases = parse(to_junit(hostile()))
    names = [name for name in cases if name.startswith("<script>alert(1)</script> [red]x[/]")]
    assert names and not any("\x1b" in name or "\x00" in name or "\u202e" in name for name in names)
