"""The daemon's loop around a `Lab`, with stand-ins for what it watches."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab import Lab

from gpusched.api.server import HttpServer
from gpusched.api.service import ApiService
from gpusched.daemon.dispatch import Dispatcher
from gpusched.daemon.facade import DaemonFacade
from gpusched.daemon.loop import Loop
from gpusched.daemon.service_manager import ServiceManager
from gpusched.model.cluster import GpuReading


class Worker:
    """Of a machine without GPUs. It never answers, unless it is given `answer`: then a millisecond after a request."""

    def __init__(self) -> None:
        self._ends = os.pipe()
        self.answer: Callable[[], GpuReading] | None = None
        self.requests = 0
        self.answered_in_s = 0.0
        self.is_asked = False

    def fileno(self) -> int:
        return self._ends[0]

    def poll(self) -> GpuReading | None:
        if self.answer is None or not select.select([self._ends[0]], [], [], 0)[0]:
            return None
        os.read(self._ends[0], 1)
        self.is_asked = False
        return self.answer()

    def request(self, orders: object = ()) -> None:
        self.requests += 1
        if self.answer is not None and not self.is_asked:
            self.is_asked = True
            asyncio.get_running_loop().call_later(0.001, os.write, self._ends[1], b"x")

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


class Host:
    """One that never changes."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def read(self) -> Any:
        return self._lab.scheduler.head.host


class Manager(ServiceManager):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__({})
        self.said: list[str] = []

    def notify(self, *fields: str) -> None:
        self.said += fields


class LoopBench:
    """A loop and its edges. `run` returns when something has called `loop.stop`."""

    def __init__(self, lab: Lab, folder: Path, goes_down: Callable[[], bool] = lambda: False) -> None:
        self.lab = lab
        self.folder = folder
        self.worker = Worker()
        self.host = Host(lab)
        self.manager = Manager()
        self.dispatcher = Dispatcher(lab.scheduler)
        self.loop = Loop(
            lab.ticker,
            self.worker,  # type: ignore[arg-type]
            self.host,
            self.dispatcher,
            self.manager,
            goes_down,
        )

    def run(self, at_ready: Callable[[], None] = lambda: None) -> None:
        """Turn the loop until it ends by itself."""
        service = ApiService(DaemonFacade(self.lab.ticker, wake=self.loop.wake, stop=self.loop.stop))
        server = HttpServer(service)

        async def until_it_ends() -> None:
            await asyncio.wait_for(self.loop.run(server, str(self.folder / "sock"), at_ready), 30)

        asyncio.run(until_it_ends())

    def run_until(self, predicate: Callable[[], object]) -> None:
        """Turn the loop until this is true."""

        def look() -> None:
            if predicate():
                self.loop.stop()
            else:
                asyncio.get_running_loop().call_later(0.002, look)

        self.run(look)

    def close(self) -> None:
        self.dispatcher.close()
        self.worker.close()


@contextmanager
def loop_bench(lab: Lab, folder: Path, goes_down: Callable[[], bool] = lambda: False) -> Iterator[LoopBench]:
    """A bench that is closed afterwards."""
    bench = LoopBench(lab, folder, goes_down)
    try:
        yield bench
    finally:
        bench.close()
