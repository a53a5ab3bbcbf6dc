"""simple-slurm: submit from text and by srun, look, signal, cancel."""

import datetime
import pathlib
import subprocess
import time

from simple_slurm import Slurm


def until(what, seconds=60):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, what
        time.sleep(0.2)


slurm = Slurm(
    job_name="ss-one",
    output="ss-%j.out",
    cpus_per_task=2,
    gres="gpu:1",
    time=datetime.timedelta(minutes=5),
    mem="500M",
)
one = slurm.sbatch("echo name $SLURM_JOB_NAME cpus $SLURM_CPUS_PER_TASK", shell="/bin/bash")
assert isinstance(one, int), one
path = pathlib.Path(f"ss-{one}.out")
until(lambda: path.exists() and path.read_text() == "name ss-one cpus 2\n")

parsable = Slurm("--parsable", job_name="ss-two", time="5:00", output="/dev/null")
two = parsable.sbatch("sleep 300")
assert int(two) > one

array = Slurm(array=range(3, 12, 3), output=f"{Slurm.JOB_ARRAY_MASTER_ID}_{Slurm.JOB_ARRAY_ID}.txt", time="5:00")
array_id = array.sbatch("echo task $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT")
for task in (3, 6, 9):
    file = pathlib.Path(f"{array_id}_{task}.txt")
    until(lambda file=file: file.exists() and file.stat().st_size)
    assert file.read_text() == f"task {task} of 3\n"

after = Slurm(dependency={"afterok": one, "after": two}, output="after.out", time="5:00")
after.sbatch("echo after")
until(lambda: pathlib.Path("after.out").exists())

slurm.squeue.update_squeue()
row = slurm.squeue.jobs[int(two)]
assert (row["NAME"], row["ST"], row["NODES"], row["CPUS"]) == ("ss-two", "R", "1", "1"), row
assert row["NODELIST(REASON)"] == "node1", row
# TERM reaches steps alone, and this job has none; the second time it sends KILL.
slurm.scancel.signal_job(two)
slurm.scancel.signal_job(two)
until(lambda: (slurm.squeue.update_squeue(), int(two) not in slurm.squeue.jobs)[1])
slurm.scancel.cancel_job(two)
slurm.scancel.cancel_all()

assert Slurm(time="5:00", job_name="ss-srun", ntasks=1).srun("true") == 0
code = 0
try:
    Slurm(time="5:00").srun("bash -c 'exit 3'")
except subprocess.CalledProcessError as error:
    code = error.returncode
assert code == 3, code
