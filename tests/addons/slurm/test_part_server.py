"""The part of a step on another node: a real one, spoken to over its standard streams as srun does."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import is_alive, wait_until

from gpusched.addons.slurm.part_protocol import (
    CLOSED,
    ENDED,
    EOF,
    FAILED,
    GO,
    INPUT,
    INPUT_WINDOW,
    NOTE,
    OUTPUT,
    READY,
    SIGNAL,
    SIZE,
    TAKEN,
    USAGE,
    launch_frames,
    read_output,
)
from gpusched.engine.attach_protocol import frame, take_frames

MAIN = (
    "import sys; sys.path[:0] = sys.argv.pop().split(':'); from gpusched.addons.slurm.part_server import main; main()"
)


class Part:
    """srun's side."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", MAIN, str(Path(__file__).parents[3])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], **env},
            bufsize=0,
        )
        self.buffer = bytearray()
        self.heard: list[tuple[int, bytes]] = []
        self.written: dict[tuple[int, int], bytes] = {}
        """Output by task and stream."""
        self.ended: dict[int, int] = {}
        self.taken = 0
        self.usage: list[Any] | None = None

    def say(self, kind: int, content: bytes = b"") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(frame(kind, content))

    def launch(self, *argv: str, tasks: int = 2, **changes: Any) -> None:
        facts = {
            "argv": list(argv),
            "programs": None,
            "folder": str(self.folder),
            "umask": 0o22,
            "env": {"PATH": os.environ["PATH"], "OF": "srun", "SLURM_JOB_GPUS": "of n1", "GPUSCHED_RUN": "of n1"},
            "variables": {"SLURM_STEP_ID": "3"},
            "tasks": [2 + local for local in range(tasks)],
            "count": 2 + tasks,
            "gpus": None,
            "input": [True] * tasks,
            "output": [True] * tasks,
            "error": [True] * tasks,
            "truncates": True,
            "cpu_bind": None,
            "cpus_per_task": 1,
            "terminal": None,
            "is_unbuffered": False,
            **changes,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(launch_frames(json.dumps(facts).encode()))

    def start(self, *argv: str, **changes: Any) -> None:
        self.launch(*argv, **changes)
        self.hear_until(lambda: READY in self.kinds, what="READY")
        self.say(GO)

    @property
    def kinds(self) -> list[int]:
        return [kind for kind, _ in self.heard]

    def content(self, kind: int) -> list[str]:
        return [content.decode() for found, content in self.heard if found == kind]

    def hear(self, timeout_s: float = 20.0) -> bool:
        """Take what it says next; returns whether it was anything."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            return False
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.buffer += data
        for kind, content in take_frames(self.buffer):
            self.heard.append((kind, content))
            if kind == OUTPUT:
                task, stream, piece = read_output(content)
                self.written[task, stream] = self.written.get((task, stream), b"") + piece
            elif kind == ENDED:
                self.ended.update(dict(json.loads(content)))
            elif kind == TAKEN:
                self.taken += int(content)
            elif kind == USAGE:
                self.usage = json.loads(content)
        return bool(data)

    def hear_until(self, is_there: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        until = time.monotonic() + timeout_s
        while not is_there():
            assert time.monotonic() < until, f"waited for {what}; heard {self.heard[-5:]}"
            assert self.hear(1.0) or self.process.poll() is None, (self.heard, self.errors())

    def finish(self) -> None:
        """Hear everything up to its end."""
        while self.hear():
            pass
        assert self.process.wait(20) == 0, self.errors()

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait(20)
        if self.process.stderr is not None:
            self.process.stderr.close()


@pytest.fixture
def part(tmp_path: Path) -> Iterator[Part]:
    made = Part(tmp_path, SLURM_JOB_GPUS="of n2", GPUSCHED_RUN="of n2", GPUSCHED_ELSE="x", CUDA_VISIBLE_DEVICES="4,5")
    yield made
    made.close()


def test_nothing_starts_before_go_and_everything_is_told(part: Part) -> None:
    part.launch(
        "sh", "-c", "touch up-$SLURM_PROCID; echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NTASKS; exit $SLURM_LOCALID"
    )
    part.hear_until(lambda: READY in part.kinds, what="READY")
    assert list(part.folder.iterdir()) == []
    part.say(GO)
    part.finish()
    assert part.written == {(2, 1): b"2 0 4\n", (3, 1): b"3 1 4\n"}
    assert part.ended == {2: 0, 3: 1}
    assert part.usage is not None
    assert len(part.usage[2]) == 2
    assert part.heard[-1][0] == USAGE


def test_a_task_has_what_describes_the_node_from_there_and_all_else_from_srun(part: Part) -> None:
    names = ("OF", "SLURM_JOB_GPUS", "GPUSCHED_RUN", "GPUSCHED_ELSE", "CUDA_VISIBLE_DEVICES", "SLURM_STEP_ID")
    part.start("sh", "-c", "echo " + "/".join(f"${name}" for name in names), tasks=1)
    part.finish()
    assert part.written[2, 1] == b"srun/of n2/of n2//4,5/3\n"


def test_gpus_cores_folder_umask_and_programs_are_those_of_each_task(part: Part) -> None:
    text = "echo $CUDA_VISIBLE_DEVICES; basename $PWD; umask; nproc"
    programs = [["sh", "-c", text], ["sh", "-c", f"echo other; {text}"]]
    part.start(programs=programs, gpus=[["7"], ["8", "9"]], umask=0o077, cpu_bind="map_cpu:0")
    part.finish()
    rest = f"{part.folder.name}\n0077\n1\n".encode()
    assert part.written == {(2, 1): b"7\n" + rest, (3, 1): b"other\n8,9\n" + rest}


def test_a_program_that_does_not_exist_is_said_and_has_the_number_of_the_error(part: Part) -> None:
    part.start("nosuch")
    part.finish()
    assert part.ended == {2: 2, 3: 2}
    assert part.content(NOTE) == ["slurmstepd: error: execve(): nosuch: No such file or directory"] * 2


def test_a_missing_folder_is_said_and_another_one_used(part: Part) -> None:
    part.start("pwd", tasks=1, folder=str(part.folder / "missing"))
    part.finish()
    assert part.written[2, 1] == b"/tmp\n"
    assert f"couldn't chdir to `{part.folder}/missing'" in part.content(NOTE)[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output": ["no/such", "x"]}, "Could not open stdout file no/such: No such file or directory"),
        ({"input": ["nofile", "x"]}, "Could not open stdin file nofile: No such file or directory"),
        ({"cpu_bind": "odd"}, "odd"),
    ],
)
def test_what_cannot_be_prepared_starts_nothing(part: Part, changes: dict[str, Any], said: str) -> None:
    part.launch("touch", "started", **changes)
    part.finish()
    assert part.content(FAILED) == [said]
    assert not (part.folder / "started").exists()


def test_files_are_opened_here_and_truncated_or_not(part: Part, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("given\n")
    (tmp_path / "out").write_text("old\n")
    part.start("cat", input=["in", None], output=["out", None], truncates=False)
    part.finish()
    assert (tmp_path / "out").read_text() == "old\ngiven\n"
    assert part.written == {}


def test_input_is_taken_by_each_task_at_its_own_pace(part: Part) -> None:
    part.start("sh", "-c", "[ $SLURM_LOCALID = 1 ] && until [ -e go ]; do sleep 0.02; done; cat")
    data = b"0123456789abcde\n" * (INPUT_WINDOW // 16)
    for at in range(0, len(data), 1 << 16):
        part.say(INPUT, data[at : at + (1 << 16)])
    part.say(EOF)
    part.hear_until(lambda: part.written.get((2, 1), b"") == data, what="the first task's output")
    assert part.taken < len(data), "the second has taken no more than a pipe holds"
    (part.folder / "go").touch()
    part.finish()
    assert part.written[3, 1] == data
    assert part.taken == len(data)
    assert CLOSED in part.kinds


def test_a_signal_overtakes_input_that_nobody_reads(part: Part) -> None:
    part.start("sleep", "600")
    part.say(INPUT, b"x" * (1 << 16))
    part.say(INPUT, b"x" * (1 << 16))
    part.say(SIGNAL, b"15")
    part.finish()
    assert part.ended == {2: -15, 3: -15}


def test_output_that_srun_does_not_read_stops_the_task_and_not_the_part(part: Part) -> None:
    part.start("yes", tasks=1)
    time.sleep(0.3)
    resident = int(Path(f"/proc/{part.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 64 << 20
    part.say(SIGNAL, b"9")
    part.finish()
    assert part.ended == {2: -9}


def test_lines_come_whole_and_a_prompt_comes_without_its_end(part: Part) -> None:
    part.start(
        "sh", "-c", "printf 'one\\ntw'; sleep 0.05; printf 'o\\n'; printf '? '; read answer; echo $answer", tasks=1
    )
    part.hear_until(lambda: part.written.get((2, 1), b"").endswith(b"? "), what="the prompt")
    pieces = [read_output(content)[2] for kind, content in part.heard if kind == OUTPUT]
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    part.say(INPUT, b"yes\n")
    part.finish()
    assert part.written[2, 1] == b"one\ntwo\n? yes\n"


def test_a_terminal_is_that_of_the_first_task(part: Part) -> None:
    part.start("sh", "-c", "tty -s && stty size; read line; stty size; [ $SLURM_LOCALID = 0 ]", terminal=[30, 90])
    part.hear_until(lambda: b"30 90" in part.written.get((2, 1), b""), what="the size of the terminal")
    part.say(SIZE, b"31 91")
    part.say(INPUT, b"line\n")
    part.finish()
    assert b"31 91" in part.written[2, 1]
    assert part.ended == {2: 0, 3: 1}


def test_what_tasks_leave_in_their_groups_ends_with_them(part: Part) -> None:
    part.start("sh", "-c", "sleep 600 & echo $!", tasks=1)
    part.finish()
    wait_until(lambda: not is_alive(int(part.written[2, 1])), what="the sleep to be gone")


def test_output_that_a_daemon_holds_open_is_not_waited_for(part: Part) -> None:
    part.start("sh", "-c", "setsid sleep 600 & echo $!", tasks=1)
    part.finish()
    os.kill(int(part.written[2, 1]), signal.SIGKILL)
    assert part.ended == {2: 0}


@pytest.mark.parametrize("has_started", [False, True])
def test_without_its_connection_the_tasks_are_ended(part: Part, has_started: bool) -> None:
    text = "trap '' TERM; echo $$ > pid-$SLURM_PROCID; while :; do sleep 0.05; done"
    part.launch("sh", "-c", text)
    part.hear_until(lambda: READY in part.kinds, what="READY")
    pids = []
    if has_started:
        part.say(GO)
        paths = [part.folder / f"pid-{task}" for task in (2, 3)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in paths), what="the tasks")
        pids = [int(path.read_text()) for path in paths]
    assert part.process.stdin is not None
    part.process.stdin.close()
    part.process.wait(20)
    assert not any(map(is_alive, pids))


def test_signals_to_the_part_itself_are_not_for_it(part: Part) -> None:
    part.start("sh", "-c", "echo up; read line", tasks=1)
    part.hear_until(lambda: (2, 1) in part.written, what="the task")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        part.process.send_signal(number)
    part.say(INPUT, b"\n")
    part.finish()
    assert part.ended == {2: 0}


def test_a_large_environment_comes_in_pieces(part: Part) -> None:
    env = {"PATH": os.environ["PATH"], **{f"V{number}": "x" * 100_000 for number in range(12)}}
    part.start("sh", "-c", "echo ${#V11} ${#V0}", tasks=1, env=env)
    part.finish()
    assert part.written[2, 1] == b"100000 100000\n"
