"""The machines themselves: what is cut is cut, and nothing of them outlives their maker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import network_lab
import pytest
from network_lab import LabUnavailable, Network, network
from support import is_alive, wait_until


def test_machines_have_their_own_processes_names_and_boots(machines: Network) -> None:
    names = [machine.run("hostname").stdout.strip() for machine in machines.machines.values()]
    assert names == list(machines.machines)
    boots = {machine.run("cat", "/proc/sys/kernel/random/boot_id").stdout for machine in machines.machines.values()}
    assert len(boots) == 3
    assert machines["n1"].run("sh", "-c", f"echo hello | {machines.connect} n2 cat").stdout == "hello\n"


def test_what_is_cut_gets_nothing_through_until_it_is_healed(machines: Network) -> None:
    hello = ("sh", "-c", f"echo hello | timeout 0.5 {machines.connect} n2 cat")
    machines["n2"].cut()
    assert machines["n1"].run(*hello, check=False).stdout == ""
    machines["n2"].heal()
    wait_until(lambda: machines["n1"].run(*hello, check=False).stdout == "hello\n", what="the link to be back")


def test_a_machine_that_loses_its_power_comes_back_empty_and_with_another_boot(machines: Network) -> None:
    machine = machines["n3"]
    boot = machine.run("cat", "/proc/sys/kernel/random/boot_id").stdout
    machine.run("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &")
    wait_until(lambda: machine.pids("sleep 1000"), what="it to run")
    machine.reboot()
    assert machine.pids("sleep 1000") == []
    assert machine.run("cat", "/proc/sys/kernel/random/boot_id").stdout != boot


def test_nothing_of_a_lab_outlives_a_maker_that_is_killed(machines: Network, tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from network_lab import network
with network(Path(sys.argv[1])) as lab:
    lab["n2"].run("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &")
    print(*(machine._first for machine in lab.machines.values()), flush=True)
    sys.stdin.read()
"""
    path = os.pathsep.join([str(Path(network_lab.__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as maker:
        assert maker.stdout is not None
        first = list(map(int, maker.stdout.readline().split()))
        assert len(first) == 3
        maker.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, first)), what="the machines to be gone")


def test_a_lab_that_fails_half_way_leaves_nothing(
    machines: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    power_on = network_lab.Machine.power_on

    def fail_at_the_third(machine: network_lab.Machine) -> None:
        if len(made) == 2:
            raise LabUnavailable("no more")
        power_on(machine)
        made.append(machine._first)

    monkeypatch.setattr(network_lab.Machine, "power_on", fail_at_the_third)
    with pytest.raises(LabUnavailable, match="no more"), network(tmp_path):
        raise AssertionError("it must not come to this")
    assert len(made) == 2
    assert not any(map(is_alive, made))


def test_without_root_the_reason_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabUnavailable, match="by root only"), network(tmp_path):
        pass
