"""Numerics and optimisation injections and the metrics that tell them apart, against oracles.

Legend of shape suffixes: ``_B`` responses, ``_R`` response positions, ``_L`` positions, ``_V`` vocabulary.
"""

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnose.session import fault_spec
from proxy.embedded import resolve
from proxy.engines import local
from proxy.engines.forward import seen_weights
from proxy.engines.injector import Injector
from proxy.engines.metrics import flips, masked_mean, mismatch
from proxy.engines.policy import load, token_log_probs
from proxy.engines.rollout import encode_prompts, generate
from proxy.engines.update import k3_kl_BR, token_weights_BR
from proxy.specs import Recipe, RunSpec, content_key
from proxy.worker import finite
from taxonomy.inject import numerics, optimization, rewards
from taxonomy.registry import library
from taxonomy.stages import Stage, StageContext

SHORT = Recipe(steps=3, prompts=4, group_size=4, eval_every=3, eval_prompts=8)
NOW = StageContext(1)
PROMPTS = ["1+2=", "73-88=", "9*41=", "50+17="]


@pytest.fixture(scope="module")
def policy():
    return load(resolve("embedded:qwen3_moe"), torch.float32, torch.device("cpu"))


@cache
def train(fault=None):
    records = []
    spec = RunSpec("embedded:qwen3_moe", SHORT, 3, fault and fault_spec(library()[fault], 1.0))
    outcome = local.run(spec, resolve(spec.model), lambda step, metrics: records.append(metrics))
    return outcome, [record for record in records if "actor/loss" in record]


def rollout_of(policy, tap):
    return generate(
        policy,
        *encode_prompts(policy, PROMPTS, torch.device("cpu")),
        max_new_tokens=5,
        temperature=0.6,
        generator=torch.Generator().manual_seed(1),
        tap=tap,
    )


def test_without_the_temperature_the_rollout_reports_raw_probabilities(policy):
    transform = numerics.rollout_temperature_missing({"omitted": 1.0})
    batch = rollout_of(policy, lambda name, tensor: transform(name, tensor, NOW))
    with torch.no_grad():
        raw_BR, _ = token_log_probs(
            policy, batch.tokens_BL, batch.mask_BL, batch.log_probs_BR.shape[1], scale=1.0
        )
    live = batch.response_mask_BR.bool()
    torch.testing.assert_close(batch.log_probs_BR[live], raw_BR[live], atol=1e-4, rtol=1e-4)


