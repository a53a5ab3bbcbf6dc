"""What a job may do to other processes, what it has of theirs, and that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from attacks import NEEDS_PYTHON, PYTHON, as_user, daemon_pid, open_folder, wait_for
from people import ANN, BOB, NEEDS_ROOT, SystemDaemon
from support import wait_until

pytestmark = NEEDS_ROOT

LEAVE = """
import ctypes, os, signal, sys, time
def leave():
    "A process that has nothing any more by which it could be known."
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    os.closerange(0, 64)
    os.chdir("/")
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
"""

ESCAPES = {
    "double fork": LEAVE + "leave(); time.sleep(600)",
    "no environment": LEAVE
    + "leave()\nos.execve(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]], {})",
    "ever new": LEAVE
    + "leave()\nborn = 0\nwhile True:\n  if os.fork(): os._exit(0)\n  os.setsid()\n  born += 1\n"
    + "  if born == 20: open(away, 'w').close()",
    "many": LEAVE + "for _ in range(6):\n  if not os.fork():\n    break\nleave()\ntime.sleep(600)",
    "stopped": LEAVE + "leave()\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)",
    "siblings": LEAVE
    + "libc = ctypes.CDLL(None)\nCLONE_PARENT = 0x8000\n"
    + "for _ in range(3):\n  if libc.syscall(56, CLONE_PARENT, 0, 0, 0, 0) == 0: time.sleep(600)\n"
    + "leave(); time.sleep(600)",
    "own namespaces": LEAVE
    # The first child is the init of the new namespace, without which nothing more could be forked into it.
    + "ctypes.CDLL(None).unshare(0x10000000 | 0x20000000)\nif not os.fork(): leave()\ntime.sleep(600)",
    "main process ends": LEAVE + "leave()\nif os.getppid() != 1: time.sleep(0.1)\ntime.sleep(600)",
}


def marked(mark: str) -> list[str]:
    """Live processes that carry the mark in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in line and state not in "ZX":
            found.append(f"{entry.name} {state} {line[-80:]!r}")
    return found


@NEEDS_PYTHON
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of clone(2) is that of x86-64")
@pytest.mark.parametrize("name", ESCAPES)
def test_no_process_survives_a_cancel(make: Any, name: str) -> None:
    daemon = make()
    bob = daemon.person(BOB)
    mark = f"mark-{daemon.home.name}"
    folder = open_folder(daemon)
    ready, away = folder / "ready", folder / "away"
    script = f"away = {str(away)!r}\nopen({str(ready)!r}, 'w').close()\n{ESCAPES[name]}"
    job = bob.submit(PYTHON, "-S", "-c", script, mark, grace_s=0)
    wait_until(ready.exists, what="the job to begin")
    # None of those that are ever new lives long enough to be sure to be seen.
    wait_until(lambda: away.exists() or (name != "ever new" and marked(mark)), what="its processes")
    bob.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    assert wait_for(bob, job, "CANCELLED", "FAILED", "COMPLETED")
    assert marked(mark) == []


@NEEDS_PYTHON
def test_no_process_survives_the_end_of_the_first_process(make: Any) -> None:
    daemon = make("[life]\nleftover_grace_s = 0\n")
    bob = daemon.person(BOB)
    mark = f"mark-{daemon.home.name}"
    job = bob.submit(PYTHON, "-S", "-c", LEAVE + "leave()\nif os.getppid() == 1: time.sleep(600)\n", mark)
    wait_for(bob, job, "COMPLETED", "FAILED")
    assert marked(mark) == []


