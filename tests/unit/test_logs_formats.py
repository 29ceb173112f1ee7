"""Every format's fixture gives the values that were written into it (tests/fixtures/make_logs.py)."""

from __future__ import annotations

import gzip
import io
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diagnose.errors import LogError
from diagnose.logs import read
from diagnose.logs.model import Import, Run
from diagnose.logs.registry import file_readers, readers
from diagnose.logs.sniff import sniff_head
from tests.fixtures import make_logs as make

FIXTURES = Path(__file__).parents[1] / "fixtures"
LOGS = FIXTURES / "logs"
KL, REWARD, ENTROPY, GRAD = "actor/kl_loss", "critic/rewards/mean", "actor/entropy", "actor/grad_norm"
LENGTH, LP_DIFF, K3, HELD_OUT = (
    "response_length/mean",
    "rollout_corr/logprob_abs_diff",
    "rollout_corr/k3_kl",
    "val-core/reward/mean",
)


N = range(1, make.STEPS + 1)
reward, kl, entropy, grad, length = make.reward, make.kl, make.entropy, make.grad, make.length
Expected = Mapping[str, Callable[[int], float]]


def curve(run: Run, metric: str) -> dict[int, float]:
    """Return step → finite value."""
    steps_N, values_N = run.curves.steps_N, run.curves.values[metric]
    return {int(step): value for step, value in zip(steps_N, values_N, strict=True) if np.isfinite(value)}


def check(run: Run, expected: Expected, steps: Mapping[int, int], rounded: float = 0.0) -> None:
    """Check that `expected` metrics have their value for n at steps[n], but for NaN."""
    for metric, of in expected.items():
        got = curve(run, metric)
        want = {steps[n]: of(n) for n in steps if math.isfinite(of(n))}
        assert got.keys() == want.keys(), metric
        for step, value in want.items():
            assert abs(got[step] - value) <= rounded, (metric, step)
        bad = tuple(sorted(steps[n] for n in steps if not math.isfinite(of(n))))
        assert run.curves.nonfinite.get(metric, ()) == bad, metric


def but(of: Callable[[int], float], at: int = 5) -> Callable[[int], float]:
    """Return a function that is NaN at one place."""
    return lambda n: math.nan if n == at else of(n)


def const(value: float) -> Callable[[int], float]:
    return lambda n: value


SAME = {n: n for n in N}
FROM_0 = {n: n for n in range(make.STEPS)}


@pytest.mark.parametrize(
    ("name", "reader", "steps", "expected", "rounded"),
    [
        ("verl_file.jsonl", "verl-file", SAME, {KL: but(kl), REWARD: reward}, 0),
        (
            "verl_rounded.log",
            "verl-console",
            FROM_0,
            {KL: lambda n: kl(n) / 4, ENTROPY: entropy, REWARD: reward, "actor/lr": const(1e-6)},
            5.1e-4,
        ),
        (
            "events.out.tfevents.1900000000.host.1.0",
            "tensorboard",
            SAME,
            {REWARD: reward, KL: but(kl), ENTROPY: entropy},
            0,
        ),
        ("run-abc123.wandb", "wandb", SAME, {REWARD: reward, KL: but(kl), ENTROPY: entropy}, 0),
        (
            "openrlhf.log",
            "openrlhf",
            SAME,
            {
                KL: kl,
                REWARD: reward,
                ENTROPY: entropy,
                GRAD: grad,
                LENGTH: length,
                "actor/ppo_kl": but(const(0.0009765625)),
                "rollout_corr/kl": const(0.03125),
                "actor/pg_clipfrac": const(0.0625),
                "actor/pg_loss": const(0.125),
                "timing_s/step": const(3.5),
            },
            0,
        ),
        (
            "nemo_rl.log",
            "nemo-rl",
            SAME,
            {K3: kl, REWARD: reward, LENGTH: length, "actor/loss": but(kl), "timing_s/step": const(35.7)},
            5.1e-5,
        ),
        (
            "prime_rl.log",
            "prime-rl",
            FROM_0,
            {
                K3: but(kl),
                ENTROPY: entropy,
                GRAD: grad,
                REWARD: reward,
                LENGTH: length,
                "timing_s/step": const(3.25),
                "response_length/clip_ratio": const(0.125),
            },
            5.1e-5,
        ),
        (
            "mindspeed_rl.log",
            "mindspeed-rl",
            SAME,
            {KL: but(kl), ENTROPY: entropy, GRAD: grad, REWARD: reward, LENGTH: length},
            5.1e-5,
        ),
        (
            "golden_values.json",
            "golden-values",
            SAME,
            {"actor/loss": lambda n: 10 + n / 64, GRAD: but(grad), "timing_s/step": const(2.5)},
            0,
        ),
        (
            "trainer_state.json",
            "trainer-state",
            {n: 10 * n for n in N},
            {KL: kl, REWARD: reward, GRAD: but(grad)},
            0,
        ),
        (
            "swift_logging.jsonl",
            "json-lines",
            SAME,
            {KL: kl, REWARD: reward, GRAD: but(grad), LENGTH: length},
            0,
        ),
        (
            "trl_interleaved.log",
            "trl-console",
            {n: 5 * n for n in N},
            {KL: kl, REWARD: reward, GRAD: but(grad), LENGTH: length, LP_DIFF: const(0.125)},
            0,
        ),
        ("trl_text_numbers.log", "trl-console", SAME, {KL: kl, REWARD: reward, GRAD: grad}, 5e-4),
        ("swanlab.csv", "csv", SAME, {REWARD: reward, KL: but(kl)}, 0),
    ],
)
def test_values(name: str, reader: str, steps: Mapping[int, int], expected: Expected, rounded: float) -> None:
    imported = read(LOGS / name)
    assert imported.format == reader
    (run,) = imported.runs
    check(run, expected, steps, rounded)
    assert run.curves.events == ()
    assert imported.counts.rejected == 0


