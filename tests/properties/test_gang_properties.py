"""Whatever the order in which the ranks of a gang report, the daemon sees one run that starts and ends once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.engine.cluster import JOB_ENDED, NODE_FAIL, ClusterEngine
from gpusched.model.execution import (
    EngineEvent,
    OpenRun,
    Order,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunStarted,
    RunStopping,
    StopOrder,
    Ticket,
)
from gpusched.model.job import Launch

ENDS = (RunEnded, RunLost, RunNeverStarted)
NODES = ("n1", "n2", "n3")


@dataclass
class Scripted:
    """An engine that reports what a test says."""

    news: list[EngineEvent] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    adopted: list[OpenRun] = field(default_factory=list)
    asked: list[OpenRun] = field(default_factory=list)
    """Runs to be brought in line."""

    def adopt(self, runs: Sequence[OpenRun]) -> None:
        self.adopted = list(runs)

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        self.forgotten += ended
        self.asked += runs

    def order(self, run: str, order: Order) -> None:
        self.orders.append(order)

    def events(self) -> list[EngineEvent]:
        found, self.news = self.news, []
        return found

    def owners(self, pids: Iterable[int]) -> Mapping[int, str]:
        return {}

    def checkpoints(self) -> Mapping[str, float]:
        return {}

    def cpu_seconds(self, runs: Iterable[str]) -> Mapping[str, float]:
        return {}

    def set_waker(self, wake: Any) -> None:
        """Nobody sleeps."""

    def close(self) -> None:
        """Nothing is open."""


def gang(engines: Mapping[str, Scripted], *, holds: bool = False) -> ClusterEngine:
    engine = ClusterEngine(engines, "n1")
    engine.adopt([OpenRun("7.1", "b1", None, None, node="n1", peers=(("n2", "b2"), ("n3", "b3")), holds=holds)])
    return engine


def started(node: str) -> RunStarted:
    number = NODES.index(node) + 1
    return RunStarted("7.1", 100.0 + number, number, number, 10 + number)


@st.composite
def ends(draw: st.DrawFn, at: float) -> EngineEvent:
    kind = draw(st.sampled_from(["exit", "signal", "lost", "never", "launch", "cancel", "preempt"]))
    if kind == "lost":
        return RunLost("7.1", at, "gone")
    if kind == "never":
        return RunNeverStarted("7.1", at, "nobody took it")
    if kind == "launch":
        return RunEnded("7.1", None, at, launch_error="no such command")
    if kind == "signal":
        return RunEnded("7.1", 100.0, at, signal=9)
    code = draw(st.integers(0, 3))
    stopped_by = None if kind == "exit" else kind
    is_done = kind == "preempt" and code == 0 and draw(st.booleans())
    return RunEnded("7.1", 100.0, at, exit_code=code, stopped_by=stopped_by, is_done=is_done)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, EngineEvent]]:
    """What the ranks report, each in its order, merged in any way, some of it twice."""
    own = {}
    for number, node in enumerate(NODES):
        end = draw(ends(200.0 + draw(st.integers(0, 50)) + number / 10))
        first: list[EngineEvent] = [] if isinstance(end, RunNeverStarted) or draw(st.booleans()) else [started(node)]
        stopping: list[EngineEvent] = [RunStopping("7.1", 150.0, "cancel")] if draw(st.booleans()) else []
        repeats = [one for one in first if draw(st.booleans())]
        own[node] = [*first, *repeats, *stopping, end, *([end] if draw(st.booleans()) else [])]
    merged = []
    while any(own.values()):
        node = draw(st.sampled_from([name for name in NODES if own[name]]))
        merged.append((node, own[node].pop(0)))
    return merged


@given(histories(), st.booleans())
def test_a_gang_starts_and_ends_once(history: list[tuple[str, EngineEvent]], is_batch: bool) -> None:
    engines = {name: Scripted() for name in NODES}
    engine = gang(engines)
    told: list[EngineEvent] = []
    for node, event in history:
        engines[node].news.append(event)
        if not is_batch:
            told += engine.events()
    told += engine.events()
    assert sum(isinstance(event, ENDS) for event in told) == 1
    assert isinstance(told[-1], ENDS)
    assert sum(isinstance(event, RunStopping) for event in told) <= 1
    last = {node: event for node, event in history if isinstance(event, ENDS)}
    end = told[-1]
    if any(isinstance(one, RunLost) for one in last.values()):
        assert isinstance(end, RunLost)
    elif all(isinstance(one, RunEnded) and one.exit_code == 0 and one.stopped_by is None for one in last.values()):
        assert isinstance(end, RunEnded)
        assert end.exit_code == 0
        assert end.end_at == max(one.end_at for one in last.values() if isinstance(one, RunEnded))
    elif isinstance(end, RunEnded):
        assert (end.exit_code, end.launch_error, end.stopped_by) != (0, None, None)
        # It is done if one of its ranks says so and none has failed.
        ranks = [one for one in last.values() if isinstance(one, RunEnded)]
        assert end.is_done is (any(one.is_done for one in ranks) and all(one.exit_code == 0 for one in ranks))
    else:
        assert isinstance(end, RunLost) or not any(getattr(one, "start_at", None) for one in last.values())


@given(histories())
def test_a_failing_rank_stops_all_that_have_not_ended(history: list[tuple[str, EngineEvent]]) -> None:
    engines = {name: Scripted() for name in NODES}
    engine = gang(engines)
    ended: set[str] = set()
    failed = False
    for node, event in history:
        engines[node].news.append(event)
        engine.events()
        if isinstance(event, ENDS):
            ended.add(node)
            is_fine = isinstance(event, RunEnded) and event.exit_code == 0 and event.stopped_by is None
            failed |= not is_fine
            for name in set(NODES) - ended:
                assert bool(engines[name].orders) is failed
                assert all(isinstance(order, StopOrder) and order.why == "gang" for order in engines[name].orders)


@given(histories(), st.booleans())
def test_a_run_that_holds_nodes_ends_once_and_as_its_first_node_does(
    history: list[tuple[str, EngineEvent]], is_batch: bool
) -> None:
    engines = {name: Scripted() for name in NODES}
    engine = gang(engines, holds=True)
    told: list[EngineEvent] = []
    ended: set[str] = set()
    for node, event in history:
        engines[node].news.append(event)
        ended |= {node} if isinstance(event, ENDS) else set()
        if not is_batch:
            told += engine.events()
            for name in {*NODES[1:]} - ended:
                assert (JOB_ENDED in engines[name].orders) is ("n1" in ended)
            assert JOB_ENDED not in engines["n1"].orders
            if ended and "n1" not in ended:
                assert set(engines["n1"].orders) == {NODE_FAIL}, "a holder does not end by itself"
    told += engine.events()
    (end,) = [event for event in told if isinstance(event, ENDS)]
    assert told[-1] is end
    first = next(event for node, event in history if node == "n1" and isinstance(event, ENDS))
    assert type(end) is type(first)
    if isinstance(end, RunEnded) and isinstance(first, RunEnded):
        for name in ("start_at", "exit_code", "signal", "stopped_by", "launch_error", "is_done"):
            assert getattr(end, name) == getattr(first, name)


@pytest.mark.parametrize(
    ("order", "holder", "code", "expected"),
    [
        ("preempt", "preempt", 1, "preempt"),
        ("cancel", "cancel", 1, "cancel"),
        ("preempt", "preempt", 0, None),
        ("preempt", JOB_ENDED.why, 1, None),
        # The holder was told by somebody else.
        (None, JOB_ENDED.why, 1, None),
    ],
)
def test_a_command_that_fails_without_a_holder_that_was_stopped_has_been_stopped(
    order: str | None, holder: str, code: int, expected: str | None
) -> None:
    engines = {name: Scripted() for name in NODES}
    engine = gang(engines, holds=True)
    for node in NODES:
        engines[node].news.append(started(node))
    engine.events()
    if order is not None:
        engine.order("7.1", StopOrder(order))
    engines["n2"].news.append(RunEnded("7.1", 100.0, 150.0, signal=15, stopped_by=holder))
    if holder == JOB_ENDED.why:
        # It ends after the command.
        held, engines["n2"].news = engines["n2"].news, []
    engines["n1"].news.append(RunEnded("7.1", 100.0, 151.0, exit_code=code, cpu_s=2.0))
    told = engine.events()
    if holder == JOB_ENDED.why:
        engines["n2"].news += held
    engines["n3"].news.append(RunEnded("7.1", 100.0, 152.0, signal=15, stopped_by=JOB_ENDED.why))
    told += engine.events()
    (end,) = [event for event in told if isinstance(event, RunEnded)]
    assert (end.exit_code, end.stopped_by, end.cpu_s) == (code, expected, 2.0)


@given(histories())
def test_a_command_that_is_ended_for_a_holder_has_the_verdict_of_the_holder(
    history: list[tuple[str, EngineEvent]],
) -> None:
    engines = {name: Scripted() for name in NODES}
    engine = gang(engines, holds=True)
    for node, event in history:
        if node == "n1" and isinstance(event, ENDS):
            continue
        engines[node].news.append(event)
        engine.events()
    engines["n1"].news.append(RunEnded("7.1", 100.0, 300.0, signal=15, stopped_by=NODE_FAIL.why))
    (end,) = [event for event in engine.events() if isinstance(event, ENDS)]
    others = [event for node, event in history if node != "n1" and isinstance(event, ENDS)]
    if any(isinstance(one, RunLost | RunNeverStarted) for one in others):
        assert isinstance(end, RunLost), "what the command did without it was for nothing"
    elif not all(isinstance(one, RunEnded) and (one.exit_code, one.stopped_by) == (0, None) for one in others):
        assert isinstance(end, RunEnded)
        assert end.failed_on in ("n2", "n3")


def ticket(node: str, **parts: Any) -> Ticket:
    times = {"time_limit_s": None, "grace_s": 1.0, "leftover_grace_s": 1.0}
    files = {"stdout_path": "o", "stderr_path": None, "append": False}
    launch = Launch(argv=("true",), script_sha=None, script_name=None, env_sha="", work_dir="/")
    return Ticket("7.1", 0, "root", launch, None, {}, **files, **times, node=node, **parts)


@given(histories())
def test_the_others_start_once_the_first_has_found_its_port_free(history: list[tuple[str, EngineEvent]]) -> None:
    engines = {name: Scripted() for name in NODES}
    engine = ClusterEngine(engines, "n1")
    engine.adopt([])
    whole = ticket("n1", master_port=20_000, peers=(ticket("n2"), ticket("n3")))
    engine.reconcile([OpenRun("7.1", "b1", None, None, ticket=whole, node="n1", peers=(("n2", "b"), ("n3", "b")))])
    assert [len(engines[name].asked) for name in NODES] == [1, 0, 0]
    told: list[EngineEvent] = []
    for node, event in [one for one in history if one[0] == "n1"]:
        engines[node].news.append(event)
        told += engine.events()
    first = [event for node, event in history if node == "n1"]
    has_started = isinstance(first[0], RunStarted)
    assert [len(engines[name].asked) for name in NODES] == [1, has_started, has_started]
    # Without the others its end is that of the gang; otherwise theirs are awaited.
    ends = [event for event in told if isinstance(event, ENDS)]
    assert [type(event) for event in ends] == ([] if has_started else [type(first[-1])])


def test_every_node_adopts_and_forgets_its_rank() -> None:
    engines = {name: Scripted() for name in NODES}
    engine = gang(engines)
    boots = {name: [(one.run, one.boot_id, one.peers) for one in found.adopted] for name, found in engines.items()}
    assert boots == {name: [("7.1", f"b{number}", ())] for number, name in enumerate(NODES, 1)}
    engine.reconcile((), ["7.1"])
    assert {name: found.forgotten for name, found in engines.items()} == {name: ["7.1"] for name in NODES}


def test_runs_of_a_node_that_is_not_in_the_cluster_stay_as_they_are() -> None:
    here = Scripted()
    engine = ClusterEngine({"n1": here}, "n1")
    engine.adopt([OpenRun("7.1", "b2", None, None, node="n2"), OpenRun("8.1", "b1", None, None, node="n1")])
    assert [one.run for one in here.adopted] == ["8.1"]
    engine.order("7.1", StopOrder("cancel"))
    assert (engine.events(), here.orders) == ([], [])
