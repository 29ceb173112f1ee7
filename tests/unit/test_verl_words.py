"""What verl's output says about an end: the reason, and the last lines of the right process of many."""

import pytest

from proxy.engines.verl_words import RAY_LOGS, culprit, last_lines, last_words

RAISED = """\
(TaskRunner pid=10) ray init kwargs: x
(WorkerDict pid=31) loading
\x1b[36m(WorkerDict pid=32)\x1b[0m loading the reference
(WorkerDict pid=32) Traceback (most recent call last):
(WorkerDict pid=32) CUDA has no more
(Server pid=40) all is well
Error executing job with overrides: ['a=1']
ray.exceptions.RayTaskError(OutOfMemoryError): ray::TaskRunner.run() (pid=10, ip=10.0.0.1, actor_id=a)
  File "x.py", line 1, in run
ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.actor_update() (pid=32, ip=10.0.0.1, actor_id=b)
  File "y.py", line 2, in actor_update
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
(Server pid=40) goodbye
"""

KILLED = """\
(WorkerDict pid=77) step 3
(WorkerDict pid=77) about to allocate
(RewardLoopWorker pid=78) idle
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict
\tactor_id: 1
\tpid: 77
\tname: x
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker
unexpectedly exits with a connection error code 2. (1) The process is killed by SIGKILL by OOM killer due to high
memory usage.
(RewardLoopWorker pid=78) goodbye
"""


def write(home, text):
    home.mkdir(exist_ok=True)
    (home / "verl.log").write_text(text)
    return home / "verl.log"


def test_an_exception_in_a_worker_is_that_workers(tmp_path):
    log = write(tmp_path, RAISED)
    assert last_words(log) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert culprit(log) == ("WorkerDict", "32")
    words = last_lines(tmp_path)
    assert words.startswith("WorkerDict (pid 32) said last: loading the reference | Traceback")
    assert "CUDA has no more" in words and "goodbye" not in words and str(log) in words


def test_a_worker_that_was_killed(tmp_path):
    log = write(tmp_path, KILLED)
    assert last_words(log) == "WorkerDict (pid 77) was killed (often: out of memory)"
    assert last_lines(tmp_path).startswith("WorkerDict (pid 77) said last: step 3 | about to allocate;")


def test_a_silent_workers_own_log_is_found(tmp_path):
    write(tmp_path, "\n".join(line for line in KILLED.splitlines() if not line.startswith("(WorkerDict")))
    (tmp_path / RAY_LOGS).mkdir()
    (tmp_path / RAY_LOGS / "worker-ab-01000000-77.err").write_text("a\nb\nthe last line\n")
    (tmp_path / RAY_LOGS / "worker-cd-01000000-78.err").write_text("another\n")
    words = last_lines(tmp_path)
    assert "a | b | the last line" in words and "worker-ab-01000000-77.err" in words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Could not override 'data.x'.\nTo append to your config use +data.x=1\nKey 'x' is not in struct\n\nSet the "
            "environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n",
            "Hydra: Could not override 'data.x'.",
        ),
        ("/usr/bin/python3: No module named verl\n", "No module named verl"),
        (
            "/p/python3: Error while finding module specification for 'verl.trainer.main_ppo' (ModuleNotFoundError: No "
            "module named 'verl')\nRay job FAILED: Job entrypoint command failed with exit code 1\n",
            "Error while finding module specification for 'verl.trainer.main_ppo' (ModuleNotFoundError: No module "
            "named 'verl')",
        ),
        ("ValueError: first\n(pid=1) ValueError: the last one\n", "ValueError: the last one"),
        ("ValueError: mine\nray.exceptions.WorkerCrashedError: lost\n", "ValueError: mine"),
        ("only this\n\n", "only this"),
        ("", "it wrote nothing"),
    ],
)
def test_the_reason(tmp_path, text, words):
    assert last_words(write(tmp_path, text)) == words


def test_a_log_without_a_culprit_ends_with_its_last_lines(tmp_path):
    write(tmp_path, "one\ntwo\nthree\nfour\n")
    assert culprit(tmp_path / "verl.log") is None
    assert last_lines(tmp_path).startswith("the log ends: two | three | four;")
    assert "nothing" in last_lines(tmp_path / "nowhere")
