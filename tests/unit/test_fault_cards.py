"""The cards against their schema, on 80 columns, and a fault that another package brings along."""

from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from diagnose import cli, playbook
from diagnose.session import fault_spec
from proxy.embedded import resolve
from proxy.engines import local
from proxy.engines.base import CAPABILITIES, refusal
from proxy.engines.injector import InjectionRefused, Injector
from proxy.engines.injector import resolve as injection
from proxy.specs import FaultSpec, Recipe, RunSpec
from taxonomy import registry
from taxonomy.categories import CATEGORIES
from taxonomy.registry import BadCard, Parameter, Rival, faults_of, library, shipped
from taxonomy.stages import Form

CARDS = shipped()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.id)
def test_a_card_is_right_and_complete(card):
    assert faults_of(card) == []
    assert any(item.direction != "none" for item in card.signature), "nothing moves"
    assert card.rivals and all(rival.why for rival in card.rivals)
    assert {rival.fault for rival in card.rivals} <= {other.id for other in CARDS} - {card.id}
    assert len({item.metric for item in card.signature}) == len(card.signature)
    assert all(parameter.source and parameter.meaning for parameter in card.parameters)
    if card.injectable:
        assert callable(injection(card.inject))
        assert not refusal("local", card)


@pytest.mark.parametrize("category", [category.id for category in CATEGORIES])
def test_every_category_has_seven_faults_that_can_be_injected(category):
    able = [card.id for card in CARDS if card.category == category and not refusal("local", card)]
    assert len(able) >= 7, able


def test_the_library_is_as_large_as_it_says():
    assert len({card.id for card in CARDS}) == len(CARDS) >= 42
    assert sum(not refusal("local", card) for card in CARDS) >= 36


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": "Not Snake"}, "snake_case"),
        ({"category": "weather"}, "no category"),
        ({"symptoms": ("rain",)}, "no symptom 'rain'"),
        ({"rivals": (Rival("x", "no/metric", "y"),)}, "no metric 'no/metric'"),
        ({"parameters": (Parameter("p", 2.0, "m", "s", maximum=1.0),)}, "out of its range"),
        ({"sources": ()}, "no sources"),
        ({"form": Form.NONE}, "exclude each other"),
        ({"form": Form.NONE, "inject": "", "check_by_hand": ""}, "neither injectable nor"),
        ({"witness": registry.BY_HAND}, "needs a witness"),
    ],
)
def test_what_is_wrong_with_a_card_is_said(change, words):
    card = next(card for card in CARDS if card.id == "stale_weights")
    assert any(words in text for text in faults_of(replace(card, **change)))


def test_what_nobody_can_inject_is_refused_everywhere():
    by_hand = [card for card in CARDS if not card.injectable]
    assert by_hand
    for card in by_hand:
        assert all("check by hand" in refusal(engine, card) for engine in CAPABILITIES)
        assert card.check_by_hand
        with pytest.raises(InjectionRefused, match="checked by hand"):
            Injector(FaultSpec(card.id, "none", str(card.stage), ""), 0)


def test_an_engine_refuses_what_it_gives_no_access_to():
    card = next(card for card in CARDS if card.id == "router_disagreement")
    assert refusal("local", card) == "" == refusal("verl", card)
    odd = replace(card, uses=("hidden_states",))
    assert refusal("verl", odd) == "the verl engine gives no access to hidden_states at the rollout stage"


@pytest.mark.parametrize(
    "arguments", [[], *([card.id] for card in CARDS)], ids=lambda a: a[0] if a else "all"
)
def test_the_cards_are_read_on_80_columns(arguments):
    found = CliRunner().invoke(cli.app, ["faults", *arguments])
    assert found.exit_code == 0
    wide = [line for line in found.stdout.splitlines() if len(line) > 80 and " " in line.strip()]
    assert wide == []
    assert all(card.id in found.stdout for card in CARDS if not arguments or card.id == arguments[0])


# A fault of another package


def scrambled(_params):
    """The injection of the other package: rewards in another order than the responses."""
    return lambda name, tensor, _context: tensor.flip(0) if name == "rewards" else tensor


def cards():
    """What its entry point returns."""
    own = replace(
        next(card for card in CARDS if card.id == "reward_flipped"),
        id="rewards_scrambled",
        title="Rewards in another order than the responses",
        inject=f"{__name__}:scrambled",
        parameters=(),
        sources=("the other package",),
    )
    return [own]


def bad_cards():
    return [replace(cards()[0], symptoms=("rain",))]


@pytest.fixture
def other_package(monkeypatch):
    """Another installed package with an entry point; the library is read anew, and once more afterwards."""

    def install(function):
        point = EntryPoint("other", f"{__name__}:{function}", "rl_diagnose.faults")
        monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
        library.cache_clear()

    yield install
    monkeypatch.undo()
    library.cache_clear()


def test_a_fault_of_another_package_shows_up_everywhere(other_package, tmp_path):
    other_package("cards")
    card = library()["rewards_scrambled"]
    listed = CliRunner().invoke(cli.app, ["faults"]).stdout
    assert "rewards_scrambled" in listed and card.title in " ".join(listed.split())
    assert "the other package" in CliRunner().invoke(cli.app, ["faults", "rewards_scrambled"]).stdout
    assert "rewards_scrambled" in str(playbook.schema()), "editors complete its id"

    outcome = local.run(
        RunSpec(
            "embedded:qwen3_moe",
            Recipe(steps=1, prompts=2, group_size=4, eval_every=0),
            5,
            fault_spec(card, 1.0),
        ),
        resolve("embedded:qwen3_moe"),
        lambda _step, _metrics: None,
    )
    assert outcome.witness[card.witness.name] > card.witness.above


def test_a_wrong_card_of_another_package_is_named(other_package):
    other_package("bad_cards")
    with pytest.raises(BadCard, match=r"rewards_scrambled \(from the entry point other\): .*'rain'"):
        library()
