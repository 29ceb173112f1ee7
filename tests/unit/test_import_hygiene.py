"""What must not be imported: the command line starts in a blink, and nothing on this side ever loads torch."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "scipy", "textual", "pydantic")


def loaded(code, *arguments):
    """Return the heavy packages that are in sys.modules after some code, run in a process of its own."""
    probe = f"import json, sys\n{code}\nprint('\\n' + json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", probe, *arguments], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


CLI = "from diagnose.cli import invoke\nassert invoke(sys.argv[1:]) == 0"


def test_help_loads_nothing_heavy():
    assert loaded(CLI, "--help") == []


@pytest.mark.parametrize("command", [["run", "--help"], ["faults"], ["faults", "stale_weights", "--json"]])
def test_light_commands_load_nothing_heavy_of_their_own(command):
    # pydantic comes with the option parser as soon as it reads a value.
    assert set(loaded(CLI, *command)) <= {"pydantic"}


@pytest.mark.parametrize(
    "code",
    [
        "import diagnose.scoring, diagnose.pipeline, diagnose.runner, diagnose.prepare",
        "import diagnose.tui.app, diagnose.tui.screens.run",
        "import proxy.api, proxy.specs, proxy.embedded, proxy.engines.base, taxonomy.registry",
        "import diagnose.lab, diagnose.jobs, diagnose.doctor",
    ],
)
def test_no_torch_on_this_side(code):
    assert not {"torch", "transformers"} & set(loaded(code))


def test_the_face_of_the_proxy_package_is_light():
    assert loaded("import proxy.api, proxy.specs, proxy.embedded, proxy.engines.base") == []
