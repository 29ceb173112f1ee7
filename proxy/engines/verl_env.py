"""Where verl's own environment is, and the packages in it (torch-free)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

VARIABLE = "DIAGNOSE_VERL_PYTHON"
FOLDER = ".venv-verl"
TESTED = "0.9.1"
"""Version of verl that the plugin's hooks were written for."""
MEND = f"make verl-env, or name its interpreter: engine.python in the playbook, or {VARIABLE}"


class NoVerl(ValueError):
    """There is no environment with verl; `mend` says how to get one."""

    mend = MEND


def candidates() -> list[Path]:
    """Return where verl's interpreter is looked for when none is named: environment variable, then the project."""
    named = os.environ.get(VARIABLE)
    project = Path(__file__).resolve().parents[2]
    return [Path(named)] if named else [home / FOLDER / "bin" / "python" for home in (project, Path.cwd())]


def find_python(named: str = "") -> Path:
    """Return the interpreter of verl's environment.

    Args:
        named: What the playbook says, "" for nothing.

    Raises:
        NoVerl: There is no such file, or no verl beside it.
    """
    places = [Path(named).expanduser()] if named else candidates()
    if named and "/" not in named:
        places = [Path(shutil.which(named) or named)]
    python = next((place for place in places if os.access(place, os.X_OK)), None)
    if python is None:
        raise NoVerl(f"the verl engine has no interpreter: {places[0]} is not there")
    if not version_of(python):
        raise NoVerl(f"{python} has no verl")
    return python.absolute()


_ASK = """
import importlib.util, pathlib
spec = importlib.util.find_spec("verl")
for home in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
    file = pathlib.Path(home) / "version" / "version"
    print(file.read_text().strip() if file.is_file() else "unknown")
"""


def version_of(python: Path) -> str:
    """Return the version of verl that an interpreter has, without importing it; "" for none.

    An installation from sources or in a container's system Python lies elsewhere than a wheel in an environment: the
    interpreter is asked then.
    """
    # The link is not followed: it is the folder around it that makes an environment of an interpreter.
    for file in (python.parent.parent / "lib").glob("python3*/site-packages/verl/version/version"):
        return file.read_text().strip()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        asked = subprocess.run(
            [str(python), "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd="/",
            env=kept,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip().partition("\n")[0]
