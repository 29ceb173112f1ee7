"""`python -m bench.tui`: what the screen costs, as ratios and shares measured in one run.

First paint is timed from outside, at a pseudo-terminal: from starting the process until the screen's own words have
arrived, against an empty Textual application that is started in turn with it. The rest is measured on a run folder
that a script writes as a runner does: how long a key takes while two processes keep the cores busy, what share
of a core watching takes, and how long the longest logs hold the screen up.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import multiprocessing
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from diagnose.events import RunEvent, SessionEvent, StageEvent, StepEvent
from diagnose.store import RunFolder
from diagnose.tui.app import DiagnoseApp
from diagnose.tui.launch import SessionBackend
from proxy.worker import NICENESS

EMPTY = """
from textual.app import App
from textual.widgets import Static
class Empty(App):
    def compose(self):
        yield Static("first paint")
Empty().run()
"""
ROOT = Path(__file__).parents[1]
ROUNDS = 7
WATCH_S = 15.0
LONG = 100_000
FAULT = "learning_rate_too_high"
REPLAY = f"{FAULT}-x1-s1"
METRICS = ("critic/rewards/mean", "actor/kl_loss", "actor/entropy", "actor/grad_norm")


class Terminal:
    """A program in a pseudo-terminal of 80×24."""

    def __init__(self, arguments: list[str]) -> None:
        """Start Python with some arguments."""
        self._parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = os.environ | {"TERM": "xterm-256color"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", *arguments], stdin=child, stdout=child, stderr=child, env=env, cwd=ROOT
        )
        os.close(child)

    def send(self, keys: bytes) -> None:
        """Type."""
        os.write(self._parent, keys)

    def wait_for(self, words: bytes, patience_s: float) -> None:
        """Read until some words have arrived."""
        seen, deadline = b"", time.monotonic() + patience_s
        while words not in seen:
            assert time.monotonic() < deadline, (words, seen[-300:])
            if select.select([self._parent], [], [], 0.1)[0]:
                seen += os.read(self._parent, 65536)

    def drain(self, quiet_s: float) -> None:
        """Read for some seconds and forget it."""
        deadline = time.monotonic() + quiet_s
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._parent], [], [], left)[0]:
                os.read(self._parent, 65536)

    def close(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.wait()
        os.close(self._parent)


def first_paint_s(arguments: list[str], words: bytes) -> float:
    """Return the seconds from starting a program until its words are on the terminal."""
    start = time.monotonic()
    terminal = Terminal(arguments)
    terminal.wait_for(words, 60)
    elapsed = time.monotonic() - start
    terminal.close()
    return elapsed


def write_run(root: Path, steps: int) -> RunFolder:
    """Write a run folder with an incident, a twin and one finished healthy replay, all of `steps` steps."""
    folder = RunFolder(root)
    for part in ("inputs", "runs/healthy-s1"):
        (root / part).mkdir(parents=True)
    lines = "".join(
        json.dumps({"step": step, "data": {name: step % 97 / 97 for name in METRICS}}) + "\n"
        for step in range(1, steps + 1)
    )
    for name in ("inputs/faulty_0.jsonl", "inputs/healthy_0.jsonl", "runs/healthy-s1/metrics.jsonl"):
        (root / name).write_text(lines)
    folder.session.write_text(json.dumps({"name": "bench", "symptom": "kl_divergence_increase"}))
    events = [
        SessionEvent(
            name="bench",
            symptom="kl_divergence_increase",
            candidates=(FAULT,),
            seeds=(1,),
            steps=steps,
        ),
        StageEvent(stage="replay", status="started"),
        RunEvent(run="healthy-s1", fault=None, seed=1, status="done"),
        RunEvent(run=REPLAY, fault=FAULT, seed=1, status="started"),
    ]
    folder.events.write_text("".join(event.to_line() + "\n" for event in events))
    return folder


def replay(folder: RunFolder, seconds: float, rate: float) -> None:
    """Write the steps of one replay at `rate` steps a second, as a worker and a runner do."""
    home = folder.runs / REPLAY
    home.mkdir()
    with (home / "metrics.jsonl").open("a") as metrics, folder.events.open("a") as events:
        for step in range(1, round(seconds * rate) + 1):
            data = {name: step % 13 / 13 for name in METRICS}
            metrics.write(json.dumps({"step": step, "data": data}) + "\n")
            events.write(StepEvent(run=REPLAY, step=step, steps=1000, data=data).to_line() + "\n")
            metrics.flush()
            events.flush()
            time.sleep(1 / rate)


def burn() -> subprocess.Popen[bytes]:
    """Keep a core busy the way a worker does: in the runner's session, one step back."""
    code = f"import os; os.nice({NICENESS})\nwhile True: pass"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


