"""The builder's bars: copying, memory, routed work, selection. Ratios, each taken within one run.

``python -m bench.builder`` uses a Qwen3-30B-A3B-shaped checkpoint made by `bench.real_width` (``--folder``, or a
temporary one of ``--layers`` layers); ``--deepseek FOLDER`` adds the FP8 one. Every measured step is a process of
its own, so that its peak memory is its own. ``--selection`` needs nothing but arithmetic; with a ``kmedoids``
package at hand (a scratch environment: the project never imports it) its PAM is the reference, otherwise a
plain PAM written out here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

TOKENS = int(os.environ.get("BUILDER_TOKENS", "1024"))
KEEP = {"qwen3": 48, "deepseek": 16}


def child(step: str, *arguments: object) -> dict[str, Any]:
    """Run one step in a process of its own and return what it measured."""
    command = [sys.executable, "-m", "bench.builder", "--step", step, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{step}: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}"
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def peak() -> int:
    """Return this process's peak memory in bytes."""
    from proxy.walk import peak_memory

    return peak_memory()


def token_rows(folder: Path, tokens: int = TOKENS, length: int = 128) -> list[list[int]]:
    """Return random calibration rows."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocabulary, length).tolist() for _ in range(tokens // length)]


def step_base(folder: Path) -> dict[str, Any]:
    """Measure the memory of the libraries and of an opened checkpoint, before anything is read."""
    import torch

    from proxy.checkpoint import open_checkpoint
    from proxy.families import understand
    from proxy.stream import Streamed

    torch.set_num_threads(1)
    checkpoint = open_checkpoint(folder)
    Streamed(checkpoint, understand(checkpoint))
    return {"peak": peak()}


def step_calibrate(folder: Path) -> dict[str, Any]:
    """Measure calibration: memory, time, and the pairs of token and expert that were computed."""
    import torch

    from proxy.checkpoint import open_checkpoint
    from proxy.families import understand
    from proxy.walk import Pass

    torch.set_num_threads(1)
    checkpoint = open_checkpoint(folder)
    layout = understand(checkpoint)
    rows = token_rows(folder)
    began, cpu = time.monotonic(), time.process_time()
    walk = Pass(checkpoint, layout, rows)
    walk.run()
    tokens = sum(map(len, rows))
    return {
        "peak": peak(),
        "seconds": time.monotonic() - began,
        "cpu": time.process_time() - cpu,
        "read": walk.model.read_bytes,
        "pairs": walk.pairs,
        "plain_pairs": tokens * layout.top_k * len(layout.moe_layers),
        "hidden": 4 * tokens * checkpoint.config["hidden_size"],
    }


def step_write(folder: Path, out: Path, keep: int) -> dict[str, Any]:
    """Measure slicing and writing, and `shutil.copyfile` of the same bytes, by turns; the least of each counts."""
    from proxy.checkpoint import open_checkpoint
    from proxy.families import understand
    from proxy.plan import check_budget
    from proxy.selection import Selection
    from proxy.writer import outputs, write_weights

    checkpoint = open_checkpoint(folder)
    layout = understand(checkpoint)
    check_budget(layout, keep)
    size, quota = layout.experts // layout.groups, keep // layout.groups
    kept = tuple(group * size + 2 * place for group in range(layout.groups) for place in range(quota))
    selections = {layer: Selection(kept, (0,) * layout.experts) for layer in layout.moe_layers}
    sliced, copied = out / "sliced", out / "copied"
    files = outputs(checkpoint, layout, selections)

    def slicing() -> None:
        write_weights(sliced, checkpoint, files)

    def copying() -> None:
        for file in sorted(whole.iterdir()):
            shutil.copyfile(file, copied / file.name)

    whole = (
        out / "whole"
    )  # what is copied plainly: a proxy as it was written, in the cache like the checkpoint
    whole.mkdir(parents=True)
    write_weights(whole, checkpoint, files)
    total = sum(file.stat().st_size for file in whole.iterdir())
    times: dict[str, list[float]] = {"slice": [], "copy": []}
    for turn in range(6):
        for name, work, home in [("slice", slicing, sliced), ("copy", copying, copied)][
            :: 1 - 2 * (turn % 2)
        ]:
            home.mkdir()
            os.sync()  # neither pays for what the other left to be written
            began = time.monotonic()
            work()
            times[name].append(time.monotonic() - began)
            shutil.rmtree(home)
    shutil.rmtree(out)
    return {"peak": peak(), "bytes": total, **{name: min(values) for name, values in times.items()}}


def selection() -> dict[str, Any]:
    """Measure the choice among 384 experts: seconds a layer, and its loss against PAM's from the same start."""
    from proxy.selection import k_medoids

    ratios, seconds, ours_seconds = [], [], []
    reference = "a plain PAM"
    for seed in range(100):
        rng = np.random.default_rng(seed)
        points = rng.normal(size=(384, 16)) + 2.0 * rng.integers(0, 3, (384, 1))
        distance = np.sqrt(((points[:, None] - points[None]) ** 2).sum(-1))
        np.fill_diagonal(distance, 0.0)
        keep = (48, 64, 96, 128)[seed % 4]
        start = rng.permutation(384)[:keep].tolist()
        began = time.perf_counter()
        ours = k_medoids(distance, start)
        ours_seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        loss, reference = pam_loss(distance, start)
        seconds.append(time.perf_counter() - began)
        ratios.append(ours.loss / loss)
    return {
        "reference": reference,
        "matrices": len(ratios),
        "milliseconds": 1000 * float(np.median(ours_seconds)),
        "milliseconds_worst": 1000 * max(ours_seconds),
        "ratio_worst": max(ratios),
        "ratio_mean": float(np.mean(ratios)),
    }


