"""gsub --log-max as typed: what is followed, printed and shown while files are put aside."""

from __future__ import annotations

import json
import subprocess

from shell import Shell
from support import wait_until

NUMBERS = "".join(f"{number}\n" for number in range(1, 500_001))


def test_following_continues_across_rotated_files(sh: Shell) -> None:
    script = "until [ -e go ]; do sleep 0.01; done; seq 1 500000; until [ -e stop ]; do sleep 0.01; done; echo end"
    job_id = sh.submit("--log-max", "1M:20", "-o", "out", "--wrap", script)
    wait_until((sh.work / "out").exists, what="the job to start")
    process = subprocess.Popen(
        sh.argv("glogs", "-f", job_id), env=sh.env, cwd=sh.work, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    (sh.work / "go").touch()
    assert process.stdout.read(len(NUMBERS)).decode() == NUMBERS
    (sh.work / "stop").touch()
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == (b"end\n", b"", 0)
    assert (sh.work / "out.old3").exists()
    assert sh.ok("glogs", job_id) == NUMBERS + "end\n", "files put aside are printed first"
    assert sh.ok("glogs", "-n", "200000", job_id).splitlines()[0] == "300002", "and count for the last lines"
    assert "rotated at 1M, 20 kept" in sh.ok("gshow", job_id)


def test_size_and_count_are_validated_and_stored(sh: Shell) -> None:
    job_id = sh.submit("-H", "--log-max", "10M", "--", "true")
    launch = json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0]["spec"]["launch"]
    assert (launch["log_max_mib"], launch["log_keep"]) == (10, 3)
    sh.ok("gcancel", job_id)
    for text in ("lots", "10M:many", "10M:-1", "10M:101", "0"):
        done = sh.type("gsub", "--log-max", text, "--", "true")
        assert (done.code, "--log-max" in done.err) == (2, True), text
