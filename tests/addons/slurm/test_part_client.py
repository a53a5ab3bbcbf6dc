"""srun's side of the parts of a step on other nodes, over connections that say what a test wants."""

from __future__ import annotations

import _thread
import json
import os
import select
from typing import Any

import pytest

from gpusched.addons.slurm.part_client import LOST_CODE, NodePart, Parts
from gpusched.addons.slurm.part_protocol import (
    CLOSED,
    ENDED,
    EOF,
    FAILED,
    GO,
    INPUT,
    INPUT_WINDOW,
    LAUNCH,
    NOTE,
    READY,
    SIGNAL,
    TAKEN,
    USAGE,
    output_frame,
)
from gpusched.addons.slurm.step_tasks import NodeShare
from gpusched.addons.slurm.streams import Pump
from gpusched.cli.run_connection import BACK, LOST, OVER, RunEnding
from gpusched.engine.attach_protocol import ERR, EXIT, OUT, WINDOW, frame, take_frames


class Connection:
    """To a part that a test plays."""

    def __init__(self) -> None:
        self.credit = WINDOW
        self.is_open = True
        self.end = RunEnding()
        self.wants_write = False
        self.is_there = True
        self.sent = bytearray()
        self.acknowledged = 0
        self.says: list[tuple[int, bytes]] = []

    def fileno(self) -> int:
        return -1

    def pause_ms(self) -> float | None:
        return None

    def on_ready(self, events: int) -> list[tuple[int, bytes]]:
        found, self.says = self.says, []
        return found

    def send_input(self, content: bytes) -> None:
        assert len(content) <= self.credit
        self.credit -= len(content)
        self.sent += content

    def acknowledge(self, stream: int, count: int) -> None:
        self.acknowledged += count

    def leave(self) -> None:
        self.is_open = False

    def close(self) -> None:
        self.is_open = False

    def say(self, kind: int, content: bytes = b"") -> None:
        self.says.append((OUT, frame(kind, content)))

    def kinds(self) -> list[int]:
        return [kind for kind, _ in take_frames(bytearray(self.sent))]


