"""Doors into running jobs, as an attacker meets them: only the owner comes in, as nobody but the owner."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from attacks import as_user, state, wait_for
from people import ANN, BOB, NEEDS_ROOT
from support import wait_until

from gpusched.client import DaemonConnection
from gpusched.engine.attach_protocol import EXIT, GONE, HELLO, OUT, RUN, Wanted, frame, pack_wanted, take_frames
from gpusched.errors import Forbidden, NotFound

pytestmark = NEEDS_ROOT


def running(person: Any, **spec: Any) -> str:
    job = person.submit("/bin/sleep", "600", **spec)
    wait_for(person, job, "RUNNING")
    return str(job)


def door(person: Any, job: str) -> str:
    """A door that is open."""
    path = person.call("POST", f"/v1/jobs/{job}/enter")["enter"]["path"]
    wait_until(lambda: os.path.exists(path) and os.stat(path).st_uid == person.uid, what="the door")
    return str(path)


def visit(path: str, *argv: str, pty: bool = False, **env: str) -> tuple[bytes, bytes]:
    """What a command in the job writes, and how it ends."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.settimeout(20)
        wanted = Wanted(list(argv), env, is_terminal=pty, umask=0o22, work_dir="/")
        sock.sendall(frame(RUN, pack_wanted(wanted)) + frame(HELLO, b"1 24 80"))
        buffer, heard = bytearray(), b""
        while data := sock.recv(65536):
            buffer += data
            for kind, words in take_frames(buffer):
                if kind == OUT:
                    heard += words
                if kind == EXIT:
                    return heard, words
    return heard, b"dropped"


def test_a_visit_is_its_owner_with_nothing_of_root(make: Any) -> None:
    daemon = make()
    bob = daemon.person(BOB)
    job = running(bob)
    path = door(bob, job)
    out, end = as_user(
        BOB, lambda: visit(path, "/bin/sh", "-c", "id -un; id -Gn; echo $GPUSCHED_JOB_ID; ls -l /proc/self/fd; umask")
    )
    lines = out.decode().splitlines()
    assert (lines[0], lines[2], lines[-1], end) == (BOB, job, "0022", b"0 - - .\n")
    assert "root" not in lines[1].split()
    # Its own three streams and what ls has opened: nothing of the supervisor, such as records or the spool's lock.
    assert not [line for line in lines if "spool" in line or "engine" in line]
    path = door(bob, job)
    assert as_user(BOB, lambda: visit(path, "/bin/sh", "-c", "id -un; test -w /root", pty=True)) == (
        f"{BOB}\r\n".encode(),
        b"1 - - .\n",
    )


def test_another_user_and_root_are_refused(make: Any) -> None:
    daemon = make()
    ann, bob, root = daemon.person(ANN), daemon.person(BOB), DaemonConnection(str(daemon.socket))
    job = running(ann)
    assert isinstance(bob.refusal("POST", f"/v1/jobs/{job}/enter"), Forbidden)
    with pytest.raises(Forbidden, match=f"job {job} belongs to {ANN}, not to root"):
        root.call("POST", f"/v1/jobs/{job}/enter", {})
    root.close()
    path = door(ann, job)

    def knock() -> str:
        try:
            visit(path, "/bin/true")
        except PermissionError:
            return "refused"
        return "connected"

    assert as_user(BOB, knock) == "refused"
    os.chmod(path, 0o666)
    os.chmod(Path(path).parent, 0o711)
    assert as_user(BOB, lambda: _dropped(path))
    assert as_user(ANN, lambda: visit(path, "/usr/bin/id", "-un"))[0] == f"{ANN}\n".encode()


def _dropped(path: str) -> bool:
    try:
        return visit(path, "/bin/true") == (b"", b"dropped")
    except (BrokenPipeError, ConnectionResetError):
        return True


