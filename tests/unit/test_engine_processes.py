"""Reading /proc, and telling a dead supervisor's processes from everybody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support import wait_until

from gpusched.engine import orphans
from gpusched.engine.linux import proctree
from gpusched.engine.linux.proctree import Process
from gpusched.engine.orphans import OrphanedRun, find_orphans, kill_orphans

EXIT_CALL = {"x86_64": 60, "aarch64": 93}


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_process_is_parsed(child: subprocess.Popen[bytes]) -> None:
    process = proctree.read_process(child.pid)
    assert process is not None
    assert (process.pid, process.ppid, process.session) == (child.pid, os.getpid(), os.getsid(0))
    assert process.is_alive
    assert proctree.read_process(2**22 + 1) is None


def test_a_name_with_brackets_and_blanks_is_parsed() -> None:
    with subprocess.Popen(["bash", "-c", "echo -n ') S 1 (' > /proc/$$/comm; echo; read"], **PIPES) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = proctree.read_process(process.pid)
        assert found is not None
        assert (found.name, found.ppid) == (") S 1 (", os.getpid())
        process.kill()


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def test_descendants_are_found_both_ways(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    assert child.pid in proctree.descendants(os.getpid())

    def missing(root: int, settled: object = ()) -> list[Process]:
        raise FileNotFoundError(root)

    monkeypatch.setattr(proctree, "_walk_children", missing)
    assert child.pid in proctree.descendants(os.getpid())
    assert os.getpid() not in proctree.descendants(os.getpid())


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_process_with_a_reused_pid_is_spared(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    monkeypatch.setattr(proctree, "HAS_PIDFD", has_pidfd and proctree.HAS_PIDFD)
    process = proctree.read_process(child.pid)
    assert process is not None
    process.start_ticks -= 1
    assert not proctree.send(process, signal.SIGKILL)
    assert child.poll() is None
    process.start_ticks += 1
    assert proctree.send(process, signal.SIGTERM)
    assert child.wait(20) == -signal.SIGTERM
    assert not proctree.send(process, signal.SIGTERM)


GATHER = """
import os, signal, sys, time
count = []
signal.signal(signal.SIGTERM, lambda *_: count.append(1))
for _ in range(3):
    if os.fork() == 0:
        break
print("ready", flush=True)
while not count:
    time.sleep(0.01)
time.sleep(0.3)
print(len(count), flush=True)
"""


def test_a_signal_reaches_each_process_of_a_group_once_and_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    killpg = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: (steps.append(group), killpg(group, number)))
    argv = [sys.executable, "-I", "-S", "-c", GATHER]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(4)] == ["ready\n"] * 4
        proctree.signal_all(lambda settled: proctree.walk(os.getpid(), settled), signal.SIGTERM)
        assert process.stdout.read().split() == ["1"] * 4
    assert process.pid in steps


def test_the_group_of_a_process_that_is_not_a_child_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "killpg", lambda group, number: pytest.fail(f"group {group} got signal {number}"))
    sent: list[int] = []
    monkeypatch.setattr(proctree, "send", lambda process, number: sent.append(process.pid))
    own, group = os.getpid(), os.getpgrp()
    adopted = Process(50, "train", "S", 1, 1, 7, group=50)
    leads_no_group = Process(51, "train", "S", own, 1, 7, group=60)
    in_our_group = Process(52, "train", "S", own, 1, 7, group=group)
    found = [adopted, leads_no_group, in_our_group]
    proctree.signal_all(lambda settled: found, signal.SIGTERM)
    assert sent == [50, 51, 52]


def test_a_reused_group_id_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process of the same user lets a frozen one go on, which joins another group."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append((group, number)))
    monkeypatch.setattr(proctree, "send", lambda process, number: sent.append((process.pid, number)))
    own = os.getpid()
    frozen, moved = (Process(51, "train", "T", own, 1, 7, group=group) for group in (60, 61))
    monkeypatch.setattr(proctree, "read_process", lambda pid: moved)
    proctree.kill_all(lambda settled: [] if 51 in settled else [frozen])
    assert sent == [(60, signal.SIGSTOP), (51, signal.SIGKILL)]


WITHOUT_MAIN_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.PyDLL(None).syscall({exit}, 0)
"""


