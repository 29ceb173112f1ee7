"""The hooks inside vLLM's processes, with stand-ins for vLLM's sampler and router: vLLM itself isn't needed."""

import json
import subprocess
import sys

import pytest

from diagnose.session import fault_spec
from proxy.embedded import resolve
from proxy.engines import verl_job
from proxy.engines.verl_plugin.table import VLLM, hooks_of
from proxy.specs import EngineSpec, Recipe, RunSpec
from taxonomy.registry import library

STAND_INS = {
    "vllm/v1/sample/sampler.py": """
import torch
from collections import namedtuple
from types import SimpleNamespace
LogprobsTensors = namedtuple("LogprobsTensors", "logprob_token_ids logprobs selected_token_ranks")

class Sampler(torch.nn.Module):
    def forward(self, logits, sampling_metadata, predict_bonus_token=False):
        logits = logits.div_(sampling_metadata.temperature[:, None])
        chosen = logits.argmax(-1, keepdim=True)
        reported = logits.log_softmax(-1).gather(-1, chosen)
        both = torch.cat([reported, reported], 1)
        tensors = LogprobsTensors(torch.cat([chosen, chosen], 1), both, torch.zeros(len(logits)))
        return SimpleNamespace(sampled_token_ids=chosen.int(), logprobs_tensors=tensors)
""",
    "vllm/model_executor/layers/fused_moe/router/base_router.py": """
class BaseRouter:
    top_k, global_num_experts = 2, 8
    def select_experts(self, hidden_states, router_logits):
        weights, ids = router_logits.softmax(-1).topk(self.top_k, -1)
        return weights, ids
""",
    "verl/workers/rollout/vllm_rollout/utils.py": """
class vLLMColocateWorkerExtension:
    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
        return "updated"
""",
}
PROCESS = """
import json, sys
from importlib.metadata import entry_points
from types import SimpleNamespace
import torch
[point] = entry_points(group="vllm.general_plugins")
point.load()()
point.load()()  # vLLM may call it again
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.sample.sampler import Sampler
torch.manual_seed(0)
logits, temperature = torch.randn(4, 9), torch.full((4,), 0.9)
router, found = BaseRouter(), []
worker, sampler = vLLMColocateWorkerExtension(), Sampler()
for step in (1, 2):
    assert worker.update_weights_from_ipc() == "updated"
    out = sampler(logits.clone(), SimpleNamespace(temperature=temperature))
    weights, ids = router.select_experts(torch.zeros(6, 3), torch.arange(48.0).view(6, 8).sin())
    found.append([out.logprobs_tensors.logprobs.tolist(), ids.tolist(), weights.tolist()])
print(json.dumps(found))
"""


def spec(fault):
    planned = fault_spec(library()[fault], 1.0, 2)  # from the second step on
    return RunSpec("embedded:qwen3_moe", Recipe(steps=3), 7, planned, EngineSpec("verl"))


@pytest.fixture
def carried_out(tmp_path):
    """Return (what two steps gave, merged witness) of a vLLM process with a fault from its second step on."""

    def carry_out(fault):
        home, stand_ins = tmp_path / "job", tmp_path / "site"
        verl_job.write_job(home, spec(fault), resolve("embedded:qwen3_moe"))
        for name, text in STAND_INS.items():
            file = stand_ins / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            for folder in file.relative_to(stand_ins).parents:
                (stand_ins / folder / "__init__.py").touch()
        done = subprocess.run(
            [sys.executable, "-c", PROCESS],
            env={"PYTHONPATH": f"{home / 'path'}:{stand_ins}", "RL_DIAGNOSE_JOB": str(home), "PATH": ""},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("rl_diagnose_plugin is in place") == 1
        [report] = [json.loads(file.read_text()) for file in (home / "reports").iterdir()]
        assert report["kind"] == "server" and not report["error"]
        places = {f"{h.module}:{h.symbol}" for h in hooks_of("rollout", "transform", "v0", VLLM)}
        assert places <= set(report["hooks"])
        means = {name: total / calls for name, (total, calls) in report["witness"].items()}
        return json.loads(done.stdout), means

    return carry_out


def test_a_rounded_scale_changes_what_vllm_reports_of_the_sampled_token_alone(carried_out):
    (before, after), witness = carried_out("rollout_logprob_precision")
    assert before[1:] == after[1:]  # routes are left alone
    assert all(b[0] != a[0] and b[1] == a[1] for b, a in zip(before[0], after[0], strict=True))
    assert witness["transform_change"] > library()["rollout_logprob_precision"].witness.above


@pytest.mark.parametrize("fault", ["top_k_mismatch", "expert_permutation", "router_disagreement"])
def test_routes_of_vllm(carried_out, fault):
    (before, after), witness = carried_out(fault)
    assert before[0] == after[0] and before[1:] != after[1:]
    if (
        fault != "router_disagreement"
    ):  # its witness compares two whole router calls, which vLLM's place has not
        assert witness["routes_changed"] > library()[fault].witness.above


def test_what_vllm_has_no_place_for():
    tensors = {t for hook in hooks_of("rollout", "transform", "v0", VLLM) for t in hook.tensors}
    assert not tensors & {"attention_mask", "o_proj"}
    assert hooks_of("rollout", "event", "v0", VLLM) == () == hooks_of("rollout", "overrides", "v0", VLLM)
