"""An engine behind an agent: in another thread, over a socket that may lose, delay, duplicate and reorder frames."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import socket
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine_bench import BOOT, LocalBench, WallClock
from support import wait_until

from gpusched.engine.local import LocalEngine
from gpusched.engine.remote.agent_server import AgentServer, agent_of_spool
from gpusched.engine.remote.channel import Channel, StreamChannel
from gpusched.engine.remote.remote_engine import LinkPace, RemoteEngine


@dataclass(frozen=True)
class Weather:
    """What happens to frames, in each direction."""

    loss: float = 0.0
    copies: float = 0.0
    """Fraction that arrives twice."""
    delay_s: float = 0.0
    """At most; each frame has its own, so that they overtake each other."""


class LossyChannel:
    """A channel in bad weather; for the agent's side, inside its event loop."""

    def __init__(self, inner: Channel, weather: Weather, seed: int) -> None:
        self._inner, self._weather, self._random = inner, weather, random.Random(seed)
        self._arrived: list[bytes] = []
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(inner.fileno(), select.EPOLLIN)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._loop = asyncio.get_running_loop()

    def send(self, frame: bytes) -> None:
        for delay_s in self._fates():
            self._loop.call_later(delay_s, self._inner.send, frame)

    def receive(self) -> list[bytes]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        for frame in self._inner.receive():
            for delay_s in self._fates():
                self._loop.call_later(delay_s, self._arrive, frame)
        arrived, self._arrived = self._arrived, []
        return arrived

    def fileno(self) -> int:
        return self._epoll.fileno()

    def trouble(self) -> str | None:
        return self._inner.trouble()

    def hang_up(self, why: str) -> None:
        self._inner.hang_up(why)

    def close(self) -> None:
        self._inner.close()
        self._epoll.close()
        os.close(self._bell)

    def _arrive(self, frame: bytes) -> None:
        if not self._epoll.closed:
            self._arrived.append(frame)
            os.eventfd_write(self._bell, 1)

    def _fates(self) -> list[float]:
        """A delay for each copy that arrives."""
        if self._random.random() < self._weather.loss:
            return []
        times = 2 if self._random.random() < self._weather.copies else 1
        return [self._random.uniform(0, self._weather.delay_s) for _ in range(times)]


class AgentThread:
    """A node's agent on its own event loop."""

    def __init__(self, spool: Path, weather: Weather, seed: int = 1) -> None:
        self._weather, self._seed = weather, seed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agent")
        self._thread.start()
        self._serving: asyncio.Task[None] | None = None
        make = partial(LocalEngine, spool, boot_id=BOOT, clock=WallClock())
        self.agent = agent_of_spool(spool, make, boot_id=BOOT, clock=WallClock())

    def connect(self) -> StreamChannel:
        """A channel to the agent, which leaves the one before."""
        here, there = socket.socketpair()
        asyncio.run_coroutine_threadsafe(self._serve(there), self._loop).result(60)
        return StreamChannel(here)

    def stop(self) -> None:
        """Let go of the runs, which continue."""
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self.agent.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, there: socket.socket) -> None:
        await self._leave()
        self._seed += 1
        channel: Channel = StreamChannel(there)
        if self._weather != Weather():
            channel = LossyChannel(channel, self._weather, self._seed)

        async def serve() -> None:
            try:
                await AgentServer(self.agent, channel).serve()
            finally:
                channel.close()

        self._serving = asyncio.create_task(serve())
        await asyncio.sleep(0)

    async def _leave(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving


class RemoteBench(LocalBench):
    """Real processes behind an agent."""

    weather = Weather()
    pace = LinkPace(poll_s=0.1, report_s=0.05)

    def __init__(self, folder: Path) -> None:
        self.sessions = 0
        self.agent = AgentThread(folder / "spool", self.weather)
        super().__init__(folder)

    def make(self) -> RemoteEngine:  # type: ignore[override]
        self.sessions += 1
        return RemoteEngine(self.agent.connect(), session=self.sessions, clock=WallClock(), pace=self.pace)

    def save(self, run: str, at: float) -> None:
        super().save(run, at)
        # Its node tells of it with the next report.
        wait_until(lambda: self.engine.checkpoints().get(run) == at, what="the report of a checkpoint")

    def close(self) -> None:
        super().close()
        self.agent.stop()


class LossyRemoteBench(RemoteBench):
    """Of four frames one is lost, one comes twice, and they overtake each other."""

    weather = Weather(loss=0.25, copies=0.25, delay_s=0.02)
    pace = LinkPace(poll_s=0.05, report_s=0.05, retry_s=0.03, retry_max_s=0.1)
