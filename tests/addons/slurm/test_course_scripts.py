"""Scripts as courses and clusters hand them out, on a server without any configuration: taken as they are, and run.

After what the public documentation of clusters recommends: MPI, OpenMP, arrays, GPU training, notebooks, checkpoints.
Their programs are stood in for by checks of what the job was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_lab import SlurmLab, user

SCRIPTS = {
    "hello": """\
#!/bin/bash
#SBATCH --job-name=hello
#SBATCH --account=cs101
#SBATCH --partition=short
#SBATCH --qos=student
#SBATCH --time=00:05:00
#SBATCH --ntasks=1
#SBATCH --output=%x.%j.out
echo "Hello from $(hostname), account $SLURM_JOB_ACCOUNT, QOS $SLURM_JOB_QOS"
""",
    "openmp": """\
#!/bin/bash -l
#SBATCH -J openmp
#SBATCH -A project_2001234
#SBATCH -p small
#SBATCH -N 1
#SBATCH -n 1
#SBATCH -c 2
#SBATCH --mem-per-cpu=100M
#SBATCH --hint=nomultithread       # cores, not threads
#SBATCH --threads-per-core=1
#SBATCH -t 0-00:10
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK OMP_PLACES=cores
[ "$OMP_NUM_THREADS" = 2 ]
""",
    "mpi": """\
#!/bin/bash
#SBATCH --job-name=mpi
#SBATCH --account=physics
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --mincpus=2
#SBATCH --distribution=block:cyclic
#SBATCH --switches=1
#SBATCH --exclusive
#SBATCH --time=30
#SBATCH --mail-user=student@example.edu
srun --cpu-bind=cores bash -c 'echo rank $SLURM_PROCID of $SLURM_NTASKS' | sort > ranks.txt
[ "$(cat ranks.txt)" = "$(printf 'rank 0 of 2\nrank 1 of 2')" ]
""",
    "array": """\
#!/bin/bash
#SBATCH --job-name=sweep
#SBATCH --array=1-3%2
#SBATCH --account=bio
#SBATCH --qos=normal
#SBATCH --output=sweep_%A_%a.out
#SBATCH --error=sweep_%A_%a.err
#SBATCH --time=0:10:0
#SBATCH --mem=100
LR=$(sed -n "${SLURM_ARRAY_TASK_ID}p" <<< $'0.1\n0.01\n0.001')
[ -n "$LR" ] && [ "$SLURM_ARRAY_TASK_COUNT" = 3 ]
""",
    "gpu": """\
#!/bin/bash
#SBATCH --job-name=train-gpu
#SBATCH --account=my-group-gpu
#SBATCH --partition=gpu
#SBATCH --qos=gpu-normal
#SBATCH --gres=gpu:1
#SBATCH --constraint=""
#SBATCH --cpus-per-task=2
#SBATCH --mem=200M
#SBATCH --time=01:00:00
#SBATCH --mail-type=NONE
#SBATCH --mail-user=student@example.edu
#SBATCH --gpu-bind=closest
#SBATCH --gres-flags=enforce-binding
module() { :; }
module purge
module load cuda/12
[ "$SLURM_GPUS_ON_NODE" = 1 ] && [ -n "$CUDA_VISIBLE_DEVICES" ]
""",
    "torchrun": """\
#!/bin/bash
#SBATCH --job-name=ddp
#SBATCH --account=deep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=1
#SBATCH --network=sn_all
#SBATCH --time=0:30:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))
srun --gpu-bind=none bash -c '[ -n "$SLURM_LOCALID" ] && [ -n "$CUDA_VISIBLE_DEVICES" ] && [ -n "$MASTER_ADDR" ]'
""",
    "new-spelling": """\
#!/bin/bash
#SBATCH --job-name=per-task
#SBATCH --account=vision
#SBATCH --ntasks=2
#SBATCH --tres-per-task=cpu:1,gres/gpu:1
#SBATCH --time=10
srun bash -c 'echo $SLURM_PROCID'
[ "$SLURM_GPUS_ON_NODE" = 2 ]
""",
    "sockets": """\
#!/bin/bash
#SBATCH --account=hpc
#SBATCH --nodes=1 --sockets-per-node=2 --gpus-per-socket=1
#SBATCH --ntasks-per-socket=1
#SBATCH --cores-per-socket=1
#SBATCH --time=5
[ "$SLURM_GPUS_ON_NODE" = 2 ]
""",
    "shared-gpu": """\
#!/bin/bash
#SBATCH --job-name=notebook
#SBATCH --account=teaching
#SBATCH --partition=interactive
#SBATCH --gres=shard:1
#SBATCH --cpus-per-task=1
#SBATCH --time=0:20:00
#SBATCH --output=/dev/null
#SBATCH --tmp=1G
[ -n "$CUDA_VISIBLE_DEVICES" ]
""",
    "checkpoint": """\
