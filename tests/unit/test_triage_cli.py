"""`diagnose triage` from the command line, and what it reads besides logs."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnose.cli import invoke
from diagnose.logs import read
from diagnose.playbook import load
from diagnose.prepare import plan_data, prepare
from diagnose.triage.config import ConfigError, differences, facts_of, read_settings
from diagnose.triage.generations import is_gibberish, is_repetitive, is_single_token

N = 60
JUMP = 31


def write_log(path: Path, fault: bool = False, seed: int = 0, steps: int = N) -> Path:
    """A run in verl's format; with the fault the gap jumps at step 31 and the reward is lost."""
    rng = np.random.default_rng(seed)
    lines = []
    for step in range(1, steps + 1):
        late = fault and step >= JUMP
        data = {
            "critic/rewards/mean": 0.4 + 0.3 * step / N + 0.02 * rng.standard_normal() - 0.5 * late,
            "actor/kl_loss": 0.002 * step + 0.002 * abs(rng.standard_normal()),
            "actor/entropy": 0.6 - 0.003 * step + 0.01 * rng.standard_normal(),
            "actor/grad_norm": 2 + 0.3 * rng.standard_normal(),
            "actor/pg_loss": 0.01 * rng.standard_normal(),
            "training/rollout_probs_diff_mean": 0.003 + 3e-4 * rng.standard_normal() + 0.15 * late,
            "response_length/mean": 200 + 5 * rng.standard_normal(),
        }
        lines.append(json.dumps({"step": step, "data": data}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return write_log(tmp_path / "bad.jsonl", fault=True)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_log(tmp_path / "good.jsonl", seed=1)


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert invoke(["triage", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_text_fits_80_columns_and_says_what_matters(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["triage", str(bad)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith("FAULTY, since step")
    for title in ("What is seen", "What it may be", "Do this now", "  keep ", "  then ", "  look "):
        assert title in out
    assert "\x1b" not in out


def test_json_contract(bad: Path, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([bad], [bad, "--healthy", good]):
        data = answer(capsys, *words)
        assert (data["schema"], data["verdict"], data["steps"]) == (1, "faulty", N)
        low, high = data["onset"]
        assert low <= JUMP <= high
        assert {"rollout_training_divergence", "reward_degradation"} <= {
            item["id"] for item in data["symptoms"]
        }
        for symptom in data["symptoms"]:
            assert set(symptom) == {"id", "category", "metric", "direction", "onset", "evidence"}
        first = data["candidates"][0]
        assert set(first) == {"fault", "category", "score", "tied", "reasons", "missing_metrics"}
        assert first["category"] != "optimization"
        assert data["now"]["keep"] and data["now"]["act"] and data["now"]["look"]
        ruled_out = {item["fault"] for item in data["ruled_out"]}
        assert ("kl_sign_flipped" in ruled_out) == ("--healthy" in words), (
            "what is healthy a healthy run tells"
        )


def test_exit_codes(bad: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["triage", str(bad), "--fail-on-symptom"]) == 1
    assert invoke(["triage", str(good), "--fail-on-symptom"]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1]
    empty = tmp_path / "empty.log"
    empty.write_text("")
    assert invoke(["triage", str(empty)]) == 3
    assert invoke(["triage", str(tmp_path / "missing.log")]) == 3
    assert invoke(["triage"]) == 2
    assert invoke(["triage", "--observed", "actor/kl_loss=sideways"]) == 2
    assert invoke(["triage", str(bad), "--context", "novalue"]) == 2
    assert invoke(["triage", str(bad), "--run", "7"]) == 2
    assert "there is no run 7" in capsys.readouterr().err


def test_two_steps_are_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, write_log(tmp_path / "two.jsonl", steps=2))
    assert data["verdict"] == "inconclusive" and "too few steps: 2" in data["reason"]
    assert data["candidates"] == []


def test_by_hand_without_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--observed", "rollout_corr/logprob_abs_diff=up:start", "--context", "model.name=Qwen3-4B"]
    data = answer(capsys, *words, "--context", "rollout.temperature=0.7", "--context", "weights.equal=true")
    assert data["candidates"][0]["fault"] == "rollout_temperature_missing"
    out = {item["fault"]: item["reason"] for item in data["ruled_out"]}
    assert "weights.equal" in out["weight_sync_skipped"] and "model.moe" in out["router_disagreement"]


def test_a_snippet_on_stdin(
    bad: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bad.read_bytes())))
    assert answer(capsys, "-")["verdict"] == "faulty"


def test_the_playbook_it_writes_is_one_that_runs(
    bad: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "next" / "what happened.yaml"
    words = ["triage", str(bad), "--healthy", str(good), "--context", "rollout.backend=vllm"]
    assert invoke([*words, "--write-playbook", str(target)]) == 0
    book = load(target)
    assert book.symptom in ("rollout_training_divergence", "reward_degradation")
    assert book.original.faulty == (target.parent / "../bad.jsonl",)
    assert book.original.context == {"rollout.backend": "vllm"}
    assert book.candidates and book.candidates[0].from_step and abs(book.candidates[0].from_step - JUMP) <= 8
    prepared = prepare(target)
    assert prepared.session.source == "embedded", "a stand-in, and told so in every answer"
    assert plan_data(prepared)["candidates"][0]["fault"]
    sibling = target.with_name("sibling.yaml")
    sibling.write_text(
        target.read_text().replace("from: embedded", "from: sibling").replace("  experts: 12\n", "")
    )
    assert prepare(sibling).session.source == "sibling", "uncut, and a stand-in too"
    capsys.readouterr()
    other = target.with_name("other.yaml")
    assert invoke(["triage", "--observed", "actor/kl_loss=up", "--write-playbook", str(other)]) == 2
    assert "a playbook names a log" in capsys.readouterr().err


def test_symptom_auto_and_the_context_go_through_triage(bad: Path, good: Path, tmp_path: Path) -> None:
    book = tmp_path / "auto.yaml"
    book.write_text(
        "version: 1\nname: x\nsymptom: auto\n"
        f"original: {{faulty: {bad}, healthy: {good}, context: {{model.moe: false}}}}\n"
        'proxy: {from: embedded, checkpoint: "embedded:qwen3_moe", experts: 12}\n'
    )
    prepared = prepare(book)
    assert prepared.session.symptom in ("rollout_training_divergence", "reward_degradation")
    assert "model.moe" in prepared.session.not_tried["top_k_mismatch"]
    assert "top_k_mismatch" not in [candidate.fault for candidate in prepared.session.candidates]


def test_anonymized(bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "p.yaml"
    words = ["triage", str(bad), "--context", "trainer.project_name=acme", "--anonymize"]
    for more in ([], ["--json"], ["--write-playbook", str(target)]):
        assert invoke([*words, *more]) == 0
        out = capsys.readouterr().out
        assert str(tmp_path) not in out and "acme" not in out and "0.15" in out
    assert "acme" not in target.read_text() and "bad.jsonl" not in target.read_text()


def acme(tmp_path: Path) -> Path:
    """A log whose name, keys and damage all say whose it is."""
    row = {
        "training/rollout_probs_diff_mean": 0.2,
        "acme/quota": 1.0,
        "val-core/acme_exam/reward/mean@1": 0.5,
    }
    lines = [json.dumps({"step": step, "data": row | {"critic/rewards/mean": 0.5}}) for step in range(1, 20)]
    path = tmp_path / "acme_run.jsonl"
    path.write_text("\n".join([*lines, '{"step": 20, "data": {"acme": acme secret}}', lines[0]]) + "\n")
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["logs", "LOG"],
        ["logs", "LOG", "--json"],
        ["triage", "LOG"],
        ["triage", "LOG", "--json"],
        ["triage", "LOG", "--context", "acme.flag=acme-7", "--context", "model.name=acme/acme-30B-A3B"],
        ["triage", "LOG", "--config", "CONFIG", "--good-config", "GOOD"],
        ["triage", "FOLDER"],
        ["triage", "LOG.acme"],
        ["triage", "LOG", "--config", "LOG.acme"],
        ["triage", "LOG", "--config", "UNREADABLE"],
        ["triage", "UNKNOWN"],
        ["triage", "LOG", "--context", "acme"],
        ["triage", "--observed", "acme/reward=up"],
        ["logs", "LOG", "--format", "acme"],
        ["run", "acme/acme.yaml"],
    ],
)
def test_nothing_of_whose_it_is_leaves(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = acme(tmp_path)
    files = {
        "CONFIG": "rollout: {temperature: 0.7}\nacme_reward: {kind: acme-x}\n"
        "trainer: {project_name: acme}\nmodel: {path: acme/acme-7B}\n",
        "GOOD": "rollout: {temperature: 1.0}\nacme_reward: {kind: acme-y}\nmodel: {path: acme/base}\n",
        "UNREADABLE": "acme: [acme\nacme: 'acme\n",
        "UNKNOWN": '{"step": 1, "acme/quota": 3.0}\n{"step": 2, "acme/quota": 4.0}\n' * 3,
    }
    for name, text in files.items():
        (tmp_path / f"acme.{name}").write_text(text)
    folder = tmp_path / "acme_runs"
    folder.mkdir()
    for n in (1, 2):
        (folder / f"acme_{n}.jsonl").write_text(log.read_text().replace("0.5", f"0.5{n}"))
    given = {name: str(tmp_path / f"acme.{name}") for name in files} | {
        "LOG": str(log),
        "FOLDER": str(folder),
    }
    invoke([given.get(word, word.replace("LOG.", f"{log}.")) for word in words] + ["--anonymize"])
    said = capsys.readouterr()
    assert "acme" not in said.out and "acme" not in said.err, said
    assert said.out or "error: " in said.err


def test_an_anonymized_playbook_runs_on_anonymized_logs(
    bad: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out" / "p.yaml"
    words = ["triage", str(bad), "--healthy", str(good), "--anonymize", "--write-playbook", str(target)]
    assert invoke(words) == 0
    named = sorted(file.name for file in target.parent.iterdir())
    assert named == ["p.faulty_1.jsonl", "p.healthy_1.jsonl", "p.yaml"]
    for file in target.parent.iterdir():
        assert not [word for word in ("bad.jsonl", "good.jsonl", str(tmp_path)) if word in file.read_text()]
    prepared = prepare(target)
    assert prepared.session.symptom == load(target).symptom
    assert prepared.faulty[0].values.keys() == read(bad).runs[0].curves.values.keys()
    capsys.readouterr()
    target.unlink()
    assert invoke(words) == 2, "nor is a curve overwritten"
    assert "exists already" in capsys.readouterr().err and not target.exists()


VERL = """
actor_rollout_ref:
  model: {path: Qwen/Qwen3-30B-A3B, use_remove_padding: true}
  actor: {strategy: megatron, use_kl_loss: true, kl_loss_coef: 0.001, ppo_epochs: 1, optim: {lr: 1.0e-6},
          megatron: {tensor_model_parallel_size: 4}}
  rollout: {name: vllm, temperature: 0.7, logprobs_mode: raw_logprobs, multi_turn: {enable: true}}
algorithm: {use_kl_in_reward: false, rollout_correction: {rollout_is: null}}
trainer: {project_name: acme}
"""


def test_a_hydra_dump_as_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(VERL)
    facts = facts_of(read_settings(file))
    wanted = {
        "framework": "verl",
        "rollout.backend": "vllm",
        "rollout.temperature": 0.7,
        "trainer.backend": "megatron",
        "trainer.tensor_parallel": 4,
        "actor.kl_coef": 0.001,
        "rollout.turns": "multi",
        "loss.rollout_is": False,
        "model.name": "Qwen/Qwen3-30B-A3B",
    }
    assert {key: facts.get(key) for key in wanted} == wanted
    data = answer(capsys, "--config", file)
    assert [item["fault"] for item in data["findings"]] == ["rollout_temperature_missing"]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (
            {"beta": 0.0, "use_vllm": True, "temperature": 0.9},
            {"actor.kl_coef": 0, "actor.use_kl_loss": False, "rollout.backend": "vllm"},
        ),
        ({"policy.generation.vllm_cfg.precision": "fp8"}, {"rollout.quantization": "fp8"}),
        ({"loss_fn.reference_policy_kl_penalty": 0.01}, {"actor.kl_coef": 0.01, "actor.use_kl_loss": True}),
        (
            {"rollout-temperature": 0.8, "use-tis": True},
            {"rollout.temperature": 0.8, "loss.rollout_is": True},
        ),
        ({"max_grad_norm": None}, {"actor.max_grad_norm": "none"}),
    ],
)
def test_other_frameworks_settings(settings: dict[str, Any], wanted: dict[str, Any]) -> None:
    facts = facts_of(settings)
    assert {key: facts.get(key) for key in wanted} == wanted


def test_what_differs_is_ranked_by_what_it_can_cause() -> None:
    bad = {
        "trainer.project_name": "b",
        "actor_rollout_ref.actor.kl_loss_coef": 0.0,
        "data.seed": 2,
        "extra": 1,
    }
    good = {"trainer.project_name": "a", "actor_rollout_ref.actor.kl_loss_coef": 0.01, "data.seed": 1}
    found = differences(good, bad)
    assert found[0].key.endswith("kl_loss_coef") and "kl_term_missing" in found[0].faults
    assert [item.key for item in found][-1] in ("trainer.project_name", "data.seed")
    assert {item.key for item in found} == set(bad)


def test_a_good_configuration_beside_the_bad_one(
    tmp_path: Path, bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "bad.yaml", tmp_path / "good.json"
    one.write_text(VERL)
    two.write_text(json.dumps({"actor_rollout_ref": {"rollout": {"temperature": 1.0}}}))
    data = answer(capsys, bad, "--config", one, "--good-config", two)
    assert any("rollout_temperature_missing" in item["faults"] for item in data["differences"])
    assert invoke(["triage", str(bad), "--good-config", str(two)]) == 2


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [", "\x00\x01", "just words"])
def test_bad_configurations(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_settings(file)


PROSE = "First we add the two numbers, then we subtract seven from the sum and find that the answer is {}."


def write_generations(folder: Path, late: str) -> Path:
    folder.mkdir()
    for step in range(1, 13):
        rows = [
            {
                "input": "How much is it? Tell me in words.",
                "output": late if step > 6 else PROSE.format(i),
                "step": step,
            }
            for i in range(8)
        ]
        (folder / f"{step}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{half a li")
    return folder


@pytest.mark.parametrize(
    ("late", "metric"),
    [
        ("!" * 200, "generations/single_token"),
        ("the answer is " * 80, "generations/repetition"),
        ("Wx" * 60 + "zq" * 40, "generations/gibberish"),
        (
            "首先我们把两个数字相加然后从总和中减去七最后得到答案是四十二这就是结果",
            "generations/foreign_script",
        ),
    ],
)
def test_generated_text(late: str, metric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, "--generations", write_generations(tmp_path / "g", late))
    alarms = {item["metric"]: item for item in data["observations"] if item["alarm"]}
    assert metric in alarms and data["verdict"] == "faulty"
    low, high = alarms[metric]["interval"]
    assert low <= 7 <= high + 3
    assert late[:20] not in json.dumps(data, ensure_ascii=False), "no text of a response is shown"


def test_ordinary_responses_are_none_of_these(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (
        PROSE.format(3),
        "x = (3 + 4) / 7 = 1, so 2 × 1 = 2 and finally \\boxed{2}",
        "まず二つの数を足して、それからカタカナも使います。答えは四十二です。",
    ):
        assert not (is_gibberish(text) or is_repetitive(text) or is_single_token(text)), text
    data = answer(
        capsys, "--generations", write_generations(tmp_path / "g", PROSE.format("nine") + " Indeed.")
    )
    assert not [i for i in data["observations"] if i["alarm"] and i["metric"] != "generations/identical"]
    assert invoke(["triage", "--generations", str(tmp_path / "none")]) == 3


def test_no_heavy_import_on_the_way(bad: Path) -> None:
    code = (
        "import sys; from diagnose.cli import invoke; invoke(sys.argv[1:]); "
        "heavy = {'torch', 'scipy', 'textual', 'rich', 'transformers', 'diagnose.score', 'diagnose.playbook_model'}; "
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "triage", str(bad)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("log", "context", "fault", "symptom"),
    [
        ("verl.log", [], "learning_rate_too_high", "kl_divergence_increase"),
        ("trl.log", ["rollout.sleep=true"], "weight_sync_skipped", "rollout_training_divergence"),
        ("slime.log", ["rollout.prefix_caching=true"], "stale_prefix_cache", "rollout_training_divergence"),
    ],
)
def test_the_logs_of_the_documentation(
    log: str, context: list[str], fault: str, symptom: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).parent.parent / "fixtures" / "triage" / log
    data = answer(capsys, file, *(word for fact in context for word in ("--context", fact)))
    assert fault in [item["fault"] for item in data["candidates"] if item["tied"]]
    assert symptom in [item["id"] for item in data["symptoms"]]


def test_the_documentation_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "triage.md").read_text(encoding="utf-8")
    shown = re.findall(r"```\n\$ diagnose (triage [^\n]*)\n(.*?\n)```", page, re.DOTALL)
    assert len(shown) == 3
    monkeypatch.chdir(root / "tests" / "fixtures" / "triage")
    for words, wanted in shown:
        assert invoke(words.split()) == 0
        assert capsys.readouterr().out == wanted, words
