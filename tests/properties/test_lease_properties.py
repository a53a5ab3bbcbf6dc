"""A run with a lease is started elsewhere only when it has ended on its node, whatever happens to clocks and frames.

The head, the network and the node are those of `remote_world`; the supervisors there end runs as `ContactWatch` does.
Time is real time. The wall clock jumps, the node's clock runs faster or slower, and counts from another instant after
each boot.
"""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest
from engine_bench import SimulatedBench
from hypothesis import given
from hypothesis import strategies as st
from remote_world import Lab

from gpusched.engine.contact import lost_after_contact_s
from gpusched.engine.remote.remote_engine import LinkPace
from gpusched.model.execution import RunLost, RunNeverStarted, Ticket

LEASE_S = 60.0
STEP_S = 0.5
INDICES = range(31)
ACTIONS: dict[str, tuple[int, list[list[object]]]] = {
    "start": (3, [[1, 2]]),
    "collect": (3, []),
    "forget": (1, []),
    "finish_one": (1, [[*INDICES]]),
    "carry": (20, [[*INDICES], ["deliver", "deliver", "drop", "copy"]]),
    "exchange": (8, []),
    "chat": (3, [[3, 30]]),
    "push": (2, []),
    "wait": (10, [[0.5, 3.0, 20.0, 61.0, 80.0]]),
    "fuse": (3, [[*range(1, 16)]]),
    "kill": (1, []),
    "revive": (6, []),
    "restart_head": (1, [[False, True]]),
    "reboot": (1, [[False]]),
    "step_clock": (1, [[-1e6, -30.0, 30.0, 1e6]]),
    "be_slow": (2, [[False, True]]),
    "claim": (5, [[*INDICES]]),
    "start_again": (6, []),
}
Action = tuple[object, ...]
NAMES = [name for name, (weight, _) in ACTIONS.items() for _ in range(weight)]


class LeaseLab(Lab):
    """Every run has the lease.

    Args: rate: seconds of the node's clock per second.
    """

    def __init__(self, folder: Path, rate: float) -> None:
        self.real = 1000.0
        self._stepped_s = 0.0
        super().__init__(folder, lambda run: ticket(run), lambda: self.real)
        self._booted_at = 0.0
        machine = self.machine
        machine.boottime_s = lambda: (self.real - self._booted_at) * rate
        machine.may_claim = self.has_lease
        self.again: set[str] = set()
        """Runs that count as lost: the next one may run elsewhere."""

    def has_lease(self, asked: float = float("inf")) -> bool:
        return self.machine.boottime_s() < min(asked, self.machine.contact_at) + LEASE_S

    def pass_time(self, seconds: float) -> None:
        """Also of supervisors, which end their runs in time."""
        until = self.real + seconds
        while self.real < until:
            self.real = min(until, self.real + STEP_S)
            self.clock.at = max(1.0, self.real + self._stepped_s)
            if not self.has_lease():
                for run in self.machine.live():
                    self.machine.finish(run, "head_lost")
            self.check()

    def check(self) -> None:
        twice = self.again & set(self.machine.live())
        assert not twice, f"alive here, and perhaps started elsewhere: {twice}"

    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    def step_clock(self, seconds: float) -> None:
        self._stepped_s = max(-self.real + 1.0, self._stepped_s + seconds)

    def be_slow(self, is_slow: bool) -> None:
        self.machine.is_slow = is_slow

    def claim(self, index: int) -> None:
        if self.machine.unclaimed:
            self.machine.claim([*self.machine.unclaimed][index % len(self.machine.unclaimed)])

    def exchange(self) -> None:
        self.node.revive()
        self.pass_time(LinkPace().retry_max_s + 1.0)
        self.talk()

    def chat(self, count: int) -> None:
        """Fair weather for a while."""
        for _ in range(count):
            self.pass_time(1.0)
            self.talk()

    def talk(self) -> None:
        self.pump()
        wire = self.head.wire
        frames, wire.up = wire.up, []
        for frame in frames:
            reply = self.node.sync(frame)
            if reply is not None:
                wire.arrived.append(reply)
        self.pump()

    def reboot(self, is_wiped: bool) -> None:
        super().reboot(is_wiped)
        self.pass_time(1.0)
        self._booted_at = self.real
        self.machine.contact_at = float("-inf")

    def start_again(self) -> None:
        """What the daemon does in each tick: runs whose lease has certainly ended count as lost."""
        if self.head.engine.silent_s() < lost_after_contact_s(LEASE_S):
            return
        for run, row in self.table.items():
            if row.end is None:
                row.end, row.is_forsaken = RunLost(run, self.clock.now(), "by lease"), True
                self.head.engine.forsake(run)
                self.again.add(run)
        self.check()

    def pump(self) -> None:
        # Only one head lives at a time; what the last one has sent may still arrive.
        self.head.engine._pump()


