"""submitit: functions, arrays, several tasks, cancelling, and checkpointing through USR2 and requeue."""

import os
import subprocess
import sys
import time

import submitit


def add(first, second):
    print("adding", flush=True)
    return first + second


def who():
    env = submitit.JobEnvironment()
    return env.num_tasks, env.global_rank, env.local_rank, env.node, env.num_nodes, env.hostnames, env.job_id


def gpus():
    return os.environ["CUDA_VISIBLE_DEVICES"]


def fail():
    raise ValueError("on purpose")


def nap(seconds):
    time.sleep(seconds)


class Counter:
    """Counts with checkpoints: a requeued one goes on where it was."""

    def __init__(self, start=0):
        self.value = start

    def __call__(self, stop):
        while self.value < stop or os.environ.get("SLURM_RESTART_COUNT") is None:
            self.value += 1
            time.sleep(0.1)
        return self.value, os.environ["SLURM_RESTART_COUNT"], os.environ["SLURM_JOB_ID"]

    def checkpoint(self, stop):
        return submitit.helpers.DelayedSubmission(Counter(self.value), stop)


def until(what, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def state(job):
    job.get_info(mode="force")
    return job.state


def executor(name, **more):
    found = submitit.AutoExecutor(folder=f"logs-{name}/%j")
    assert found.cluster == "slurm", found.cluster
    found.update_parameters(timeout_min=5, slurm_partition="main", mem_gb=1, **more)
    return found


def checkpoint(in_array):
    pool = executor("checkpoint", slurm_signal_delay_s=30)
    job = pool.map_array(Counter(), [30])[0] if in_array else pool.submit(Counter(), 30)
    until(lambda: state(job) == "RUNNING")
    until(lambda: "Starting with" in (job.stderr() or "") + (job.stdout() or ""))
    time.sleep(1)
    subprocess.run(["scancel", job.job_id, "--signal", "USR2"], check=True)
    value, restarts, _ = job.result()
    assert restarts == "1", restarts
    assert value >= 30, value
    until(lambda: state(job) == "COMPLETED")
    text = job.stdout() + (job.stderr() or "")
    assert "Caught signal SIGUSR2" in text, text


def main():
    job = executor("one", slurm_comment="two words", gpus_per_node=1, slurm_wckey="x").submit(add, 2, 3)
    assert job.result() == 5
    assert "adding" in job.stdout()
    until(lambda: state(job) == "COMPLETED")

    assert executor("gpus", gpus_per_node=2).submit(gpus).result().count(",") == 1

    tasks = executor("tasks", tasks_per_node=2, cpus_per_task=1).submit(who)
    found = tasks.results()
    assert [one[:5] for one in found] == [(2, 0, 0, 0, 1), (2, 1, 1, 0, 1)], found
    assert found[0][5] == ["node1"], found
    assert found[0][6] == tasks.job_id

    jobs = executor("array", slurm_array_parallelism=2, cpus_per_task=1).map_array(add, [1, 2, 3], [10, 20, 30])
    assert [one.result() for one in jobs] == [11, 22, 33]
    assert [one.job_id.partition("_")[2] for one in jobs] == ["0", "1", "2"], jobs
    until(lambda: [state(one) for one in jobs] == ["COMPLETED"] * 3)

    failed = executor("fail").submit(fail)
    assert "on purpose" in str(failed.exception())

    napping = executor("cancel").submit(nap, 300)
    until(lambda: state(napping) == "RUNNING")
    napping.cancel()
    until(lambda: state(napping).startswith("CANCELLED"))

    checkpoint(in_array=False)
    checkpoint(in_array=True)

    # The notice before the time limit comes from the scheduler itself: --signal=USR2@DELAY.
    pool = executor("limit", slurm_signal_delay_s=55)
    pool.update_parameters(timeout_min=1)
    job = pool.submit(Counter(), 5)
    assert job.result()[1] == "1"


if __name__ == "__main__":
    sys.exit(main())
