"""Processes started in a run from outside of it, on the engine alone: what they are, what ends them and what not."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from engine_bench import FOREVER, Does, LocalBench, StandInBench, open_run
from stand_in_runtimes import DIGEST, StandIns
from support import is_alive, wait_until

from gpusched.addons.slurm.part_protocol import GO, OUTPUT, launch_frames
from gpusched.engine.attach_protocol import (
    COUNT,
    EOF,
    EXIT,
    HELLO,
    HOLD,
    IN,
    NOTE,
    OUT,
    PING,
    REFUSED,
    RESUME,
    RESUMED,
    RUN,
    SIGNAL,
    WELCOME,
    Wanted,
    ack,
    frame,
    pack_wanted,
    take_frames,
)
from gpusched.engine.container import container_name
from gpusched.engine.linux import proctree
from gpusched.engine.supervisor import visits
from gpusched.model.execution import (
    ContainerLaunch,
    EnterOrder,
    RankLaunch,
    ResumeOrder,
    RunEnded,
    RunLost,
    RunStarted,
    RunSuspended,
    SignalOrder,
    StopOrder,
    SuspendOrder,
)
from gpusched.model.job import Interactive

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start runs of another user")
ENDLESS = "trap '' HUP TERM INT; echo up $$; while :; do sleep 0.05; done"
"""A shell program that only KILL ends."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalBench]:
    made = LocalBench(tmp_path)
    yield made
    made.close()
    while Visitor.made:
        Visitor.made.pop().close()


class Visitor:
    """A client that starts something in a run."""

    made: ClassVar[list[socket.socket]] = []

    def __init__(self, bench: LocalBench, run: str, token: str = "a1") -> None:
        self.path = bench.spool / f"{run}.door-{token}"
        self.bench = bench
        self.socket = socket.socket(socket.AF_UNIX)
        self.made.append(self.socket)
        self.buffer = bytearray()
        self.heard: list[tuple[int, bytes]] = []
        bench.engine.order(run, EnterOrder(token))
        bench.wait(lambda: self.socket.connect_ex(str(self.path)) == 0, what="the door")
        self.socket.settimeout(20)

    def say(self, kind: int, content: bytes = b"") -> None:
        self.socket.sendall(frame(kind, content))

    def start(self, *argv: str, pty: bool = False, work_dir: str = "", **env: str) -> None:
        self.say(RUN, pack_wanted(Wanted(list(argv), env, is_terminal=pty, umask=0o22, work_dir=work_dir)))
        self.say(HELLO, b"1 24 80")

    def shell(self, text: str, **more: Any) -> None:
        self.start("sh", "-c", text, **more)

    def receive(self, kind: int, content: bytes = b"") -> bytes:
        """Wait for a frame of this kind that holds this; returns it whole."""
        while True:
            for at, (found, words) in enumerate(self.heard):
                if found == kind and content in words:
                    del self.heard[: at + 1]
                    return words
            data = self.socket.recv(65536)
            assert data, f"closed; heard {self.heard}"
            self.buffer += data
            self.heard += take_frames(self.buffer)

    def output(self) -> tuple[bytes, bytes]:
        """All that it writes until it ends, and how it ended."""
        found = b""
        while True:
            for at, (kind, words) in enumerate(self.heard):
                if kind == OUT:
                    found += words
                    self.socket.sendall(ack(OUT, len(words)))
                if kind == EXIT:
                    del self.heard[: at + 1]
                    return found, words
            self.heard = []
            data = self.socket.recv(65536)
            assert data, f"closed after {found[-1000:]!r}"
            self.buffer += data
            self.heard += take_frames(self.buffer)

    def pid(self) -> int:
        """Of a program that says `up PID`."""
        return int(self.receive(OUT, b"up ").split()[-1])

    def leave(self) -> None:
        self.socket.close()


class Again(Visitor):
    """Another connection to the same door."""

    def __init__(self, visitor: Visitor) -> None:
        self.path, self.bench = visitor.path, visitor.bench
        self.socket = socket.socket(socket.AF_UNIX)
        self.made.append(self.socket)
        self.buffer = bytearray()
        self.heard = []
        self.socket.connect(str(self.path))
        self.socket.settimeout(20)

    def is_dropped(self) -> bool:
        """Whether it is let go, perhaps with a refusal."""
        try:
            while data := self.socket.recv(65536):
                self.buffer += data
        except ConnectionResetError:
            pass
        return all(kind == REFUSED for kind, _ in take_frames(self.buffer))


