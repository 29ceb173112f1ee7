"""The package's own ranges admit what verl's environment is pinned to: both fit into one environment."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {item.name.lower(): item for item in map(Requirement, PROJECT["dependencies"])}
PINS = [
    Requirement(line)
    for name in ("constraints.txt", "constraints-verl.txt")
    for line in (ROOT / name).read_text().splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.mark.parametrize("pin", [pin for pin in PINS if pin.name.lower() in OURS], ids=str)
def test_our_ranges_admit_the_pins_of_both_environments(pin):
    (exact,) = pin.specifier
    assert OURS[pin.name.lower()].specifier.contains(exact.version)


def test_the_verl_extra_asks_for_the_version_that_is_tested():
    wanted = {item.name: item for item in map(Requirement, PROJECT["optional-dependencies"]["verl"])}
    pinned = next(pin for pin in PINS if pin.name == "verl")
    assert wanted["verl"].specifier == pinned.specifier
