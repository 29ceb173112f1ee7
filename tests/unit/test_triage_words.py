"""What triage says: of the log as read, contradictions, names, points that add up, files it would overwrite."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from diagnose.cli import invoke
from diagnose.playbook import load
from diagnose.prepare import prepare
from diagnose.triage.advice import first_sentence
from diagnose.triage.aliases import canonical_names
from taxonomy.clues import all_clues
from taxonomy.observations import parse_observation
from taxonomy.registry import library

FIXTURES = Path(__file__).parent.parent / "fixtures" / "triage"


def rows(first: int = 1, steps: int = 40, late: int = 0) -> list[str]:
    """Lines of a run; from step `late` on its gap is large."""
    return [
        json.dumps(
            {
                "step": step,
                "data": {
                    "critic/rewards/mean": 0.4 + 0.003 * step + 0.01 * (step % 3),
                    "actor/grad_norm": 2.0 + 0.1 * (step % 4),
                    "actor/pg_loss": 0.01 * (step % 5) + 0.001,
                    "training/rollout_probs_diff_mean": 0.2 + 0.01 * (step % 3)
                    if late and step >= late
                    else 0.003 + 1e-4 * (step % 3),
                },
            }
        )
        for step in range(first, first + steps)
    ]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert invoke(["triage", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_playbook_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path / "bad.jsonl", rows(late=20))
    target = tmp_path / "p.yaml"
    target.write_text("mine")
    assert invoke(["triage", str(log), "--write-playbook", str(target)]) == 2
    said = capsys.readouterr()
    assert target.read_text() == "mine" and "exists already" in said.err and "mend: " in said.err
    assert said.out == "", "told before the work, not after it"
    target.unlink()
    assert invoke(["triage", str(log), "--write-playbook", str(target)]) == 0
    assert "next: diagnose run" in capsys.readouterr().err and target.is_file()


def test_a_healthy_log_has_nothing_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, target = write(tmp_path / "good.jsonl", rows()), tmp_path / "p.yaml"
    assert invoke(["triage", str(log), "--write-playbook", str(target)]) == 0
    err = capsys.readouterr().err
    assert "nothing to replay" in err and "next:" not in err and not target.exists()


def test_what_the_importer_lost_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = rows()
    again = json.dumps({"step": 12, "data": {"actor/grad_norm": 7.5}})
    long = json.dumps({"step": 13, "data": {"x": 1.0}, "pad": "p" * (1 << 20)})
    lines = [*lines[:5], "{broken", "{broken too", *lines[5:12], again, long, *lines[12:], lines[-1][:30]]
    log = tmp_path / "torn.jsonl"
    log.write_text("\n".join(lines))
    (text,) = as_json(capsys, log)["warnings"]
    assert text.startswith(f"{log}: 4 lines rejected (2 x not JSON, ") and "first: line 6" in text
    assert "cut off at the end of the file" in text and "longer than" in text
    assert "1 value logged twice, differently" in text
    assert invoke(["triage", str(write(tmp_path / "good.jsonl", rows())), "--healthy", str(log)]) == 0
    assert capsys.readouterr().err.count("warning: ") == 1
    assert as_json(capsys, tmp_path / "good.jsonl")["warnings"] == []


def test_a_damaged_gzip_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = gzip.compress(("\n".join(rows(steps=400)) + "\n").encode())
    log = tmp_path / "log.jsonl.gz"
    log.write_bytes(packed[: len(packed) * 3 // 4])
    (text,) = as_json(capsys, log)["warnings"]
    assert "gzip" in text


def test_a_log_that_begins_late_does_not_show_the_steps_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = as_json(capsys, write(tmp_path / "late.jsonl", rows(first=59, late=59)))["now"]
    assert (
        "does not show the steps before 59" in late["act"]
        and "none of its checkpoints is good" not in late["act"]
    )
    assert "before step 59, where the log begins" in late["keep"]
    whole = as_json(capsys, write(tmp_path / "whole.jsonl", rows(late=1)))["now"]
    assert "the log begins with the fault, so none of its checkpoints is good" in whole["act"]


def test_an_onset_that_nobody_gave_is_not_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert "since when is not known" in as_json(capsys, "--observed", "actor/kl_loss=up")["now"]["act"]
    assert (
        "none of its checkpoints is good"
        in as_json(capsys, "--observed", "actor/kl_loss=up:start")["now"]["act"]
    )


@pytest.mark.parametrize(
    ("one", "other", "code"),
    [
        ("up", "down", 2),
        ("none", "nan", 2),
        ("flat", "up", 2),
        ("up", "up", 0),
        ("up", "nan", 0),
        ("zero", "constant", 0),
        ("down", "zero", 0),
    ],
)
def test_contradictions(one: str, other: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--observed", f"actor/kl_loss={one}", "--observed", f"actor/kl_loss={other}"]
    assert invoke(["triage", *words]) == code
    err = capsys.readouterr().err
    assert (f"actor/kl_loss={one} and actor/kl_loss={other}" in err) == (code == 2)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("kl", "actor/kl_loss"),
        ("reward", "critic/rewards/mean"),
        ("Grad. Norm", "actor/grad_norm"),
        ("completions/mean_length", "response_length/mean"),
        ("actor/kl_los", "actor/kl_loss"),
    ],
)
def test_names_from_other_frameworks(name: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["triage", "--observed", f"{name}=up"]) == 2
    err = capsys.readouterr().err
    assert re.search(rf"did you mean {re.escape(wanted)}[,?]", err), err


def test_names_that_nobody_knows() -> None:
    assert canonical_names("qqqq") == ()
    with pytest.raises(ValueError, match=r"there is no metric 'qqqq'$"):
        parse_observation("qqqq=up")


@pytest.mark.parametrize("log", ["verl.log", "trl.log", "slime.log"])
def test_the_points_shown_add_up_to_the_score(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["triage", str(FIXTURES / log)]) == 0
    part = capsys.readouterr().out.split("What it may be")[1].split("\n\n")[0]
    found = re.split(r"(?m)^[= ]\d +(?=[+-])", part)[1:]
    assert found
    for text in found:
        score, *points = map(float, re.findall(r"(?m)^ *([+-][\d.]+) ", text))
        assert score == pytest.approx(sum(points), abs=0.0051), text
    assert re.search(r"(?m)^ +[+-][\d.]+ and \d+ more", part)


def test_reasons_hold_the_whole_score(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--observed", "actor/kl_loss=up:gradual", "--observed", "actor/entropy=down"]
    candidates = as_json(capsys, *words)["candidates"]
    assert candidates
    for item in candidates:
        points = [float(reason.split(" ", 1)[0]) for reason in item["reasons"]]
        assert sum(points) == pytest.approx(item["score"], abs=0.0051)


def test_a_mend_is_no_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is done about a cause that is only guessed comes after the check that confirms it."""
    log = write(tmp_path / "bad.jsonl", rows(late=20))
    now = as_json(capsys, log)["now"]
    first = as_json(capsys, log)["candidates"][0]["fault"]
    assert now["mend"].startswith(f"{first} is confirmed, and not before: ")
    for card in library().cards.values():
        assert all_clues()[card.id].look, card.id
        assert first_sentence(card.fix) not in now["look"], card.id
    assert invoke(["triage", str(log)]) == 0
    assert "\n  if   " in capsys.readouterr().out