def running(bench: LocalBench, run: str = "1.1", does: Does | None = None, **parts: Any) -> RunStarted:
    bench.start(run, does or Does(lasts_s=FOREVER), **parts)
    return bench.ready(run)


def hosts(supervisor: int) -> list[int]:
    """Children of a supervisor with a session of their own that run its program."""
    found = proctree.walk(supervisor)
    return [one.pid for one in found if one.ppid == supervisor and one.name == "gpusched-run" and one.is_alive]


def test_a_visit_has_the_streams_of_its_client_and_returns_its_exit_code(bench: LocalBench) -> None:
    running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.shell("cat; echo bad >&2; exit 5")
    assert visitor.receive(WELCOME).split()[:2] == [b"1.1", b"pipes"]
    visitor.say(IN, b"hello\n")
    visitor.say(EOF)
    assert visitor.receive(OUT) == b"hello\n"
    assert visitor.receive(EXIT) == b"5 - - .\n"


def test_a_visit_has_folder_and_environment_of_the_job(bench: LocalBench) -> None:
    env = {"PATH": "/usr/bin:/bin", "MINE": "job", "CUDA_VISIBLE_DEVICES": "3", "SLURM_JOB_ID": "1", "ODD": "\udcff\n="}
    running(bench, env=env)
    visitor = Visitor(bench, "1.1")
    visitor.shell(
        "pwd; umask; env -0 | sort -z | grep -zE '^(MINE|CUDA_|SLURM_JOB_ID|ODD|NEW|GPUSCHED_RUN)'",
        MINE="client", CUDA_VISIBLE_DEVICES="0", SLURM_JOB_ID="99", NEW="yes", CUDA_MPS_PIPE_DIRECTORY="/x",
    )  # fmt: skip
    out, end = visitor.output()
    assert end == b"0 - - .\n"
    folder, mask, rest = out.split(b"\n", 2)
    assert (folder, mask) == (os.fsencode(bench.folder), b"0022")
    assert sorted(rest.split(b"\0")[:-1]) == [
        b"CUDA_VISIBLE_DEVICES=3",
        b"GPUSCHED_RUN=1.1",
        b"MINE=client",
        b"NEW=yes",
        b"ODD=\xff\n=",
        b"SLURM_JOB_ID=1",
    ]


def step_part(door: Path, uid: int) -> dict[str, str]:
    """What a task is that the part of a step starts, behind this door."""
    text = "id -u; grep CapEff /proc/self/status; ls /proc/self/fd | wc -l; echo $MARK$SLURM_STEP_ID; pwd"
    launch = {
        **dict.fromkeys(("programs", "gpus", "cpu_bind", "terminal")),
        "argv": ["sh", "-c", text],
        "env": {"PATH": os.environ["PATH"], "MARK": "m"},
        "variables": {"SLURM_STEP_ID": "3"},
        "folder": "/",
        "umask": 0o22,
        "tasks": [0],
        "count": 1,
        "cpus_per_task": 1,
        "input": [None],
        "output": [True],
        "error": [True],
        "truncates": True,
        "is_unbuffered": False,
    }
    module = "gpusched.cli.slurm.step_part"
    wanted = Wanted([module], {}, is_terminal=False, umask=0o22, work_dir="/", is_module=True)
    words = launch_frames(json.dumps(launch).encode()) + frame(GO)

    def visit() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(door))
            sock.settimeout(20)
            sock.sendall(frame(RUN, pack_wanted(wanted)) + frame(HELLO, b"1 0 0") + frame(IN, words))
            found = b""
            while EXIT not in [kind for kind, _ in take_frames(bytearray(found))] and (data := sock.recv(65536)):
                found += data
            return b"".join(content for kind, content in take_frames(bytearray(found)) if kind == OUT)

    inner = take_frames(bytearray(as_nobody(uid, visit)))
    outputs = [content[5:].decode() for kind, content in inner if kind == OUTPUT]
    return dict(zip(("uid", "caps", "descriptors", "marks", "folder"), "".join(outputs).splitlines(), strict=True))


