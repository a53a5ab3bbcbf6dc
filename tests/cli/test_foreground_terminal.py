"""grun with a terminal: sizes, keys that signal, job control, leaving and coming back, and every way out."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from screen import Screen
from shell import Shell
from support import is_alive, wait_until

PROMPT = "%%> "


def shell_at(sh: Shell, *options: str, **settings: Any) -> Screen:
    """A shell that shows one prompt and reads no start-up files."""
    return Screen(
        sh, "grun", *options, "--pty", "bash", "--norc", "--noprofile", "-i", PS1=PROMPT, HISTFILE="", **settings
    )


def start_cat(screen: Screen) -> None:
    """A program that shows each line again; when its word is seen, the shell has let go of the terminal."""
    screen.press("sh -c 'echo ready-$((1+1)); exec cat'\r")
    screen.see("ready-2\r\n")


def job(sh: Shell, job_id: str) -> dict[str, Any]:
    return dict(json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0])


def last_id(sh: Shell, name: str) -> str:
    """The newest job of this name."""
    return sh.ok("gq", "-a", "--quiet", "-n", name).split()[-1]


def ended(sh: Shell, job_id: str) -> dict[str, Any]:
    sh.type("gwait", "--timeout", "60s", job_id)
    return job(sh, job_id)


def test_a_shell_gets_its_own_terminal_and_its_exit_code_is_returned(sh: Shell) -> None:
    with shell_at(sh) as screen:
        screen.see(PROMPT)
        assert screen.is_raw
        screen.press("test -t 0 && test -t 1 && test -t 2 && echo is-a-$((40+2))\r")
        screen.see("is-a-42")
        screen.press("tty; echo tty-$?\r")
        assert "\n/dev/pts/" in screen.see("tty-0")
        screen.press("exit 7\r")
        assert screen.end() == 7
        assert not screen.is_raw


def test_the_shell_sees_the_gpus_of_the_job(sh: Shell) -> None:
    with shell_at(sh, "-g", "1") as screen:
        screen.see(PROMPT)
        screen.press("echo [$CUDA_VISIBLE_DEVICES] $GPUSCHED_GPUS\r")
        screen.see("\n[")
        assert screen.see("] 1")[0].isdigit()
        screen.press("exit\r")
        assert screen.end() == 0


def test_the_window_size_is_set_at_the_start_and_follows_changes(sh: Shell) -> None:
    with Screen(
        sh, "grun", "--pty", "sh", "-c", "stty size; exec bash --norc -i", PS1=PROMPT, size=(33, 111)
    ) as screen:
        screen.see("33 111")
        screen.see(PROMPT)
        screen.press("trap 'echo size-$(stty size | tr \" \" x)' WINCH\r")
        screen.see(PROMPT)
        screen.resize(50, 132)
        # The new size may arrive after a key that was typed later.
        screen.press_until("\r", "size-50x132")
        screen.press("exit 0\r")
        assert screen.end() == 0


def test_ctrl_c_ctrl_z_and_fg_act_in_the_inner_shell(sh: Shell) -> None:
    with shell_at(sh) as screen:
        screen.see(PROMPT)
        start_cat(screen)
        screen.press("first\r")
        screen.see("first\r\nfirst\r\n")
        screen.press("\x03")
        screen.see(PROMPT)
        screen.press("echo code-$?\r")
        screen.see("code-130")
        start_cat(screen)
        screen.press("second\r")
        screen.see("second\r\nsecond\r\n")
        screen.press("\x1a")
        screen.see("Stopped")
        screen.press("fg\r")
        screen.see("exec cat'\r\n")
        screen.press_until("third\n", "third\r\nthird\r\n")
        screen.press("\x04")
        screen.see(PROMPT)
        screen.press("exit 3\r")
        assert screen.end() == 3


def test_ctrl_d_ends_the_shell(sh: Shell) -> None:
    with shell_at(sh) as screen:
        screen.see(PROMPT)
        screen.press("\x04")
        assert screen.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_restores_the_terminal_and_ends_the_job(sh: Shell, number: int) -> None:
    with shell_at(sh, "-J", f"sig{number}") as screen:
        screen.see(PROMPT)
        screen.process.send_signal(number)
        assert screen.end() == 128 + number
        assert not screen.is_raw
    found = ended(sh, last_id(sh, f"sig{number}"))
    assert (found["state"], found["reason"]) == ("CANCELLED", "ClientLost")


def test_a_killed_client_ends_its_job(sh: Shell) -> None:
    with shell_at(sh, "-J", "killed", "-g", "1") as screen:
        screen.see(PROMPT)
        screen.press("sleep 1000 & echo pid-$!.\r")
        screen.see("\npid-")
        sleeper = int(screen.see(".")[:-1])
        screen.process.kill()
        screen.process.wait()
        found = ended(sh, last_id(sh, "killed"))
    assert (found["state"], found["reason"]) == ("CANCELLED", "ClientLost")
    assert not is_alive(sleeper)


def test_a_lost_connection_ends_the_job(sh: Shell) -> None:
    with shell_at(sh, "-J", "lost") as screen:
        screen.see(PROMPT)
        screen.close_window()
        screen.process.wait(timeout=60)
        assert ended(sh, last_id(sh, "lost"))["reason"] == "ClientLost"


def test_a_job_that_ignores_the_hangup_is_stopped_the_usual_way(sh: Shell) -> None:
    script = "trap '' HUP; trap 'echo got-term; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    with Screen(sh, "grun", "-J", "deaf", "--grace", "10s", "--pty", "sh", "-c", script) as screen:
        screen.see("ready")
        screen.process.kill()
        screen.process.wait()
        found = ended(sh, last_id(sh, "deaf"))
    assert (found["reason"], found["exit_code"]) == ("ClientLost", 5)
    assert "got-term" in Path(found["stdout_path"]).read_text()


def test_a_kept_job_continues_and_can_be_reattached(sh: Shell) -> None:
    with shell_at(sh, "--keep", "-J", "kept") as screen:
        screen.see(PROMPT)
        screen.press("word=remembered\r")
        screen.see(PROMPT)
        screen.process.kill()
        screen.process.wait()
    job_id = last_id(sh, "kept")
    assert job(sh, job_id)["state"] == "RUNNING"
    with Screen(sh, "grun", "--attach", job_id, size=(40, 100)) as screen:
        screen.see("word=remembered")
        screen.press("stty size; echo [$word]\r")
        screen.see("40 100")
        screen.see("[remembered]")
        screen.press("\r~.")
        assert screen.end() == 0
        assert f"grun --attach {job_id}" in screen.shown.decode()
        assert not screen.is_raw
    assert job(sh, job_id)["state"] == "RUNNING"
    with Screen(sh, "grun", "--attach", job_id) as screen:
        screen.see(PROMPT)
        screen.press("exit 4\r")
        assert screen.end() == 4


def test_a_second_client_is_refused_and_the_first_continues(sh: Shell) -> None:
    with shell_at(sh, "--keep", "-J", "two") as screen:
        screen.see(PROMPT)
        done = sh.type("grun", "--attach", last_id(sh, "two"))
        assert done.code == 1
        assert f"another client is attached: process {screen.process.pid}" in done.err
        assert f"hint: detach that client first: kill {screen.process.pid}" in done.err
        screen.press("echo still-$((1+1))\r")
        screen.see("still-2")
        screen.press("exit\r")
        assert screen.end() == 0


def test_tildes_are_passed_through(sh: Shell) -> None:
    with shell_at(sh) as screen:
        screen.see(PROMPT)
        screen.press("echo a~. b\r")
        screen.see("\r\na~. b")
        screen.press("~~ 2>/dev/null; echo c\r")
        screen.see("\r\nc")
        screen.press("exit\r")
        assert screen.end() == 0


def test_a_lease_warns_and_ends_an_idle_shell_with_a_reason(sh: Shell) -> None:
    with shell_at(sh, "--lease", "3s", "-J", "forgotten") as screen:
        screen.see(PROMPT)
        screen.see("this job ends in 1 s unless you type something")
        screen.see("its lease expired without activity")
        assert screen.end() > 128
        assert not screen.is_raw
    found = ended(sh, last_id(sh, "forgotten"))
    assert (found["state"], found["reason"]) == ("TIMEOUT", "LeaseExpired")


def test_typing_after_the_warning_renews_the_lease(sh: Shell) -> None:
    # Warned of two seconds before its end.
    with shell_at(sh, "--lease", "8s") as screen:
        for _ in range(2):
            screen.see("unless you type something")
            screen.press("echo here\r")
            screen.see("\r\nhere")
        screen.press("exit 6\r")
        assert screen.end() == 6


def test_gcancel_ends_a_shell_that_ignores_term_at_once(sh: Shell) -> None:
    with shell_at(sh, "-J", "cancelled") as screen:
        screen.see(PROMPT)
        job_id = last_id(sh, "cancelled")
        sh.ok("gcancel", job_id)
        screen.see(f"job {job_id} was terminated: cancelled by ")
        assert screen.end() == 128 + signal.SIGHUP
    assert ended(sh, job_id)["state"] == "CANCELLED"


def test_a_killed_supervisor_is_reported_and_the_terminal_restored(sh: Shell) -> None:
    with shell_at(sh, "-J", "orphan") as screen:
        screen.see(PROMPT)
        screen.press("echo pid-$PPID.\r")
        screen.see("\npid-")
        supervisor = int(screen.see(".").strip(". \r\n"))
        os.kill(supervisor, signal.SIGKILL)
        assert screen.end() == 1
        assert not screen.is_raw
        assert "NODE_FAIL" in screen.shown.decode()


def test_a_pending_session_shows_its_reason_and_then_starts(sh: Shell) -> None:
    holder = sh.submit("-g", "3", "--exclusive", "--", "sleep", "600")
    with shell_at(sh, "-g", "3", "-J", "patient") as screen:
        screen.see("is pending: (Resources)")
        sh.ok("gcancel", holder)
        screen.see(PROMPT)
        screen.press("exit\r")
        assert screen.end() == 0


def test_ctrl_c_while_pending_cancels_the_job(sh: Shell) -> None:
    holder = sh.submit("-g", "3", "--exclusive", "--", "sleep", "600")
    with shell_at(sh, "-g", "3", "-J", "impatient") as screen:
        screen.see("is pending: (Resources)")
        screen.press("\x03")
        assert screen.end() == 130
        assert "was cancelled before it started" in screen.shown.decode()
    assert ended(sh, last_id(sh, "impatient"))["state"] == "CANCELLED"
    sh.ok("gcancel", holder)


def test_a_session_survives_killing_and_restarting_the_daemon(own: Shell) -> None:
    with shell_at(own) as screen:
        screen.see(PROMPT)
        pid = int(json.loads(own.ok("gpusched", "daemon", "status", "--json"))["daemon"]["pid"])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), what="the daemon to be gone")
        screen.press("echo without-$((1+1))\r")
        screen.see("without-2")
        assert own.ok("gq", "--quiet").split() == ["1"]
        screen.press("echo with-$((1+1))\r")
        screen.see("with-2")
        screen.press("exit 9\r")
        assert screen.end() == 9
    found = ended(own, "1")
    assert (found["state"], found["exit_code"]) == ("FAILED", 9)


def test_terminal_output_is_logged_up_to_a_size(own: Shell) -> None:
    (own.home / "config.toml").write_text("[interactive]\nlog_mib = 1\n")
    with Screen(
        own, "grun", "--pty", "sh", "-c", "echo begin; head -c 3000000 /dev/zero | tr '\\0' x; echo the-end"
    ) as screen:
        screen.see("the-end")
        assert screen.end() == 0
    text = Path(ended(own, "1")["stdout_path"]).read_bytes()
    assert text.startswith(b"begin\r\nxxx")
    assert text.endswith(b"gpusched: the rest is not kept; see [interactive] log_mib\n")
    assert (1 << 20) <= len(text) < (1 << 20) + 200


def test_without_a_command_the_users_shell_starts(sh: Shell) -> None:
    with Screen(sh, "grun", "--pty", SHELL="/bin/sh", PS1=PROMPT) as screen:
        screen.see(PROMPT)
        screen.press("echo mine-$((1+1)); exit\r")
        screen.see("mine-2")
        assert screen.end() == 0


def test_a_stopped_client_blocks_the_job_until_it_continues(sh: Shell) -> None:
    with Screen(sh, "grun", "-J", "stopped", "--pty", "sh", "-c", "seq 300000; echo all-$((1+1))") as screen:
        screen.see("\n10\r")
        screen.process.send_signal(signal.SIGSTOP)
        log = Path(job(sh, last_id(sh, "stopped"))["stdout_path"])
        sizes = [-1]

        def stands() -> bool:
            sizes.append(log.stat().st_size)
            time.sleep(0.2)
            return sizes[-1] == sizes[-2] > 0

        wait_until(stands, what="the job to be held up")
        assert sizes[-1] < 1_500_000
        screen.process.send_signal(signal.SIGCONT)
        screen.see("all-2")
        assert screen.end() == 0
        assert screen.shown.count(b"\n") >= 300001
