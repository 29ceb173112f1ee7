"""A worker process: `python -m proxy.worker` reads one JSON job a line and answers with JSON events.

Jobs: ``build`` (a proxy), ``run`` (one training run), ``hash`` (a checkpoint's content hash), ``compare`` (expert
selections by task accuracy), ``gains`` (held-out reward before and after a healthy run).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from proxy.specs import BuildSpec, Recipe, RunOutcome, RunSpec

Emit = Callable[..., None]

METRICS_FILE = "metrics.jsonl"
OUTCOME_FILE = "outcome.json"

NICENESS = 5
"""Workers step back for the screen, whose answer to a key somebody is waiting for."""


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return the metrics with non-finite values as None, as verl's file logger writes them."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def write_outcome(out: Path, outcome: RunOutcome) -> None:
    """Write the outcome last and in one move: a run without it is not finished."""
    draft = out / f"{OUTCOME_FILE}.tmp"
    draft.write_text(json.dumps(asdict(outcome)))
    draft.replace(out / OUTCOME_FILE)


def job_run(raw: Mapping[str, Any], out: str, emit: Emit) -> dict[str, Any]:
    """Carry out one training run; its metrics and outcome go to the folder `out`."""
    from proxy.embedded import resolve

    spec = RunSpec.from_json(raw)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS_FILE).open("w", encoding="utf-8", buffering=1) as file:

        def on_step(step: int, metrics: dict[str, float]) -> None:
            data = finite(metrics)
            file.write(json.dumps({"step": step, "data": data}) + "\n")
            emit("step", step=step, steps=spec.recipe.steps, data=data)

        if spec.engine.name == "verl":
            from proxy.engines import verl

            outcome = verl.run(spec, resolve(spec.model), on_step, folder)
        else:
            from proxy.engines import local

            outcome = local.run(spec, resolve(spec.model), on_step)
    write_outcome(folder, outcome)
    return asdict(outcome)


def job_build(raw: Mapping[str, Any], _out: str, emit: Emit) -> dict[str, Any]:
    """Build a proxy."""
    from proxy.build import build

    spec = BuildSpec(**{**raw, "alpha": tuple(raw["alpha"])})
    manifest = build(spec, lambda text: emit("note", text=text))
    return {"path": spec.out, "manifest": manifest}


def job_hash(raw: Mapping[str, Any], _out: str, _emit: Emit) -> dict[str, Any]:
    """Return a checkpoint's content hash."""
    from proxy.embedded import resolve
    from proxy.manifest import checkpoint_hash

    return {"hash": checkpoint_hash(resolve(raw["model"]))}


def job_compare(raw: Mapping[str, Any], _out: str, emit: Emit) -> dict[str, Any]:
    """Print material for the paper's Tables 3 and 4: accuracy by strategy and budget, as paired differences.

    The accuracy is that of greedy responses to held-out prompts.
    """
    import numpy as np
    import torch

    from proxy.compare import compare
    from proxy.engines import devices
    from proxy.engines.local import evaluate
    from proxy.engines.policy import load

    def accuracy(folder: Path) -> Any:
        policy = load(folder, torch.float32, devices.pick())
        graded = evaluate(policy, "test", raw.get("prompts", 1000), Recipe(), 0, greedy=True)
        return np.asarray(graded.answer_B, dtype=np.float64)

    rows = compare(
        raw["checkpoint"],
        raw["experts"],
        raw["strategies"],
        accuracy,
        calibration=raw.get("calibration", "embedded"),
        calibration_tokens=raw.get("calibration_tokens", 65536),
        progress=lambda text: emit("note", text=text),
    )
    return {"rows": [asdict(row) for row in rows]}


JOBS: dict[str, Callable[[Mapping[str, Any], str, Emit], dict[str, Any]]] = {
    "run": job_run,
    "build": job_build,
    "hash": job_hash,
    "compare": job_compare,
}


def one_line(error: BaseException) -> str:
    """Return an error as one line; an unexpected one with its type."""
    text = " ".join(str(error).split())
    mend = getattr(error, "mend", "")
    text = f"{text} ({mend})" if mend else text
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def serve(jobs: TextIO, events: TextIO) -> None:
    """Answer jobs until the input ends or the reader of our events is gone."""
    for line in jobs:
        job = json.loads(line)

        def emit(event: str, *, id_: str = job["id"], **fields: Any) -> None:
            events.write(json.dumps({"id": id_, "event": event, **fields}) + "\n")
            events.flush()

        try:
            emit("started")
            emit("done", result=JOBS[job["job"]](job["spec"], job.get("out", ""), emit))
        except BrokenPipeError:
            return
        except Exception as error:
            if os.environ.get("DIAGNOSE_DEBUG"):
                import traceback

                traceback.print_exc()
            emit("failed", reason=one_line(error))


def main() -> None:
    """Serve on stdin and stdout; whatever a library prints goes to stderr."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import torch
    from transformers.utils import logging

    os.nice(NICENESS)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    try:
        serve(sys.stdin, events)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(1)  # nobody listens any more: no clean-up worth a traceback


if __name__ == "__main__":
    main()