def test_a_visit_may_be_a_module_of_ours_in_a_clean_process(bench: LocalBench) -> None:
    running(bench)
    bench.engine.order("1.1", EnterOrder("a1"))
    door = bench.spool / "1.1.door-a1"
    bench.wait(door.exists, what="the door")
    found = step_part(door, os.geteuid())
    assert (found["uid"], found["marks"], found["folder"]) == (str(os.geteuid()), "m3", "/")
    assert found["descriptors"] == "4", "standard streams, and that of the listing"


@AS_ROOT
def test_a_module_in_a_run_of_another_user_is_that_user(bench: LocalBench) -> None:
    nobody = pwd.getpwnam("nobody")
    for folder in (bench.folder, *bench.folder.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o711)
    (bench.folder / "1.1.out").touch()
    os.chown(bench.folder / "1.1.out", nobody.pw_uid, -1)
    bench.start("1.1", Does(lasts_s=FOREVER), uid=nobody.pw_uid, user="nobody")
    bench.ready("1.1")
    bench.engine.order("1.1", EnterOrder("a1"))
    door = bench.spool / "1.1.door-a1"
    bench.wait(door.exists, what="the door")
    bench.wait(lambda: door.stat().st_uid == nobody.pw_uid, what="its owner")
    found = step_part(door, nobody.pw_uid)
    assert (found["uid"], found["marks"]) == (str(nobody.pw_uid), "m3")
    assert found["caps"].split() == ["CapEff:", "0000000000000000"]


@pytest.mark.parametrize("module", ["os", "gpusched.daemon.main", "gpusched.addons.slurm.part_server", "gpusched."])
def test_a_visit_may_be_no_other_module(module: str, bench: LocalBench) -> None:
    """It is imported with the rights of the supervisor."""
    running(bench)
    visitor = Visitor(bench, "1.1")
    wanted = Wanted([module], {}, is_terminal=False, umask=0o22, work_dir="/", is_module=True)
    visitor.say(RUN, pack_wanted(wanted))
    visitor.say(HELLO, b"1 0 0")
    assert f"module {module} cannot be run in a job".encode() in visitor.receive(EXIT)


def test_a_visit_at_a_terminal_leads_a_session_of_the_asked_size(bench: LocalBench) -> None:
    running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.start("sh", "-c", "stty size; test -t 0 && ps -o pid=,sid= -p $$", pty=True)
    assert visitor.receive(WELCOME).split()[:2] == [b"1.1", b"pty"]
    out, end = visitor.output()
    size, ids = out.decode().splitlines()
    assert (size, end) == ("24 80", b"0 - - .\n")
    pid, session = ids.split()
    assert pid == session


def test_output_is_not_held_up_by_the_run_nor_lost(bench: LocalBench) -> None:
    running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.shell("head -c 3000000 /dev/zero")
    out, end = visitor.output()
    assert (len(out), end) == (3_000_000, b"0 - - .\n")


def test_the_log_of_the_run_gets_nothing_of_a_visit(bench: LocalBench) -> None:
    running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.shell("echo inside; echo inside >&2")
    visitor.output()
    assert bench.output("1.1") == "ready\n"


def test_what_cannot_be_started_is_a_sentence(bench: LocalBench) -> None:
    running(bench)
    for token, argv, folder, sentence in (
        ("a1", "no-such-command", "", "cannot run no-such-command: it is not in the job's PATH"),
        ("a2", "true", "/no/where", "cannot enter the working directory /no/where: No such file or directory"),
    ):
        visitor = Visitor(bench, "1.1", token)
        visitor.start(argv, work_dir=folder)
        assert visitor.receive(EXIT).decode() == f"- - - .\n{sentence}"


def test_a_visit_neither_keeps_the_run_alive_nor_counts_as_left_behind(bench: LocalBench) -> None:
    running(
        bench, does=Does(exit_code=4), argv=("sh", "-c", "echo ready; while [ ! -e end ]; do sleep 0.02; done; exit 4")
    )
    visitor = Visitor(bench, "1.1")
    visitor.shell(ENDLESS)
    pid = visitor.pid()
    (bench.folder / "end").touch()
    end = bench.end_of("1.1")
    assert (end.exit_code, end.signal, end.stopped_by, end.leftovers) == (4, None, None, ())
    assert not is_alive(pid)
    assert visitor.receive(NOTE) == b"job 1 is being ended"
    assert visitor.receive(EXIT) == b"- 9 job_ended .\n"


