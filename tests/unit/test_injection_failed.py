"""A fault that could not be put in place is told apart from a run that failed and from one that didn't reproduce."""

import json

import pytest

from diagnose.logs import read
from diagnose.result import Verdict
from diagnose.score.plan import Replay
from diagnose.score.score import score
from proxy.specs import INJECTION_FAILED
from taxonomy.registry import library
from tests.pipeline.fake_worker import record

FAULT = "learning_rate_too_high"


def curves(folder, name, fault, seed):
    path = folder / f"{name}.jsonl"
    path.write_text(
        "".join(json.dumps({"step": n, "data": record(fault, seed, n)}) + "\n" for n in range(1, 41))
    )
    return read(path).runs[-1].curves


@pytest.mark.parametrize(
    ("failure", "verdict"),
    [
        (f"{INJECTION_FAILED}: the plugin was not loaded by verl", Verdict.INJECTION_FAILED),
        ("verl ended with code 1 after 0 steps", Verdict.INCONCLUSIVE),
    ],
)
def test_a_failed_injection_is_a_verdict_of_its_own(tmp_path, failure, verdict):
    faulty = [curves(tmp_path, "faulty", FAULT, 1)]
    original = [curves(tmp_path, f"o{seed}", None, seed) for seed in (2, 3)]
    proxy = [curves(tmp_path, f"p{seed}", None, seed) for seed in (4, 5)]
    replays = [Replay(FAULT, (), witness_ok=False, failure=failure)]
    found = score(faulty, original, proxy, replays, library(), from_step=1)
    assert found.ranking[0].verdict is verdict and found.verdict is verdict
    assert failure in found.ranking[0].reasons[0]
