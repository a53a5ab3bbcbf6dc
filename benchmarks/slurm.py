"""What Slurm's commands cost beside gsub and gq: sbatch, squeue of 10,000 waiting jobs, and what else tools poll."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
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
        for name, argv in pairs.items():
            show(name, time_command(argv, bench.env, repeats))
            show(f"{name}, CPU", _cpu_ms(argv, bench.env, repeats))
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
        for line in ("squeue", "squeue -h -o %i,%t", "squeue --me -t all", "squeue -l -S i", f"squeue -h -j {one}"):
            found = time_command(slurm(line), bench.env, repeats // 4)
            show(f"{line.replace(one, 'N')} of {_WAITING}", found)
            if line == "squeue" and percentile(found, 0.5) > _SQUEUE_GOAL_MS:
                print(f"  above the goal of {_SQUEUE_GOAL_MS} ms")


def _cpu_ms(argv: Sequence[str], env: dict[str, str], repeats: int) -> list[float]:
    """Milliseconds of processor time of each run."""
    samples = []
    for _ in range(repeats):
        before = _children_s()
        subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        samples.append((_children_s() - before) * 1e3)
    return samples


def _children_s() -> float:
    """Seconds of processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
