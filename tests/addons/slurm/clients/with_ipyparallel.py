"""ipyparallel: engines as a batch job, a computation, signals, the end."""

import subprocess
import time

import ipyparallel as ipp


def queue():
    command = ["squeue", "-h", "--me", "-t", "PD,R", "-o", "%j"]
    return [
        name
        for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        if name.startswith("ipengine")
    ]


cluster = ipp.Cluster(engines="slurm", n=2, profile_dir="ipp-profile", location="127.0.0.1")
cluster.config.SlurmEngineSetLauncher.queue = "main"
cluster.config.SlurmEngineSetLauncher.timelimit = "5"
with cluster as client:
    client.wait_for_engines(2, timeout=240)
    view = client[:]
    assert sorted(view.map_sync(lambda x: x * x, range(4))) == [0, 1, 4, 9]

    ranks = view.apply_sync(lambda: __import__("os").environ["SLURM_PROCID"])
    assert sorted(ranks) == ["0", "1"], ranks
    assert len(queue()) == 1
end = time.monotonic() + 60
while queue():
    assert time.monotonic() < end, queue()
    time.sleep(0.5)
