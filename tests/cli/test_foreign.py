"""ginfo --foreign, typed against a real daemon with strangers on its simulated GPUs."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shell import Shell
from support import wait_until

SINCE = time.time() - 7200


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Shell]:
    """Two cards: on the first are an idle stranger and a smaller one, on the second works the first stranger."""
    eva = {"pid": 4711, "vram": "15GiB", "user": "eva", "name": "python", "started_at": SINCE}
    bob = {"pid": 4712, "vram": "2GiB", "user": "bob", "name": "jupyter"}
    cards: list[dict[str, Any]] = [
        {"vram": "24GiB", "processes": [eva, bob]},
        {"vram": "24GiB", "processes": [eva], "utilisation": 0.9},
    ]
    for folder in ("work", "home"):
        (tmp_path / folder).mkdir()
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"gpus": cards}))
    shell = Shell(tmp_path / "home", tmp_path / "work", GPUSCHED_FAKE_GPUS=str(path))
    yield shell
    shell.type("gpusched", "daemon", "stop")


def test_foreign_processes_are_listed_with_their_cost(crowded: Shell) -> None:
    for _ in range(2):
        crowded.submit("-g", "1", "--", "true")

    def found() -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(crowded.ok("ginfo", "--foreign", "--json"))
        return answer

    wait_until(lambda: found()["jobs_kept_waiting"] == 2, what="the cards to be read")
    rows = found()["foreign"]
    assert [(row["gpu"], row["pid"], row["user"], row["vram_mib"]) for row in rows] == [
        (0, 4711, "eva", 15360),
        (0, 4712, "bob", 2048),
        (1, 4711, "eva", 15360),
    ]
    # Without eva the second card is free; on the first there is still bob, who alone costs nothing.
    assert [row["jobs_kept_waiting"] for row in rows] == [1, 0, 1]
    assert rows[0]["age_s"] == pytest.approx(time.time() - SINCE, abs=60)
    assert rows[0]["gpu_idle_s"] is not None
    assert rows[0]["gpu_idle_s"] < 120
    assert rows[2]["gpu_idle_s"] is None
    assert rows[1]["age_s"] is None
    lines = crowded.ok("ginfo", "--foreign").splitlines()
    assert lines[0].split() == ["GPU", "PID", "USER", "COMMAND", "VRAM", "AGE", "GPU-IDLE", "JOBS-KEPT"]
    assert lines[1].split()[:5] == ["0", "4711", "eva", "python", "15G"]
    assert lines[-1] == "2 pending jobs would start now without them"
    assert crowded.ok("ginfo", "--foreign", "--quiet") == "4711\n4712\n"


def test_an_empty_list_of_foreign_processes_says_so(own: Shell) -> None:
    assert own.ok("ginfo", "--foreign") == "no processes on GPUs without a booking\n"


def test_a_foreign_process_becomes_a_job(crowded: Shell) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        path = Path(crowded.env["GPUSCHED_FAKE_GPUS"])
        foreign = {"pid": process.pid, "vram": "15GiB", "user": "me", "name": "sleep"}
        path.write_text(json.dumps({"gpus": [{"vram": "24GiB", "processes": [foreign]}, {"vram": "24GiB"}]}))
        wait_until(lambda: str(process.pid) in crowded.ok("ginfo", "--foreign"), what="it to be seen")
        typed = crowded.ok("gpusched", "adopt", str(process.pid), "-t", "1h", "-J", "late", "--grace", "1s")
        assert typed == f"Adopted process {process.pid} as job 1 (GPU 0)\n"
        wait_until(lambda: "R" in crowded.ok("gq", "-o", "%i %j %t", "--noheader"), what="it to be in the queue")
        assert crowded.ok("gq", "-o", "%i %j %t %l", "--noheader").split() == ["1", "late", "R", "1:00:00"]
        again = crowded.type("gpusched", "adopt", str(process.pid))
        assert again.code == 1
        assert f"process {process.pid} is part of job 1 already" in again.err
        wrong = crowded.type("gpusched", "adopt", str(process.pid), "-t", "soon")
        assert wrong.code == 2
        assert "--time" in wrong.err
        assert "ExitUnknown" not in crowded.ok("gshow", "1")
        for words in (
            ("ghist", "--usage"),
            ("ghist", "--efficiency"),
            ("gq", "--priority"),
            ("ginfo",),
        ):
            crowded.ok(*words)
        crowded.ok("gcancel", "1")
        assert process.wait(30) == -15
        path.write_text(json.dumps({"gpus": [{"vram": "24GiB"}, {"vram": "24GiB"}]}))
        wait_until(lambda: "CANCELLED" in crowded.ok("gq", "-a", "-o", "%T", "--noheader"), what="its end")
        assert "was adopted by" in crowded.ok("gshow", "1")
        assert "late" in crowded.ok("ghist")
    finally:
        process.kill()
        process.wait()


def test_every_command_names_a_job_on_a_gpu_it_did_not_book(tmp_path: Path) -> None:
    cards = [{"vram": "24GiB"}, {"vram": "24GiB", "processes": [{"job": 1, "vram": "15GiB"}]}]
    for folder in ("work", "home"):
        (tmp_path / folder).mkdir()
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"gpus": cards}))
    shell = Shell(tmp_path / "home", tmp_path / "work", GPUSCHED_FAKE_GPUS=str(path))
    try:
        shell.submit("-g", "1", "--wrap", "export CUDA_VISIBLE_DEVICES=1; sleep 1000")
        wait_until(lambda: "unbooked use of GPU 1" in shell.ok("gshow", "1"), what="its owner to be told")
        shell.submit("-g", "1", "--", "true")
        named = "job 1, which did not book it"
        assert "Unbooked:   uses GPU 1 (15G), which it did not book" in shell.ok("gshow", "1")
        assert "uses GPU 1 (15G), which it did not book" in shell.ok("gq", "--why", "1")
        assert f"GPU 1 of node {node(shell)}: unbooked use of 15G: {named}" in shell.ok("gq", "--why", "2")
        info = shell.ok("ginfo").splitlines()
        assert [line for line in info if "unbooked use of 15G" in line and named in line]
        assert info[-1].split()[0] == "1"
        assert info[-1].endswith(named)
        (row,) = json.loads(shell.ok("ginfo", "--foreign", "--json"))["foreign"]
        assert (row["gpu"], row["job"], row["vram_mib"]) == (1, "1", 15360)
        assert shell.ok("ginfo", "--foreign").splitlines()[1].endswith(named)
        gpus = json.loads(shell.ok("ginfo", "--json"))["gpus"]
        assert [[process["job"] for process in gpu["foreign"]] for gpu in gpus] == [[], ["1"]]
        checks = shell.type("gpusched", "doctor").out
        assert "warn unbooked use: job 1 of " in checks
        assert "uses GPU 1 (15G), which it did not book" in checks
        shell.ok("gcancel", "1")
        wait_until(lambda: "COMPLETED" in shell.ok("gshow", "2"), what="the GPU to be given again")
    finally:
        shell.type("gcancel", "1", "2")
        shell.type("gpusched", "daemon", "stop")


def node(shell: Shell) -> str:
    (found,) = json.loads(shell.ok("ginfo", "--json"))["nodes"]
    return str(found["name"])
