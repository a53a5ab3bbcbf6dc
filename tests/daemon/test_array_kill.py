"""kill -9 of the daemon in the middle of arrays: every task runs once, and orphans go with a cancelled array."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest
from harness import Daemon
from support import wait_until

from gpusched.daemon.failures import STEPS


def ran(daemon: Daemon) -> list[int]:
    path = daemon.home / "ran"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def submit(daemon: Daemon, line: str, tasks: str, **spec: object) -> str:
    return daemon.submit(
        "/bin/sh", "-c", line, array=tasks, stdout="/dev/null", env={"OUT": str(daemon.home / "ran")}, **spec
    )


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_before_any_tick_step_neither_loses_nor_repeats_a_task(
    make_daemon: Callable[..., Daemon], step: str
) -> None:
    daemon = make_daemon(config="[node]\ncpus = 4\n")
    array = submit(daemon, "echo $GPUSCHED_ARRAY_TASK_ID >> $OUT; exit $((GPUSCHED_ARRAY_TASK_ID % 2))", "0-39%3")
    daemon.kill()
    for nth in (3, 7):
        daemon.try_start(GPUSCHED_CRASH_AT=f"{step}:{nth}")
        wait_until(lambda: daemon.process is not None and daemon.process.poll() is not None, what="the crash")
        daemon.reap()
    daemon.start()
    (ended,) = daemon.wait(array)
    assert (ended["state"], ended["exit_code"]) == ("FAILED", 1)
    assert ended["tasks"] == {"COMPLETED": 20, "FAILED": 20}
    assert sorted(ran(daemon)) == list(range(40))


def test_hidden_processes_are_gone_after_the_array_is_cancelled(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(config="[node]\ncpus = 4\n")
    # Each task leaves the session, forks twice and ignores the usual signals.
    hidden = "setsid sh -c '(trap \"\" TERM HUP INT; echo $$ >> $OUT; exec sleep 1000) &' & wait; sleep 1000"
    array = submit(daemon, hidden, "0-7", grace_s=0.2, cpus=1)
    wait_until(lambda: len(ran(daemon)) >= 4, what="the tasks to hide their processes")

    def sleepers() -> list[int]:
        found = []
        for process in psutil.process_iter(["environ"]):
            environ = process.info["environ"] or {}
            if environ.get("GPUSCHED_ARRAY_JOB_ID") == array and environ.get("OUT") == str(daemon.home / "ran"):
                found.append(process.pid)
        return found

    wait_until(lambda: len(sleepers()) >= 8, what="two processes of each task")
    daemon.kill()
    daemon.start()
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [array]})
    (ended,) = daemon.wait(array)
    assert (ended["state"], ended["tasks_left"]) == ("CANCELLED", "4-7")
    wait_until(lambda: not sleepers(), what="all of them to be gone")