def test_fixtures_are_what_their_script_writes() -> None:
    for name, data in make.files():
        assert (LOGS / name).read_bytes() == data, name


def test_every_reader_has_a_fixture() -> None:
    formats = {read(path).format for path in LOGS.iterdir()}
    assert formats == {*readers(), *file_readers()} - {"parquet"}


# what is told apart


@pytest.mark.parametrize("name", [path.name for path in sorted(LOGS.iterdir()) if path.is_file()])
def test_no_gap_of_probabilities_is_taken_for_one_of_log_probabilities(name: str) -> None:
    for run in read(LOGS / name).runs:
        for raw, canonical in run.names.items():
            if "logp" in raw:
                assert canonical == LP_DIFF
            if "ppo_kl" in raw:
                assert canonical == "actor/ppo_kl"


def test_slime_rollouts_take_the_step_of_their_first_update() -> None:
    (run,) = read(LOGS / "slime.log").runs
    updates = range(make.STEPS)
    check(run, {KL: but(kl), ENTROPY: entropy, GRAD: grad, LP_DIFF: const(0.0625)}, {n: n for n in updates})
    assert curve(run, REWARD) == {2 * n: reward(2 * n + 1) for n in range(make.STEPS // 2)}
    assert curve(run, "timing_s/step") == {2 * n + 1: 2.5 for n in range(make.STEPS // 2)}
    assert curve(run, HELD_OUT) == {5: 0.75}
    assert "rollout/rewards" in run.unmapped  # normalised within groups: no reward


def test_trl_evaluation_belongs_to_the_step_before() -> None:
    (run,) = read(LOGS / "trl_interleaved.log").runs
    assert curve(run, HELD_OUT) == {30: 0.625}
    assert run.curves.resolution == {"actor/loss": 1e-4}


def test_trl_with_a_buffered_stdout_and_a_second_run() -> None:
    imported = read(LOGS / "trl_buffered.log")
    one, two = imported.runs
    check(one, {KL: kl, REWARD: reward, GRAD: but(grad)}, {n: 20 * n for n in N})
    assert curve(two, KL) == {1: kl(1), 2: kl(2), 3: kl(3)}


def test_nemo_validation_block() -> None:
    (run,) = read(LOGS / "nemo_rl.log").runs
    assert curve(run, HELD_OUT) == {6: 0.625}
    assert run.curves.resolution[K3] == 1e-4


def test_mlflow_database_has_its_runs_in_the_order_of_their_start() -> None:
    first, second = read(LOGS / "mlflow.db").runs
    assert (first.label, second.label) == ("first", "second")
    check(first, {REWARD: reward, KL: but(kl)}, SAME)
    check(second, {REWARD: lambda n: reward(n) + 1}, SAME)
    assert first.curves.nonfinite[GRAD] == (1,)  # infinity is stored as the largest number
    assert curve(first, GRAD) == {2: 0.5}


def test_mlflow_database_from_a_pipe_and_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (LOGS / "mlflow.db").read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    assert [run.label for run in read("-").runs] == ["first", "second"]
    (tmp_path / "mlflow.db.gz").write_bytes(gzip.compress(data))
    assert [run.label for run in read(tmp_path / "mlflow.db.gz").runs] == ["first", "second"]


def test_mlflow_database_is_not_written_to(tmp_path: Path) -> None:
    path = shutil.copy(LOGS / "mlflow.db", tmp_path)
    before = Path(path).read_bytes()
    read(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mlflow.db"]
    assert Path(path).read_bytes() == before


def test_another_sqlite_database_is_refused(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "other.db"
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE notes (text)")
        # A view that never ends must not be asked.
        base.execute(
            "CREATE VIEW metrics AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
            " SELECT 'x' AS run_uuid, 'k' AS key, i AS value, 0 AS is_nan, i AS step, 0 AS timestamp FROM n"
        )
    base.close()
    with pytest.raises(LogError, match="is not MLflow's"):
        read(path)


def test_csv_of_two_runs() -> None:
    one, two = read(LOGS / "wandb_export.csv").runs
    assert (one.label, two.label) == ("run-a", "run-b")
    check(one, {KL: kl}, SAME)
    check(two, {KL: lambda n: kl(n) + 1}, SAME)


def test_long_csv() -> None:
    (run,) = read(LOGS / "long.csv").runs
    check(run, {KL: kl, REWARD: reward}, SAME)


def test_markdown_table_quoted_in_a_chat() -> None:
    imported = read(LOGS / "table.md.txt")
    assert imported.format == "markdown"
    (run,) = imported.runs
    check(run, {REWARD: reward}, SAME)
    assert curve(run, KL) == {n: kl(n) for n in N if n != 5}


def test_null_in_a_plain_record_says_not_measured() -> None:
    imported = read(LOGS / "plain.jsonl")
    (run,) = imported.runs
    assert run.curves.nonfinite == {}
    assert curve(run, REWARD) == {10 * (n - 1): reward(n) for n in N if n > 1}
    assert [item.line for item in imported.rejected] == [1]


def test_pasted_on_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(make.trl_dict(n).replace("nan", "0.75") for n in N).encode()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    imported = read("-")
    assert (imported.source, imported.format) == ("stdin", "trl-console")
    check(imported.runs[0], {KL: kl}, SAME)


@pytest.mark.parametrize("name", [path.name for path in sorted(LOGS.iterdir()) if path.is_file()])
def test_compressed_is_the_same(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress((LOGS / name).read_bytes()))
    plain, packed = read(LOGS / name), read(path)
    assert packed.format == plain.format
    assert packed.counts == plain.counts
    assert same(plain, packed)


def same(one: Import, two: Import) -> bool:
    """Whether two imports have the same curves."""
    return len(one.runs) == len(two.runs) and all(
        a.curves.values.keys() == b.curves.values.keys()
        and all(
            np.array_equal(a.curves.values[name], b.curves.values[name], equal_nan=True)
            for name in a.curves.values
        )
        for a, b in zip(one.runs, two.runs, strict=True)
    )


# gzip


def test_gzip_that_was_cut_off_gives_what_is_there(tmp_path: Path) -> None:
    rows = "".join(f'{{"step": {n}, "data": {{"actor/kl_loss": {n * 0.37!r}}}}}\n' for n in range(3000))
    data = gzip.compress(rows.encode())
    (tmp_path / "a.gz").write_bytes(data[: len(data) // 2])
    imported = read(tmp_path / "a.gz")
    assert imported.notes == ("the compressed file is cut off",)
    assert 500 < len(imported.runs[0].curves.steps_N) < 3000


def test_gzip_of_several_members_and_a_damaged_one(tmp_path: Path) -> None:
    parts = [f'{{"step": {n}, "data": {{"actor/kl_loss": 0.5}}}}\n'.encode() for n in range(4)]
    (tmp_path / "a.gz").write_bytes(b"".join(map(gzip.compress, parts)) + b"\0" * 100)
    assert list(read(tmp_path / "a.gz").runs[0].curves.steps_N) == [0, 1, 2, 3]
    broken = bytearray(gzip.compress(parts[1] * 50))
    broken[-8:-4] = b"\xff" * 4
    (tmp_path / "b.gz").write_bytes(gzip.compress(parts[0]) + bytes(broken))
    assert "damaged" in read(tmp_path / "b.gz").notes[0]


def test_gzip_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diagnose.logs.source.FREE_UNPACKED", 1 << 20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"\0" * (32 << 20)))
    with pytest.raises(LogError, match="unpacks to more than") as error:
        read(tmp_path / "bomb.gz")
    assert str(error.value).startswith(str(tmp_path))


# folders


def test_folder_with_one_run_in_three_formats(tmp_path: Path) -> None:
    shutil.copy(LOGS / "events.out.tfevents.1900000000.host.1.0", tmp_path)
    shutil.copy(LOGS / "verl_file.jsonl", tmp_path)
    (tmp_path / "notes.txt").write_text("nothing here\n")
    (tmp_path / "weights.safetensors").write_bytes(b"\0" * 100)
    imported = read(tmp_path)
    (run,) = imported.runs
    assert ENTROPY in run.curves.values
    assert imported.notes == (
        "1 file without metrics left out",
        "verl_file.jsonl has the same run as TensorBoard files, which is used",
    )
    assert imported.format == "tensorboard+verl-file"


def test_event_files_of_one_folder_are_one_run_that_was_resumed(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.100.host.1.0").write_bytes(make.tensorboard(1, 8, shift=0.5))
    (tmp_path / "events.out.tfevents.200.host.2.0").write_bytes(make.tensorboard(6, 12))
    (run,) = read(tmp_path).runs
    check(run, {REWARD: lambda n: reward(n) + 0.5 * (n < 6), KL: but(kl)}, SAME)
    assert run.curves.events == (("resume", 6),)
    assert run.replaced == 3


def test_rotated_logs_are_one_run(tmp_path: Path) -> None:
    lines = make.verl_file().splitlines(keepends=True)
    (tmp_path / "run.log.2").write_text("".join(lines[:4]))
    (tmp_path / "run.log.1.gz").write_bytes(gzip.compress("".join(lines[4:9]).encode()))
    (tmp_path / "run.log").write_text("".join(lines[9:]))
    (run,) = read(tmp_path).runs
    check(run, {REWARD: reward, KL: but(kl)}, SAME)
    assert run.curves.events == ()


def test_mlflow_folder() -> None:
    (run,) = read(LOGS / "mlruns").runs
    assert (run.label, run.file) == ("toy-run", "1/0a1b")
    check(run, {REWARD: reward, KL: but(kl)}, SAME)
    assert run.unmapped == ("loss_of_mine",)


def test_folder_of_different_runs(tmp_path: Path) -> None:
    for seed in (1, 2):
        (tmp_path / f"seed{seed}.jsonl").write_text(make.verl_file().replace("0.2", f"0.{seed}"))
    imported = read(tmp_path)
    assert [run.file for run in imported.runs] == ["seed1.jsonl", "seed2.jsonl"]


def test_folder_without_a_log(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    with pytest.raises(LogError, match="none of the 1 file in this folder"):
        read(tmp_path)


# sniffing of whole files


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"", None),
        (b"hello, step\n1, 2\n", None),
        (b"step,loss\n", "csv"),
        (b"\xef\xbb\xbfstep;reward\n", "csv"),
        ("step\treward\n".encode("utf-16"), "csv"),
        (b"Wall time,Step,Value\n", None),
        (b'{"step": 1, "loss": 2}\n', None),
        (b'{"lm loss": {"start_step": 1, "values": {}}}', "golden-values"),
        (b"PAR1", "parquet"),
    ],
)
def test_sniff_head(head: bytes, name: str | None) -> None:
    found = sniff_head(head, file_readers())
    assert (found and found.name) == name


def test_parquet_needs_pyarrow_or_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + b"\0" * 100 + b"PAR1")
    with pytest.raises(LogError, match="Parquet file, which needs pyarrow") as error:
        read(tmp_path / "a.parquet")
    assert "rl-diagnose[parquet]" in error.value.mend


def test_parquet(tmp_path: Path) -> None:
    arrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    table = arrow.table(
        {
            "_step": list(N),
            "train/reward": [reward(n) for n in N],
            "train/kl": [None if n == 3 else math.nan if n == 5 else kl(n) for n in N],
            "text": ["x" for _ in N],
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    (run,) = read(tmp_path / "a.parquet").runs
    check(run, {REWARD: reward}, SAME)
    assert run.curves.nonfinite == {KL: (5,)}
    assert 3 not in curve(run, KL)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[20:60] = b"\xff" * 40
    (tmp_path / "b.parquet").write_bytes(data)
    with pytest.raises(LogError):
        read(tmp_path / "b.parquet")