def pam_loss(distance: Any, start: Sequence[int]) -> tuple[float, str]:
    """Return PAM's loss from a start, and whose PAM it is."""
    try:
        import kmedoids  # type: ignore[import-not-found]
    except ImportError:
        return plain_pam(distance, list(start)), "a plain PAM"
    found = kmedoids.pam(distance, np.array(start, dtype=np.uint64), max_iter=1000)
    return float(found.loss), f"kmedoids {getattr(kmedoids, '__version__', '')} pam".replace("  ", " ")


def plain_pam(distance: Any, medoids: list[int]) -> float:
    """Return PAM's loss: of all swaps of a medoid and another point the best one, until none helps."""
    loss = float(distance[:, medoids].min(axis=1).sum())
    while True:
        best = (loss - 1e-12, -1, -1)
        for slot in range(len(medoids)):
            others = medoids[:slot] + medoids[slot + 1 :]
            near = distance[:, others].min(axis=1)
            total = np.minimum(near[:, None], distance).sum(axis=0)
            candidate = int(total.argmin())
            if total[candidate] < best[0]:
                best = (float(total[candidate]), slot, candidate)
        if best[1] < 0:
            return loss
        loss, medoids[best[1]] = best[0], best[2]


def largest_layer(folder: Path) -> tuple[int, int]:
    """Return the bytes of the largest layer and of the largest expert."""
    from proxy.checkpoint import open_checkpoint
    from proxy.families import understand

    checkpoint = open_checkpoint(folder)
    layout = understand(checkpoint)
    layers: dict[int, int] = {}
    for name, part in layout.parts.items():
        if part.layer >= 0:
            layers[part.layer] = layers.get(part.layer, 0) + checkpoint.tensors[name].nbytes
    experts = [
        sum(checkpoint.tensors[name].nbytes for name in names.values())
        for of_layer in layout.members.values()
        for names in of_layer.values()
    ]
    return max(layers.values()), max(experts)


def say(bar: str, value: str, held: bool) -> None:
    """Print one bar."""
    print(f"{'ok  ' if held else 'MISS'} {bar}: {value}", flush=True)


def measure(folder: Path, scratch: Path, keep: int) -> None:
    """Print the bars of one checkpoint."""
    layer, expert = largest_layer(folder)
    base = child("base", folder)["peak"]
    done = child("calibrate", folder)
    over = done["peak"] - base - done["hidden"]
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    name = f"{folder.name}, {layers} layers"
    say(
        f"{name}: peak memory over the libraries' {base / 1e9:.2f} GB, less hidden states, by the largest layer",
        f"{over / 1e9:.2f} GB = {over / layer:.2f} x {layer / 1e9:.2f} GB (whole process {done['peak'] / layer:.2f} x)",
        over <= 1.3 * layer,
    )
    say(
        f"{name}: the same by the largest expert",
        f"{over / expert:.1f} x {expert / 1e6:.1f} MB",
        over <= 12 * expert,
    )
    work = done["pairs"] / done["plain_pairs"]
    say(f"{name}: routed-expert work of calibration by a plain forward's", f"{work:.2f}", work <= 1.1)
    print(
        f"     {name}: {done['seconds']:.0f} s ({done['cpu']:.0f} CPU s), {done['read'] / 1e9:.1f} GB read",
        flush=True,
    )
    if keep:
        wrote = child("write", folder, scratch / "out", keep)
        ratio = wrote["copy"] / wrote["slice"]
        say(
            f"{name}: slicing and writing by a plain copy of {wrote['bytes'] / 1e9:.1f} GB",
            f"{ratio:.2f} ({wrote['bytes'] / 1e9 / wrote['slice']:.2f} GB/s)",
            ratio >= 0.8,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the bars."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="a checkpoint of bench.real_width (qwen3)")
    parser.add_argument("--deepseek", type=Path, help="a checkpoint of bench.real_width (deepseek)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--selection", action="store_true", help="only the bar of selection")
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args(arguments)
    if options.step:
        from bench.families import quiet

        quiet()
        first = Path(options.rest[0])
        if options.step == "write":
            print(json.dumps(step_write(first, Path(options.rest[1]), int(options.rest[2]))))
        else:
            print(json.dumps({"base": step_base, "calibrate": step_calibrate}[options.step](first)))
        return 0
    chosen = selection()
    say(
        f"selection among 384 experts, {chosen['matrices']} matrices: ms a layer (median)",
        f"{chosen['milliseconds']:.0f} (worst {chosen['milliseconds_worst']:.0f})",
        chosen["milliseconds"] <= 50,
    )
    say(
        f"selection: loss by that of {chosen['reference']} from the same start",
        f"at most {chosen['ratio_worst']:.4f}, mean {chosen['ratio_mean']:.4f}",
        chosen["ratio_worst"] <= 1.005,
    )
    if options.selection:
        return 0
    from bench.real_width import fewer, make

    with TemporaryDirectory(prefix="builder-", dir=options.folder and options.folder.parent) as scratch:
        home = Path(scratch)
        folder = options.folder or make("qwen3", home / "qwen3", options.layers)
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        for count in sorted({2, layers // 2, layers}):
            part = folder if count == layers else fewer(folder, count, home / f"of-{count}")
            measure(part, home, KEEP["qwen3"] if count == layers else 0)
        if options.deepseek:
            measure(options.deepseek, home, KEEP["deepseek"])
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