def connect(path: str, target: str, *argv: str) -> tuple[bytes, bytes]:
    """The head of the daemon's answer, and what a command in the job writes."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.settimeout(20)
        lines = (f"POST {target} HTTP/1.1", "Host: x", "Connection: Upgrade", "Upgrade: tcp", "Content-Length: 0")
        sock.sendall("\r\n".join((*lines, "", "")).encode())
        answer = bytearray()
        while b"\r\n\r\n" not in answer:
            answer += sock.recv(65536)
        head, _, rest = bytes(answer).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101"):
            return head, rest
        wanted = Wanted(list(argv), {}, is_terminal=False, umask=0o22, work_dir="/")
        sock.sendall(frame(RUN, pack_wanted(wanted)) + frame(HELLO, b"1 24 80"))
        buffer, heard = bytearray(rest), b""
        while True:
            for kind, words in take_frames(buffer):
                heard += words if kind == OUT else b""
                if kind in (EXIT, GONE):
                    return head, heard
            if not (data := sock.recv(65536)):
                return head, heard
            buffer += data


def test_the_way_through_the_daemon_is_for_the_owner_alone(make: Any) -> None:
    daemon = make()
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    job = running(ann)
    door(ann, job)
    found = ann.call("POST", f"/v1/jobs/{job}/enter")["enter"]["doors"][0]
    target = f"/v1/jobs/{job}/connect?run={job}.1&node={found['node']}&token={found['token']}"
    path = str(daemon.socket)
    # Who knows the token is not its owner for that, ...
    head, words = as_user(BOB, lambda: connect(path, target, "/usr/bin/id", "-un"))
    assert (head.split()[1], b"belongs to" in words) == (b"403", True)
    head, words = connect(path, target, "/usr/bin/id", "-un")
    assert (head.split()[1], b"not to root" in words) == (b"403", True)
    # ... nor does a job of one's own lead to another's run.
    own = running(bob)
    head, _ = as_user(BOB, lambda: connect(path, target.replace(f"/jobs/{job}/", f"/jobs/{own}/"), "/usr/bin/id"))
    assert head.split()[1] == b"404"
    head, words = as_user(ANN, lambda: connect(path, target, "/usr/bin/id", "-un"))
    assert (head.split()[1], words) == (b"101", f"{ANN}\n".encode())
    # The owner without the right token finds nobody.
    wrong = target.replace(found["token"], "0" * 16) + "&return=1"
    head, words = as_user(ANN, lambda: connect(path, wrong, "/usr/bin/id", "-un"))
    assert (head.split()[1], words) == (b"101", b"")


def test_operators_and_admins_do_not_act_for_the_user(make: Any) -> None:
    daemon = make(f'[queue.default]\noperators = ["{BOB}"]\n[access]\nadmin_group = "{BOB}"\n')
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    job = running(ann)
    assert isinstance(bob.refusal("POST", f"/v1/jobs/{job}/enter"), Forbidden)
    bob.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    wait_for(ann, job, "CANCELLED")


def test_hidden_jobs_are_not_betrayed(make: Any) -> None:
    daemon = make('[access]\nprivate_data = ["jobs"]\n')
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    job = running(ann)
    error = bob.refusal("POST", f"/v1/jobs/{job}/enter")
    assert isinstance(error, NotFound)
    assert error.message == f"there is no job {job}"


def test_neither_words_nor_variables_of_a_visit_are_interpreted_by_root(make: Any) -> None:
    daemon = make()
    bob = daemon.person(BOB)
    job = running(bob)
    folder = daemon.home / "bait"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "evil.py").write_text(f"import os; os.system('id -un >> {folder}/ran')\n")
    bait = f"$(touch {folder}/x)`touch {folder}/x`%n"
    env = {
        **dict.fromkeys(("PYTHONSTARTUP", "BASH_ENV", "ENV"), str(folder / "evil.py")),
        "PYTHONPATH": str(folder),
        "LD_PRELOAD": str(folder / "evil.so"),
        "GPUSCHED_RUN": "99.1",
        "IFS": bait,
    }
    path = door(bob, job)
    out, end = as_user(BOB, lambda: visit(path, "/bin/echo", bait, "-n", **env))
    assert (out, end) == (f"{bait} -n\n".encode(), b"0 - - .\n")
    assert sorted(os.listdir(folder)) == ["evil.py"]


def test_a_crowd_at_the_doors_does_not_end_the_job(make: Any) -> None:
    daemon = make()
    bob = daemon.person(BOB)
    job = running(bob)
    paths = [bob.call("POST", f"/v1/jobs/{job}/enter")["enter"]["path"] for _ in range(200)]
    wait_until(lambda: sum(map(os.path.exists, paths)) >= 160, what="the doors")
    assert sum(map(os.path.exists, paths)) <= 160
    assert state(bob, job) == "RUNNING"
    bob.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    wait_for(bob, job, "CANCELLED")
    wait_until(lambda: not any(map(os.path.exists, paths)), what="the doors to be gone")
    assert (daemon.state_dir / "spool" / "engine.log").read_bytes() == b""
