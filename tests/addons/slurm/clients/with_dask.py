"""dask-jobqueue: workers as jobs, a computation, scaling down, the end."""

import subprocess
import time

from dask.distributed import Client
from dask_jobqueue import SLURMCluster


def queue():
    command = ["squeue", "-h", "-n", "dask-worker", "-t", "PD,R", "-o", "%i"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


cluster = SLURMCluster(
    cores=1,
    processes=1,
    memory="500MB",
    queue="main",
    walltime="00:05:00",
    interface="lo",
    log_directory="dask-logs",
    job_extra_directives=["--gres=gpu:1"],
    local_directory="dask-local",
)
print(cluster.job_script())
with cluster, Client(cluster) as client:
    cluster.scale(jobs=2)
    client.wait_for_workers(2, timeout=180)
    assert len(queue()) == 2
    assert client.submit(sum, [1, 2, 3]).result(timeout=60) == 6
    assert sorted(client.gather(client.map(lambda x: x * x, range(5)))) == [0, 1, 4, 9, 16]
    cluster.scale(jobs=1)
    end = time.monotonic() + 60
    while len(queue()) != 1:
        assert time.monotonic() < end, queue()
        time.sleep(0.5)
end = time.monotonic() + 60
while queue():
    assert time.monotonic() < end, queue()
    time.sleep(0.5)
