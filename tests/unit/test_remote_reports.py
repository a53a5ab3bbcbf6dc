"""What a node reports, what the head makes of it, and what holds up whom when the engine there fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from engine_bench import ManualClock, SimulatedBench, to_start
from remote_world import Wire

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.engine.remote.journal import AgentJournal
from gpusched.engine.remote.messages import NodeReport
from gpusched.engine.remote.node_agent import NodeAgent, NodeSources
from gpusched.engine.remote.remote_engine import LinkPace, RemoteEngine
from gpusched.model.cluster import GpuProcess, GpuReading, GpuSample, HostSample, Isolation, Processor, Xid
from gpusched.model.execution import EngineEvent, OpenRun, Order, RunEnded, RunStarted, SignalOrder, StopOrder, Ticket
from gpusched.model.mig import MigLayout, MigOrder, layout_of


class Gpus:
    """Readings that are ready when the test says so."""

    def __init__(self) -> None:
        self.requests = 0
        self.orders: list[tuple[MigOrder, ...]] = []
        self.ready: GpuReading | None = None

    def request(self, orders: Sequence[MigOrder] = ()) -> None:
        self.requests += 1
        self.orders.append(tuple(orders))

    def poll(self) -> GpuReading | None:
        ready, self.ready = self.ready, None
        return ready


class Host:
    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def read(self) -> HostSample:
        return HostSample(self._clock.now(), "n2", 8, 1000, 500)


class FailingEngine(SimulatedEngine):
    """Fails for runs that the test names."""

    broken: set[str]

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        self._check(known.run for known in runs)
        super().reconcile(runs, ended)

    def order(self, run: str, order: Order) -> None:
        self._check([run])
        super().order(run, order)

    def adopt(self, runs: Sequence[OpenRun]) -> None:
        self._check(["adopt"])
        super().adopt(runs)

    def _check(self, runs: Iterable[str]) -> None:
        for run in runs:
            if run in self.broken:
                raise OSError(28, "No space left on device")


class Link:
    """A head and a node with clocks of their own; frames travel when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.here, self.there = ManualClock(), ManualClock()
        self.there.at += 7.5
        self.machine = FailingEngine(self.there, lambda ticket: SimulatedOutcome(runs_s=1e9))
        self.machine.broken = set()
        self.gpus = Gpus()
        isolation, processors = Isolation("fork", why_not="a test"), (Processor(0, 0), Processor(1, 0))
        self.agent = NodeAgent(
            lambda: self.machine,
            AgentJournal(str(folder / "agent"), 1),
            boot_id="simulated",
            clock=self.there,
            order_mark=lambda run: 0,
            sources=NodeSources(Host(self.there), self.gpus, isolation, processors),
        )
        self.wire = Wire()
        self.reports: list[NodeReport] = []
        self.head = RemoteEngine(
            self.wire,
            session=1,
            clock=self.here,
            node="n2",
            on_report=self.reports.append,
            pace=LinkPace(),
            monotonic=self.here.now,
        )
        self.events: list[EngineEvent] = []

    def exchange(self, loses_reply: bool = False) -> None:
        """Some seconds with all the requests and replies that belong to them."""
        for _ in range(6):
            self.pass_by(0.6)
            frames, self.wire.up = self.wire.up, []
            for frame in frames:
                reply = self.agent.sync(frame)
                if not loses_reply:
                    self.wire.arrived.append(reply)
            self.events += self.head.events()

    def pass_by(self, seconds: float) -> None:
        self.here.at += seconds
        self.there.at += seconds
        self.events += self.head.events()

    def close(self) -> None:
        self.head.close()
        self.agent.close()

    def of(self, run: str) -> list[type]:
        return [type(event) for event in self.events if event.run == run]


@pytest.fixture
def link(tmp_path: Path) -> Iterable[Link]:
    made = Link(tmp_path)
    yield made
    made.close()


ticket: Callable[[str], Ticket] = SimulatedBench(Path("/")).ticket


def reading(pid: int, *xids: Xid) -> GpuReading:
    return GpuReading(1.0, "nvml", (GpuSample("GPU-1", 0, "A100", processes=(GpuProcess(pid, 10),), xids=xids),))


def test_a_report_says_what_the_node_is_and_does(link: Link) -> None:
    link.exchange()
    report = link.reports[-1]
    assert report.host is not None
    assert (report.host.name, report.processors, report.isolation) == (
        "n2",
        (Processor(0, 0), Processor(1, 0)),
        Isolation("fork", why_not="a test"),
    )
    assert report == link.head.report


def test_the_difference_of_the_clocks_is_measured(link: Link) -> None:
    link.exchange()
    assert link.head.link.clock_skew_s == pytest.approx(7.5, abs=0.7)


