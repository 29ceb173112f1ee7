"""Where verl's own environment is, and the packages in it (torch-free)."""

from __future__ import annotations

import os
import shutil
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
    # The link is not followed: it is the folder around it that makes an environment of an interpreter.
    if not any((python.parent.parent / "lib").glob("python3*/site-packages/verl/version/version")):
        raise NoVerl(f"{python} has no verl")
    return python.absolute()
