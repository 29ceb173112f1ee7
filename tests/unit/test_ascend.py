"""What is missing on an Ascend machine is named piece by piece, from files alone."""

import pytest

from diagnose.ascend import here, pieces, versions


def environment(folder, **distributions):
    site = folder / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    for name, version in distributions.items():
        (site / f"{name}-{version}.dist-info").mkdir()
    return folder


@pytest.fixture
def machine(tmp_path):
    """An A3 node on which everything is as it has to be: (root, variables, environments)."""
    root = tmp_path / "root"
    ascend = root / "usr" / "local" / "Ascend"
    for folder in (root / "dev", ascend / "driver", ascend / "ascend-toolkit" / "latest"):
        folder.mkdir(parents=True)
    for name in ("davinci_manager", "davinci0", "davinci1"):
        (root / "dev" / name).touch()
    (ascend / "driver" / "version.info").write_text("Version=25.2.1\nother=1\n")
    toolkit = ascend / "ascend-toolkit" / "latest"
    (toolkit / "version.cfg").write_text("# version\ntoolkit_installed_version=[8.3.RC1:8.3.RC1]\n")
    verl = environment(
        tmp_path / "verl",
        torch="2.7.1+cpu",
        torch_npu="2.7.1.post2",
        vllm="0.11.0+empty",
        vllm_ascend="0.11.0rc3",
    )
    return root, {"ASCEND_HOME_PATH": str(toolkit)}, {"verl": verl}


def named(machine):
    root, variables, environments = machine
    return {piece.name: piece for piece in pieces(environments, root, variables)}


def test_a_whole_machine_has_nothing_missing(machine):
    found = named(machine)
    assert all(piece.good and not piece.mend for piece in found.values()), found
    assert found["driver"].detail == "25.2.1, 2 devices"
    assert "8.3.RC1" in found["CANN"].detail
    assert "torch_npu 2.7.1.post2" in found["torch pair (verl)"].detail


def test_no_driver(machine):
    (machine[0] / "usr/local/Ascend/driver/version.info").unlink()
    assert "npu-smi info" in named(machine)["driver"].mend


def test_a_container_without_devices(machine):
    (machine[0] / "dev" / "davinci_manager").unlink()
    found = named(machine)["driver"]
    assert not found.good and "/dev/davinci_manager" in found.detail and "--device" in found.mend


def test_cann_that_is_not_sourced_and_cann_that_is_not_there(machine):
    root, variables, _ = machine
    variables.clear()
    found = named(machine)["CANN"]
    assert not found.good and "set_env.sh" in found.mend
    (root / "usr/local/Ascend/ascend-toolkit/latest/version.cfg").unlink()
    (root / "usr/local/Ascend/ascend-toolkit/latest").rmdir()
    (root / "usr/local/Ascend/ascend-toolkit").rmdir()
    assert "install CANN" in named(machine)["CANN"].mend


@pytest.mark.parametrize(
    ("distributions", "piece", "detail", "mend"),
    [
        (
            {"torch": "2.8.0", "torch_npu": "2.7.1"},
            "torch pair (verl)",
            "don't belong together",
            "torch_npu==2.8.0",
        ),
        ({"torch": "2.8.0"}, "torch pair (verl)", "torch_npu is missing", "torch_npu==2.8.0"),
        ({"vllm": "0.11.0"}, "vLLM pair (verl)", "vllm-ascend missing", "vllm-ascend==0.11.0"),
        ({}, "vLLM pair (verl)", "no rollout on an NPU", "vllm-ascend"),
        (
            {"vllm": "0.11.0", "vllm_ascend": "0.9.1"},
            "vLLM pair (verl)",
            "don't belong together",
            "vllm==0.9.1",
        ),
    ],
)
def test_a_pair_that_does_not_match(machine, tmp_path, distributions, piece, detail, mend):
    root, variables, _ = machine
    other = environment(tmp_path / "other", **distributions)
    found = named((root, variables, {"verl": other}))[piece]
    assert not found.good and detail in found.detail and mend in found.mend


def test_other_machines_are_not_asked(tmp_path):
    plain = environment(tmp_path / "env", torch="2.13.0")
    assert not here({"diagnose": plain}, tmp_path, {})
    assert here({"diagnose": environment(tmp_path / "npu", torch_npu="2.13.0")}, tmp_path, {})
    assert here({}, tmp_path, {"ASCEND_HOME_PATH": "/x"})
    assert versions(plain) == {"torch": "2.13.0"}
