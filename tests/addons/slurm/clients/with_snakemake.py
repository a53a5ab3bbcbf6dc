"""Snakemake with its Slurm executor: rules, resources, an array of jobs, a failure, cancelling."""

import os
import pathlib
import signal
import subprocess
import sys
import time

BIN = os.path.dirname(sys.executable)
ENV = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}

pathlib.Path("Snakefile").write_text(
    """
rule all:
    input: "all.txt"

rule part:
    output: "part-{n}.txt"
    resources: mem_mb=200, runtime=5, gpu=1
    threads: 2
    shell: "echo {wildcards.n} cpus $SLURM_CPUS_PER_TASK gpus $CUDA_VISIBLE_DEVICES > {output}"

rule join:
    input: expand("part-{n}.txt", n=[1, 2, 3])
    output: "all.txt"
    resources: mem_mb=200, runtime=5
    shell: "cat {input} > {output}"

rule broken:
    output: "never.txt"
    resources: mem_mb=200, runtime=5
    shell: "exit 7"

rule long:
    output: "long.txt"
    resources: mem_mb=200, runtime=5
    shell: "touch started; sleep 300"
"""
)


def words(*targets):
    return [
        *(f"{BIN}/snakemake", "--executor", "slurm", "--jobs", "4", "--latency-wait", "10"),
        *("--slurm-init-seconds-before-status-checks", "1", "--seconds-between-status-checks", "1"),
        *targets,
        *("--default-resources", "slurm_partition=main"),
    ]


def snakemake(*targets):
    done = subprocess.run(words(*targets), env=ENV, capture_output=True, text=True, timeout=400)
    print(done.stdout, done.stderr)
    return done


done = snakemake("all.txt")
assert done.returncode == 0
rows = pathlib.Path("all.txt").read_text().splitlines()
assert [row.split()[0] for row in rows] == ["1", "2", "3"], rows

done = snakemake("never.txt")
assert done.returncode != 0
assert "FAILED" in done.stdout + done.stderr

running = subprocess.Popen(words("long.txt"), env=ENV)
end = time.monotonic() + 120
while not pathlib.Path("started").exists():
    assert time.monotonic() < end
    time.sleep(0.2)
running.send_signal(signal.SIGINT)
running.wait(timeout=120)
end = time.monotonic() + 60
while subprocess.run(["squeue", "-h", "-t", "PD,R"], capture_output=True, text=True).stdout:
    assert time.monotonic() < end, "the job goes on"
    time.sleep(0.5)
