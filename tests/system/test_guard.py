"""The guard, on a slice of the test's own, and what a job can do without it."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator

import pytest
from limited_runs import LET_THROUGH, PATIENCE_S, PYTHON, REFUSED, REPORTS_OPENING, USER, LimitedBench
from support import wait_until

from gpusched.engine.linux import guard

SLICE = "gpusched_test.slice"
NEEDS_SYSTEMD = pytest.mark.skipif(not os.path.isdir("/run/systemd/system"), reason="PID 1 is not systemd")
PERSON = os.environ.get("GPUSCHED_TEST_USER", "alice")
"""Whose own service manager is started for the test."""


def has_person() -> bool:
    try:
        pwd.getpwnam(PERSON)
    except KeyError:
        return False
    return True


def said_below(unit: str, nodes: list[str], user: str) -> list[str]:
    """What a process of a user in this slice can open."""
    argv = ["systemd-run", "-q", "--wait", "--pipe", "--collect", f"--slice={unit}", "-p", f"User={user}"]
    done = subprocess.run(
        [*argv, PYTHON, "-c", REPORTS_OPENING, *nodes], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    return [line.partition(": ")[2] for line in done.stdout.splitlines()]


@pytest.fixture
def own_slice() -> Iterator[str]:
    """A slice that is there until the test ends."""
    # Nothing in it is needed for a slice to have a control group, but somebody must start it.
    subprocess.run(["systemctl", "start", SLICE], check=True)
    yield SLICE
    guard.take_off(SLICE)
    subprocess.run(["systemctl", "stop", SLICE], check=True)
    # Settings of this boot outlive the slice, and the next run of these tests would start from them.
    subprocess.run(["systemctl", "revert", SLICE], check=True)


@NEEDS_SYSTEMD
def test_the_guard_blocks_users_and_spares_root_and_driver_control(own_slice: str, gpu_nodes: list[str]) -> None:
    assert guard.is_on(own_slice) is False
    assert said_below(own_slice, gpu_nodes, USER) == [LET_THROUGH] * 4
    assert guard.put_on(own_slice) is True
    assert said_below(own_slice, gpu_nodes, USER) == [REFUSED, REFUSED, REFUSED, LET_THROUGH]
    assert said_below(own_slice, gpu_nodes, "root") == [LET_THROUGH] * 4
    assert guard.guarded([own_slice]) == (own_slice,)
    # Others are not touched by it.
    assert said_below("system.slice", gpu_nodes, USER) == [LET_THROUGH] * 4


@NEEDS_SYSTEMD
def test_the_guard_is_applied_once_and_removed_completely(own_slice: str, gpu_nodes: list[str]) -> None:
    assert [guard.put_on(own_slice) for _ in range(3)] == [True, False, False]
    assert guard.is_on(own_slice) is True
    assert guard.take_off(own_slice) is True
    assert (guard.is_on(own_slice), guard.guarded([own_slice])) == (False, ())
    assert said_below(own_slice, gpu_nodes, USER) == [LET_THROUGH] * 4
    assert guard.take_off(own_slice) is False


@NEEDS_SYSTEMD
def test_the_guard_survives_a_systemd_reload_and_slice_settings(own_slice: str, gpu_nodes: list[str]) -> None:
    guard.put_on(own_slice)
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    subprocess.run(["systemctl", "set-property", "--runtime", own_slice, "CPUWeight=50"], check=True)
    subprocess.run(["systemctl", "set-property", "--runtime", own_slice, "DeviceAllow=char-mem rw"], check=True)
    subprocess.run(["systemctl", "set-property", "--runtime", own_slice, "DevicePolicy=auto"], check=True)
    assert guard.is_on(own_slice) is True
    assert said_below(own_slice, gpu_nodes[:1], USER) == [REFUSED]


@NEEDS_SYSTEMD
@pytest.mark.skipif(not has_person(), reason=f"there is no user {PERSON}; name one with GPUSCHED_TEST_USER")
def test_a_job_escapes_through_its_user_manager_only_without_the_guard(
    bench: LimitedBench, gpu_nodes: list[str]
) -> None:
    uid = pwd.getpwnam(PERSON).pw_uid
    had_linger = os.path.exists(f"/var/lib/systemd/linger/{PERSON}")
    was_on = guard.is_on("user.slice")
    subprocess.run(["loginctl", "enable-linger", PERSON], check=True)
    try:
        wait_until(lambda: os.path.exists(f"/run/user/{uid}/systemd/private"), PATIENCE_S, "a manager of the user")
        guard.take_off("user.slice")
        outside = f"XDG_RUNTIME_DIR=/run/user/{uid} systemd-run --user -q --wait --pipe {PYTHON} -c"
        shell = ("sh", "-c", f'{PYTHON} -c "$1" "$2"; {outside} "$1" "$2"', "sh", REPORTS_OPENING, gpu_nodes[0])
        bench.run("1.1", *shell, user=PERSON, gpu_minors=())
        assert bench.end_of("1.1").exit_code == 0
        # That is why there is a guard.
        assert bench.output("1.1").splitlines() == [f"nvidia0: {REFUSED}", f"nvidia0: {LET_THROUGH}"]
        guard.put_on("user.slice")
        bench.run("2.1", *shell, user=PERSON, gpu_minors=())
        assert bench.end_of("2.1").exit_code == 0
        assert bench.output("2.1").splitlines() == [f"nvidia0: {REFUSED}"] * 2
        bench.run("3.1", PYTHON, "-c", REPORTS_OPENING, gpu_nodes[0], user=PERSON, gpu_minors=(0,))
        assert bench.end_of("3.1").exit_code == 0
        assert bench.output("3.1").splitlines() == [f"nvidia0: {LET_THROUGH}"]
    finally:
        if not was_on:
            guard.take_off("user.slice")
        if not had_linger:
            subprocess.run(["loginctl", "disable-linger", PERSON], check=True)
