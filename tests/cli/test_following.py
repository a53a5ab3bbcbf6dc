"""glogs and gsub -f with real jobs: retries, several jobs, a killed daemon, files that are emptied and removed."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

from shell import Shell
from support import is_alive, wait_until

RETRIES = ("--retries", "2", "--backoff", "0")


def following(sh: Shell, *words: str, command: str = "glogs") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        sh.argv(command, *words), env=sh.env, cwd=sh.work, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finished(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err.decode()


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_every_run_is_followed_and_its_start_announced(sh: Shell) -> None:
    script = 'n=${SLURM_RESTART_COUNT:-0}; echo "run $n"; [ $n = 2 ]'
    code, out, err = finished(following(sh, "-f", *RETRIES, "--wrap", script, command="gsub"))
    assert code == 0
    assert out.splitlines()[1:] == ["run 0", "run 1", "run 2"]
    assert "run 1 ended; run 2 started" in err
    assert "run 2 ended; run 3 started" in err


def test_quiet_prints_only_the_output(sh: Shell) -> None:
    script = 'n=${SLURM_RESTART_COUNT:-0}; echo "run $n"; exit 3'
    job_id = sh.submit("-H", *RETRIES, "--wrap", script)
    process = following(sh, "-f", "--quiet", "--since-run", "1", job_id)
    sh.ok("gctl", "release", job_id)
    assert finished(process) == (3, "run 0\nrun 1\nrun 2\n", "")
    assert sh.ok("glogs", "--since-run", "2", job_id) == "run 1\nrun 2\n"
    assert sh.ok("glogs", "--since-run", "1", "-n", "1", job_id) == "run 0\nrun 1\nrun 2\n"
    code, out, err = finished(following(sh, "-f", "--run", "2", job_id))
    assert (code, out) == (3, "run 1\n")
    assert "run 2 is FAILED" in err
    assert sh.type("glogs", "-f", "--run", "9", job_id).code == 1
    assert sh.type("glogs", "--run", "1", "--since-run", "1", job_id).code == 2


def test_a_job_without_output_shows_why(sh: Shell) -> None:
    job_id = sh.submit("-H", "--", "echo", "hello")
    process = following(sh, "-f", job_id)
    assert process.stderr is not None
    assert f"glogs: job {job_id} is pending (JobHeldUser)" in process.stderr.readline().decode()
    sh.ok("gctl", "release", job_id)
    code, out, _ = finished(process)
    assert (code, out) == (0, "hello\n")


def test_several_jobs_have_prefixes_and_one_exit_code(sh: Shell) -> None:
    good = sh.submit("-J", "good", "--wrap", "printf 'one\\ntwo\\n\\377 no newline'")
    bad = sh.submit("-J", "bad", "--wrap", "echo oops; exit 3")
    done = subprocess.run(sh.argv("glogs", "-f", good, bad), env=sh.env, cwd=sh.work, capture_output=True, timeout=60)
    lines = done.stdout.split(b"\n")
    assert sorted(lines) == sorted(
        [
            b"",
            f"[{good} good] one".encode(),
            f"[{good} good] two".encode(),
            f"[{good} good] ".encode() + b"\xff no newline",
            f"[{bad} bad] oops".encode(),
        ]
    )
    assert done.returncode == 1
    assert f"job {bad} is FAILED" in done.stderr.decode()
    text = subprocess.run(sh.argv("glogs", "--no-prefix", good, bad), env=sh.env, cwd=sh.work, capture_output=True)
    assert (text.returncode, text.stdout) == (0, b"one\ntwo\n\xff no newlineoops\n")
    listed = subprocess.run(sh.argv("glogs", "-n", "1", f"{good},{bad}"), env=sh.env, cwd=sh.work, capture_output=True)
    assert listed.stdout.splitlines()[1] == f"[{bad} bad] oops".encode()


def test_an_array_includes_all_of_its_tasks(sh: Shell) -> None:
    script = "echo task $SLURM_ARRAY_TASK_ID; [ $SLURM_ARRAY_TASK_ID != 2 ]"
    array = sh.submit("-a", "0-3%2", "-J", "many", "--wrap", script)
    code, out, err = finished(following(sh, "-f", array))
    lines = [f"[{array}_{number} many] task {number}" for number in range(4)]
    assert (code, sorted(out.splitlines())) == (1, lines)
    assert f"job {array}_2 is FAILED" in err
    assert sh.ok("glogs", array).splitlines() == lines
    assert sh.ok("glogs", f"{array}_3") == "task 3\n"
    assert sh.ok("glogs", f"{array}_[0-1]").splitlines() == lines[:2]
    assert finished(following(sh, "-f", f"{array}_0", f"{array}_1"))[:2] == (0, "".join(f"{x}\n" for x in lines[:2]))
    code, out, _ = finished(
        following(sh, "-f", "-a", "0-1", "-J", "two", "--wrap", "echo $SLURM_ARRAY_TASK_ID", command="gsub")
    )
    assert code == 0
    assert sorted(line.partition("] ")[2] for line in out.splitlines()[1:]) == ["0", "1"]


def test_an_array_may_exceed_one_answer(sh: Shell) -> None:
    array = sh.submit("-a", "0-2100", "--max-fails", "0", "-J", "big", "--wrap", "echo no; exit 1")
    code, out, err = finished(following(sh, "-f", array))
    assert code == 1
    said = [line for line in out.splitlines() if line.endswith("] no")]
    assert said
    assert len(set(said)) == len(said)
    assert "--max-fails is 0" in err
    # Those that were cancelled before they began say nothing, and nothing is said of them.
    done = sh.type("glogs", array)
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == sorted(out.splitlines())


def test_a_job_that_ended_before_its_start_is_not_waited_for(sh: Shell) -> None:
    job_id = sh.submit("-H", "--", "true")
    sh.ok("gcancel", job_id)
    done = sh.type("glogs", job_id)
    assert done.code == 1
    assert f"hint: see: gshow {job_id}" in done.err


def test_tasks_are_followed_before_they_have_rows(sh: Shell) -> None:
    array = sh.submit("-H", "-a", "0-2", "-J", "late", "--wrap", "echo $SLURM_ARRAY_TASK_ID")
    whole = following(sh, "-f", array)
    assert whole.stderr is not None
    assert f"array {array} is pending (JobHeldUser)" in whole.stderr.readline().decode()
    process = following(sh, "-f", f"{array}_0", f"{array}_2")
    assert process.stderr is not None
    assert "JobHeldUser" in process.stderr.readline().decode()
    assert sh.type("glogs", array).code == 1
    sh.ok("gctl", "release", array)
    code, out, _ = finished(process)
    assert (code, sorted(out.splitlines())) == (0, [f"[{array}_0 late] 0", f"[{array}_2 late] 2"])
    code, out, err = finished(whole)
    assert (code, sorted(out.splitlines()), err) == (0, [f"[{array}_{n} late] {n}" for n in range(3)], "")
    gone = sh.submit("-H", "-a", "0-2", "--", "true")
    sh.ok("gcancel", "-y", gone)
    code, out, err = finished(following(sh, "-f", gone))
    assert (code, out, f"array {gone} is CANCELLED" in err) == (1, "", True)


def test_jobs_without_output_do_not_block_the_others(sh: Shell) -> None:
    there = sh.submit("-J", "there", "--", "echo", "here")
    held = sh.submit("-H", "--", "true")
    sh.ok("gwait", there)
    done = sh.type("glogs", held, there)
    assert (done.code, done.out) == (1, f"[{there} there] here\n")
    assert f"job {held} has not started" in done.err
    sh.ok("gcancel", held)


def test_colours_are_used_only_on_terminals(sh: Shell) -> None:
    ids = [sh.submit("-J", name, "--", "echo", name) for name in ("red", "blue")]
    sh.ok("gwait", *ids)
    for extra, has_colour in (({}, True), ({"NO_COLOR": "1"}, False)):
        parent, child = pty.openpty()
        done = subprocess.run(sh.argv("glogs", *ids), env={**sh.env, **extra}, cwd=sh.work, stdout=child, timeout=60)
        os.close(child)
        text = os.read(parent, 65536)
        os.close(parent)
        assert done.returncode == 0
        assert b"blue" in text
        assert (b"\x1b[" in text) == has_colour


def test_truncating_or_removing_the_file_does_not_stop_following(sh: Shell) -> None:
    script = "echo first; until [ -e go1 ]; do sleep 0.01; done; : > out; echo second"
    script += "; until [ -e go2 ]; do sleep 0.01; done; rm out; echo third; until [ -e go3 ]; do sleep 0.01; done"
    job_id = sh.submit("-o", "out", "--wrap", script)
    process = following(sh, "-f", job_id)
    for word, flag in ((b"first\n", "go1"), (b"second\n", "go2"), (b"third\n", "go3")):
        assert first_line(process) == word
        (sh.work / flag).touch()
    assert finished(process)[0] == 0


def test_a_closed_reader_ends_following_even_without_output(sh: Shell) -> None:
    job_id = sh.submit("-o", "out", "--wrap", "echo one; exec sleep 1000")
    process = following(sh, "-f", job_id)
    assert first_line(process) == b"one\n"
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    sh.ok("gcancel", job_id)


def test_ctrl_c_leaves_the_job_alone(sh: Shell) -> None:
    job_id = sh.submit("-o", "out", "--wrap", "echo one; exec sleep 1000")
    process = following(sh, "-f", job_id)
    assert first_line(process) == b"one\n"
    process.send_signal(signal.SIGINT)
    code, _, err = finished(process)
    assert (code, f"stopped following; job {job_id} is not affected" in err) == (130, True)
    assert sh.ok("gq", "--noheader", "-o", "%t", "-j", job_id) == "R\n"
    sh.ok("gcancel", job_id)


def test_following_survives_a_killed_daemon(own: Shell) -> None:
    script = "echo before; until [ -e go ]; do sleep 0.01; done; echo between; until [ -e stop ]; do sleep 0.01; done"
    job_id = own.submit("-o", "out", "--wrap", script + "; exit 4")
    process = following(own, "-f", job_id)
    assert first_line(process) == b"before\n"
    status = json.loads(own.ok("gpusched", "daemon", "status", "--json"))
    os.kill(status["daemon"]["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(status["daemon"]["pid"]), what="the daemon to be gone")
    (own.work / "go").touch()
    assert first_line(process) == b"between\n", "output goes on while there is no daemon"
    own.ok("gpusched", "daemon", "start")
    (own.work / "stop").touch()
    code, _, err = finished(process)
    assert (code, "FAILED" in err) == (4, True)


def test_output_that_is_not_a_file_is_reported(sh: Shell) -> None:
    job_id = sh.submit("-o", "/dev/null", "--", "echo", "lost")
    sh.ok("gwait", job_id)
    done = sh.type("glogs", job_id)
    assert (done.code, "is not a regular file" in done.err) == (1, True)
    assert sh.type("glogs", "-f", job_id).code == 0


def test_tail_lines_are_printed_while_following(sh: Shell) -> None:
    script = "seq 1000; touch ready; until [ -e go ]; do sleep 0.01; done; echo end"
    job_id = sh.submit("-o", "out", "--wrap", script)
    wait_until((sh.work / "ready").exists, what="the job to have printed")
    process = following(sh, "-f", "-n", "2", job_id)
    assert [first_line(process) for _ in range(2)] == [b"999\n", b"1000\n"]
    Path(sh.work / "go").touch()
    assert finished(process)[:2] == (0, "end\n")


def test_all_runs_are_followed_from_the_start_or_the_current_one_from_its_tail(sh: Shell) -> None:
    script = 'n=${SLURM_RESTART_COUNT:-0}; echo "run $n"; [ $n = 1 ]'
    job_id = sh.submit(*RETRIES, "--wrap", script)
    sh.ok("gwait", job_id)
    assert finished(following(sh, "-f", job_id))[1] == "run 0\nrun 1\n"
    assert finished(following(sh, "-f", "-n", "5", job_id))[1] == "run 1\n"