INSPECT = """
import ctypes, json, os, signal, sys
above = os.getppid()
told = {"above": above, "uid": os.getuid(), "euid": os.geteuid(), "groups": sorted(os.getgroups())}
told["fds"] = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) != 3}
lines = [line.split() for line in open("/proc/self/status")]
told["caps"] = [words[1] for words in lines if words[0] in ("CapPrm:", "CapEff:", "CapInh:", "CapAmb:")]
told["locks"] = [line for line in open("/proc/locks") if f" {os.getpid()} " in line]
def outcome(deed):
    try:
        deed()
    except PermissionError:
        return "refused"
    except OSError as error:
        return error.strerror
    return "done"
def trace(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, pid, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
for pid in [above, *map(int, sys.argv[1:])]:
    told[f"of {pid}"] = {
        "kill": outcome(lambda: os.kill(pid, signal.SIGKILL)),
        "stop": outcome(lambda: os.kill(pid, signal.SIGSTOP)),
        "order": outcome(lambda: os.kill(pid, signal.SIGUSR1)),
        "trace": outcome(lambda: trace(pid)),
        "mem": outcome(lambda: open(f"/proc/{pid}/mem", "rb")),
        "environ": outcome(lambda: open(f"/proc/{pid}/environ", "rb").read()),
        "fds": outcome(lambda: os.listdir(f"/proc/{pid}/fd")),
        "cwd": outcome(lambda: os.readlink(f"/proc/{pid}/cwd")),
        "root": outcome(lambda: os.listdir(f"/proc/{pid}/root")),
    }
print(json.dumps(told))
"""


@NEEDS_PYTHON
def test_a_job_inherits_nothing_from_the_daemon_and_cannot_affect_it(make: Any) -> None:
    import json

    daemon = make()
    ann, bob, folder = daemon.person(ANN), daemon.person(BOB), open_folder(daemon)
    other = ann.submit("/bin/sleep", "600")
    wait_for(ann, other, "RUNNING")
    roots = [daemon_pid(daemon), *children_of(daemon_pid(daemon))]
    assert len(roots) >= 2

    def programs() -> list[int]:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_program_of(pid, ann.uid)]

    wait_until(programs, what="the other's program")
    others = programs()
    pids = [str(pid) for pid in (*roots, *others)]
    job = bob.submit(PYTHON, "-S", "-c", INSPECT, *pids, stdout=f"{folder}/log", stderr=f"{folder}/errors")
    wait_for(bob, job, "COMPLETED", "FAILED")
    assert (folder / "errors").read_text() == ""
    told = json.loads((folder / "log").read_text())
    assert (told["uid"], told["euid"]) == (bob.uid, bob.uid)
    assert 0 not in told["groups"]
    assert told["fds"] == {"0": "/dev/null", "1": f"{folder}/log", "2": f"{folder}/errors"}
    assert {int(caps, 16) for caps in told["caps"]} == {0}
    assert told["locks"] == []
    for name, outcomes in told.items():
        if name.startswith("of "):
            assert set(outcomes.values()) == {"refused"}, (name, outcomes)
    assert ann.call("GET", f"/v1/jobs/{other}")["job"]["state"] == "RUNNING"


def children_of(pid: int) -> list[int]:
    """Processes right below one."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found += [int(word) for word in path.read_text().split()]
    return found


def is_program_of(pid: int, uid: int) -> bool:
    """Whether it runs as that user, and has become a program of its own."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    uids = next(found.split()[1:] for found in lines if found.startswith("Uid:"))
    return set(uids) == {str(uid)} and b"sleep" in line


HOSTILE_ENV = {
    "LD_PRELOAD": "/evil/preload.so",
    "LD_LIBRARY_PATH": "/evil/lib",
    "LD_AUDIT": "/evil/audit.so",
    "PYTHONPATH": "/evil/python",
    "PYTHONHOME": "/evil/home",
    "PYTHONSTARTUP": "/evil/startup.py",
    "BASH_ENV": "/evil/bash",
    "ENV": "/evil/sh",
    "IFS": "/",
    "GCONV_PATH": "/evil/gconv",
    "LOCPATH": "/evil/loc",
    "TZ": "/evil/zone",
    "HOME": "/evil/home",
    "GPUSCHED_SOCKET": "/evil/socket",
    "GPUSCHED_CONFIG": "/evil/config",
    "GPUSCHED_CRASH_AT": "commit:1",
    "with\nnewline": "/evil/a\n\nLD_PRELOAD=/evil/b",
    "\udcff": "/evil/\udcfe",
    "LARGE": "/evil/" + "x" * 100_000,
}


