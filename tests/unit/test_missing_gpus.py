"""GPUs that are gone, or others, when a node is to start a run on them: nothing starts, and a sentence says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_bench import ManualClock, SimulatedBench
from remote_world import Machine, SpoolEngine

from gpusched.engine.remote.journal import AgentJournal
from gpusched.engine.remote.messages import SyncReply, SyncRequest, WantedRun, pack, unpack
from gpusched.engine.remote.node_agent import NodeAgent, NodeSources
from gpusched.model.cluster import GpuReading, GpuSample
from gpusched.model.execution import LaunchSite, OpenRun, RunNeverStarted, RunStarted
from gpusched.model.value import decode, encode, replace


class Monitor:
    """Gives one reading."""

    def __init__(self, reading: GpuReading | None) -> None:
        self._reading = reading

    def request(self) -> None:
        """Never a new one."""

    def poll(self) -> GpuReading | None:
        reading, self._reading = self._reading, None
        return reading


def card(uuid: str, index: int, **more: object) -> GpuSample:
    return replace(GpuSample(uuid, index, "NVIDIA A100"), **more)


AS_BOOKED = (card("GPU-a", 0), card("GPU-b", 1))
CASES = {
    "as booked": (GpuReading(1.0, "nvml", AS_BOOKED), None),
    "gone": (GpuReading(1.0, "nvml", AS_BOOKED[:1]), "GPU 1 of node n2, GPU-b, is not there any more"),
    "all gone": (GpuReading(1.0, "none"), "GPU 0 of node n2, GPU-a, is not there any more"),
    "lost": (
        GpuReading(1.0, "nvml", (card("GPU-a", 0, is_lost=True), AS_BOOKED[1])),
        "GPU 0 of node n2, GPU-a, is not there any more",
    ),
    "another in its place": (
        GpuReading(1.0, "nvml", (AS_BOOKED[0], card("GPU-c", 1))),
        "GPU 1 of node n2, GPU-b, is not there any more",
    ),
    "exchanged": (
        GpuReading(1.0, "nvml", (card("GPU-b", 0), card("GPU-a", 1))),
        "GPU GPU-a of node n2 is number 1 now, and no longer 0",
    ),
    "not to be read now": (GpuReading(1.0, "nvml", error="the driver hangs"), None),
    "not read yet": (None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_starts_only_on_the_gpus_that_were_booked(name: str, tmp_path: Path) -> None:
    reading, why = CASES[name]
    clock = ManualClock()
    machine = Machine(clock)
    agent = NodeAgent(
        lambda: SpoolEngine(machine, lambda: None),
        AgentJournal(str(tmp_path / "agent"), 1),
        boot_id="boot-1",
        clock=clock,
        order_mark=machine.order_mark,
        sources=NodeSources(gpus=Monitor(reading), site=LaunchSite("n2", "/sock")),
    )
    base = SimulatedBench(Path("/")).ticket("1.1")
    on_gpus = replace(base, gpus=(("GPU-a", 0), ("GPU-b", 1)))
    without = replace(base, run="2.1")
    request = SyncRequest(1, 1, epoch=1, versions=(1, 2))
    wanted = [WantedRun(OpenRun(one.run, "boot-1", None, None, ticket=one)) for one in (on_gpus, without)]
    reply = decode(unpack(agent.sync(pack(request, [encode(one) for one in wanted]))).parts[0], SyncReply)
    agent.close()
    assert set(machine.starts) == ({"2.1"} if why else {"1.1", "2.1"})
    told = {event.run: event for event in reply.events}
    assert isinstance(told["2.1"], RunStarted)
    found = told["1.1"]
    assert (found.detail if isinstance(found, RunNeverStarted) else None) == why
    # It may come back there: nothing is wrong with the node for its user.
    assert not isinstance(found, RunNeverStarted) or not found.refused_on
