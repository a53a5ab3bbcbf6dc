"""A shell without a short lease whose GPUs do nothing: who is at it is told; it is ended only when nobody types."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from screen import Screen
from shell import Shell

CONFIG = """
[node]
cpus = 8
mem_mib = 65536
[idle]
after_s = 3
window_s = 0.5
lower_after_s = 3
then = "cancel"
then_after_s = 3
notice_s = 0.2
[daemon]
poll_s = 0.1
"""
TYPED_S = 4.0
"""Longer than a run whose GPUs were found idle would be left when nobody types."""


def job(sh: Shell, job_id: str) -> dict[str, Any]:
    return dict(json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0])


def test_an_idle_session_is_spared_while_typing_and_otherwise_warned_and_ended(own: Shell) -> None:
    (own.home / "config.toml").write_text(CONFIG)
    # No log that grows: typing alone tells.
    with Screen(own, "grun", "-o", "/dev/null", "-g", "1", "--pty", "cat") as screen:
        until = math.inf
        while time.monotonic() < until:
            screen.press_until("here\r", "here")
            time.sleep(0.05)
            if until == math.inf and b"job 1: its GPUs have been idle for " in screen.shown:
                until = time.monotonic() + TYPED_S
        assert job(own, "1")["state"] == "RUNNING"
        screen.see("job 1 was terminated: cancelled by the scheduler: its GPUs have been idle for ")
        assert screen.end() > 128
    found = job(own, "1")
    assert (found["state"], found["reason"]) == ("CANCELLED", "GpuIdle")


def test_a_session_with_a_shorter_lease_ends_by_its_lease(own: Shell) -> None:
    (own.home / "config.toml").write_text(CONFIG.replace("then_after_s = 3", "then_after_s = 3600"))
    with (
        Screen(own, "grun", "--lease", "1h", "-g", "1", "--pty", "cat"),
        Screen(own, "grun", "-g", "1", "--pty", "cat") as other,
    ):
        other.see("its GPUs have been idle for ")
        found = {one["foreground"]["lease_s"]: one["idle_at"] for one in (job(own, "1"), job(own, "2"))}
        assert found[3600] is None
        assert found[43200] is not None
