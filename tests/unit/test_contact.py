"""The instant of a node's last contact: its file, the supervisor's look at it, and when the agent renews it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_bench import SimulatedBench
from remote_world import Lab

from gpusched.engine import contact as files
from gpusched.engine.supervisor import contact, run_control
from gpusched.engine.supervisor.contact import ContactWatch
from gpusched.engine.supervisor.supervisor import Home, supervisor_of

NOW = 5000.0


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock since boot."""

    def set_to(instant: float) -> None:
        monkeypatch.setattr(contact, "boottime_s", lambda: instant)

    set_to(NOW)
    return set_to


def test_the_last_contact_is_read_in_its_boot_only(tmp_path: Path) -> None:
    assert files.read_contact(str(tmp_path), "boot-1") is None
    for instant in (0.1, 12345.678901234, 1e9):
        files.write_contact(str(tmp_path), "boot-1", instant)
        assert files.read_contact(str(tmp_path), "boot-1") == instant
    assert files.read_contact(str(tmp_path), "boot-2") is None


@pytest.mark.parametrize("content", [b"", b"\0" * 128, b"12.5 boot-1 00000000\n", b"x boot-1\n", b"\xff" * 128])
def test_a_damaged_file_is_no_contact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    (tmp_path / files.NAME).write_bytes(content)
    assert files.read_contact(str(tmp_path), "boot-1") is None


def unexpected(left_s: float) -> None:
    """Nothing is ended by a look alone."""
    pytest.fail(f"it was ended with {left_s} s left")


def test_a_run_is_told_in_time_to_use_its_grace_and_has_ended_with_its_lease(
    tmp_path: Path, at: Callable[[float], None]
) -> None:
    files.write_contact(str(tmp_path), "boot-1", NOW)
    watch = ContactWatch(str(tmp_path), "boot-1", lost_after_s=600.0, grace_s=30.0, end=unexpected)
    assert watch.look() is None
    at(NOW + 569.9)
    assert watch.look() is None
    at(NOW + 570.0)
    assert watch.look() == pytest.approx(30.0)
    assert watch.due_at is None


def test_a_look_never_comes_late_by_more_than_the_head_allows_for(tmp_path: Path) -> None:
    for lost_after_s in (5.0, 60.0, 600.0, 86400.0):
        files.write_contact(str(tmp_path), "boot-1", files.boottime_s())
        watch = ContactWatch(str(tmp_path), "boot-1", lost_after_s, 0.0, unexpected)
        assert watch.look() is None
        assert watch.due_at is not None
        late_s = watch.due_at - time.monotonic()
        assert late_s < files.lost_after_contact_s(lost_after_s) - lost_after_s


def test_renewed_contact_extends_the_lease(tmp_path: Path, at: Callable[[float], None]) -> None:
    files.write_contact(str(tmp_path), "boot-1", NOW)
    watch = ContactWatch(str(tmp_path), "boot-1", 600.0, 30.0, unexpected)
    watch.look()
    files.write_contact(str(tmp_path), "boot-1", NOW + 500.0)
    at(NOW + 1000.0)
    assert watch.look() is None
    at(NOW + 1090.0)
    assert watch.look() == pytest.approx(10.0)


def test_a_supervisor_that_was_frozen_leaves_no_grace(tmp_path: Path, at: Callable[[float], None]) -> None:
    files.write_contact(str(tmp_path), "boot-1", NOW)
    watch = ContactWatch(str(tmp_path), "boot-1", 600.0, 30.0, unexpected)
    watch.look()
    at(NOW + 5000.0)
    assert watch.look() == 0.0


def test_an_instant_that_this_boot_has_not_reached_is_no_contact(tmp_path: Path, at: Callable[[float], None]) -> None:
    files.write_contact(str(tmp_path), "boot-1", NOW + 0.5)
    assert ContactWatch(str(tmp_path), "boot-1", 600.0, 30.0, unexpected).look() == 0.0


