import os
from pathlib import Path

import pytest

from proxy.engines.verl_env import NoVerl, find_python


@pytest.fixture(scope="session", autouse=True)
def verl_python():
    """These tests never pass without verl: a run of them that skipped everything would look like a success."""
    try:
        return find_python()
    except NoVerl as error:
        pytest.exit(f"{error}; {error.mend}", returncode=2)


def below(root):
    """Return the processes below one, as (pid, start time)."""
    parents, starts = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)], starts[int(entry.name)] = int(fields[1]), fields[19]
    found, level = set(), {root}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= {(pid, starts[pid]) for pid in level}
    return found


def alive(processes):
    """Return those of the processes that still run."""
    found = set()
    for pid, start in processes:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[19] == start and fields[0] != "Z":
            found.add((pid, start))
    return found


@pytest.fixture(scope="session", autouse=True)
def path_of_workers():
    """Workers keep the working folder off their module path; the broken injection is looked up there."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
