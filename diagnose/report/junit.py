"""JUnit XML for a CI job.

One test case for the answer (the verdict, or the playbook's `expect`) and one a candidate. A candidate's case
asks whether its replay was carried out and could be scored, not whether it is the cause: of six candidates
five are expected to be innocent, and a pipeline that is red by design is soon ignored. So:

- *failure*: the answer is no (not reproduced, only partly, `expect` unmet);
- *error*: there is no answer, or a replay could not be carried out (run failed, injection not seen);
- *skipped*: a candidate that was not replayed, or whose replay allows no claim.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping

from diagnose.report.text import literal, number, percent
from diagnose.report.words import VERDICT_TITLE, VERDICT_WORD, fault_of_run, headline, why
from diagnose.result import Candidate, Result, Verdict

GOOD = (Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC, Verdict.NO_FAULT)
UNANSWERED = (Verdict.INCONCLUSIVE, Verdict.INJECTION_FAILED)


def unmet(result: Result, expect: Mapping[str, str]) -> tuple[str, ...]:
    """Return in words which parts of a playbook's `expect` do not hold.

    Args:
        result: The result.
        expect: `verdict` (the verdict that must come out) and/or `fault` (the fault that must be ranked
            first), each left out or empty for "any".
    """
    complaints = []
    if result.status != "completed":
        complaints.append(f"the experiment was not completed ({literal(result.status, 30)})")
    if (verdict := expect.get("verdict")) and verdict != result.score.verdict.value:
        complaints.append(f"expected verdict {literal(verdict, 60)}, got {result.score.verdict.value}")
    if fault := expect.get("fault"):
        first = result.score.ranking[0].fault if result.score.ranking else "none"
        if fault != first:
            complaints.append(f"expected {literal(fault, 60)} in the first place, got {literal(first, 60)}")
    return tuple(complaints)


def to_junit(result: Result, expect: Mapping[str, str] | None = None) -> str:
    """Return the result as a JUnit XML document.

    Args:
        result: The result.
        expect: The playbook's `expect`, None where it has none (see `unmet`).
    """
    suite = ET.Element("testsuite", name=f"diagnose.{literal(result.name, 120)}")
    properties = ET.SubElement(suite, "properties")
    for key, value in {
        "status": result.status,
        "verdict": result.score.verdict.value,
        "symptom": result.symptom,
        "engine": result.engine,
        "seeds": " ".join(map(str, result.seeds)),
        "run_dir": result.run_dir,
    }.items():
        ET.SubElement(properties, "property", name=key, value=literal(value))
    _answer(suite, result, expect)
    failed = _failures_by_fault(result)
    ranked = {candidate.fault for candidate in result.score.ranking}
    for candidate in result.score.ranking:
        _candidate(suite, candidate, failed.get(candidate.fault, ()))
    for fault, reason in result.not_tried.items():
        if fault not in ranked:
            ET.SubElement(
                _case(suite, fault, "candidate"), "skipped", message=literal(f"not replayed: {reason}")
            )
    for fault, runs in failed.items():
        if fault not in ranked and fault not in result.not_tried:
            name = fault or "healthy proxy"
            ET.SubElement(
                _case(suite, name, "candidate"), "error", type="run_failed", message="; ".join(runs)
            )
    cases = suite.findall("testcase")
    for kind, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(kind) is not None for case in cases)))
    suite.set("tests", str(len(cases)))
    suite.set("time", f"{max(result.wall_s, 0):.3f}" if result.wall_s == result.wall_s else "0")
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"


def _case(suite: ET.Element, name: str, kind: str) -> ET.Element:
    classname = f"{suite.get('name')}.{kind}"
    return ET.SubElement(suite, "testcase", classname=classname, name=literal(name, 120))


def _answer(suite: ET.Element, result: Result, expect: Mapping[str, str] | None) -> None:
    verdict = result.score.verdict
    case = _case(suite, "expect" if expect else "verdict", "answer")
    if expect and result.status == "completed":
        if complaints := unmet(result, expect):
            ET.SubElement(case, "failure", type="expect_unmet", message="; ".join(complaints))
    elif result.status != "completed":
        ET.SubElement(case, "error", type=literal(result.status, 30), message=headline(result))
    elif verdict in UNANSWERED:
        ET.SubElement(case, "error", type=verdict.value, message=headline(result))
    elif verdict not in GOOD:
        ET.SubElement(case, "failure", type=verdict.value, message=headline(result))
    lines = [f"{VERDICT_TITLE[verdict]}. {headline(result)}", *why(result)]
    ET.SubElement(case, "system-out").text = "\n".join(lines)


def _candidate(suite: ET.Element, candidate: Candidate, failed: tuple[str, ...]) -> None:
    case = _case(suite, candidate.fault, "candidate")
    if failed and math.isnan(candidate.distance):
        ET.SubElement(case, "error", type="run_failed", message="; ".join(failed))
    elif not candidate.witness_ok or candidate.verdict == Verdict.INJECTION_FAILED:
        message = "the replay does not prove that the fault took place"
        ET.SubElement(case, "error", type="injection_failed", message=message)
    elif candidate.verdict == Verdict.INCONCLUSIVE:
        ET.SubElement(case, "skipped", message=literal("; ".join(candidate.reasons) or "inconclusive"))
    summary = (
        f"{VERDICT_WORD[candidate.verdict]}: distance {number(candidate.distance)}, "
        f"agreement {percent(candidate.agreement)}, coverage {percent(candidate.coverage)}"
    )
    ET.SubElement(case, "system-out").text = "\n".join([summary, *map(literal, candidate.reasons)])
    if failed:
        ET.SubElement(case, "system-err").text = "\n".join(failed)


def _failures_by_fault(result: Result) -> dict[str, tuple[str, ...]]:
    """Group failed runs by fault, "" for healthy runs."""
    groups: dict[str, tuple[str, ...]] = {}
    for run, reason in result.failures.items():
        fault = fault_of_run(run) or ("" if run.startswith("healthy") else run)
        groups[fault] = (*groups.get(fault, ()), literal(f"{run}: {reason}"))
    return groups
