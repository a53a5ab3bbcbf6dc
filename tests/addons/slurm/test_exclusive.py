"""A job that has its node to itself has all of the node's cores."""

from __future__ import annotations

from slurm_lab import SlurmLab


def test_finds_all_cores_and_starts_as_many_tasks(own_lab: SlurmLab) -> None:
    line = "echo $SLURM_CPUS_ON_NODE $SLURM_JOB_CPUS_PER_NODE; srun -n 8 --exact echo task"
    job = own_lab.submit(f"-t 5 --exclusive -o out.txt --wrap '{line}'")
    own_lab.wait(job)
    assert own_lab.text("out.txt").splitlines() == ["8 8", *["task"] * 8]


def test_others_get_what_they_asked_for(own_lab: SlurmLab) -> None:
    job = own_lab.submit("-t 5 -c 2 -o out.txt --wrap 'echo $SLURM_CPUS_ON_NODE; srun -n 8 true; echo $?'")
    own_lab.wait(job)
    first, *_, last = own_lab.text("out.txt").splitlines()
    assert (first, last) == ("2", "1")