@pytest.mark.skipif(os.uname().machine not in EXIT_CALL, reason="the number of exit(2) is not known here")
def test_a_process_whose_main_thread_has_ended_is_alive_and_killed() -> None:
    code = WITHOUT_MAIN_THREAD.format(exit=EXIT_CALL[os.uname().machine])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until(lambda: (found := proctree.read_process(process.pid)) is not None and found.state == "Z")
        assert process.pid in proctree.kill_tree(os.getpid())
        assert process.wait(20) == -signal.SIGKILL


def test_a_spared_process_stays_spared_when_the_others_end_at_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    shell, program = Process(50, "bash", "S", 1, 1, 7), Process(51, "train", "S", 50, 1, 8)
    told: list[int] = []
    monkeypatch.setattr(proctree, "send", lambda process, number: told.append(process.pid))
    proctree.signal_all(lambda settled: [shell] if told else [shell, program], signal.SIGUSR1, spared=(50,))
    assert told == [51]
    proctree.signal_all(lambda settled: [shell], signal.SIGUSR1, spared=(50,))
    assert told == [51, 50], "alone, it is the program"


def test_a_process_that_ended_between_two_scans_does_not_spare_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    shell, program = Process(50, "bash", "S", 1, 1, 7), Process(51, "train", "S", 50, 1, 8)
    scans = [[shell, program], [shell]]
    told: list[int] = []
    monkeypatch.setattr(proctree, "send", lambda process, number: told.append(process.pid))
    assert not proctree.signal_all(lambda settled: scans.pop(0), signal.SIGUSR1, spared=(50,))
    assert 50 in told


@pytest.mark.parametrize("spared", [None, (), (50,)])
def test_what_a_handler_starts_does_not_get_the_signal(
    monkeypatch: pytest.MonkeyPatch, spared: tuple[int, ...] | None
) -> None:
    shell, program = Process(50, "bash", "S", 1, 1, 7, group=50), Process(51, "train", "S", 50, 1, 8, group=51)
    requeue = Process(52, "scontrol", "R", 51, 1, 9, group=51)
    told: list[int] = []
    monkeypatch.setattr(proctree, "send", lambda process, number: told.append(process.pid))
    proctree.signal_all(lambda settled: [shell, program, *([requeue] if told else [])], signal.SIGUSR2, spared)
    assert told == ([51] if spared else [50, 51])


def test_a_process_that_only_the_second_scan_shows_gets_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may omit a child when its sibling ends during the scan, and one may be born behind it."""
    shell, program = Process(50, "bash", "S", 1, 1, 7), Process(51, "train", "S", 50, 1, 8)
    scans = [[shell], [shell, program], [program]]
    told: list[int] = []
    monkeypatch.setattr(proctree, "send", lambda process, number: told.append(process.pid))
    proctree.signal_all(lambda settled: scans.pop(0), signal.SIGUSR2)
    assert told == [50, 51]


SAVES = """
import os, signal, subprocess, sys, time
def save(number, frame):
    os.write(1, b"%d\\n" % subprocess.run(["sleep", "0.05"]).returncode)
    sys.exit()
signal.signal(signal.SIGUSR2, save)
os.write(1, b"ready\\n")
while True:
    time.sleep(60)
