"""gctl reserve and unreserve, gsub --reservation and ginfo, typed against a real daemon with simulated GPUs."""

from __future__ import annotations

import json
import os
import pwd
import re
import time
from typing import Any

import pytest
from shell import Shell
from support import wait_until
from test_terminals import on_terminal

from gpusched.cli.gq import notices_line
from gpusched.cli.reservations import period

ME = pwd.getpwuid(os.geteuid()).pw_name


def reserve(sh: Shell, name: str, *words: str) -> dict[str, Any]:
    """Make a reservation of mine for an hour and give what is answered."""
    words = ("reserve", name, "--duration", "1h", "--users", ME, *words)
    found: dict[str, Any] = json.loads(sh.ok("gctl", *words, "--json"))
    return found


def test_maintenance_is_announced_below_the_queue_only_on_terminals(own: Shell) -> None:
    own.ok("gctl", "drain", "1", "-m", "fan is broken")
    told = own.ok("gctl", "reserve", "upgrade", "--maint", "--start", "now+1h", "--duration", "2h", "-m", "new driver")
    assert told.startswith("reserved upgrade: node lab1, ")
    waiting = own.submit("--", "true")
    done = on_terminal(own, "gq", COLUMNS="200")
    last = done.out.strip().splitlines()[-1]
    assert last.startswith("GPU 1 is drained (fan is broken); maintenance upgrade on node lab1 from ")
    assert last.endswith("(new driver)")
    assert "fan is broken" not in own.ok("gq")
    assert "notices" not in json.loads(own.ok("gq", "--json"))
    assert "maintenance upgrade of node lab1 begins in" in own.ok("gq", "--why", waiting)
    assert own.ok("gctl", "reserve").splitlines()[1].endswith(" node lab1 maintenance: new driver")
    own.ok("gctl", "unreserve", "upgrade")
    wait_until(lambda: state(own, waiting) == "COMPLETED", what="the job to run")


def test_a_reader_that_closes_early_ends_the_output() -> None:
    drain = {"kind": "drain", "what": "GPU 0", "message": "a\x1bb"}
    coming = {"kind": "maintenance", "what": "node n1", "name": "x", "message": "", "start_at": 0.0, "end_at": 9e5}
    assert "\x1b" not in notices_line([drain], 1.0)
    assert notices_line([drain] * 5, 1.0).endswith("; and 2 more, see ginfo")
    assert notices_line([coming], 1.0).startswith("maintenance x on node n1 until ")


def state(sh: Shell, job_id: str) -> str:
    return str(json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0]["state"])


def refused(sh: Shell, *words: str) -> str:
    done = sh.type(*words)
    assert done.code == 1, done
    assert "hint: " in done.err
    return done.err


def test_members_run_inside_while_others_wait_until_removal(own: Shell) -> None:
    reserve(own, "course", "--start", "now", "--gpus", "2", "-c", "4", "--mem", "8G")
    other = own.submit("-g", "1", "-t", "10m", "--", "sleep", "600")
    member = own.submit("-g", "1", "-t", "10m", "--reservation", "course", "--", "sleep", "600")
    wait_until(lambda: state(own, member) == "RUNNING", what="the member to start")
    assert state(own, other) == "PENDING"
    done = own.type("gctl", "unreserve", "course")
    assert (done.code, done.out, done.err) == (0, "unreserved course\n", "")
    wait_until(lambda: state(own, other) == "RUNNING", what="the other to start")
    assert state(own, member) == "RUNNING"


def test_a_reservation_is_listed_the_same_everywhere(own: Shell) -> None:
    answer = reserve(own, "course", "--start", "now+2h", "--every", "week", "--gpus", "1", "--accounts", "pupils")
    made = answer["reservation"]
    assert made["next"]["start_at"] == pytest.approx(time.time() + 7200, abs=120)
    assert made["held"] == [
        {
            "node": "lab1",
            "gpus": [{"index": 0, "uuid": "GPU-SIM-00000000-0000-0000-0000-000000000000"}],
            "cpus": 4.0,
            "mem_mib": 32768,
            "is_node": False,
        }
    ]
    reserve(own, "demo", "--start", "now+1h", "--gpu", "1")
    listed = json.loads(own.ok("gctl", "reserve", "--json"))["reservations"]
    assert [one["name"] for one in listed] == ["demo", "course"]
    assert listed == json.loads(own.ok("ginfo", "--json"))["reservations"]
    assert own.ok("gctl", "reserve", "--quiet") == "demo\ncourse\n"
    table = own.ok("gctl", "reserve")
    assert table.splitlines()[0].split() == "NAME STATE BEGINS ENDS EVERY KEEPS FOR".split()
    assert table.splitlines()[2].endswith(f" week  lab1: GPU 0, 4 CPUs, 32G {ME}, account pupils")
    assert own.ok("ginfo").endswith(f"\nreservations:\n{table}")


