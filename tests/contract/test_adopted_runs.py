"""What an engine does with processes that it did not start, under every launcher: watch, stop, lose, find again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bench import BOOT, ENDS, LocalBench, StandInBench, UnitBench, open_run
from support import wait_until

from gpusched.engine.linux import proctree
from gpusched.model.execution import LimitOrder, RunEnded, RunLost, RunStarted, RunSuspended, SignalOrder, StopOrder
from gpusched.model.job import AdoptedProcess, Notice
from gpusched.model.value import replace


class Bench:
    """An engine, and a process that nobody has started for it."""

    def __init__(self, made: LocalBench) -> None:
        self.engine = made
        self.started: list[subprocess.Popen[bytes]] = []

    def process(self, text: str = "exec sleep 1000", trap: str = ":") -> subprocess.Popen[bytes]:
        """One that says that it is there, once it has carried out `trap`."""
        argv = ["/bin/sh", "-c", f"{trap}\necho ready\n{text}"]
        self.started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        process = self.started[-1]
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def adopt(self, process: subprocess.Popen[bytes], **changes: object) -> RunStarted:
        self.engine.start("1.1", None, adopt=of(process), **changes)
        started = self.engine.until("1.1", RunStarted)
        assert started.pid == process.pid
        return started

    def end(self, process: subprocess.Popen[bytes], how: int) -> RunEnded:
        """The process has ended so, and this is what its engine says; nobody is told how it exited."""
        assert process.wait(30) == how
        end = self.engine.end_of("1.1")
        assert (end.exit_code, end.signal, end.launch_error) == (None, None, None)
        return end

    def close(self) -> None:
        for process in self.started:
            process.kill()
            # Closes its pipes and waits for it.
            process.__exit__(None, None, None)
        self.engine.close()


def of(process: subprocess.Popen[bytes], start_ticks: int | None = None) -> AdoptedProcess:
    found = proctree.read_process(process.pid)
    assert found is not None
    return AdoptedProcess(process.pid, found.start_ticks if start_ticks is None else start_ticks, BOOT)


@pytest.fixture(params=[LocalBench, StandInBench, UnitBench], ids=["local", "stand-in", "systemd"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param is UnitBench and (why := UnitBench.missing()):
        pytest.skip(why)
    made = Bench(request.param(tmp_path))
    yield made
    made.close()


def test_the_end_is_observed_without_an_exit_code(bench: Bench) -> None:
    process = bench.process("read -r word\nexit 7")
    bench.adopt(process)
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert bench.end(process, 7).stopped_by is None


def test_a_stop_begins_with_the_requested_signal(bench: Bench) -> None:
    process = bench.process()
    bench.adopt(process, stop_signal=None, notice=Notice(signal.SIGUSR1, before_s=60, main_only=False))
    bench.engine.engine.order("1.1", StopOrder("preempt"))
    assert bench.end(process, -signal.SIGUSR1).stopped_by == "preempt"


def test_usage_counts_from_the_adoption(bench: Bench) -> None:
    process = bench.process("while :; do :; done")
    wait_until(lambda: cpu_ticks(process.pid) > 50, what="it to have used something before")
    bench.adopt(process)
    assert bench.engine.engine.cpu_seconds(["1.1"])["1.1"] > 0
    begun = cpu_ticks(process.pid)
    wait_until(lambda: cpu_ticks(process.pid) > begun + 10, what="it to use some more")
    in_all = cpu_ticks(process.pid)
    bench.engine.engine.order("1.1", StopOrder("cancel"))
    end = bench.end(process, -signal.SIGTERM)
    assert end.cpu_s is not None
    assert end.cpu_s > (in_all - begun - 0.5) / os.sysconf("SC_CLK_TCK")
    assert end.cpu_s < end.end_at - (end.start_at or 0.0) + 0.1
    assert end.peak_mem_mib is not None
    assert end.peak_mem_mib > 0


def cpu_ticks(pid: int) -> int:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


def test_a_stop_sends_term_waits_the_grace_and_kills(bench: Bench) -> None:
    process = bench.process("trap '' TERM\necho deaf\nwhile :; do sleep 0.05; done")
    assert process.stdout is not None
    process.stdout.readline()
    bench.adopt(process)
    bench.engine.engine.order("1.1", StopOrder("cancel", grace_s=0.2))
    assert bench.end(process, -signal.SIGKILL).stopped_by == "cancel"


def test_the_time_limit_counts_from_the_adoption(bench: Bench) -> None:
    process = bench.process()
    bench.adopt(process, time_limit_s=0.3)
    assert bench.end(process, -signal.SIGTERM).stopped_by == "timeout"


def test_the_time_limit_can_be_changed(bench: Bench) -> None:
    process = bench.process()
    bench.adopt(process)
    bench.engine.engine.order("1.1", LimitOrder(0.3))
    assert bench.end(process, -signal.SIGTERM).stopped_by == "timeout"


@pytest.mark.parametrize(("order", "stopped_by"), [("stop cancel - - .", "cancel"), ("limit 0.1 .", "timeout")])
def test_orders_sent_before_the_supervisor_starts_are_delivered(bench: Bench, order: str, stopped_by: str) -> None:
    """A job that was cancelled at once was recorded as such, and its process ran on."""
    process = bench.process()
    (bench.engine.folder / "spool" / "1.1.order").write_text(f"\n{order}\n")
    bench.adopt(process)
    assert bench.end(process, -signal.SIGTERM).stopped_by == stopped_by


def test_a_suspension_sent_before_the_supervisor_starts_is_delivered(bench: Bench) -> None:
    process = bench.process()
    (bench.engine.folder / "spool" / "1.1.order").write_text("\nsuspend .\n")
    bench.adopt(process)
    bench.engine.until("1.1", RunSuspended)
    wait_until(lambda: (found := proctree.read_process(process.pid)) is not None and found.state == "T", what="it")
    bench.engine.engine.order("1.1", StopOrder("cancel"))
    assert bench.end(process, -signal.SIGTERM).stopped_by == "cancel"


def test_cancelling_a_process_that_ended_before_adoption_is_recorded_as_cancelled(bench: Bench) -> None:
    process = bench.process()
    (bench.engine.folder / "spool" / "1.1.order").write_text("\nstop cancel - - .\n")
    bench.engine.start("1.1", None, adopt=of(process, start_ticks=1))
    end = bench.engine.end_of("1.1")
    assert (end.start_at, end.stopped_by, end.launch_error) == (None, "cancel", None)
    assert process.poll() is None


def test_a_signal_reaches_the_process(bench: Bench) -> None:
    process = bench.process("while :; do sleep 0.05; done", trap="trap 'echo told; exit 3' USR1")
    bench.adopt(process)
    bench.engine.engine.order("1.1", SignalOrder(signal.SIGUSR1, "main"))
    bench.end(process, 3)
    assert process.stdout is not None
    assert process.stdout.read() == b"told\n"


def test_descendants_belong_to_the_run(bench: Bench) -> None:
    process = bench.process("sleep 1000 &\necho $!\nwait")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    bench.adopt(process)
    assert bench.engine.engine.owners([process.pid, child, os.getpid()]) == {process.pid: "1.1", child: "1.1"}
    process.kill()
    end = bench.end(process, -signal.SIGKILL)
    assert end.leftovers == (f"sleep({child})",)
    wait_until(lambda: not is_alive(child), what="the child to be ended")


def test_an_ended_process_is_refused(bench: Bench) -> None:
    process = bench.process()
    adopted = of(process, start_ticks=1)
    bench.engine.start("1.1", None, adopt=adopted)
    end = bench.engine.end_of("1.1")
    assert end.launch_error == f"process {process.pid} had ended before it was adopted"
    assert process.poll() is None


def test_a_new_engine_adopts_the_run_again(bench: Bench) -> None:
    process = bench.process()
    adopted = of(process)
    started = bench.adopt(process)
    bench.engine.restart()
    bench.engine.engine.adopt([replace(open_run("1.1", started), adopted=adopted)])
    assert bench.engine.engine.owners([process.pid]) == {process.pid: "1.1"}
    process.kill()
    bench.end(process, -signal.SIGKILL)


def test_without_its_supervisor_the_process_is_left_alone(bench: Bench) -> None:
    process = bench.process()
    started = bench.adopt(process)
    os.kill(started.supervisor_pid, signal.SIGKILL)
    lost = bench.engine.until("1.1", *ENDS)
    assert isinstance(lost, RunLost)
    assert process.poll() is None
    assert bench.engine.engine.owners([process.pid]) == {}


def is_alive(pid: int) -> bool:
    found = proctree.read_process(pid)
    return found is not None and found.is_alive