def test_a_shell_at_a_terminal_is_hung_up_when_the_run_ends(bench: LocalBench) -> None:
    running(bench, argv=("sh", "-c", "echo ready; while [ ! -e end ]; do sleep 0.02; done"))
    visitor = Visitor(bench, "1.1")
    visitor.start("bash", "--norc", "-i", pty=True, PS1="%%")
    visitor.receive(OUT, b"%%")
    (bench.folder / "end").touch()
    assert bench.end_of("1.1").leftovers == ()
    assert visitor.receive(EXIT).split()[2] == b"job_ended"


def test_a_client_that_takes_nothing_does_not_delay_the_end_of_the_run(bench: LocalBench) -> None:
    running(bench, argv=("sh", "-c", "echo ready; while [ ! -e end ]; do sleep 0.02; done"), leftover_grace_s=60.0)
    visitor = Visitor(bench, "1.1")
    visitor.shell("head -c 9000000 /dev/zero; sleep 600")
    visitor.receive(OUT)
    (bench.folder / "end").touch()
    end = bench.until("1.1", RunEnded)
    assert (end.exit_code, end.leftovers) == (0, ())


def test_a_visit_ends_with_a_run_that_is_stopped(bench: LocalBench) -> None:
    running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.shell(ENDLESS)
    pid = visitor.pid()
    bench.engine.order("1.1", StopOrder("cancel"))
    end = bench.end_of("1.1")
    assert (end.stopped_by, end.signal, end.leftovers) == ("cancel", signal.SIGTERM, ())
    assert not is_alive(pid)


def test_a_visit_that_ends_leaves_the_run_as_it_was(bench: LocalBench) -> None:
    running(bench)
    for code in (0, 7):
        visitor = Visitor(bench, "1.1", f"a{code}")
        visitor.shell(f"exit {code}")
        assert visitor.receive(EXIT) == b"%d - - .\n" % code
        visitor.leave()
    started = bench.until("1.1", RunStarted)
    wait_until(lambda: not hosts(started.supervisor_pid), what="the hosts to end")
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").signal == signal.SIGTERM


def test_what_a_visit_leaves_behind_ends_with_it(bench: LocalBench) -> None:
    running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.shell(f'setsid sh -c "{ENDLESS.replace("$$", "$$")}" & wait $!; :')
    orphan = visitor.pid()
    visitor.say(SIGNAL, b"9")
    assert visitor.receive(EXIT).startswith(b"- 9 ")
    wait_until(lambda: not is_alive(orphan), what="the orphan to end")


def test_a_daemonized_process_of_a_visit_ends_with_it(bench: LocalBench) -> None:
    running(bench)
    visitor = Visitor(bench, "1.1")
    program = (
        "import os,sys,time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
        "print('up', os.getpid(), flush=True)\ntime.sleep(600)\n"
    )
    visitor.start(sys.executable, "-c", program)
    orphan = visitor.pid()
    assert visitor.receive(EXIT) == b"0 - - .\n"
    assert not is_alive(orphan)


def test_a_lost_client_ends_its_visit_and_nothing_else(bench: LocalBench) -> None:
    started = running(bench)
    stays = Visitor(bench, "1.1", "a1")
    stays.shell(ENDLESS)
    goes = Visitor(bench, "1.1", "a2")
    goes.shell("trap 'echo hung > hung; exit' HUP; echo up $$; while :; do sleep 0.05; done")
    gone, other = goes.pid(), stays.pid()
    goes.leave()
    wait_until(lambda: not is_alive(gone), what="the visit to end")
    assert (bench.folder / "hung").exists()
    assert is_alive(other)
    assert is_alive(started.pid)


def test_a_killed_host_takes_nothing_of_the_run_with_it(bench: LocalBench) -> None:
    started = running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.start("bash", "--norc", "-i", pty=True, PS1="%%")
    visitor.receive(OUT, b"%%")
    (host,) = hosts(started.supervisor_pid)
    os.kill(host, signal.SIGKILL)
    wait_until(lambda: not proctree.descendants(started.supervisor_pid).keys() - {started.pid}, what="the shell to end")
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").stopped_by == "cancel"


