"""Mutation fuzzing of the log readers: ``python -m bench.fuzz_logs --seconds 20 [--reader NAME …]``.

Starting from each format's synthetic fixture, inputs are damaged as disks, pipes and enemies damage them: flipped
bits, cuts, splices of other formats, huge numbers, repeated blocks, hostile lengths. Reading any of them must end in an
import or in a `LogError`, must print safely, and must not take more than linear time: now and then an input is repeated
until it is large, and doubling it must not take more than about twice as long.

An input that fails is kept in the folder given by ``--keep``, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np

from diagnose.errors import LogError
from diagnose.logs import read
from diagnose.logs.model import Import
from diagnose.logs.registry import file_readers, readers
from diagnose.logs.summary import as_json, as_text

LOGS = Path(__file__).parents[1] / "tests" / "fixtures" / "logs"
MAX_SIZE = 1 << 16
"""Largest mutated input, in bytes, before it is repeated for the check of time."""
LARGE = 1 << 18
HANGS = 30
"""CPU seconds after which a read counts as hanging."""
GROWTH = 3.0
"""Largest ratio of times for twice the bytes; 2 is linear, 4 quadratic."""
TRIES = 3
"""Measurements whose least counts, before an input is said to take more than linear time."""
SPLICES = (
    b"\n", b"\r", b"\0", b"\x1b[2J", b"\x1b]0;x\x07", b"\xe2\x80\xae", b"\xff\xfe", b"\xef\xbb\xbf", b"{" * 50,
    b"[" * 2000, b"9" * 400, b"1e9999", b"-0.0", b"nan", b"NaN", b"Infinity", b"null", b"None", b"No Log",
    b"np.float64(nan)", b"step:1 - ", b"step:7 - actor/kl_loss:0.5 - ",
    b'{"step": 3, "data": {"actor/kl_loss": 1.5}}\n',
    b"{'loss': 0.5, 'reward': 1.0, 'kl': 0.1, 'epoch': 0.5}\n", b"{'train_runtime': 1.0, 'epoch': 1.0}\n",
    b" 50%|#####     | 1/2 [00:01<00:01]", b"Global step 3: {'reward': 1, 'kl': 2}\n",
    b"step 3: {'train/kl_loss': 1}\n", b"rollout 1: {'rollout/raw_reward': 1}\n", b"===== Step 1/2 =====\n",
    "• Avg Reward: 0.5\n".encode(), b"Step 3 | Loss: 0.1 | Entropy: 0.2\n", b"iteration: 3 / 9 | grad_norm : 0.5 | \n",
    b"| step | kl |\n", b"| 1 | 2 |\n", b"step,kl\n", b"1,2\n", b'"', b"'", b",", b":", b" - ", b"|", b"\xff" * 8,
    b"\x80" * 10, b"\x7f", b"\0" * 64,
)  # fmt: skip


class Hang(Exception):
    """A read that does not end; no OSError, which a read would take for the file's."""


@dataclass
class Report:
    """What fuzzing one reader found.

    Attributes:
        name: Reader.
        runs: Inputs read.
        usable: Of them, those that gave an import.
        cpu: CPU seconds that it took.
        growth: Largest ratio of times for twice the bytes.
        slowest: Largest time per byte of the large inputs, in ns.
        failures: What went wrong, a line each.
    """

    name: str
    runs: int = 0
    usable: int = 0
    cpu: float = 0.0
    growth: float = 0.0
    slowest: float = 0.0
    failures: list[str] = field(default_factory=list)


def seeds_of(name: str) -> list[bytes]:
    """Return the fixtures of a reader."""
    if name == "gzip":
        return [gzip.compress((LOGS / "verl_file.jsonl").read_bytes())]
    found = [
        path.read_bytes() for path in sorted(LOGS.iterdir()) if path.is_file() and read(path).format == name
    ]
    if name == "parquet":
        found.append(b"PAR1" + bytes(200) + b"PAR1")
    return [data[:MAX_SIZE] for data in found]


