"""The builder's bars: copying, memory, routed work, selection. Ratios, each taken within one run.

``python -m bench.builder`` uses a Qwen3-30B-A3B-shaped checkpoint made by `bench.real_width` (``--folder``, or a
temporary one of ``--layers`` layers); ``--deepseek FOLDER`` adds the FP8 one. Every measured step is a process of
its own, so that its peak memory is its own. ``--quick``, the form of ``make bench``, takes minutes: 4 layers, 256
tokens, 20 matrices, and needs 7 GB of disk for that long. ``--selection`` needs nothing but arithmetic; with a
``kmedoids`` package at hand (a scratch environment: the project never imports it) its PAM is the reference,
otherwise a plain PAM written out here.
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
    from proxy.memory import peak_memory

    return peak_memory()


def token_rows(folder: Path, tokens: int, length: int = 128) -> list[list[int]]:
    """Return random calibration rows."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocabulary, length).tolist() for _ in range(tokens // length)]


def step_tiny(folder: Path, out: Path) -> dict[str, Any]:
    """Make a tiny checkpoint of the same family."""
    from bench.zoo import KINDS, make

    family = json.loads((folder / "config.json").read_text())["model_type"]
    make(next(kind for kind in KINDS if kind.model_type == family), out)
    return {}


def step_build(folder: Path, out: Path, keep: int, tokens: int) -> dict[str, Any]:
    """Measure a whole build by the paper's method: calibration, choice, slicing, hashes."""
    import torch

    from proxy.build import build
    from proxy.checkpoint import open_checkpoint
    from proxy.specs import BuildSpec

    torch.set_num_threads(1)
    config = open_checkpoint(folder).config
    length = min(128, tokens, config["max_position_embeddings"])
    began, cpu = time.monotonic(), time.process_time()
    stages: list[tuple[str, float]] = []
    build(
        BuildSpec(str(folder), str(out), keep),
        lambda text: stages.append((text, time.monotonic() - began)),
        rows=token_rows(folder, tokens, length),
    )
    chosen = next(at for text, at in stages if text.startswith("kept "))
    shutil.rmtree(out)
    return {
        "peak": peak(),
        "seconds": time.monotonic() - began,
        "calibration": chosen,
        "cpu": time.process_time() - cpu,
        "hidden": 4 * tokens * config["hidden_size"],
    }


def step_work(folder: Path) -> dict[str, Any]:
    """Count the pairs of token and expert that calibration computes, and those of a plain forward."""
    import torch

    from proxy.checkpoint import open_checkpoint
    from proxy.families import understand
    from proxy.walk import Pass

    torch.set_num_threads(1)
    checkpoint = open_checkpoint(folder)
    layout = understand(checkpoint)
    rows = token_rows(folder, 256)
    walk = Pass(checkpoint, layout, rows)
    walk.run()
    return {"pairs": walk.pairs, "plain": sum(map(len, rows)) * layout.top_k * len(layout.moe_layers)}


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


def selection(matrices: int) -> dict[str, Any]:
    """Measure the choice among 384 experts: seconds a layer, and its loss against PAM's from the same start."""
    from proxy.selection import k_medoids

    ratios, ours_seconds = [], []
    reference = "a plain PAM"
    for seed in range(matrices):
        rng = np.random.default_rng(seed)
        points = rng.normal(size=(384, 16)) + 2.0 * rng.integers(0, 3, (384, 1))
        distance = np.sqrt(((points[:, None] - points[None]) ** 2).sum(-1))
        np.fill_diagonal(distance, 0.0)
        keep = (48, 64, 96, 128)[seed % 4]
        start = rng.permutation(384)[:keep].tolist()
        began = time.process_time()  # others may use the machine
        ours = k_medoids(distance, start)
        ours_seconds.append(time.process_time() - began)
        loss, reference = pam_loss(distance, start)
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


def measure(folders: Sequence[Path], scratch: Path, keep: int, tokens: int) -> None:
    """Print the bars of one checkpoint, given with fewer and with more layers."""
    folder = folders[-1]
    layer, expert = largest_layer(folder)
    child("tiny", folder, scratch / "tiny")
    base = child("build", scratch / "tiny", scratch / "out", 6, 64)[
        "peak"
    ]  # the libraries, and the builder's code
    for part in folders:
        done = child("build", part, scratch / "out", 16, tokens)
        over = done["peak"] - base - done["hidden"]
        layers = json.loads((part / "config.json").read_text())["num_hidden_layers"]
        name = f"{folder.name}, {layers} layers"
        say(
            f"{name}: a build's peak memory over a tiny build's {base / 1e9:.2f} GB, less hidden states, "
            "by the largest layer",
            f"{over / 1e9:.3f} GB = {over / layer:.2f} x {layer / 1e9:.2f} GB",
            over <= 1.3 * layer,
        )
        say(
            f"{name}: the same by the largest expert",
            f"{over / expert:.1f} x {expert / 1e6:.1f} MB",
            over <= 12 * expert,
        )
        print(
            f"     {name}: {done['seconds']:.0f} s ({done['cpu']:.0f} CPU s), of which {done['calibration']:.0f} s "
            f"calibration on {tokens} tokens; peak memory {done['peak'] / 1e9:.2f} GB",
            flush=True,
        )
    pairs = child("work", folder)  # the last layer needs no experts, so fewer layers would look better
    work = pairs["pairs"] / pairs["plain"]
    say(f"{folder.name}: routed-expert work of calibration by a plain forward's", f"{work:.2f}", work <= 1.1)
    wrote = child("write", folders[0], scratch / "out", keep)
    ratio = wrote["copy"] / wrote["slice"]
    say(
        f"{folder.name}: slicing and writing by a plain copy of {wrote['bytes'] / 1e9:.1f} GB",
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
    parser.add_argument("--tokens", type=int, default=1024, help="calibration tokens")
    parser.add_argument("--quick", action="store_true", help="4 layers, 256 tokens, 20 matrices")
    parser.add_argument("--matrices", type=int, default=100, help="matrices of the bar of selection")
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.tokens, options.matrices = 4, 256, 20
    if options.step:
        from bench.families import quiet

        quiet()
        first, *more = options.rest
        places = [Path(first), *map(Path, more[:1])]
        step: Any = {"tiny": step_tiny, "build": step_build, "work": step_work, "write": step_write}[
            options.step
        ]
        print(json.dumps(step(*places, *map(int, more[1:]))))
        return 0
    chosen = selection(options.matrices)
    say(
        f"selection among 384 experts, {chosen['matrices']} matrices: CPU ms a layer (median)",
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
        parts = [
            folder if count == layers else fewer(folder, count, home / f"of-{count}")
            for count in sorted({min(2, layers), (layers + 1) // 2, layers})
        ]
        measure(parts, home, KEEP["qwen3"], options.tokens)
        if options.deepseek:
            measure([options.deepseek], home, KEEP["deepseek"], options.tokens)
    return 0


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:  # numpy reads it when it is imported
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "bench.builder", *sys.argv[1:]])
    sys.exit(main())
