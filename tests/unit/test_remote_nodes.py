"""What the daemon logs of its nodes: each thing once."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from engine_bench import ManualClock

from gpusched.daemon.remote_nodes import RemoteNodes
from gpusched.model.settings import ClusterSettings


class SilentChannel:
    """Leads nowhere."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0)

    def send(self, frame: bytes) -> None:
        pass

    def receive(self) -> list[bytes]:
        return []

    def fileno(self) -> int:
        return self._fd

    def trouble(self) -> str | None:
        return None

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def nodes() -> RemoteNodes:
    made = RemoteNodes(ClusterSettings(nodes=("n2",)), ManualClock(), 1, connect=lambda node: SilentChannel())
    cluster = SimpleNamespace(get=lambda name: None, absent={})
    scheduler: Any = SimpleNamespace(cluster=cluster, look_again=lambda: None)
    made.attach(scheduler)
    return made


def polled(nodes: RemoteNodes, caplog: pytest.LogCaptureFixture, times: int = 3) -> list[str]:
    """Messages of some polls."""
    caplog.clear()
    for _ in range(times):
        nodes.poll()
    return [record.getMessage() for record in caplog.records if record.name == "gpusched.daemon"]


def test_a_clock_that_is_off_is_told_once(nodes: RemoteNodes, caplog: pytest.LogCaptureFixture) -> None:
    link = nodes.engines["n2"].link
    link.clock_skew_s = 7.2
    assert polled(nodes, caplog) == ["the clock of node n2 differs from the daemon's by 7 s; run NTP on both"]
    link.clock_skew_s = 9.0
    assert polled(nodes, caplog) == []
    link.clock_skew_s = 1.0
    assert polled(nodes, caplog) == []
    link.clock_skew_s = -8.0
    assert len(polled(nodes, caplog)) == 1


def test_a_slow_answer_says_little_about_clocks(nodes: RemoteNodes, caplog: pytest.LogCaptureFixture) -> None:
    link = nodes.engines["n2"].link
    link.clock_skew_s, link.clock_error_s = 7.2, 4.0
    assert polled(nodes, caplog) == []
    link.clock_skew_s = 9.2
    assert len(polled(nodes, caplog)) == 1


def test_a_node_that_does_not_answer_is_told_once_each_time(
    nodes: RemoteNodes, caplog: pytest.LogCaptureFixture
) -> None:
    link = nodes.engines["n2"].link
    for _ in range(2):
        link.unreachable_since, link.why = 1000.0, "no route"
        (told,) = polled(nodes, caplog)
        assert told.startswith("node n2 has not answered since ")
        assert told.endswith(": no route")
        link.unreachable_since = None
        assert polled(nodes, caplog) == []
