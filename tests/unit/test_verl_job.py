"""The job folder of a verl run: what goes into verl's processes, and what is refused. verl itself isn't needed."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diagnose.session import fault_spec
from proxy.embedded import resolve, task
from proxy.engines import verl_job
from proxy.engines.base import CAPABILITIES, refusal
from proxy.engines.verl_env import NoVerl, find_python
from proxy.engines.verl_plugin.table import HOOKS
from proxy.specs import EngineSpec, FaultSpec, Launch, Recipe, RunSpec
from taxonomy.registry import library

MODEL = "embedded:qwen3_moe"
VERL = EngineSpec("verl")


def spec(fault=None, from_step=1, engine=VERL, **recipe):
    planned = fault and fault_spec(library()[fault], 1.0, from_step)
    return RunSpec(MODEL, Recipe(**{"steps": 3} | recipe), 7, planned, engine)


def write(home, run):
    settings = verl_job.write_job(home, run, resolve(MODEL))
    found = dict(setting.split("=", 1) for setting in settings)
    assert len(found) == len(settings), "an override is given twice"
    return found, json.loads((home / "job.json").read_text())


def test_one_package_and_nothing_foreign_on_the_module_path(tmp_path):
    write(tmp_path / "job", spec("rollout_logprob_precision"))
    path = tmp_path / "job" / "path"
    assert {entry.name for entry in path.iterdir()} == {verl_job.PACKAGE, f"{verl_job.PACKAGE}-1.dist-info"}
    allowed = {verl_job.PACKAGE, "torch", "torch_npu", "transformers", "tokenizers", "verl", "ray"}
    allowed |= {"tensordict", "transfer_queue"}  # verl's own
    for file in path.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in (name.partition(".")[0] for name in names):
                assert name in allowed | set(sys.stdlib_module_names), f"{file}: {name}"


PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from rl_diagnose_plugin.proxy.engines.verl_plugin.state import process
from rl_diagnose_plugin.taxonomy.stages import Stage
state = process()
scale = state.injector.transform(Stage.ROLLOUT, "scale", torch.tensor(1 / 0.9), state.context())
state.report()
foreign = sorted({name.partition(".")[0] for name in sys.modules} & {"proxy", "taxonomy", "diagnose", "tests"})
print(json.dumps({"scale": float(scale), "foreign": foreign, "tally": state.injector.tally()}))
"""


def test_the_carried_injection_is_the_very_same(tmp_path):
    import torch

    from taxonomy.inject.numerics import rollout_logprob_precision
    from taxonomy.stages import StageContext

    home = tmp_path / "job"
    write(home, spec("rollout_logprob_precision"))
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROBE, str(home / "path")],
        env=os.environ | {"RL_DIAGNOSE_JOB": str(home)},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    seen = json.loads(done.stdout)
    here = rollout_logprob_precision({"mantissa_bits": 2})("scale", torch.tensor(1 / 0.9), StageContext(1))
    assert seen["scale"] == float(here) and seen["scale"] != pytest.approx(1 / 0.9, rel=1e-3)
    assert seen["foreign"] == []
    assert list((home / "reports").iterdir())  # the process wrote its report


def test_data_are_the_prompts_that_the_local_engine_draws(tmp_path):
    write(tmp_path, spec(prompts=4, steps=5, eval_prompts=9))
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    drawn = [p for step in range(1, 6) for p in task.drawn("rl", 7, step, 4)]
    assert [row["prompt"][0]["content"] for row in rows] == drawn
    assert len((tmp_path / "test.jsonl").read_text().splitlines()) == 9


def test_settings_alone_make_a_fault_of_the_whole_run(tmp_path):
    settings, job = write(tmp_path, spec("learning_rate_too_high"))
    assert float(settings["actor_rollout_ref.actor.optim.lr"]) == pytest.approx(30 * Recipe().lr)
    assert job["by_hydra"] == ["lr"]


