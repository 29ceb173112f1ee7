"""Recipe settings that remedies and probes use: importance weights, greedy held-out responses."""

from dataclasses import replace

import pytest

from diagnose.session import fault_spec
from proxy.embedded import resolve
from proxy.engines import local
from proxy.specs import Recipe, RunSpec
from taxonomy.registry import library

SHORT = Recipe(steps=2, prompts=4, group_size=4, eval_every=0, old_log_prob="trainer")


def train(recipe, fault=None, seed=3):
    records = []
    spec = RunSpec("embedded:qwen3_moe", recipe, seed, fault)
    local.run(spec, resolve(spec.model), lambda step, metrics: records.append(metrics))
    return [{k: v for k, v in metrics.items() if not k.startswith("timing_s/")} for metrics in records]


def test_without_a_mismatch_importance_weights_are_one():
    exact = replace(SHORT, exact=True)
    plain, weighted = train(exact), train(replace(exact, importance_cap=2.0))
    assert weighted[0]["actor/pg_loss"] == pytest.approx(plain[0]["actor/pg_loss"], abs=1e-3)


def test_importance_weights_are_capped_and_act_on_the_policy_loss_alone():
    fault = fault_spec(library()["rollout_weight_quantization"], 2.0)
    loss = {cap: train(replace(SHORT, importance_cap=cap), fault)[0] for cap in (0.0, 1e-6, 2.0)}
    assert abs(loss[1e-6]["actor/pg_loss"]) < 1e-5  # a cap of nothing leaves nothing
    assert loss[2.0]["actor/pg_loss"] != loss[0.0]["actor/pg_loss"]
    assert loss[2.0]["training/rollout_probs_diff_mean"] == loss[0.0]["training/rollout_probs_diff_mean"]


def test_greedy_held_out_responses_do_not_depend_on_the_seed():
    recipe = replace(SHORT, steps=1, eval_every=1, eval_prompts=48)
    first = [train(replace(recipe, eval_greedy=True), seed=seed)[0] for seed in (1, 2)]
    assert first[0] == first[1]
    assert train(recipe, seed=1)[0] != train(recipe, seed=2)[0]


def test_settings_at_their_default_leave_old_content_keys_alone():
    assert not {"importance_cap", "eval_greedy"} & set(Recipe().key())
    assert Recipe(importance_cap=2.0).key()["importance_cap"] == 2.0