class Bench:
    """A step with tasks 1 and 2 on n2, and 3 on n3; srun's outputs are pipes."""

    def __init__(self, label: bytes | None = None) -> None:
        self.pump = Pump()
        self.parts = Parts(self.pump, _thread.get_ident())
        self.out, self.into = os.pipe()
        os.set_blocking(self.out, False)
        self.connections: list[Connection] = []
        self.nodes: list[NodePart] = []
        for nodeid, (node, tasks) in enumerate((("n2", [1, 2]), ("n3", [3])), start=1):
            facts: dict[str, Any] = {"nodeid": nodeid, "rank": nodeid, "gpus": [], "address": node}
            connection = Connection()
            part = self.parts.add(NodeShare({"node": node, "tasks": tasks, **facts}), connection, {"argv": ["true"]})
            for task in tasks:
                self.parts.add_target(part, task, 1, self.into, label)
                self.parts.add_target(part, task, 2, self.into, label)
            self.connections.append(connection)
            self.nodes.append(part)

    def tick(self) -> list[tuple[str, str, Any]]:
        """Let it do what there is to do; returns what it tells: what, where, facts."""
        self.parts.register(select.poll())
        self.parts.on_ready({})
        return [(what, part.node, fact) for what, part, fact in self.parts.take_events()]

    def start(self) -> None:
        for connection in self.connections:
            connection.say(READY)
        assert self.tick() == [("go", "n2", None)]

    def written(self) -> bytes:
        self.pump.outlet(self.into).write()
        try:
            return os.read(self.out, 1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        for fd in (self.out, self.into):
            os.close(fd)


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.close()


def test_no_node_starts_before_all_are_ready(bench: Bench) -> None:
    bench.connections[0].say(READY)
    assert bench.tick() == []
    assert [connection.kinds() for connection in bench.connections] == [[LAUNCH, LAUNCH]] * 2
    bench.connections[1].say(READY)
    assert bench.tick() == [("go", "n2", None)]
    assert [connection.kinds() for connection in bench.connections] == [[LAUNCH, LAUNCH, GO]] * 2


@pytest.mark.parametrize(
    ("kind", "content", "sentence", "why"),
    [
        (OVER, b"node n3 does not answer", "", "node n3 does not answer"),
        (OVER, b"", "", "the job ended there"),
        (EXIT, b"", "no such folder", "no such folder"),
        (OUT, frame(FAILED, b"Could not open stdout file x"), "", "Could not open stdout file x"),
        (OUT, b"\xff" * 9, "", "it sent an invalid message: a frame of 4294967295 bytes"),
        (OUT, output_frame(9, 1, b"x"), "", "it sent an invalid message: (9, 1)"),
    ],
)
def test_a_node_that_cannot_start_its_tasks_is_named_with_the_reason(
    bench: Bench, kind: int, content: bytes, sentence: str, why: str
) -> None:
    bench.connections[0].say(READY)
    bench.connections[1].end.sentence = sentence
    bench.connections[1].says.append((kind, content))
    assert bench.tick() == [("failed", "n3", why)]
    assert GO not in bench.connections[0].kinds()


def test_a_node_that_never_gets_ready_is_given_up(bench: Bench) -> None:
    bench.connections[0].say(READY)
    bench.tick()
    bench.parts._give_up_at = 0.0
    assert bench.tick() == [("failed", "n3", "no answer within 60 s")]


def test_ends_notes_and_usage_are_told(bench: Bench) -> None:
    bench.start()
    assert bench.parts.running == [1, 2, 3]
    bench.connections[0].say(NOTE, b"slurmstepd: error: something")
    bench.connections[0].say(ENDED, b"[[1, 0], [2, -9]]")
    bench.connections[1].says += [(LOST, b"lost n3"), (BACK, b"n3 is back")]
    assert bench.tick() == [
        ("note", "n2", "slurmstepd: error: something"),
        ("ended", "n2", [(1, 0), (2, -9)]),
        ("note", "n3", "srun: lost n3"),
        ("note", "n3", "srun: n3 is back"),
    ]
    assert bench.parts.running == [3]
    bench.connections[0].say(USAGE, json.dumps([1.5, 0.5, [100, 200]]).encode())
    bench.connections[1].say(ENDED, b"[[3, 0]]")
    bench.connections[1].say(USAGE, json.dumps([1.0, 0.0, [300]]).encode())
    bench.tick()
    assert (bench.parts.user_cpu_s, bench.parts.system_cpu_s, bench.parts.peaks_kib) == (2.5, 0.5, [100, 200, 300])
    assert not bench.parts.is_open
    assert not any(connection.is_open for connection in bench.connections)


@pytest.mark.parametrize(("kind", "is_known", "what"), [(OVER, False, "lost"), (EXIT, True, "killed")])
def test_tasks_of_a_part_that_is_gone_are_told(bench: Bench, kind: int, is_known: bool, what: str) -> None:
    bench.start()
    bench.connections[0].say(ENDED, b"[[1, 0]]")
    bench.tick()
    bench.connections[0].end.is_known = is_known
    bench.connections[0].says.append((kind, b""))
    assert bench.tick() == [(what, "n2", [2])]
    assert bench.parts.are_lost is (what == "lost")
    assert bench.parts.running == [3]
    assert bench.parts.is_open


class Ending:
    """A step that has just seen that no task of it runs, and what it is told after that."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.is_cut_short = False
        self.said: list[str] = []
        self.ended: list[tuple[str, list[tuple[int, int]]]] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def take_ended(self, node: str, ended: list[tuple[int, int]]) -> None:
        self.ended.append((node, ended))


def test_ends_that_come_while_a_step_looks_whether_anything_runs_are_told_afterwards(bench: Bench) -> None:
    bench.start()
    step = Ending()
    bench.parts.report(step)  # type: ignore[arg-type]
    bench.connections[0].say(ENDED, b"[[1, 0], [2, -9]]")
    bench.connections[1].says.append((OVER, b""))
    bench.parts.on_ready({})
    assert (bench.parts.running, step.ended) == ([], [])
    bench.parts.report_rest(step)  # type: ignore[arg-type]
    assert step.ended == [("n2", [(1, 0), (2, -9)]), ("n3", [(3, LOST_CODE)])]
    assert (step.said, step.is_cut_short) == (["error: Node failure on n3"], False)


def test_who_waits_for_the_start_leaves_the_ends_that_came_with_it(bench: Bench) -> None:
    for connection in bench.connections:
        connection.say(READY)
    bench.parts.on_ready({})
    bench.connections[0].say(ENDED, b"[[1, 0], [2, 0]]")
    bench.parts.on_ready({})
    assert next(what for what, *_ in bench.parts.take_events()) == "go"
    step = Ending()
    bench.parts.report(step)  # type: ignore[arg-type]
    assert step.ended == [("n2", [(1, 0), (2, 0)])]


def test_a_part_that_is_lost_after_its_last_end_may_have_written_more(bench: Bench) -> None:
    bench.start()
    step = Ending()
    bench.connections[1].say(ENDED, b"[[3, 0]]")
    bench.connections[1].says.append((OVER, b""))
    bench.parts.on_ready({})
    bench.parts.report_rest(step)  # type: ignore[arg-type]
    assert [(node, ended) for node, ended in step.ended if ended] == [("n3", [(3, 0)])]
    assert (step.said, step.is_cut_short) == (["error: Node failure on n3: output of its tasks may be missing"], True)


def test_a_part_whose_tasks_have_all_ended_is_not_lost_without_its_last_word(bench: Bench) -> None:
    bench.start()
    bench.connections[0].say(ENDED, b"[[1, 0], [2, 0]]")
    bench.tick()
    bench.connections[0].says.append((OVER, b""))
    assert bench.tick() == [("lost", "n2", [])]
    assert not bench.parts.are_lost


@pytest.mark.parametrize("is_there", [True, False])
def test_who_leaves_a_node_out_of_reach_has_lost_it(bench: Bench, is_there: bool) -> None:
    bench.start()
    bench.connections[0].is_there = is_there
    bench.parts.leave()
    bench.tick()
    assert bench.parts.are_lost is not is_there


def test_signals_go_to_all_nodes_and_leaving_ends_all_connections(bench: Bench) -> None:
    bench.start()
    bench.parts.signal(15)
    bench.tick()
    for connection in bench.connections:
        assert take_frames(bytearray(connection.sent))[-1] == (SIGNAL, b"15")
    bench.parts.leave()
    bench.tick()
    assert not any(connection.is_open for connection in bench.connections)
    assert not bench.parts.is_open


def test_input_keeps_to_the_window_of_each_node(bench: Bench) -> None:
    bench.start()
    bench.parts.give(b"x" * (INPUT_WINDOW + 10))
    bench.parts.give(b"")
    for connection in bench.connections:
        connection.credit = 1 << 30
    bench.tick()
    frames = take_frames(bytearray(bench.connections[0].sent))
    assert sum(len(content) for kind, content in frames if kind == INPUT) == INPUT_WINDOW
    assert EOF not in bench.connections[0].kinds()
    bench.connections[0].say(TAKEN, b"10")
    bench.tick()
    frames = take_frames(bytearray(bench.connections[0].sent))
    assert sum(len(content) for kind, content in frames if kind == INPUT) == INPUT_WINDOW + 10
    assert frames[-1][0] == EOF
    assert EOF not in bench.connections[1].kinds()


def test_no_input_is_read_for_a_node_that_lags_or_for_nobody(bench: Bench) -> None:
    bench.start()
    assert bench.parts.wants_input
    bench.parts.give(b"x" * (2 << 20))
    assert not bench.parts.wants_input
    bench.connections[0].say(CLOSED)
    bench.tick()
    assert not bench.parts.wants_input, "n3 still lags"
    bench.connections[1].say(CLOSED)
    bench.tick()
    assert not bench.parts.wants_input, "and now nobody reads"


def test_output_is_acknowledged_only_as_it_is_written(bench: Bench) -> None:
    bench.start()
    bench.tick()
    acknowledged = bench.connections[0].acknowledged
    for _ in range(8):
        bench.connections[0].says.append((OUT, output_frame(1, 1, b"y" * 65536)))
    bench.tick()
    bench.tick()
    assert bench.connections[0].acknowledged == acknowledged
    got = b""
    while piece := bench.written():
        got += piece
    bench.tick()
    assert got == b"y" * (8 * 65536)
    assert bench.connections[0].acknowledged > acknowledged


def test_lines_of_each_task_have_its_label() -> None:
    bench = Bench(b"7: ")
    bench.start()
    bench.connections[0].says.append((OUT, output_frame(1, 1, b"one\ntw") + output_frame(2, 1, b"other\n")))
    bench.connections[0].says.append((OUT, output_frame(1, 1, b"o") + frame(USAGE, b"[0, 0, []]")))
    bench.tick()
    assert sorted(bench.written().splitlines()) == [b"7: one", b"7: other", b"7: two"]
    bench.close()


def test_what_a_part_says_about_itself_is_shown(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    bench.start()
    bench.connections[0].says.append((ERR, b"Traceback\n"))
    bench.tick()
    bench.pump.outlet(2).write()
    assert capfd.readouterr().err == "Traceback\n"
