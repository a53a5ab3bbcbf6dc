"""Windows of the calendar in the daemon: what the policy is shown, and when it looks again."""

from __future__ import annotations

import pytest
from lab import Lab

from gpusched.daemon.planner_sync import CalendarWindows
from gpusched.model.snapshot import CalendarEntry, Placement
from gpusched.ports import Changes
from gpusched.ports.tables import CALENDAR, ChangedRows
from gpusched.testing import NOW, share

HELD = (Placement("n1", (share(0),), 0.0, 0),)


def entry(name: str, start_at: float, duration_s: int = 60, **parts: object) -> CalendarEntry:
    return CalendarEntry(name, start_at, duration_s, HELD, users=("ann",), **parts)  # type: ignore[arg-type]


def test_an_empty_calendar_lists_nothing_and_has_no_edges() -> None:
    seen = CalendarWindows()
    seen.look({}, NOW)
    assert seen.at({}, NOW) == ()
    assert seen.edge_at is None
    assert not seen.have_moved(NOW + 1e9)


def test_edges_are_starts_and_ends_of_all_entries() -> None:
    calendar = {"a": entry("a", NOW + 10), "b": entry("b", NOW + 40, every_s=1000)}
    seen, edges, now = CalendarWindows(), [], NOW
    for _ in range(5):
        seen.look(calendar, now)
        assert seen.edge_at is not None
        assert not seen.have_moved(seen.edge_at - 0.001)
        assert seen.have_moved(seen.edge_at)
        now = seen.edge_at
        edges.append(now - NOW)
    assert edges == [10, 40, 70, 100, 1040]


def test_a_removed_window_is_no_longer_listed() -> None:
    seen = CalendarWindows()
    assert [window.name for window in seen.at({"a": entry("a", NOW)}, NOW)] == ["a"]
    seen.look({}, NOW)
    assert seen.at({}, NOW) == ()
    assert seen.edge_at is None


def test_querying_another_instant_moves_no_edge() -> None:
    seen = CalendarWindows()
    seen.look({"a": entry("a", NOW + 10)}, NOW)
    seen.at({"a": entry("a", NOW + 10)}, NOW + 20)
    assert seen.edge_at == NOW + 10
    assert seen.have_moved(NOW + 20)


def test_the_scheduler_reads_the_calendar_from_the_table_and_wakes_at_its_edges() -> None:
    lab = Lab()
    lab.store.commit(Changes(rows=ChangedRows({CALENDAR: {"a": entry("a", NOW + 30)}})))
    lab.restart()
    lab.tick()
    assert [window.start_at for window in lab.scheduler.snapshot(NOW).windows] == [NOW + 30]
    assert lab.ticker.next_due() == NOW + 30
    lab.tick(30)
    assert lab.ticker.next_due() == NOW + 90
    # A job that is due sooner is waited for first.
    lab.submit(begin_at=NOW + 50)
    assert lab.ticker.next_due() == NOW + 50
    lab.tick(60)
    assert lab.scheduler.snapshot(lab.clock.now()).windows == ()


def test_an_edge_alone_makes_a_new_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    lab.store.commit(Changes(rows=ChangedRows({CALENDAR: {"a": entry("a", NOW + 30)}})))
    lab.restart()
    lab.tick()
    plans: list[float] = []
    step = lab.scheduler.decide_step
    usual = step._carry_out_plans
    monkeypatch.setattr(step, "_carry_out_plans", lambda tx, *rest: plans.append(tx.now) or usual(tx, *rest))
    for _ in range(4):
        lab.clock.advance(10)
        lab.ticker.tick()
    assert plans == [NOW + 30]
