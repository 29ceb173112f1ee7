"""Accelerators from outside: found by their files, lent to one run at a time."""

import threading

import pytest

from proxy.engines import leases, platforms


def dev(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_a_machine_is_what_its_device_files_say(tmp_path):
    assert platforms.detect({}, tmp_path / "nothing") == "cpu"
    cuda = dev(tmp_path / "cuda", "nvidiactl", "nvidia0", "nvidia10", "nvidia2", "nvidia-uvm")
    assert platforms.detect({}, cuda) == "cuda"
    assert platforms.devices("cuda", {}, cuda) == ["0", "2", "10"]
    npu = dev(tmp_path / "npu", "davinci_manager", "davinci0", "davinci1")
    assert platforms.detect({}, npu) == "npu"


def test_what_is_made_invisible_does_not_count(tmp_path):
    npu = dev(tmp_path / "npu", "davinci0", "davinci1", "davinci2")
    assert platforms.devices("npu", {"ASCEND_RT_VISIBLE_DEVICES": "2, 0"}, npu) == ["2", "0"]
    assert platforms.detect({"ASCEND_RT_VISIBLE_DEVICES": ""}, npu) == "cpu"


def test_runs_side_by_side_never_share_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(platforms, "devices", lambda _platform: ["0", "1", "2", "3"])
    with leases.hold("cuda", 2, tmp_path) as first, leases.hold("cuda", 2, tmp_path) as second:
        assert sorted(first + second) == ["0", "1", "2", "3"]
        waited, third = threading.Event(), []

        def later():
            with leases.hold("cuda", 2, tmp_path, wait=lambda: waited.set() or waited.wait(0.01)) as found:
                third.extend(found)

        thread = threading.Thread(target=later)
        thread.start()
        assert waited.wait(5) and not third
    thread.join(5)
    assert len(third) == 2


def test_too_few_devices_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(platforms, "devices", lambda _platform: ["0"])
    with (
        pytest.raises(leases.TooFew, match=r"takes 2 accelerators \(cuda\), this machine has 1"),
        leases.hold("cuda", 2),
    ):
        pass
    with leases.hold("cpu", 0, tmp_path) as none:
        assert none == ()
