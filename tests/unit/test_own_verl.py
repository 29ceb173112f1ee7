"""A playbook with the user's own verl: scaled, shown as exact command lines, refused where it can't work. No verl."""

import json

import pytest
import yaml

from diagnose.cli import invoke
from diagnose.own_verl import engine_of, for_recording, side_by_side
from diagnose.prepare import plan_data, prepare
from diagnose.session import fault_spec
from proxy.engines import platforms
from proxy.engines.verl_command import NotVerl
from proxy.engines.verl_config import BadConfig
from proxy.specs import EngineSpec, Launch
from taxonomy.registry import library

COMMAND = "python3 -m verl.trainer.main_ppo data.train_batch_size=64 trainer.nnodes=2"
CONFIG = {
    "data": {"train_batch_size": 64, "max_response_length": 32},
    "actor_rollout_ref": {
        "model": {"path": "embedded:qwen3_moe"},
        "actor": {
            "strategy": "fsdp2",
            "use_dynamic_bsz": False,
            "ppo_mini_batch_size": 32,
            "ppo_micro_batch_size_per_gpu": 2,
            "use_kl_loss": True,
            "kl_loss_coef": 0.01,
            "optim": {"lr": 2e-6, "clip_grad": 1.0},
        },
        "rollout": {"name": "vllm", "n": 4, "tensor_model_parallel_size": 2, "temperature": 0.7},
    },
    "trainer": {"nnodes": 2, "n_gpus_per_node": 8, "use_v1": True, "test_freq": 5},
}


def interpreter(folder, answer):
    """Return an interpreter of an environment with verl that composes to a given answer."""
    (folder / "bin").mkdir(parents=True)
    version = folder / "lib" / "python3.11" / "site-packages" / "verl" / "version" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("0.9.1")
    (folder / "answer.json").write_text(json.dumps(answer))
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\ncat > {folder}/asked.json\ncat {folder}/answer.json\n")
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def book(tmp_path):
    """Return a function that writes a playbook with an engine section and returns its path."""
    log = tmp_path / "log.jsonl"
    log.write_text(
        "".join(json.dumps({"step": s, "data": {"actor/kl_loss": 0.1}}) + "\n" for s in range(1, 30))
    )

    def write(answer=None, **engine):
        python = interpreter(tmp_path / "env", answer or {"verl": "0.9.1", "config": CONFIG})
        content = {
            "version": 1,
            "name": "mine",
            "symptom": "auto",
            "original": {"faulty": "log.jsonl"},
            "proxy": {"from": "checkpoint", "checkpoint": "embedded:qwen3_moe", "experts": 8},
            "engine": {"name": "verl", "python": python, "command": COMMAND, "platform": "cuda"} | engine,
            "recipe": {"steps": 10, "seeds": 1},
            "candidates": [{"fault": "learning_rate_too_high"}, {"fault": "actor_update_omission"}],
        }
        path = tmp_path / "book.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.fixture
def machine(monkeypatch):
    """A machine with eight GPUs."""
    monkeypatch.setattr(platforms, "devices", lambda name, *_: list("01234567") if name == "cuda" else [])


def test_the_users_command_is_scaled_for_the_proxy(book, machine, tmp_path):
    prepared = prepare(book())
    session = prepared.session
    launch = session.engine_spec.launch
    assert session.engine_spec.trainer == "v1"
    # 8 of 32 experts leave between a third and a half of the parameters: 8 of 16 GPUs.
    assert launch.accelerators == 8 and "trainer.nnodes: 2 → 1" in prepared.scaling
    assert (session.recipe.prompts, session.recipe.group_size, session.recipe.mini_batches) == (32, 4, 2)
    assert (session.recipe.lr, session.recipe.steps, session.recipe.old_log_prob) == (2e-6, 10, "trainer")
    assert session.workers == 1  # the machine's eight GPUs are one run's
    assert launch.directory == str(tmp_path)
    asked = json.loads((tmp_path / "env" / "asked.json").read_text())
    assert asked["overrides"] == ["data.train_batch_size=64", "trainer.nnodes=2"]


def test_a_dry_run_prints_every_command_line_and_starts_nothing(book, machine, tmp_path):
    plan = plan_data(prepare(book()), tmp_path / "out")
    lines = plan["command_lines"]
    assert list(lines) == plan["runs"] and len(lines) == 3
    line = lines["healthy-s1"]
    assert line["command"][1:3] == ["-m", "verl.trainer.main_ppo"]
    assert f"++actor_rollout_ref.model.path={tmp_path}/out/proxy" in line["command"]
    assert line["environment"]["VERL_FILE_LOGGER_PATH"] == f"{tmp_path}/out/runs/healthy-s1/verl/verl.jsonl"
    assert line["environment"]["VERL_PLATFORM"] == "nvidia"
    assert not (tmp_path / "out").exists()


