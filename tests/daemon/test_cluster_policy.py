"""Commands that choose nodes, as typed on a head with two agents."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clusters import Cluster
from support import wait_until
from warm import typed


@dataclass
class Terminal:
    """Types commands at a head, from a folder."""

    home: Path
    work: Path

    def type(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "GPUSCHED_HOME": str(self.home), "COLUMNS": "200"}
        return typed(command, *words, env=env, folder=self.work)

    def ok(self, command: str, *words: str) -> str:
        """Type and expect success; returns what was printed."""
        done = self.type(command, *words)
        assert done.returncode == 0, done
        return done.stdout

    def submit(self, *words: str) -> str:
        return self.ok("gsub", "--parsable", *words).strip()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("policy"))
    yield made
    made.head.close()


@pytest.fixture
def sh(started: Cluster, tmp_path: Path) -> Iterator[Terminal]:
    """Types commands at the head; jobs are gone and nodes undrained at the end."""
    yield Terminal(started.head.home, tmp_path)
    jobs = [job["id"] for job in started.head.call("GET", "/v1/jobs")["jobs"]]
    if jobs:
        started.head.call("POST", "/v1/jobs/cancel", {"ids": jobs})
        started.head.wait(*jobs)


def test_ginfo_names_nodes_with_labels_and_their_gpus(sh: Terminal) -> None:
    text = sh.ok("ginfo")
    assert "\nn2: labels: n2\n" in text
    assert "\nn1: labels: " not in text
    rows = [line.split()[:2] for line in text.splitlines() if "idle" in line]
    assert rows == [[node, index] for node in ("n1", "n2", "n3") for index in ("0", "1")]


def test_gpus_of_a_node_are_drained_by_name(sh: Terminal) -> None:
    assert sh.ok("gctl", "drain", "n2:1", "-m", "fan") == "drained GPU n2:1\n"
    done = sh.type("gctl", "drain", "0")
    assert (done.returncode, done.stderr) == (
        1,
        "gctl: error: '0' is more than one GPU here\ngctl: hint: name one of them: n1:0, n2:0 and n3:0\n",
    )
    assert sh.ok("gctl", "undrain", "n2:1") == "undrained GPU n2:1\n"


def test_nodes_are_reserved_by_a_node_list(sh: Terminal) -> None:
    told = sh.ok("gctl", "reserve", "fans", "--maint", "-w", "n[2-3]", "--start", "now+1h", "--duration", "1h")
    assert told.startswith("reserved fans: node n2; node n3, ")
    long = sh.submit("-g", "2", "-w", "n2", "-t", "2h", "--", "sleep", "600")
    elsewhere = sh.submit("-g", "2", "-t", "2h", "--", "sleep", "600")
    wait_until(lambda: "n1:0,1" in sh.ok("gq", "-j", elsewhere), what="the other job to run")
    assert "maintenance fans of nodes n2 and n3 begins in" in sh.ok("gq", "--why", long)
    sh.ok("gctl", "unreserve", "fans")
    wait_until(lambda: "n2:0,1" in sh.ok("gq", "-j", long), what="the job to run")


def test_a_reservation_of_a_whole_node_says_which(sh: Terminal) -> None:
    done = sh.type("gctl", "reserve", "fans", "--maint", "--start", "now+1h", "--duration", "1h")
    assert (done.returncode, done.stderr) == (
        1,
        "gctl: error: there are 3 nodes, and none is named\ngctl: hint: name those to reserve: -w n[1-3]\n",
    )


def test_gq_shows_the_nodes_of_a_gang_as_a_host_list(sh: Terminal) -> None:
    job = sh.submit("-N", "3", "-g", "6", "--", "sleep", "600")
    wait_until(lambda: "n[1-3]:0,1" in sh.ok("gq", "-j", job), what="the gang to run")


def test_a_job_goes_to_its_data_and_away_from_where_it_failed(started: Cluster, sh: Terminal) -> None:
    """By what nodes declare and what has run there; a killed head forgets neither."""
    failing = "test $SLURMD_NODENAME != n2"
    first = sh.submit("-w", "n2", "-g", "1", "-J", "picky", "--", "sh", "-c", failing)
    assert started.head.wait(first)[0]["state"] == "FAILED"
    near = sh.submit("--near", "data=wiki", "-w", "n3", "--", "true")
    assert started.head.wait(near)[0]["state"] == "COMPLETED"
    started.head.kill()
    started.head.start()
    started.all_up()

    def story(*words: str) -> str:
        job = sh.submit(*words)
        (ended,) = started.head.wait(job)
        assert ended["state"] == "COMPLETED"
        return next(line for line in sh.ok("gshow", job).splitlines() if "started on" in line)

    wait_until(
        lambda: "started on n3 (n3 your job read wiki there" in story("--near", "data=wiki", "--", "true"),
        what="the history to be read again",
    )
    told = story("-x", "n1", "-g", "1", "-J", "picky", "--", "sh", "-c", failing)
    assert "started on n3, GPU 0 (n2 1 of 1 runs like it failed there" in told


def test_why_says_what_nodes_suit_a_job(started: Cluster, sh: Terminal) -> None:
    near = sh.submit("--near", "data=wiki", "-w", "n3", "--", "true")
    assert started.head.wait(near)[0]["state"] == "COMPLETED"
    done = sh.type("gsub", "--near", "data=imagenet", "-H", "--", "true")
    assert done.stdout.startswith("Submitted job ")
    assert done.stderr == (
        "gsub: no node has data imagenet, and no job of yours near it has completed lately; "
        "--near data=imagenet has no effect yet (no node names any in [node] data)\n"
    )
    job = done.stdout.split()[-1]
    assert "Where:      near data imagenet" in sh.ok("gshow", job)
    sh.ok("gctl", "update", job, "near=data=wiki")
    wait_until(
        lambda: "node n3 is preferred: your job read wiki there" in sh.ok("gq", "--why", job),
        what="its place in history",
    )
    done = sh.type("gsub", "--near", "imagenet", "--", "true")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2,
        "gsub: error: --near: 'imagenet' does not say near to what; write data=imagenet",
    )
