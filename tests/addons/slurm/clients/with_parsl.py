"""Parsl: a block of workers through SlurmProvider, with the plain and with srun's launcher."""

import os
import pathlib
import sys
import time

import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.launchers import SingleNodeLauncher, SrunLauncher
from parsl.providers import SlurmProvider


@parsl.python_app
def double(number):
    import os

    return number * 2, os.environ["SLURM_JOB_ID"]


@parsl.bash_app
def shell(stdout="shell.out"):
    return "echo from $SLURM_JOB_NAME"


def run(name, launcher, **more):
    provider = SlurmProvider(
        partition="main",
        nodes_per_block=1,
        init_blocks=1,
        max_blocks=1,
        walltime="00:05:00",
        launcher=launcher,
        worker_init=f"export PATH={os.path.dirname(sys.executable)}:$PATH",
        **more,
    )
    executor = HighThroughputExecutor(
        label=name, address="127.0.0.1", max_workers_per_node=2, provider=provider, encrypted=False
    )
    with parsl.load(Config(executors=[executor], run_dir=f"runinfo-{name}", strategy_period=1)):
        found = [double(number) for number in range(4)]
        assert [one.result(timeout=180)[0] for one in found] == [0, 2, 4, 6]
        assert shell().result(timeout=60) == 0
        text = pathlib.Path("shell.out").read_text()
        assert text.startswith("from parsl."), text
        (status,) = executor.status().values()
        assert status.status_name == "RUNNING", status
        job_id = found[0].result()[1]
        assert job_id in provider.resources, provider.resources
    end = time.monotonic() + 60
    while provider.status([job_id])[0].state.name in ("RUNNING", "PENDING"):
        assert time.monotonic() < end
        time.sleep(0.5)
    parsl.clear()


run("single", SingleNodeLauncher(), exclusive=True)
run("srun", SrunLauncher(), exclusive=False, cores_per_node=2, mem_per_node=1)
