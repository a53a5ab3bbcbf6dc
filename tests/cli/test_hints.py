"""Time limits that nobody stated, as gsub tells of them: hints to a person at a terminal, `-t auto`, defaults."""

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


def test_a_hint_is_shown_once_a_day(lab: Shell) -> None:
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


def test_a_clock_set_back_does_not_suppress_the_hint_for_long(lab: Shell) -> None:
    hinted(lab)
    far = time.time() + 40 * 86_400
    os.utime(mark(lab), (far, far))
    hinted(lab)


def test_only_terminal_users_get_the_hint(lab: Shell) -> None:
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


def test_an_admin_can_disable_the_hint(lab: Shell) -> None:
    (lab.home / "config.toml").write_text(CONFIG + "[submit]\nlimit_hint = false\n")
    lab.ok("gctl", "reload")
    assert "jobs like it" not in typed(lab)
    job = lab.submit("-g", "1", "train.sh")
    assert json.loads(lab.ok("gshow", job, "--json"))["jobs"][0]["time_limit_source"] is None


def test_no_hint_is_shown_when_its_date_cannot_be_saved(lab: Shell) -> None:
    mark(lab).symlink_to("/dev/null")
    assert "jobs like it" not in typed(lab)
    mark(lab).unlink()
    mark(lab).mkdir()
    assert "jobs like it" not in typed(lab)


def streams(sh: Shell, *words: str, **env: str) -> str:
    """A command with what it printed, ids left out."""
    done = sh.type("gsub", *words, **env)
    shown = [f"$ gsub {' '.join(words)}", *done.out.splitlines(), *(f"2> {line}" for line in done.err.splitlines())]
    text = re.sub(r"\bjob \d+", "job 9", re.sub(r"\d+ to \d+", "8 to 9", "\n".join(shown)))
    return re.sub(r"^\d+$|\bp\d+\b", "9", text, flags=re.M) + f"\n[{done.code}]\n"


def test_an_auto_limit_is_reported_to_users_and_scripts(lab: Shell) -> None:
    (lab.work / "slurm.sh").write_text("#!/bin/sh\n#SBATCH --time=auto --gres=gpu:1\n#SBATCH -J train\nsleep 600\n")
    (lab.work / "p.toml").write_text(
        '[step.a]\nscript = "train.sh"\ngpus = 1\ntime = "auto"\n[step.b]\nwrap = "true"\n'
    )
    said = [
        streams(lab, "-t", "auto", "-g", "1", "train.sh"),
        streams(lab, "--parsable", "-t", "auto", "-g", "1", "train.sh"),
        streams(lab, "-g", "1", "train.sh", GSUB_TIME="AUTO"),
        streams(lab, "-a", "0-3", "-t", "auto", "-g", "1", "train.sh"),
        streams(lab, "slurm.sh"),
        streams(lab, "--dag", "p.toml"),
        streams(lab, "--dag", "p.toml", "--quiet"),
        streams(lab, "-t", "auto", "-g", "2", "train.sh"),
        streams(lab, "-t", "outo", "-g", "1", "train.sh"),
        streams(lab, "-t", "auto:2", "-g", "1", "train.sh"),
        streams(lab, "-t", "", "-g", "1", "train.sh"),
    ]
    compare("limit-auto.txt", "\n".join(said))
    document = json.loads(lab.ok("gsub", "--json", "-t", "auto", "-g", "1", "train.sh"))
    assert (document["job"]["time_limit_s"], document["job"]["time_limit_source"]) == (300, "auto")
    assert document["limits"] == ["time limit 5:00: half again as long as the longest of 3 jobs like it"]
    dry = json.loads(lab.ok("gsub", "--dry-run", "--json", "-t", "auto", "-g", "1", "train.sh"))["dry_run"]
    assert (dry["time_limit_s"], dry["time_limit_source"]) == (300, "auto")
    assert "\nRequested:  1 CPU, GPUs 1, time limit 5:00 (auto)\n" in lab.ok("gshow", document["job"]["id"])


def test_a_default_is_shown_where_it_applies(lab: Shell) -> None:
    queues = (
        "[default]\ntime_limit_s = 14400\n[queue.default]\n[queue.short]\ndefault_time_s = 600\nmax_time_s = 3600\n"
    )
    (lab.home / "config.toml").write_text(CONFIG + queues)
    lab.ok("gctl", "reload")
    assert typed(lab, "gsub", "--", "true").endswith("gsub: time limit 4:00:00, the default; change it with -t\n")
    shown = typed(lab, "gsub", "-q", "short", "--", "true")
    assert shown.endswith("gsub: time limit 10:00, the default; change it with -t\n")
    assert lab.type("gsub", "--", "true").err == "", "no script is told"
    assert "time limit" not in typed(lab, "gsub", "-t", "1h", "--", "true")
    assert "time limit" not in typed(lab, "gsub", "-t", "unlimited", "--", "true")
    refused = lab.type("gsub", "-q", "short", "-t", "0", "--", "true")
    assert (refused.code, refused.err) == (
        1,
        "gsub: error: asked for no time limit; queue short allows at most 1:00:00\n"
        "gsub: hint: ask for one: -t 1:00:00\n",
    )
    job = lab.submit("-q", "short", "--hold", "--", "true")
    assert "time limit 10:00 (default)" in lab.ok("gshow", job)
    lab.ok("gctl", "update", job, "time=1h")
    assert "time limit 1:00:00\n" in lab.ok("gshow", job)
    lab.ok("gctl", "update", job, "time=")
    assert "time limit 10:00 (default)\n" in lab.ok("gshow", job)