def test_a_dry_run_on_the_terminal(book, machine, capsys):
    assert invoke(["run", str(book()), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "scaled: trainer.nnodes: 2 → 1" in shown
    assert shown.count("-m verl.trainer.main_ppo ") == 3
    assert "VERL_PLATFORM=nvidia" in shown and "RUN_DIR/runs/healthy-s1" in shown
    assert "would run: engine.command" in shown


def test_a_cluster_gets_jobs(book, machine):
    prepared = prepare(book(address="head:8265", runtime_env={"pip": ["x"]}, at_most=16))
    assert prepared.session.engine_spec.launch.address == "http://head:8265"
    assert prepared.session.workers == 2  # sixteen accelerators, eight a run
    line = plan_data(prepared)["command_lines"]["healthy-s1"]
    assert line["address"] == "http://head:8265" and line["command"][0] == "python3"
    assert line["runtime_env"]["pip"] == ["x"]
    assert any("engine.runtime_env" in command for command in prepared.commands)


def test_the_users_rule_for_the_size(book, machine):
    launch = prepare(book(scale={"accelerators": 2, "prompts": 9})).session.engine_spec.launch
    assert launch.accelerators == 2
    assert (
        "++data.train_batch_size=12" in launch.overrides or "++data.train_batch_size=10" in launch.overrides
    )


def test_what_the_playbooks_recipe_says_besides_is_told(book, machine):
    path = book()
    content = yaml.safe_load(path.read_text())
    content["recipe"]["lr"] = 1.0
    path.write_text(yaml.safe_dump(content))
    prepared = prepare(path)
    assert prepared.session.recipe.lr == 2e-6
    assert any("not recipe.lr" in warning for warning in prepared.warnings)


@pytest.mark.parametrize(
    ("engine", "error", "words"),
    [
        ({"command": "bash train.sh"}, NotVerl, "no command of verl's PPO trainer"),
        ({"command": COMMAND, "config": "x.yaml"}, BadConfig, "x.yaml is not there"),
        ({"platform": "cuda", "scale": "keep"}, None, ""),
        ({"address": "http://h:1", "platform": ""}, BadConfig, "can't be asked"),
        ({"address": "ray://h:1"}, BadConfig, "no address for Ray jobs"),
        ({"answer": {"verl": "0.9.1", "error": "Key 'x' is not in struct"}}, BadConfig, "Hydra refuses"),
        ({"answer": {"verl": "0.9.1", "config": {}}, "platform": "cpu"}, None, ""),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_built(book, machine, engine, error, words):
    path = book(**engine)
    if error is None:
        prepare(path)
        return
    with pytest.raises(error, match=words):
        prepare(path)


def test_a_layout_that_does_not_fit_is_not_kept(book, machine):
    config = json.loads(json.dumps(CONFIG))
    config["actor_rollout_ref"]["rollout"] |= {"expert_parallel_size": 16, "tensor_model_parallel_size": 16}
    with pytest.raises(BadConfig, match="must divide 8 experts"):
        prepare(book({"verl": "0.9.1", "config": config}, scale="keep"))


def test_another_version_is_a_warning(book, machine):
    prepared = prepare(book({"verl": "0.8.0", "config": CONFIG}))
    assert any("verl 0.8.0" in warning and "0.9.1" in warning for warning in prepared.warnings)


def test_recording_takes_a_command_and_its_own_model(tmp_path, machine):
    python = interpreter(tmp_path / "env", {"verl": "0.9.1", "config": CONFIG})
    file = tmp_path / "engine.yaml"
    file.write_text(f"engine:\n  python: {python}\n  scale: {{accelerators: 4}}\n")
    section = engine_of(COMMAND.split(), file, "http://h:8265", "npu")
    own, checkpoint = for_recording(section, "", 7, [])
    assert checkpoint == "embedded:qwen3_moe"
    assert own.spec.launch.accelerators == 4 and own.spec.launch.platform == "npu"
    assert own.recipe.steps == 7 and own.spec.launch.entry == "python3"
    fault = fault_spec(library()["learning_rate_too_high"], 1.0)
    for_recording(section, "", 7, [fault])


def test_a_recording_that_fails_keeps_the_log_that_it_names(tmp_path, monkeypatch, capsys):
    """verl dies at once; what the message names can be read afterwards."""
    python = interpreter(tmp_path / "env", {"verl": "0.9.1", "config": CONFIG})
    monkeypatch.setenv("DIAGNOSE_VERL_PYTHON", python)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = tmp_path / "log.jsonl"
    words = ["record", "--engine", "verl", "--platform", "cpu", "--steps", "2", "--out", str(out)]
    assert invoke([*words, "--", *COMMAND.split()]) != 0
    assert "verl ended with code 0 after 0 steps" in capsys.readouterr().err
    assert list(tmp_path.glob("diagnose-record-*/record/verl/verl.log")) and not out.exists()


def test_an_engine_file_that_is_wrong(tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("comand: x\n")
    with pytest.raises(ValueError, match=r"engine\.comand"):
        engine_of((), file)
    with pytest.raises(ValueError, match="No such file"):
        engine_of((), tmp_path / "nothing")


def test_a_command_of_ones_own_is_for_verl(capsys):
    words = ("record", "--out", "x.jsonl")
    assert invoke([*words, "--", "python3", "-m", "verl.trainer.main_ppo"]) == 2
    assert "for --engine verl" in capsys.readouterr().err
    assert invoke([*words]) == 2
    assert "no checkpoint named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("at_most", "workers", "found"), [(0, None, 2), (4, None, 1), (8, None, 2), (32, 3, 3), (0, 1, 1)]
)
def test_runs_side_by_side(machine, at_most, workers, found):
    spec = EngineSpec("verl", launch=Launch(platform="cuda", accelerators=4))
    assert side_by_side(spec, at_most, workers) == found
