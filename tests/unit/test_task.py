import pytest

from proxy.embedded import UnknownCheckpoint, resolve, task


def test_splits_share_no_prompt_and_cover_all_three_operations():
    splits = {name: set(task.prompts(name)) for name in task.SPLITS}
    names = list(splits)
    for i, left in enumerate(names):
        for right in names[i + 1 :]:
            assert not splits[left] & splits[right]
    for pool in splits.values():
        assert all(any(sign in prompt for prompt in pool) for sign in "+-*")


@pytest.mark.parametrize(("prompt", "value"), [("17+48=", 65), ("3-10=", -7), ("9*99=", 891), ("0-0=", 0)])
def test_answer(prompt, value):
    assert task.answer(prompt) == value


@pytest.mark.parametrize(
    ("response", "answer", "form"),
    [
        ("65", 1, 1),
        ("065", 1, 0),
        ("66", 0, 1),
        ("0066", 0, 0),
        ("", 0, 0),
        ("-", 0, 0),
        ("6 5", 0, 0),
        ("٦٥", 0, 0),
    ],
)
def test_value_and_format_are_graded_apart(response, answer, form):
    reward = task.grade("17+48=", response)
    assert (reward.answer, reward.format) == (answer, form)
    assert reward.total == pytest.approx(0.8 * answer + 0.2 * form)


def test_negative_answers_are_graded():
    assert task.grade("3-10=", "-7").total == pytest.approx(1.0)
    assert task.grade("3-10=", "-07") == task.Reward(1.0, 0.0)


def test_unknown_checkpoints_are_refused_with_the_names_there_are(tmp_path):
    with pytest.raises(UnknownCheckpoint, match="qwen3_moe, deepseek_v3"):
        resolve("embedded:qwen4")
    with pytest.raises(UnknownCheckpoint, match="holds no config"):
        resolve(str(tmp_path))
