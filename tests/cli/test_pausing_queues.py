"""Paused queues as an admin and a student meet them, on a real daemon that is killed meanwhile."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal

import pytest
from shell import Shell, compare
from support import is_alive, wait_until

ME = getpass.getuser()
CONFIG = """[node]
name = "lab1"
cpus = 8
mem_mib = 65536

[queue.default]
[queue.lab]
[queue.fast]
parent = "lab"
"""


def fixed(text: str) -> str:
    """Instants, processes and user as on the day on which the golden was written."""
    text = re.sub(r"\b20\d\d-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?\b", "WHEN", text)
    text = re.sub(rf"\b{re.escape(ME)}\b", "USER", text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines()) + "\n"


def transcript(shell: Shell, *lines: str) -> str:
    parts = []
    for line in lines:
        command, *words = line.split(" ")
        done = shell.type(command, *(word.replace("~", " ") for word in words))
        code = f"exit code {done.code}" if done.code else ""
        parts.append(f"$ {line}\n{done.out}{done.err}{code}".rstrip("\n") + "\n")
    return fixed("".join(parts))


def test_a_pause_says_who_and_why_survives_a_kill_and_ends(own: Shell) -> None:
    (own.home / "config.toml").write_text(CONFIG)
    shown = transcript(own, "gctl queue pause lab -m new~disks", "gctl queue pause lab", "gctl queue resume fast")
    pid = json.loads(own.ok("gpusched", "daemon", "status", "--json"))["daemon"]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), what="the daemon to be gone")
    shown += transcript(
        own,
        "gsub -q fast -- true",
        "gsub -q fast --dry-run -- true",
        "gq -o %i~%t~%r",
        "gq --why 1",
        "gq --start",
        "gctl queue",
        "gctl hold -q fast",
        "gctl release -q fast",
        "gctl queue resume lab",
        "gctl queue resume lab",
        "gwait --timeout 60s 1",
        "gctl log",
    )
    compare("paused-queues.txt", shown)
    number = json.loads(own.ok("gctl", "log", "--json"))["entries"][-1]["id"]
    own.ok("gctl", "undo", str(number))
    rows = {row["name"]: row for row in json.loads(own.ok("ginfo", "--json"))["queues"]}
    assert [(rows[name]["state"], rows[name]["paused_with"]) for name in ("lab", "fast", "default")] == [
        ("paused", "lab"),
        ("paused", "lab"),
        ("up", None),
    ]
    assert (rows["fast"]["paused_by"], rows["fast"]["message"]) == (ME, "new disks")
    assert "lab has been paused by" in own.ok("ginfo")
    answer = json.loads(own.ok("gctl", "queue", "resume", "lab", "--json"))
    assert [(one["queue"], one["is_changed"], one["state"]) for one in answer["queues"]] == [("lab", True, "up")]
    assert own.ok("gctl", "queue", "pause", "fast", "--quiet") == "fast\n"


MISTAKES = [
    ("pause", 2, "gctl queue pause needs a name"),
    ("pause nope", 1, "there is no queue nope"),
    ("pause defualt", 1, "did you mean default?"),
    (
        "resume default -m why",
        2,
        "unknown option '-m' for gctl queue resume; it belongs to: drain, down",
    ),
    ("pause default -u ann", 2, "unknown option '-u' for gctl queue pause; it belongs to: hold, release"),
]


@pytest.mark.parametrize(("words", "code", "said"), MISTAKES)
def test_mistakes_are_answered_with_the_next_command(sh: Shell, words: str, code: int, said: str) -> None:
    done = sh.type("gctl", "queue", *words.split())
    assert (done.code, said in done.err) == (code, True), done
