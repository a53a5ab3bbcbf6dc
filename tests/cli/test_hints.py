"""The hint of gsub about time limits, as a person at a terminal sees it, and as nobody else does."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from screen import PATIENCE_S, Screen
from shell import Shell, compare

CONFIG = """\
[node]
name = "lab1"
cpus = 8
mem_mib = 65536
[priority]
order = "fifo"
backfill_by = "limit"
"""


@pytest.fixture
def lab(own: Shell) -> Shell:
    """Three runs of train.sh have ended; one card is busy for two hours, and a job waits for both."""
    (own.home / "config.toml").write_text(CONFIG)
    script = own.work / "train.sh"
    script.write_text("#!/bin/sh\ntrue\n")
    for _ in range(3):
        own.ok("gsub", "-W", "-g", "1", "train.sh")
    script.write_text("#!/bin/sh\nsleep 600\n")
    busy = own.submit("-g", "1", "-t", "2h", "--", "sleep", "600")
    wait_for(own, busy, "RUNNING")
    own.submit("-g", "2", "-t", "1h", "--", "sleep", "600")
    return own


def wait_for(sh: Shell, job: str, state: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while state not in sh.ok("gq", "-a", "-j", job, "-o", "%T"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def typed(sh: Shell, *words: str, **env: str) -> str:
    """All that a terminal shows of a command, which must succeed."""
    cleared = dict.fromkeys(("CI", "GITHUB_ACTIONS", "GITLAB_CI"), "")
    with Screen(sh, *(words or ("gsub", "-g", "1", "train.sh")), size=(24, 200), **{**cleared, **env}) as screen:
        assert screen.end() == 0, screen.shown
        return screen.shown.decode().replace("\r\n", "\n")


def mark(sh: Shell) -> Path:
    return sh.home / "limit-hint"


def hinted(sh: Shell, **env: str) -> str:
    """What is shown with a hint: a machine under load may take longer over it than gsub waits."""
    deadline = time.monotonic() + PATIENCE_S
    while "jobs like it" not in (shown := typed(sh, **env)):
        assert time.monotonic() < deadline, shown
        mark(sh).unlink(missing_ok=True)
    return shown


def test_the_hint_is_given_once_a_day(lab: Shell) -> None:
    shown = hinted(lab)
    said = re.sub(r"\b(\d{4}-\d\d-\d\dT)?\d\d:\d\d\b", "HH:MM", shown)
    compare("limit-hint.txt", re.sub(r"\b(job|update) \d+", r"\1 9", said))
    until = mark(lab).stat().st_mtime
    assert until == pytest.approx(time.time() + 86_400, abs=PATIENCE_S)
    assert re.fullmatch(r"Submitted job \d+\n", typed(lab))
    assert mark(lab).stat().st_mtime == until
    # A day later.
    os.utime(mark(lab), (time.time() - 1, time.time() - 1))
    update = re.search(r"gctl update (\d+) (\S+)\n", hinted(lab))
    assert update is not None
    lab.ok("gctl", "update", *update.groups())
    wait_for(lab, update.group(1), "RUNNING")


def test_a_clock_that_was_set_back_does_not_silence_it_for_long(lab: Shell) -> None:
    hinted(lab)
    far = time.time() + 40 * 86_400
    os.utime(mark(lab), (far, far))
    hinted(lab)


def test_only_a_person_at_a_terminal_gets_it(lab: Shell) -> None:
    words = ("-g", "1", "train.sh")
    for line in (
        ("gsub", "--parsable", *words),
        ("gsub", "--json", *words),
        ("gsub", "-t", "2h", *words),
        ("gsub", "-t", "0", *words),
        ("gsub", "-t", "auto", *words),
        ("gsub", "--hold", *words),
        ("gsub", "--dry-run", *words),
    ):
        assert "jobs like it took" not in typed(lab, *line).replace("the longest of 3 jobs like it took", ""), line
    for env in ({"CI": "true"}, {"GPUSCHED_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, {"GPUSCHED_HINTS": "0"}):
        assert "jobs like it" not in typed(lab, **env), env
    assert "jobs like it" not in typed(lab, GSUB_TIME="8h")
    done = lab.type("gsub", *words)
    assert (done.code, done.err) == (0, "")
    script = lab.work / "submit.sh"
    script.write_text(f"#!/bin/sh\n{' '.join(quoted(word) for word in lab.argv('gsub', *words))}\nexit 0\n")
    assert "jobs like it" not in typed_script(lab, script)
    assert not mark(lab).exists(), "none of these has asked"
    hinted(lab)


def quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def typed_script(sh: Shell, script: Path) -> str:
    class Scripted(Shell):
        def argv(self, command: str, *words: str) -> list[str]:
            return ["/bin/sh", str(script)]

    scripted = Scripted(sh.home, sh.work)
    scripted.env = sh.env
    return typed(scripted)


def test_an_admin_can_switch_it_off(lab: Shell) -> None:
    (lab.home / "config.toml").write_text(CONFIG + "[submit]\nlimit_hint = false\n")
    lab.ok("gctl", "reload")
    assert "jobs like it" not in typed(lab)
    job = lab.submit("-g", "1", "train.sh")
    assert json.loads(lab.ok("gshow", job, "--json"))["jobs"][0]["time_limit_source"] is None


def test_where_it_cannot_be_kept_that_it_was_said_nothing_is_said(lab: Shell) -> None:
    mark(lab).symlink_to("/dev/null")
    assert "jobs like it" not in typed(lab)
    mark(lab).unlink()
    mark(lab).mkdir()
    assert "jobs like it" not in typed(lab)
