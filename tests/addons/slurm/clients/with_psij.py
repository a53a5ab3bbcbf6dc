"""PSI/J: a batch job and its states, several processes, a failure, cancelling."""

import pathlib
import time
from datetime import timedelta

from psij import Job, JobAttributes, JobExecutor, JobExecutorConfig, JobSpec, JobState, ResourceSpecV1

config = JobExecutorConfig()
executor = JobExecutor.get_instance("slurm")
executor.config.queue_polling_interval = 1
executor.config.initial_queue_polling_delay = 1


def job(name, words, *, minutes=5, launcher=None, **resources):
    spec = JobSpec(
        executable=words[0],
        arguments=words[1:],
        name=name,
        directory=str(pathlib.Path.cwd()),
        stdout_path=f"{name}.out",
        stderr_path=f"{name}.err",
        attributes=JobAttributes(duration=timedelta(minutes=minutes), queue_name="main"),
        resources=ResourceSpecV1(node_count=1, exclusive_node_use=False, **resources),
        launcher=launcher,
    )
    return Job(spec)


def run(one, state):
    executor.submit(one)
    status = one.wait(timedelta(minutes=3))
    assert status is not None, "no end"
    assert status.state == state, (status, pathlib.Path(f"{one.spec.name}.err").read_text())
    return status


one = job("pj-one", ["/bin/echo", "hello"])
run(one, JobState.COMPLETED)
assert pathlib.Path("pj-one.out").read_text() == "hello\n"

two = job(
    "pj-two", ["/bin/sh", "-c", "echo rank $SLURM_PROCID of $SLURM_NTASKS"], launcher="srun", processes_per_node=2
)
run(two, JobState.COMPLETED)
assert sorted(pathlib.Path("pj-two.out").read_text().splitlines()) == ["rank 0 of 2", "rank 1 of 2"]

failed = run(job("pj-fail", ["/bin/sh", "-c", "exit 3"]), JobState.FAILED)
assert failed.exit_code == 3, failed

slow = job("pj-slow", ["/bin/sleep", "300"])
executor.submit(slow)
assert slow.wait(timedelta(minutes=1), target_states=[JobState.ACTIVE]).state == JobState.ACTIVE
slow.cancel()
assert slow.wait(timedelta(minutes=2)).state == JobState.CANCELED

again = Job()
executor.attach(again, slow.native_id)
end = time.monotonic() + 60
while not again.status.final:
    assert time.monotonic() < end
    time.sleep(0.5)
