"""kill -9 of the fork server, of supervisors, and of the daemon's engine: nothing is lost, run twice or left behind."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bench import BOOT, ENDS, FOREVER, Does, LocalBench, WallClock, open_run, to_start
from support import wait_until

from gpusched.engine import spool as files
from gpusched.engine.launchers import ForkServer
from gpusched.engine.linux import proctree
from gpusched.engine.local import LocalEngine
from gpusched.model.execution import (
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunStarted,
    StopOrder,
)

SLEEPS = Does(lasts_s=FOREVER)
COUNTS = "echo {run} >> starts; exit {code}"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalBench]:
    made = LocalBench(tmp_path)
    yield made
    made.close()


def ends_of(bench: LocalBench, run: str) -> list[object]:
    return [event for event in bench.of(run) if isinstance(event, ENDS)]


def in_session(session: int) -> list[str]:
    """Names of live processes of a session."""
    everybody = [found for pid in proctree.all_pids() if (found := proctree.read_process(pid)) is not None]
    return [process.name for process in everybody if process.session == session and process.is_alive]


# --- the fork server ---------------------------------------------------------------------------------------


def test_runs_survive_the_fork_server_and_new_ones_start(bench: LocalBench) -> None:
    bench.start("1.1", SLEEPS)
    bench.ready("1.1")
    first = bench.engine.server_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    bench.wait(lambda: bench.engine.server_pid != first, what="that the death is noticed")
    bench.start("2.1", Does(exit_code=3))
    assert bench.end_of("2.1").exit_code == 3
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").stopped_by == "cancel"


def test_tickets_lost_with_the_fork_server_can_be_returned(bench: LocalBench) -> None:
    server = bench.engine.server_pid
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    tickets = [bench.ticket(f"{job}.1") for job in range(1, 6)]
    bench.engine.reconcile(to_start(tickets))
    os.kill(server, signal.SIGKILL)
    for ticket in tickets:
        assert isinstance(bench.until(ticket.run, *ENDS), RunNeverStarted)
    assert not list(bench.folder.glob("*.out"))


def test_an_idle_supervisor_takes_a_run_while_the_fork_server_hangs(bench: LocalBench) -> None:
    bench.start("1.1")
    bench.end_of("1.1")
    launcher, server = bench.engine._server, bench.engine.server_pid
    assert isinstance(launcher, ForkServer)
    assert server is not None
    wait_until(lambda: select.select([launcher._idle.tokens_out], [], [], 0)[0], what="its supervisor to be idle")
    os.kill(server, signal.SIGSTOP)
    try:
        bench.start("2.1", Does(exit_code=3))
        assert bench.end_of("2.1").exit_code == 3
    finally:
        os.kill(server, signal.SIGCONT)
    first, second = (bench.until(run, RunStarted).supervisor_pid for run in ("1.1", "2.1"))
    assert first == second


def test_a_hanging_fork_server_is_replaced(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.engine.launchers.START_TIMEOUT_S", 0.2)
    server = bench.engine.server_pid
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    bench.start("1.1")
    assert isinstance(bench.until("1.1", *ENDS), RunNeverStarted)
    bench.start("1.2", Does(exit_code=4))
    assert bench.end_of("1.2").exit_code == 4


def test_a_fork_server_that_answers_others_is_busy_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    told, tell = os.pipe()
    server = ForkServer(str(tmp_path), "boot-1", tell)
    monkeypatch.setattr("gpusched.engine.launchers.time.monotonic", lambda: now[0])
    try:
        server.heard("1.1")
        now[0] += 4
        assert not server.is_stuck(9.0), "it answered somebody four seconds ago"
        now[0] += 2
        assert server.is_stuck(9.0)
        assert not server.is_stuck(1.0), "it has only just been asked"
    finally:
        monkeypatch.undo()
        server.close()
        os.close(told)
        os.close(tell)


def test_a_late_start_of_a_revoked_run_is_refused_even_after_it_was_forgotten(bench: LocalBench) -> None:
    # The old daemon's fork server is stopped with a ticket in its socket; it wakes when all is settled.
    old = bench.engine
    server = old.server_pid
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    bench.start("1.1", argv=("touch", "started"))
    bench.engine = bench.make()
    bench.engine.adopt([open_run("1.1")])
    assert isinstance(bench.until("1.1", *ENDS), RunNeverStarted)
    bench.engine.reconcile((), ["1.1"])
    third = bench.make()
    third.adopt([])
    os.kill(server, signal.SIGCONT)
    old.close()
    wait_until(lambda: (p := proctree.read_process(server)) is None or not p.is_alive)
    third.close()
    bench.start("2.1")
    bench.end_of("2.1")
    assert not (bench.folder / "started").exists()


def test_revocations_are_swept_when_no_claim_is_possible(bench: LocalBench) -> None:
    bench.engine.adopt([open_run("1.1")])
    bench.until("1.1", RunNeverStarted)
    bench.engine.reconcile((), ["1.1"])
    bench.restart()
    assert (bench.spool / "1.1.record").exists()
    bench.engine.adopt([])
    assert not (bench.spool / "1.1.record").exists()


# --- supervisors ---------------------------------------------------------------------------------------------


def test_leftovers_of_a_killed_supervisor_are_killed_before_the_run_is_lost(bench: LocalBench) -> None:
    text = "trap '' TERM; setsid sleep 600 & sleep 600 & echo ready; wait"
    bench.start("1.1", argv=("sh", "-c", text))
    started = bench.ready("1.1")
    bench.wait(lambda: len(bench.processes()) == 3)
    os.kill(started.supervisor_pid, signal.SIGKILL)
    lost = bench.until("1.1", *ENDS)
    assert isinstance(lost, RunLost)
    assert bench.processes() == []


def test_a_killed_supervisor_loses_only_its_own_run(bench: LocalBench) -> None:
    for run in ("1.1", "2.1"):
        bench.start(run, SLEEPS)
    os.kill(bench.ready("1.1").supervisor_pid, signal.SIGKILL)
    assert isinstance(bench.until("1.1", *ENDS), RunLost)
    assert proctree.read_process(bench.ready("2.1").pid) is not None
    bench.engine.order("2.1", StopOrder("cancel"))
    assert bench.end_of("2.1").stopped_by == "cancel"


def test_a_process_without_marks_is_found_by_its_session(bench: LocalBench) -> None:
    bench.start("1.1", argv=("env", "-i", "/bin/sh", "-c", "echo ready; /bin/sleep 600; exit"))
    started = bench.ready("1.1")
    os.kill(started.supervisor_pid, signal.SIGKILL)
    assert isinstance(bench.until("1.1", *ENDS), RunLost)
    assert in_session(started.supervisor_pid) == []


def test_a_supervisor_killed_without_a_daemon_is_noticed(bench: LocalBench) -> None:
    bench.start("1.1", argv=("sh", "-c", "env -i sleep 600 & echo ready; wait"))
    started = bench.ready("1.1")
    bench.engine.close()
    os.kill(started.supervisor_pid, signal.SIGKILL)
    bench.engine = bench.make()
    bench.engine.adopt([open_run("1.1", started)])
    assert isinstance(bench.until("1.1", *ENDS), RunLost)
    assert in_session(started.supervisor_pid) == []


def test_a_run_is_not_lost_while_its_cage_holds_a_process(bench: LocalBench, tmp_path: Path) -> None:
    bench.start("1.1", SLEEPS)
    started = bench.ready("1.1")
    bench.engine.close()
    os.kill(started.supervisor_pid, signal.SIGKILL)
    leaf = tmp_path / "run_cgroups" / "gpusched-1.1"
    leaf.mkdir(parents=True)
    populated, kill = leaf / "cgroup.events", leaf / "cgroup.kill"
    populated.write_text("populated 1\nfrozen 0\n")
    kill.write_text("")
    bench.engine = LocalEngine(bench.spool, boot_id=BOOT, clock=WallClock(), run_cgroups=str(leaf.parent))
    bench.engine.adopt([open_run("1.1", started)])
    for _ in range(3):
        bench.wait(lambda: kill.read_text() == "1", what="that it is killed")
        kill.write_text("")
    assert not ends_of(bench, "1.1"), "whoever is left there may have its GPU open"
    populated.write_text("populated 0\nfrozen 0\n")
    assert isinstance(bench.until("1.1", *ENDS), RunLost)


def test_an_idle_supervisors_death_is_harmless(bench: LocalBench) -> None:
    bench.start("1.1")
    bench.end_of("1.1")
    supervisor = bench.until("1.1", RunStarted).supervisor_pid
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: proctree.read_process(supervisor) is None, what="its end")
    for job in range(2, 6):
        bench.start(f"{job}.1", Does(exit_code=job))
        assert bench.end_of(f"{job}.1").exit_code == job


def test_waiting_supervisors_exit_after_a_timeout(bench: LocalBench) -> None:
    line = "until [ -e go ]; do sleep 0.02; done"
    tickets = [bench.ticket(f"{job}.1", argv=("sh", "-c", line)) for job in range(1, 5)]
    bench.engine.reconcile(to_start(tickets))
    for ticket in tickets:
        bench.until(ticket.run, RunStarted)
    (bench.folder / "go").touch()
    for ticket in tickets:
        bench.end_of(ticket.run)
    supervisors = {bench.until(ticket.run, RunStarted).supervisor_pid for ticket in tickets}
    assert len(supervisors) == 4
    wait_until(lambda: not [pid for pid in supervisors if proctree.read_process(pid)], what="idle supervisors to end")
    bench.start("9.1", Does(exit_code=9))
    assert bench.end_of("9.1").exit_code == 9


# --- the daemon ----------------------------------------------------------------------------------------------


def test_an_end_without_a_daemon_is_delivered_later(bench: LocalBench) -> None:
    bench.start("1.1", Does(lasts_s=0.3, exit_code=9))
    started = bench.ready("1.1")
    bench.engine.close()
    wait_until(lambda: b'"ended"' in (bench.spool / "1.1.record").read_bytes())
    bench.engine = bench.make()
    bench.engine.adopt([open_run("1.1", started)])
    assert bench.end_of("1.1").exit_code == 9


def test_an_unreported_start_is_delivered_to_the_next_daemon(bench: LocalBench) -> None:
    bench.start("1.1", SLEEPS)
    wait_until(lambda: "ready" in bench.output("1.1"))
    bench.restart()
    bench.engine.adopt([open_run("1.1")])
    started = bench.until("1.1", RunStarted)
    assert proctree.read_process(started.pid) is not None


def test_a_result_counts_after_a_reboot(bench: LocalBench) -> None:
    bench.start("1.1", Does(exit_code=2))
    bench.end_of("1.1")
    bench.engine.close()
    bench.engine = LocalEngine(bench.spool, boot_id="boot-2", clock=WallClock())
    bench.seen.clear()
    bench.engine.adopt([open_run("1.1"), open_run("2.1")])
    assert bench.end_of("1.1").exit_code == 2
    assert isinstance(bench.until("2.1", *ENDS), RunLost)


def test_runs_without_a_job_are_stopped_and_cleared(bench: LocalBench) -> None:
    bench.start("1.1", SLEEPS)
    bench.ready("1.1")
    bench.start("2.1")
    bench.end_of("2.1")
    bench.restart()
    bench.seen.clear()
    (bench.spool / "3.1.script").touch()
    bench.engine.adopt([])
    bench.wait(lambda: not [p for p in bench.spool.iterdir() if p.name[0].isdigit()], what="an empty spool")
    # The one that was still alive; the daemon may have declared it lost. The end of the other one is told of again if
    # its supervisor had not put it on the disk by the restart.
    ends = {one.run: one for one in bench.seen}
    assert len(ends) == len(bench.seen)
    assert ends.keys() <= {"1.1", "2.1"}
    assert {type(end) for end in bench.seen} == {RunEnded}
    assert getattr(ends["1.1"], "stopped_by", "") == "cancel"
    assert bench.processes() == []
    bench.done.clear()


def test_an_unread_pipe_loses_nothing(bench: LocalBench) -> None:
    # The daemon hangs: far more events than the pipe holds, but no more tickets than the socket takes at once.
    import fcntl

    fcntl.fcntl(bench.engine._pipe, fcntl.F_SETPIPE_SZ, 4096)
    tickets = [bench.ticket(f"{job}.1", Does(exit_code=job % 7)) for job in range(1, 61)]
    bench.engine.reconcile(to_start(tickets))
    wait_until(
        lambda: (
            all(b'"ended"' in p.read_bytes() for p in bench.spool.glob("*.record"))
            and len(list(bench.spool.glob("*.record"))) == len(tickets)
        )
    )
    for job, ticket in enumerate(tickets, 1):
        assert bench.end_of(ticket.run).exit_code == job % 7
    assert all(len(ends_of(bench, ticket.run)) == 1 for ticket in tickets)


# --- a spool that misbehaves --------------------------------------------------------------------------------


def test_a_removed_record_does_not_start_a_run_twice(bench: LocalBench) -> None:
    bench.start("1.1", SLEEPS)
    started = bench.ready("1.1")
    bench.engine.close()
    (bench.spool / "1.1.record").unlink()
    bench.engine = bench.make()
    bench.engine.adopt([open_run("1.1", started)])
    os.kill(started.pid, signal.SIGKILL)
    assert bench.end_of("1.1").signal == signal.SIGKILL, "its supervisor has made the record again"


def test_a_foreign_record_is_a_lost_run(bench: LocalBench) -> None:
    (bench.spool / "1.1.record").write_text("something else\n")
    bench.engine.adopt([open_run("1.1")])
    assert isinstance(bench.until("1.1", *ENDS), RunLost)


def test_a_partial_result_is_ignored(bench: LocalBench) -> None:
    bench.start("1.1", Does(exit_code=1))
    bench.end_of("1.1")
    bench.restart()
    bench.seen.clear()
    record = bench.spool / "1.1.record"
    record.write_bytes(record.read_bytes()[:-20])
    bench.engine.adopt([open_run("1.1")])
    assert isinstance(bench.until("1.1", *ENDS), RunLost)


def test_a_full_disk_delays_runs_without_losing_them(small_disk: Path) -> None:
    bench = LocalBench(small_disk)
    try:
        bench.start(
            "1.1",
            argv=("sh", "-c", "trap 'exit 7' TERM; : > begun; while :; do sleep 0.02; done"),
            stdout_path="/dev/null",
        )
        bench.until("1.1", RunStarted)
        bench.wait((small_disk / "begun").exists, what="the trap to be set")
        with open(small_disk / "ballast", "wb", buffering=0) as ballast:
            with pytest.raises(OSError, match="No space"):
                while True:
                    ballast.write(b"x" * 4096)
            bench.start("2.1")
            refused = bench.until("2.1", *ENDS)
            assert isinstance(refused, RunNeverStarted)
            assert "only 0 KiB are free" in refused.detail
            bench.engine.order("1.1", StopOrder("cancel"))
            end = bench.end_of("1.1")
            assert (end.exit_code, end.stopped_by) == (7, "cancel")
            ballast.truncate(0)
        bench.start("2.2", Does(exit_code=3))
        assert bench.end_of("2.2").exit_code == 3
    finally:
        bench.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(where)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


# --- all at once --------------------------------------------------------------------------------------------

DAEMON = """
import sys, time
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from engine_bench import LocalBench, open_run, to_start
first, last = int(sys.argv[4]), int(sys.argv[5])
bench = LocalBench(Path(sys.argv[3]))
bench.engine.adopt([open_run(f"{job}.1") for job in range(1, first)])
print("server", bench.engine.server_pid, flush=True)
for job in range(first, last):
    text = f"echo {job} >> starts; sleep 0.0{job % 5}; exit {job % 50}"
    bench.engine.reconcile(to_start([bench.ticket(f"{job}.1", argv=("sh", "-c", text))]))
    print(job, flush=True)
    bench.let_pass(0.003)