def test_an_environment_reaches_only_its_own_job(make: Any) -> None:
    daemon: SystemDaemon = make()
    bob, folder = daemon.person(BOB), open_folder(daemon)
    env = {**HOSTILE_ENV, "PATH": "/evil/bin:/usr/bin:/bin"}
    job = bob.submit(
        script="#!/bin/cat /proc/self/environ\n", env=env, gpus=1, log_max_mib=1, stdout=f"{folder}/log", retries=1
    )
    wait_for(bob, job, "COMPLETED", "FAILED")
    # Its own: whole, with the bytes that the user had.
    entries = (folder / "log").read_bytes().split(b"\0")
    wanted = HOSTILE_ENV.keys() - {"GPUSCHED_SOCKET", "GPUSCHED_CONFIG", "GPUSCHED_CRASH_AT", "LD_PRELOAD", "LD_AUDIT"}
    for name in wanted:
        assert f"{name}={env[name]}".encode("utf-8", "surrogateescape") in entries, name
    assert f"GPUSCHED_SOCKET={daemon.socket}".encode() in entries
    # While it runs, nobody above it has any of it.
    job = bob.submit("/bin/sleep", "600", env=env, stdout=f"{folder}/log2", interactive="pipes", keep=True)
    batch = bob.submit("/bin/sleep", "600", env=env, log_max_mib=1, stdout=f"{folder}/log3", notify=["begin"])
    wait_for(bob, batch, "RUNNING")
    looked = 0
    evil = b"/evil/"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != 0:
                continue
            environ = (entry / "environ").read_bytes()
            maps = (entry / "maps").read_text()
        except OSError:
            continue
        looked += 1
        assert evil not in environ, entry.name
        assert evil.decode() not in maps, entry.name
    assert looked > 3


def test_invalid_variable_names_are_refused(make: Any) -> None:
    bob = make().person(BOB)
    for name, value in (("a=b", "x"), ("", "x"), ("a\0b", "x"), ("a", "x\0y"), ("\ud800", "x"), ("a", "\ud800")):
        error = bob.refusal("POST", "/v1/jobs", {"spec": {"argv": ["/bin/true"], "env": {name: value}}})
        assert error.message, (name, value)
        assert error.hint


def test_user_text_is_never_expanded(make: Any) -> None:
    daemon = make()
    bob, folder = daemon.person(BOB), open_folder(daemon)
    bait = f"$(touch {folder}/bait)`touch {folder}/bait`${{HOME}}%n{{x}}"
    work = folder / "a$HOME;b"
    work.mkdir()
    work.chmod(0o777)
    job = bob.submit("/bin/echo", bait, "$HOME", "%j", "*", name=bait, work_dir=str(work), stdout="$HOME-`id`-%%x-%q")
    wait_for(bob, job, "COMPLETED")
    assert (work / "$HOME-`id`-%x-%q").read_text() == f"{bait} $HOME %j *\n"
    job = bob.submit(
        script="#!/bin/sh\nprintf '%s\\n' \"$@\"\n", argv=["$HOME", bait], work_dir=str(work), stdout="args"
    )
    wait_for(bob, job, "COMPLETED")
    assert (work / "args").read_text() == f"$HOME\n{bait}\n"
    assert not (folder / "bait").exists()


def test_an_attacker_inside_a_job_keeps_their_identity(make: Any) -> None:
    """Neither the variables of somebody else's job nor a process of one's own make anybody else of one."""
    daemon = make()
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    job = ann.submit("/bin/sleep", "600", interactive="pipes", keep=True)
    path = ann.call("GET", f"/v1/jobs/{job}/attach")["attach"]["path"]
    wait_until(lambda: os.path.exists(path), what="the socket of the foreground")

    def attach() -> str:
        import socket

        os.environ.update({"GPUSCHED_RUN": f"{job}.1", "GPUSCHED_JOB_ID": job, "USER": ANN, "LOGNAME": ANN})
        try:
            socket.socket(socket.AF_UNIX).connect(path)
        except PermissionError:
            return "refused"
        return "connected"

    assert as_user(BOB, attach) == "refused"
    assert bob.refusal("GET", f"/v1/jobs/{job}/attach").message == f"job {job} belongs to {ANN}, not to {BOB}"