"""


def test_a_handler_can_run_programs_at_once() -> None:
    """Eight of them, so that some react while the others are still being told."""
    argv = [sys.executable, "-I", "-S", "-c", SAVES]
    started = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, process_group=0) for _ in range(8)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    proctree.signal_all(lambda settled: proctree.walk(os.getpid(), settled), signal.SIGUSR2, spared=0)
    assert [process.communicate(timeout=60)[0] for process in started] == ["0\n"] * 8


class Table:
    """A made-up /proc."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: dict[int, Process] = {}
        self.variables: dict[int, list[bytes]] = {}
        monkeypatch.setattr(proctree, "all_pids", lambda: list(self.processes))
        monkeypatch.setattr(proctree, "read_process", self.processes.get)
        monkeypatch.setattr(orphans, "_environ", lambda pid: self.variables.get(pid, []))
        self.add(os.getpid(), ppid=1)

    def add(
        self, pid: int, ppid: int = 1, session: int = 0, run: str = "", spool: str = "/s", state: str = "S"
    ) -> None:
        self.processes[pid] = Process(pid, "p", state, ppid, session or pid, 1)
        if run:
            self.variables[pid] = [b"A=1", f"GPUSCHED_RUN={run}".encode(), f"GPUSCHED_SPOOL={spool}".encode()]

    def found(self, *lost: OrphanedRun, spared: frozenset[int] = frozenset()) -> dict[str, list[int]]:
        groups = find_orphans(list(lost), "/s", spared)
        return {run: sorted(process.pid for process in group) for run, group in groups.items()}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(monkeypatch)


SEEN = OrphanedRun("1.1", 50, witnessed=True)
UNSEEN = OrphanedRun("1.1", 50, witnessed=False)


def test_marked_processes_and_descendants_belong_to_the_run(table: Table) -> None:
    table.add(101, run="1.1")
    table.add(102, ppid=101)
    table.add(103, ppid=102)
    table.add(104, run="1.2")
    table.add(105, run="1.1", spool="/other")
    table.add(106)
    assert table.found(UNSEEN) == {"1.1": [101, 102, 103]}


def test_the_session_counts_when_its_end_was_observed(table: Table) -> None:
    table.add(101, session=50)
    assert table.found(SEEN) == {"1.1": [101]}
    assert table.found(UNSEEN) == {}, "by now it may be the session of somebody else"


def test_one_marked_member_adds_the_session_to_the_run(table: Table) -> None:
    table.add(101, session=50)
    table.add(102, session=50, run="1.1")
    assert table.found(UNSEEN) == {"1.1": [101, 102]}


def test_dead_spared_and_ancestor_processes_are_left_alone(table: Table) -> None:
    table.add(101, run="1.1", state="Z")
    table.add(102, run="1.1")
    table.add(103, run="1.1")
    table.processes[os.getpid()].ppid = 103
    assert table.found(SEEN, spared=frozenset({102})) == {}


def test_several_runs_are_distinguished_in_one_walk(table: Table) -> None:
    table.add(101, run="1.1")
    table.add(102, run="2.1")
    table.add(103, session=60)
    assert table.found(SEEN, OrphanedRun("2.1", 60, witnessed=True)) == {"1.1": [101], "2.1": [102, 103]}


def test_one_that_is_replaced_by_its_child_during_the_walk_is_found(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork bomb was taken for gone, and its run for lost, when a walk met none of its short-lived processes."""
    table.add(101, run="1.1")
    read = proctree.read_process

    def replaced(pid: int) -> Process | None:
        if pid == 101:
            del table.processes[101]
            table.add(102, run="1.1")
        return read(pid)

    monkeypatch.setattr(proctree, "read_process", replaced)
    monkeypatch.setattr(proctree, "last_pid", lambda: max(table.processes.keys() - {os.getpid()}, default=102))
    assert table.found(UNSEEN) == {"1.1": [102]}


def test_a_slow_process_is_left_when_the_marked_one_is_gone(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies_at_once_when_marked(process: Process, number: int) -> bool:
        if number == signal.SIGKILL and process.pid == 102:
            table.processes.pop(102, None)
        return True

    monkeypatch.setattr(proctree, "send", dies_at_once_when_marked)
    table.add(101, session=50)
    table.add(102, session=50, run="1.1")
    left = kill_orphans([UNSEEN], "/s", frozenset())
    assert left == {"1.1": {101: 1}}, "the session's other member lives, with nothing to tell whose it was"
    again = OrphanedRun("1.1", 50, witnessed=False, known=left["1.1"])
    assert kill_orphans([again], "/s", frozenset()) == {"1.1": {101: 1}}, "nor is it forgotten by the next look"
    table.processes[101].start_ticks += 1
    assert kill_orphans([again], "/s", frozenset()) == {"1.1": {}}, "another process has its pid now"
