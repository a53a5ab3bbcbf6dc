"""What the daemon logs of its nodes: each thing once."""

from __future__ import annotations

import os
from typing import Any

import pytest
from engine_bench import ManualClock
from lab import Lab

from gpusched.daemon import remote_nodes
from gpusched.daemon.checks import daemon_checks
from gpusched.daemon.remote_nodes import RemoteNodes
from gpusched.engine.cluster import ClusterEngine
from gpusched.engine.remote.messages import NodeReport
from gpusched.model.cluster import GpuReading, GpuSample, HostSample
from gpusched.model.execution import LaunchSite
from gpusched.model.job import Run
from gpusched.model.settings import ClusterSettings
from gpusched.model.states import RunState
from gpusched.model.value import replace


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

    def hang_up(self, why: str) -> None:
        pass

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def lab() -> Lab:
    return Lab(gpus=1)


@pytest.fixture
def nodes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> RemoteNodes:
    monkeypatch.setattr(remote_nodes, "CommandChannel", lambda command, node: SilentChannel())
    made = RemoteNodes(ClusterSettings(nodes=("n2", "n3")), ManualClock(), 1)
    made.attach(lab.ticker, ClusterEngine({"n1": lab.engine, **made.engines}, "n1"))
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


# --- what reports say of the machines ------------------------------------------------------------------------


def report(
    nodes: RemoteNodes, node: str, *uuids: str, source: str = "nvml", at: float | None = None, identity: str = ""
) -> None:
    """A report with these GPUs arrives. Args: at: when the reading began by the node's clock; default: now."""
    gpus = tuple(GpuSample(uuid, index, "A100", 81920, vram_used_mib=0) for index, uuid in enumerate(uuids))
    reading = GpuReading(nodes._clock.now() if at is None else at, source, gpus)
    host = HostSample(0.0, node, 8, 65536, 60000, boot_id=f"boot-{node}", identity=identity)
    nodes._keep(node, NodeReport(0.0, {}, {}, {}, host=host, gpus=reading, site=LaunchSite(node, "")))
    nodes.poll()


AGES = {
    # how far the node's clock is ahead by the estimate, when the reading began by that clock, its age at its arrival
    "the clocks agree": (0.0, -3.0, 3.0),
    "the node's clock is ahead": (100.0, 97.0, 3.0),
    "the node's clock is behind": (-100.0, -103.0, 3.0),
    "an estimate that is a little off": (0.0, 0.2, 0.0),
    "a clock that was set since the estimate": (0.0, 3600.0, 0.0),
}


@pytest.mark.parametrize("name", AGES)
def test_a_reading_is_as_old_as_its_node_says(nodes: RemoteNodes, lab: Lab, name: str) -> None:
    skew_s, at, age_s = AGES[name]
    now = lab.clock.now()
    nodes.engines["n2"].link.clock_skew_s = skew_s
    report(nodes, "n2", "GPU-a", at=now + at)
    node = lab.scheduler.cluster["n2"]
    assert now - node.read_at == pytest.approx(age_s)
    assert node.reading is not None
    assert node.reading.at == node.read_at


def test_only_the_nodes_that_are_named_are_asked_for_a_reading(nodes: RemoteNodes, monkeypatch: Any) -> None:
    asked: list[str] = []
    for name, engine in nodes.engines.items():
        monkeypatch.setattr(engine, "request_reading", lambda orders, name=name: asked.append(name))
    nodes.request_readings({"n1", "n3"})
    assert asked == ["n3"]
    nodes.request_readings()
    assert asked == ["n3", "n2", "n3"]


def test_one_machine_under_two_names_is_used_once(nodes: RemoteNodes, lab: Lab) -> None:
    report(nodes, "n2", "GPU-a", "GPU-b")
    report(nodes, "n3", "GPU-b")
    views = {view.name: view for view in lab.scheduler.nodes(lab.clock.now())}
    assert [gpu.uuid for gpu in views["n2"].gpus] == ["GPU-a", "GPU-b"]
    assert views["n3"].gpus == ()
    why = views["n3"].why_not
    assert why == (
        "node n3 has the GPUs of node n2, so it is the same machine under another name; name it once in [cluster] nodes"
    )
    # Mended: the GPU has moved there.
    report(nodes, "n2", "GPU-a")
    report(nodes, "n3", "GPU-b")
    views = {view.name: view for view in lab.scheduler.nodes(lab.clock.now())}
    assert [gpu.uuid for gpu in views["n3"].gpus] == ["GPU-b"]
    assert views["n3"].why_not is None


