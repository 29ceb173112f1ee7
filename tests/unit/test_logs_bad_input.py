"""Whatever a log has in it: a clear answer, no exception, no control sequence, linear time."""

from __future__ import annotations

import io
import json
import math
import random
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import fuzz_logs
from diagnose.cli import invoke
from diagnose.errors import DiagnoseError, LogError
from diagnose.logs import read, verl_console
from diagnose.logs.assemble import assemble
from diagnose.logs.follow import Point, follow
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import VERL
from diagnose.logs.registry import file_readers, readers
from diagnose.logs.show import point_json, point_text
from diagnose.logs.text import Line, clean, pieces
from diagnose.logs.trl_console import place
from tests.fixtures import make_logs as make

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
KL, REWARD = "actor/kl_loss", "critic/rewards/mean"


def console(step: int, kl: object, more: str = "") -> str:
    return f"step:{step} - {KL}:{kl} - actor/entropy:{step / 7!r}{more}\n"


def write(tmp_path: Path, content: str | bytes, name: str = "run.log") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# each of the cases


def test_steps_out_of_order_are_sorted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = [10, 12, 11, 15, 14, 13, 16]
    log = write(tmp_path, "".join(console(step, step) for step in order))
    (run,) = read(log).runs
    assert list(run.curves.steps_N) == sorted(order)
    assert list(run.curves.values[KL]) == sorted(order)
    assert run.curves.events == ()
    assert run.out_of_order == 3
    assert invoke(["logs", str(log)]) == 0
    assert "3 lines out of order" in capsys.readouterr().out


def test_duplicate_steps_with_other_values_are_counted(tmp_path: Path) -> None:
    (run,) = read(write(tmp_path, console(1, 1) + console(2, 2) + console(2, 5) + console(3, 3))).runs
    assert list(run.curves.values[KL]) == [1, 5, 3]
    assert run.conflicts == 1


def test_mixed_encodings_in_one_file(tmp_path: Path) -> None:
    content = (
        "Ж\n".encode("cp1251")
        + console(1, 0.5).encode()
        + "训练\n".encode("gbk")
        + console(2, 0.25).encode()
        + console(3, 0.125).encode("utf-16-le")
    )
    imported = read(write(tmp_path, content))
    assert list(imported.runs[0].curves.values[KL][:2]) == [0.5, 0.25]


def test_one_metric_is_enough(tmp_path: Path) -> None:
    (run,) = read(write(tmp_path, '{"step": 1, "data": {"actor/kl_loss": 0.5}}\n')).runs
    assert run.names == {KL: KL}


@pytest.mark.parametrize("reader", ["verl-console", "json-lines", "trl-console", "csv", "openrlhf"])
def test_nan_everywhere_is_unusable_and_says_since_when(tmp_path: Path, reader: str) -> None:
    text = {
        "verl-console": "".join(f"step:{n} - actor/kl_loss:nan - actor/entropy:nan\n" for n in range(1, 5)),
        "json-lines": "".join(f'{{"step": {n}, "kl": NaN, "reward": NaN}}\n' for n in range(1, 5)),
        "trl-console": "{'loss': nan, 'kl': nan, 'reward': nan}\n" * 4,
        "csv": "step,kl,reward\n" + "".join(f"{n},nan,nan\n" for n in range(1, 5)),
        "openrlhf": "".join(f"Global step {n}: {{'kl': nan, 'reward': nan}}\n" for n in range(1, 5)),
    }[reader]
    with pytest.raises(LogError, match="is NaN or infinite, from step 1 on") as error:
        read(write(tmp_path, text))
    assert error.value.exit_code == 3


