"""What the kernel keeps a run to: memory, tasks, processors, devices, and that nothing of it survives.

Runs under the real engine, in a control group of the test's own. See docs/contributing.md for how to run these.
"""

from __future__ import annotations

import os
import signal

from limited_runs import LET_THROUGH, PATIENCE_S, PYTHON, REFUSED, REPORTS_OPENING, USER, LimitedBench

from gpusched.engine.linux import cgroup
from gpusched.model.execution import RunEnded, RunLost, RunStarted, StopOrder

HOG = "x = bytearray(300 << 20)"


# --- memory -------------------------------------------------------------------------------------------


def test_a_job_that_exceeds_its_memory_is_killed_whole(bench: LimitedBench) -> None:
    text = f"sleep 1000 & {PYTHON} -c '{HOG}'; echo went on"
    bench.run("1.1", "sh", "-c", text, mem_mib=100)
    end = bench.end_of("1.1")
    assert (end.signal, end.stopped_by) == (signal.SIGKILL, None)
    assert end.oom_kills >= 2
    assert (end.at_mem_limit, end.mem_limit_mib) == (True, 100)
    assert end.peak_mem_mib is not None
    assert 90 <= end.peak_mem_mib <= 100
    assert "went on" not in bench.output("1.1")
    assert not bench.leaf("1.1").exists()


def test_only_the_process_is_killed_when_configured(bench: LimitedBench) -> None:
    bench.run("1.1", "sh", "-c", f"{PYTHON} -c '{HOG}'; echo went on with $?", mem_mib=100, oom_kills_job=False)
    end = bench.end_of("1.1")
    assert (end.exit_code, end.oom_kills, end.at_mem_limit) == (0, 1, True)
    assert "went on with 137" in bench.output("1.1")


def test_memory_and_cpu_time_include_all_processes(bench: LimitedBench) -> None:
    # Two that live at once, each by itself far below the sum; they burn time that nobody waits for.
    lines = ("import time", "x = bytearray(60 << 20)", "while time.process_time() < 1: pass", "time.sleep(5)")
    one = f"{PYTHON} -c '{chr(10).join(lines)}' &"
    bench.run("1.1", "sh", "-c", f"{one}\n{one}\nwait", mem_mib=500)
    end = bench.end_of("1.1")
    assert (end.exit_code, end.oom_kills) == (0, 0)
    assert end.peak_mem_mib is not None
    assert end.peak_mem_mib > 120
    assert end.cpu_s is not None
    assert end.cpu_s > 2


def test_a_job_below_its_limit_is_not_touched(bench: LimitedBench) -> None:
    bench.run("1.1", PYTHON, "-c", "x = bytearray(20 << 20)", mem_mib=200)
    end = bench.end_of("1.1")
    assert (end.exit_code, end.oom_kills, end.at_mem_limit) == (0, 0, False)


def test_the_kernel_kills_the_job_before_its_supervisor(bench: LimitedBench) -> None:
    bench.run(
        "1.1", PYTHON, "-c", "import time; print(open('/proc/self/oom_score_adj').read(), flush=True); time.sleep(999)"
    )
    bench.says("1.1", "0")
    supervisor = bench.until("1.1", RunStarted).supervisor_pid
    with open(f"/proc/{supervisor}/oom_score_adj", encoding="ascii") as file:
        assert int(file.read()) == -500
    assert bench.output("1.1").split() == ["0"]


# --- tasks and processors -----------------------------------------------------------------------------


def test_a_fork_bomb_ends_at_its_task_limit(bench: LimitedBench) -> None:
    code = """
import os, time
count = 1
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
except OSError as error:
    print(count, os.strerror(error.errno), flush=True)
"""
    bench.run("1.1", PYTHON, "-c", code, tasks=25)
    end = bench.end_of("1.1")
    assert end.exit_code == 0
    assert bench.output("1.1").strip() == "25 Resource temporarily unavailable"
    assert len(end.leftovers) >= 1


def test_a_pinned_job_runs_only_on_its_own_processors(bench: LimitedBench) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    code = """
import os, sys
print(sorted(os.sched_getaffinity(0)))
try:
    os.sched_setaffinity(0, range(os.cpu_count()))
except OSError:
    pass
print(sorted(os.sched_getaffinity(0)))
"""
    bench.run("1.1", PYTHON, "-c", code, cpus=(allowed[-1],))
    assert bench.end_of("1.1").exit_code == 0
    assert bench.output("1.1").split("\n")[:2] == [str([allowed[-1]])] * 2


# --- devices ------------------------------------------------------------------------------------------


