"""The plan for a proxy: every proposal keeps verl's rules, groups and updates, and changes nothing that fits."""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.engines.verl_plan import (
    MEGATRON,
    Layout,
    Model,
    changes,
    check,
    layout_of,
    proposed_world,
    scaled,
    told,
)

POWERS = st.sampled_from([1, 2, 4, 8, 16])
SMALL = st.integers(1, 6)


@st.composite
def layouts(draw):
    """Layouts of originals, most of them with sizes that no proxy can keep; they need not be legal."""
    kind = draw(st.sampled_from(["fsdp", "fsdp2", MEGATRON]))
    megatron = kind == MEGATRON
    own = {name: draw(POWERS) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
    fsdp = {"sequence": draw(POWERS), "shard": draw(st.sampled_from([-1, 2, 8, 24]))}
    serving, data = draw(POWERS), draw(POWERS)
    mini = draw(st.integers(1, 96))
    return Layout(
        strategy=kind,
        dynamic=draw(st.booleans()),
        nodes=draw(SMALL),
        per_node=draw(st.sampled_from([1, 2, 4, 6, 8, 16])),
        mini=mini,
        prompts=mini * draw(SMALL) + draw(st.integers(0, 3)),
        group=draw(st.integers(1, 16)),
        micro=draw(st.integers(0, 16)),
        ref_micro=draw(st.integers(0, 16)),
        rollout_micro=draw(st.integers(0, 16)),
        rollout_tensor=serving,
        rollout_data=data,
        rollout_expert=draw(st.sampled_from([1, serving * data])),
        agents=draw(st.integers(1, 12)),
        **(own if megatron else fsdp),
    )


MODELS = st.builds(
    Model, experts=st.integers(0, 64), heads=st.sampled_from([0, 4, 6, 12, 32, 64]), layers=st.integers(0, 61)
)


@given(layouts(), MODELS, st.integers(1, 64), st.integers(0, 300))
def test_a_proposal_breaks_none_of_verls_rules(old, model, world, prompts):
    new = scaled(old, model, world, prompts)
    assert check(new, model) == []
    assert new.world == world
    assert new.per_node <= max(old.per_node, 1)


@given(layouts(), MODELS, st.integers(1, 64))
def test_groups_and_updates_are_kept_and_no_parallel_size_grows(old, model, world):
    new = scaled(old, model, world)
    assert new.group == old.group
    assert new.updates == old.updates
    for name in ("tensor", "pipeline", "context", "expert", "expert_tensor", "sequence", "rollout_tensor"):
        assert getattr(old, name) % getattr(new, name) == 0, name
    assert (new.micro > 0) == (old.micro > 0) and new.micro <= old.micro


@given(layouts(), MODELS)
def test_what_fits_is_left_alone(old, model):
    """A size that any rule leaves free stays what it was."""
    legal = scaled(old, model, old.world)
    assert check(legal, model) == []
    assert scaled(legal, model, legal.world) == legal
    assert changes(legal, legal) == [] == told(legal, legal)


@given(layouts(), MODELS, st.integers(1, 64), st.integers(1, 300))
def test_the_batch_asked_for_is_rounded_up_and_no_further_than_needed(old, model, world, prompts):
    assume(prompts >= old.updates)
    new = scaled(old, model, world, prompts)
    assert prompts <= new.prompts < prompts + new.updates * world * 2


@given(layouts(), st.floats(0.001, 1))
def test_the_world_proposed_divides_the_originals_and_holds_the_share(old, share):
    world = proposed_world(old, share)
    assert old.world % world == 0
    assert world >= old.world * share - 1e-6
    smaller = [d for d in range(1, world) if old.world % d == 0]
    assert all(d < old.world * share for d in smaller)


@given(layouts(), MODELS, st.integers(1, 64))
def test_the_overrides_make_the_layout(old, model, world):
    """What is written onto the command line is read back as the layout that was proposed."""
    new = scaled(old, model, world)

    def config(layout, overrides=()):
        tree = {}
        from proxy.engines.verl_plan import SETTINGS

        lines = [f"{path}={getattr(layout, name)}" for name, paths in SETTINGS.items() for path in paths]
        for line in (*lines, *overrides):
            path, _, text = line.lstrip("+").partition("=")
            *parents, leaf = path.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = None if text == "null" else int(text)
        tree["actor_rollout_ref"]["actor"] |= {"strategy": layout.strategy, "use_dynamic_bsz": layout.dynamic}
        return tree

    assert layout_of(config(old, changes(old, new))) == new


def test_a_qwen3_30b_on_megatron_cut_to_a_quarter():
    old = Layout(
        strategy=MEGATRON,
        nodes=4,
        per_node=16,
        prompts=256,
        group=8,
        mini=64,
        micro=2,
        ref_micro=4,
        rollout_micro=4,
        tensor=4,
        pipeline=4,
        expert=16,
        expert_tensor=1,
        rollout_tensor=8,
        rollout_expert=8,
    )
    model = Model(experts=24, heads=32, layers=48)
    assert any("24 experts" in rule for rule in check(old, model))
    new = scaled(old, model, proposed_world(old, 0.25))
    assert (new.world, new.nodes, new.per_node) == (16, 1, 16)
    assert (new.expert, new.expert_tensor) == (
        4,
        1,
    )  # 16 does not divide 24, nor does pipeline 4 leave more than 4
    assert (new.prompts, new.mini, new.updates, new.group) == (64, 16, 4, 8)
    assert (new.rollout_tensor, new.rollout_expert) == (8, 8)
    assert "++actor_rollout_ref.actor.megatron.expert_model_parallel_size=4" in changes(old, new)
    assert "trainer.nnodes: 4 → 1" in told(old, new)


def test_sizes_are_read_where_they_are():
    config = {
        "data": {"train_batch_size": 8},
        "actor_rollout_ref": {
            "actor": {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}},
            "rollout": {"n": 4},
        },
    }
    found = layout_of(config)
    assert (found.prompts, found.group, found.tensor, found.expert_tensor) == (8, 4, 2, 2)
    assert layout_of({**config, "actor_rollout_ref": {"actor": {"strategy": "fsdp"}}}).tensor == 1
    text = {"text_config": {"num_attention_heads": 16, "num_experts": 128, "num_hidden_layers": 4}}
    assert Model.of(text) == Model(128, 16, 4)
    assert replace(Model.of(text, 12), heads=0) == Model(12, 0, 4)
