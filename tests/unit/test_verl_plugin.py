"""What the plugin's wrappers make of the functions that they wrap, with stand-ins for verl's: verl isn't needed."""

from types import SimpleNamespace

import pytest
import torch

from diagnose.session import fault_spec
from proxy.embedded import resolve
from proxy.engines import verl_job
from proxy.engines.metrics import routing
from proxy.engines.update import token_weights_BR
from proxy.engines.verl_plugin import driver, passes, state, worker
from proxy.engines.verl_plugin.table import TRAINER
from proxy.specs import EngineSpec, FaultSpec, Recipe, RunSpec
from taxonomy.registry import library

MODEL = "embedded:qwen3_moe"


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Return what makes this process one of a job with a fault (an id, a spec, or None)."""

    def become(fault, **recipe):
        planned = fault_spec(library()[fault], 1.0) if isinstance(fault, str) else fault
        spec = RunSpec(MODEL, Recipe(**{"steps": 3} | recipe), 7, planned, EngineSpec("verl"))
        home = tmp_path / "job"
        verl_job.write_job(home, spec, resolve(MODEL))
        job = home / "job.json"  # in this process the injections go by their own names
        job.write_text(job.read_text().replace(f"{verl_job.PACKAGE}.", ""))
        monkeypatch.setenv("RL_DIAGNOSE_JOB", str(home))
        state.process.cache_clear()
        passes.tokenizer.cache_clear()
        driver.end_token.cache_clear()
        found = state.process()
        found.kind = TRAINER
        return found

    yield become
    state.process.cache_clear()


def test_routing_metrics_in_micro_batches_are_those_of_the_whole_batch():
    torch.manual_seed(0)
    tokens, layers, experts = 30, (0, 2), 8

    def routes():
        return [(torch.rand(tokens, experts).topk(2).indices, torch.rand(tokens, 2) + 0.1) for _ in layers]

    trainer, rollout = routes(), routes()
    live_T = torch.arange(tokens) % 5 != 0
    whole = routing(rollout, trainer, layers, live_T, experts)
    tally = passes.RoutingTally(layers, experts)
    for part in (slice(0, 11), slice(11, 30)):
        own = [(ids[part], weights[part]) for ids, weights in trainer]
        tally.add(own, torch.stack([ids[part] for ids, _ in rollout]), live_T[part])
    assert tally.metrics() == pytest.approx(whole)


def test_an_expert_that_the_rollout_left_out_is_no_agreement():
    ids_TK = torch.tensor([[0, 1]])
    tally = passes.RoutingTally((0,), 4)
    tally.add([(ids_TK, torch.ones(1, 2))], torch.tensor([[[0, -1]]]), torch.tensor([True]))
    assert tally.metrics()["routing/agreement/mean"] == 0.5


def test_the_rollouts_routes_fill_the_row_but_its_last_token_counts_for_nothing():
    rows = [torch.arange(6).view(3, 1, 2), torch.arange(4).view(2, 1, 2)]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    ids_LTK, fed_T = passes.rollout_routes({"routed_experts": nested}, 4)
    assert ids_LTK.shape == (1, 8, 2) and fed_T.tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    assert ids_LTK[0, :3].tolist() == [[0, 1], [2, 3], [2, 3]]
    assert passes.rollout_routes({}, 4) is None


def test_token_weights_reach_the_mean_of_the_loss(process):
    found = process("loss_length_bias")
    mask_BR = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0]])
    mean = worker.loss_mean(lambda mat, mask, mode: (mat * mask).sum() / mask.sum())
    loss_BR = torch.tensor([[1.0, 1, 1, 1], [5, 0, 0, 0]])
    expected = (loss_BR * token_weights_BR(mask_BR, 1.0)).sum() / mask_BR.sum()
    assert float(mean(loss_BR, mask_BR, "token-mean")) == pytest.approx(float(expected))
    assert found.largest["token_weight_spread"] == pytest.approx(4.0)
    found.kind = "driver"  # where only metrics are made of it
    assert float(mean(loss_BR, mask_BR, "token-mean")) == pytest.approx(9 / 5)


def test_the_exponent_of_the_kl_term_loses_its_clamp_only_where_a_fault_says_so(process):
    process(None)
    healthy = worker.kl_term(lambda p, r, kind: (r - p).clamp(-20, 20).exp() - (r - p) - 1)
    zeros = torch.zeros(1, 2)
    assert healthy(zeros, zeros, "low_var_kl").tolist() == [[0, 0]]
    process("exp_overflow")
    gradient = torch.zeros(1, 2, requires_grad=True)
    worker.kl_term(lambda *_: pytest.fail("not asked"))(gradient, zeros, "low_var_kl").sum().backward()
    assert not gradient.grad.isfinite().all()


class Engine:
    """As much of verl's training engine as an optimizer step needs."""

    def __init__(self):
        self.module = torch.nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            self.module.weight.copy_(torch.arange(6.0).view(2, 3))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.optimizer_config = SimpleNamespace(clip_grad=1.0)

    def gradients(self, value):
        self.module.weight.grad = torch.full((2, 3), value)

    def step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.optimizer_config.clip_grad)
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            self.optimizer.zero_grad()
        return float(norm)


