"""Samples of the node's load."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gpusched.gpu.host import PsutilHost, machine_identity
from gpusched.model.settings import NodeSettings

MIB = 1 << 20
Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")


def test_a_real_sample_is_sane() -> None:
    host = PsutilHost(NodeSettings())
    first, second = host.read(), host.read()
    assert first.name == socket.gethostname().split(".")[0]
    assert first.cpus == len(os.sched_getaffinity(0))
    assert 0 < first.mem_available_mib <= first.mem_total_mib
    assert first.boot_id == second.boot_id != ""
    assert (first.cpu_fraction, first.disk_mib_s, first.net_mib_s) == (None, None, None)
    assert second.net_mib_s is not None
    assert second.net_mib_s >= 0


def test_two_names_of_a_machine_have_one_identity_and_no_two_machines_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    mine = machine_identity(str(tmp_path))
    assert len(mine) == 32
    assert PsutilHost(NodeSettings(name="n2"), folder=str(tmp_path)).read().identity == mine
    assert PsutilHost(NodeSettings(name="n3"), folder=str(tmp_path)).read().identity == mine
    assert PsutilHost(NodeSettings()).read().identity == ""
    # Nodes that are tried on one machine have files of their own.
    assert machine_identity(str(other)) != mine
    assert machine_identity(str(tmp_path / "none")) == ""
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "container")
        assert machine_identity(str(tmp_path)) != mine


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_machines_that_share_a_home_are_told_apart_by_boot_and_by_network(tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("5b4f0c4e-0000-4000-8000-000000000000\n")
    code = f"from gpusched.gpu.host import machine_identity; print(machine_identity({str(tmp_path)!r}))"

    def identity(*within: str, before: str = "") -> str:
        words = [*within, "sh", "-c", f'{before} exec "$@"', "sh", sys.executable, "-c", code]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no namespaces here: {done.stderr.strip()}")
        return done.stdout.strip()

    clone = identity("unshare", "--mount", before=f"mount --bind {boot} /proc/sys/kernel/random/boot_id &&")
    found = [identity(), clone, identity("unshare", "--net")]
    assert found[0] == machine_identity(str(tmp_path)) == identity("unshare", "--mount")
    assert len(set(found)) == 3


def test_the_name_can_be_set() -> None:
    assert PsutilHost(NodeSettings(name="gpu-box")).read().name == "gpu-box"


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Counters that the test moves; `now` is the clock."""
    state: dict[str, Any] = {
        "now": 0.0,
        "cpu": Times(100.0, 0.0, 50.0, 800.0, 50.0, 0.0, 0.0, 0.0, 20.0, 0.0),
        "disk": SimpleNamespace(read_bytes=0, write_bytes=0),
        "net": {"lo": 0, "eth0": 0},
    }
    monkeypatch.setattr(psutil, "cpu_times", lambda: state["cpu"])
    monkeypatch.setattr(psutil, "disk_io_counters", lambda **options: state["disk"])
    monkeypatch.setattr(
        psutil,
        "net_io_counters",
        lambda **options: {
            name: SimpleNamespace(bytes_sent=count, bytes_recv=0) for name, count in state["net"].items()
        },
    )
    return state


def host_of(counters: dict[str, Any]) -> PsutilHost:
    """A host on the counters' clock, read once."""
    host = PsutilHost(NodeSettings(), monotonic=lambda: counters["now"])
    host.read()
    return host


def test_rates_count_from_the_previous_call(counters: dict[str, Any]) -> None:
    host = host_of(counters)
    counters["now"] = 2.0
    counters["cpu"] = Times(101.0, 0.0, 51.0, 805.0, 51.0, 0.0, 0.0, 0.0, 20.0, 0.0)
    counters["disk"] = SimpleNamespace(read_bytes=6 * MIB, write_bytes=2 * MIB)
    counters["net"] = {"lo": 900 * MIB, "eth0": 5 * MIB}
    found = host.read()
    assert found.cpu_fraction == pytest.approx(2 / 8)
    assert found.disk_mib_s == pytest.approx(4.0)
    assert found.net_mib_s == pytest.approx(2.5)
    counters["now"] = 3.0
    assert host.read().disk_mib_s == 0


def test_time_of_guests_is_not_counted_twice(counters: dict[str, Any]) -> None:
    host = host_of(counters)
    counters["now"] = 1.0
    counters["cpu"] = Times(102.0, 0.0, 50.0, 802.0, 50.0, 0.0, 0.0, 0.0, 22.0, 0.0)
    assert host.read().cpu_fraction == pytest.approx(0.5)


def test_a_removed_device_makes_no_negative_rate(counters: dict[str, Any]) -> None:
    counters["net"] = {"lo": 0, "eth0": 50 * MIB, "eth1": 50 * MIB}
    host = host_of(counters)
    counters["now"], counters["net"] = 1.0, {"lo": 0, "eth0": 50 * MIB}
    assert host.read().net_mib_s == 0


def test_a_machine_without_disks_has_no_rate(counters: dict[str, Any]) -> None:
    host = host_of(counters)
    counters["now"], counters["disk"] = 1.0, None
    assert host.read().disk_mib_s is None


def test_two_calls_at_one_instant_have_no_rate(counters: dict[str, Any]) -> None:
    assert host_of(counters).read().cpu_fraction is None


def test_virtual_disks_count_only_without_others(counters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/sys/class/net/eth0/device" or real(path))
    counters["net"] = {"lo": 0, "eth0": 0, "docker0": 0}
    host = host_of(counters)
    counters["now"], counters["net"] = 1.0, {"lo": 0, "eth0": MIB, "docker0": MIB}
    assert host.read().net_mib_s == pytest.approx(1.0)
    counters["net"] = {"lo": 0, "docker0": 0}
    host = host_of(counters)
    counters["now"], counters["net"] = 2.0, {"lo": 0, "docker0": MIB}
    assert host.read().net_mib_s == pytest.approx(1.0)
