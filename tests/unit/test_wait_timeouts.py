"""A command that waits puts up with a daemon that is away, counted from when it went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpusched.cli import gwait
from gpusched.errors import DaemonUnreachable


class Daemon:
    """Answers as it is told, on a clock that each answer and each pause moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: tuple[float, Exception | None]) -> None:
        self.now = 0.0
        self.answers = list(answers)
        monkeypatch.setattr(gwait.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(gwait.time, "sleep", self.pass_by)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def call(self, method: str, path: str) -> dict[str, Any]:
        after_s, error = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.pass_by(after_s)
        if error is not None:
            raise error
        return {"done": True}


Made = Callable[..., Daemon]


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Made:
    return lambda *answers: Daemon(monkeypatch, *answers)


GONE = ConnectionResetError("the daemon closed the connection")
AWAY = DaemonUnreachable("no daemon answers", "")


def test_a_daemon_that_disappears_late_in_a_long_query_is_waited_for_as_long(daemon: Made) -> None:
    made = daemon((55.0, GONE), (0.0, AWAY), (0.0, AWAY), (0.0, None))
    assert gwait.call_patiently(made, "/v1/wait") == {"done": True}
    assert made.now < 60.0


def test_a_daemon_that_stays_away_times_out(daemon: Made) -> None:
    made = daemon((55.0, GONE), (0.0, AWAY))
    with pytest.raises(DaemonUnreachable):
        gwait.call_patiently(made, "/v1/wait")
    assert 85.0 <= made.now < 86.0


def test_each_outage_restarts_the_timeout(daemon: Made) -> None:
    made = daemon((50.0, GONE), (0.0, None))
    for _ in range(3):
        made.answers = [(50.0, GONE), (0.0, None)]
        assert gwait.call_patiently(made, "/v1/wait")["done"]
