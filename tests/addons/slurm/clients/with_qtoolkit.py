"""qtoolkit, under jobflow-remote: the directives it writes, its queries, its cancelling."""

import getpass
import pathlib
import time

from qtoolkit.core.data_objects import QResources, QState, SubmissionStatus
from qtoolkit.io.slurm import SlurmIO
from qtoolkit.manager import QueueManager


def until(what, seconds=60):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, what
        time.sleep(0.2)


manager = QueueManager(SlurmIO())


def submit(name, command, **more):
    wanted = QResources(
        job_name=name,
        queue_name="main",
        nodes=1,
        processes_per_node=1,
        threads_per_process=1,
        time_limit=600,
        output_filepath=f"{name}.out",
        error_filepath=f"{name}.err",
        **more,
    )
    done = manager.submit(command, options=wanted, script_fname=f"{name}.sh")
    assert done.status == SubmissionStatus.SUCCESSFUL, done
    assert done.job_id.isdigit(), done
    return done.job_id


quick = submit("qtk-quick", "echo done > quick.txt", gpus_per_job=1, memory_per_thread=200)
until(pathlib.Path("quick.txt").exists)
until(lambda: manager.get_job(quick) is None or manager.get_job(quick).state == QState.DONE)

slow = submit("qtk-slow", "sleep 300", qos="normal")
until(lambda: manager.get_job(slow).state == QState.RUNNING)
job = manager.get_job(slow)
assert (job.name, job.queue_name, job.info.nodes, job.info.time_limit) == ("qtk-slow", "main", 1, 600), job
assert [one.job_id for one in manager.get_jobs_list(jobs=[quick, slow])] == [slow]
assert slow in [one.job_id for one in manager.get_jobs_list(user=getpass.getuser())]
assert manager.get_job("99999999") is None
cancelled = manager.cancel(slow)
assert cancelled.status.value == "SUCCESSFUL", cancelled
assert cancelled.job_id == slow
until(lambda: manager.get_job(slow) is None or manager.get_job(slow).state != QState.RUNNING)

refused = manager.submit("true", options=QResources(queue_name="nosuch", processes=1), script_fname="refused.sh")
assert refused.status == SubmissionStatus.FAILED
assert "nvalid partition" in str(refused), refused