def test_a_job_opens_only_its_own_gpus(bench: LimitedBench, gpu_nodes: list[str]) -> None:
    bench.run("1.1", PYTHON, "-c", REPORTS_OPENING, *gpu_nodes, "/dev/null", "/dev/urandom", gpu_minors=(1,))
    bench.run("2.1", PYTHON, "-c", REPORTS_OPENING, *gpu_nodes, "/dev/null", gpu_minors=())
    bench.run("3.1", PYTHON, "-c", REPORTS_OPENING, *gpu_nodes, gpu_minors=None)
    assert all(bench.end_of(run).exit_code == 0 for run in ("1.1", "2.1", "3.1"))
    assert bench.output("1.1").splitlines() == [
        f"nvidia0: {REFUSED}",
        f"nvidia1: {LET_THROUGH}",
        f"nvidia2: {REFUSED}",
        f"nvidiactl: {LET_THROUGH}",
        "null: open",
        "urandom: open",
    ]
    assert bench.output("2.1").splitlines() == [
        *(f"{name}: {REFUSED}" for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl")),
        "null: open",
    ]
    assert bench.output("3.1").splitlines() == [
        f"{name}: {LET_THROUGH}" for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl")
    ]


def test_a_device_rule_outlives_the_node_and_its_supervisor(bench: LimitedBench, gpu_nodes: list[str]) -> None:
    code = "import sys; input(); exec(sys.argv.pop(1))"
    fifo = bench.folder / "fifo"
    os.mkfifo(fifo, 0o666)
    fifo.chmod(0o666)
    shell = ("sh", "-c", f"exec {PYTHON} -c '{code}' \"$@\" <{fifo}", "sh")
    bench.run("1.1", *shell, REPORTS_OPENING, *gpu_nodes[:2], gpu_minors=(1,))
    bench.until("1.1", RunStarted)
    status = os.stat(gpu_nodes[1])
    os.unlink(gpu_nodes[1])
    os.mknod(gpu_nodes[1], status.st_mode, status.st_rdev)
    os.chmod(gpu_nodes[1], 0o666)
    fifo.write_text("go\n")
    assert bench.end_of("1.1").exit_code == 0
    assert bench.output("1.1").splitlines() == [f"nvidia0: {REFUSED}", f"nvidia1: {LET_THROUGH}"]


# --- attempts to get out ------------------------------------------------------------------------------


def test_a_job_can_neither_leave_nor_change_its_cgroup(bench: LimitedBench) -> None:
    code = """
import os
path = "/sys/fs/cgroup" + open("/proc/self/cgroup").read().strip()[3:]
for name, value in [
    ("memory.max", "max"), ("pids.max", "max"), ("cgroup.procs", "0"), ("../cgroup.procs", "0"),
    ("../../cgroup.procs", "0"), ("cgroup.subtree_control", "+memory"),
]:
    try:
        with open(os.path.join(path, name), "w") as file:
            file.write(value)
        print(name, "was written")
    except OSError as error:
        print(name, os.strerror(error.errno))
try:
    os.mkdir(os.path.join(path, "mine"))
    print("made a leaf")
except OSError as error:
    print("no leaf:", os.strerror(error.errno))
"""
    code += "print(open(os.path.join(path, 'memory.max')).read())"
    bench.run("1.1", PYTHON, "-c", code, mem_mib=300, tasks=50)
    assert bench.end_of("1.1").exit_code == 0
    *lines, limit = bench.output("1.1").split("\n")[:8]
    # What it may is to know it, and to take only so much.
    assert limit == str(300 << 20)
    assert all(line.endswith("Permission denied") for line in lines), lines


def test_a_kill_ends_a_job_that_forks_as_fast_as_it_can(bench: LimitedBench) -> None:
    code = """
import os, signal
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
    except OSError:
        pass
"""
    bench.run("1.1", PYTHON, "-c", code, tasks=60)
    bench.says("1.1", "ready")
    leaf = bench.leaf("1.1")
    bench.wait(lambda: (cgroup.number(str(leaf), "pids.current") or 0) > 40, PATIENCE_S, "many of it")
    bench.engine.order("1.1", StopOrder("cancel", grace_s=0))
    end = bench.end_of("1.1")
    assert end.stopped_by == "cancel"
    assert not leaf.exists()
    assert not bench.processes()


def test_no_process_survives_the_death_of_its_supervisor(bench: LimitedBench) -> None:
    code = "import os, time; os.setsid() if os.fork() == 0 else print('ready', flush=True); time.sleep(1000)"
    # Without the mark in its environment by which it would be found.
    bench.run("1.1", "env", "-i", PYTHON, "-c", code, tasks=60)
    bench.says("1.1", "ready")
    leaf = bench.leaf("1.1")
    assert leaf.exists()
    os.kill(bench.until("1.1", RunStarted).supervisor_pid, signal.SIGKILL)
    assert isinstance(bench.until("1.1", RunEnded, RunLost), RunLost)
    assert not leaf.exists()


# --- /tmp ---------------------------------------------------------------------------------------------


def test_a_private_tmp_is_empty_and_removed_with_the_job(bench: LimitedBench) -> None:
    text = "ls -A /tmp /var/tmp; id -un; echo mine >/tmp/mine; ln -s /etc /tmp/link; cat /tmp/mine; stat -c %a /tmp"
    bench.run("1.1", "sh", "-c", text, private_tmp=True)
    assert bench.end_of("1.1").exit_code == 0
    assert bench.output("1.1").split() == ["/tmp:", "/var/tmp:", USER, "mine", "1777"]
    assert not [name for place in ("/tmp", "/var/tmp") for name in os.listdir(place) if name.startswith("gpusched-1.1")]
    assert not os.path.exists("/tmp/mine")
    assert os.path.exists("/etc/passwd")


# --- limits that cannot be set -----------------------------------------------------------------------


def test_a_run_is_not_started_without_its_limit(bench: LimitedBench) -> None:
    bench.run("1.1", "true", cpus=(4000,))
    end = bench.end_of("1.1")
    assert end.start_at is None
    assert end.launch_error is not None
    assert end.launch_error.startswith("cannot pin it to its CPUs: ")
    assert not bench.leaf("1.1").exists()
