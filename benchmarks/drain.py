"""How fast 1,000 jobs that run `true` go through 8 slots, durable commits on."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness import Bench, fsync_floor, scheduler, show, spawn_floor

SLOTS = 8


def main(jobs: int = 1000, rounds: int = 5) -> None:
    """Print jobs per second from the release of the queue to the last end, and what bare spawning does."""
    show("floor: spawn and await true", spawn_floor())
    print(f"floor: bare spawns, {SLOTS} at a time: {bare_rate(jobs):.0f}/s")
    with scheduler(f"[node]\ncpus = {SLOTS}\n") as bench:
        show("floor: write and fsync", fsync_floor(bench.home))
        rates = [_drain(bench, jobs) for _ in range(rounds)]
        show(f"drain of {jobs} x true through {SLOTS} slots", rates, "jobs/s")


def bare_rate(count: int) -> float:
    """Processes per second that are spawned and awaited, 8 at a time."""

    def spawn(_: int) -> None:
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

    began = time.perf_counter()
    with ThreadPoolExecutor(SLOTS) as pool:
        list(pool.map(spawn, range(count)))
    return count / (time.perf_counter() - began)


def _drain(bench: Bench, jobs: int) -> float:
    spec = {
        "name": "drain",
        "argv": ["/bin/true"],
        "env": {"PATH": "/bin:/usr/bin"},
        "work_dir": bench.home,
        "stdout": "/dev/null",
    }
    node = bench.client.call("GET", "/v1/cluster")["nodes"][0]["name"]
    bench.client.call("POST", "/v1/drain", {"targets": [node], "message": "filling the queue"})
    ids = [bench.client.call("POST", "/v1/jobs", {"spec": spec})["job"]["id"] for _ in range(jobs)]
    began = time.perf_counter()
    bench.client.call("POST", "/v1/undrain", {"targets": [node]})
    # The last one to end is one of the last eight, so wait for all of these, then check all.
    tail = ",".join(ids[-SLOTS:])
    while not bench.client.call("GET", f"/v1/wait?ids={tail}&timeout_s=60")["done"]:
        pass
    while not bench.client.call("GET", f"/v1/wait?ids={','.join(ids)}&timeout_s=60")["done"]:
        pass
    taken = time.perf_counter() - began
    rows = bench.client.call("GET", f"/v1/jobs?ids={','.join(ids)}&fields=state,exit_code,run")["rows"]
    wrong = [row for row in rows if row != ["COMPLETED", 0, 1]]
    if wrong or len(rows) != jobs:
        raise AssertionError(f"{len(rows)} of {jobs} jobs, wrong: {wrong[:3]}")
    return jobs / taken