def test_a_killed_supervisor_is_not_taken_for_a_living_one(bench: LocalBench) -> None:
    """A host must hold neither the lock of the record nor the run's processes."""
    started = running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.shell(ENDLESS)
    pid = visitor.pid()
    os.kill(started.supervisor_pid, signal.SIGKILL)
    bench.until("1.1", RunLost)
    wait_until(lambda: not is_alive(pid) and not is_alive(started.pid), what="all of the run to end")


def test_a_new_daemon_finds_run_and_visit_as_they_were(bench: LocalBench) -> None:
    started = running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.shell("echo up $$; cat")
    pid = visitor.pid()
    bench.restart()
    bench.engine.adopt([open_run("1.1", started)])
    visitor.say(IN, b"still here")
    assert visitor.receive(OUT) == b"still here"
    assert is_alive(pid)
    again = Visitor(bench, "1.1", "a2")
    again.shell("exit 3")
    assert again.receive(EXIT) == b"3 - - .\n"


def test_a_door_is_there_for_one_client_and_only_for_its_user(bench: LocalBench) -> None:
    running(bench)
    visitor = Visitor(bench, "1.1")
    assert stat.S_IMODE(visitor.path.stat().st_mode) == 0o600
    visitor.shell("echo up $$; read word; exit 3")
    visitor.pid()
    other = Again(visitor)
    with contextlib.suppress(BrokenPipeError):
        # The door may be shut before all of it is said.
        other.shell("echo stranger")
    assert other.is_dropped()
    visitor.say(IN, b"go\n")
    assert visitor.receive(EXIT) == b"3 - - .\n"
    visitor.leave()
    wait_until(lambda: not visitor.path.exists(), what="the door to be closed")


def broken_visit(bench: LocalBench, text: str) -> tuple[Visitor, str]:
    """A visit whose client's connection broke, and the token of that client."""
    running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.say(RUN, pack_wanted(Wanted(["sh", "-c", text], {}, is_terminal=False, umask=0o22, work_dir="")))
    visitor.say(HOLD)
    visitor.say(HELLO, b"1 24 80")
    token = visitor.receive(WELCOME).split()[2].decode()
    visitor.receive(OUT, b"up")
    visitor.say(PING)
    visitor.receive(COUNT)
    visitor.say(IN, b"half ")
    visitor.leave()
    return visitor, token


def test_a_visit_keeps_the_place_of_a_client_whose_connection_broke(bench: LocalBench) -> None:
    visitor, token = broken_visit(bench, "echo up $$; read word; echo got $word; exit 6")
    back = Again(visitor)
    back.say(RESUME, f"{token} 0".encode())
    assert int(back.receive(RESUMED)) > 0
    back.receive(OUT, b"up")
    back.say(IN, b"whole\n")
    assert back.receive(OUT) == b"got half whole\n"
    assert back.receive(EXIT) == b"6 - - .\n"


def test_a_visit_that_ends_without_its_client_waits_for_it(bench: LocalBench) -> None:
    visitor, token = broken_visit(bench, "echo up $$; read -t 0.2 word; echo rest; exit 6")
    back = Again(visitor)
    back.say(RESUME, f"{token} 0".encode())
    back.receive(RESUMED)
    out, end = back.output()
    assert (out.splitlines()[-1], end) == (b"rest", b"6 - - .\n")


def test_a_client_that_heard_nothing_yet_begins_again_or_goes_on(bench: LocalBench) -> None:
    running(bench)
    visitor = Visitor(bench, "1.1")
    begun = frame(
        RUN, pack_wanted(Wanted(["sh", "-c", "echo up $$; cat"], {}, is_terminal=False, umask=0, work_dir=""))
    )
    # The way there broke in the middle of what it wants, ...
    visitor.socket.sendall(begun[:-3])
    visitor.leave()
    again = Again(visitor)
    again.say(RESUME, b"- 0")
    assert again.receive(RESUMED) == b"0"
    again.socket.sendall(begun + frame(HOLD) + frame(HELLO, b"1 24 80"))
    # ... and once more, before it has read that it is welcome.
    again.leave()
    third = Again(visitor)
    third.say(RESUME, b"- 0")
    taken = int(third.receive(RESUMED))
    rest = begun + frame(HOLD) + frame(HELLO, b"1 24 80")
    assert taken in (0, len(rest))
    third.socket.sendall(rest[taken:])
    third.receive(WELCOME)
    pid = third.pid()
    third.leave()
    wait_until(lambda: is_alive(pid), what="the command")


