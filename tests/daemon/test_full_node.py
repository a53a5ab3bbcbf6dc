"""A node whose spool is on a full disk: a real head and an agent, whose folder is a small file system."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster
from support import is_alive, wait_until


class FullNode(Cluster):
    """The head `n1`, and `n2` with 4 MiB for everything that it writes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, ["n2"], gpus=1)

    def state(self) -> str:
        return str(self.nodes()["n2"]["state"])

    def there(self, text: str, **spec: Any) -> str:
        return self.head.submit("sh", "-c", text, **{"nodelist": ["n2"], "work_dir": str(self.root), **spec})

    def fill(self) -> None:
        with open(self.root / "n2" / "ballast", "wb") as file:
            for size in (1 << 16, 1 << 10, 1):
                try:
                    while True:
                        os.write(file.fileno(), b"x" * size)
                except OSError:
                    continue
        wait_until(lambda: self.state() == "drained", what="n2 to say that it is full")

    def make_room(self) -> None:
        (self.root / "n2" / "ballast").unlink()
        wait_until(lambda: self.state() == "up", what="n2 to be up again")

    def says(self, command: str, *words: str) -> str:
        done = self.run(command, *words)
        return done.stdout + done.stderr


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FullNode]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    (tmp_path / "n2").mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(tmp_path / "n2")]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")
    made = FullNode(tmp_path)
    yield made
    made.head.close()
    subprocess.run(["umount", "-l", str(tmp_path / "n2")], check=True)


def test_a_node_with_a_full_spool_starts_nothing_and_loses_nothing(cluster: FullNode) -> None:
    gate = cluster.root / "go"
    until_go = f"until [ -e {gate} ]; do sleep 0.05; done"
    running = [cluster.there(f"{until_go}; exit {code}", stdout="/dev/null", cpus=1) for code in (3, 4)]
    pids = [cluster.head.pid_of(job) for job in running]
    cluster.fill()
    why = f"are free in the spool {cluster.root}/n2/agent-n2/spool"
    assert why in cluster.says("ginfo")
    assert why in cluster.says("gpusched", "doctor")
    # It waits, or goes elsewhere: it is tried nowhere in vain.
    once = cluster.root / "once"
    waiting = cluster.there(f"echo x >> {once}")
    elsewhere = cluster.head.submit("true", gpus=1, work_dir=str(cluster.root))
    (ended,) = cluster.head.wait(elsewhere)
    assert (ended["state"], ended["node"]) == ("COMPLETED", "n1")
    wait_until(lambda: why in str(cluster.head.job(waiting)["reason_text"]), what="the reason")
    # Another agent begins on the full disk, and learns of ends that came meanwhile.
    before = int((cluster.root / "n2.pid").read_text())
    os.kill(before, signal.SIGKILL)
    gate.touch()
    wait_until(lambda: not any(map(is_alive, pids)), what="the jobs to end")
    ended = cluster.head.wait(*running)
    assert [(job["exit_code"], len(job["runs"])) for job in ended] == [(3, 1), (4, 1)]
    assert cluster.head.job(waiting)["runs"] == []
    cluster.make_room()
    (ended,) = cluster.head.wait(waiting)
    assert (ended["state"], len(ended["runs"]), once.read_text()) == ("COMPLETED", 1, "x\n")


def test_a_script_that_finds_no_room_is_tried_again(cluster: FullNode) -> None:
    with open(cluster.root / "n2" / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 3 << 19)
    script = "#!/bin/sh\nexit 5\n" + "#" * (2 << 20)
    job = cluster.head.submit(script=script, nodelist=["n2"], work_dir=str(cluster.root), stdout="/dev/null")

    def refused() -> bool:
        return "KiB are free in the spool" in str(cluster.head.job(job)["events"])

    wait_until(refused, what="the refusal")
    cluster.make_room()
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["exit_code"]) == ("FAILED", 5)
