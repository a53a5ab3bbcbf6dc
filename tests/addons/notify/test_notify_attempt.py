"""One try to reach one address, with a service that a test makes up."""

from __future__ import annotations

import time

import pytest

from gpusched.addons.notify import attempt
from gpusched.addons.notify.attempt import SendAttempt, SendResult


def test_lazy_imports_at_the_first_attempt_do_not_count_as_service_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with much else to do the first message of a worker was given up before it was sent."""
    late_s = [0.0]
    monotonic = time.monotonic

    def load() -> bool:
        late_s[0] = 1000.0
        return True

    monkeypatch.setattr(attempt, "preload", load)
    monkeypatch.setattr(attempt, "send", lambda *_: SendResult(True))
    monkeypatch.setattr(attempt.time, "monotonic", lambda: monotonic() + late_s[0])
    assert SendAttempt("json://127.0.0.1:9/x", "title", "body", timeout_s=60.0).wait() == SendResult(True)
