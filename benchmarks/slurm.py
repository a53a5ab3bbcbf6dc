"""What Slurm's commands cost beside gsub and gq: sbatch, squeue of 10,000 waiting jobs, and what else tools poll."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.harness import bare_python, percentile, scheduler, show, time_command
from gpusched.slurm_commands import available_commands, write_commands

_WAITING = 10_000
_SQUEUE_GOAL_MS = 300


def main(repeats: int = 40) -> None:
    """Print whole-process times and the processor's, beside a bare interpreter started in the same way."""
    show("floor: python -c pass", bare_python(repeats))
    bare = [sys.executable, "-IS", "-c", "pass"]
    show("floor: python -IS -c pass, as these start", time_command(bare, dict(os.environ), repeats))
    with scheduler("[node]\ncpus = 1\n") as bench:
        folder = os.path.join(bench.home, "commands")
        os.mkdir(folder)
        write_commands(folder)

        def slurm(line: str) -> list[str]:
            name, *words = line.split()
            return [os.path.join(folder, name), *words]

        node = bench.client.call("GET", "/v1/cluster")["nodes"][0]["name"]
        bench.client.call("POST", "/v1/drain", {"targets": [node], "message": "benchmark"})
        pairs = {
            "gsub --parsable": bench.command("gsub", "--parsable", "--wrap", "true"),
            "sbatch --parsable": slurm("sbatch --parsable --wrap true"),
        }
        walls: dict[str, list[float]] = {name: [] for name in pairs}
        cpus: dict[str, list[float]] = {name: [] for name in pairs}
        for _ in range(repeats + 1):
            # In turns, so that a busy moment falls on both.
            for name, argv in pairs.items():
                wall, cpu = _run_ms(argv, bench.env)
                walls[name].append(wall)
                cpus[name].append(cpu)
        for name in pairs:
            show(name, walls[name][1:])
            show(f"{name}, CPU", cpus[name][1:])
        job = subprocess.run(pairs["sbatch --parsable"], env=bench.env, stdout=subprocess.PIPE, check=True)
        one = job.stdout.decode().strip()
        for line in (
            f"squeue -h -j {one} -o %T",
            f"sacct -n -X -j {one} -o state",
            f"scontrol show job {one}",
            "sinfo",
        ):
            if line.split()[0] in available_commands():
                show(line.replace(one, "N"), time_command(slurm(line), bench.env, repeats))
        lines = "".join(f"echo {number}\n" for number in range(_WAITING))
        submit = bench.command("gsub", "--parsable", "--batch", "-")
        subprocess.run(submit, env=bench.env, input=lines.encode(), stdout=subprocess.DEVNULL, check=True)
        show(f"gq of {_WAITING}", time_command(bench.command("gq"), bench.env, repeats // 4))
        if "squeue" not in available_commands():
            return
        pid = bench.daemon_pid()
        for line in ("squeue", "squeue -h -o %i,%t", "squeue --me -t all", "squeue -l -S i", f"squeue -h -j {one}"):
            served = _daemon_ms(pid)
            found = [_run_ms(slurm(line), bench.env) for _ in range(repeats // 4)]
            served = (_daemon_ms(pid) - served) / len(found)
            name = f"{line.replace(one, 'N')} of {_WAITING}"
            show(name, [wall for wall, _ in found])
            show(f"{name}, CPU", [cpu for _, cpu in found])
            print(f"{'  and of the daemon':<44} average {served:8.3f} ms")
            if line == "squeue" and percentile([wall for wall, _ in found], 0.5) > _SQUEUE_GOAL_MS:
                print(f"  above the goal of {_SQUEUE_GOAL_MS} ms")


def _run_ms(argv: Sequence[str], env: dict[str, str]) -> tuple[float, float]:
    """Milliseconds of a whole process: on the clock and of processor time."""
    began, before = time.perf_counter(), _children_s()
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    return (time.perf_counter() - began) * 1e3, (_children_s() - before) * 1e3


def _daemon_ms(pid: int) -> float:
    """Milliseconds of processor time of the daemon's main thread so far."""
    with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) / 1e6


def _children_s() -> float:
    """Seconds of processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
