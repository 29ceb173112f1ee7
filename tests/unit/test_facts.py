"""Facts and conditions on them: three-valued, and never guessing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taxonomy.facts import completed, holds, scalar


@pytest.mark.parametrize(
    ("condition", "fact", "wanted"),
    [
        ("vllm", "vLLM", True),
        ("vllm|sglang", "sglang", True),
        ("*fp8*", "fp8_e4m3", True),
        ("!=1", 0.6, True),
        ("!=1", 1.0, False),
        ("!=1", "!=1", True),
        (1, "!=1", False),
        (0.6, "!=1", None),
        (">1", ">1", True),
        (">1", 8, True),
        (">1", 1, False),
        (0.5, ">1", False),
        (">=32", "many", None),
        (">=v0.20", "0.21.1", True),
        (">=v0.20", "0.9.2", False),
        ("<v0.7", "0.6.1.post1", True),
        (True, "yes", True),
        (0, False, False),
        (0, 0.0, True),
        ("!=none", "fp8", True),
        ("!=none", None, False),
    ],
)
def test_conditions(condition: str, fact: str, wanted: bool | None) -> None:
    assert holds(condition, fact) is wanted


@settings(deadline=None, max_examples=50)
@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=12)))
def test_no_value_breaks_a_condition_and_its_negation_is_no_agreement(value: str) -> None:
    for condition in ("!=1", ">=v1.2", "<3", "a|b*", True, None, 0):
        assert holds(condition, value) in (True, False, None)
    if holds("fp8", value):
        assert holds("!=fp8", value) is False


@pytest.mark.parametrize(
    ("name", "moe"),
    [
        ("Qwen/Qwen3-30B-A3B", True),
        ("deepseek-ai/DeepSeek-V3", True),
        ("mistralai/Mixtral-8x7B", True),
        ("openai/gpt-oss-20b", True),
        ("Qwen/Qwen3-4B", False),
        ("Qwen2.5-0.5B-Instruct", False),
        ("meta-llama/Llama-3.1-8B", False),
        ("acme/secret", None),
    ],
)
def test_dense_or_not_by_name(name: str, moe: bool | None) -> None:
    assert completed({"model.name": name}).get("model.moe") is moe


def test_what_follows_from_a_framework_gives_way_to_what_is_known() -> None:
    assert completed({"framework": "slime"})["weights.converted"] is True
    assert completed({"framework": "slime", "trainer.backend": "fsdp"})["weights.converted"] is False
    assert completed({"library.vllm": 0.1})["library.vllm"] == "0.1"
    assert scalar("1e-6") == 1e-6 and scalar("8") == 8 and scalar("off") is False