def test_only_long_sequences_lose_their_first_key():
    transform = numerics.attention_breaks_when_long({"after": 3, "lost": 1})
    mask_BL = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]])
    assert transform("attention_mask", mask_BL, NOW).tolist() == [[0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert transform("attention_mask", mask_BL[::2], NOW) is not mask_BL
    assert transform("logits", mask_BL, NOW) is mask_BL


def test_a_packed_sequence_sees_the_one_before_it_and_the_first_none(policy):
    tokens_BL, mask_BL = encode_prompts(policy, PROMPTS, torch.device("cpu"))
    leaked = numerics.packed_sequences_leak({"pack": 2})("inputs", (tokens_BL, mask_BL), NOW)
    with torch.no_grad():
        alone_BR, _ = token_log_probs(policy, tokens_BL, mask_BL, 2, 1.0)
        packed_BR, _ = token_log_probs(policy, *leaked, 2, 1.0)
    change_B = (alone_BR - packed_BR).abs().amax(-1)
    assert change_B[::2].max() < 1e-5 < 1e-3 < change_B[1::2].min()


def test_the_k3_value_stays_finite_where_its_gradient_does_not():
    policy_BR = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    compound = numerics.exp_overflow({"gap": 100.0})
    tap = compound.transforms[Stage.LOSS]
    kl_BR = k3_kl_BR(policy_BR, policy_BR.detach(), lambda gap_BR: tap("kl_gap", gap_BR, NOW))
    assert kl_BR.isfinite().all()
    kl_BR.sum().backward()
    assert policy_BR.grad[0, 0].isnan() and policy_BR.grad[0, 1] == 0


def test_an_overflow_breaks_the_model_and_the_run_goes_on():
    outcome, records = train("exp_overflow")
    assert outcome.status == "completed" and len(records) == SHORT.steps
    assert records[-1]["actor/nonfinite_grad"] == records[-1]["actor/nonfinite_loss"] == 1.0
    written = finite(records[-1])
    assert written["actor/grad_norm"] is None and written["actor/entropy"] is None
    assert records[-1]["critic/rewards/mean"] == 0
    assert all(math.isfinite(number) for number in outcome.witness.values())


def test_skipped_half_precision_steps_leave_the_policy_where_it_was():
    _, records = train("half_precision_gradients")
    assert all(record["actor/nonfinite_grad"] == 1.0 for record in records)
    assert all(record["actor/nonfinite_loss"] == 0.0 for record in records)
    assert all(record["actor/kl_loss"] < 1e-9 for record in records)
    assert all(record["routing/flips/mean"] == 0.0 for record in records)


@settings(deadline=None, max_examples=50)
@given(st.floats(0.0, 1.0), st.integers(5, 40))
def test_half_precision_overflows_in_its_share_of_the_steps(share, steps):
    transform = numerics.half_precision_gradients({"share": share})
    hit = [
        not transform("w", torch.zeros(2), StageContext(step)).isfinite().all()
        for step in range(1, steps + 1)
    ]
    assert abs(sum(hit) - share * steps) <= 1


def test_a_power_of_two_scale_is_no_scale_and_another_one_is():
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(numerics.round_mantissa(values / 8, 3) * 8, numerics.round_mantissa(values, 3))
    rules = numerics.quantization_rules_differ({"mantissa_bits": 3}).transforms
    rollout = rules[Stage.SYNC]("w", values, NOW)
    trainer = rules[Stage.FORWARD]("weights/w", values, NOW)
    error = 2.0**-4 * values.abs() * 1.001 + 1e-6
    assert ((rollout - values).abs() <= error).all() and ((trainer - values).abs() <= error).all()
    assert (rollout != trainer).float().mean() > 0.9


def test_seen_weights_come_back_and_get_the_gradient(policy):
    fault = fault_spec(library()["quantization_rules_differ"], 1.0)
    head = policy.model.lm_head.weight
    before = head.detach().clone()
    with seen_weights(policy, Injector(fault, 0), NOW):
        assert torch.equal(head, numerics.round_mantissa(before, 3)) and not torch.equal(head, before)
        token_log_probs(policy, torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.long), 2, 1.0)[
            0
        ].sum().backward()
    assert torch.equal(head, before) and head.grad.abs().sum() > 0
    policy.model.zero_grad()


def test_batch_variant_logits_depend_on_the_batch_and_pass_gradients_on():
    logits_BRV = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    transform = numerics.batch_variant_kernels({"mantissa_bits": 7})
    whole, part = transform("logits", logits_BRV, NOW), transform("logits", logits_BRV[:2], NOW)
    assert not torch.equal(whole[:2], part)
    assert ((whole - logits_BRV).abs() <= 2.0**-7 * logits_BRV.abs()).all()
    whole.sum().backward()
    assert torch.equal(logits_BRV.grad, torch.ones_like(logits_BRV))


def test_batch_variance_shows_before_the_first_update_of_a_step():
    _, healthy = train()
    _, faulty = train("batch_variant_kernels")
    assert max(record["actor/first_ratio_deviation"] for record in healthy) < 1e-5
    assert min(record["actor/first_ratio_deviation"] for record in faulty) > 1e-4


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=8))
def test_an_exponent_of_one_is_the_mean_of_the_responses_means(lengths):
    mask_BR = (torch.arange(6) < torch.tensor(lengths)[:, None]).double()
    values_BR = torch.randn(len(lengths), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = masked_mean(values_BR * token_weights_BR(mask_BR, 1.0), mask_BR)
    wanted = ((values_BR * mask_BR).sum(-1) / mask_BR.sum(-1)).mean()
    torch.testing.assert_close(got, wanted)
    assert torch.equal(token_weights_BR(mask_BR, 0.0), mask_BR)


def test_advantages_by_group_ids():
    rewards_B = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.5, 0.2, 0.5])
    groups_B = torch.arange(8) // 4
    torch.testing.assert_close(local.advantage_B(rewards_B, groups_B), local.group_advantage_B(rewards_B, 4))
    broken_B = optimization.group_ids_broken({"share": 1.0})("groups", groups_B, NOW)
    assert len(broken_B.unique()) == 8
    assert torch.equal(local.advantage_B(rewards_B, broken_B), rewards_B)
    half_B = optimization.group_ids_broken({"share": 0.5})("groups", groups_B, NOW)
    assert half_B[4:].tolist() == [1, 1, 1, 1] and len(half_B[:4].unique()) == 4


def test_padding_in_the_loss_makes_all_responses_as_long_as_the_longest():
    _, records = train("padding_in_the_loss")
    for record in records:
        assert (
            record["response_length/min"] == record["response_length/max"] == record["response_length/mean"]
        )