async def watching(root: Path) -> float:
    """Return the share of a core that the screen takes while two replays' worth of steps come in."""
    folder = write_run(root, 60)
    writer = multiprocessing.Process(target=replay, args=(folder, WATCH_S + 5, 20.0), daemon=True)
    app = DiagnoseApp(SessionBackend(), root)
    async with app.run_test(size=(200, 50)) as pilot:
        await pilot.pause(2)
        writer.start()
        started, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(WATCH_S)
        share = (time.process_time() - cpu) / (time.monotonic() - started)
    writer.kill()
    return share


def reactions_ms(root: Path, burners: int) -> list[float]:
    """Return the milliseconds from each of thirty keys until the terminal has got what the key asked for."""
    write_run(root, 60)
    code = f"from pathlib import Path; from diagnose.tui.app import run; run(Path({str(root)!r}))"
    terminal = Terminal(["-c", code])
    terminal.wait_for(b"1 Runs", 60)
    terminal.drain(2.0)
    busy = [burn() for _ in range(burners)]
    found = []
    for index in range(30):
        started = time.monotonic()
        terminal.send(b"231"[index % 3 : index % 3 + 1])
        terminal.wait_for((b"2 Chart", b"3 Verdict", b"1 Runs")[index % 3], 10)
        found.append((time.monotonic() - started) * 1000)
        terminal.drain(0.4)
    terminal.close()
    for process in busy:
        process.kill()
    return found


async def long_log_ms(root: Path) -> tuple[float, float]:
    """Return (seconds until the first chart of a run with the longest logs, milliseconds of a change of metric)."""
    write_run(root, LONG)
    app = DiagnoseApp(SessionBackend(), root)
    started = time.monotonic()
    async with app.run_test(size=(200, 50)) as pilot:
        words = None
        while words is None or "step" not in str(words.render()):
            await pilot.pause(0.02)
            found = app.screen.query("#chart-words")
            words = found.first() if found else None
        opened = time.monotonic() - started
        times = []
        for _ in range(5):
            before = str(app.screen.query_one("#chart-words").render())
            started = time.monotonic()
            await pilot.press("n")
            while str(app.screen.query_one("#chart-words").render()) == before:
                await pilot.pause(0)
            times.append((time.monotonic() - started) * 1000)
    return opened, max(times)


def main() -> None:
    """Measure all and print a line each, with the bar."""
    table = Table("what", "measured", "bar", title="the screen")
    ours, empty = [], []
    for _ in range(ROUNDS):
        empty.append(first_paint_s(["-c", EMPTY], b"first paint"))
        ours.append(first_paint_s(["-m", "diagnose"], b"Start from"))
    ratio = statistics.median(ours) / statistics.median(empty)
    table.add_row("first paint over an empty Textual application's", f"× {ratio:.2f}", "≤ 3")
    with tempfile.TemporaryDirectory() as scratch:
        share = asyncio.run(watching(Path(scratch, "watch")))
        table.add_row("share of a core while watching 20 steps a second", f"{share:.1%}", "≤ 15 %")
        for burners in (0, 2):
            ms = sorted(reactions_ms(Path(scratch, f"keys{burners}"), burners))
            found = f"median {statistics.median(ms):.0f} ms, slowest {ms[-1]:.0f} ms"
            table.add_row(f"key to reaction, {burners} busy processes", found, "≤ 50 ms")
        opened, stall = asyncio.run(long_log_ms(Path(scratch, "long")))
        table.add_row(f"run with logs of {LONG:,} steps: until its chart", f"{opened:.1f} s", "")
        table.add_row("  … another metric", f"{stall:.0f} ms", "no stall")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
