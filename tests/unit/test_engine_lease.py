"""The lease of a run in the foreground, on a clock that is told what time it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.engine.supervisor.interactive import BUSY_FRACTION, END, WARN, Lease


@pytest.mark.parametrize(("lease_s", "warning_s"), [(60.0, 15.0), (1200.0, 300.0), (86400.0, 300.0)])
def test_the_warning_comes_minutes_before_the_end(lease_s: float, warning_s: float) -> None:
    lease = Lease(lease_s, 1000.0)
    assert lease.look_at == 1000.0 + lease_s - warning_s
    assert lease.look(lease.look_at, 0.0) == WARN
    assert lease.look_at == 1000.0 + lease_s
    assert lease.look(lease.look_at, 0.0) == END
    assert lease.look_at is None


def test_typing_renews_the_lease_and_the_next_warning() -> None:
    lease = Lease(60.0, 0.0)
    lease.touch(40.0)
    assert lease.look(45.0, 0.0) is None
    assert lease.look_at == 85.0
    assert lease.look(85.0, 0.0) == WARN
    lease.touch(90.0)
    assert lease.look(100.0, 0.0) is None
    assert lease.look_at == 135.0
    assert lease.look(135.0, 0.0) == WARN


def test_work_renews_the_lease_and_a_clock_in_a_prompt_does_not() -> None:
    lease = Lease(60.0, 0.0)
    assert lease.look(45.0, 45.0 * BUSY_FRACTION) is None
    assert lease.look_at == 90.0
    assert lease.look(90.0, 45.0 * BUSY_FRACTION + 0.5) == WARN


def test_work_after_the_warning_renews_the_lease_too() -> None:
    lease = Lease(60.0, 0.0)
    assert lease.look(45.0, 0.0) == WARN
    assert lease.look(60.0, 15.0) is None
    assert lease.look_at == 105.0


def test_the_end_can_be_queried_without_changing_it() -> None:
    lease = Lease(60.0, 0.0)
    lease.touch(10.0)
    assert lease.ends_at(30.0, 0.0) == 70.0
    assert lease.ends_at(30.0, 30.0 * BUSY_FRACTION) == 90.0
    assert lease.ends_at(40.0, 0.0) == 70.0
    assert lease.look_at == 45.0


def test_suspended_time_does_not_count() -> None:
    lease = Lease(60.0, 0.0)
    lease.shift(1000.0)
    assert lease.look_at == 1045.0
    assert lease.look(1045.0, 0.0) == WARN
    assert lease.look(1060.0, 0.0) == END


@given(st.floats(1, 1e6), st.lists(st.tuples(st.floats(0, 1e5), st.booleans()), max_size=30))
def test_a_lease_never_ends_soon_after_typing_nor_without_a_warning(
    lease_s: float, steps: list[tuple[float, bool]]
) -> None:
    lease, now, typed_at, warned = Lease(lease_s, 0.0), 0.0, 0.0, False
    for pause_s, types in steps:
        until = now + pause_s
        while lease.look_at is not None and lease.look_at <= until:
            now = lease.look_at
            verdict = lease.look(now, 0.0)
            warned = warned or verdict == WARN
            if verdict == END:
                assert now - typed_at >= lease_s * (1 - 1e-9)
                assert warned
                return
        now = until
        if types:
            lease.touch(now)
            typed_at = now