time.sleep(600)
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 4))])
def test_random_kills_of_daemon_server_and_supervisors_are_survived(bench: LocalBench, seed: int) -> None:
    kill_at_random(bench, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_random_kills_are_survived(bench: LocalBench, seed: int) -> None:
    kill_at_random(bench, seed)


def kill_at_random(bench: LocalBench, seed: int) -> None:
    """Every run that was asked for ran at most once, and is accounted for by exactly one end."""
    rng = random.Random(seed)
    bench.engine.close()
    asked = 0
    lost_allowed = 0
    here = str(Path(__file__).parents[1])
    root = str(Path(files.__file__).parents[2])
    for _ in range(4):
        command = [sys.executable, "-c", DAEMON, root, here, str(bench.folder), str(asked + 1), str(asked + 41)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            until = asked + rng.randint(5, 40)
            server = 0
            for line in daemon.stdout:
                if line.startswith("server"):
                    server = int(line.split()[1])
                else:
                    asked = int(line)
                    if rng.random() < 0.1:
                        lost_allowed += kill_one_supervisor(bench, rng)
                    if server and rng.random() < 0.03:
                        os.kill(server, signal.SIGKILL)
                        server = 0
                    if asked >= until:
                        break
            daemon.kill()
            # It may have been ahead of what was read of it.
            asked = max([asked, *(int(line) for line in daemon.stdout if line.endswith("\n") and line[0].isdigit())])
        # The job after the last word may have been asked for as well.
        asked += 1
    bench.engine = bench.make()
    bench.engine.adopt([open_run(f"{job}.1") for job in range(1, asked + 1)])
    starts = bench.folder / "starts"
    lost = 0
    for job in range(1, asked + 1):
        end = bench.until(f"{job}.1", *ENDS)
        lost += isinstance(end, RunLost)
        if isinstance(end, RunEnded):
            assert end.launch_error is None
            assert end.exit_code == job % 50
    counts = [int(line) for line in starts.read_text().split()]
    for job in range(1, asked + 1):
        (end,) = ends_of(bench, f"{job}.1")
        allowed = {RunEnded: {1}, RunNeverStarted: {0}, RunLost: {0, 1}}[type(end)]
        assert counts.count(job) in allowed, (job, end)
    assert lost <= lost_allowed
    assert bench.processes() == []


def kill_one_supervisor(bench: LocalBench, rng: random.Random) -> int:
    """One supervisor that holds a run now, if there is one; how many were killed."""
    held = []
    for run in files.runs_in(str(bench.spool)):
        record = files.read_record(str(bench.spool), run)
        if record is not None and record.is_held and record.pid is not None and record.result is None:
            process = proctree.read_process(record.pid)
            if process is not None and process.start_ticks == record.start_ticks:
                held.append(process)
    return int(bool(held) and proctree.send(rng.choice(held), signal.SIGKILL))