#!/bin/bash
#SBATCH --job-name=ckpt
#SBATCH --account=climate
#SBATCH --qos=preemptable
#SBATCH --comment="restarts from its last checkpoint"
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@60
#SBATCH --nice=10
#SBATCH --time=00:10:00
#SBATCH --time-min=00:05:00
#SBATCH --get-user-env
#SBATCH --export=ALL
#SBATCH --profile=none
trap 'echo saving' USR1
echo step > ckpt.txt
""",
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """A daemon of a home without any configuration, with more cores and GPUs than this machine has."""
    size = "[node]\ncpus = 8\nmem_mib = 16000\n"
    folder = tmp_path_factory.mktemp("bare")
    # Login shells read the profile of whoever runs the tests, which may wait for something.
    found = SlurmLab(folder / "lab", config=size)
    yield found
    found.close()


@pytest.mark.parametrize("command", ["sbatch", "gsub"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_taken_and_completes(bare: SlurmLab, name: str, command: str) -> None:
    folder = bare.work / f"{name}-{command}"
    folder.mkdir()
    (folder / "job.sh").write_text(SCRIPTS[name])
    done = bare.type(f"cd {folder} && {command} job.sh")
    assert done.code == 0, done
    job_id = done.out.split()[-1]
    assert done.out == ("Submitted batch job " if command == "sbatch" else "Submitted job ") + f"{job_id}\n"
    check_notes(command, name, done.err)
    bare.wait(job_id)
    states = bare.ok(f"sacct -X -n -P -o state -j {job_id}").split()
    assert set(states) == {"COMPLETED"}, outputs(folder)


def outputs(folder: Path) -> str:
    return "\n".join(
        f"{path.name}:\n{path.read_text()}" for path in folder.iterdir() if path.suffix in (".out", ".err")
    )


def check_notes(command: str, name: str, err: str) -> None:
    """At most one line on options without effect, and one on names."""
    notes = err.splitlines()
    assert all(note.startswith(f"{command}: ") for note in notes)
    assert sum("no effect" in note for note in notes) <= 1, notes
    assert sum("configured" in note for note in notes) == 1, notes
    assert len(notes) <= 2, notes


def test_labels_are_shown_wherever_slurm_shows_them(bare: SlurmLab) -> None:
    job = bare.submit("-A vision -q high -p gpu -H --wrap true")
    shown = bare.ok(f"scontrol -o show job {job}")
    assert " Account=vision QOS=high " in shown
    for line, wanted in (
        (f"squeue -h -j {job} -o '%a %q %P'", "vision high gpu\n"),
        ("squeue -h -A vision -q high -o %i", f"{job}\n"),
        (f"sacct -X -n -P -j {job} -o account,qos,partition", "vision|high|gpu\n"),
        ("sacct -X -n -P -A vision -q high -o jobid", f"{job}\n"),
        ("gq -o '%i %a %q' | tail -n +2", f"{job} vision high\n"),
    ):
        assert bare.ok(line) == wanted, line
    assert bare.ok(f"scontrol update JobId={job} Account=other") == ""
    assert bare.ok(f"squeue -h -j {job} -o %a") == "other\n"
    assert bare.job(job)["charged_account"] == user()
    bare.ok("scancel -A other")
    assert bare.state(job) == "CANCELLED"


@pytest.mark.parametrize("line", ["srun -A lab -q high", "salloc -A lab -q high"])
def test_labels_are_taken_in_the_foreground(bare: SlurmLab, line: str) -> None:
    done = bare.type(f"{line} bash -c 'echo $SLURM_JOB_ACCOUNT $SLURM_JOB_QOS'")
    assert (done.code, done.out) == (0, "lab high\n")
    assert "no accounts or QOS are configured, so account lab and QOS high are just names" in done.err


def test_where_accounts_and_qos_are_configured_unknown_ones_are_refused(lab: SlurmLab) -> None:
    done = lab.type("sbatch -A nosuch --wrap true")
    assert (done.code, done.out) == (1, "")
    assert "Batch job submission failed: Invalid account or account/partition combination specified\n" in done.err
    done = lab.type("sbatch -q nosuch --wrap true")
    assert (done.code, done.out) == (1, "")
    assert "Batch job submission failed: Invalid qos specification\n" in done.err


def test_shards_beyond_a_gpu_are_refused(bare: SlurmLab) -> None:
    done = bare.type("sbatch --gres=shard:5 --wrap true")
    assert (done.code, done.out) == (1, "")
    assert "asked for 5 shards of a GPU, and a GPU has 4 here" in done.err


def test_a_step_takes_amounts_for_each_task(bare: SlurmLab) -> None:
    body = 'srun --tres-per-task=gres/gpu:1 -n2 bash -c "echo gpus $CUDA_VISIBLE_DEVICES" | sort'
    job = bare.submit(f"-n2 --gres=gpu:2 -o tres.txt --wrap '{body}; srun --gpus-per-socket=1 true'")
    bare.wait(job)
    text = bare.text("tres.txt")
    assert text.count("gpus ") == 2
    assert "srun: error: --gpus-per-socket is not supported for a step; use --gpus" in text
