"""Signals to the steps of a run, and the end of one step: real processes, no daemon needed once the run has begun."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from engine_bench import LocalBench
from support import is_alive, wait_until

from gpusched.engine.supervisor.steps import step_of
from gpusched.model.execution import SignalOrder, StepStopOrder, StopOrder
from gpusched.model.job import Notice

TASK = """
import os, signal, subprocess, sys, time
name = sys.argv[1]
def told(number, frame):
    open("told", "a").write(f"{name} {signal.Signals(number).name}\\n")
for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, told)
if len(sys.argv) > 2:
    # Whatever a process makes of its environment, it belongs to the step of its parent.
    subprocess.Popen([sys.executable, __file__, sys.argv[2]], env={"PATH": os.environ["PATH"]})
open(f"up-{name}", "w").write(str(os.getpid()))
end = sys.argv[-1] if sys.argv[-1].startswith("until-") else "end"
while not os.path.exists(end):
    time.sleep(0.02)
"""
"""Writes what signal it gets, perhaps with a child that has no environment."""
BATCH = """#!/bin/sh
SLURM_STEP_ID=0 {python} task.py a child &
SLURM_STEP_ID=1 {python} task.py b &
{python} task.py plain &
trap 'echo batch USR2 >> told' USR2
trap 'echo batch TERM >> told' TERM
echo ready
while [ ! -e end ]; do sleep 0.02; done
wait
"""
ALL = ("a", "b", "child", "plain")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalBench]:
    made = LocalBench(tmp_path)
    yield made
    made.close()


def started(bench: LocalBench, **parts: object) -> None:
    """A batch script with two steps, the first of two processes, and one process of no step."""
    (bench.folder / "task.py").write_text(TASK)
    bench.start("1.1", script=BATCH.format(python=sys.executable).encode(), argv=(), **parts)
    bench.ready("1.1")
    bench.wait(lambda: all((bench.folder / f"up-{name}").exists() for name in ALL), what="all processes")


def told(bench: LocalBench) -> list[str]:
    path = bench.folder / "told"
    return sorted(path.read_text().split("\n")[:-1]) if path.exists() else []


def test_usage_is_told_by_step_and_task(bench: LocalBench) -> None:
    started(bench)
    found = {one.step: one for one in bench.engine.task_usage("1.1")}
    assert sorted(found, key=str) == [0, 1, None]
    assert set(found[0].pids) == {pid(bench, "a"), pid(bench, "child")}
    assert found[1].pids == (pid(bench, "b"),)
    script = found[None]
    assert pid(bench, "plain") in script.pids
    # The shell, and perhaps its sleep.
    assert len(script.pids) in (2, 3)
    for one in found.values():
        assert one.task is None
        assert one.cpu_s > 0
        assert 1 < one.peak_mem_mib <= one.peak_virtual_mib
        assert one.mem_mib > 1
    # Every python is larger than a shell.
    assert found[0].mem_mib > found[1].mem_mib
    assert bench.engine.task_usage("9.1") == ()
    (bench.folder / "end").touch()


def pid(bench: LocalBench, name: str) -> int:
    return int((bench.folder / f"up-{name}").read_text())


@pytest.mark.parametrize(
    ("to", "names"),
    [
        ("steps", ["a", "b", "child"]),
        ("step:0", ["a", "child"]),
        ("step:1", ["b"]),
        ("step:7", []),
        ("main", ["batch"]),
        ("full", ["a", "b", "batch", "child", "plain"]),
    ],
)
def test_a_signal_reaches_whom_it_is_for_once(bench: LocalBench, to: str, names: list[str]) -> None:
    started(bench)
    bench.engine.order("1.1", SignalOrder(signal.SIGUSR2, to))
    wanted = [f"{name} {'USR2' if name == 'batch' else 'SIGUSR2'}" for name in names]
    bench.wait(lambda: told(bench) == wanted, what=f"{wanted}, not {told(bench)}")
    bench.let_pass(0.3)
    assert told(bench) == wanted
    (bench.folder / "end").touch()
    assert bench.end_of("1.1").exit_code == 0


def test_one_step_is_ended_and_the_run_goes_on(bench: LocalBench) -> None:
    started(bench)
    bench.engine.order("1.1", StepStopOrder(0, 0.5))
    bench.wait(lambda: not is_alive(pid(bench, "a")) and not is_alive(pid(bench, "child")), what="the step to end")
    assert told(bench) == ["a SIGTERM", "child SIGTERM"]
    assert is_alive(pid(bench, "b"))
    assert is_alive(pid(bench, "plain"))
    (bench.folder / "end").touch()
    end = bench.end_of("1.1")
    assert (end.exit_code, end.stopped_by) == (0, None)


def test_a_step_without_grace_is_killed_untold(bench: LocalBench) -> None:
    started(bench)
    bench.engine.order("1.1", StepStopOrder(1, 0.0))
    bench.wait(lambda: not is_alive(pid(bench, "b")), what="the step to end")
    assert told(bench) == []
    (bench.folder / "end").touch()
    assert bench.end_of("1.1").exit_code == 0


@pytest.mark.parametrize(
    ("main_only", "names"), [(False, ["a SIGUSR2", "b SIGUSR2", "child SIGUSR2"]), (True, ["batch USR2"])]
)
def test_the_notice_of_a_job_of_sbatch_goes_to_its_steps(bench: LocalBench, main_only: bool, names: list[str]) -> None:
    notice = Notice(signal.SIGUSR2, before_s=56, main_only=main_only)
    started(bench, time_limit_s=60.0, notice=notice, slurm="node1")
    bench.wait(lambda: told(bench) == names, what=f"{names}, not {told(bench)}")
    (bench.folder / "end").touch()
    end = bench.end_of("1.1")
    assert end.exit_code == 0
    assert end.start_at is not None
    assert end.end_at - end.start_at >= 4.0


def test_a_job_of_gsub_gets_its_notice_as_ever(bench: LocalBench) -> None:
    started(bench, time_limit_s=60.0, notice=Notice(signal.SIGUSR2, before_s=58, main_only=False))
    bench.wait(lambda: len(told(bench)) >= 4, what="the notice")
    assert {name.split()[0] for name in told(bench)} == {"a", "b", "child", "plain"}
    (bench.folder / "end").touch()
    bench.end_of("1.1")


def test_steps_save_at_a_preemption_and_the_script_does_not_continue(bench: LocalBench) -> None:
    (bench.folder / "task.py").write_text(TASK)
    script = f"#!/bin/sh\nSLURM_STEP_ID=0 {sys.executable} task.py a &\nwait $!; echo next line\n"
    notice = Notice(signal.SIGUSR2, before_s=60, main_only=False)
    bench.start("1.1", script=script.encode(), argv=(), stop_signal=None, notice=notice, slurm="node1", grace_s=30.0)
    bench.wait(lambda: (bench.folder / "up-a").exists(), what="the task")
    bench.engine.order("1.1", StopOrder("preempt"))
    bench.wait(lambda: told(bench) == ["a SIGUSR2"], what="the notice")
    assert is_alive(pid(bench, "a"))
    (bench.folder / "end").touch()
    end = bench.end_of("1.1")
    assert (end.signal, end.stopped_by) == (signal.SIGTERM, "preempt")
    assert "next line" not in bench.output("1.1")


@pytest.mark.parametrize("why", ["cancel", "requeue", "preempt"])
def test_without_steps_or_notice_a_job_of_sbatch_is_ended_by_term(bench: LocalBench, why: str) -> None:
    notice = Notice(signal.SIGUSR2, before_s=60, main_only=False)
    text = "#!/bin/sh\ntrap 'echo term; exit 4' TERM\necho ready\nwhile :; do sleep 0.02; done\n"
    bench.start("1.1", script=text.encode(), argv=(), stop_signal=None, notice=notice, slurm="node1")
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder(why))
    end = bench.end_of("1.1")
    assert (end.exit_code, end.stopped_by) == (4, why)
    assert "term\n" in bench.output("1.1")


@pytest.mark.parametrize(
    ("why", "tail"),
    [
        ("cancel", ""),
        ("requeue", " DUE TO JOB REQUEUE"),
        ("preempt", " DUE TO PREEMPTION"),
        ("timeout", " DUE TO TIME LIMIT"),
    ],
)
def test_a_job_of_sbatch_is_told_of_its_end_in_slurms_words(bench: LocalBench, why: str, tail: str) -> None:
    limit_s = 0.5 if why == "timeout" else None
    bench.start("7.1", argv=("sh", "-c", "echo ready; exec sleep 600"), slurm="node1", time_limit_s=limit_s)
    if limit_s is None:
        bench.ready("7.1")
        bench.engine.order("7.1", StopOrder(why))
    bench.end_of("7.1")
    (line,) = [line for line in bench.output("7.1").splitlines() if "CANCELLED" in line]
    before, _, after = line.partition(" CANCELLED AT ")
    assert before == "slurmstepd: error: *** JOB 7 ON node1"
    assert after[19:] == f"{tail} ***"


def is_of_step(pid: int, step: int | None) -> bool:
    return step_of(pid) == step


def test_only_a_number_is_a_step() -> None:
    for value, step in (("3", 3), ("0", 0), ("", None), ("batch", None), ("-1", None), ("9" * 30, None), ("1\n", None)):
        env = {"A": "x", "SLURM_STEP_ID": value, "XSLURM_STEP_ID": "9"}
        with subprocess.Popen(["/bin/sleep", "60"], env=env) as process:
            try:
                # The kernel shows the environment a moment after the program has begun.
                wait_until(partial(is_of_step, process.pid, step), what=repr(value))
            finally:
                process.kill()
    with subprocess.Popen(["/bin/sleep", "60"], env={"XSLURM_STEP_ID": "9"}) as process:
        try:
            assert step_of(process.pid) is None
        finally:
            process.kill()
    assert step_of(2**22 + 1) is None
