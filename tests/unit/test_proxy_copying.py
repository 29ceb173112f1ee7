"""Copying: the same bytes whatever moves them, NaN found wherever it hides, full disks met for real."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from proxy import copying
from proxy.checkpoint import TensorInfo, check_finite
from proxy.copying import copy_span, spans
from proxy.errors import CheckpointError
from tests.fixtures import tiny_moe as tiny

TYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@pytest.mark.parametrize("dtype", TYPES)
def test_every_value_of_a_narrow_type_is_judged_as_torch_does(dtype):
    kind = TYPES[dtype]
    width = kind.itemsize
    codes = torch.arange(1 << (8 * width), dtype=torch.int64).to(torch.uint8 if width == 1 else torch.int16)
    finite = codes.view(kind).float().isfinite()
    info = TensorInfo("x", "f", dtype, (1,), 0, width)
    check_finite(codes[finite].numpy().tobytes(), info)
    assert not finite.all()
    for code in codes[~finite]:
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            check_finite(code.numpy().tobytes(), info)


@pytest.mark.parametrize("kind, dtype", [("<f4", "F32"), ("<f8", "F64")])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_single_bad_value_is_found_anywhere(kind, dtype, value):
    values = np.linspace(-3e38, 3e38, 200_001).astype(kind)  # longer than what is looked at in one go
    info = TensorInfo("x", "f", dtype, values.shape, 0, values.nbytes)
    check_finite(values.tobytes(), info)
    for place in (0, 131_071, 131_072, 200_000):
        bad = values.copy()
        bad[place] = value
        with pytest.raises(CheckpointError):
            check_finite(bad.tobytes(), info)


def test_neighbours_are_one_stretch():
    info = TensorInfo("x", "f", "F32", (4, 2), 100, 32)
    after = TensorInfo("y", "f", "F32", (2,), 132, 8)
    assert list(spans([(info, (0, 1, 3), 4), (after, None, 1)])) == [(100, 16), (124, 16)]
    assert list(spans([(info, (2, 1), 4)])) == [(116, 8), (108, 8)]
    assert list(spans([])) == []


@pytest.mark.parametrize("by_kernel", [True, False])
def test_both_ways_of_copying_agree(by_kernel, tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "_BY_KERNEL", by_kernel and copying._BY_KERNEL)
    monkeypatch.setattr(copying, "AT_ONCE", 1000)
    raw = np.random.default_rng(0).bytes(10_000)
    (tmp_path / "a").write_bytes(raw)
    with (
        (tmp_path / "a").open("rb", buffering=0) as source,
        (tmp_path / "b").open("wb", buffering=0) as target,
    ):
        copying.write_all(target, b"head")
        copy_span(source, target, 123, 4567, lambda: True)
        copy_span(source, target, 0, 10, lambda: True)
        with pytest.raises(CheckpointError, match="ends early"):
            copy_span(source, target, 9_990, 11, lambda: True)
    assert (tmp_path / "b").read_bytes() == b"head" + raw[123:4690] + raw[:10] + raw[9_990:]


BUILD = """
import os, resource, shutil, sys
from types import SimpleNamespace
from proxy.build import build
from proxy.specs import BuildSpec
from proxy.worker import one_line
source, out, limit = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
shutil.disk_usage = lambda _: SimpleNamespace(free=1 << 40)  # others fill the disk after it was asked for room
try:
    build(BuildSpec(source, out, 4, strategy="first_k"))
except ValueError as error:
    print(one_line(error), sorted(os.listdir(os.path.dirname(out))))
"""


def build_elsewhere(original: Path, out: Path, limit: int = 0, before: tuple[str, ...] = ()) -> str:
    """Build in a process of its own, in which the disk ends early; return its last words, and what it left."""
    command = [*before, sys.executable, "-c", BUILD, str(original), str(out), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="the system has no such limit")
def test_a_file_that_cannot_grow_leaves_nothing(tmp_path):
    said = build_elsewhere(tiny.make_qwen(tmp_path / "o"), tmp_path / "p", 50_000)
    assert "File too large" in said and "free some space" in said and said.endswith(" ['o']")


def test_a_disk_that_fills_up_leaves_nothing(tmp_path):
    original, disk = tiny.make_qwen(tmp_path / "o"), tmp_path / "disk"
    disk.mkdir()
    mounted = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=64k none "{disk}" && exec "$@"', "sh")
    if not shutil.which("unshare") or subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("a small disk can't be mounted here")
    said = build_elsewhere(original, disk / "p", before=mounted)
    assert "No space left on device" in said and "free some space" in said and said.endswith(" []")
