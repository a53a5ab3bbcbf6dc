"""What a command costs at the prompt: gsub, gq of 10,000 waiting jobs, gsub --batch."""

from __future__ import annotations

import os
import subprocess
import time

from gpusched.bench.harness import bare_python, scheduler, show, time_command

_WAITING = 10_000


def main(repeats: int = 40) -> None:
    """Print whole-process times and their ratio to a bare interpreter."""
    floor = bare_python(repeats)
    show("floor: python -c pass", floor)
    base = sorted(floor)[len(floor) // 2]
    with scheduler("[node]\ncpus = 1\n") as bench:
        node = bench.client.call("GET", "/v1/cluster")["nodes"][0]["name"]
        bench.client.call("POST", "/v1/drain", {"targets": [node], "message": "benchmark"})
        samples = time_command(bench.command("gsub", "--parsable", "--", "true"), bench.env, repeats)
        show("gsub, one submission", samples)
        print(f"{'':<44} {sorted(samples)[len(samples) // 2] / base:.2f} x the floor")
        show("gq, few jobs", time_command(bench.command("gq"), bench.env, repeats))
        lines = "".join(f"echo {number}\n" for number in range(_WAITING))
        rates = []
        for _ in range(3):
            bench.client.call("POST", "/v1/jobs/cancel", {"all": True})
            began = time.perf_counter()
            done = subprocess.run(
                bench.command("gsub", "--parsable", "--batch", "-"),
                env=bench.env,
                input=lines.encode(),
                stdout=subprocess.PIPE,
                check=True,
                cwd=bench.home,
            )
            rates.append(_WAITING / (time.perf_counter() - began))
            if len(done.stdout.split()) != _WAITING:
                raise AssertionError("not every line got an id")
        show(f"gsub --batch of {_WAITING} lines", rates, "jobs/s")
        show(f"gq of {_WAITING} waiting jobs", time_command(bench.command("gq"), bench.env, repeats // 2))
        loop = 'for i in $(seq 200); do "$GSUB" --parsable -- true; done'
        env = {**bench.env, "GSUB": bench.command("gsub")[0]}
        if os.path.exists(env["GSUB"]):
            began = time.perf_counter()
            subprocess.run(["/bin/sh", "-c", loop], env=env, stdout=subprocess.DEVNULL, check=True)
            print(f"{'shell loop of 200 gsub':<44} {200 / (time.perf_counter() - began):.0f} submissions/s")
