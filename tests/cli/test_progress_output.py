"""How far jobs are, as gq, gshow and scripts see it, with real jobs that say so."""

from __future__ import annotations

import json
import re

from shell import Shell, compare
from support import wait_until

BAR = "45%|####5     | 450/1000 [01:23<01:41, 5.4it/s]"


def held_up(sh: Shell, name: str, line: str) -> str:
    """A job that has run this line and goes on."""
    job_id = sh.submit("-J", name, "-o", f"{name}.out", "--wrap", f"{line}\ntouch {name}.ready; exec sleep 1000")
    wait_until((sh.work / f"{name}.ready").exists, what=f"{name} to have spoken")
    return job_id


def test_bars_are_shown_while_the_job_reports_progress(own: Shell) -> None:
    silent = held_up(own, "silent", "echo nothing")
    assert "PROGRESS" not in own.ok("gq"), "no column for nothing"
    filed = held_up(own, "filed", "echo '120/1000 epoch 3' > $GPUSCHED_PROGRESS")
    drawn = held_up(own, "drawn", f"printf 'start\\n\\r{BAR.replace('%', '%%')}'")
    waits = own.submit("-H", "-J", "waits", "--", "true")
    text = own.ok("gq")
    user = text.splitlines()[1].split()[2]
    text = re.sub(r"% (\?|\d+:\d\d)", "% <LEFT>", text.replace(user, "user"))
    text = re.sub(r"\b\d+:\d\d\b", "M:SS", text)
    compare("gq-progress.txt", re.sub(" +", " ", text))
    jobs = {job["id"]: job for job in json.loads(own.ok("gq", "--json"))["jobs"]}
    said = {job_id: (jobs[job_id]["progress"], jobs[job_id]["progress_text"]) for job_id in jobs}
    assert said == {
        silent: (None, None),
        filed: (0.12, "120/1000 epoch 3"),
        drawn: (0.45, "450/1000 5.4it/s"),
        waits: (None, None),
    }
    assert jobs[drawn]["eta_at"] > jobs[drawn]["start_at"] + 90, "by its own words"
    shown = own.ok("gshow", drawn)
    assert re.search(r"^Progress: +\[####\.{6}\]  45%, 450/1000 5\.4it/s; done in about 1:\d\d, at 20", shown, re.M)
    assert "Progress:" not in own.ok("gshow", silent)
    rows = own.ok("gq", "--noheader", "--sort", "progress").splitlines()
    assert [row.split()[0] for row in rows[:2]] == [filed, drawn]
    own.ok("gcancel", "--all", "-y")
    own.type("gwait", filed)
    ended = json.loads(own.ok("gq", "--json", "-j", filed))["jobs"][0]
    assert (ended["progress"], ended["eta_at"]) == (None, None)


def test_each_run_has_its_own_progress_file(own: Shell) -> None:
    script = "echo $GPUSCHED_PROGRESS; [ ! -e $GPUSCHED_PROGRESS ] || exit 9; echo 0.5 > $GPUSCHED_PROGRESS; exit 3"
    job_id = own.submit("--retries", "1", "--backoff", "0", "--wrap", script)
    own.type("gwait", job_id)
    paths = own.ok("glogs", "--since-run", "1", job_id).split()
    assert len(set(paths)) == 2
    assert json.loads(own.ok("gshow", "--json", job_id))["jobs"][0]["exit_code"] == 3
    spool = json.loads(own.ok("gpusched", "daemon", "status", "--json"))["daemon"]["spool"]
    assert all(path.startswith(spool) for path in paths)
    wait_until(lambda: not list(own.home.rglob("*.progress")), what="the files to be removed")
