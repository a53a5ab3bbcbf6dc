"""A step over two machines while processes are killed, links are cut and machines lose their power."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab_cluster import Cluster
from step_lab import StepLab
from support import wait_until

nightly = pytest.mark.nightly
Make = Callable[..., StepLab]


@pytest.fixture
def make(cluster: Cluster, tmp_path: Path) -> Make:
    """Makes a job with a step."""
    return lambda **options: StepLab(cluster, tmp_path, **options)


def note(what: str, longest_s: Any) -> None:
    """How long each task was out of sight, for docs/explanation/nodes.md; with GPUSCHED_LAB_FIGURES=FILE."""
    if path := os.environ.get("GPUSCHED_LAB_FIGURES"):
        with open(path, "a") as file:
            file.write(json.dumps([what, longest_s]) + "\n")


# --- what a step survives ------------------------------------------------------------------------------------


def kill_head(step: StepLab, times: int = 1) -> None:
    for _ in range(times):
        step.head.kill()
        step.head.start()
    step.cluster.all_up()


def kill_agent(step: StepLab, node: str = "n2") -> None:
    before = step.cluster.agents(node)
    assert before
    step.lab[node].kill(*before)
    wait_until(lambda: set(step.cluster.agents(node)) - set(before), what="another agent")


def kill_both(step: StepLab) -> None:
    step.lab["n2"].kill(*step.cluster.agents("n2"))
    kill_head(step)


def cut(step: StepLab, cut_s: float, node: str = "n2") -> None:
    step.lab[node].cut()
    time.sleep(cut_s)
    step.lab[node].heal()
    step.cluster.all_up()


def stall(step: StepLab, stalled_s: float) -> None:
    """Nothing gets through to n2, and no end of the connection hears of it."""
    connections = step.lab["n1"].pids("client.py", "agent", "n2")
    assert connections
    step.lab["n1"].kill(*connections, number=signal.SIGSTOP)
    time.sleep(stalled_s)
    step.lab["n1"].kill(*connections, number=signal.SIGCONT)
    step.cluster.all_up()


def suspend(step: StepLab, between: Callable[[StepLab], None] | None = None) -> None:
    step.head.call("POST", "/v1/jobs/suspend", {"ids": [step.id]})
    step.head.wait_state(step.id, "SUSPENDED")
    seen: list[dict[str, list[str]]] = []

    def stands_still() -> bool:
        seen.append(step.lines())
        time.sleep(0.3)
        return len(seen) > 1 and seen[-1] == seen[-2]

    step.wait(stands_still, 30.0, "every task to stand still")
    if between is not None:
        between(step)
    assert step.lines() == seen[-1], "stands still on every node"
    step.head.call("POST", "/v1/jobs/resume", {"ids": [step.id]})


HARMLESS: dict[str, Callable[[StepLab], None]] = {
    "kill -9 of the head": kill_head,
    "kill -9 of the head, five times": lambda step: kill_head(step, 5),
    "kill -9 of the agent": kill_agent,
    "kill -9 of head and agent": kill_both,
    "cut of 3 s": lambda step: cut(step, 3.0),
    "cut of 20 s": lambda step: cut(step, 20.0),
    "cut of 45 s": lambda step: cut(step, 45.0),
    "stall of 8 s": lambda step: stall(step, 8.0),
    "stall of 25 s": lambda step: stall(step, 25.0),
    "stall of 60 s": lambda step: stall(step, 60.0),
    "suspension": suspend,
    "suspension, with kill -9 of the head": lambda step: suspend(step, kill_head),
    "suspension of 150 s, with kill -9 of both": lambda step: suspend(step, lambda s: (kill_both(s), time.sleep(150))),
}
SHORT = ("kill -9 of the head", "kill -9 of the agent", "suspension")


@pytest.mark.parametrize("what", [pytest.param(name, marks=() if name in SHORT else nightly) for name in HARMLESS])
def test_a_step_over_nodes_goes_on_and_every_line_of_it_arrives(make: Make, what: str) -> None:
    step = make()
    step.await_lines()
    HARMLESS[what](step)
    step.survived(what, note)


@nightly
@pytest.mark.parametrize("what", ["kill -9 of the head", "cut of 20 s", "cut of the node of srun"])
def test_a_step_on_two_nodes_beside_the_head_goes_on(make: Make, what: str) -> None:
    """srun reaches the head through the agent of its own node, and its other node through both."""
    step = make(nodes=("n2", "n3"))
    step.await_lines()
    if what == "cut of the node of srun":
        cut(step, 20.0, "n2")
    elif what == "cut of 20 s":
        cut(step, 20.0, "n3")
    else:
        kill_head(step)
    step.survived(f"{what}, srun on n2", note)


@nightly
def test_a_head_without_power_costs_no_step_on_other_nodes(make: Make) -> None:
    step = make(nodes=("n2", "n3"))
    step.await_lines()
    step.lab["n1"].power_off()
    step.head.reap()
    step.lab["n1"].power_on()
    step.head.start()
    step.cluster.all_up()
    step.survived("power-off of the head", note)


@nightly
@pytest.mark.parametrize("what", ["kill -9 of the head", "kill -9 of the agent", "cut of 20 s"])
def test_a_step_that_a_task_of_another_node_started_goes_on(make: Make, what: str) -> None:
    line = "srun -N 1 -n 1 -w n2 srun --overlap -N 1 -n 2 -w n1 {task}"
    step = make(line=line)
    step.await_lines(2)
    assert (len(step.tasks("n1")), len(step.tasks("n2"))) == (2, 0) or step.tasks("n1")
    HARMLESS[what](step)
    step.await_news()
    step.let_go()
    step.ended("FAILED", 11)
    step.check_complete(2)
    note(f"{what}, of a nested step", step.follower.stop())


# --- what ends a step ----------------------------------------------------------------------------------------


def parts_of(step: StepLab, node: str = "n2") -> list[int]:
    """The step's part on a node, by its id there: the parent of the tasks."""
    return sorted({parent(step, node, pid) for pid in step.tasks(node)})