def test_hostile_sequences_never_reach_a_message_or_a_name(tmp_path: Path) -> None:
    evil = "\x1b]52;c;cm0gLXJm\x07\x1b[2J\u202e\x9b31m"
    texts = [
        f"step,{evil}kl,reward\n1,2,3\n",
        f'{{"step": 1, "reward": 2, "kl": 1, "{evil}": 3}}\n{evil}\n',
        f"{{'reward': 1.0, 'kl': 2.0, 'epoch': 1.0, '{evil}': 2}}\n",
        f"| step | reward | {evil} |\n|---|---|---|\n| 1 | 2 | 3 |\n",
        f"step:1 - {KL}:0.5 - a/{evil}:{evil}1\n",
    ]
    for text in texts:
        found = read(write(tmp_path, text))
        fuzz_logs.check(found)


def test_more_keys_than_any_run_has(tmp_path: Path) -> None:
    """A new key in every line, each of them a validation set: memory and time stay in proportion."""
    rows = [
        f'{{"step": {n}, "data": {{"val-core/d{n}/reward/mean@1": 0.5, "k{n}": 1, "actor/kl_loss": {n}}}}}\n'
        for n in range(1, 12_000)
    ]
    path = write(tmp_path, "".join(rows), "run.jsonl")
    begin = time.process_time()
    (run,) = read(path).runs
    assert time.process_time() - begin < 15
    assert len(run.curves.steps_N) == len(rows)
    assert len(run.unmapped) < 22_000


def test_thousands_of_restarts_and_resumes(tmp_path: Path) -> None:
    text = "".join(console(n % 3, n) for n in range(3300))
    assert len(read(write(tmp_path, text)).runs) == 1000
    zigzag = "".join(console(5 + n % 40, n) for n in range(6000))
    (run,) = read(write(tmp_path, zigzag)).runs
    assert len(run.curves.steps_N) == 40


# hostile lengths in binary formats


def test_wandb_that_ends_just_before_a_block_does(tmp_path: Path) -> None:
    messages = [make.history(n, n, {"reward": n / 8, "kl": 0.5, "pad": "x" * 2000}) for n in range(1, 20)]
    whole = make.wandb_records(messages)
    for end in range(32768 - 8, 32768 + 8):
        assert len(read(write(tmp_path, whole[:end])).runs[0].curves.steps_N) >= 14


def test_tensorboard_with_a_length_of_exabytes(tmp_path: Path) -> None:
    data = (LOGS / "events.out.tfevents.1900000000.host.1.0").read_bytes()
    from diagnose.logs.tensorboard import masked_crc

    head = struct.pack("<Q", 1 << 60)
    huge = data + head + struct.pack("<I", masked_crc(head)) + b"\0" * 100
    imported = read(write(tmp_path, huge))
    assert len(imported.runs[0].curves.steps_N) == 12
    assert imported.rejected[-1].reason == "cut off at the end of the file"


def test_tensorboard_checksums(tmp_path: Path) -> None:
    data = bytearray((LOGS / "events.out.tfevents.1900000000.host.1.0").read_bytes())
    first = 12 + struct.unpack("<Q", data[:8])[0] + 4
    data[first + 12 + 20] ^= 1
    imported = read(write(tmp_path, bytes(data)))
    assert imported.rejected[0].reason == "wrong checksum"
    assert len(imported.runs[0].curves.steps_N) == 12
    from diagnose.logs.tensorboard import masked_crc

    # The check value of CRC-32C is that of "123456789"; masked as TFRecord masks it.
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_wandb_goes_on_after_a_damaged_block(tmp_path: Path) -> None:
    messages = [make.history(n, n, {"reward": n / 8, "kl": 0.5, "pad": "x" * 3000}) for n in range(1, 60)]
    data = bytearray(make.wandb_records(messages))
    assert len(data) > 4 * 32768
    data[40_000:40_010] = b"\xff" * 10
    imported = read(write(tmp_path, bytes(data)))
    steps = [int(step) for step in imported.runs[0].curves.steps_N]
    assert imported.counts.rejected >= 1
    assert {1, 59} <= set(steps)
    assert 40 < len(steps) < 59


# the fast way through a console log


def both_ways(text: bytes) -> tuple[list[Record | Rejected], list[Record | Rejected]]:
    found = list(pieces(io.BytesIO(text), needles=(verl_console.NEEDLE,)))
    slow = verl_console.records(Line(number, clean(raw), whole) for number, raw, whole in found)
    return list(verl_console.fast(found)), list(slow)


