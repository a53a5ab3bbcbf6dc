"""A step of four tasks over two machines, watched from outside while something is killed or cut."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab_cluster import Cluster
from network_lab import environment
from support import wait_until

from gpusched.slurm_commands import write_commands

TASK = """
import os, sys, time
rank, mark = os.environ["SLURM_PROCID"], sys.argv[1]
number = 0
while not os.path.exists("go"):
    print(rank, number, flush=True)
    number += 1
    time.sleep(0.1)
print(rank, "end", number, flush=True)
sys.exit(10 + int(rank))
"""
SCRIPT = """#!/bin/bash
{line}
code=$?
echo code $code >> codes-$SLURM_JOB_ID
{after}
exit $code
"""
WORDS = ("-N", "2", "--ntasks-per-node=2", "--gpus-per-node=2", "-c", "1", "-t", "30")


class Follower(threading.Thread):
    """Notes for each task how long nothing of it came, at most."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self._ended = threading.Event()
        self._seen_at: dict[str, float] = {}
        self.longest_s: dict[str, float] = {}

    def run(self) -> None:
        at = 0
        while not self._ended.wait(0.05):
            try:
                with open(self._path, "rb") as file:
                    file.seek(at)
                    data = file.read()
            except OSError:
                continue
            whole = data.rpartition(b"\n")[0]
            at += len(whole) + 1 if whole else 0
            now = time.monotonic()
            for line in whole.decode("utf-8", "replace").splitlines():
                words = line.split()
                if len(words) >= 2 and words[0].isdigit():
                    before = self._seen_at.get(words[0], now)
                    self.longest_s[words[0]] = max(self.longest_s.get(words[0], 0.0), now - before)
                    self._seen_at[words[0]] = now

    def stop(self) -> dict[str, float]:
        self._ended.set()
        self.join()
        return {task: round(self.longest_s[task], 1) for task in sorted(self.longest_s)}


