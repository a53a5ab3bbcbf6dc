"""Users whom a node knows by another uid: their jobs are not started there, others get the nodes that know them."""

from __future__ import annotations

import contextlib
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from people import ANN, BOB, NEEDS_ROOT
from support import wait_until
from test_system_nodes import TwoServers

pytestmark = NEEDS_ROOT

OTHER_UID = 54321
CONNECT = """#!/bin/sh
export GPUSCHED_FAKE_GPUS=2x24GiB
exec unshare --mount --propagation private sh -c 'mount --bind "$0" /etc && exec "$@"' {etc} "$@"
"""


@pytest.fixture(scope="module")
def servers() -> Iterator[TwoServers]:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces cannot be made here")
    made = TwoServers()
    # The whole folder: a mount on the file itself is gone when another test adds a user, which replaces the file.
    etc = made.node / "etc-of-the-node"
    # Other tests add users meanwhile: their locks and drafts may be gone when they are to be copied.
    with contextlib.suppress(shutil.Error):
        shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
    passwd = etc / "passwd"
    lines = Path("/etc/passwd").read_text().splitlines()
    moved = [
        line.replace(f":{pwd.getpwnam(ANN).pw_uid}:", f":{OTHER_UID}:", 1) if line.startswith(f"{ANN}:") else line
        for line in lines
    ]
    passwd.write_text("\n".join(moved) + "\n")
    (made.node / "connect").write_text(CONNECT.format(etc=etc))
    made.start()
    wait_until(lambda: len(made.call("GET", "/v1/cluster")["gpus"]) == 4, what="the node with its GPUs")
    yield made
    made.close()


def story(servers: TwoServers, job: str) -> list[str]:
    return [event["text"] for event in servers.call("GET", f"/v1/jobs/{job}")["job"]["events"]]


def test_a_job_is_not_started_where_its_owner_is_somebody_else(servers: TwoServers) -> None:
    why = f"{ANN} is {pwd.getpwnam(ANN).pw_uid} on the head, {OTHER_UID} on n2"
    ann, bob = servers.person(ANN), servers.person(BOB)
    job = ann.submit("true", nodelist=["n2"], work_dir="/tmp", stdout="/dev/null")
    wait_until(lambda: any(why in text for text in story(servers, job)), what="the refusal")
    wait_until(lambda: servers.state(job) == "PENDING", what="it to be back in the queue")
    other = bob.submit("true", nodelist=["n2"], work_dir="/tmp", stdout="/dev/null")
    (ended,) = servers.wait(other)
    assert (ended["state"], ended["node"]) == ("COMPLETED", "n2")
    wait_until(lambda: servers.call("GET", f"/v1/jobs/{job}")["job"]["reason"] == "ReqNodeNotAvail", what="its reason")
    found = servers.call("GET", f"/v1/jobs/{job}")["job"]
    # It was tried once, and waits for its node to be mended.
    assert (found["state"], found["reason"], len(found["runs"])) == ("PENDING", "ReqNodeNotAvail", 1)
    assert found["exclude"] == ["n2"]
    assert any("gctl update" in text and "exclude=" in text for text in story(servers, job))
    ann.call("POST", "/v1/jobs/cancel", {"ids": [job]})


def test_a_job_that_may_run_elsewhere_does(servers: TwoServers) -> None:
    head = next(node["name"] for node in servers.call("GET", "/v1/cluster")["nodes"] if node["name"] != "n2")
    ann = servers.person(ANN)
    jobs = [ann.submit("true", gpus=1, work_dir="/tmp", stdout="/dev/null", prefer="node2") for _ in range(6)]
    ended = servers.wait(*jobs)
    assert {(job["state"], job["node"]) for job in ended} == {("COMPLETED", head)}
    assert all(len(job["runs"]) <= 2 for job in ended)


def test_a_gang_leaves_nothing_running_on_the_nodes_that_know_its_owner(servers: TwoServers) -> None:
    ann = servers.person(ANN)
    job = ann.submit("sleep", "61317", nodes=2, work_dir="/tmp", stdout="/dev/null")
    wait_until(lambda: servers.call("GET", f"/v1/jobs/{job}")["job"]["exclude"] == ["n2"], what="n2 to be left out")
    wait_until(lambda: servers.state(job) == "PENDING", what="it to be back in the queue")
    found = servers.call("GET", f"/v1/jobs/{job}")["job"]
    assert len(found["runs"]) == 1
    assert subprocess.run(["pgrep", "-u", ANN, "-f", "^sleep 61317"], capture_output=True, text=True).stdout == ""
    ann.call("POST", "/v1/jobs/cancel", {"ids": [job]})