def curves_of(found: list[Record | Rejected]) -> list[dict[str, object]]:
    runs = assemble((item for item in found if isinstance(item, Record)), "x", VERL)
    return [
        {
            "steps": list(run.curves.steps_N),
            "values": {name: values.tolist() for name, values in run.curves.values.items()},
            "nonfinite": dict(run.curves.nonfinite),
            "resolution": dict(run.curves.resolution),
            "names": dict(run.names),
        }
        for run in runs
    ]


def metric_lines(chance: random.Random, rounded: bool) -> Iterator[str]:
    keys = [f"timing_s/k{n}" for n in range(20)] + [
        KL,
        "actor/entropy",
        REWARD,
        "response_length/mean",
        "actor/lr",
    ]
    chance.shuffle(keys)
    for step in range(200):
        extra = ["val-core/toy/reward/mean@1", "val-aux/x"] if step % 10 == 0 else []
        extra += ["timing_s/save", "timing_s/save2"] if step % 10 == 5 else []
        pairs = []
        for index, key in enumerate(keys[:7] + extra + keys[7:]):
            value = chance.choice((chance.random(), chance.random() * 1e-7, -chance.random() * 1e5))
            printed = f"{value:.3f}" if rounded else repr(value)
            printed = "nan" if chance.random() < 0.01 else printed
            pairs.append(f"{key}:np.float64({printed})" if index % 4 == 0 else f"{key}:{printed}")
        prefix = chance.choice(("", "\x1b[36m(TaskRunner pid=7)\x1b[0m ", " 50%|#####| 1/2 [00:01<00:01]\r"))
        yield (
            f"{prefix}step:{step} - " + " - ".join(pairs) + chance.choice(("\n", "\n", "\r\n", " \n", " -\n"))
        )
        if chance.random() < 0.1:
            yield "(WorkerDict pid=3) training/global_step:5 and step:3 of the walk\n"


