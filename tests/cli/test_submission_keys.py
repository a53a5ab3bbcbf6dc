"""gsub --key and --resubmit: what is submitted twice, on purpose or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shell import Shell
from support import is_alive, wait_until

from gpusched.client import DaemonConnection


def counts(sh: Shell, *names: str) -> list[str]:
    """Ids of all jobs with these names."""
    return sh.ok("gq", "-a", "--quiet", "-n", ",".join(names)).split()


def test_a_repeated_key_returns_the_same_pending_or_ended_job(sh: Shell) -> None:
    first = sh.submit("--key", "k-same", "--hold", "--", "true")
    assert sh.submit("--key", "k-same", "--hold", "--", "true") == first
    sh.ok("gctl", "release", first)
    sh.ok("gwait", first)
    again = sh.type("gsub", "--key", "k-same", "--hold", "--", "true")
    assert (again.code, again.out) == (0, f"Submitted job {first}\n")
    assert f"job {first} (COMPLETED) has the key 'k-same'; nothing new was submitted" in again.err


def test_json_distinguishes_a_found_job_from_a_new_one(sh: Shell) -> None:
    new = json.loads(sh.ok("gsub", "--json", "--key", "k-json", "--hold", "--", "true"))
    found = json.loads(sh.ok("gsub", "--json", "--key", "k-json", "--hold", "--", "true"))
    assert (new["existing"], found["existing"]) == (False, True)
    assert found["job"]["id"] == new["job"]["id"]
    assert found["job"]["key"] == "k-json"
    assert "existing" not in json.loads(sh.ok("gsub", "--json", "--", "true"))


def test_a_key_returns_failed_and_cancelled_jobs_by_default(sh: Shell) -> None:
    failed = sh.submit("--key", "k-failed", "--", "false")
    assert sh.type("gwait", failed).code == 1
    assert sh.submit("--key", "k-failed", "--", "false") == failed
    anew = sh.submit("--key", "k-failed", "--key-again", "failed", "--", "true")
    assert anew != failed
    sh.ok("gwait", anew)
    # The key now belongs to the new job, which has completed.
    assert sh.submit("--key", "k-failed", "--key-again", "failed", "--", "true") == anew
    assert sh.submit("--key", "k-failed", "--key-again", "ended", "--", "true") not in (anew, failed)
    held = sh.submit("--key", "k-cancelled", "--hold", "--", "true")
    sh.ok("gcancel", held)
    assert sh.submit("--key", "k-cancelled", "--", "true") == held
    assert sh.submit("--key", "k-cancelled", "--key-again", "failed", "--", "true") != held


def test_a_key_always_returns_an_unfinished_job(sh: Shell) -> None:
    held = sh.submit("--key", "k-held", "--hold", "--", "true")
    assert sh.submit("--key", "k-held", "--hold", "--key-again", "ended", "--", "true") == held


def test_different_work_under_a_key_is_refused(sh: Shell, tmp_path: Path) -> None:
    held = sh.submit("--key", "k-other", "--hold", "--", "echo", "a")
    for words, what in (
        (["--", "echo", "b"], "command line"),
        (["-D", str(tmp_path.parent), "--", "echo", "a"], "working directory"),
        (["--wrap", "echo a"], "script"),
    ):
        done = sh.type("gsub", "--key", "k-other", *words)
        assert done.code == 1
        assert f"the key 'k-other' belongs to job {held}, which has a different {what}" in done.err


def test_the_same_work_with_other_terms_returns_the_same_job_and_says_so(sh: Shell) -> None:
    held = sh.submit("--key", "k-terms", "--hold", "--", "true")
    done = sh.type("gsub", "--key", "k-terms", "--hold", "-c", "2", "-t", "1h", "--", "true")
    assert done.out == f"Submitted job {held}\n"
    assert "with another cpus, time_limit_s, and keeps that" in done.err
    same_cores = sh.type("gsub", "--key", "k-terms", "--hold", "-n", "1", "--", "true")
    assert "with another tasks, and keeps that" in same_cores.err


def test_a_dry_run_reports_the_job_of_the_key(sh: Shell) -> None:
    held = sh.submit("--key", "k-dry", "--hold", "--", "true")
    found = json.loads(sh.ok("gsub", "--dry-run", "--json", "--key", "k-dry", "--", "true"))["dry_run"]
    assert (found["verdict"], held in found["text"]) == ("exists", True)


@pytest.mark.parametrize(("words", "says"), [(["--key", ""], "key"), (["--key", "a\nb"], "'a\\nb'")])
def test_a_key_is_printable_text(sh: Shell, words: list[str], says: str) -> None:
    done = sh.type("gsub", *words, "--", "true")
    assert (done.code, says in done.err) == (2, True), done


def test_rerun_options_without_a_key_say_nothing(sh: Shell) -> None:
    done = sh.type("gsub", "--key-again", "failed", "--", "true")
    assert done.code == 2
    assert "there is no --key" in done.err


def test_wait_also_reports_whether_the_job_existed(sh: Shell) -> None:
    for was_there in (False, True):
        document = json.loads(sh.ok("gsub", "--json", "--wait", "--key", "waited", "-o", "/dev/null", "--", "true"))
        assert (document["existing"], document["job"]["state"]) == (was_there, "COMPLETED")


def test_the_same_batch_under_a_key_returns_the_same_jobs(sh: Shell) -> None:
    typed, lines = ["--hold", "--key", "k-batch", "--batch", "-"], b"echo 1\necho 2\n"
    ids = sh.type("gsub", "--parsable", *typed, stdin=lines).out.split()
    again = sh.type("gsub", *typed, stdin=lines)
    assert (again.code, again.out) == (0, f"Submitted jobs {ids[0]} to {ids[1]} (2 jobs)\n")
    assert f"jobs {ids[0]} to {ids[1]} have the key 'k-batch'; nothing new was submitted" in again.err
    document = json.loads(sh.type("gsub", "--json", *typed, "-c", "2", stdin=lines).out)
    assert (document["ids"], document["existing"], document["differs"]) == ([*map(int, ids)], True, ["cpus"])
    other = sh.type("gsub", *typed, stdin=b"echo 1\n")
    assert (other.code, other.out) == (1, "")
    assert f"the key 'k-batch' belongs to jobs {ids[0]} and {ids[1]}, a batch with a different list" in other.err


def start_one_that_dies(own: Shell, at: str) -> None:
    """Start a daemon that dies at this step."""
    own.is_to_start = False
    assert own.type("gpusched", "daemon", "start", GPUSCHED_CRASH_AT=at).code == 0


def test_a_batch_with_a_key_is_handed_in_again_when_the_daemon_dies(own: Shell) -> None:
    start_one_that_dies(own, "batch:2")
    lines = b"".join(b"echo %d\n" % number for number in range(900))
    done = own.type("gsub", "--hold", "--key", "k", "--batch", "-", stdin=lines)
    assert done.out == "Submitted jobs 1 to 900 (900 jobs)\n"
    assert own.ok("gq", "--quiet").split() == [str(number) for number in range(1, 901)]


def test_concurrent_submissions_with_one_key_make_one_job_across_a_kill(own: Shell) -> None:
    own.submit("--", "true")
    argv = own.argv("gsub", "--parsable", "--key", "k", "--hold", "--", "true")
    for _ in range(2):
        running = [subprocess.Popen(argv, env=own.env, cwd=own.work, stdout=subprocess.PIPE) for _ in range(12)]
        assert {process.communicate(timeout=60)[0] for process in running} == {b"2\n"}
        pid = json.loads(own.ok("gpusched", "daemon", "status", "--json"))["daemon"]["pid"]
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), what="the daemon to be gone")
    assert own.submit("--key", "k", "--hold", "--", "true") == "2"
    assert own.ok("gq", "-a", "--quiet").split() == ["1", "2"]


def test_a_submission_with_a_key_is_retried_when_the_daemon_dies(own: Shell) -> None:
    start_one_that_dies(own, "commit:1")
    assert own.submit("--key", "k", "--hold", "--", "true") == "1"
    assert own.ok("gq", "-a", "--quiet").split() == ["1"]


def test_a_submission_without_a_key_warns_that_it_may_have_been_accepted(own: Shell) -> None:
    start_one_that_dies(own, "commit:1")
    done = own.type("gsub", "--hold", "--", "true")
    assert done.code == 1
    assert done.out == ""
    assert "error: the scheduler went away before it answered and may have accepted the job" in done.err
    assert "--key" in done.err
    assert own.ok("gq", "-a", "--quiet") == ""


def test_a_forecast_is_retried_when_the_daemon_dies(own: Shell) -> None:
    start_one_that_dies(own, "commit:1")
    assert own.ok("gsub", "--dry-run", "--", "true")


def test_a_hundred_concurrent_requests_with_one_key_make_one_job(sh: Shell) -> None:
    sh.submit("--", "true")
    spec = {"argv": ["true"], "work_dir": "/", "hold": True, "key": "k-hundred"}

    def one(_: int) -> tuple[str, bool]:
        with DaemonConnection(str(sh.home / "run" / "api.sock")) as client:
            answer = client.call("POST", "/v1/jobs", {"spec": spec})
        return answer["job"]["id"], answer["existing"]

    with ThreadPoolExecutor(100) as pool:
        found = list(pool.map(one, range(100)))
    assert len({job_id for job_id, _ in found}) == 1
    assert sorted(existing for _, existing in found) == [False] + [True] * 99


# --- resubmit -------------------------------------------------------------------------------------


def test_a_repeat_keeps_script_arguments_environment_folder_and_requests(sh: Shell, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    script = tmp_path / "s.sh"
    script.write_text('#!/bin/sh\necho "$1:$TOKEN:$(pwd)"\n')
    words = (
        *("-D", "there", "-g", "1", "--vram", "2G", "-c", "2", "-t", "1h", "--retries", "3", "-o", "out-%j"),
        *("--nice", "5", str(script), "an arg"),
    )
    first = sh.ok("gsub", "--parsable", *words, TOKEN="s3cret").strip()
    sh.ok("gwait", first)
    script.unlink()
    again = sh.type("gsub", "--parsable", "--resubmit", first, cwd=tmp_path.parent, TOKEN="other")
    new = again.out.strip()
    sh.ok("gwait", new)
    assert (tmp_path / "there" / f"out-{new}").read_text() == f"an arg:s3cret:{tmp_path / 'there'}\n"
    one, other = (json.loads(sh.ok("gshow", "--json", word))["jobs"][0] for word in (first, new))
    for key in ("name", "gpu_request", "cpus", "time_limit_s", "nice", "retries", "work_dir", "request"):
        assert one[key] == other[key], key
    assert f"as job {first} was" in other["events"][0]["text"]


def test_options_override_a_repeat(sh: Shell) -> None:
    old = ["-g", "0.5", "-c", "2", "-t", "1h", "--hold", "-J", "old", "--wrap", 'echo "$A-$B"']
    first = sh.ok("gsub", "--parsable", *old, A="1").strip()
    words = ["-g", "2", "-t", "UNLIMITED", "-J", "new", "-E", "B=2", "-o", "seen", "-c", "1"]
    job = json.loads(sh.ok("gsub", "--json", "--resubmit", first, *words))["job"]
    assert (job["gpu_request"], job["time_limit_s"], job["name"], job["cpus"]) == ("2", None, "new", 1.0)
    sh.ok("gwait", job["id"])
    assert (sh.work / "seen").read_text() == "1-2\n"
    without = json.loads(sh.ok("gsub", "--json", "--hold", "--resubmit", first, "-g", "0"))["job"]
    assert (without["gpu_request"], without["cpus"], without["time_limit_s"]) == ("0", 2.0, 3600)


def test_settings_of_one_submission_are_not_repeated(sh: Shell) -> None:
    parent = sh.submit("--", "true")
    first = sh.submit("--key", "r-key", "--hold", "-d", f"afterok:{parent}", "--begin", "now+1h", "--", "true")
    job = json.loads(sh.ok("gsub", "--json", "--resubmit", first))["job"]
    assert (job["key"], job["hold"], job["dependency"]) == (None, None, None)
    sh.ok("gwait", "--timeout", "60s", job["id"])
    # With a key of its own a repetition is made once, too.
    once = sh.submit("--resubmit", first, "--key", "r-once")
    assert sh.submit("--resubmit", first, "--key", "r-once") == once


def test_several_jobs_are_repeated_in_order(sh: Shell) -> None:
    ids = [sh.submit("-J", f"several{n}", "--", "true") for n in range(3)]
    made = sh.ok("gsub", "--parsable", "--hold", "--resubmit", ",".join(ids[:2]), "--resubmit", ids[2]).split()
    names = [json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0]["name"] for job_id in made]
    assert names == ["several0", "several1", "several2"]


def test_arrays_and_tasks_have_keys_and_are_repeated(sh: Shell) -> None:
    words = ["-o", "/dev/null", "--wrap", "exit $GPUSCHED_ARRAY_TASK_ID"]
    array = sh.submit("-a", "0-2", "--key", "r-array", *words)
    assert sh.type("gwait", array).code == 1
    # One key for the whole array, also after its tasks have rows of their own.
    assert sh.submit("-a", "0-2", "--key", "r-array", *words) == array
    assert "a different set of tasks" in sh.type("gsub", "-a", "0-3", "--key", "r-array", *words).err
    one = sh.submit("--resubmit", f"{array}_2")
    sh.type("gwait", one)
    assert set(sh.ok("gq", "-a", "--quiet", "-j", one).split()) - {one} == {f"{one}_2"}
    both = sh.ok("gsub", "--resubmit", f"{array}_[0-1]", "--hold")
    assert "to" not in both.split()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--resubmit", "999999"], "there is no job 999999"),
        (["--resubmit", ""], "names no job"),
        (["--resubmit", "@", "x.sh"], "x.sh"),
        (["--resubmit", "@", "--wrap", "true"], "--wrap"),
        (["--resubmit", "@", "--export", "NONE"], "--export"),
        (["--resubmit", "@", "-g", "99"], "99 GPUs"),
    ],
)
def test_an_invalid_repeat_is_refused(sh: Shell, words: list[str], says: str) -> None:
    sh.submit("--hold", "--", "true")
    before = sh.ok("gq", "-a", "--quiet")
    done = sh.type("gsub", *words)
    assert done.code in (1, 2)
    assert says in done.err
    assert sh.ok("gq", "-a", "--quiet") == before
