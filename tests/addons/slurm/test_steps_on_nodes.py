"""Steps over the nodes of a job: what the daemon answers, records and ends, and how Slurm's commands show them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster
from support import is_alive, wait_until

from gpusched.slurm_commands import write_commands

ASK = """
import json, os, subprocess, sys, time
from gpusched.client import connect
from gpusched.errors import GpuschedError
folder, rank = sys.argv[1], os.environ["GPUSCHED_NODE_RANK"]
client = connect()
with open(f"{folder}/pid-{rank}.part", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/pid-{rank}.part", f"{folder}/pid-{rank}")
done = 0
while not os.path.exists(f"{folder}/end"):
    path = f"{folder}/ask-{rank}-{done}"
    if not os.path.exists(path):
        time.sleep(0.02)
        continue
    method, route, body = json.load(open(path))
    try:
        if method == "SPAWN":
            # As srun's tasks.
            answer = {"pid": subprocess.Popen(route, env={**os.environ, "SLURM_STEP_ID": body}).pid}
        else:
            answer = client.call(method, route, body)
    except GpuschedError as error:
        answer = {"error": type(error).__name__, "message": error.message, "about": error.about, "hint": error.hint}
    with open(f"{folder}/answer.part-{rank}", "w") as file:
        json.dump(answer, file)
    os.rename(f"{folder}/answer.part-{rank}", f"{folder}/answer-{rank}-{done}")
    done += 1
"""
"""A process on each node of a job, which asks the daemon what it is told to: a step has one process."""


class StepJob:
    """A job over n1 and n2, with four cores and two GPUs on each, and what its processes ask the daemon."""

    def __init__(self, cluster: Cluster, folder: Path, **spec: Any) -> None:
        self.cluster, self.folder = cluster, folder
        self.asked = [0, 0]
        asked = {"nodes": 2, "gpus": 4, "ntasks_per_node": 2, "cpus": 2, "ranks": False, **spec}
        # Its shell goes on without the process, as a batch script does.
        (folder / "ask.py").write_text(ASK)
        (folder / "ask.sh").write_text(
            f"'{sys.executable}' {folder}/ask.py {folder}; while [ ! -e {folder}/end ]; do sleep 0.05; done"
        )
        self.id = cluster.head.submit("sh", str(folder / "ask.sh"), **asked)
        wait_until(lambda: all((folder / f"pid-{rank}").exists() for rank in (0, 1)), what="a process on each node")

    def ask(self, method: str, route: str, body: Any, rank: int = 0) -> dict[str, Any]:
        number = self.asked[rank]
        self.asked[rank] += 1
        part = self.folder / f"ask.part-{rank}"
        part.write_text(json.dumps([method, route, body]))
        part.rename(self.folder / f"ask-{rank}-{number}")
        path = self.folder / f"answer-{rank}-{number}"
        wait_until(path.exists, what="an answer")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def begin(self, rank: int = 0, **asked: Any) -> dict[str, Any]:
        """The answer to a request for a step; asked again while the job is starting."""
        found: list[dict[str, Any]] = []

        def has_started() -> bool:
            found.append(self.ask("POST", "/v1/steps", {"name": "train", "command": "train.py", **asked}, rank))
            return found[-1].get("why") != "starting"

        wait_until(has_started, what="all nodes of the job to have started")
        return found[-1]

    def end(self, number: int, rank: int = 0) -> dict[str, Any]:
        return self.ask("POST", "/v1/steps/end", {"step": number, "exit_code": 0}, rank)

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.cluster.head.call("GET", f"/v1/steps?ids={self.id}")["steps"]
        return rows

    def process(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(self.cluster.root / "bin" / words[0]), *words[1:]]
        return subprocess.run(argv, env=self.cluster.head.env, text=True, capture_output=True, timeout=60)

    def out(self, *words: str) -> str:
        done = self.type(*words)
        assert done.returncode == 0, done
        return done.stdout


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("steps"), ("n2",))
    (made.root / "bin").mkdir()
    write_commands(str(made.root / "bin"))
    yield made
    made.head.close()


@pytest.fixture
def job(started: Cluster, tmp_path: Path) -> Iterator[StepJob]:
    yield StepJob(started, tmp_path)
    (tmp_path / "end").touch()
    started.reset()


def test_a_step_has_its_tasks_and_gpus_on_every_node(job: StepJob) -> None:
    step = job.begin()["step"]
    doors = step.pop("doors")
    assert [(door["node"], door["path"], len(door["token"])) for door in doors] == [("n2", None, 16)]
    gpus = [{"index": 0, "visible": "0"}, {"index": 1, "visible": "1"}]
    assert step == {
        "step": 0,
        "node": "n1",
        "has_own_gpus": False,
        "tasks": 4,
        "nodes": [
            {"node": "n1", "nodeid": 0, "rank": 0, "tasks": [0, 1], "cpus": 4.0, "gpus": gpus, "address": "n1"},
            {"node": "n2", "nodeid": 1, "rank": 1, "tasks": [2, 3], "cpus": 4.0, "gpus": gpus, "address": "n2"},
        ],
    }
    (row,) = job.rows()
    parts = [
        {"node": node, "tasks": 2, "task_ids": ids, "cpus": 4.0, "gpus": [0, 1]}
        for node, ids in (("n1", [0, 1]), ("n2", [2, 3]))
    ]
    assert (row["nodes"], row["nodelist"], row["parts"]) == (["n1", "n2"], "n[1-2]", parts)
    assert (row["tasks"], row["cpus"], row["gpus"], row["node"]) == (4, 8.0, [0, 1, 0, 1], "n1")
    # The answer was lost with a daemon.
    job.cluster.head.kill()
    job.cluster.head.start()
    again = job.begin()["step"]
    assert again.pop("doors") != doors, "the old ones may be gone"
    for node in (*again["nodes"], *step["nodes"]):
        # By UUID until the node has told the numbers of its GPUs.
        del node["gpus"]
    assert again == step


def test_a_step_on_another_node_than_its_srun(job: StepJob) -> None:
    step = job.begin(nodelist=["n2"], tasks=1, gpus_per_task=1)["step"]
    (place,) = step["nodes"]
    assert (step["node"], place["node"], place["nodeid"], place["rank"], place["tasks"]) == ("n1", "n2", 0, 1, [0])
    assert (step["has_own_gpus"], place["gpus"]) == (True, [{"index": 0, "visible": "0"}])
    other = job.begin(1, nodelist=["localhost"], gpus_per_node=2)
    assert (other["step"], other["why"]) == (None, "busy")
    assert job.end(0)["step"]["state"] == "COMPLETED"
    assert job.begin(1, nodelist=["localhost"], gpus_per_node=2)["step"]["node"] == "n2"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tasks": 9}, "cpus", "the step requests 9 CPUs, but job {} has 8 on its 2 nodes"),
    ({"gpus_per_node": 3}, "gpus", "the step requests 3 GPUs on each node, but job {} has 2 on n1"),
    ({"gpus": 5}, "gpus", "the step requests 5 GPUs, but job {} has 4 on its 2 nodes"),
    ({"nodelist": ["n9"]}, "nodes", "node n9 does not belong to job {}"),
    ({"nodes_min": 3}, "nodes", "the step requests 3 nodes, but job {} has 2 for it"),
    ({"distribution": "arbitrary"}, "", "hosts belong to an arbitrary distribution, and it needs them"),
    ({"hosts": ["n1"]}, "", "hosts belong to an arbitrary distribution, and it needs them"),
    ({"distribution": "plane"}, "", "'plane' is not a distribution"),
    ({"nodes_min": 2, "nodes_max": 1}, "", "the minimum of 2 nodes exceeds the maximum of 1"),
]


def test_a_refusal_says_what_it_is_about(job: StepJob) -> None:
    for asked, about, message in REFUSED:
        found = job.begin(**asked)
        assert (found["about"], found["message"]) == (about, message.format(job.id)), asked
    assert job.rows() == []


def test_slurms_commands_show_the_nodes_of_a_step(job: StepJob) -> None:
    assert job.begin(gpus_per_node=1, is_exact=True)["step"]["step"] == 0
    rows = job.out("squeue", "-h", "-s", "-j", job.id, "-o", "%i %A %N %b").splitlines()
    assert rows == [f"{job.id}.batch 1 n1 N/A", f"{job.id}.0 4 n[1-2] gres:gpu:1"]
    shown = [
        dict(word.split("=", 1) for word in line.split()) for line in _lines(job, "scontrol", "-o", "show", "step")
    ]
    names = ("StepId", "NodeList", "Nodes", "CPUs", "Tasks")
    assert [[one[name] for name in names] for one in shown] == [
        [f"{job.id}.batch", "n1", "1", "0", "1"],
        [f"{job.id}.0", "n[1-2]", "2", "4", "4"],
    ]
    assert shown[1]["TRES"] == "cpu=4,node=2,gres/gpu=2"
    columns = "jobid,nnodes,nodelist,ntasks,alloccpus,alloctres"
    wanted = [
        f"{job.id}|2|n[1-2]||8|billing=8,cpu=8,gres/gpu=4,node=2",
        f"{job.id}.batch|1|n1|1|4|cpu=4,gres/gpu=2,mem=0,node=1",
        f"{job.id}.0|2|n[1-2]|4|4|cpu=4,gres/gpu=2,mem=0,node=2",
    ]
    assert _lines(job, "sacct", "-n", "-P", "-j", job.id, "-o", columns) == wanted
    (document,) = json.loads(job.out("sacct", "-j", job.id, "--json"))["jobs"]
    assert [step["nodes"] for step in document["steps"]] == [
        {"list": ["n1"], "count": 1, "range": "n1"},
        {"list": ["n1", "n2"], "count": 2, "range": "n[1-2]"},
    ]


def _lines(job: StepJob, *words: str) -> list[str]:
    return job.out(*words).splitlines()


def test_sattach_shows_which_tasks_are_where_and_on_which_node_to_type_it(job: StepJob) -> None:
    job.begin(distribution="cyclic")
    assert job.out("sattach", "--layout", f"{job.id}.0") == (
        "Job step layout:\n  4 tasks, 2 nodes (n[1-2])\n\n"
        "  Node 0 (n1), 2 task(s): 0 2 \n  Node 1 (n2), 2 task(s): 1 3 \n"
    )
    job.begin(rank=1)
    done = job.type("sattach", f"{job.id}.1")
    assert (done.returncode, done.stderr) == (
        1,
        f"sattach: error: step {job.id}.1 was started on n2, and only that node knows what it writes to\n"
        f"sattach: hint: srun --jobid={job.id} -w n2 -N 1 -n 1 --overlap sattach {job.id}.1\n",
    )


def test_uneven_gpus_are_shown_in_all(job: StepJob) -> None:
    assert job.begin(gpus=3)["step"]
    assert job.out("squeue", "-h", "-s", f"{job.id}.0", "-O", "tres-per-node:12,tres-per-step:12").split() == [
        "N/A",
        "gres:gpu:3",
    ]


def test_sacct_counts_the_cpus_of_all_nodes_whatever_columns_are_printed(job: StepJob) -> None:
    for columns in ("alloccpus", "ncpus", "reqcpus", "alloccpus,nnodes"):
        assert job.out("sacct", "-X", "-n", "-P", "-j", job.id, "-o", columns).partition("|")[0].strip() == "8"


def test_a_step_of_a_job_with_a_range_of_nodes_has_a_task_on_each_that_it_got(started: Cluster, tmp_path: Path) -> None:
    job = StepJob(started, tmp_path, nodes=1, nodes_max=2, gpus=3, ntasks_per_node=None, cpus=1)
    step = job.begin()["step"]
    assert [(place["node"], place["tasks"]) for place in step["nodes"]] == [("n1", [0]), ("n2", [1])]
    assert job.ask("GET", "/v1/inside", None)["inside"]["ntasks"] == 2
    (tmp_path / "end").touch()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_whose_srun_is_killed_ends_on_whatever_node_it_was(job: StepJob, rank: int) -> None:
    assert job.begin(rank)["step"]["node"] == f"n{rank + 1}"
    assert [row["state"] for row in job.rows()] == ["RUNNING"]
    os.kill(job.process(rank), signal.SIGKILL)
    wait_until(lambda: [row["state"] for row in job.rows()] == ["CANCELLED"], what="the step to end")
    assert job.cluster.head.state(job.id) == "RUNNING"


def test_a_step_is_cancelled_and_signalled_on_all_of_its_nodes(job: StepJob, tmp_path: Path) -> None:
    assert job.begin()["step"]["step"] == 0
    told = f"trap 'touch {tmp_path}/told-$SLURM_STEP_ID-$0' USR1; touch {tmp_path}/up-$SLURM_STEP_ID-$0; "
    task = f"{told}while :; do sleep 0.05; done"
    pids = {
        (rank, step): job.ask("SPAWN", ["sh", "-c", task, str(rank)], step, rank)["pid"]
        for rank in (0, 1)
        for step in ("0", "1")
    }
    for rank, step in pids:
        wait_until((tmp_path / f"up-{step}-{rank}").exists, what="the tasks")
    assert job.out("scancel", "-s", "USR1", f"{job.id}.0") == ""
    for rank in (0, 1):
        wait_until((tmp_path / f"told-0-{rank}").exists, what=f"the signal on node {rank}")
        assert not (tmp_path / f"told-1-{rank}").exists()
    assert job.out("scancel", f"{job.id}.0") == ""
    (row,) = job.rows()
    assert row["cancel_uid"] == os.getuid()
    for rank in (0, 1):
        wait_until(lambda rank=rank: not is_alive(pids[rank, "0"]), what=f"the end of the step on node {rank}")
        assert is_alive(pids[rank, "1"])


def test_a_step_ends_with_a_node_of_its_job(started: Cluster, tmp_path: Path) -> None:
    job = StepJob(started, tmp_path, lost_after_s=5)
    assert job.begin()["step"]
    started.cut("n2")
    try:
        wait_until(lambda: [row["state"] for row in job.rows()] == ["NODE_FAIL"], what="the step to end")
    finally:
        (tmp_path / "end").touch()
        started.heal("n2")
        started.reset()


HOLDS = (
    "import os, time; held = bytearray({mib} << 20); "
    "open('{folder}/holds-' + os.environ['SLURM_PROCID'], 'w').close(); time.sleep(600)"
)


def test_sstat_measures_tasks_on_all_nodes_and_says_nothing_while_one_is_silent(
    started: Cluster, job: StepJob, tmp_path: Path
) -> None:
    """The tasks are started as srun's are, with the step and their number in their environment."""
    assert job.begin(tasks=2)["step"]["step"] == 0
    pids = []
    for rank, mib in ((0, 20), (1, 80)):
        code = HOLDS.format(mib=mib, folder=tmp_path)
        words = ["env", f"SLURM_PROCID={rank}", sys.executable, "-c", code]
        pids.append(job.ask("SPAWN", words, "0", rank)["pid"])
        wait_until((tmp_path / f"holds-{rank}").exists, what="the task")
    columns = "jobid,ntasks,nodelist,maxrssnode,maxrsstask,maxrss,averss"
    *shown, largest, mean = job.out("sstat", "-n", "-P", "-j", f"{job.id}.0", "-o", columns).strip().split("|")
    assert shown == [f"{job.id}.0", "2", "n[1-2]", "n2", "1"]
    assert mib_of(largest) > 80
    assert mib_of(largest) - 40 < mib_of(mean) < mib_of(largest) - 20
    shown = job.out("sstat", "-i", "-n", "-P", "-j", f"{job.id}.0").strip().split("|")
    assert shown[2] == ",".join(map(str, pids))
    started.cut("n2")
    try:
        silent = job.out("sstat", "-n", "-P", "-j", f"{job.id}.0", "-o", columns)
        assert silent == f"{job.id}.0|2|n[1-2]||||\n"
    finally:
        started.heal("n2")


def mib_of(text: str) -> float:
    return float(text[:-1]) / {"K": 1024, "M": 1, "G": 1 / 1024}[text[-1]]