def ticket(run: str) -> Ticket:
    return SimulatedBench(Path("/")).ticket(run)


def action_strategy(name: str) -> st.SearchStrategy[Action]:
    return st.tuples(st.just(name), *(st.sampled_from(choices) for choices in ACTIONS[name][1]))


def random_action(source: random.Random) -> Action:
    name = source.choice(NAMES)
    return (name, *(source.choice(choices) for choices in ACTIONS[name][1]))


def play(lab: LeaseLab, action: Action) -> None:
    name, *arguments = action
    if name == "forget":
        lab.head.forget_ended()
    elif name == "fuse":
        lab.node.fuse = int(str(arguments[0]))
    elif name in ("kill", "revive"):
        getattr(lab.node, name)()
    else:
        getattr(lab, str(name))(*arguments)
    lab.pump()
    lab.check()


def tell(actions: list[Action], rate: float) -> dict[str, int]:
    """Play a story; in the end the node is gone for good. Returns: what the story was about, by count."""
    with tempfile.TemporaryDirectory() as folder:
        lab = LeaseLab(Path(folder), rate)
        lab.node.revive()
        try:
            for action in actions:
                play(lab, action)
            lab.collect()
            lab.wait(lost_after_contact_s(LEASE_S) + STEP_S)
            lab.start_again()
            open_runs = [run for run, row in lab.table.items() if row.end is None]
            assert not open_runs, f"its node is gone, and nothing was decided about: {open_runs}"
            assert not lab.machine.live()
            by_lease = [run for run in lab.machine.spool.values() if getattr(run.end, "stopped_by", "") == "head_lost"]
            unstarted = [row for row in lab.table.values() if isinstance(row.end, RunNeverStarted)]
            return {"again": len(lab.again), "by lease": len(by_lease), "unstarted": len(unstarted)}
        finally:
            lab.close()


@given(
    st.lists(st.sampled_from(NAMES).flatmap(action_strategy), min_size=20, max_size=100), st.sampled_from([0.95, 1.05])
)
def test_no_run_is_alive_once_the_next_one_may_start(actions: list[Action], rate: float) -> None:
    tell(actions, rate)


def test_a_late_supervisor_begins_nothing_that_counts_as_lost_although_there_is_contact_again() -> None:
    tell(
        [
            *(("be_slow", True), ("exchange",), ("start", 2), ("exchange",), ("wait", 80.0), ("start_again",)),
            *(("restart_head", True), ("chat", 30), ("claim", 27)),
        ],
        1.05,
    )


LONG_STORIES = 4000 if os.environ.get("GPUSCHED_SEARCH") else 60


@pytest.mark.parametrize("part", range(2))
def test_long_stories_of_leases_end_well(part: int) -> None:
    met = dict.fromkeys(("again", "by lease", "unstarted"), 0)
    for seed in range(part, LONG_STORIES, 2):
        source = random.Random(seed)
        actions = [random_action(source) for _ in range(source.randint(40, 200))]
        try:
            found = tell(actions, source.choice((0.95, 1.0, 1.05)))
        except AssertionError as error:
            raise AssertionError(f"story {seed}: {error}") from error
        met = {name: met[name] + found[name] for name in met}
    assert all(met.values()), f"the stories were about nothing: {met}"