@pytest.mark.parametrize("words", [b"wrong 0", b"", b"- x", b"0 0 0", b"- 99999"])
def test_no_stranger_takes_a_place(bench: LocalBench, words: bytes) -> None:
    visitor, token = broken_visit(bench, "echo up $$; read word; echo got $word; exit 6")
    stranger = Again(visitor)
    stranger.say(RESUME, words)
    assert stranger.is_dropped()
    back = Again(visitor)
    back.say(RESUME, f"{token} 0".encode())
    back.receive(RESUMED)
    back.say(IN, b"whole\n")
    assert back.receive(EXIT) == b"6 - - .\n"


def test_visits_above_the_limit_wait_for_room(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "MOST", 2)
    made = visits.Visits(SimpleNamespace(control=SimpleNamespace(start_at=1.0)))  # type: ignore[arg-type]
    opened: list[str] = []
    monkeypatch.setattr(made, "_open", lambda token: (opened.append(token), made._hosts.add(len(opened))))
    for token in ("a", "b", "c", "d", "e"):
        made.admit(token)
    assert opened == ["a", "b"]
    assert made.forget(1)
    assert opened == ["a", "b", "c"]
    assert not made.forget(99)
    assert made.forget(2)
    assert made.forget(3)
    # No more wait than are admitted at once: the client of `e` gives up.
    assert opened == ["a", "b", "c", "d"]


@pytest.mark.nightly
def test_a_door_that_nobody_uses_is_closed(bench: LocalBench) -> None:
    started = running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.leave()
    wait_until(lambda: not visitor.path.exists() and not hosts(started.supervisor_pid), what="the door to be closed")


@pytest.mark.parametrize(
    "said",
    [
        frame(HELLO, b"1 24 80"),
        frame(RUN, b"pipes tree 22 1\0\0"),
        frame(RUN, b"odd tree 22 1\0\0true\0"),
        frame(RUN, b"pipes tree 22 9\0\0true\0"),
        frame(RUN, b"pipes tree 22 1\0\0true\0=\0"),
        frame(RUN, b"pipes tree 7777 1\0\0true\0"),
        frame(RUN, b"pipes tree 22 " + b"9" * 5000 + b"\0\0true\0"),
        frame(RUN, b"\xff\xfe"),
        frame(RUN, b"pipes main.stop 22 1\0\0true\0"),
        frame(0, b"x"),
        b"R" + (1 << 30).to_bytes(4, "little"),
        bytes(range(256)) * 40,
    ],
    ids=range(12),
)
def test_nonsense_at_a_door_starts_nothing(bench: LocalBench, said: bytes) -> None:
    running(bench)
    visitor = Visitor(bench, "1.1")
    visitor.socket.sendall(said)
    try:
        assert visitor.socket.recv(100) == b""
    except ConnectionResetError:
        pass
    assert not (bench.spool / "engine.log").read_bytes()


def test_a_run_that_is_suspended_or_stopping_lets_nobody_in(bench: LocalBench) -> None:
    running(bench, does=Does(lasts_s=FOREVER, ignores_stop=True))
    bench.engine.order("1.1", SuspendOrder())
    bench.until("1.1", RunSuspended)
    bench.engine.order("1.1", EnterOrder("a1"))
    bench.engine.order("1.1", ResumeOrder())
    bench.engine.order("1.1", StopOrder("cancel", grace_s=1.0))
    bench.engine.order("1.1", EnterOrder("a2"))
    bench.end_of("1.1")
    assert not list(bench.spool.glob("*.door-*"))


def test_a_visit_is_suspended_with_its_run(bench: LocalBench) -> None:
    running(bench)
    visitor = Visitor(bench, "1.1")
    # One that starts nothing: while a child between vfork and exec is stopped, its parent waits in the kernel.
    visitor.shell("echo up $$; exec sleep 600")
    pid = visitor.pid()
    bench.engine.order("1.1", SuspendOrder())
    bench.until("1.1", RunSuspended)

    def is_stopped() -> bool:
        found = proctree.read_process(pid)
        return found is not None and found.is_stopped

    wait_until(is_stopped, what="the visit to be stopped")
    bench.engine.order("1.1", ResumeOrder())
    wait_until(lambda: not is_stopped(), what="the visit to go on")
    visitor.say(SIGNAL, b"15")
    assert visitor.receive(EXIT) == b"- 15 - .\n"


