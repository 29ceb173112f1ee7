"""The user's command: taken apart as a shell and Hydra would, refused where it is not verl's."""

import pytest

from proxy.engines.verl_command import MEND, MODULE, NotVerl, joined, parse, split

SCRIPT = rf"""HYDRA_FULL_ERROR=1 VLLM_USE_V1=1 /opt/conda/bin/python3.11 -u -m {MODULE} \
    --config-name='ppo_megatron_trainer.yaml' \
    data.train_files="['/d/a b.parquet', '/d/c.parquet']"  \
    +actor_rollout_ref.model.override_config.x=1 ~data.tool_config_path \
    'trainer.logger=["console","wandb"]'  trainer.default_local_dir='${{oc.env:HOME}}/x'   # the run of monday
"""


def test_a_script_of_a_user():
    command = parse(split(SCRIPT))
    assert command.interpreter == "/opt/conda/bin/python3.11"
    assert command.environment == (("HYDRA_FULL_ERROR", "1"), ("VLLM_USE_V1", "1"))
    assert command.flags == ("-m", MODULE, "--config-name=ppo_megatron_trainer.yaml")
    assert command.config() == {"name": "ppo_megatron_trainer.yaml"}
    assert command.overrides == (
        "data.train_files=['/d/a b.parquet', '/d/c.parquet']",
        "+actor_rollout_ref.model.override_config.x=1",
        "~data.tool_config_path",
        'trainer.logger=["console","wandb"]',
        "trainer.default_local_dir=${oc.env:HOME}/x",
    )


@pytest.mark.parametrize(
    "options", [("-cp", "/c", "-cn", "mine"), ("--config-path=/c", "--config-name", "mine")]
)
def test_hydras_options_in_either_form(options):
    command = parse(("python", "-m", MODULE, *options, "a=1"))
    assert command.config() == {"path": "/c", "name": "mine"}
    assert command.overrides == ("a=1",)


def test_a_ray_job_around_it():
    words = (
        "ray",
        "job",
        "submit",
        "--address=http://h:8265",
        "--no-wait",
        "--",
        "python3",
        "-m",
        MODULE,
        "a=1",
    )
    assert (parse(words).address, parse(words).overrides) == ("http://h:8265", ("a=1",))
    assert parse((*words[:3], "--address", "http://h:1", *words[5:])).address == "http://h:1"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "empty"),
        (("bash", "run.sh"), "no command of verl's"),
        (("python", "-m", "verl.trainer.sft_trainer", "a=1"), "no command of verl's"),
        (("torchrun", "-m", MODULE), "no command of verl's"),
        (("python", "train.py"), "no command of verl's"),
        (("python", "-m", MODULE, "a=1", "|", "tee", "log"), "for a shell"),
        (("python", "-m", MODULE, "a=$MODEL"), "variable of a shell"),
        (("python", "-m", MODULE, "a=${MODEL}/x"), "variable of a shell"),
        (("python", "-m", MODULE, "$@"), "variable of a shell|no Hydra override"),
        (("python", "-m", MODULE, "--cfg", "job"), "no use for"),
        (("python", "-m", MODULE, "what is this"), "no Hydra override"),
    ],
)
def test_what_is_no_verl_command(words, reason):
    with pytest.raises(NotVerl, match=reason) as refused:
        parse(words)
    assert refused.value.mend == MEND


def test_an_open_quotation():
    with pytest.raises(NotVerl, match="split"):
        split("python -m 'verl")


def test_each_name_stands_once_and_ours_is_in_force():
    users = ("+trainer.x=1", "data.a=2", "~data.b", "data.c=3")
    assert joined(users, ("++trainer.x=9", "data.b=8")) == (
        "data.a=2",
        "data.c=3",
        "++trainer.x=9",
        "data.b=8",
    )
