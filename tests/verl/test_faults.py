"""Faults of all stages on real verl, many in one run: each has to leave its own witness, under both trainers.

What is measured on a tensor or counted carries its fault's name; what the engine measures is one number a run, so no
two faults of a run have the same one.
"""

import json
import math
from dataclasses import asdict, replace

import pytest

from diagnose.scoring import judge_witness
from diagnose.session import fault_spec
from proxy.api import Done, Failed, Job, WorkerPool
from proxy.specs import EngineSpec, Recipe, RunSpec
from taxonomy.registry import library

RECIPE = Recipe(steps=3, prompts=6, group_size=4, eval_every=0)
FIRST = (
    "capacity_drop",
    "quantization_rules_differ",
    "batch_variant_kernels",
    "reward_parser_failure",
    "reward_pays_for_length",
    "reward_by_class",
    "logprob_shift",
    "group_ids_broken",
    "gradients_in_low_precision",
    "router_lr_too_high",
    "loss_length_bias",
    "tensor_parallel_numerics",
    "router_disagreement",
    "score_rule_mismatch",
    "balancing_misscaled",
    "completion_cap_too_short",
    "optimizer_state_lost",
    "gradient_clipping_off",
)
SECOND = (
    "replay_misaligned",
    "reward_noise",
    "router_frozen",
    "stale_prefix_cache",
    "reference_reanchored",
    "padding_in_the_loss",
    "attention_breaks_when_long",
    "rollout_temperature_missing",
    "expert_permutation",
    "kl_coefficient_too_large",
    "excess_inner_epochs",
)
# Rows that a fault makes longer are not those of a route that another fault of the same pass knows; where no update
# comes through there is none to tell apart; and responses that all end at a cap are all of one length.
APART = {
    "capacity_drop",
    "router_lr_too_high",
    "optimizer_state_lost",
    "gradient_clipping_off",
    "completion_cap_too_short",
}
QUEUED = (
    "prompt_mismatch",
    "packed_sequences_leak",
    "half_precision_gradients",
    *(name for name in FIRST if name not in APART),
)
RUNS = {"first": (FIRST, "v0"), "second": (SECOND, "v0"), "queued": (QUEUED, "v1")}


def spec(names, trainer):
    faults = [fault_spec(library()[name], 1.0) for name in names]
    faults = [
        replace(fault, params=fault.params | {"interval": 2.0}) if "interval" in fault.params else fault
        for fault in faults
    ]
    engine = EngineSpec("verl", trainer=trainer)
    return RunSpec("embedded:qwen3_moe", RECIPE, 1, faults[0], engine, tuple(faults[1:]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs by name: (event at the end, witness, metrics by step)."""
    home = tmp_path_factory.mktemp("faults")
    ends = {}
    with WorkerPool(2, home) as pool:
        for name, (faults, trainer) in RUNS.items():
            pool.submit(Job(name, "run", asdict(spec(faults, trainer)), str(home / name)))
        for event in pool.events():
            if isinstance(event, Done | Failed):
                ends[event.id] = event
    found = {}
    for name, end in ends.items():
        assert isinstance(end, Done), (name, end)
        log = (home / name / "metrics.jsonl").read_text().splitlines()
        metrics = {line["step"]: line["data"] for line in map(json.loads, log)}
        found[name] = json.loads((home / name / "outcome.json").read_text())["witness"], metrics
    return found


@pytest.mark.parametrize(
    ("run", "fault"), [(run, fault) for run, (faults, _) in RUNS.items() for fault in faults]
)
def test_every_fault_leaves_its_witness(runs, run, fault):
    witness = runs[run][0]
    own = {name.removeprefix(f"{fault}/"): value for name, value in witness.items()}
    measured, seen = judge_witness(library()[fault], [own])
    assert seen, (fault, measured)


@pytest.mark.parametrize("run", RUNS)
def test_routing_metrics_have_the_local_engines_names(runs, run):
    for data in runs[run][1].values():
        assert 0 < data["routing/agreement/mean"] <= 1
        assert 0 < data["routing/load_entropy/layer_0"] < math.log(32)
        assert data["routing/load_max/mean"] >= 1
        assert 0 <= data["routing/flips/mean"] <= 1
    # Routers that disagree, and experts that are dropped, are seen in what the two sides report.
    assert min(data["routing/agreement/mean"] for data in runs[run][1].values()) < 0.9
