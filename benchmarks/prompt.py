"""What a command costs at the prompt: gsub, gq and gq --json of 10,000 waiting jobs, gsub --batch; and what a long
list costs those who submit meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.harness import Bench, bare_python, scheduler, show, time_command

_WAITING = 10_000


def main(repeats: int = 40) -> None:
    """Print whole-process times and their ratio to a bare interpreter."""
    floor = bare_python(repeats)
    # The commands' interpreters are started as this one: installers give the scripts no flags.
    show("floor: python -c pass", floor)
    bare = [sys.executable, "-S", "-E", "-c", "pass"]
    show("python -S -E -c pass, for comparison", time_command(bare, dict(os.environ), repeats))
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
        for words in ([], ["--json"], ["--all-rows"], ["--quiet"]):
            name = f"{' '.join(['gq', *words])} of {_WAITING} waiting jobs"
            show(name, time_command(bench.command("gq", *words), bench.env, repeats // 2))
        _submit_beside(bench, [], repeats)
        _submit_beside(bench, ["gq", "--json"], repeats)
        loop = 'for i in $(seq 200); do "$GSUB" --parsable -- true; done'
        env = {**bench.env, "GSUB": bench.command("gsub")[0]}
        if os.path.exists(env["GSUB"]):
            began = time.perf_counter()
            subprocess.run(["/bin/sh", "-c", loop], env=env, stdout=subprocess.DEVNULL, check=True)
            print(f"{'shell loop of 200 gsub':<44} {200 / (time.perf_counter() - began):.0f} submissions/s")


def _submit_beside(bench: Bench, command: list[str], repeats: int) -> None:
    """How long single submissions take, over a connection that is there, while something is asked again and again."""
    spec = {"argv": ["true"], "work_dir": bench.home, "env": {}}
    samples: list[float] = []
    asking: subprocess.Popen[bytes] | None = None
    turns = 0
    while turns < repeats // 4:
        if command and (asking is None or asking.poll() is not None):
            asking = subprocess.Popen(bench.command(*command), env=bench.env, stdout=subprocess.DEVNULL)
            turns += 1
        elif not command and len(samples) >= repeats * 10:
            break
        began = time.perf_counter()
        bench.client.call("POST", "/v1/jobs", {"spec": spec})
        samples.append((time.perf_counter() - began) * 1e3)
    if asking is not None:
        asking.wait()
    show(f"a submission beside {' '.join(command) or 'nothing'}", samples)
