"""A real daemon on a machine whose clock jumps: nothing begins before its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until

DAY = 86400.0
JUMPING = """
import time
_usual = time.time
def _jumped():
    with open({file!r}) as file:
        return _usual() + float(file.read() or 0)
time.time = _jumped
"""


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon], tmp_path: Path) -> Daemon:
    """One for which the clock of the machine is as much ahead as this file says."""
    (tmp_path / "ahead").write_text("0")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(JUMPING.format(file=str(tmp_path / "ahead")))
    made = make_daemon(config="[daemon]\npoll_s = 0.1\n")
    made.stop()
    made.is_warm = False
    made.env["PYTHONPATH"] = str(site)
    made.start()
    return made


def set_ahead(tmp_path: Path, seconds: float) -> None:
    part = tmp_path / "part"
    part.write_text(str(seconds))
    part.rename(tmp_path / "ahead")


def says(daemon: Daemon, text: str) -> bool:
    return text in (daemon.home / "log" / "gpuschedd.log").read_text()


def test_a_clock_that_is_a_day_ahead_for_a_moment_begins_nothing(daemon: Daemon, tmp_path: Path) -> None:
    later = daemon.submit("/bin/true", begin_at=time.time() + 1800)
    set_ahead(tmp_path, DAY)
    wait_until(lambda: says(daemon, "has jumped and is 1-00:00:00 ahead"), what="the jump to be seen")
    daemon.wait(daemon.submit("/bin/true"))
    (job,) = daemon.call("GET", f"/v1/jobs?ids={later}")["jobs"]
    assert (job["state"], job["reason"]) == ("PENDING", "BeginTime")
    set_ahead(tmp_path, 0)
    wait_until(lambda: says(daemon, "is right again"), what="the clock to be right again")
    daemon.wait(daemon.submit("/bin/true"))
    (job,) = daemon.call("GET", f"/v1/jobs?ids={later}")["jobs"]
    assert (job["state"], job["reason"]) == ("PENDING", "BeginTime")