def parent(step: StepLab, node: str, pid: int) -> int:
    """The parent of a process, both by their ids on the machine."""
    outside = step.lab[node].pid_outside(pid)
    assert outside is not None
    above = int(Path(f"/proc/{outside}/stat").read_text().rpartition(")")[2].split()[1])
    line = next(one for one in Path(f"/proc/{above}/status").read_text().splitlines() if one.startswith("NSpid:"))
    return int(line.split()[-1])


def test_a_killed_srun_leaves_no_task_and_its_script_goes_on(make: Make) -> None:
    step = make()
    step.await_lines()
    (row,) = step.steps()
    step.lab["n1"].kill(row["pid"])
    assert step.await_code() == 137
    step.ended("FAILED", 137)
    assert [row["state"] for row in step.steps()] == ["CANCELLED"]


def test_a_killed_part_fails_the_step(make: Make) -> None:
    step = make()
    step.await_lines()
    (part,) = parts_of(step)
    step.lab["n2"].kill(part)
    step.ended("FAILED", 143)
    assert "n2: tasks 2-3: Killed" in step.said()


@nightly
def test_a_killed_host_of_a_part_fails_the_step(make: Make) -> None:
    step = make()
    step.await_lines()
    (part,) = parts_of(step)
    step.lab["n2"].kill(parent(step, "n2", part))
    assert step.await_code() == 143
    step.wait(lambda: step.tasks("n2") == [], 30.0, "the tasks on n2 to be gone")
    step.ended("FAILED", 143)
    assert [row["state"] for row in step.steps()] == ["NODE_FAIL"]