@pytest.mark.parametrize("seed", range(4))
def test_the_fast_way_gives_the_same_curves(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(metric_lines(chance, rounded=seed % 2 == 1)).encode()
    fast, slow = both_ways(text)
    assert repr(curves_of(fast)) == repr(curves_of(slow))
    assert bool(curves_of(fast)[0]["resolution"]) == (seed % 2 == 1)
    damaged = bytearray(text)
    for _ in range(60):
        damaged[chance.randrange(len(damaged))] = chance.choice(b" -:.0(5\n\x00")
    fast, slow = both_ways(bytes(damaged))
    assert repr(curves_of(fast)) == repr(curves_of(slow))


def test_the_fast_way_is_taken() -> None:
    text = "".join(metric_lines(random.Random(1), rounded=False)).encode()
    fast, _ = both_ways(text)
    short = [item for item in fast if isinstance(item, Record) and len(item.data) < 10]
    assert len(short) > 100  # only keys in use


def test_a_key_in_use_that_comes_late_is_not_overlooked() -> None:
    lines = [f"step:{n} - a/x:{n} - {KL}:0.5 - a/y:1\n" for n in range(1, 100)]
    lines[50] = f"step:51 - {REWARD}:0.75 - {KL}:0.5 - a/y:1 - a/z:2\n"
    fast, slow = both_ways("".join(lines).encode())
    assert repr(curves_of(fast)) == repr(curves_of(slow))
    assert REWARD in curves_of(fast)[0]["names"].values()  # type: ignore[attr-defined]


# the text layer


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_pieces_do_not_depend_on_how_the_bytes_come(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dribble(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(chunk, size or chunk))

    data = b"a\r\nbb step: 1\rcc\n\n\rstep: 2\nlast step:"
    whole = list(pieces(io.BytesIO(data)))
    assert list(pieces(Dribble(data))) == whole
    assert [piece.number for piece in whole] == [1, 2, 2, 4, 5]
    needles = (b"step:",)
    wanted = [piece for piece in whole if b"step:" in piece.raw]
    assert list(pieces(Dribble(data), needles=needles)) == wanted
    assert list(pieces(io.BytesIO(data), needles=needles)) == wanted
    assert list(pieces(io.BytesIO(data), needles=(b"step:", b"cc"))) == [
        p for p in whole if b"step:" in p.raw or p.raw == b"cc"
    ]


def test_line_numbers_after_a_line_that_is_too_long() -> None:
    data = b"one\n" + b"x" * (3 << 20) + b"\nthree\n" + b"y" * (3 << 20) + b"\rfour step:\nfive\n"
    long: list[int] = []
    assert [(piece.number, piece.raw) for piece in pieces(io.BytesIO(data), long.append)] == [
        (1, b"one"),
        (3, b"three"),
        (4, b"four step:"),
        (5, b"five"),
    ]
    assert long == [2, 4]
    assert [piece.number for piece in pieces(io.BytesIO(data), needles=(b"step:",))] == [4]


# steps of dicts that name none


@pytest.mark.parametrize(
    ("count", "bar", "total", "stride"),
    [
        (93, 1860, 0, 20),
        (93, 1875, 1875, 20),
        (20, 15, 20, 1),
        (10, 103, 0, 10),
        (7, 3500, 0, 500),
        (1, 0, 0, 1),
    ],
)
def test_place_of_dicts_without_a_step(count: int, bar: int, total: int, stride: int) -> None:
    end = total or bar or count
    for epochs in ([math.nan] * count, [round(stride * n / end, 2) for n in range(1, count + 1)]):
        assert place(epochs, bar, total, 0) == [stride * n for n in range(1, count + 1)]


def test_place_leaves_a_gap_where_dicts_were_lost() -> None:
    epochs = [round(n / 33, 2) for n in (*range(1, 25), 48, 49, 50)]
    assert place(epochs, 20, 50, 0) == [*range(1, 25), 48, 49, 50]


# fuzzing, a little of it


@pytest.mark.parametrize("name", [*readers(), *file_readers(), "gzip"])
def test_damaged_inputs_of_every_reader(tmp_path: Path, name: str) -> None:
    chance = random.Random(f"test {name}")
    starts = fuzz_logs.seeds_of(name)
    assert starts
    others = [path.read_bytes()[:20_000] for path in sorted(LOGS.iterdir()) if path.is_file()]
    path = tmp_path / "input"
    for _ in range(15):
        path.write_bytes(fuzz_logs.mutate(chance.choice(starts)[:20_000], others, chance))
        fuzz_logs.attempt(path, None if name == "gzip" else name)
        fuzz_logs.attempt(path, None)


# a log that grows


def test_following_a_log_that_is_written_to(tmp_path: Path) -> None:
    path = write(tmp_path, console(1, 0.5) + console(2, 0.25)[:-9])
    parts = [console(2, 0.25)[-9:], console(3, "nan") + "chatter\n", ""]

    def idle() -> bool:
        if not parts:
            return True
        with path.open("a") as file:
            file.write(parts.pop(0))
        return False

    points = list(follow(path, idle))
    assert [point.step for point in points] == [1, 2, 3]
    assert points[1].data[KL] == 0.25
    assert json.loads(point_json(points[2]))["data"][KL] is None
    assert point_text(points[0]) == "step 1  actor/kl_loss 0.5  actor/entropy 0.1429"


def test_following_waits_for_the_first_metric_line_and_heeds_rotation(tmp_path: Path) -> None:
    path = write(tmp_path, "starting\n")
    steps = ["append", "rotate", "cut", "end"]

    def idle() -> bool:
        what = steps.pop(0)
        if what == "append":
            with path.open("a") as file:
                file.write(console(1, 0.5) + console(2, 0.5))
        elif what == "rotate":
            path.replace(path.with_suffix(".1"))
            path.write_text(console(3, 0.5))
        elif what == "cut":
            path.write_text("")
            path.write_text(console(4, 0.5)[:5])
            with path.open("a") as file:
                file.write(console(4, 0.5)[5:])
        return what == "end"

    assert [point.step for point in follow(path, idle)] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["events.out.tfevents.1900000000.host.1.0", "run-abc123.wandb"])
def test_following_a_binary_log(tmp_path: Path, name: str) -> None:
    data = (LOGS / name).read_bytes()
    cuts = [len(data) // 3, len(data) // 2, len(data)]
    path = write(tmp_path, data[: cuts[0]], name)

    def idle() -> bool:
        if path.stat().st_size == len(data):
            return True
        cuts.pop(0)
        path.write_bytes(data[: cuts[0]])
        return False

    points: list[Point] = list(follow(path, idle))
    assert sorted({point.step for point in points}) == list(range(1, 13))


def test_following_what_can_not_be_followed(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="only a file can be followed"):
        next(follow(tmp_path, lambda: True))
    with pytest.raises(LogError, match="can't be followed"):
        next(follow(LOGS / "mlflow.db", lambda: True))
    with pytest.raises(LogError, match="only a file can be followed"):
        next(follow("a\0b", lambda: True))
    with pytest.raises(DiagnoseError, match="unknown log format"):
        next(follow(LOGS / "verl_file.jsonl", lambda: True, "x"))
    assert list(follow(write(tmp_path, "nothing\n"), lambda: True)) == []


def test_interrupting_a_follower_ends_it_cleanly(tmp_path: Path) -> None:
    import signal
    import subprocess
    import sys

    path = write(tmp_path, console(1, 0.5) + console(2, 0.5))
    code = "from diagnose.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "logs", str(path), "--follow", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background inherits an ignored SIGINT, and so would the follower.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(60, process.kill)
        timer.start()
        first = [json.loads(process.stdout.readline()) for _ in range(2)]
        with path.open("a") as file:
            file.write(console(3, 0.75))
        third = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
        timer.cancel()
    assert [row["step"] for row in first] == [1, 2]
    assert third == {"step": 3, "data": {KL: 0.75, "actor/entropy": 3 / 7}}
    assert (process.returncode, rest, errors) == (0, "", "")


def test_memory_does_not_grow_with_the_chatter(tmp_path: Path) -> None:
    import tracemalloc

    def peak(lines: int) -> int:
        chatter = "(WorkerDict pid=3) loading shard of the weights\n" * lines
        path = write(tmp_path, "".join(console(n, 0.5) + chatter for n in range(1, 21)))
        tracemalloc.start()
        read(path)
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return taken

    assert peak(20_000) < 1.2 * peak(4000) + (1 << 20)


def test_numbers_are_exact(tmp_path: Path) -> None:
    chance = random.Random(3)
    values = [chance.uniform(-1, 1) * 10.0 ** chance.randrange(-12, 12) for _ in range(300)]
    (run,) = read(write(tmp_path, "".join(console(n, repr(value)) for n, value in enumerate(values)))).runs
    np.testing.assert_array_equal(run.curves.values[KL], values)


def test_anonymized_summary_names_neither_path_nor_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "secret-project"
    folder.mkdir()
    shutil.copy(LOGS / "mlflow.db", folder)
    assert invoke(["logs", str(folder), "--anonymize"]) == 0
    shown = capfd.readouterr().out
    assert "critic/rewards/mean" in shown
    assert not any(word in shown for word in ("secret-project", str(tmp_path), "second", "mlflow.db"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (random.Random(1).randbytes(4000), "this is binary data"),
        ("reward,kl\n1,2\n2,3\n", "a table without a column for the step"),
        ("step:1 - " + "a/b:1 - " * 200_000, "(1 line, 0 metric lines, 1 longer than 1 MiB)"),
        ("step,kl\n", "nothing in it but a beginning"),
        ("Zürich, 步骤\nnaïve\n" * 40, "no metric line of a known format (80 lines"),
    ],
    ids=["bytes", "no step", "long", "header", "prose"],
)
def test_what_is_wrong_with_it_is_said(
    content: str | bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["triage", str(write(tmp_path, content))]) == 3
    assert said in capsys.readouterr().err
