"""From the acknowledged submission to the job's first instruction, on an idle scheduler."""

from __future__ import annotations

import os
import time

from benchmarks.harness import Bench, scheduler, show, spawn_floor, wait_for

_SETTLE_S = 0.02


def main(repeats: int = 200) -> None:
    """Print submit-to-start; the job is `date`, which prints the clock as its first act."""
    show("floor: spawn and await true", spawn_floor())
    with scheduler() as bench:
        acknowledged, started = _measure(bench, repeats)
        show("submit to acknowledgement", acknowledged)
        show("acknowledgement to first instruction", started)


def _measure(bench: Bench, repeats: int) -> tuple[list[float], list[float]]:
    acknowledged, started = [], []
    for number in range(repeats):
        path = os.path.join(bench.home, f"out-{number}")
        spec = {
            "argv": ["/bin/date", "+%s.%N"],
            "env": {"PATH": "/bin:/usr/bin"},
            "work_dir": bench.home,
            "stdout": path,
        }
        time.sleep(_SETTLE_S)
        asked = time.time()
        job = bench.client.call("POST", "/v1/jobs", {"spec": spec})["job"]
        answered = time.time()
        bench.client.call("GET", f"/v1/wait?ids={job['id']}&timeout_s=20")
        wait_for(lambda path=path: os.path.getsize(path) > 0, 10, "the job's output")  # type: ignore[misc]
        with open(path, encoding="ascii") as file:
            began = float(file.read())
        acknowledged.append((answered - asked) * 1e3)
        started.append((began - answered) * 1e3)
    return acknowledged, started
