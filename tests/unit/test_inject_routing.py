"""Framework and routing injections against oracles: the model configured so, brute force, the model library's own."""

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from proxy.embedded import NAMES, resolve
from proxy.engines import local
from proxy.engines.injector import Injector
from proxy.engines.policy import load, token_log_probs
from proxy.engines.rollout import cache_distance, encode_prompts, generate
from proxy.engines.router import balancing_loss, inside, router_parameters
from proxy.engines.taps import RouteLog, Taps, replay
from proxy.specs import FaultSpec
from taxonomy.inject import routing, state
from taxonomy.registry import library
from taxonomy.stages import Projection, Stage, StageContext

CPU = torch.device("cpu")
PROMPTS = ["1+2=", "73-88=", "9*41=", "5-5="]


@pytest.fixture(scope="module")
def policy():
    return load(resolve("embedded:qwen3_moe"), torch.float32, CPU)


def tokens(policy):
    tokens_BL, mask_BL = encode_prompts(policy, PROMPTS, CPU)
    answer_BR = torch.tensor(policy.tokenizer.encode("1234").ids).expand(len(PROMPTS), -1)
    return torch.cat([tokens_BL, answer_BR], 1), torch.cat([mask_BL, torch.ones_like(answer_BR)], 1)


def passed(policy, fault, stage, model_tokens=None, **over):
    """Return the log-probabilities of a pass with a fault of the library in place."""
    card = library()[fault]
    spec = FaultSpec(card.id, str(card.form), str(card.stage), card.inject, card.values())
    taps = Taps(Injector(spec, 0), [torch.full((policy.num_experts,), 1 / policy.num_experts)] * 9)
    tokens_BL, mask_BL = model_tokens or tokens(policy)
    with torch.no_grad(), taps.over(policy, stage, StageContext(1), **over):
        return token_log_probs(policy, tokens_BL, mask_BL, 4, 1.0)[0], taps.injector.witness()


@pytest.mark.parametrize("name", NAMES)
def test_an_opened_router_is_the_same_router(name):
    policy = load(resolve(f"embedded:{name}"), torch.float32, CPU)
    tokens_BL, mask_BL = tokens(policy)
    with torch.no_grad():
        plain_BR, _ = token_log_probs(policy, tokens_BL, mask_BL, 4, 1.0)
        with inside(policy) as seen:
            opened_BR, _ = token_log_probs(policy, tokens_BL, mask_BL, 4, 1.0)
        again_BR, _ = token_log_probs(policy, tokens_BL, mask_BL, 4, 1.0)
    assert torch.equal(plain_BR, opened_BR) and torch.equal(plain_BR, again_BR)
    assert sorted(seen) == list(range(len(policy.layers)))
    for router in seen.values():
        assert router.logits_TE.shape == router.scores_TE.shape == (tokens_BL.numel(), policy.num_experts)
        own_TK = router.scores_TE.gather(-1, router.ids_TK)
        assert (own_TK > 0).all()
    assert len(router_parameters(policy)) == len(policy.layers)