class StepLab:
    """One job with one step, in a folder that all machines see.

    Args: words: of sbatch. line: the step, with `{task}` for the command of a task. after: what the script does next.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *,
        nodes: Sequence[str] = ("n1", "n2"),
        words: Sequence[str] = WORDS,
        line: str = "srun {task}",
        after: str = "",
        requeue: bool = False,
    ) -> None:
        self.cluster, self.lab, self.head = cluster, cluster.lab, cluster.head
        self.folder = folder
        self.nodes = tuple(nodes)
        self.mark = f"marked-{time.monotonic_ns()}"
        """Word in the command line of every task."""
        (folder / "task.py").write_text(TASK)
        self._bin = folder / "bin"
        self._bin.mkdir()
        write_commands(str(self._bin))
        task = f"{sys.executable} -IS task.py {self.mark}"
        (folder / "script.sh").write_text(SCRIPT.format(line=line.format(task=task), after=after.format(task=task)))
        again = () if requeue else ("--no-requeue",)
        self.id = self.type(
            "sbatch", "--parsable", "-w", ",".join(nodes), "-o", "%j.out", *again, *words, "script.sh"
        ).strip()
        self.output = folder / f"{self.id}.out"
        self.follower = Follower(self.output)
        self.follower.start()

    def type(self, *words: str) -> str:
        """Type a command of Slurm's on the head."""
        env = {**environment(), "GPUSCHED_HOME": str(self.head.home), "SLURM_CONF": "/dev/null"}
        line = f"cd {self.folder} && exec {self._bin}/{' '.join(words)}"
        return self.lab["n1"].run("sh", "-c", line, env=env).stdout

    # --- what is seen -------------------------------------------------------------------------------------

    def tasks(self, node: str) -> list[int]:
        """Tasks on a machine, by their ids there."""
        machine = self.lab[node]
        # The command line of srun contains theirs.
        starters = machine.pids("/srun ", self.mark)
        found = [pid for pid in machine.pids("task.py", self.mark) if pid not in starters]
        return [pid for pid in found if machine.is_alive(pid)]

    def lines(self) -> dict[str, list[str]]:
        """What each task has written, in order."""
        found: dict[str, list[str]] = {}
        text = self.output.read_text() if self.output.exists() else ""
        for line in text.splitlines():
            words = line.split()
            if len(words) >= 2 and words[0].isdigit():
                found.setdefault(words[0], []).append(" ".join(words[1:]))
        return found

    def said(self) -> str:
        """What is neither of these."""
        return "\n".join(line for line in self.output.read_text().splitlines() if not line[:1].isdigit())

    def codes(self) -> list[int]:
        """Of the steps that the script has seen end."""
        path = self.folder / f"codes-{self.id}"
        return [int(line.split()[1]) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        return list(self.head.call("GET", f"/v1/steps?ids={self.id}")["steps"])

    def await_lines(self, count: int = 4, *, least: int = 3) -> None:
        """Every task writes."""

        def writes() -> bool:
            lines = self.lines()
            return len(lines) == count and all(len(one) >= least for one in lines.values())

        self.wait(writes, 90.0, "tasks to write")

    def await_news(self, timeout_s: float = 150.0) -> None:
        """Every task is heard of again."""
        before = {task: len(lines) for task, lines in self.lines().items()}

        def has_news() -> bool:
            lines = self.lines()
            return all(len(lines[task]) > count + 2 for task, count in before.items())

        self.wait(has_news, timeout_s, "news of every task")

    def await_code(self, timeout_s: float = 150.0) -> int:
        self.wait(lambda: bool(self.codes()), timeout_s, "the step to end")
        return self.codes()[0]

    def wait(self, predicate: Callable[[], object], timeout_s: float, what: str) -> None:
        """Ask until it holds. Raises: AssertionError with all that is known."""
        try:
            wait_until(predicate, timeout_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.told()}") from None

    def told(self) -> str:
        """All of it, for a failure."""
        last = {task: (len(lines), lines[-1]) for task, lines in self.lines().items()}
        job = self.head.job(self.id)
        said = self.said() if self.output.exists() else "no output"
        return f"{job['state']} {job['reason_text']}; {last}; {said}"

    def let_go(self) -> None:
        (self.folder / "go").touch()

    # --- what is checked ----------------------------------------------------------------------------------

    def check_complete(self, count: int = 4) -> None:
        """Every task has ended by itself, and every line of it is there."""
        lines = self.lines()
        assert sorted(lines) == [str(task) for task in range(count)], self.told()
        for task, found in lines.items():
            numbers = list(map(str, range(len(found) - 1)))
            assert found == [*numbers, f"end {len(numbers)}"], (task, found[-5:], self.told())

    def check_gone(self, timeout_s: float = 60.0) -> None:
        """No process of the job is left on any machine that is on."""

        def left() -> list[tuple[str, list[int]]]:
            found = []
            for name, machine in self.lab.machines.items():
                if machine.is_on:
                    words = ((self.mark,), ("script.sh",), ("step_part",))
                    pids = [pid for one in words for pid in machine.pids(*one) if machine.is_alive(pid)]
                    if pids:
                        found.append((name, pids))
            return found

        self.wait(lambda: not left(), timeout_s, "all processes to be gone")

    def ended(self, state: str, code: int | None, timeout_s: float = 150.0) -> dict[str, Any]:
        """Wait for the job's end, in its first run; no process of it may be left."""
        (job,) = self.head.wait(self.id, timeout_s=timeout_s)
        assert (job["state"], job["exit_code"], len(job["runs"])) == (state, code, 1), (job["runs"], self.told())
        self.check_gone()
        return job

    def survived(self, what: str, note: Callable[[str, Any], None]) -> None:
        """The step goes on, and ends as if nothing had happened."""
        self.await_news()
        self.let_go()
        self.ended("FAILED", 13)
        self.check_complete()
        assert self.codes() == [13]
        note(what, self.follower.stop())