def test_a_signal_to_the_run_reaches_a_visit_but_not_its_host(bench: LocalBench) -> None:
    running(
        bench, does=Does(lasts_s=FOREVER), argv=("sh", "-c", "trap : USR1; echo ready; while :; do sleep 0.05; done")
    )
    visitor = Visitor(bench, "1.1")
    visitor.shell("trap 'echo told' USR1; echo up $$; while :; do sleep 0.05; done")
    visitor.pid()
    bench.engine.order("1.1", SignalOrder(signal.SIGUSR1, "full"))
    assert visitor.receive(OUT) == b"told\n"


def test_a_visit_waits_for_the_start_of_a_foreground_run(bench: LocalBench) -> None:
    bench.start("1.1", argv=("sleep", "600"), interactive=Interactive())
    bench.engine.order("1.1", EnterOrder("a1"))
    first = socket.socket(socket.AF_UNIX)
    bench.wait(lambda: first.connect_ex(str(bench.spool / "1.1.attach")) == 0, what="the socket")
    assert not (bench.spool / "1.1.door-a1").exists()
    first.sendall(frame(HELLO, b"1 24 80"))
    bench.until("1.1", RunStarted)
    visitor = Visitor(bench, "1.1", "a1")
    visitor.shell("exit 6")
    assert visitor.receive(EXIT) == b"6 - - .\n"
    first.close()
    assert bench.end_of("1.1").stopped_by == "client_lost"


def test_a_host_does_not_count_as_memory_of_the_job(bench: LocalBench) -> None:
    peaks_mib = []
    for run in ("1.1", "2.1"):
        running(bench, run, argv=("sh", "-c", f"echo ready; while [ ! -e end-{run} ]; do sleep 0.02; done"))
        if run == "2.1":
            visitor = Visitor(bench, run)
            visitor.shell("exit 0")
            visitor.receive(EXIT)
        (bench.folder / f"end-{run}").touch()
        peaks_mib.append(bench.end_of(run).peak_mem_mib)
    assert peaks_mib[0] is not None
    assert peaks_mib[1] == pytest.approx(peaks_mib[0], abs=1.0)


def test_doors_of_killed_supervisors_are_removed_by_the_next_daemon(bench: LocalBench) -> None:
    running(bench)
    doors = [bench.spool / name for name in ("7.1.door-a1", "1.1.door-b2")]
    for door in doors:
        door.touch()
    bench.restart()
    bench.engine.adopt([open_run("1.1", bench.until("1.1", RunStarted))])
    assert [door.exists() for door in doors] == [False, True]


def test_a_run_that_systemd_started_has_visits_like_any_other(tmp_path: Path) -> None:
    bench = StandInBench(tmp_path)
    try:
        started = running(bench)
        visitor = Visitor(bench, "1.1")
        visitor.shell("echo up $PPID; exit 5")
        assert visitor.pid() not in (1, started.supervisor_pid)
        assert visitor.receive(EXIT) == b"5 - - .\n"
    finally:
        bench.close()
        visitor.leave()