def mutate(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Return a damaged copy."""
    out = bytearray(data)
    for _ in range(1 << chance.randrange(5)):
        if not out:
            break
        at = chance.randrange(len(out))
        kind = chance.randrange(10)
        if kind == 0:
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            out[at] = chance.randrange(256)
        elif kind == 2:
            del out[at : at + 1 + chance.randrange(1 << chance.randrange(1, 12))]
        elif kind == 3:
            del out[at:]
        elif kind in (4, 5):
            out[at:at] = chance.choice(SPLICES) * (1 << chance.randrange(4))
        elif kind == 6:
            other = chance.choice(others)
            start = chance.randrange(len(other) or 1)
            out[at:at] = other[start : start + chance.randrange(4096)]
        elif kind == 7:
            block = bytes(out[at : at + chance.randrange(1, 512)])
            out[at:at] = block * chance.randrange(1, 1 + 8192 // len(block))
        elif kind == 8:  # a length or a number that is far too large
            size = chance.choice((1, 2, 4, 8))
            out[at : at + size] = b"\xff" * (size - 1) + bytes([chance.choice((0x7F, 0xFF, 0x00))])
        else:
            digits = [index for index in range(at, min(at + 400, len(out))) if 48 <= out[index] < 58]
            if digits:
                out[digits[0] : digits[0] + 1] = chance.choice(
                    (b"9" * 20, b"-1", b"1e308", b"1e-400", b"0.0.0", b"_", b"")
                )
    return bytes(out[:MAX_SIZE])


def check(found: Import) -> None:
    """Raise AssertionError unless an import is sound and can be printed."""
    assert any(np.isfinite(values).any() for run in found.runs for values in run.curves.values.values())
    for run in found.runs:
        assert all(key.isprintable() for key in (*run.names, *run.unmapped, run.label, run.file))
        assert not any(np.isinf(values).any() for values in run.curves.values.values())
        assert (np.diff(run.curves.steps_N) > 0).all()
    assert all(item.reason.isprintable() for item in found.rejected)
    json.dumps(as_json(found), allow_nan=False)
    assert as_text(found).replace("\n", "").isprintable()


def attempt(path: Path, log_format: str | None) -> bool:
    """Read a file; return whether it was usable. Raises whatever must not be raised."""
    try:
        check(read(path, log_format))
    except LogError as error:
        assert str(error).isprintable()
        return False
    return True


def seconds(path: Path, data: bytes, log_format: str | None) -> float:
    """Return the lesser of two times that reading takes, in seconds."""
    path.write_bytes(data)
    best = float("inf")
    for _ in range(2):
        begin = time.process_time()
        with suppress(LogError):
            read(path, log_format)
        best = min(best, time.process_time() - begin)
    return best


def growth(path: Path, data: bytes, log_format: str | None) -> tuple[float, float]:
    """Return the ratio of times for twice the bytes, and ns a byte, of an input that is repeated until it is large."""
    base = data * max(1, LARGE // max(1, len(data)))
    one, two = seconds(path, base, log_format), seconds(path, base * 2, log_format)
    return (two / one if one > 0.01 else 0.0), 1e9 * two / (2 * len(base) or 1)


def fuzz(
    name: str,
    budget: float,
    seed: int,
    keep: Path | None,
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> Report:
    """Fuzz one reader for so many seconds of a clock."""
    chance = random.Random(f"{name}-{seed}")
    report = Report(name)
    starts = seeds_of(name)
    others = [path.read_bytes()[:MAX_SIZE] for path in sorted(LOGS.iterdir()) if path.is_file()]
    forced = None if name == "gzip" else name

    def hang(number: int, frame: FrameType | None) -> None:
        raise Hang(f"still reading after {HANGS} s of CPU")

    signal.signal(signal.SIGPROF, hang)
    begin, growing, cpu = clock(), 0.0, time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input"
        while clock() < begin + budget:
            data = mutate(chance.choice(starts), others, chance)
            log_format = forced if chance.random() < 0.8 else None
            path.write_bytes(data)
            report.runs += 1
            signal.setitimer(signal.ITIMER_PROF, HANGS)
            try:
                report.usable += attempt(path, log_format)
                signal.setitimer(signal.ITIMER_PROF, 10 * HANGS)
                if len(data) > 64 and growing < (clock() - begin) / 4:
                    growing -= clock()
                    ratio, cost = growth(path, data, log_format)
                    for _ in range(TRIES - 1):  # a busy machine is so once, quadratic time each time
                        if ratio > GROWTH:
                            ratio = min(ratio, growth(path, data, log_format)[0])
                    growing += clock()
                    report.growth, report.slowest = max(report.growth, ratio), max(report.slowest, cost)
                    assert ratio <= GROWTH, f"twice the bytes take {ratio:.1f} times as long"
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                report.failures.append(
                    f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
                )
                say(f"{name}: {report.failures[-1]}")
                if keep is not None:
                    (keep / f"{name}-{report.runs}").write_bytes(data)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    report.cpu = time.process_time() - cpu
    return report


def main(arguments: list[str] | None = None) -> int:
    """Fuzz the readers and print a table; 1 where anything failed."""
    every = [*readers(), *file_readers(), "gzip"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each reader")
    parser.add_argument("--reader", action="append", choices=every, help="may be given several times [all]")
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds, for a machine that is busy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for inputs that failed")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    failed = 0

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    print(
        f"{'reader':14} {'inputs':>8} {'usable':>7} {'cpu s':>6} {'growth':>7} {'ns/byte':>8} {'failures':>8}",
        flush=True,
    )
    for name in options.reader or every:
        clock = time.process_time if options.cpu else time.monotonic
        report = fuzz(name, options.seconds, options.seed, options.keep, tell, clock)
        failed += len(report.failures)
        print(
            f"{name:14} {report.runs:8} {report.usable:7} {report.cpu:6.0f} {report.growth:7.2f} {report.slowest:8.0f}"
            f" {len(report.failures):8}",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