def test_a_gpu_may_move_from_a_node_that_is_off(nodes: RemoteNodes, lab: Lab) -> None:
    report(nodes, "n2", "GPU-a")
    nodes.engines["n2"].link.unreachable_since = 1000.0
    nodes.poll()
    report(nodes, "n3", "GPU-a")
    assert lab.scheduler.cluster["n3"].why_not is None


def test_simulated_gpus_may_be_called_alike_everywhere(nodes: RemoteNodes, lab: Lab) -> None:
    for node in ("n2", "n3"):
        report(nodes, node, "GPU-sim-0", source="simulated")
    assert [node.name for node in lab.scheduler.cluster] == ["n1", "n2", "n3"]


def why_not(lab: Lab, node: str) -> str | None:
    views = {view.name: view for view in lab.scheduler.nodes(lab.clock.now())}
    return views[node].why_not


def test_one_machine_with_simulated_gpus_under_two_names_is_used_once(nodes: RemoteNodes, lab: Lab) -> None:
    for _ in range(2):
        report(nodes, "n2", "GPU-sim-0", source="simulated", identity="one")
        report(nodes, "n3", "GPU-sim-0", source="simulated", identity="one")
        assert why_not(lab, "n2") is None
        assert why_not(lab, "n3") == (
            "node n3 is the machine of node n2 under another name; name it once in [cluster] nodes"
        )
    report(nodes, "n3", "GPU-sim-0", source="simulated", identity="another")
    assert why_not(lab, "n3") is None
    assert [node.name for node in lab.scheduler.cluster] == ["n1", "n2", "n3"]


def test_the_head_is_found_under_another_name(nodes: RemoteNodes, lab: Lab) -> None:
    head = lab.scheduler.head
    head.host = replace(head.host, identity="one")
    report(nodes, "n2", "GPU-sim-0", source="simulated", identity="one")
    assert str(why_not(lab, "n2")).startswith("node n2 is the machine of node n1 under another name; ")


def test_a_machine_may_get_another_name_unless_it_has_runs_under_the_first(nodes: RemoteNodes, lab: Lab) -> None:
    report(nodes, "n2", "GPU-sim-0", source="simulated", identity="one")
    run = Run("1", 1, RunState.RUNNING, "n2", "boot-n2", 0.0)
    lab.scheduler.state.open_runs[run.id] = run
    nodes.engines["n2"].link.unreachable_since = 1000.0
    nodes.poll()
    report(nodes, "n3", "GPU-sim-0", source="simulated", identity="one")
    assert str(why_not(lab, "n3")).startswith("node n3 is the machine of node n2 under another name; ")
    del lab.scheduler.state.open_runs[run.id]
    report(nodes, "n3", "GPU-sim-0", source="simulated", identity="one")
    assert why_not(lab, "n3") is None


def test_the_doctor_and_ginfo_tell_of_nodes_and_clocks(nodes: RemoteNodes, lab: Lab) -> None:
    def told() -> tuple[str, str]:
        (found,) = [check for check in daemon_checks(lab.ticker) if check.check == "nodes"]
        return found.level, found.text

    nodes.poll()
    assert told() == ("fail", "node n2 has not been reached yet; node n3 has not been reached yet")
    report(nodes, "n2", "GPU-a")
    report(nodes, "n3", "GPU-b")
    assert told() == ("ok", "all 3 nodes answer, and their clocks agree")
    nodes.engines["n3"].link.clock_skew_s = 61.0
    nodes.poll()
    note = "the clock of node n3 differs from the daemon's by 61 s; run NTP on both"
    assert told() == ("warn", note)
    assert lab.scheduler.cluster["n3"].clock_note == note