def test_owners_checkpoints_and_cpu_times_come_from_the_report(link: Link) -> None:
    link.head.reconcile(to_start([ticket("1.1")]))
    link.exchange()
    (started,) = (event for event in link.events if isinstance(event, RunStarted))
    link.machine.saved_at["1.1"] = 5.0
    link.machine.cpu_s_of["1.1"] = 3.5
    link.gpus.ready = reading(started.pid)
    assert link.head.cpu_seconds(["1.1", "9.1"]) == {}
    link.exchange()
    assert link.head.cpu_seconds(["1.1", "9.1"]) == {"1.1": 3.5}
    assert link.head.checkpoints() == {"1.1": 5.0}
    assert link.head.owners([started.pid, 1]) == {started.pid: "1.1"}
    link.head.order("1.1", StopOrder("cancel"))
    link.exchange()
    assert (link.head.checkpoints(), link.head.owners([started.pid])) == ({}, {})


def test_a_reading_is_taken_on_request_only_and_comes_once(link: Link) -> None:
    link.exchange()
    assert link.gpus.requests == 0
    link.head.request_reading()
    link.exchange()
    assert link.gpus.requests == 1
    link.gpus.ready = reading(7)
    link.exchange()
    link.exchange()
    assert [report.gpus for report in link.reports if report.gpus is not None] == [reading(7)]
    assert link.gpus.requests == 1


def test_orders_for_mig_layouts_come_with_a_request_and_once(link: Link) -> None:
    order = MigOrder(7, "GPU-1", layout_of(["3g.40gb"]), MigLayout(False))
    link.exchange()
    link.head.request_reading([order])
    link.exchange(loses_reply=True)
    link.pass_by(10)
    link.exchange()
    assert link.gpus.orders == [(order,)]
    link.gpus.ready = reading(7)
    link.exchange()
    # Whoever reads next, perhaps a restarted agent, must not be given what has an outcome.
    link.head.request_reading()
    link.exchange()
    assert link.gpus.orders == [(order,), ()]


def test_faults_of_a_lost_reading_come_with_the_next_one(link: Link) -> None:
    link.exchange()
    link.gpus.ready = reading(7, Xid(79, 1.0))
    link.exchange(loses_reply=True)
    link.gpus.ready = reading(7, Xid(48, 2.0))
    link.pass_by(10)
    link.exchange()
    (got,) = (report.gpus for report in link.reports if report.gpus is not None)
    assert [xid.number for xid in got.gpus[0].xids] == [79, 48]


def test_a_silent_node_is_unreachable_since_it_was_first_asked_in_vain(link: Link) -> None:
    link.head.reconcile(to_start([ticket("1.1")]))
    link.exchange()
    last = link.head.link.last_reply_at
    link.exchange(loses_reply=True)
    link.exchange(loses_reply=True)
    since = link.head.link.unreachable_since
    assert since is not None
    assert last is not None
    assert last <= since <= last + 2.0
    assert link.of("1.1") == [RunStarted]
    link.pass_by(10)
    link.exchange()
    assert link.head.link.unreachable_since is None


def test_a_run_that_the_engine_cannot_start_holds_up_no_other(link: Link) -> None:
    link.machine.broken = {"2.1"}
    link.head.reconcile(to_start([ticket(f"{job}.1") for job in (1, 2, 3)]))
    link.head.order("2.1", SignalOrder(10))
    link.head.order("3.1", SignalOrder(12))
    link.exchange()
    assert (link.of("1.1"), link.of("2.1"), link.of("3.1")) == ([RunStarted], [], [RunStarted])
    assert link.machine.signals == [("3.1", SignalOrder(12))]
    assert link.head.link.trouble == "run 2.1 cannot be brought in line: OSError: [Errno 28] No space left on device"
    link.machine.broken = set()
    link.exchange()
    assert link.of("2.1") == [RunStarted]
    assert link.machine.signals[1:] == [("2.1", SignalOrder(10))]
    assert link.head.link.trouble is None


def test_runs_that_cannot_be_adopted_are_adopted_later(link: Link) -> None:
    link.exchange()
    link.machine.broken = {"adopt"}
    link.head.adopt([OpenRun("1.1", "another", None, None)])
    link.head.reconcile(to_start([ticket("2.1")]))
    link.exchange()
    assert (link.of("1.1"), link.of("2.1")) == ([], [])
    assert "cannot be adopted" in str(link.head.link.trouble)
    link.machine.broken = set()
    link.pass_by(10)
    link.exchange()
    assert len(link.of("1.1")) == 1
    assert link.of("2.1") == [RunStarted]
    assert not [event for event in link.events if isinstance(event, RunEnded)]
