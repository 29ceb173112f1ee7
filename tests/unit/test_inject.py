"""Injections against oracles: torch's own low-precision formats, and the model run with the other setting."""

import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxy.embedded import resolve
from proxy.engines.injector import InjectionRefused, Injector, route_agreement
from proxy.engines.policy import load, token_log_probs
from proxy.specs import FaultSpec, Recipe
from taxonomy.inject.numerics import round_mantissa
from taxonomy.inject.routing import expert_permutation, top_k_mismatch
from taxonomy.stages import Action, Stage, StageContext


def test_seven_mantissa_bits_are_bf16():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_mantissa(values, 7), values.bfloat16().float())


@pytest.mark.parametrize(("bits", "dtype"), [(3, torch.float8_e4m3fn), (2, torch.float8_e5m2)])
def test_few_mantissa_bits_are_fp8_in_its_normal_range(bits, dtype):
    values = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.5
    assert torch.equal(round_mantissa(values, bits), values.to(dtype).float())


@given(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), st.integers(0, 23))
def test_rounding_stays_within_half_a_unit_in_the_last_place(value, bits):
    tensor = torch.tensor(value)
    error = (round_mantissa(tensor, bits) - tensor).abs()
    assert error <= 2.0**-bits * tensor.abs() * 0.5000001 + 1e-44


def test_dropping_an_expert_is_the_model_with_a_smaller_top_k(tmp_path):
    source = resolve("embedded:qwen3_moe")
    shutil.copytree(source, tmp_path / "less")
    config = json.loads((source / "config.json").read_text())
    config["num_experts_per_tok"] -= 1
    (tmp_path / "less" / "config.json").write_text(json.dumps(config))
    tokens_BL = torch.randint(4, 18, (8, 10), generator=torch.Generator().manual_seed(1))
    mask_BL = torch.ones_like(tokens_BL)
    faulty = load(source, torch.float32, torch.device("cpu"))
    transform = top_k_mismatch({"dropped": 1})
    faulty.hook = lambda _position, routes: transform("routes", routes, StageContext(1))
    less = load(tmp_path / "less", torch.float32, torch.device("cpu"))
    with torch.no_grad():
        got, _ = token_log_probs(faulty, tokens_BL, mask_BL, 6, 1.0)
        wanted, _ = token_log_probs(less, tokens_BL, mask_BL, 6, 1.0)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(1, 100), min_size=4, max_size=32), st.floats(0.05, 1.0))
def test_a_permutation_moves_the_busiest_experts_and_no_other(counts, share):
    share_E = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    experts = torch.arange(len(counts))[:, None]
    context = StageContext(1, routing_share_E=share_E)
    mapped, _ = expert_permutation({"routing_share": share})(
        "routes", (experts, torch.ones(len(counts), 1)), context
    )
    assert sorted(mapped.flatten().tolist()) == list(range(len(counts)))
    moved = (mapped != experts).flatten()
    assert share_E[moved].min() >= share_E[~moved].max() if (~moved).any() else True
    assert moved.sum() == 2 or share_E[moved].sum() - share_E[moved].min() < share


def test_route_agreement_ignores_order_and_unused_experts():
    left = (torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2))
    assert route_agreement(left, (torch.tensor([[1, 0], [3, 2]]), torch.ones(2, 2))) == 1.0
    assert (
        route_agreement(left, (torch.tensor([[1, 0], [3, 2]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])))
        == 0.75
    )
    assert route_agreement(left, (torch.tensor([[4, 5], [6, 7]]), torch.ones(2, 2))) == 0.0


def fault(**changes):
    base = {"id": "f", "form": "event", "stage": "optimizer"}
    return FaultSpec(**base | {"inject": "taxonomy.inject.optimization:actor_update_omission"} | changes)


def test_window_and_probability():
    injector = Injector(fault(from_step=3, until_step=5), 0)
    assert [injector.active(step) for step in range(1, 8)] == [False, False, True, True, True, False, False]
    often = Injector(fault(probability=0.3), 7)
    share = sum(often.active(step) for step in range(1, 1001)) / 1000
    assert share == pytest.approx(0.3, abs=0.05)
    assert [often.active(step) for step in range(50)] == [
        Injector(fault(probability=0.3), 7).active(s) for s in range(50)
    ]


def test_an_event_acts_at_its_own_stage_only():
    injector = Injector(fault(), 0)
    assert injector.event(Stage.SYNC, StageContext(1)) is Action.DO
    assert injector.event(Stage.OPTIMIZER, StageContext(1)) is Action.SKIP
    assert injector.witness() == {"events_skipped": 1.0}


def test_overrides_change_the_recipe_only_inside_the_window():
    spec = fault(
        form="overrides",
        inject="taxonomy.inject.optimization:learning_rate_too_high",
        params={"factor": 30},
        from_step=2,
    )
    injector, healthy = Injector(spec, 0), Recipe()
    assert injector.recipe(healthy, 1) is healthy
    assert injector.recipe(healthy, 2).lr == pytest.approx(30 * healthy.lr)


def test_an_injection_that_is_not_there_is_refused():
    with pytest.raises(InjectionRefused, match="cannot be resolved"):
        Injector(fault(inject="taxonomy.inject.optimization:nothing"), 0)
