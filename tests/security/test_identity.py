"""Nothing that is sent makes anybody somebody else: the kernel says who connected."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

from attacks import as_user, become, connect
from people import ANN, BOB, NEEDS_ROOT, SystemDaemon
from support import wait_until

from gpusched.errors import Forbidden

pytestmark = NEEDS_ROOT

CLAIMS = (
    *("X-User: root", "X-Remote-User: root", "Remote-User: root", "X-Forwarded-User: root", "X-Uid: 0", "Uid: 0"),
    *("Authorization: Basic cm9vdDpyb290", "Cookie: user=root; uid=0", "From: root", "X-Forwarded-For: 127.0.0.1"),
)


def asked(sock: Any, method: str, path: str, body: Any = None, *headers: str) -> tuple[int, dict[str, Any]]:
    """One request by hand; status and document of the answer."""
    content = json.dumps(body).encode() if body is not None else b""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", *headers]
    sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
    said = b""
    while True:
        said += sock.recv(1 << 16)
        head, found, rest = said.partition(b"\r\n\r\n")
        sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if found and len(rest) >= int(sizes[0].partition(b":")[2]):
            return int(said[9:12]), json.loads(rest)


SPEC = {"argv": ["/usr/bin/id", "-un"], "work_dir": "/tmp", "stdout": "/dev/null", "cpus": 0}


def test_no_header_or_field_sets_the_identity(make: Any) -> None:
    daemon: SystemDaemon = make()
    ann = daemon.person(ANN)
    job = ann.submit("/bin/sleep", "600")

    def try_all() -> list[str]:
        found = []
        with connect(daemon.socket) as sock:
            for claim in CLAIMS:
                found.append(asked(sock, "POST", "/v1/jobs", {"spec": SPEC}, claim)[1]["job"]["user"])
                status, _ = asked(sock, "POST", "/v1/jobs/cancel", {"ids": [job]}, claim)
                found.append(str(status))
            for name, value in (("user", "root"), ("uid", 0), ("owner", ANN), ("account_uid", 0)):
                bodies = ({"spec": {**SPEC, name: value}}, {"spec": SPEC, name: value})
                found += [str(asked(sock, "POST", "/v1/jobs", body)[0]) for body in bodies]
                found.append(str(asked(sock, "POST", "/v1/jobs/cancel", {"ids": [job], name: value})[0]))
                found.append(str(asked(sock, "POST", "/v1/jobs/hold", {"ids": [job], name: value})[0]))
            queries = ("?user=root", "?uid=0", f"?as={ANN}")
            found += [str(asked(sock, "POST", f"/v1/jobs/cancel{query}", {"ids": [job]})[0]) for query in queries]
        return found

    assert set(as_user(BOB, try_all)) == {BOB, "403", "400"}
    assert ann.call("GET", f"/v1/jobs/{job}")["job"]["state"] in ("PENDING", "RUNNING")


def test_a_connection_belongs_to_the_user_who_made_it(make: Any) -> None:
    """Handed on to another process, it speaks for who connected; to be handed one is to be given that right."""
    daemon = make()
    bob = pwd.getpwnam(BOB)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setegid(bob.pw_gid)
            os.seteuid(bob.pw_uid)
            sock = connect(daemon.socket)
            os.seteuid(0)
            become(ANN)
            _, told = asked(sock, "POST", "/v1/jobs", {"spec": SPEC})
            os.write(
                write, json.dumps([told["job"]["user"], asked(sock, "POST", "/v1/drain", {"targets": ["0"]})]).encode()
            )
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as answer:
        user, (status, _) = json.loads(answer.read())
    assert (user, status) == (BOB, 403)


def test_a_client_in_a_job_keeps_its_user_whatever_job_it_names(make: Any) -> None:
    daemon = make()
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    job = ann.submit("/bin/sleep", "600", interactive="pipes", keep=True)
    assert bob.call("GET", "/v1/inside")["inside"] is None
    assert isinstance(bob.refusal("GET", f"/v1/jobs/{job}/attach"), Forbidden)
    path = ann.call("GET", f"/v1/jobs/{job}/attach")["attach"]["path"]
    wait_until(lambda: Path(path).exists(), what="the socket of the foreground")
    assert as_user(BOB, lambda: os.access(path, os.R_OK | os.W_OK)) is False


def test_numbers_of_foreign_jobs_reveal_nothing(make: Any) -> None:
    daemon = make('[access]\nprivate_data = ["jobs"]\n')
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    array = ann.submit("/bin/sleep", "600", array="0-3", name="hush-hush")
    ids = [str(number) for number in range(1, 12)] + [f"{array}_{task}" for task in range(5)] + ["p1", "p2", "@"]
    for number in ids:
        for act in ("cancel", "hold", "release", "suspend", "resume", "requeue"):
            error = bob.refusal("POST", f"/v1/jobs/{act}", {"ids": [number]})
            assert "hush" not in error.message + error.hint
            assert ANN not in error.message + error.hint
        for path in (
            f"/v1/jobs/{number}",
            f"/v1/jobs/{number}/script",
            f"/v1/jobs/{number}/why",
            f"/v1/logs?ids={number}",
        ):
            error = bob.refusal("GET", path)
            assert "hush" not in error.message + error.hint
            assert ANN not in error.message + error.hint
        assert bob.refusal("POST", "/v1/jobs", {"resubmit": [number]}).message
    tasks = ann.call("GET", f"/v1/jobs/{array}")["job"]["tasks"]
    assert sum(tasks.values()) == 4
    assert not tasks.get("CANCELLED")
