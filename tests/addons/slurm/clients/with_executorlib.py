"""executorlib: functions as queued jobs through pysqa, and as steps of srun; a dependency; cancelling."""

import os

from executorlib import SlurmClusterExecutor, SlurmJobExecutor
from pysqa import QueueAdapter


def add(first, second):
    return first + second


def where():
    import os

    return os.environ["SLURM_JOB_ID"]


def main():
    with SlurmClusterExecutor(resource_dict={"cores": 1, "run_time_max": 300, "partition": "main"}) as pool:
        first = pool.submit(add, 1, 2)
        second = pool.submit(add, first, 10)
        assert second.result(timeout=240) == 13
        assert first.result() == 3
    with SlurmJobExecutor(max_workers=2, resource_dict={"cores": 1, "slurm_cmd_args": ["--time=5"]}) as pool:
        assert pool.submit(add, 4, 5).result(timeout=120) == 9
        assert pool.submit(where).result(timeout=120).isdigit()
    queue = QueueAdapter(queue_type="slurm")
    job = queue.submit_job(
        job_name="pysqa",
        working_directory=os.getcwd(),
        cores=1,
        command="sleep 300",
        run_time_max=300,
        partition="main",
    )
    assert isinstance(job, int), job
    status = queue.get_status_of_job(process_id=job)
    assert status in ("running", "pending"), status
    assert job in set(queue.get_queue_status()["jobid"])
    queue.delete_job(process_id=job)


if __name__ == "__main__":
    main()
