"""Secrets do not reach run folders, and what only looks like one stays."""

import pytest

from diagnose.redact import HIDDEN, redact


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("wandb_api_key: 0123456789abcdef", "0123456789abcdef"),
        ('trainer.hub_token: "x y z"', "x y z"),
        ("context: {db.password: hunter2, device: npu}", "hunter2"),
        ("command: [train, --token=abcDEF]", "abcDEF"),
        ("path: hf_ABCDEFGHIJKLMNOPQRST", "hf_ABCDEFGHIJKLMNOPQRST"),
        ("url: https://me:pw@host/x", "me:pw"),
    ],
)
def test_secrets_go(text, secret):
    clean = redact(text)
    assert secret not in clean and HIDDEN in clean


@pytest.mark.parametrize(
    "text",
    [
        "calibration: {prompts: embedded, tokens: 65536}",
        "max_new_tokens: 6",
        "tokenizer: qwen",
        "name: kl_spike\nsymptom: kl_divergence_increase",
    ],
)
def test_the_rest_stays(text):
    assert redact(text) == text
