"""grun --job: a command or shell in a running job, from outside of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import pytest
from screen import Screen
from shell import Shell
from support import is_alive, wait_until

PROMPT = "%%> "


def running(sh: Shell, *words: str) -> str:
    job_id = sh.submit(*words)
    wait_until(lambda: job(sh, job_id)["state"] == "RUNNING", what="the job to run")
    return job_id


def job(sh: Shell, job_id: str) -> dict[str, Any]:
    return dict(json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0])


def test_a_command_has_the_gpus_folder_and_environment_of_the_job(sh: Shell) -> None:
    (sh.work / "inner").mkdir()
    job_id = running(sh, "-g", "1", "-D", str(sh.work / "inner"), "-E", "OF_JOB=1", "--", "sleep", "600")
    gpu = str(job(sh, job_id)["gpus"][0]["index"])
    text = "pwd; echo $CUDA_VISIBLE_DEVICES $GPUSCHED_JOB_ID $OF_JOB $ADDED; echo bad >&2; exit 7"
    done = sh.type("grun", "--job", job_id, "-E", "ADDED=2", "sh", "-c", text)
    assert (done.code, done.out, done.err) == (7, f"{sh.work}/inner\n{gpu} {job_id} 1 2\n", "bad\n")
    assert sh.ok("grun", "--job", job_id, "-D", str(sh.work), "pwd") == f"{sh.work}\n"
    assert job(sh, job_id)["state"] == "RUNNING"
    sh.ok("gcancel", job_id)


def test_without_a_command_a_shell_reads_the_input(sh: Shell) -> None:
    job_id = running(sh, "--", "sleep", "600")
    done = sh.type("grun", "--job", job_id, stdin=b"echo in $GPUSCHED_JOB_ID\nexit 3\n", SHELL="/bin/sh")
    assert (done.code, done.out, done.err) == (3, f"in {job_id}\n", "")
    sh.ok("gcancel", job_id)


def test_a_shell_at_the_terminal_follows_its_size_and_is_left_by_tilde(sh: Shell) -> None:
    job_id = running(sh, "--", "sleep", "600")
    words = ("--pty", "bash", "--norc", "--noprofile", "-i")
    with Screen(
        sh, "grun", "--job", job_id, "-E", f"PS1={PROMPT}", "-E", "HISTFILE=", *words, size=(33, 111)
    ) as screen:
        screen.see(PROMPT)
        screen.press("stty size; echo $TERM $GPUSCHED_JOB_ID; echo pid-$$-\r")
        screen.see("33 111")
        screen.see(f"dumb {job_id}")
        screen.see("\npid-")
        pid = int(screen.see("-\r")[:-2])
        screen.see(PROMPT)
        screen.press("trap 'echo size-$(stty size | tr \" \" x)' WINCH\r")
        screen.see(PROMPT)
        screen.resize(50, 132)
        # The new size may arrive after a key that was typed later.
        screen.press_until("\r", "size-50x132")
        # A shell drops an interrupt that comes between its fork and the exec of the child.
        screen.press("sh -c 'echo ready-$((1+1)); exec sleep 600'\r")
        screen.see("ready-2\r\n")
        screen.press("\x03")
        screen.see(PROMPT)
        screen.press("\r~.")
        screen.see(f"left job {job_id}, which continues; the command in it is being ended")
        assert screen.end() == 0
        assert not screen.is_raw
    wait_until(lambda: not is_alive(pid), what="the shell to end")
    assert job(sh, job_id)["state"] == "RUNNING"
    sh.ok("gcancel", job_id)


def test_the_end_of_the_job_ends_the_shell(sh: Shell) -> None:
    job_id = running(sh, "--", "sleep", "600")
    with Screen(sh, "grun", "--job", job_id, SHELL="/bin/sh") as screen:
        screen.press("echo in-$((1+1))\r")
        screen.see("in-2")
        sh.ok("gcancel", job_id)
        screen.see(f"job {job_id} is being ended")
        assert screen.end() != 0
        assert not screen.is_raw
    sh.type("gwait", "--timeout", "60s", job_id)
    found = job(sh, job_id)
    assert (found["state"], found["signal"]) == ("CANCELLED", signal.SIGTERM)


def test_a_killed_client_and_a_killed_daemon_leave_the_job_alone(own: Shell) -> None:
    job_id = running(own, "--", "sleep", "600")
    words = ("--job", job_id, "sh", "-c", "echo $$; cat; exit 5")
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    clients = [subprocess.Popen(own.argv("grun", *words), env=own.env, cwd=own.work, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    pids = [int(client.stdout.readline()) for client in clients]
    clients[0].kill()
    clients[0].communicate()
    wait_until(lambda: not is_alive(pids[0]), what="the command of the killed client to end")
    daemon = int(json.loads(own.ok("gpusched", "daemon", "status", "--json"))["daemon"]["pid"])
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: not is_alive(daemon), what="the daemon to be gone")
    assert clients[1].communicate(b"through\n", timeout=60)[0] == b"through\n"
    assert clients[1].returncode == 5
    assert job(own, job_id)["state"] == "RUNNING"
    assert own.ok("grun", "--job", job_id, "echo", "again") == "again\n"


def test_what_cannot_be_entered_is_said_in_a_sentence(own: Shell) -> None:
    first, waiting = running(own, "-g", "2", "--", "sleep", "600"), own.submit("-g", "1", "--", "true")
    pending = "is PENDING; a command can be started only in a running job"
    for job_id, sentence, hint in (
        (waiting, pending, f"see what it waits for with: gshow {waiting}"),
        ("99", None, "list the jobs with: gq -a"),
    ):
        done = own.type("grun", "--job", job_id, "true")
        text = f"job {job_id} {sentence}" if sentence else f"there is no job {job_id}"
        assert (done.code, done.out, done.err) == (1, "", f"grun: error: {text}\ngrun: hint: {hint}\n")
    own.ok("gctl", "suspend", first)
    wait_until(lambda: job(own, first)["state"] == "SUSPENDED", what="the suspension")
    done = own.type("grun", "--job", first, "true")
    assert done.err.splitlines()[1] == f"grun: hint: resume it with: gctl resume {first}"
    own.ok("gcancel", first)
    own.type("gwait", "--timeout", "60s", first)
    done = own.type("grun", "--job", first, "true")
    assert done.err.startswith(f"grun: error: job {first} is CANCELLED; ")


@pytest.mark.parametrize(
    "words", [["-g", "1"], ["--keep"], ["-n", "2"], ["-J", "x"], ["--lease", "1h"], ["--export=NONE"]]
)
def test_options_of_a_new_job_are_refused(sh: Shell, words: list[str]) -> None:
    done = sh.type("grun", "--job", "1", *words, "true")
    assert done.code == 2
    assert done.err.startswith("grun: error: a command in a running job shares its resources and cannot request any\n")
