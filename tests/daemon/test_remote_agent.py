"""An agent in a process of its own: kill -9, silence, old heads, other versions, large jobs, a thousand records."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from engine_bench import BOOT, ENDS, FOREVER, Does, LocalBench, WallClock, open_run, to_start
from remote_bench import AgentThread, RemoteBench, Weather
from remote_world import Wire
from support import wait_until

from gpusched import __version__
from gpusched.engine import spool as files
from gpusched.engine.local import LocalEngine
from gpusched.engine.remote.channel import StreamChannel
from gpusched.engine.remote.journal import AgentJournal
from gpusched.engine.remote.messages import WIRE_VERSION, SyncRequest, fields_mark, message_fields, pack, unpack
from gpusched.engine.remote.node_agent import NodeAgent
from gpusched.engine.remote.remote_engine import LinkPace, RemoteEngine
from gpusched.errors import GpuschedError
from gpusched.model.execution import (
    EngineEvent,
    LimitOrder,
    Order,
    RunEnded,
    RunNeverStarted,
    RunStarted,
    SignalOrder,
    StopOrder,
)
from gpusched.model.value import replace

SLEEPS = Does(lasts_s=FOREVER)
PACE = LinkPace(poll_s=0.1, report_s=0.1, retry_s=0.05, retry_max_s=0.2, silence_s=0.5)

AGENT = """
import asyncio, socket, sys
from functools import partial
from engine_bench import BOOT, WallClock
from gpusched.engine.local import LocalEngine
from gpusched.engine.remote.agent_server import AgentServer, agent_of_spool
from gpusched.engine.remote.channel import StreamChannel

async def main(fd, spool):
    make = partial(LocalEngine, spool, boot_id=BOOT, clock=WallClock())
    agent = agent_of_spool(spool, make, boot_id=BOOT, clock=WallClock())
    await AgentServer(agent, StreamChannel(socket.socket(fileno=fd))).serve()

asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
"""


class ProcessBench(LocalBench):
    """Real processes behind an agent that can be killed."""

    def __init__(self, folder: Path) -> None:
        self.sessions = 0
        self.channel = StreamChannel(None)
        self.process: subprocess.Popen[bytes] | None = None
        super().__init__(folder)
        self.start_agent()

    def make(self) -> RemoteEngine:  # type: ignore[override]
        self.sessions += 1
        return RemoteEngine(self.channel, session=self.sessions, clock=WallClock(), pace=PACE)

    def start_agent(self) -> None:
        here, there = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(there.fileno()), str(self.spool)],
            pass_fds=[there.fileno()],
            env={**os.environ, "PYTHONPATH": path},
        )
        there.close()
        self.channel.attach(here)

    def kill_agent(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill_agent()
        self.engine.close()
        self.channel = StreamChannel(None)
        self.engine = self.make()  # type: ignore[assignment]
        self.start_agent()

    def close(self) -> None:
        super().close()
        self.kill_agent()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ProcessBench]:
    made = ProcessBench(tmp_path)
    yield made
    made.close()


def link_of(bench: LocalBench) -> RemoteEngine:
    engine: object = bench.engine
    assert isinstance(engine, RemoteEngine)
    return engine


# --- kill -9 of the agent ----------------------------------------------------------------------------------


def test_runs_outlive_a_killed_agent_and_their_exit_codes_come(bench: ProcessBench) -> None:
    bench.start("1.1", argv=("sh", "-c", "echo ready; while [ ! -e go ]; do sleep 0.02; done; exit 7"))
    bench.start("2.1", SLEEPS)
    for run in ("1.1", "2.1"):
        bench.ready(run)
    bench.kill_agent()
    (bench.folder / "go").touch()
    wait_until(lambda: (found := files.read_record(str(bench.spool), "1.1")) and found.result, what="its result")
    bench.wait(lambda: link_of(bench).link.unreachable_since is not None, what="that the silence is noticed")
    assert not [event for event in bench.seen if isinstance(event, ENDS)]
    bench.start_agent()
    assert bench.end_of("1.1").exit_code == 7
    assert link_of(bench).link.unreachable_since is None
    bench.engine.order("2.1", StopOrder("cancel"))
    assert bench.end_of("2.1").stopped_by == "cancel"
    assert [type(event) for event in bench.of("1.1")] == [RunStarted, RunEnded]


def test_what_is_asked_of_a_dead_agent_is_done_by_the_next_one(bench: ProcessBench) -> None:
    bench.start("1.1", argv=("sh", "-c", "trap 'echo usr1' USR1; echo ready; while :; do sleep 0.02; done"))
    bench.start("2.1", SLEEPS)
    for run in ("1.1", "2.1"):
        bench.ready(run)
    bench.kill_agent()
    bench.engine.order("1.1", SignalOrder(signal.SIGUSR1))
    bench.engine.order("2.1", LimitOrder(0.1))
    bench.start("3.1", Does(exit_code=3))
    bench.let_pass(0.3)
    bench.start_agent()
    assert bench.end_of("3.1").exit_code == 3
    assert bench.end_of("2.1").stopped_by == "timeout"
    bench.wait(lambda: "usr1" in bench.output("1.1"), what="the signal")
    bench.engine.order("1.1", StopOrder("cancel", grace_s=0))
    bench.end_of("1.1")
    assert bench.output("1.1").count("usr1") == 1


def test_a_run_that_is_stopped_before_its_node_hears_of_it_never_starts(bench: ProcessBench) -> None:
    bench.start("1.1", Does(exit_code=1))
    bench.end_of("1.1")
    bench.kill_agent()
    known = open_run("2.1")
    ticket = bench.ticket("2.1", argv=("touch", "started"))
    bench.engine.reconcile([replace(known, ticket=ticket)])
    bench.engine.reconcile([open_run("2.1", order=StopOrder("cancel"))])
    bench.start_agent()
    assert isinstance(bench.until("2.1", *ENDS), RunNeverStarted)
    assert not (bench.folder / "started").exists()


def test_no_run_starts_twice_however_often_the_agent_is_killed(bench: ProcessBench) -> None:
    source = random.Random(7)
    runs = [f"{job}.1" for job in range(1, 61)]
    for round_ in range(6):
        for run in runs[round_ * 10 : round_ * 10 + 10]:
            code = int(run.partition(".")[0])
            bench.start(run, argv=("sh", "-c", f"echo {run} >> starts; sleep 0.{code % 5}; exit {code}"))
        bench.let_pass(source.uniform(0, 0.4))
        bench.kill_agent()
        bench.let_pass(source.uniform(0, 0.1))
        bench.start_agent()
    ends = {run: bench.until(run, *ENDS) for run in runs}
    bench.let_pass(0.5)
    starts = Counter((bench.folder / "starts").read_text().split())
    for run, end in ends.items():
        assert len([event for event in bench.of(run) if isinstance(event, ENDS)]) == 1
        if isinstance(end, RunNeverStarted):
            assert starts[run] == 0
        else:
            assert isinstance(end, RunEnded), end
            assert (starts[run], end.exit_code) == (1, int(run.partition(".")[0]))
    assert len([end for end in ends.values() if isinstance(end, RunEnded)]) > 20


def test_a_restarted_head_gets_what_it_missed(bench: ProcessBench) -> None:
    bench.start("1.1", Does(exit_code=7))
    bench.start("2.1", SLEEPS)
    bench.end_of("1.1")
    first = bench.ready("2.1")
    bench.restart()
    bench.seen.clear()
    bench.engine.adopt([open_run("1.1"), open_run("2.1", first)])
    assert bench.end_of("1.1").exit_code == 7
    assert bench.until("2.1", RunStarted) == first


def test_two_agents_never_serve_the_same_spool(bench: ProcessBench) -> None:
    bench.start("1.1")
    bench.end_of("1.1")
    with pytest.raises(GpuschedError, match="another agent of this node is alive"):
        AgentJournal(f"{bench.spool}.agent", 0)


# --- who may give orders -----------------------------------------------------------------------------------


def agent_on(folder: Path) -> NodeAgent:
    return NodeAgent(
        lambda: LocalEngine(folder / "spool", boot_id=BOOT, clock=WallClock()),
        AgentJournal(str(folder / "spool.agent"), int(time.time() * 1000)),
        boot_id=BOOT,
        clock=WallClock(),
        order_mark=lambda run: 0,
    )


def test_an_old_head_is_refused_also_by_a_restarted_agent(tmp_path: Path) -> None:
    for session in (7, 6):
        # An agent each.
        agent = agent_on(tmp_path)
        wire = Wire()
        head = RemoteEngine(wire, session=session, clock=WallClock(), node="n2")
        wire.arrived.append(agent.sync(wire.up[-1]))
        head.events()
        agent.close()
        head.close()
    assert head.link.is_refused
    assert head.link.why == ("n2: another head has taken over this node: its session 7 is newer than yours, 6")


def other_version(frame: bytes) -> bytes:
    line, _, rest = frame.partition(b"\n")
    words = line.split(b" ")
    return b" ".join([words[0], b"99", b"9.9.9", *words[3:]]) + b"\n" + rest


def test_another_wire_version_is_refused_by_both_with_both_versions(tmp_path: Path) -> None:
    agent = agent_on(tmp_path)
    reply = agent.sync(other_version(pack(SyncRequest(1, 1))))
    sentence = (
        f"the head runs gpusched 9.9.9 (wire version 99), this is gpusched {__version__} "
        f"(wire version {WIRE_VERSION}); install the same version on both"
    )
    assert sentence.encode() in reply
    wire = Wire()
    head = RemoteEngine(wire, session=1, clock=WallClock(), node="n2")
    wire.arrived.append(other_version(reply))
    head.events()
    assert head.link.is_refused
    assert head.link.why == sentence.replace("the head", "n2")
    # The agent that is started next may be an upgraded one; until it answers, the reason stays.
    assert wire.hung_up == [head.link.why]
    head.events()
    assert head.link.is_refused
    head.close()
    agent.close()


def other_messages(frame: bytes) -> bytes:
    return frame.replace(f"+{fields_mark()} ".encode(), b"+00c0ffee ", 1)


def test_other_code_of_the_same_version_is_refused_by_both(tmp_path: Path) -> None:
    agent = agent_on(tmp_path)
    reply = agent.sync(other_messages(pack(SyncRequest(1, 1))))
    sentence = (
        f"the head runs gpusched {__version__} (wire version {WIRE_VERSION}, messages 00c0ffee), this is gpusched "
        f"{__version__} (wire version {WIRE_VERSION}, messages {fields_mark()}); install the same version on both"
    )
    assert sentence.encode() in reply
    wire = Wire()
    head = RemoteEngine(wire, session=1, clock=WallClock(), node="n2")
    wire.arrived.append(other_messages(reply))
    head.events()
    assert (head.link.is_refused, head.link.why) == (True, sentence.replace("the head", "n2"))
    # From before this was part of the line.
    wire.arrived.append(reply.replace(f"+{fields_mark()} ".encode(), b" ", 1))
    head.events()
    assert "messages unknown), this is" in (head.link.why or "")
    head.close()
    agent.close()


def test_the_fields_of_everything_in_a_message_count() -> None:
    found = message_fields()
    assert {"SyncReply", "Ticket", "RankLaunch", "Interactive", "NodeSettings", "GpuProcess", "RunLost"} <= set(found)
    assert "lost_after_s" in found["Ticket"]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"GET / HTTP/1.1\n\n",
        *(f"gpusched-sync {WIRE_VERSION} 0.1.0+{fields_mark()}{rest}".encode() for rest in (" 5\n{}", "\n")),
    ],
)
def test_what_is_no_frame_is_no_request(frame: bytes) -> None:
    with pytest.raises(ValueError, match="frame"):
        unpack(frame)


def test_a_frame_returns_all_its_parts() -> None:
    assert unpack(pack(SyncRequest(1, 2), [b"{}", b"[1]"])).parts[1:] == [b"{}", b"[1]"]


@pytest.mark.parametrize("kind", [*get_args(Order), *get_args(EngineEvent)])
def test_every_order_and_event_says_on_the_wire_what_it_is(kind: type) -> None:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    assert info.tag is not None


# --- size ----------------------------------------------------------------------------------------------------


def test_a_script_of_many_megabytes_and_bytes_of_no_encoding_arrive(tmp_path: Path) -> None:
    bench = RemoteBench(tmp_path)
    try:
        script = b"#!/bin/sh\n" + b"# filler \xff\n" * 600_000 + b'echo "$ODD"; exit 9\n'
        odd = os.fsdecode(b"caf\xe9")
        bench.engine.reconcile(
            to_start(
                [
                    bench.ticket(f"{job}.1", script=script, argv=(), env={"PATH": "/usr/bin:/bin", "ODD": odd})
                    for job in (1, 2)
                ]
            )
        )
        assert [bench.end_of(f"{job}.1").exit_code for job in (1, 2)] == [9, 9]
        assert (tmp_path / "1.1.out").read_bytes() == b"caf\xe9\n"
    finally:
        bench.close()


def test_a_job_that_is_too_large_for_the_link_is_refused_with_a_sentence(tmp_path: Path) -> None:
    bench = RemoteBench(tmp_path)
    try:
        bench.start("1.1", script=bytes(40 << 20), argv=())
        end = bench.end_of("1.1")
        assert end.launch_error == (
            "its script and environment take 53 MiB; at most 32 MiB can be sent to the node: put the data into a file"
        )
        bench.engine.reconcile((), ["1.1"])
        bench.start("2.1", Does(exit_code=2))
        assert bench.end_of("2.1").exit_code == 2
    finally:
        bench.close()


def test_a_thousand_records_are_adopted_about_as_fast_as_by_the_engine_itself(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    # In a spool that is new, every run would be searched for among all processes.
    LocalEngine(spool, boot_id=BOOT, clock=WallClock()).close()
    runs = [f"{job}.1" for job in range(1, 1001)]
    for run in runs:
        fd = files.take_claim(str(spool), run, 4_000_000, 1, os.getuid(), BOOT)
        assert fd is not None
        files.note_start(fd, files.start_line(4_000_001, 5.0))
        result = {"run": run, "event": "ended", "start_at": 5.0, "end_at": 6.0, "exit_code": 7}
        files.write_result(fd, json.dumps(result, separators=(",", ":")).encode() + b"\n")
        os.close(fd)
    known = [open_run(run) for run in runs]
    engine = LocalEngine(spool, boot_id=BOOT, clock=WallClock())
    began = time.monotonic()
    engine.adopt(known)
    assert len(engine.events()) == 1000
    alone_s = time.monotonic() - began
    engine.close()
    node = AgentThread(spool, Weather())
    head = RemoteEngine(node.connect(), session=1, clock=WallClock())
    try:
        began = time.monotonic()
        head.adopt(known)
        seen = head.events()
        while len(seen) < 1000:
            assert time.monotonic() - began < 60
            head.wait(1.0)
            seen += head.events()
        behind_s = time.monotonic() - began
    finally:
        head.close()
        node.stop()
    assert {event.run for event in seen} == set(runs)
    assert all(isinstance(event, RunEnded) and event.exit_code == 7 for event in seen)
    print(f"adopted in {alone_s:.3f} s by the engine, in {behind_s:.3f} s through an agent")
    # Room for a busy machine: the start of the node's fork server is part of it.
    assert behind_s < 10 * alone_s + 5.0
