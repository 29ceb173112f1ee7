import pytest

from tests.pipeline.lab import make_lab, wait_for


@pytest.fixture
def lab(tmp_path):
    lab = make_lab(tmp_path)
    yield lab
    wait_for(lambda: lab.processes() == [])  # nothing is left behind


@pytest.fixture(scope="session")
def done(tmp_path_factory):
    """A completed run, with all outputs; read only."""
    lab = make_lab(tmp_path_factory.mktemp("done"))
    files = {name: lab.home / "reports" / f"answer.{name}" for name in ("junit", "html", "markdown")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    lab.code, lab.stdout, lab.stderr = lab.run("run", "playbook.yaml", "--out", lab.out, "--json", *options)
    lab.files = files
    assert lab.processes() == []
    return lab