@AS_ROOT
def test_a_visit_to_a_run_of_another_user_is_that_user(bench: LocalBench) -> None:
    nobody = pwd.getpwnam("nobody")
    for folder in (bench.folder, *bench.folder.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o711)
    (bench.folder / "1.1.out").touch()
    os.chown(bench.folder / "1.1.out", nobody.pw_uid, -1)
    bench.start("1.1", Does(lasts_s=FOREVER), uid=nobody.pw_uid, user="nobody")
    bench.ready("1.1")
    bench.engine.order("1.1", EnterOrder("a1"))
    door = bench.spool / "1.1.door-a1"
    bench.wait(door.exists, what="the door")
    bench.wait(lambda: door.stat().st_uid == nobody.pw_uid, what="its owner")
    # Not even root is let in in their place.
    with socket.socket(socket.AF_UNIX) as root:
        root.connect(str(door))
        root.settimeout(20)
        root.sendall(frame(RUN, b"pipes tree 22 1\0\0id\0") + frame(HELLO, b"1 0 0"))
        try:
            assert root.recv(100) == b""
        except ConnectionResetError:
            pass

    def visit() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(door))
            sock.settimeout(20)
            sock.sendall(frame(RUN, b"pty tree 22 3\0\0sh\0-c\0id -un; cat /proc/self/oom_score_adj; tty\0"))
            sock.sendall(frame(HELLO, b"1 24 80"))
            found = b""
            while b"\nx" not in found and (data := sock.recv(65536)):
                found += data
                if any(kind == EXIT for kind, _ in take_frames(bytearray(found))):
                    break
            return b"".join(words for kind, words in take_frames(bytearray(found)) if kind in (OUT, EXIT))

    said = as_nobody(nobody.pw_uid, visit)
    user, score, terminal, end = said.decode().split("\r\n")
    assert (user, end) == ("nobody", "0 - - .\n")
    assert int(score) > -500
    assert terminal.startswith("/dev/pts/")


def as_nobody(uid: int, deed: Callable[[], bytes]) -> bytes:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(uid)
            os.write(write, deed())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as file:
        return file.read()


# --- in containers ----------------------------------------------------------------------------------------


def boxed(bench: LocalBench, runtime: str = "podman", **more: Any) -> StandIns:
    """Start run 1.1 in a container, and wait until it is up."""
    runtimes = StandIns(bench.folder / "bin")
    (bench.folder / "x.sif").touch()
    image = f"docker.io/library/alpine@sha256:{DIGEST}" if runtime == "podman" else f"{bench.folder}/x.sif"
    launch = ContainerLaunch(runtime, runtimes.program(runtime), image)
    env = {"PATH": os.environ["PATH"], "GPUSCHED_RUN": "1.1"}
    text = "touch up.$inside_RANK; exec sleep 600"
    bench.start("1.1", argv=("sh", "-c", text), env=env, container=launch, **more)
    bench.until("1.1", RunStarted)
    count = len(more.get("ranks", "1"))
    bench.wait(lambda: len(list(bench.folder.glob("up.*"))) == count, what="the container")
    return runtimes


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_visit_of_a_container_starts_in_it(is_terminal: bool, bench: LocalBench) -> None:
    runtimes = boxed(bench)
    visitor = Visitor(bench, "1.1")
    text = 'pwd; echo "$CONTAINER_NAME $inside_A $inside_CUDA_MPS_X."; exit 5'
    visitor.shell(text, pty=is_terminal, work_dir="/", A="1 2", CUDA_MPS_X="1")
    output, ending = visitor.output()
    name = container_name("1.1", str(bench.spool))
    assert output.decode().split() == ["/", name, "1", "2", "."]
    assert ending.split()[0] == b"5"
    (call,) = [call for call in runtimes.calls() if "cgroupfs exec " in call]
    assert ("--tty" in call) is is_terminal
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")
    assert runtimes.names() == []


def test_a_visit_of_ranks_enters_the_container_of_the_first_that_runs(bench: LocalBench) -> None:
    ranks = tuple(RankLaunch({"RANK": str(n)}, n, f"{n}.out", None, None) for n in (4, 5))
    boxed(bench, ranks=ranks)
    visitor = Visitor(bench, "1.1")
    visitor.shell("echo $CONTAINER_NAME")
    assert visitor.output()[0].decode() == f"{container_name('1.1', str(bench.spool), 4)}\n"
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")


def test_a_visit_of_apptainer_starts_in_the_same_image(bench: LocalBench) -> None:
    boxed(bench, "apptainer")
    visitor = Visitor(bench, "1.1")
    visitor.shell('echo "$CONTAINER_IMAGE $GPUSCHED_RUN $A"', A="b")
    assert visitor.output()[0].decode() == f"{bench.folder}/x.sif 1.1 b\n"
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")


def test_the_end_of_the_run_ends_its_visits_in_the_container(bench: LocalBench) -> None:
    boxed(bench)
    visitor = Visitor(bench, "1.1")
    visitor.shell(ENDLESS)
    visitor.receive(OUT, b"up")
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").stopped_by == "cancel"
    assert not bench.processes()
