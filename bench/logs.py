"""What reading a log costs: ``python -m bench.logs [--gb 1]``.

A console log is made in a temporary folder and read. The CPU time is given as a multiple of that of
``grep -c 'step:'`` on the same file, both the least of several rounds, and wall times beside it, which a busy machine
spoils; then the memory that reading takes, and that for a log a tenth the size. Metric lines are those of verl, about a
hundred keys behind a prefix of Ray; the rest is what workers print. They are a tenth, a half and nearly all of the log:
a gigabyte of the last kind is 200,000 steps, more than a run has.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BAR = 20.0
"""Largest multiple of grep's CPU time."""
MEMORY = 64.0
"""Largest growth of memory for ten times the bytes, in MiB."""
METRICS = (
    "actor/entropy", "actor/kl_loss", "actor/kl_coef", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl",
    "actor/loss", "actor/grad_norm", "actor/lr", "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max", "training/rollout_probs_diff_std", "rollout_corr/kl", "rollout_corr/k3_kl",
    "critic/score/mean", "critic/rewards/mean", "critic/advantages/max", "critic/advantages/min",
    "response_length/mean", "response_length/clip_ratio", "timing_s/step", "perf/throughput",
)  # fmt: skip
OTHERS = tuple(
    f"{group}/{name}"
    for group in ("global_seqlen", "timing_s", "timing_per_token_ms", "critic/returns", "prompt_length", "perf")
    for name in ("min", "max", "mean", "gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "slowest/gen",
                 "balanced_min", "balanced_max", "tool_calls/mean")
)  # fmt: skip
RAY = "\x1b[36m(TaskRunner pid=4711)\x1b[0m "


def metric_line(step: int, chance: random.Random) -> str:
    """Return one metric line."""
    keys = [*OTHERS[:6], *METRICS, *OTHERS[6:]]
    pairs = [
        f"{key}:np.float64({chance.random()!r})" if index % 3 == 0 else f"{key}:{chance.random()!r}"
        for index, key in enumerate(keys)
    ]
    return f"{RAY}step:{step} - " + " - ".join(pairs) + "\n"


def make(path: Path, size: int, share: float) -> int:
    """Write a log of `size` bytes of which metric lines are a `share`; return the number of metric lines."""
    chance = random.Random(1)
    lines = [metric_line(0, chance) for _ in range(64)]
    chatter = [
        f"\x1b[36m(WorkerDict pid={chance.randrange(9999)})\x1b[0m INFO {chance.random()} "
        + "loading shard of the weights, " * chance.randrange(1, 6)
        + "\n"
        for _ in range(2000)
    ]
    block = "".join(chance.choices(chatter, k=500))
    step = written = 0
    metrics = 0.0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            if metrics <= share * written:
                step += 1
                text = lines[step % len(lines)].replace("step:0 ", f"step:{step} ", 1)
                metrics += len(text)
            else:
                text = block if share < 0.5 else chatter[step % len(chatter)]
            written += file.write(text)
    return step


def once(path: Path) -> None:
    """Read one log and print what it took, as JSON (in a process of its own, so that its memory is its own)."""
    from diagnose.logs import read
    from diagnose.logs.registry import readers

    readers()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    found = read(path)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps({"wall": wall, "cpu": cpu, "mib": (peak - base) / 1024, "records": found.counts.records})
    )


def child_cpu() -> float:
    """Return the CPU seconds of all processes that were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(path: Path, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the least CPU and wall seconds of grep and of reading, and the memory and records of reading."""
    grep, own = {"cpu": float("inf"), "wall": float("inf")}, {"cpu": float("inf"), "wall": float("inf")}
    for _ in range(rounds):  # by turns, so that a busy machine disturbs both
        wall, cpu = time.perf_counter(), child_cpu()
        subprocess.run(["grep", "-c", "step:", str(path)], stdout=subprocess.PIPE, check=False)
        grep = {
            "wall": min(grep["wall"], time.perf_counter() - wall),
            "cpu": min(grep["cpu"], max(child_cpu() - cpu, 1e-3)),
        }
        done = subprocess.run(
            [sys.executable, "-m", "bench.logs", "--once", str(path)], stdout=subprocess.PIPE, check=True
        )
        found = json.loads(done.stdout)
        own = {**found, "wall": min(own["wall"], found["wall"]), "cpu": min(own["cpu"], found["cpu"])}
    return grep, own


@dataclass(frozen=True)
class Cost:
    """What reading one log cost.

    Attributes:
        size: Size of the log, in GB.
        share: Share of metric lines.
        steps: Number of metric lines.
        grep: CPU and wall seconds of grep.
        own: The same of reading, and the MiB that it took.
        small: MiB for a log a tenth the size.
    """

    size: float
    share: float
    steps: int
    grep: dict[str, float]
    own: dict[str, float]
    small: float

    @property
    def ratio(self) -> float:
        """CPU time as a multiple of grep's."""
        return self.own["cpu"] / self.grep["cpu"]

    @property
    def growth(self) -> float:
        """MiB that ten times the bytes take more."""
        return self.own["mib"] - self.small


SHARES = (0.1, 0.5, 0.95)


def costs(gb: float, shares: Sequence[float] = SHARES, rounds: int = 3) -> Iterator[Cost]:
    """Yield what reading a log of so many GB costs, for several shares of metric lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "console.log"
        for share in shares:
            make(path, int(gb * 1e8), share)
            small = measure(path, 1)[1]["mib"]
            steps = make(path, int(gb * 1e9), share)
            grep, own = measure(path, rounds)
            assert own["records"] == steps
            yield Cost(path.stat().st_size / 1e9, share, steps, grep, own, small)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, default=0.1, help="size of the log")
    parser.add_argument("--share", type=float, action="append", help=f"share of metric lines {SHARES}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.once is not None:
        once(options.once)
        return 0
    missed = False
    print(
        f"{'GB':>5} {'metric lines':>22} {'grep cpu':>9} {'read cpu':>9} {'ratio':>6} {'grep wall':>10}"
        f" {'read wall':>10} {'ratio':>6} {'MiB':>5} {'MiB/10':>7}"
    )
    for cost in costs(options.gb, options.share or SHARES, options.rounds):
        grep, own = cost.grep, cost.own
        missed = missed or cost.ratio > BAR or cost.growth > MEMORY
        print(
            f"{cost.size:5.2f} {cost.steps:12} ({cost.share:4.0%} of it) {grep['cpu']:9.3f} {own['cpu']:9.2f}"
            f" {cost.ratio:6.1f} {grep['wall']:10.3f} {own['wall']:10.2f} {own['wall'] / grep['wall']:6.1f}"
            f" {own['mib']:5.0f} {cost.small:7.0f}",
            flush=True,
        )
    print(
        f"bars: ratio ≤ {BAR:g}, memory for ten times the bytes ≤ {MEMORY:g} MiB more: {'missed' if missed else 'met'}"
    )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
