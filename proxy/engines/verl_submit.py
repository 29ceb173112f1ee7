"""Submits one run to a Ray cluster as a job and follows it: run by path in verl's environment, our `verl_watch` there.

``python verl_submit.py ORDER.json`` submits the entry point of the order, writes the job's output to its log, and ends
when the job ends. When its own standard input closes (the launcher is gone, by whatever signal) or at SIGTERM it
stops the job, and waits until it is stopped. ``python verl_submit.py ORDER.json --stop`` only stops it.

Exit codes: 0 the job succeeded, 1 it failed or was stopped, 3 nobody answers at the address.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

POLL_S = 2.0
STOP_S = 60.0
"""Patience with a job that is to stop; Ray itself kills its driver after a few seconds."""
LOST_S = 120.0
"""Patience with a dashboard that does not answer while a job runs."""
NOBODY = 3
EARLY_S = 90.0
EARLY = ("No available agent", "try again later")
"""What a dashboard answers whose agents are still starting, and how long that is waited for."""


class Stop(BaseException):
    """A signal asked this process to end."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Stop


def write(order: dict[str, Any], text: str, mode: str = "a") -> None:
    """Write to the run's log."""
    with Path(order["log"]).open(mode, encoding="utf-8") as log:
        log.write(text)


def submit(client: Any, order: dict[str, Any]) -> None:
    """Submit the job."""
    begin = time.monotonic()
    while True:
        try:
            client.submit_job(
                entrypoint=order["entrypoint"],
                submission_id=order["submission_id"],
                runtime_env=order["runtime_env"],
                metadata=order["metadata"],
            )
        except RuntimeError as error:
            early = any(sign in str(error) for sign in EARLY)
            if not early or time.monotonic() - begin > EARLY_S:
                raise
            time.sleep(POLL_S)
        else:
            return


def follow(client: Any, order: dict[str, Any]) -> int:
    """Follow a job to its end; return the exit code."""
    heard = time.monotonic()
    written = 0
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if ready and not os.read(sys.stdin.fileno(), 1024):
            raise Stop
        try:
            info = client.get_job_info(order["submission_id"])
            text = client.get_job_logs(order["submission_id"])
        except Exception as error:  # the dashboard is busy, or gone
            if time.monotonic() - heard > LOST_S:
                write(order, f"\nConnectionError: the dashboard at {order['address']} is gone: {error}\n")
                return NOBODY
            continue
        heard = time.monotonic()
        if len(text) > written:
            write(order, text[written:])
            written = len(text)
        if info.status.is_terminal():
            if str(info.status) != "SUCCEEDED":
                said = (info.message or "without a word").partition(", last available logs")[
                    0
                ]  # those are here
                write(order, f"\nRay job {info.status}: {' '.join(said.split())}\n")
                return 1
            return 0


def stop(client: Any, order: dict[str, Any]) -> None:
    """Stop a job and wait until it is stopped."""
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        try:
            if client.get_job_info(order["submission_id"]).status.is_terminal():
                return
            client.stop_job(order["submission_id"])
        except Exception as error:
            if "does not exist" in str(error):  # it was never submitted
                return
        time.sleep(0.5)


def main() -> int:
    """Carry out one order."""
    sys.path = [
        place for place in sys.path if place != str(Path(__file__).parent)
    ]  # it holds a verl.py of ours
    order = json.loads(Path(sys.argv[1]).read_text())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    client = None
    try:
        from ray.job_submission import JobSubmissionClient

        try:
            client = JobSubmissionClient(order["address"])
            if sys.argv[2:] != ["--stop"]:
                submit(client, order)
        except Exception as error:  # requests', ray's, or those of packing the plugin
            write(order, f"ConnectionError: no job could be submitted to {order['address']}: {error}\n")
            return NOBODY
        if sys.argv[2:] == ["--stop"]:
            raise Stop
        return follow(client, order)
    except Stop:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if client is not None:
            stop(client, order)
        return 1


if __name__ == "__main__":
    sys.exit(main())
