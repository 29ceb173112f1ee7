"""A checkpoint that was damaged anywhere is built or refused in one line; what is built is whole."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench import families as matrix
from bench.zoo import KINDS, make
from proxy.build import build
from proxy.checkpoint import open_checkpoint
from proxy.complete import check_complete
from proxy.errors import ProxyError
from proxy.families import understand
from proxy.skeleton import Skeleton
from proxy.specs import BuildSpec
from proxy.work import work_place
from tests.fixtures import tiny_moe as tiny

FAMILIES = ("qwen3_moe", "gpt_oss", "kimi_k25", "deepseek_v4")
VALUES = [None, True, 0, 2, -1, 10**6, 10**30, 1.5, float("inf"), float("nan"), "x", "", [], [1, 2], {}, "3"]
DTYPES = [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bool]
SUFFIXES = ["x", ".weight", "_scale", "_blocks", "_packed", ".scale"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    matrix.quiet()
    home = tmp_path_factory.mktemp("zoo")
    return {kind.name: make(kind, home / kind.name) for kind in KINDS if kind.name in FAMILIES}


def places(section: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every key of a config with the section it is in."""
    for key, value in section.items():
        yield section, key
        if isinstance(value, dict):
            yield from places(value)


def damage(folder: Path, dice: random.Random) -> str:
    """Change one thing, and say what."""
    kind = dice.choice(["config", "config", "drop", "rename", "dtype", "shape", "value", "bytes", "cut"])
    file = folder / "model.safetensors"
    if kind == "config":
        config = tiny.read_config(folder)
        section, key = dice.choice(list(places(config)))
        section[key] = dice.choice(VALUES)
        (folder / "config.json").write_text(json.dumps(config))
        return f"{key} = {section[key]!r}"
    if kind in ("bytes", "cut"):
        raw = bytearray(file.read_bytes())
        place = dice.randrange(len(raw))
        if kind == "bytes":
            raw[place % 4000] = dice.randrange(256)
        file.write_bytes(raw if kind == "bytes" else raw[:place])
        return kind
    tensors = {name: tensor.clone() for name, tensor in tiny.load_all(folder).items()}
    name = dice.choice(sorted(tensors))
    tensor = tensors.pop(name)
    if kind == "rename":
        tensors[name + dice.choice(SUFFIXES)] = tensor
    elif kind == "dtype":
        tensors[name] = tensor.float().to(dice.choice(DTYPES))
    elif kind == "shape":
        tensors[name] = dice.choice(
            [tensor[:-1], tensor[None], tensor.flatten(), torch.cat([tensor, tensor])]
        ).clone()
    elif kind == "value":
        tensors[name] = tensor.float()
        tensors[name].view(-1)[-1] = dice.choice([float("nan"), float("inf"), 1e30])
    save_file(tensors, file, metadata={"format": "pt"})
    return f"{kind} {name}"


@pytest.mark.parametrize("seed", range(60))
def test_damage_is_built_whole_or_refused_in_one_line(seed, originals, tmp_path):
    dice = random.Random(seed)
    folder = shutil.copytree(originals[dice.choice(FAMILIES)], tmp_path / "o")
    what = damage(folder, dice)
    strategy = dice.choice(["first_k", "multi_view", "frequency", "reap", "merge"])
    rows = [[dice.randrange(3, 64) for _ in range(12)] for _ in range(8)]
    out = tmp_path / "p"
    try:
        build(BuildSpec(str(folder), str(out), 6, strategy), rows=rows)
    except ProxyError as error:
        assert "\n" not in str(error) and error.mend, what
        assert not out.exists() and not work_place(out).exists(), what
        return
    if json.loads((out / "proxy_manifest.json").read_text())["warnings"][0].endswith("was not checked"):
        return  # nothing is computed with this strategy, so a config that no class takes is only told
    proxy = open_checkpoint(out)
    check_complete(proxy, understand(proxy), Skeleton(proxy))