def test_a_run_does_not_start_after_its_lease(tmp_path: Path) -> None:
    said: list[str] = []
    ticket = {"run": "3.1", "script": None, "lost_after_s": 600.0, "grace_s": 30.0}
    made = supervisor_of(ticket, Home(str(tmp_path), "boot-1", -1))
    made.events.notify = lambda event, **facts: said.append(f"{event}: {facts['detail']}")  # type: ignore[method-assign]
    assert made.supervise() is False
    assert said == ["refused: its node had lost contact with the scheduler"]
    assert not (tmp_path / "3.1.record").exists()


@pytest.mark.parametrize("asked_at", [None, NOW - 571.0, NOW - 569.0])
def test_contact_that_came_after_a_run_was_asked_for_starts_it_no_more(
    tmp_path: Path, at: Callable[[float], None], asked_at: float | None
) -> None:
    files.write_contact(str(tmp_path), "boot-1", NOW)
    ticket = {"run": "3.1", "script": None, "lost_after_s": 600.0, "grace_s": 30.0, "contact_at": asked_at, "uid": 0}
    made = supervisor_of(ticket, Home(str(tmp_path), "boot-1", -1))
    is_refused = asked_at is None or asked_at < NOW - 570.0
    assert made.claim() == ("its node had lost contact with the scheduler" if is_refused else None)


def test_a_run_whose_lease_ends_is_stopped(tmp_path: Path) -> None:
    stops: list[object] = []
    made = supervisor_of({"run": "3.1", "script": None}, Home(str(tmp_path), "boot-1", -1))
    made.control.stop = lambda *words: stops.append(words)  # type: ignore[method-assign]
    watch = ContactWatch(str(tmp_path), "boot-1", 600.0, 30.0, made.lose_head)
    watch.due_at = 0.0
    made.control.timers.always.insert(0, watch)
    # Also while it is suspended.
    made.control.timers.suspend()
    made.control.timers.act(1.0)
    made.control.timers.act(2.0)
    assert stops == [("head_lost", None, 0.0)]
    assert "head_lost" in run_control.BECAUSE


# --- the agent -------------------------------------------------------------------------------------------------


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    made = Lab(tmp_path, SimulatedBench(Path("/")).ticket)
    made.machine.boottime_s = made.clock.now
    made.node.revive()
    made.settle()
    return made


def watch_contact(lab: Lab) -> list[bool]:
    """Whether runs were alive, at each contact from now on."""
    lab.exchange()
    lab.pump()
    lab.head.wire.up.clear()
    seen: list[bool] = []
    assert lab.node.agent is not None
    lab.node.agent._note_contact = lambda at: seen.append(bool(lab.machine.live()))
    return seen


def test_contact_is_dated_to_what_the_head_has_answered(lab: Lab) -> None:
    lab.exchange()
    lab.head.engine._pump()
    before = lab.clock.at
    lab.clock.at += 6.0
    lab.pump()
    (request,) = lab.head.wire.up
    lab.clock.at += 300.0
    lab.node.sync(request)
    assert lab.machine.contact_at == before, "the request was long under way"
    lab.close()


def test_runs_taken_for_lost_end_before_leases_are_renewed(lab: Lab) -> None:
    lab.start(1)
    lab.settle()
    seen = watch_contact(lab)
    lab.forsake(0)
    lab.exchange()
    lab.close()
    assert seen
    assert not any(seen)


def test_a_request_that_has_no_room_for_such_a_run_proves_no_contact(lab: Lab) -> None:
    lab.start(1)
    lab.settle()
    run = next(iter(lab.table))
    for _ in range(600):
        lab.head.engine.reconcile([lab.head.wanted(run)])
    seen = watch_contact(lab)
    lab.forsake(0)
    for _ in range(5):
        lab.exchange()
    lab.close()
    assert seen
    assert not any(seen)
