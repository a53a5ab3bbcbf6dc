"""What arrays cost: submitting one, listing one, and how fast its tasks go through 8 slots."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.drain import SLOTS, bare_rate
from benchmarks.harness import Bench, fsync_floor, scheduler, show, spawn_floor


def main(tasks: int = 10_000, rounds: int = 3) -> None:
    """Print submission and listing in milliseconds, tasks per second, and what bare spawning does."""
    show("floor: spawn and await true", spawn_floor())
    floors = [bare_rate(2000)]
    with scheduler(f"[node]\ncpus = {SLOTS}\n") as bench:
        show("floor: write and fsync", fsync_floor(bench.home))
        show(f"submission of an array of {tasks:,}", [_submit_held(bench, tasks) for _ in range(30)])
        _list(bench, 100_000)
        rates = []
        for _ in range(rounds):
            rates.append(_drain(bench, tasks))
            floors.append(bare_rate(2000))
        show(f"array of {tasks:,} x true through {SLOTS} slots", rates, "tasks/s")
        show(f"floor: bare spawns, {SLOTS} at a time, between the rounds", floors, "/s")


def _spec(bench: Bench, tasks: int) -> dict[str, object]:
    return {
        "name": "array",
        "argv": ["/bin/true"],
        "env": {"PATH": "/bin:/usr/bin"},
        "work_dir": bench.home,
        "stdout": "/dev/null",
        "array": f"0-{tasks - 1}",
    }


def _submit_held(bench: Bench, tasks: int) -> float:
    """Milliseconds from the request to the answer."""
    began = time.perf_counter()
    job = bench.client.call("POST", "/v1/jobs", {"spec": {**_spec(bench, tasks), "hold": True}})["job"]
    taken = time.perf_counter() - began
    bench.client.call("POST", "/v1/jobs/cancel", {"ids": [job["id"]]})
    return 1e3 * taken


def _list(bench: Bench, tasks: int) -> None:
    job = bench.client.call("POST", "/v1/jobs", {"spec": {**_spec(bench, tasks), "argv": ["/bin/sleep", "1000"]}})[
        "job"
    ]
    env = {**os.environ, "GPUSCHED_HOME": bench.home}
    gq = [sys.executable, "-c", "import sys; from gpusched.cli.gq import main; sys.exit(main())"]
    taken = []
    for _ in range(20):
        began = time.perf_counter()
        subprocess.run(gq, env=env, check=True, stdout=subprocess.DEVNULL)
        taken.append(1e3 * (time.perf_counter() - began))
    show(f"gq with an array of {tasks:,}, {SLOTS} running", taken)
    bench.client.call("POST", "/v1/jobs/cancel", {"ids": [job["id"]]})
    _wait(bench, job["id"])


def _drain(bench: Bench, tasks: int) -> float:
    began = time.perf_counter()
    job = bench.client.call("POST", "/v1/jobs", {"spec": _spec(bench, tasks)})["job"]
    _wait(bench, job["id"])
    taken = time.perf_counter() - began
    found = bench.client.call("GET", f"/v1/jobs/{job['id']}")["job"]
    if (found["state"], found["tasks"]) != ("COMPLETED", {"COMPLETED": tasks}):
        raise AssertionError(f"the array is {found['state']}: {found['tasks']}")
    return tasks / taken


def _wait(bench: Bench, job_id: str) -> None:
    while not bench.client.call("GET", f"/v1/wait?ids={job_id}&timeout_s=60")["done"]:
        pass


if __name__ == "__main__":
    main()