def test_the_other_score_rule_is_the_model_configured_so(policy, tmp_path):
    shutil.copytree(resolve("embedded:qwen3_moe"), tmp_path / "raw")
    config = json.loads((tmp_path / "raw" / "config.json").read_text())
    (tmp_path / "raw" / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    raw = load(tmp_path / "raw", torch.float32, CPU)
    with torch.no_grad():
        wanted_BR, _ = token_log_probs(raw, *tokens(raw), 4, 1.0)
    got_BR, witness = passed(policy, "score_rule_mismatch", Stage.ROLLOUT)
    torch.testing.assert_close(got_BR, wanted_BR)
    assert witness["routes_changed"] == 0 and witness["route_weights_changed"] > 0.01
    # and back again: a model that does not normalise, read by an engine that does
    back_BR, _ = passed(raw, "score_rule_mismatch", Stage.ROLLOUT)
    with torch.no_grad():
        torch.testing.assert_close(back_BR, token_log_probs(policy, *tokens(policy), 4, 1.0)[0])


def test_replay_of_the_own_routes_changes_nothing_and_off_by_one_does(policy):
    log = RouteLog()
    quiet = Taps(Injector(None, 0), [torch.ones(policy.num_experts)] * len(policy.layers))
    tokens_BL, mask_BL = tokens(policy)
    with torch.no_grad(), quiet.over(policy, Stage.FORWARD, StageContext(1), log=log, batch=len(PROMPTS)):
        plain_BR, _ = token_log_probs(policy, tokens_BL, mask_BL, 4, 1.0)
    own = replay(log, tokens_BL.shape[1])
    for ids_BLK, weights_BLK in own:
        ids_TK, weights_TK = ids_BLK.flatten(0, 1), weights_BLK.flatten(0, 1)
        scores_TE = torch.rand(len(ids_TK), policy.num_experts)
        scores_TE.scatter_(1, ids_TK, weights_TK * 0.3)
        torch.testing.assert_close(routing.gate_weights((ids_TK, weights_TK), ids_TK, scores_TE), weights_TK)
    shifted_BR, witness = passed(policy, "replay_misaligned", Stage.FORWARD, replayed=own)
    assert witness["routes_changed"] > 0.3 and not torch.allclose(shifted_BR, plain_BR, atol=1e-3)
    blind_BR, witness = passed(policy, "replay_misaligned", Stage.FORWARD)
    assert torch.equal(blind_BR, plain_BR) and witness["routes_changed"] == 0


def test_a_short_recording_is_filled_with_its_last_token():
    log = RouteLog()
    log.add(0, (torch.arange(6).view(6, 1), torch.ones(6, 1)), 2)
    ((ids_BLK, _),) = replay(log, 4)
    assert ids_BLK[:, :, 0].tolist() == [[0, 1, 2, 2], [3, 4, 5, 5]]


@given(st.integers(0, 10_000), st.floats(0.1, 3.0))
@settings(max_examples=40, deadline=None)
def test_no_expert_takes_more_than_its_room_and_the_heaviest_stay(seed, factor):
    source = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(40, 8, generator=source)
    weights_TK, ids_TK = scores_TE.topk(2, -1)
    live_T = torch.rand(40, generator=source) < 0.8
    context = StageContext(1, num_experts=8, live_T=live_T)
    same_TK, kept_TK = routing.capacity_drop({"capacity_factor": factor})(
        "routes", (ids_TK, weights_TK), context
    )
    assert torch.equal(same_TK, ids_TK) and torch.equal(kept_TK[~live_T], weights_TK[~live_T])
    room = max(1, -int(-factor * 2 * int(live_T.sum()) // 8))
    for expert in range(8):
        mine_TK = (ids_TK == expert) & live_T[:, None]
        kept, dropped = weights_TK[mine_TK & (kept_TK > 0)], weights_TK[mine_TK & (kept_TK == 0)]
        assert len(kept) == min(room, int(mine_TK.sum()))
        assert not len(dropped) or dropped.max() <= kept.min()


@given(st.floats(0.02, 0.6))
@settings(max_examples=15, deadline=None)
def test_noise_is_as_wide_as_the_wanted_flips(share):
    source = torch.Generator().manual_seed(1)
    logits_TE, noise_TE = torch.randn(2000, 16, generator=source), torch.randn(2000, 16, generator=source)
    width = routing.noise_width(logits_TE, noise_TE, 4, share)
    before_TK = logits_TE.topk(4, -1).indices.sort(-1).values
    after_TK = (logits_TE + width * noise_TE).topk(4, -1).indices.sort(-1).values
    assert float((before_TK != after_TK).any(-1).float().mean()) == pytest.approx(share, abs=0.01)


def test_the_balancing_loss_is_the_library_s(policy):
    with torch.no_grad(), inside(policy) as seen:
        tokens_BL, mask_BL = tokens(policy)
        token_log_probs(policy, tokens_BL, mask_BL, 4, 1.0)
    for position, router in seen.items():
        ours = balancing_loss({position: router}, mask_BL.flatten(), policy.num_experts)
        theirs = load_balancing_loss_func(
            (router.logits_TE,), policy.num_experts, policy.top_k, attention_mask=mask_BL
        )
        torch.testing.assert_close(ours, theirs / policy.top_k)  # theirs counts a token once an expert


def test_another_template_is_the_prompt_with_a_line_break(policy):
    tokens_BL, mask_BL = tokens(policy)
    context = StageContext(1, facts={"encode": lambda text: policy.tokenizer.encode(text).ids})
    wide_BL, seen_BL = state.prompt_mismatch({"line_breaks": 2})("inputs", (tokens_BL, mask_BL), context)
    wanted_BP, wanted_mask_BP = encode_prompts(policy, [f"\n\n{prompt}" for prompt in PROMPTS], CPU)
    live = wanted_mask_BP.bool()
    assert torch.equal(seen_BL[:, :-4], wanted_mask_BP)
    assert torch.equal(wide_BL[:, :-4][live], wanted_BP[live])
    assert torch.equal(wide_BL[:, -4:], tokens_BL[:, -4:])


def test_a_layer_map_off_by_one_sends_a_layer_twice(policy):
    transform = state.weight_conversion_error({"layers": 1})
    sent = {
        name: transform(name, tensor, StageContext(1)) for name, tensor in policy.model.state_dict().items()
    }
    for name, tensor in policy.model.state_dict().items():
        source = name.replace("layers.1.", "layers.0.")
        assert torch.equal(sent[name], policy.model.state_dict()[source]), name
        assert torch.equal(sent[name], tensor) or "layers.1." in name


def test_row_wise_ranks_round_their_partial_sums():
    source = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(50, 64, generator=source), torch.randn(32, 64, generator=source)
    whole = Projection(inputs, weight, inputs @ weight.T)
    changed = state.tensor_parallel_numerics({"ranks": 8})("o_proj", whole, StageContext(1)).output
    error = (changed - whole.output).abs().max()
    # eight roundings of numbers of the size of the largest partial sum, to eight significant bits
    assert 0 < error < 16 * whole.output.abs().max() * 2**-8


def test_a_prompt_cache_of_the_same_weights_changes_nothing(policy):
    asked = encode_prompts(policy, PROMPTS, CPU)
    other = local.copied(policy, resolve("embedded:qwen3_moe"), CPU)

    def sampled(prefix):
        source = torch.Generator().manual_seed(3)
        return generate(policy, *asked, max_new_tokens=4, temperature=0.9, generator=source, prefix=prefix)

    assert cache_distance(policy, other, *asked) == 0
    plain, same = sampled(None), sampled(other)
    assert torch.equal(plain.tokens_BL, same.tokens_BL)
    torch.testing.assert_close(plain.log_probs_BR, same.log_probs_BR)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.1)
    assert cache_distance(policy, other, *asked) > 0.01
    assert not torch.allclose(sampled(other).log_probs_BR, plain.log_probs_BR, atol=1e-3)


def test_zeroed_routers_touch_the_routers_alone():
    transform = routing.router_zeroed({})
    assert transform("model.layers.0.mlp.gate.weight", torch.ones(2, 2), StageContext(1)).sum() == 0
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.gate_proj.weight"):
        assert transform(name, torch.ones(2, 2), StageContext(1)).sum() == 4


def test_shifted_log_probabilities_keep_their_values():
    values = torch.arange(6.0).view(2, 3)
    moved = state.logprob_shift({"offset": 1})("rollout_log_probs", values, StageContext(1))
    assert moved.tolist() == [[2.0, 0.0, 1.0], [5.0, 3.0, 4.0]]