def test_one_metric_is_too_little_to_be_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"step": n, "data": {"actor/kl_loss": 0.01 + 1e-4 * (n % 5)}}) for n in range(40)]
    data = as_json(capsys, write(tmp_path / "one.jsonl", lines))
    assert data["verdict"] == "inconclusive" and "too little to say" in data["reason"]
    assert as_json(capsys, write(tmp_path / "good.jsonl", rows()))["verdict"] == "healthy"


def test_a_short_log_names_what_would_explain_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path / "short.jsonl", rows(steps=6, late=3))
    data = as_json(capsys, log)
    assert data["verdict"] == "inconclusive" and data["candidates"]
    assert invoke(["triage", str(log)]) == 0
    assert "What it may be, should it stay so" in capsys.readouterr().out
    assert as_json(capsys, write(tmp_path / "good.jsonl", rows(steps=6)))["candidates"] == []


def test_numbers_have_their_nouns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 7, "data": {"actor/grad_norm": None, "actor/pg_loss": None, "critic/rewards/mean": 0.5}}
    assert invoke(["triage", str(write(tmp_path / "last.jsonl", [json.dumps(row)]))]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 step, 7 to 7, 3 metrics" in out and "not finite at the only step 7" in out


def test_huge_values_are_compared_in_silence(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    lines = [
        json.dumps(
            {"step": n, "data": {"actor/kl_loss": 1e308 if n > 20 else 0.01, "actor/grad_norm": -1e308}}
        )
        for n in range(40)
    ]
    assert invoke(["triage", str(write(tmp_path / "huge.jsonl", lines))]) == 0
    assert not list(recwarn)


def test_every_candidate_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--observed", "rollout_corr/logprob_abs_diff=up:start", "--context", "model.moe=true")
    data = as_json(capsys, *words)
    assert len(data["candidates"]) > 12
    scores = [item["score"] for item in data["candidates"]]
    assert scores == sorted(scores, reverse=True)


def test_a_broken_attempt_before_the_last_run_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "twice.jsonl", rows(late=20) + [line.replace("0.00", "0.005") for line in rows()])
    data = as_json(capsys, log)
    assert [(item["run"], item["verdict"], item["judged"]) for item in data["runs"]] == [
        (1, "faulty", False),
        (2, "healthy", True),
    ]
    assert data["verdict"] == "healthy"
    assert invoke(["triage", str(log)]) == 0
    out = capsys.readouterr().out
    assert "\n  1 faulty since steps " in out and "\n> 2 healthy (40 steps)" in out
    assert as_json(capsys, log, "--run", 1)["verdict"] == "faulty"
    assert as_json(capsys, log, "--run", 1)["runs"] == []


def test_of_a_folder_the_broken_run_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    write(folder / "a.jsonl", [line.replace("0.4", "0.41") for line in rows()])
    write(folder / "b.jsonl", rows(late=20))
    write(folder / "c.jsonl", [line.replace("0.4", "0.42") for line in rows()])
    data = as_json(capsys, folder)
    assert data["verdict"] == "faulty"
    assert [(item["name"], item["judged"]) for item in data["runs"]] == [
        ("a.jsonl", False),
        ("b.jsonl", True),
        ("c.jsonl", False),
    ]
    target = tmp_path / "next.yaml"
    assert invoke(["triage", str(folder), "--write-playbook", str(target)]) == 0
    assert load(target).original.faulty == (tmp_path / "next.faulty_1.jsonl",), "the run that was judged"
    assert prepare(target).session.symptom == load(target).symptom
