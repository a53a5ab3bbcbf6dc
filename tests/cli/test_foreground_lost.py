"""grun whose client goes before its job begins, in every way; and what double-forks out of a session."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from screen import Screen
from shell import Shell
from support import is_alive, wait_until

LOST = ("CANCELLED", "ClientLost")
PROMPT = "%%> "


def job(sh: Shell, job_id: str) -> dict[str, Any]:
    return dict(json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0])


def ended(sh: Shell, job_id: str) -> dict[str, Any]:
    sh.type("gwait", "--timeout", "60s", job_id)
    return job(sh, job_id)


def how(found: dict[str, Any]) -> tuple[str, str]:
    return found["state"], found["reason"]


def is_attached(sh: Shell, job_id: str, pid: int) -> bool:
    found = job(sh, job_id)
    client = found["foreground"]["client"]
    return found["state"] == "RUNNING" and client is not None and client["pid"] == pid


def kill_daemon(sh: Shell) -> None:
    pid = int(json.loads(sh.ok("gpusched", "daemon", "status", "--json"))["daemon"]["pid"])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), what="the daemon to be gone")


@pytest.fixture
def wait_in_queue(own: Shell) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], str]]]:
    """grun for a card that another job has; the process and the id of what it waits for."""
    own.submit("-g", "2", "--", "sleep", "600")
    begun: list[subprocess.Popen[bytes]] = []

    def started(*words: str) -> tuple[subprocess.Popen[bytes], str]:
        argv = own.argv("grun", "-g", "1", *words, "sleep", "600")
        process = subprocess.Popen(argv, env=own.env, cwd=own.work, stdin=subprocess.DEVNULL)
        begun.append(process)
        job_id = str(len(begun) + 1)
        wait_until(lambda: job_id in own.ok("gq", "--quiet").split(), what="the job")
        return process, job_id

    yield started
    for process in begun:
        process.kill()
        process.wait()


Wait = Callable[..., tuple[subprocess.Popen[bytes], str]]


def test_killing_a_client_in_the_queue_cancels_its_job(own: Shell, wait_in_queue: Wait) -> None:
    process, job_id = wait_in_queue()
    waits = job(own, job_id)
    assert waits["foreground"]["client"] == {"pid": process.pid, "since_at": waits["submit_at"]}
    assert f"process {process.pid} has been waiting since" in own.ok("gshow", job_id)
    process.kill()
    process.wait()
    found = ended(own, job_id)
    assert how(found) == LOST
    assert found["reason_text"] == f"its client, process {process.pid}, was gone before the job began"
    assert found["run"] == 0
    assert job(own, "1")["state"] == "RUNNING"


def test_a_zombie_client_counts_as_gone(own: Shell, wait_in_queue: Wait) -> None:
    process, job_id = wait_in_queue()
    process.kill()
    assert how(ended(own, job_id)) == LOST


def test_closing_the_terminal_in_the_queue_cancels_the_job(own: Shell) -> None:
    own.submit("-g", "2", "--", "sleep", "600")
    with Screen(own, "grun", "-g", "1", "--pty", "bash") as screen:
        screen.see("is pending: (Resources)")
        screen.close_window()
        assert screen.process.wait(timeout=60) == 128 + signal.SIGHUP
    assert ended(own, "2")["state"] == "CANCELLED"


def test_a_kept_job_stays_pending_after_its_client_was_killed(own: Shell, wait_in_queue: Wait) -> None:
    kept, kept_id = wait_in_queue("--keep")
    other, other_id = wait_in_queue()
    for process in (kept, other):
        process.kill()
        process.wait()
    assert how(ended(own, other_id)) == LOST
    assert job(own, kept_id)["state"] == "PENDING"
    assert job(own, kept_id)["foreground"]["client"] is None
    assert f"come back with: grun --attach {kept_id}" in own.ok("gshow", kept_id)


def test_a_stopped_client_does_not_count_as_gone(own: Shell, wait_in_queue: Wait) -> None:
    stopped, stopped_id = wait_in_queue()
    other, other_id = wait_in_queue()
    stopped.send_signal(signal.SIGSTOP)
    other.kill()
    other.wait()
    assert how(ended(own, other_id)) == LOST
    assert job(own, stopped_id)["state"] == "PENDING"
    stopped.send_signal(signal.SIGCONT)


def test_the_next_daemon_notices_a_client_killed_while_it_was_down(own: Shell, wait_in_queue: Wait) -> None:
    process, job_id = wait_in_queue()
    goes_on, its_id = wait_in_queue()
    kill_daemon(own)
    process.kill()
    process.wait()
    assert how(ended(own, job_id)) == LOST
    assert job(own, its_id)["state"] == "PENDING"
    own.ok("gcancel", "1")
    # Its run begins before its client, which has to learn of it, is there.
    wait_until(lambda: is_attached(own, its_id, goes_on.pid), what="the other one to begin")


def test_a_client_that_leaves_without_a_daemon_says_what_happens_to_its_job(own: Shell) -> None:
    own.submit("-g", "2", "--", "sleep", "600")
    with Screen(own, "grun", "-g", "1", "--pty", "bash") as screen:
        screen.see("is pending: (Resources)")
        kill_daemon(own)
        screen.press("\x03\x03")
        assert screen.end() == 130
        assert "job 2 will be cancelled when it does" in screen.shown.decode()
        assert "Traceback" not in screen.shown.decode()
    assert how(ended(own, "2")) == LOST


def test_gshow_shows_the_attached_client_and_the_end_of_the_lease(own: Shell) -> None:
    command = ("bash", "--norc", "--noprofile", "-i")
    with Screen(own, "grun", "--keep", "--lease", "1h", "--pty", *command, PS1=PROMPT) as screen:
        screen.see(PROMPT)
        facts = job(own, "1")["foreground"]
        assert (facts["terminal"], facts["keep"], facts["lease_s"], facts["is_known"]) == (True, True, 3600, True)
        assert facts["client"]["pid"] == screen.process.pid
        first = facts["lease_ends_at"]
        assert first == pytest.approx(facts["client"]["since_at"] + 3600, abs=30)
        screen.press("echo typed-$((1+1))\r")
        screen.see("typed-2")
        assert job(own, "1")["foreground"]["lease_ends_at"] > first
        shown = own.ok("gshow", "1")
        assert f"Foreground: at a terminal, process {screen.process.pid} has been attached since " in shown
        assert "; keeps running after that disconnects" in shown
        refused = own.type("gctl", "requeue", "1")
        assert (refused.code, "its next run would have no terminal" in refused.err) == (1, True)
        assert "Lease:      1:00:00, expires " in shown
        screen.press("\r~.")
        assert screen.end() == 0
    # Its supervisor learns of it a moment later.
    wait_until(lambda: job(own, "1")["foreground"]["client"] is None, what="the client to have gone")
    assert job(own, "1")["foreground"]["is_known"] is True
    assert "not attached; come back with: grun --attach 1" in own.ok("gshow", "1")
    own.ok("gctl", "suspend", "1")
    wait_until(lambda: job(own, "1")["foreground"]["lease_ends_at"] is None, what="the lease to stand still")
    own.ok("gcancel", "1")
    assert ended(own, "1")["foreground"]["client"] is None
    assert "grun --attach" not in own.ok("gshow", "1")


def test_gshow_does_not_wait_for_a_stopped_supervisor(own: Shell) -> None:
    with Screen(own, "grun", "--pty", "sh", "-c", "echo pid-$PPID.; exec sleep 600") as screen:
        screen.see("pid-")
        supervisor = int(screen.see(".")[:-1])
        os.kill(supervisor, signal.SIGSTOP)
        try:
            assert job(own, "1")["foreground"]["is_known"] is False
            assert "unknown client: its supervisor does not answer" in own.ok("gshow", "1")
        finally:
            os.kill(supervisor, signal.SIGCONT)


ORPHAN = """setsid sh -c 'sleep 1000 & echo $! > inner' &
( ( setsid sh -c 'trap "" HUP TERM; echo $$ > outer; while :; do sleep 1; done' & ) & )
"""


def start_orphans(screen: Screen, folder: Path) -> list[int]:
    """Leave the session and the parents behind in two ways; pids of the processes."""
    screen.see(PROMPT)
    # One whose parents are all gone, and one that also does not listen.
    (folder / "orphans.sh").write_text(ORPHAN)
    screen.press("sh orphans.sh\r")
    files = [folder / "inner", folder / "outer"]
    wait_until(lambda: all(one.exists() and one.read_text().strip() for one in files), what="the orphans")
    pids = [int(one.read_text()) for one in files]
    assert all(map(is_alive, pids))
    assert all(os.getsid(pid) != os.getsid(screen.process.pid) for pid in pids)
    return pids


def gcancel(sh: Shell, screen: Screen) -> None:
    sh.ok("gcancel", "1")


def kill_client(sh: Shell, screen: Screen) -> None:
    screen.process.kill()
    screen.process.wait()


def leave_shell(sh: Shell, screen: Screen) -> None:
    screen.press("exit\r")


@pytest.mark.parametrize("way", [gcancel, kill_client, leave_shell])
def test_a_daemonized_child_of_a_session_ends_with_it(own: Shell, way: Callable[[Shell, Screen], None]) -> None:
    command = ("bash", "--norc", "--noprofile", "-i")
    with Screen(own, "grun", "--grace", "1s", "-g", "1", "--pty", *command, PS1=PROMPT) as screen:
        pids = start_orphans(screen, own.work)
        way(own, screen)
        found = ended(own, "1")
    assert found["state"] == ("COMPLETED" if way is leave_shell else "CANCELLED")
    assert not any(map(is_alive, pids))


def test_a_daemonized_child_of_a_batch_job_ends_on_cancel(own: Shell) -> None:
    (own.work / "orphans.sh").write_text(ORPHAN)
    job_id = own.submit("--grace", "1s", "-g", "1", "--wrap", "sh orphans.sh; exec sleep 600")
    files = [own.work / "inner", own.work / "outer"]
    wait_until(lambda: all(one.exists() and one.read_text().strip() for one in files), what="the orphans")
    pids = [int(one.read_text()) for one in files]
    assert all(map(is_alive, pids))
    own.ok("gcancel", job_id)
    assert ended(own, job_id)["state"] == "CANCELLED"
    assert not any(map(is_alive, pids))


def test_keep_and_lease_are_ignored_inside_a_job(own: Shell) -> None:
    for option in (("--keep",), ("--lease", "1h")):
        done = own.type("grun", *own.argv("grun", *option, "true"))
        assert (done.code, "--keep and --lease do not apply" in done.err) == (2, True)
