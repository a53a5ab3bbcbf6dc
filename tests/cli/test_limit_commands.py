"""Limits of users and credits of budgets as an admin and a student meet them, on a real daemon."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import time
from typing import Any

import pytest
from shell import Shell, compare
from support import is_alive, wait_until

from gpusched.cli import limits
from gpusched.cli.actions import find_action
from gpusched.errors import UsageError

ME = getpass.getuser()
CONFIG = """[node]
name = "lab1"
cpus = 8
mem_mib = 65536

[account.vision]
users = "*"
gpu_hours = 4
"""


def fixed(text: str) -> str:
    """Instants and user as on the day on which the golden was written."""
    text = re.sub(r"\b20\d\d-\d\d-\d\d \d\d:\d\d\b", "WHEN", text)
    text = re.sub(
        r"\b(January|February|March|April|May|June|July|August|September|October|November|December) 20\d\d",
        "MONTH",
        text,
    )
    text = re.sub(rf"\b{re.escape(ME)}\b", "USER", text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines()) + "\n"


def test_a_limit_holds_says_who_and_why_survives_a_kill_ends_and_is_undone(own: Shell) -> None:
    (own.home / "config.toml").write_text(CONFIG)
    shown = own.ok("gctl", "limit", "user", ME, "max_jobs=0", "--until", "1w", "-m", "disk full")
    waits = own.submit("-A", "vision", "-g", "1", "-t", "1h", "--", "true")
    pid = json.loads(own.ok("gpusched", "daemon", "status", "--json"))["daemon"]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), what="the daemon to be gone")
    own.ok("gctl", "limit")
    assert "(UserLimit)" in own.ok("gq")
    shown += own.ok("gq", "--why", waits).splitlines()[0].replace(f"job {waits} ", "job ID ") + "\n"
    shown += own.ok("gctl", "limit", "user", ME, "max_gpus=2")
    shown += own.ok("gctl", "limit")
    shown += own.ok("gctl", "limit", "remove", ME)
    own.ok("gwait", "--timeout", "60s", waits)
    shown += own.ok("gctl", "budget", "vision", "credit=500", "-m", "grant")
    shown += own.ok("gctl", "log")
    entries = json.loads(own.ok("gctl", "log", "--json"))["entries"]
    removed, credit = entries[-3]["id"], entries[-1]["id"]
    own.ok("gctl", "undo", str(credit))
    assert own.type("gctl", "undo", str(credit)).code == 1
    own.ok("gctl", "undo", str(removed))
    (back,) = json.loads(own.ok("gctl", "limit", "--json"))["limits"]
    assert (back["max_jobs"], back["message"], back["set_by"]) == (0, "disk full", ME)
    compare("limits.txt", fixed(shown))
    # One that ends by itself, as it was not removed.
    soon = (f"@{int(time.time()) + seconds}" for seconds in (2, 4, 8, 16, 32, 64))
    # On a loaded machine an instant may be over before it is read.
    assert any(own.type("gctl", "limit", "user", ME, "max_jobs=0", "--until", at).code == 0 for at in soon)
    again = own.submit("-A", "vision", "--", "true")
    own.ok("gwait", "--timeout", "60s", again)
    assert f"the limit of user {ME} ended" in own.ok("gctl", "log")
    refused = [own.type("gctl", *words) for words in (("limit", "remove", ME), ("budget", "visoin", "credit=5"))]
    assert [(one.code, len(one.err.splitlines())) for one in refused] == [(1, 2), (1, 2)]


MISTAKES: list[tuple[list[str], dict[str, Any], str]] = [
    (["bob", "max_gpus=4"], {}, "'bob' is neither user nor remove"),
    (["user"], {}, "no user is named"),
    (["user", "max_gpus=4"], {}, "no user is named"),
    (["user", "bob", "gpus=4"], {}, "'gpus=4' is not a limit"),
    (["user", "bob", "max_gpus=x"], {}, "max_gpus is 'x', not a number of at least 0"),
    (["user", "bob", "max_jobs=1.5"], {}, "max_jobs is '1.5', not a whole number of at least 0"),
    (["user", "bob", "max_jobs=nan"], {}, "max_jobs is 'nan', not a whole number of at least 0"),
    (["user", "bob", "max_gpus=-1"], {}, "max_gpus is '-1', not a number of at least 0"),
    (["user", "bob", "max_gpus=1", "max_gpus=2"], {}, "max_gpus is given twice"),
    (["user"], {"message": "why"}, "no user is named"),
    (["remove"], {}, "no user is named"),
    (["remove", "bob", "max_gpus=1"], {}, "'max_gpus=1' is not a limit; the limits are account="),
]


@pytest.mark.parametrize(("words", "values", "text"), MISTAKES)
def test_a_mistake_is_said_before_anything_is_asked(words: list[str], values: dict[str, Any], text: str) -> None:
    action = find_action(["limit", *words])
    assert action is not None
    with pytest.raises(UsageError, match=re.escape(text)):
        action.function()(action.name, ["limit", *words][len(action.name.split()) :], values)


@pytest.mark.parametrize(
    "words", [["credit=5"], ["vision", "credit=x"], ["vision", "credit=0"], ["vision", "a=1", "b=2"]]
)
def test_a_credit_needs_an_account_and_a_number(words: list[str]) -> None:
    with pytest.raises(UsageError):
        limits.give_credit(words, {})
