"""Nothing that identifies anybody leaves the machine; everything else stays as it was."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnose.anonymize import Anonymizer, names_in
from taxonomy.metrics import METRICS
from taxonomy.registry import library


@pytest.mark.parametrize(
    ("text", "secrets"),
    [
        ("log at /data/acme/runs/7/bad.jsonl, twice: /data/acme/runs/7/bad.jsonl", ["acme", "bad.jsonl"]),
        ("~jane/secret/x.yaml and C:\\Users\\jane\\x", ["jane", "secret"]),
        ("(TaskRunner pid=12, ip=10.20.0.12) on jane@node-7: up", ["10.20.0.12", "jane", "node-7"]),
        ("fe80::1ff:fe23:4567:890a and gpu7.cluster.internal", ["fe80", "gpu7", "cluster"]),
        ("s3://acme-bucket/x http://10.1.2.3:8000/v1", ["acme", "10.1.2.3"]),
        ("write to jane.doe@acme.example.com", ["jane", "acme"]),
        ('trainer.project_name: acme-grpo, "experiment_name": "foo bar"', ["acme-grpo", "foo bar"]),
        ("WANDB_API_KEY=0123456789abcdef hf_abcdefghijklmnopqrstuv", ["0123456789abcdef", "hf_abc"]),
    ],
)
def test_what_identifies_is_gone(text: str, secrets: list[str]) -> None:
    clean = Anonymizer()(text)
    assert not [secret for secret in secrets if secret in clean], clean


def test_the_same_thing_keeps_its_placeholder() -> None:
    hide = Anonymizer.of_machine(["logs/acme/bad.jsonl"], ["acme-grpo"])
    first, second = hide("logs/acme/bad.jsonl of acme-grpo"), hide("again logs/acme/bad.jsonl")
    assert first.split(" of ")[0] == second.removeprefix("again ")
    assert "acme" not in first + second


@pytest.mark.parametrize(
    "text",
    [
        "training/rollout_probs_diff_mean jumps from 0.0023 to 0.14 between steps 16 and 23",
        "onset 23–27/21–25, agreement 95 %, p = 0.016, 12:30:45, and/or",
        "https://github.com/verl-project/verl/pull/4248",
        "--context rollout.backend=vllm model.name: Qwen3-4B library.vllm 0.20.1",
        "  tables   keep   their layout\n",
        *(metric.name for metric in METRICS),
    ],
)
def test_what_matters_stays(text: str) -> None:
    assert Anonymizer()(text) == text


def test_cards_pass_unchanged() -> None:
    for card in library().cards.values():
        for text in (card.title, card.mechanism, card.fix, card.check_by_hand, *card.sources):
            assert Anonymizer()(text) == text, card.id


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=200))
def test_any_text_is_survived_and_cleaning_again_changes_nothing(text: str) -> None:
    once = Anonymizer()(text)
    assert Anonymizer()(once) == once


def test_names_in_a_context() -> None:
    assert names_in({"trainer.project_name": "acme", "rollout.backend": "vllm", "wandb.entity": None}) == [
        "acme"
    ]
