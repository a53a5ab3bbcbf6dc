"""GPU-hour budgets as users and admins meet them, on a real daemon."""

from __future__ import annotations

import json
import os
import pwd
import re
import signal

from shell import Shell, compare
from support import is_alive, wait_until

BUDGETS = """[node]
name = "lab1"
cpus = 8
mem_mib = 65536

[account.vision]
users = "*"
gpu_hours = 4
gpu_hours_per_user = 3
budget_period = "total"

[account.old]
users = "*"
gpu_hours = 10
budget_period = "year"

[history]
keep_days = 0
"""


def fixed(text: str) -> str:
    """Years, instants and user as on the day on which the golden was written."""
    text = re.sub(r"\b20\d\d(-\d\d-\d\d \d\d:\d\d)?", "WHEN", text)
    # On a slow machine the job has run for longer.
    text = re.sub(r"\b0\.0\d+\b", "0.00", re.sub(r"\b1\.9\d\b", "2.00", text))
    text = re.sub(r"used 0(\.0\d+)? of 3 GPU-hours, 2(\.00)? booked", "used 0 of 3 GPU-hours, 2 booked", text)
    text = text.replace(pwd.getpwuid(os.geteuid()).pw_name, "USER")
    return "\n".join(" ".join(line.split()) for line in text.splitlines()) + "\n"


def test_budget_is_shown_blocks_says_why_and_survives_a_kill(own: Shell) -> None:
    (own.home / "config.toml").write_text(BUDGETS)
    runs = own.submit("-A", "vision", "-g", "1", "-t", "2h", "--", "sleep", "600")
    waits = own.submit("-A", "vision", "-g", "1", "-t", "90m", "--", "true")
    reads = own.submit("-A", "vision", "-t", "90m", "--", "true")
    own.ok("gwait", "--timeout", "60s", reads)
    why = own.ok("gq", "--why", waits).replace(f"job {waits} ", "job ID ")
    assert "(BudgetSpent)" in own.ok("gq")
    shown = own.ok("gctl", "budget")
    compare("budgets.txt", fixed(shown + why.splitlines()[0]))
    rows = {(row["account"], row["user"]): row for row in json.loads(own.ok("gctl", "budget", "--json"))["budgets"]}
    used = rows["vision", None]
    assert 1.9 < used["used_gpu_hours"] + used["booked_gpu_hours"] < 2.1
    assert own.ok("gctl", "budget", "--quiet").split() == ["old", "vision"]
    assert own.type("gctl", "budget", "nlp").code == 1

    # A lasting grant by command starts what waited; a killed daemon knows the same afterwards.
    own.ok("gctl", "account", "modify", "vision", "gpu_hours=8", "gpu_hours_per_user=")
    own.ok("gwait", "--timeout", "60s", waits)
    own.ok("gcancel", runs)
    own.type("gwait", "--timeout", "60s", runs)
    before = json.loads(own.ok("gctl", "budget", "vision", "--json"))["budgets"]
    (total, *rest) = json.loads(own.ok("ghist", "--statement", "this", "--json"))["rows"]
    (vision,) = (row for row in rest if (row["account"], row["user"]) == ("vision", None))
    assert vision["gpu_hours"] == total["gpu_hours"] > 0
    # In all time, what both months have is used; this month has all of it, save on its first night.
    assert vision["budget"]["used_gpu_hours"] >= vision["gpu_hours_charged"]
    pid = json.loads(own.ok("gpusched", "daemon", "status", "--json"))["daemon"]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), what="the daemon to be gone")
    after = json.loads(own.ok("gctl", "budget", "vision", "--json"))["budgets"]
    assert before == after
    assert before[0]["used_gpu_hours"] > 0
    assert before[0]["booked_gpu_hours"] == 0
