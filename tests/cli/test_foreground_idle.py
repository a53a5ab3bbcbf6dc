"""A shell without a lease whose GPUs do nothing: the person at it is told, and it is ended only when nobody types."""

from __future__ import annotations

import json
import time
from typing import Any

from screen import Screen
from shell import Shell

CONFIG = """
[node]
cpus = 8
mem_mib = 65536
[idle]
after_s = 1
window_s = 0.3
lower_after_s = 1.5
then = "cancel"
then_after_s = 2
notice_s = 0.2
[daemon]
poll_s = 0.1
"""
TYPED_S = 5.0
"""More than twice as long as it takes to end a run at which nobody types."""


def job(sh: Shell, job_id: str) -> dict[str, Any]:
    return dict(json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0])


def test_who_types_is_spared_and_who_has_gone_is_told_and_ended(own: Shell) -> None:
    (own.home / "config.toml").write_text(CONFIG)
    # No log that grows: typing alone tells.
    with Screen(own, "grun", "-o", "/dev/null", "-g", "1", "--pty", "cat") as screen:
        until = time.monotonic() + TYPED_S
        while time.monotonic() < until:
            screen.press_until("here\r", "here")
            time.sleep(0.05)
        assert "job 1: its GPUs have done nothing for " in screen.shown.decode()
        assert job(own, "1")["state"] == "RUNNING"
        screen.see("job 1 was ended: cancelled by the scheduler: its GPUs have done nothing for ")
        assert screen.end() > 128
    found = job(own, "1")
    assert (found["state"], found["reason"]) == ("CANCELLED", "GpuIdle")


def test_one_that_has_a_lease_is_left_to_it(own: Shell) -> None:
    (own.home / "config.toml").write_text(CONFIG)
    with Screen(own, "grun", "--lease", "6s", "-g", "1", "--pty", "cat") as screen:
        screen.see("unless you type something")
        assert job(own, "1")["idle_at"] is None
        screen.see("nothing happened in it for the length of its lease")
        assert screen.end() > 128
    assert job(own, "1")["reason"] == "LeaseExpired"
