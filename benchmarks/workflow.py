"""From the end of a job to the start of the one that waits for it; and submitting a pipeline of 1,000 jobs."""

from __future__ import annotations

import os
import time

from benchmarks.harness import Bench, bare_python, scheduler, show, spawn_floor, time_command, wait_for

_STEPS = 1000
_SETTLE_S = 0.02


def main(repeats: int = 100, submissions: int = 10) -> None:
    """Print both with their floors."""
    show("floor: spawn and await true", spawn_floor())
    with scheduler() as bench:
        show("a parent's last act to its dependant's first", _releases(bench, repeats))
    base = bare_python(20)
    show("floor: python -c pass", base)
    with scheduler("[node]\ncpus = 1\n") as bench:
        show(f"gsub --dag --dry-run of {_STEPS} jobs", _pipelines(bench, submissions, "--dry-run"))
        show(f"gsub --dag of {_STEPS} jobs", _pipelines(bench, submissions))


def _releases(bench: Bench, repeats: int) -> list[float]:
    """Milliseconds between two clocks: `date` is all that parent and dependant do."""
    samples = []
    for number in range(repeats):
        paths = [os.path.join(bench.home, f"{who}-{number}") for who in ("parent", "child")]
        spec = {"argv": ["/bin/date", "+%s.%N"], "env": {"PATH": "/bin:/usr/bin"}, "work_dir": bench.home}
        parent = bench.client.call("POST", "/v1/jobs", {"spec": {**spec, "stdout": paths[0], "hold": True}})["job"]
        waits = {**spec, "stdout": paths[1], "dependency": f"afterok:{parent['id']}"}
        child = bench.client.call("POST", "/v1/jobs", {"spec": waits})["job"]
        time.sleep(_SETTLE_S)
        bench.client.call("POST", "/v1/jobs/release", {"ids": [parent["id"]]})
        bench.client.call("GET", f"/v1/wait?ids={child['id']}&timeout_s=20")
        ended, began = (_read(path) for path in paths)
        samples.append((began - ended) * 1e3)
    return samples


def _read(path: str) -> float:
    wait_for(lambda: os.path.getsize(path) > 0, 10, "the job's output")
    with open(path, encoding="ascii") as file:
        return float(file.read())


def _pipelines(bench: Bench, repeats: int, *words: str) -> list[float]:
    """Milliseconds of the whole command; nothing of it starts."""
    node = bench.client.call("GET", "/v1/cluster")["nodes"][0]["name"]
    bench.client.call("POST", "/v1/drain", {"targets": [node], "message": "benchmark"})
    path = os.path.join(bench.home, "pipeline.toml")
    with open(path, "w", encoding="utf-8") as file:
        file.write(pipeline_text(_STEPS))
    samples = []
    for _ in range(repeats):
        samples += time_command(bench.command("gsub", "--dag", path, *words), bench.env, 1)
        bench.client.call("POST", "/v1/jobs/cancel", {"all": True})
    return samples


def pipeline_text(steps: int) -> str:
    """A pipeline in layers of ten steps, each of which needs two of the layer before."""
    lines = ['name = "bench"', "[vars]", 'root = "/data"', "[defaults]", 'time = "1h"']
    for number in range(steps):
        layer, place = divmod(number, 10)
        lines += [f"[step.s{layer}-{place}]", f'run = "train {{root}} --seed {number}"', 'mem = "64M"', "retries = 2"]
        if layer:
            lines.append(f'needs = ["s{layer - 1}-{place}", "s{layer - 1}-{(place + 1) % 10}"]')
    return "\n".join(lines) + "\n"