def test_a_setting_that_changes_in_the_middle_is_left_to_the_plugin(tmp_path):
    settings, job = write(tmp_path, spec("learning_rate_too_high", from_step=2))
    assert float(settings["actor_rollout_ref.actor.optim.lr"]) == pytest.approx(Recipe().lr)
    assert job["by_hydra"] == [] and job["faults"][0]["from_step"] == 2


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (spec(exact=True), "recipe.exact"),
        (spec(prompts=5), "multiple of mini_batches"),
        (
            replace(spec(), fault=FaultSpec("x", "event", "reward", "taxonomy.inject.state:stale_weights")),
            "no event injection at the reward stage under the v0 trainer",
        ),
        (
            spec("padding_in_the_loss", engine=replace(VERL, trainer="v1")),
            "no access to response_mask at the batch stage under the v1 trainer",
        ),
        (
            spec(
                "tensor_parallel_numerics",
                engine=replace(VERL, launch=Launch(platform="cuda", rollout="vllm")),
            ),
            "no access to o_proj at the rollout stage under the v0 trainer with the vllm rollout",
        ),
        (
            spec("top_k_mismatch", engine=replace(VERL, launch=Launch(platform="cuda", rollout="sglang"))),
            "no transform injection at the rollout stage under the v0 trainer with the sglang rollout",
        ),
        (spec(engine=replace(VERL, trainer="v2")), "no trainer 'v2'"),
        (spec(engine=replace(VERL, rollout_dtype="fp8")), "no precision 'fp8'"),
        (
            replace(spec(), fault=FaultSpec("x", "transform", "rollout", "torch._C:nothing")),
            "no single Python file",
        ),
        (
            replace(spec(), fault=FaultSpec("x", "overrides", "loss", f"{__name__}:odd")),
            "cannot change temperature",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(tmp_path, run, words, monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules["__main__"])
    with pytest.raises(verl_job.CannotExpress, match=words):
        verl_job.write_job(tmp_path / "job", run, Path("/model"))
    assert not (tmp_path / "job").exists()


def odd(_params, _recipe):
    return {"temperature": 2.0}


def test_the_capability_table_is_made_from_the_hooks():
    table = {(c.stage, c.form) for c in CAPABILITIES["verl"]}
    assert table == {place for hook in HOOKS for place in hook.stages}
    expressible = [card.id for card in library().cards.values() if not refusal("verl", card)]
    assert {"learning_rate_too_high", "rollout_logprob_precision", "actor_update_omission"} <= set(
        expressible
    )


def test_every_hook_has_its_wrapper():
    for kind, name in (("driver", "driver.py"), ("trainer", "worker.py")):
        tree = ast.parse((Path(verl_job.__file__).parent / "verl_plugin" / name).read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {hook.wrapper for hook in HOOKS if hook.wrapper and hook.process == kind} <= defined
    # A place of verl's without a wrapper is one that another row wraps, under the same trainers.
    wrapped = {(hook.module, hook.symbol, hook.trainers) for hook in HOOKS if hook.wrapper}
    assert all((h.module, h.symbol, h.trainers) in wrapped for h in HOOKS if h.module)


def test_at_least_twenty_faults_of_all_categories_are_expressible():
    cards = [card for card in library().cards.values() if not refusal("verl", card)]
    assert len(cards) >= 20 and len({card.category for card in cards}) == 4


def test_the_environment_brings_nothing_of_ours_along(tmp_path):
    base = {
        "PATH": "/bin",
        "PYTHONPATH": "/ours",
        "RAY_ADDRESS": "auto",
        "VERL_PLATFORM": "huawei",
        "HOME": "/h",
    }
    env = verl_job.environment(tmp_path, base)
    assert env["PYTHONPATH"] == str(tmp_path / "path") and env["VERL_PLATFORM"] == "cpu"
    assert "RAY_ADDRESS" not in env and env["PATH"] == "/bin"


def test_a_missing_environment_names_the_mend(tmp_path, monkeypatch):
    monkeypatch.setenv("DIAGNOSE_VERL_PYTHON", str(tmp_path / "python"))
    with pytest.raises(NoVerl, match="is not there") as caught:
        find_python()
    assert "make verl-env" in caught.value.mend
    with pytest.raises(NoVerl, match="has no verl"):
        find_python(sys.executable)


def test_two_faults_at_once_go_into_the_job_in_order(tmp_path):
    run = spec("reward_flipped")
    run = replace(run, also=(fault_spec(library()["learning_rate_too_high"], 1.0),))
    settings, job = write(tmp_path, run)
    assert [fault["id"] for fault in job["faults"]] == ["reward_flipped", "learning_rate_too_high"]
    # With company, a change of settings is left to the plugin, which knows which of them is active.
    assert job["by_hydra"] == [] and float(settings["actor_rollout_ref.actor.optim.lr"]) == Recipe().lr


def test_the_page_has_the_table_of_today():
    from bench.verl_table import HOOKED, hooks_table

    page = (Path(verl_job.__file__).parents[2] / "docs" / "verl.md").read_text()
    assert page.split(HOOKED)[1].strip() == hooks_table()