def test_creation_reports_what_is_reserved_and_warns_of_unknown_users(own: Shell) -> None:
    words = ("--start", "now+1h", "--duration", "2h", "--every", "2d", "--node", "--users", "nobody-of-that-name")
    done = own.type("gctl", "reserve", "course", *words)
    assert done.code == 0
    assert done.out.startswith("reserved course: node lab1, 20")
    assert done.out.endswith(", every 2 days\n")
    assert done.err == "gctl: user nobody-of-that-name does not exist on this machine yet\n"
    assert own.ok("gctl", "unreserve", "--quiet", "course") == "course\n"
    done = own.type("gctl", "reserve")
    assert (done.out, "there are no reservations" in done.err) == ("", True)


def test_a_reservation_survives_a_daemon_restart(own: Shell) -> None:
    reserve(own, "course", "--start", "now+1h", "--gpus", "2")
    own.ok("gpusched", "daemon", "stop")
    assert own.ok("gctl", "reserve", "--quiet") == "course\n"
    endless = own.submit("-g", "1", "--", "sleep", "600")
    short = own.submit("-g", "1", "-t", "30m", "--", "sleep", "600")
    wait_until(lambda: state(own, short) == "RUNNING", what="the short job to start")
    assert state(own, endless) == "PENDING"


def test_refusals_suggest_the_next_command(own: Shell) -> None:
    reserve(own, "course", "--start", "now+1h", "--gpu", "0")
    again = ("--start", "now+1h", "--duration", "1h", "--users", ME)
    assert "reservation course exists already" in refused(own, "gctl", "reserve", "course", *again, "-g", "1")
    assert "course keeps lab1:0" in refused(own, "gctl", "reserve", "b", *again, "--gpu", "0")
    past = refused(own, "gctl", "reserve", "b", "--start", f"@{int(time.time()) - 3600}", *again[2:], "-g", "1")
    assert re.search(r"would begin 1:0\d:\d\d ago", past)
    running = own.submit("-g", "1", "--", "sleep", "600")
    wait_until(lambda: state(own, running) == "RUNNING", what="the job to start")
    text = refused(own, "gctl", "reserve", "b", *again, "--gpu", "1")
    assert f"job {running} of {ME} has no time limit" in text
    assert "--ignore-jobs" in text
    made = own.type("gctl", "reserve", "b", *again, "--gpu", "1", "--ignore-jobs")
    assert made.err == f"gctl: job {running} of {ME} has no time limit, and is not affected\n"
    assert "'nope' is invalid" in refused(own, "gsub", "--reservation", "nope", "-t", "5m", "--", "true")
    assert "1:00:00 long" in refused(own, "gsub", "--reservation", "course", "-t", "2h", "--", "true")


USAGE = {
    "no start": (["reserve", "x", "--duration", "1h", "-g", "1"], "--start is missing"),
    "no duration": (["reserve", "x", "--start", "now", "-g", "1"], "--duration is missing"),
    "no name": (["reserve", "--start", "now"], "the reservation has no name"),
    "two names": (["reserve", "x", "y"], "unexpected argument 'y'"),
    "no instant": (["reserve", "x", "--start", "soon"], "'soon' is not an instant"),
    "no period": (["reserve", "x", "--every", "month"], "'month' is not a time"),
    "nothing to take out": (["unreserve"], "unreserve needs a name"),
    "options of another action": (
        ["drain", "0", "--start", "now"],
        "for gctl drain; it belongs to: reserve",
    ),
}


@pytest.mark.parametrize(("words", "text"), USAGE.values(), ids=USAGE)
def test_invalid_command_lines_are_refused(sh: Shell, words: list[str], text: str) -> None:
    done = sh.type("gctl", *words)
    assert done.code == 2
    assert text in done.err


@pytest.mark.parametrize(
    ("seconds", "words"), [(604800, "week"), (86400, "day"), (172800, "2 days"), (7200, "2 hours"), (5400, "1:30:00")]
)
def test_periods_are_shown(seconds: int, words: str) -> None:
    assert period(seconds) == words
