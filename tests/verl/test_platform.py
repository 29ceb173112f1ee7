"""verl beside an importable torch_npu: it takes the machine for a Huawei one, unless it is told."""

import os
import subprocess
from pathlib import Path

import pytest

from proxy.engines.verl_own import variables
from proxy.specs import Launch

FAKE = """import types

import torch

torch.npu = types.ModuleType("torch.npu")
torch.npu.is_available = lambda: False
torch.npu.device_count = lambda: 0
"""
ASK = "from verl.plugin.platform.platform_manager import get_platform; print(type(get_platform()).__name__)"


def chosen(python, folder, ours):
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(FAKE)
    base = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "VERL_", "RAY_"))}
    env = base | ours | {"PYTHONPATH": str(folder)}
    env.pop("VERL_USE_EXTERNAL_MODULES", None)
    done = subprocess.run(
        [python, "-c", ASK], env=env, capture_output=True, text=True, check=True, cwd=folder
    )
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("platform", "found"), [(None, "PlatformNPU"), ("cuda", "PlatformCUDA"), ("npu", "PlatformNPU")]
)
def test_the_platform_is_the_one_that_was_said(verl_python, tmp_path, platform, found):
    ours = variables(Path("/run"), "entry", Launch(platform=platform)) if platform else {}
    assert chosen(verl_python, tmp_path, ours) == found
