"""Device rules: the program against what it is to say, run by a small machine for the few instructions it has."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.engine.linux import device_rule as rules
from gpusched.engine.linux import guard

BLOCK, CHAR = 1, 2
CTL, MODESET = 255, 254


def runs(code: bytes, major: int, minor: int, *, kind: int = CHAR, uid: int = 1000) -> bool:
    """What the program answers; it must end, and never jump out of itself."""
    device = {0: kind | 6 << 16, 4: major, 8: minor}
    registers: dict[int, object] = {1: device}
    at = 0
    for _ in range(len(code)):
        op, pair, off, imm = struct.unpack_from("<BBhi", code, at * 8)
        dst, src = pair & 15, pair >> 4
        at += 1
        if op == 0x95:
            return bool(registers[0])
        if op == 0x61:
            registers[dst] = registers[src][off]  # type: ignore[index]
        elif op == 0x57:
            registers[dst] = registers[dst] & imm  # type: ignore[operator]
        elif op == 0xB7:
            registers[dst] = imm
        elif op == 0xBF:
            registers[dst] = registers[src]
        elif op == 0xBC:
            registers[dst] = registers[src] & 0xFFFFFFFF  # type: ignore[operator]
        elif op == 0x85:
            assert imm == 15
            # The helper leaves nothing in the registers of its arguments; the group is in the high half.
            registers = {0: 1000 << 32 | uid, 6: registers[6]}
        elif op == 0x15:
            at += off if registers[dst] == imm else 0
        elif op == 0x55:
            at += off if registers[dst] != imm else 0
        else:
            raise AssertionError(f"unknown instruction {op:#x}")
    raise AssertionError("it does not end")


@given(st.sets(st.integers(0, 15), max_size=8), st.integers(0, 255))
def test_a_job_opens_its_own_gpus_and_shared_devices(own: set[int], minor: int) -> None:
    code = rules.program(rules.job_rule(own, (), {}, {}))
    expected = minor in own or (bool(own) and minor in (CTL, MODESET))
    assert runs(code, 195, minor) is expected
    # Whoever else has such a number.
    assert runs(code, 195, minor, kind=BLOCK)
    assert runs(code, 1, minor)


def test_device_numbers_assigned_at_driver_load_are_read() -> None:
    majors = {"nvidia-uvm": 510, "nvidia-caps": 235, "nvidia-nvswitch": 511}
    gpu = rules.program(rules.job_rule([2], [5, 6], majors, {}))
    assert [runs(gpu, 510, 0), runs(gpu, 235, 5), runs(gpu, 235, 6), runs(gpu, 235, 1)] == [True, True, True, False]
    none = rules.program(rules.job_rule([], [], majors, {}))
    assert [runs(none, 510, 0), runs(none, 235, 5), runs(none, 195, CTL)] == [False, False, False]
    assert runs(none, 511, 0)


def test_render_nodes_of_other_nvidia_gpus_alone_are_closed() -> None:
    code = rules.program(rules.job_rule([1], [], {}, {128: False, 129: True}))
    assert [runs(code, 226, minor) for minor in (128, 129, 130)] == [False, True, True]


def test_the_guard_allows_driver_queries_and_root() -> None:
    code = rules.program(rules.guard_rule({"nvidia-caps": 235}), spares_root=True)
    assert [runs(code, 195, minor) for minor in (0, 7, CTL, MODESET)] == [False, False, True, True]
    assert not runs(code, 235, 1)
    assert runs(code, 1, 3)
    assert all(runs(code, 195, minor, uid=0) for minor in (0, 7))
    # A uid whose low half is zero is not root's.
    assert not runs(code, 195, 0, uid=1 << 16)


def test_majors_are_read_from_proc(tmp_path: Path) -> None:
    path = tmp_path / "devices"
    path.write_text(
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n235 nvidia-caps\n510 nvidia-uvm\n\n"
        "Block devices:\n510 nvidia-none\n"
    )
    assert rules.driver_majors(str(path)) == {"nvidia-caps": 235, "nvidia-uvm": 510}
    assert rules.driver_majors(str(tmp_path / "none")) == {}


def test_nodes_of_mig_instances_are_read_from_proc(tmp_path: Path) -> None:
    folder = tmp_path / "driver" / "nvidia" / "capabilities" / "gpu0" / "mig" / "gi3"
    (folder / "ci0").mkdir(parents=True)
    (folder / "access").write_text("DeviceFileMinor: 30\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    (folder / "ci0" / "access").write_text("DeviceFileMinor: 31\nDeviceFileMode: 292\n")
    assert rules.mig_caps([(0, 3, 0)], str(tmp_path)) == [30, 31]
    assert rules.mig_caps([(1, 3, 0)], str(tmp_path)) == []


def test_render_nodes_are_matched_to_gpus_by_bus_address(tmp_path: Path) -> None:
    sys, proc = tmp_path / "sys", tmp_path / "proc"
    for at, (name, minor, vendor, bus) in enumerate(
        [
            ("renderD128", 128, "0x10de", "0000:01:00.0"),
            ("renderD129", 129, "0x10de", "0000:41:00.0"),
            ("renderD130", 130, "0x1002", "0000:51:00.0"),
        ]
    ):
        device = sys / "devices" / bus
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        node = sys / "class" / "drm" / name
        node.mkdir(parents=True)
        (node / "dev").write_text(f"226:{minor}\n")
        (node / "device").symlink_to(device)
        facts = proc / "driver" / "nvidia" / "gpus" / bus
        facts.mkdir(parents=True)
        # The driver numbers them the other way round.
        (facts / "information").write_text(f"Model: \t A100\nDevice Minor: \t {1 - at}\n")
    (sys / "class" / "drm" / "card0-DP-1").mkdir()
    assert rules.drm_nodes([0], str(sys), str(proc)) == {128: False, 129: True}
    assert rules.drm_nodes([], str(tmp_path / "none"), str(proc)) == {}


@pytest.mark.parametrize(
    ("unit", "folder"),
    [
        ("user.slice", "user.slice"),
        ("user-1000.slice", "user.slice/user-1000.slice"),
        ("cron.service", "system.slice/cron.service"),
        ("getty@tty1.service", "system.slice/system-getty.slice/getty@tty1.service"),
    ],
)
def test_cgroups_of_units_are_found(unit: str, folder: str) -> None:
    assert guard.folder_of(unit) == f"/sys/fs/cgroup/{folder}"


def test_a_restarted_service_is_no_longer_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.cgroup, "MOUNT", str(tmp_path))
    folder = tmp_path / "system.slice" / "cron.service"
    folder.mkdir(parents=True)
    marks = tmp_path / "marks"
    marks.mkdir()
    assert guard.guarded(["cron.service", "none.service"], str(marks)) == ()
    (marks / "cron.service").write_text(str(folder.stat().st_ino))
    (marks / "none.service").write_text("")
    assert guard.guarded(["cron.service", "none.service"], str(marks)) == ("cron.service",)
    folder.rename(tmp_path / "old")
    folder.mkdir()
    assert guard.guarded(["cron.service"], str(marks)) == ()