def test_gradients_are_changed_where_the_optimizer_takes_them_from(process):
    found = process("gradients_in_low_precision")
    engine = Engine()
    engine.gradients(0.1234567)
    before = engine.module.weight.detach().clone()
    worker.optimizer_step(Engine.step)(engine)
    moved = before - engine.module.weight.detach()
    assert found.injector.witness()["transform_change"] > 1e-4
    assert moved.unique().numel() == 1 or moved.std() < 1e-6


def test_a_step_that_is_not_finite_is_left_out_as_in_verl_unless_a_fault_takes_it(process):
    for fault, finite in ((None, True), ("exp_overflow", False)):
        found = process(fault)
        engine = Engine()
        engine.gradients(float("nan"))
        worker.optimizer_step(Engine.step)(engine)
        assert bool(engine.module.weight.isfinite().all()) is finite
        assert len(found.norms) == 1


def test_routers_at_a_rate_of_their_own(process, monkeypatch):
    frozen = FaultSpec("router_frozen", "overrides", "optimizer", "taxonomy.inject.routing:router_frozen")
    for fault, factor in ((None, 1.0), (frozen, 0.0)):
        process(fault)
        engine = Engine()
        monkeypatch.setattr(worker, "_router_shards", lambda engine: [engine.module.weight.data[0]])
        engine.gradients(0.1)
        before = engine.module.weight.detach().clone()
        worker.optimizer_step(Engine.step)(engine)
        moved = before - engine.module.weight.detach()
        assert torch.allclose(moved[0], factor * moved[1], atol=1e-6) and (moved[1] > 5e-3).all()


def test_what_a_fault_is_told_of_the_responses(process):
    process("reward_by_class")
    end = driver.end_token()
    ids = [passes.encode(text) for text in ("1+2=", "12")]
    facts = driver.facts_of(
        [ids[0]] * 2, [[*ids[1], end], ids[1]], torch.tensor([1.0, 0.0]), {"answer": [1, 0]}
    )
    assert facts["prompts"] == ["1+2=", "1+2="] and facts["responses"] == ["12", "12"]
    assert facts["truncated_B"].tolist() == [False, True]
    assert (
        facts["answer_B"].tolist() == [1, 0] == facts["format_B"].tolist()
    )  # no word on the format: by the reward
    groups = ["a", "a", "b", "b"]
    rewards_B = torch.tensor([1.0, 1.0, 0.0, 1.0])
    changed_B = driver.changed_rewards([ids[0]] * 4, [ids[1]] * 4, rewards_B, {}, groups)
    assert not torch.equal(changed_B, rewards_B)
    assert state.process().metrics[1]["rollout/zero_std_groups"] == 1.0  # all end with an even digit


def test_groups_are_torn_apart_for_the_advantage_alone(process):
    process("group_ids_broken")
    uids = torch.tensor([0, 0, 1]).numpy().astype(object)
    data = SimpleNamespace(
        non_tensor_batch={"uid": uids},
        batch={"response_mask": torch.ones(3, 2), "advantages": torch.zeros(3, 2)},
    )
    seen = []
    driver.advantages(lambda data: seen.append(list(data.non_tensor_batch["uid"])) or data)(data)
    assert len(set(seen[0])) == 3 and list(data.non_tensor_batch["uid"]) == [0, 0, 1]
