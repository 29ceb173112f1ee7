"""Every injectable fault leaves the number that proves it, and an injector that does nothing leaves none."""

from functools import cache

import pytest
import torch

from diagnose.scoring import judge_witness
from proxy.embedded import resolve
from proxy.engines import local, policy, resume
from proxy.engines.base import refusal
from proxy.engines.injector import InjectionRefused
from proxy.specs import INJECTION_FAILED, FaultSpec, Recipe, RunSpec
from taxonomy.inject import resume as resumes
from taxonomy.registry import library
from taxonomy.stages import Action, Form, Stage

TINY = Recipe(steps=3, prompts=4, group_size=4, eval_every=0)
MODELS = {"buffers_lost": "embedded:deepseek_v3"}
"""Faults that the smaller original has nothing to lose for."""
CARDS = [card for card in library().cards.values() if not refusal("local", card)]


@pytest.fixture(autouse=True, scope="module")
def few_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spec_of(card, **changes):
    # A resume needs a past: one step of it is enough here.
    first = 2 if card.stage is Stage.CHECKPOINT else 1
    values = {"id": card.id, "form": str(card.form), "stage": str(card.stage), "inject": card.inject}
    return FaultSpec(**values | {"params": card.values(), "from_step": first} | changes)


def train(fault=None, model="embedded:qwen3_moe", recipe=TINY):
    records = []
    outcome = local.run(
        RunSpec(model, recipe, 3, fault), resolve(model), lambda _step, metrics: records.append(metrics)
    )
    return outcome, [{k: v for k, v in m.items() if not k.startswith("timing_s/")} for m in records]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.id)
def test_every_fault_leaves_its_witness(card):
    outcome, _ = train(spec_of(card), MODELS.get(card.id, "embedded:qwen3_moe"))
    assert judge_witness(card, [outcome.witness])[1], outcome.witness


@cache
def idle(form, stage, model):
    """Return the witness and the metrics of a run whose injector of this form does nothing."""
    name = {"overrides": "override", "transform": "transform", "event": "event"}[form]
    first = 2 if stage == "checkpoint" else 1
    return train(FaultSpec("idle", form, stage, f"{__name__}:idle_{name}", from_step=first), model)


def idle_override(_params, _recipe):
    return {}


def idle_transform(_params):
    return lambda _name, tensor, _context: tensor


def idle_event(_params):
    return lambda _context: Action.DO


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.id)
def test_an_injector_that_does_nothing_has_failed(card):
    outcome, _ = idle(str(card.form), str(card.stage), MODELS.get(card.id, "embedded:qwen3_moe"))
    assert not judge_witness(card, [outcome.witness])[1], outcome.witness


@pytest.mark.parametrize("model", ["embedded:qwen3_moe", "embedded:deepseek_v3"])
def test_a_resume_that_loses_nothing_changes_nothing(model):
    healthy, curves = train(model=model)
    card = library()["optimizer_state_lost"]
    spec = spec_of(card, inject="taxonomy.inject.resume:resumed", params={"interval": 1})
    outcome, resumed = train(spec, model)
    assert resumed == curves
    parts = {name: value for name, value in outcome.witness.items() if name.startswith("resume_")}
    assert len(parts) == 5 and set(parts.values()) == {0.0}
    assert not any(name.startswith("resume_") for name in healthy.witness)


@pytest.mark.parametrize(
    ("injection", "part"),
    [(resumes.reference_reanchored, "reference"), (resumes.optimizer_state_lost, "optimizer")],
)
def test_a_lost_part_is_the_only_one_that_differs(injection, part):
    card = library()["optimizer_state_lost"]
    spec = spec_of(card, inject=f"{injection.__module__}:{injection.__name__}")
    outcome, _ = train(spec)
    lost = {name for name, value in outcome.witness.items() if name.startswith("resume_") and value}
    assert lost == {f"resume_{part}"} | ({"resume_scheduler"} if part == "optimizer" else set())


def test_a_reanchored_reference_has_no_distance_from_the_policy():
    _, curves = train(spec_of(library()["reference_reanchored"], from_step=3))
    _, healthy = train()
    assert curves[:2] == healthy[:2]
    # Two updates a step: before the first one policy and reference are the same.
    assert curves[2]["actor/kl_loss"] < healthy[2]["actor/kl_loss"]


def test_a_schedule_that_is_lost_warms_up_again():
    recipe = Recipe(steps=4, prompts=4, group_size=4, eval_every=0, warmup_steps=4)
    _, healthy = train(recipe=recipe)
    _, lost = train(spec_of(library()["optimizer_state_lost"], from_step=3), recipe=recipe)
    assert [m["actor/lr"] / recipe.lr for m in healthy] == [0.25, 0.5, 0.75, 1.0]
    assert [m["actor/lr"] / recipe.lr for m in lost] == [0.25, 0.5, 0.25, 0.5]


def test_a_model_without_buffers_has_none_to_lose():
    with pytest.raises(InjectionRefused, match=f"^{INJECTION_FAILED}: .*no buffers to lose"):
        train(spec_of(library()["buffers_lost"]))


def test_difference_of_states():
    old = {"a": torch.tensor([3.0, 4.0]), "b": [{"lr": 1e-4}]}
    assert resume.difference(old, old) == 0
    assert resume.difference(old, {"a": torch.tensor([3.0, 9.0]), "b": [{"lr": 1e-4}]}) == pytest.approx(1.0)
    assert resume.difference(old, {"a": torch.tensor([3.0])}) == 1.0


def test_idle_forms_cover_the_library():
    assert {str(card.form) for card in CARDS} <= {str(form) for form in Form} - {"none"}


def test_a_copied_policy_answers_for_itself():
    folder = resolve("embedded:qwen3_moe")
    first = policy.load(folder, torch.float32, torch.device("cpu"))
    second = local.copied(first, folder, torch.device("cpu"))
    with torch.no_grad():
        first.model.lm_head.weight.zero_()
    assert second.model.lm_head.weight.abs().sum() > 0