@pytest.mark.parametrize("node", ["n2", pytest.param("n1", marks=nightly)])
def test_a_killed_supervisor_ends_the_job_everywhere(make: Make, node: str) -> None:
    """Args: node: of the holding supervisor, n2, or of that of the script."""
    step = make()
    step.await_lines()
    above = step.tasks(node)[0]
    while True:
        outside = step.lab[node].pid_outside(above)
        line = Path(f"/proc/{outside}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        record = any(".record" in os.readlink(f"/proc/{outside}/fd/{fd}") for fd in os.listdir(f"/proc/{outside}/fd"))
        if record:
            break
        assert above > 1, line
        above = parent(step, node, above)
    step.lab[node].kill(above)
    step.ended("NODE_FAIL", None)


def test_a_cancel_while_a_node_is_cut_off_reaches_it_afterwards(make: Make) -> None:
    step = make()
    step.await_lines()
    step.lab["n2"].cut()
    step.cluster.wait_node("n2", "down")
    step.cluster.command("gcancel", step.id)
    step.wait(lambda: step.tasks("n1") == [], 60.0, "the tasks on n1 to be gone")
    assert step.head.state(step.id) == "COMPLETING"
    assert len(step.tasks("n2")) == 2
    assert all(gpu["state"] not in ("idle", "drained") for gpu in step.cluster.gpus("n2")), "booked until it answers"
    step.lab["n2"].heal()
    (job,) = step.head.wait(step.id, timeout_s=150.0)
    assert job["state"] == "CANCELLED"
    step.check_gone()


@nightly
def test_a_cancel_of_the_step_while_a_node_is_cut_off_reaches_it_afterwards(make: Make) -> None:
    step = make(after="touch after; until [ -e go ]; do sleep 0.1; done")
    step.await_lines()
    step.lab["n2"].cut()
    step.cluster.wait_node("n2", "down")
    step.type("scancel", f"{step.id}.0")
    step.wait(lambda: step.tasks("n1") == [], 60.0, "the tasks on n1 to be gone")
    step.lab["n2"].heal()
    step.wait(lambda: step.tasks("n2") == [], 60.0, "the tasks on n2 to be gone")
    assert step.await_code() != 0
    assert step.head.state(step.id) == "RUNNING"
    assert [row["state"] for row in step.steps()] == ["CANCELLED"]
    step.let_go()
    step.ended("FAILED", step.codes()[0])


@nightly
def test_a_step_of_a_suspended_job_is_cancelled_and_the_job_stands_still(make: Make) -> None:
    step = make(after="touch after")
    step.await_lines()

    def cancel(step: StepLab) -> None:
        step.type("scancel", f"{step.id}.0")
        step.wait(lambda: not step.tasks("n1") and not step.tasks("n2"), 60.0, "the tasks to be gone")
        time.sleep(1.0)
        assert not (step.folder / "after").exists()
        job = step.head.job(step.id)
        assert (job["state"], job["suspended_s"]) == ("SUSPENDED", 0.0), "its clocks stand still, too"

    suspend(step, cancel)
    step.ended("FAILED", step.await_code())
    assert step.codes()[0] > 128
    assert [row["state"] for row in step.steps()] == ["CANCELLED"]


@pytest.mark.parametrize("of", [pytest.param("step", marks=nightly), "job"])
def test_a_time_limit_ends_a_step_on_every_node(make: Make, of: str) -> None:
    if of == "step":
        step = make(line="srun -t 0:05 {task}")
        step.ended("FAILED", 143)
        assert [row["state"] for row in step.steps()] == ["TIMEOUT"]
    else:
        step = make()
        step.await_lines()
        # Slurm's words are rounded up to a minute.
        step.head.call("POST", "/v1/jobs/update", {"ids": [step.id], "changes": {"time_limit_s": 6}})
        (job,) = step.head.wait(step.id, timeout_s=150.0)
        assert job["state"] == "TIMEOUT"
        step.check_gone()


# --- what is out of reach for longer than srun looks for it --------------------------------------------------


@nightly
def test_a_step_that_lost_a_node_leaves_nothing_there(make: Make) -> None:
    """srun gives its node up and the step has failed. What runs there ends before another step can start there."""
    after = "until [ -e second ]; do sleep 0.1; done; srun -N 1 -n 1 -w n2 pgrep -f task.py > beside"
    step = make(after=after)
    step.await_lines()
    step.lab["n2"].cut()
    assert step.await_code() == 143, "the tasks on n1 were ended"
    assert "Node failure on n2" in step.said()
    assert len(step.tasks("n2")) == 2, "out of reach"
    note("cut for good", step.follower.stop())
    step.lab["n2"].heal()
    step.cluster.all_up()
    (step.folder / "second").touch()
    step.wait(lambda: step.tasks("n2") == [], 10.0, "the tasks on n2 to be gone")
    step.ended("FAILED", 143)
    assert (step.folder / "beside").read_text() == "", "no other step was beside them"
    assert [row["state"] for row in step.steps()] == ["NODE_FAIL", "FAILED"]


@nightly
@pytest.mark.parametrize("back", ["at once", "after srun gave it up"])
def test_a_node_without_power_fails_the_job(make: Make, back: str) -> None:
    step = make()
    step.await_lines()
    step.lab["n2"].power_off()
    if back == "at once":
        step.lab["n2"].power_on()
        step.ended("NODE_FAIL", None)
        return
    assert step.await_code() == 143
    assert step.head.state(step.id) in ("RUNNING", "COMPLETING")
    assert all(gpu["state"] not in ("idle", "drained") for gpu in step.cluster.gpus("n2"))
    step.lab["n2"].power_on()
    (job,) = step.head.wait(step.id, timeout_s=150.0)
    assert (job["state"], job["exit_code"]) in (("FAILED", 143), ("NODE_FAIL", None)), job
    step.check_gone()
