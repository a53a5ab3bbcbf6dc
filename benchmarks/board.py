"""What viewers of the queue cost the daemon: /v1/board with 10,000 pending jobs beside /v1/jobs and nobody at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from benchmarks.harness import Bench, cpu_s, scheduler
from gpusched.client import DaemonConnection

_JOBS = 10_000
_SECONDS = 20.0


def main(seconds: float = _SECONDS) -> None:
    """Print the daemon's share of a core while viewers watch, who look at the same or at different rows."""
    with scheduler("[node]\ncpus = 1\n[limit]\nconnections_per_user = 200\n", fake_gpus="8xA100:80GiB") as bench:
        spec = {"argv": ["sleep", "1000"], "work_dir": bench.home, "env": {}, "gpus": 1, "time_limit_s": 3600}
        lines = [f"sleep {number + 1000}" for number in range(_JOBS)]
        bench.client.call("POST", "/v1/jobs", {"spec": spec, "batch": lines})
        time.sleep(5.0)
        _measure(bench, "nobody", 0, lambda number: "", seconds)
        _measure(bench, "/v1/jobs once a second", 1, lambda number: "", seconds, path="/v1/jobs")
        _measure(bench, "/v1/starts every 10 s", 1, lambda number: "", seconds, path="/v1/starts", pause_s=10.0)
        for viewers in (1, 10, 50):
            _measure(bench, f"/v1/board, {viewers} equal", viewers, lambda number: "limit=50", seconds)
        for viewers in (10, 50):
            _measure(
                bench,
                f"/v1/board, {viewers} elsewhere",
                viewers,
                lambda number: f"limit=50&offset={number * 50}",
                seconds,
            )
        _measure(bench, "/v1/board, 10 filters", 10, lambda number: f"limit=50&filter=id:{number}*", seconds)


def _measure(
    bench: Bench,
    name: str,
    viewers: int,
    query: Callable[[int], str],
    seconds: float,
    *,
    path: str = "/v1/board",
    pause_s: float = 1.0,
) -> None:
    pid, over = bench.daemon_pid(), threading.Event()
    counts = [0, 0]

    def watch(number: int) -> None:
        version = ""
        with DaemonConnection(bench.client.socket_path) as client:
            while not over.is_set():
                asked = f"{path}?{query(number)}"
                if version:
                    asked += f"&timeout_s=5&after={version}"
                answer = client.raw(asked)
                counts[0] += 1
                counts[1] += len(answer)
                if path == "/v1/board":
                    version = answer.partition(b'"version":"')[2].partition(b'"')[0].decode()
                else:
                    over.wait(pause_s)

    threads = [threading.Thread(target=watch, args=(number,), daemon=True) for number in range(viewers)]
    for thread in threads:
        thread.start()
    time.sleep(3.0)
    counts[:] = [0, 0]
    before, began = cpu_s(pid), time.monotonic()
    # Something happens meanwhile: a job is held and released once a second.
    while time.monotonic() - began < seconds:
        bench.client.call("POST", "/v1/jobs/hold", {"ids": [_JOBS]})
        time.sleep(0.5)
        bench.client.call("POST", "/v1/jobs/release", {"ids": [_JOBS]})
        time.sleep(0.5)
    spent_s, took_s = cpu_s(pid) - before, time.monotonic() - began
    over.set()
    for thread in threads:
        thread.join(15.0)
    size = counts[1] // max(1, counts[0])
    print(f"{name:<32} {spent_s / took_s:7.1%} of a core   {counts[0] / took_s:6.1f} answers/s of {size:,} bytes")
