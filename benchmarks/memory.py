"""What the scheduler costs while nothing happens, and what each waiting or running job adds."""

from __future__ import annotations

import os
import time

from benchmarks.harness import Bench, bare_python, cpu_s, memory_kib, scheduler, show, wait_for

_IDLE_S = 20.0
_WAITING = 10_000
_RUNNING = 8


def main(idle_s: float = _IDLE_S) -> None:
    """Print the idle daemon's CPU and memory, supervisors' PSS, and memory per waiting job."""
    show("floor: python -c pass", bare_python(10))
    with scheduler(f"[node]\ncpus = {_RUNNING}\n", fake_gpus="4x24GiB") as bench:
        _idle(bench, idle_s)
        _supervisors(bench)
        _waiting(bench)


def _family(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for task in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{task}/children", encoding="ascii") as file:
                found.extend(int(word) for word in file.read().split())
    return found


def _idle(bench: Bench, idle_s: float) -> None:
    pid = bench.daemon_pid()
    family = _family(pid)
    before = sum(cpu_s(member) for member in family)
    time.sleep(idle_s)
    used = sum(cpu_s(member) for member in family) - before
    print(f"idle for {idle_s:.0f} s: {100 * used / idle_s:.2f} % of a core, daemon and its {len(family) - 1} children")
    print(f"daemon: RSS {memory_kib(pid, 'Rss') / 1024:.1f} MB, PSS {memory_kib(pid) / 1024:.1f} MB")
    for member in family[1:]:
        with open(f"/proc/{member}/cmdline", "rb") as file:
            words = file.read().replace(b"\0", b" ").decode(errors="replace").split()
        print(f"  child {' '.join(words[-2:])[:40]:<42} PSS {memory_kib(member) / 1024:.1f} MB")


def _supervisors(bench: Bench) -> None:
    spec = {"argv": ["/bin/sleep", "600"], "env": {}, "work_dir": bench.home, "stdout": "/dev/null"}
    ids = [bench.client.call("POST", "/v1/jobs", {"spec": spec})["job"]["id"] for _ in range(_RUNNING)]

    def pids() -> list[int]:
        runs = [bench.client.call("GET", f"/v1/jobs/{job_id}")["job"]["runs"] for job_id in ids]
        return [run["pid"] for job_runs in runs for run in job_runs if run["pid"]]

    wait_for(lambda: len(pids()) == _RUNNING, 20, "the jobs to start")
    sizes = []
    for pid in pids():
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            supervisor = int(file.read().rpartition(")")[2].split()[1])
        sizes.append(memory_kib(supervisor) / 1024)
    show(f"PSS of a supervisor, {_RUNNING} running", sizes, "MB")
    bench.client.call("POST", "/v1/jobs/cancel", {"all": True})
    bench.client.call("GET", f"/v1/wait?ids={','.join(ids)}&timeout_s=60")


def _waiting(bench: Bench) -> None:
    pid = bench.daemon_pid()
    node = bench.client.call("GET", "/v1/cluster")["nodes"][0]["name"]
    bench.client.call("POST", "/v1/drain", {"targets": [node], "message": "benchmark"})
    # A first small batch fills the caches that any batch needs.
    spec = {"env": dict(os.environ), "work_dir": bench.home}
    bench.client.call("POST", "/v1/jobs", {"spec": spec, "batch": ["true"] * 100})
    before = memory_kib(pid, "Rss")
    for start in range(0, _WAITING, 1000):
        lines = [f"python train.py --seed {start + number}" for number in range(1000)]
        bench.client.call("POST", "/v1/jobs", {"spec": spec, "batch": lines})
    added = memory_kib(pid, "Rss") - before
    print(f"{_WAITING} waiting jobs add {added / _WAITING:.2f} KB each")
