"""A head and a node agree, whatever is lost, doubled, delayed or killed between them."""

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

from gpusched.model.execution import LimitOrder, RunEnded, RunStarted, Ticket

INDICES = range(31)
FATES = ["deliver", "deliver", "drop", "copy"]
ACTIONS: dict[str, tuple[int, list[list[object]]]] = {
    "start": (4, [[1, 2, 3]]),
    "signal": (6, [[*INDICES]]),
    "stop": (2, [[*INDICES]]),
    "change": (4, [[*INDICES], [60.0, 90.0, None], [False, False, True]]),
    "forsake": (1, [[*INDICES]]),
    "reconcile_all": (1, []),
    "collect": (4, []),
    "forget": (2, []),
    "finish_one": (3, [[*INDICES]]),
    "carry": (20, [[*INDICES], [*FATES]]),
    "exchange": (10, []),
    "push": (2, []),
    "wait": (8, [[0.3, 1.0, 6.0]]),
    "fuse": (5, [[*range(1, 16)]]),
    "kill": (1, []),
    "revive": (8, []),
    "restart_head": (1, [[False, True]]),
    "old_head_acts": (2, []),
    "reboot": (1, [[False, False, True]]),
}
"""How often each is chosen, and its arguments."""
Action = tuple[object, ...]
NAMES = [name for name, (weight, _) in ACTIONS.items() for _ in range(weight)]


def action_strategy(name: str) -> st.SearchStrategy[Action]:
    return st.tuples(st.just(name), *(st.sampled_from(choices) for choices in ACTIONS[name][1]))


def random_action(source: random.Random) -> Action:
    name = source.choice(NAMES)
    return (name, *(source.choice(choices) for choices in ACTIONS[name][1]))


def ticket(run: str) -> Ticket:
    return SimulatedBench(Path("/")).ticket(run)


def play(lab: Lab, action: Action) -> None:
    name, *arguments = action
    if name == "forget":
        lab.head.forget_ended()
    elif name == "wait":
        lab.clock.at += float(str(arguments[0]))
    elif name == "fuse":
        lab.node.fuse = int(str(arguments[0]))
    elif name == "kill":
        lab.node.kill()
    elif name == "revive":
        lab.node.revive()
    else:
        getattr(lab, str(name))(*arguments)
    lab.pump()


def check(lab: Lab) -> None:
    """At most once, at any time."""
    twice = [run for run, count in lab.machine.starts.items() if count > 1]
    assert not twice, f"started twice: {twice}"
    again = [number for number, count in lab.machine.signals.items() if count > 1]
    assert not again, f"signals given twice: {again}"
    # Only the journal knows which head is the old one.
    assert lab.is_wiped or not lab.forbidden & lab.machine.starts.keys(), "an old head started a run"


def tell(actions: list[Action]) -> None:
    """Play a story; in the end the weather is fair, every run ends, and nothing may be missing or left."""
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), ticket)
        lab.node.revive()
        try:
            for action in actions:
                play(lab, action)
                check(lab)
            lab.settle()
            check(lab)
            alive = [run for run in lab.machine.live() if lab.table[run].is_forsaken]
            assert not alive, f"declared lost, and alive although the node is back: {alive}"
            for number, (session, run) in lab.signals.items():
                # Of an earlier session, it may have been lost with its head; to an ended run, it may come too late.
                if session == lab.sessions and lab.table[run].end is None:
                    assert lab.machine.signals[number] == 1, f"signal {number} to run {run} was lost"
            for run in lab.machine.live():
                row, given = lab.table[run], lab.machine.spool[run].given
                assert given.limit == LimitOrder(row.limit_s), f"run {run} has another limit than in the table"
                assert given.is_suspended == row.is_suspended, f"run {run} should be suspended, or the opposite"
                lab.machine.finish(run)
            lab.settle()
            for run, row in lab.table.items():
                assert row.end is not None, f"run {run} has no end"
                if isinstance(row.end, RunEnded):
                    assert lab.machine.starts[run] == 1
                    assert isinstance(row.started, RunStarted) or row.end.start_at is not None
            lab.head.forget_ended()
            lab.settle()
            left = {name for name, run in lab.machine.spool.items() if not run.is_revoked}
            assert not left, f"files of runs that are forgotten: {left}"
        finally:
            lab.close()


@given(st.lists(st.sampled_from(NAMES).flatmap(action_strategy), min_size=20, max_size=120))
def test_every_run_starts_at_most_once_and_ends_exactly_once(actions: list[Action]) -> None:
    tell(actions)


LONG_STORIES = 4000 if os.environ.get("GPUSCHED_SEARCH") else 60
"""Chosen evenly, they go deeper than what hypothesis draws."""


@pytest.mark.parametrize("part", range(4))
def test_long_stories_end_well(part: int) -> None:
    for seed in range(part, LONG_STORIES, 4):
        source = random.Random(seed)
        actions = [random_action(source) for _ in range(source.randint(40, 250))]
        try:
            tell(actions)
        except AssertionError as error:
            raise AssertionError(f"story {seed}: {error}") from error