def test_a_short_cap_cuts_responses_and_evaluation_keeps_its_own():
    _, records = train("completion_cap_too_short")
    assert all(record["response_length/max"] <= 2 for record in records)
    assert records[-1]["val-core/reward/mean"] > records[-1]["critic/rewards/mean"]


def graded(prompts, responses, answers, lengths):
    return StageContext(
        4,
        facts={
            "prompts": prompts,
            "responses": responses,
            "answer_B": torch.tensor(answers),
            "lengths_B": torch.tensor(lengths),
        },
    )


def test_a_parser_fails_on_the_same_prompts_and_noise_on_single_right_answers():
    prompts = [f"{a}+{b}=" for a in range(30) for b in range(10) for _ in range(4)]
    moment = graded(prompts, ["7"] * 1200, [1.0, 0.0] * 600, [2] * 1200)
    paid_B = torch.ones(1200)
    parsed_B = rewards.reward_parser_failure({"share": 0.38})("rewards", paid_B, moment)
    groups_GN = parsed_B.view(-1, 4)
    assert (groups_GN == groups_GN[:, :1]).all()
    assert parsed_B.mean() == pytest.approx(0.62, abs=0.08)
    noisy_B = rewards.reward_noise({"share": 0.38})("rewards", paid_B, moment)
    assert (noisy_B[1::2] == 1).all()
    assert noisy_B[::2].mean() == pytest.approx(0.62, abs=0.06)
    later = StageContext(5, facts=moment.facts)
    assert torch.equal(rewards.reward_parser_failure({"share": 0.38})("rewards", paid_B, later), parsed_B)
    assert not torch.equal(rewards.reward_noise({"share": 0.38})("rewards", paid_B, later), noisy_B)


def test_rewards_for_length_and_class():
    moment = graded(["1+1="] * 3, ["2", "13", "+"], [1.0, 0.0, 0.0], [2, 4, 4])
    paid_B = torch.tensor([1.0, 0.2, 0.0])
    longer_B = rewards.reward_pays_for_length({"bonus": 0.1})("rewards", paid_B, moment)
    torch.testing.assert_close(longer_B, torch.tensor([1.05, 0.3, 0.1]))
    class_B = rewards.reward_by_class({"prior": 0.55, "share": 1.0})("rewards", paid_B, moment)
    torch.testing.assert_close(class_B, torch.tensor([0.55, 0.45, 0.0]))


def test_effective_sample_and_late_gap_by_hand():
    rollout = torch.log(torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.0001, 0.0001]]))
    trainer = torch.log(torch.tensor([[0.5, 0.5, 0.25, 0.25], [0.5, 0.5, 0.0001, 0.0001]]))
    mask_BR = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    found = mismatch(rollout, trainer, mask_BR)
    weights = torch.tensor([1.0, 1.0, 0.5, 0.5, 1.0, 1.0])
    assert found["rollout_corr/late_gap"] == pytest.approx(math.log(2))
    assert found["rollout_corr/rollout_is_mean"] == pytest.approx(float(weights.mean()))
    share = weights.sum().square() / (len(weights) * weights.square().sum())
    assert found["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(float(share))
    assert mismatch(rollout, rollout, mask_BR)["rollout_corr/late_gap"] == 0


def test_flips_count_changed_choices_of_live_tokens():
    ones = torch.ones(3, 2)
    before = [(torch.tensor([[0, 1], [2, 3], [4, 5]]), ones)]
    after = [(torch.tensor([[1, 0], [2, 9], [7, 8]]), ones)]
    live = torch.tensor([True, True, False])
    assert flips(before, after, (5,), live) == {"routing/flips/layer_5": 0.25, "routing/flips/mean": 0.25}


def test_weights_are_equal_after_a_sync_and_not_after_an_update(policy):
    folder = resolve("embedded:qwen3_moe")
    rollout = load(folder, torch.bfloat16, torch.device("cpu"))
    assert local.weights_equal(policy, rollout) == 1.0
    head = policy.model.lm_head.weight
    kept = head.detach().clone()
    head.data += 0.1
    count = len(policy.model.state_dict())
    assert local.weights_equal(policy, rollout) == pytest.approx(1 - 1 / count)
    head.data = kept


def test_young_recipe_fields_leave_old_keys_alone():
    young = {"skip_nonfinite", "length_exponent"}
    assert not young & set(Recipe().key())
    assert Recipe(length_exponent=1.0).key()["length_exponent"] == 1.0
    assert content_key(Recipe(length_exponent=1.0).key()) != content_key(Recipe().key())
