"""The worker pool: every job ends in exactly one last event, whatever happens to its worker."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from proxy.api import Done, Failed, Job, Note, Started, Step, WorkerPool, parse_event

ECHO = """
import json, os, signal, sys, time
for line in sys.stdin:
    job = json.loads(line)
    say = lambda event, **fields: print(json.dumps({"id": job["id"], "event": event, **fields}), flush=True)
    say("started")
    if job["job"] == "die":
        print("first line", file=sys.stderr); print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if job["job"] == "exit":
        sys.exit("no such model")
    if job["job"] == "child":
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        say("note", text=str(pid))
    if job["job"] == "sleep":
        time.sleep(600)
    if job["job"] == "chatter":
        print("a library prints this", flush=True)
    say("done", result={"pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]})
"""


@pytest.fixture
def command():
    return [sys.executable, "-c", ECHO]


def gone(pid, patience_s=5.0):
    """Whether a process ends within some seconds (a zombie counts as ended)."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


def last_events(pool):
    return {event.id: event for event in pool.events() if isinstance(event, Done | Failed)}


def test_jobs_are_done_by_as_many_processes_as_allowed(command, tmp_path):
    with WorkerPool(2, tmp_path, command) as pool:
        for number in range(6):
            pool.submit(Job(str(number), "work", {}))
        ends = last_events(pool)
        assert sorted(ends) == [str(number) for number in range(6)]
        assert all(isinstance(end, Done) and end.result["threads"] == "1" for end in ends.values())
        pids = {end.result["pid"] for end in ends.values()}
        assert 1 <= len(pids) <= 2
        assert pool.free == 2
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("job", "words"), [("die", "was killed by SIGKILL (often: out of memory): first line | last words")]
)
def test_a_dead_worker_fails_its_job_and_the_others_go_on(command, tmp_path, job, words):
    with WorkerPool(2, tmp_path, command) as pool:
        for id_, kind in {"a": "work", "b": job, "c": "work", "d": "work"}.items():
            pool.submit(Job(id_, kind, {}))
        ends = last_events(pool)
    assert isinstance(ends["b"], Failed) and ends["b"].died
    assert ends["b"].reason == f"the worker {words}"
    assert all(isinstance(ends[id_], Done) for id_ in "acd")


def test_last_words_are_those_of_the_job_that_failed(command, tmp_path):
    with WorkerPool(1, tmp_path, command) as pool:
        pool.submit(Job("a", "die", {}))
        pool.submit(Job("b", "exit", {}))
        ends = last_events(pool)
    assert ends["b"] == Failed("b", "the worker ended with code 1: no such model", died=True)


def test_a_worker_that_cannot_be_started_fails_the_job(tmp_path):
    with WorkerPool(1, tmp_path, ["/nonexistent/worker"]) as pool:
        pool.submit(Job("a", "work", {}))
        (end,) = list(pool.events())
    assert isinstance(end, Failed) and end.died and "no worker could be started" in end.reason


def test_a_worker_that_dies_at_its_start_fails_the_job_with_the_reason(tmp_path):
    with WorkerPool(1, tmp_path, [sys.executable, "-c", "import nonexistent_module"]) as pool:
        pool.submit(Job("a", "work", {}))
        end = last_events(pool)["a"]
    assert isinstance(end, Failed) and "No module named 'nonexistent_module'" in end.reason


def test_what_a_library_prints_is_no_event_but_is_kept(command, tmp_path):
    with WorkerPool(1, tmp_path, command) as pool:
        pool.submit(Job("a", "chatter", {}))
        assert isinstance(last_events(pool)["a"], Done)
    assert "a library prints this" in (tmp_path / "worker_0.log").read_text()


def test_closing_ends_a_busy_worker_and_what_it_started(command, tmp_path):
    with WorkerPool(2, tmp_path, command) as pool:
        pool.submit(Job("a", "child", {}))
        child = next(int(event.text) for event in pool.events() if isinstance(event, Note))
        pool.submit(Job("b", "sleep", {}))
        while not any(isinstance(event, Started) for event in pool.poll()):
            pass
    assert gone(child)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's parent-death signal")
def test_workers_die_with_a_parent_that_is_killed(command, tmp_path):
    parent = textwrap.dedent(
        f"""
        from pathlib import Path
        from proxy.api import Job, Started, WorkerPool
        pool = WorkerPool(1, Path({str(tmp_path)!r}), {command!r})
        pool.submit(Job("a", "sleep", {{}}))
        while not any(isinstance(event, Started) for event in pool.poll()):
            pass
        print(pool._slots[0].process.pid, flush=True)
        import time; time.sleep(600)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    worker = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(worker)


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ('{"id": "a", "event": "started"}', Started("a")),
        (
            '{"id": "a", "event": "step", "step": 1, "steps": 2, "data": {"x": null}}',
            Step("a", 1, 2, {"x": None}),
        ),
        ('{"id": "a", "event": "note", "text": "t"}', Note("a", "t")),
        ('{"id": "a", "event": "done", "result": {"x": 1}}', Done("a", {"x": 1})),
        ('{"id": "a", "event": "failed", "reason": "r"}', Failed("a", "r")),
        ('{"id": "a", "event": "dance"}', None),
        ('{"event": "started"}', None),
        ('{"id": "a", "event": "step"}', None),
        ("[1, 2]", None),
        ("half a li", None),
    ],
)
def test_worker_lines_become_events(line, event):
    assert parse_event(line) == event
