"""Serves an agent over a channel, on the event loop of its process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from gpusched.engine import spool as files
from gpusched.engine.contact import write_contact
from gpusched.engine.remote.channel import Channel
from gpusched.engine.remote.command_door import CommandDoor
from gpusched.engine.remote.journal import AgentJournal
from gpusched.engine.remote.node_agent import NodeAgent, NodeSources
from gpusched.engine.remote.relay import MuxTimer
from gpusched.engine.remote.services import StreamServices
from gpusched.engine.remote.streams import MAGIC as STREAM_MAGIC
from gpusched.engine.remote.streams import StreamMux
from gpusched.ports import Clock, Engine

log = logging.getLogger(__name__)


def agent_of_spool(
    spool: str | os.PathLike[str],
    make_engine: Callable[[], Engine],
    *,
    boot_id: str,
    clock: Clock,
    sources: NodeSources | None = None,
) -> NodeAgent:
    """Make the agent of a spool on this machine, with its journal beside it.

    Args: make_engine: makes an engine on that spool.
    Raises: as `AgentJournal`.
    """
    folder = os.path.abspath(spool)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    journal = AgentJournal(f"{folder}.agent", int(clock.now() * 1000))
    return NodeAgent(
        make_engine,
        journal,
        boot_id=boot_id,
        clock=clock,
        order_mark=lambda run: files.order_mark(folder, run),
        note_contact=lambda at: write_contact(folder, boot_id, at),
        sources=sources,
    )


class AgentServer:
    """Answers requests, serves streams, and reports events as they happen.

    Args: agent: must not have been served before; channel: to the head. services: what the head's streams are for;
    None: there are none. socket: path of the socket by which programs of jobs reach the head; empty for none.
    serves_all: jobs may be of any user.
    """

    def __init__(
        self,
        agent: NodeAgent,
        channel: Channel,
        services: StreamServices | None = None,
        *,
        socket: str = "",
        serves_all: bool = False,
    ) -> None:
        self._socket, self._serves_all = socket, serves_all
        self._agent = agent
        self._channel = channel
        self._ended = asyncio.Event()
        self._streams = StreamMux(channel.send, is_head=False, on_open=None if services is None else services.serve)

    async def serve(self) -> None:
        """Serve until the channel is of no more use."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._answer)
        timer = MuxTimer(self._streams)
        door = None
        if self._socket:
            serves_all, run_of = self._serves_all, self._agent.run_of
            try:
                door = CommandDoor(self._socket, self._streams, serves_all=serves_all, run_of=run_of)
            except OSError as error:
                # A file system without sockets, for example: jobs run all the same.
                log.error("programs of jobs cannot reach the daemon: %s: %s", self._socket, error.strerror)
        self._agent.set_waker(self._report_events)
        try:
            await self._ended.wait()
        finally:
            self._agent.set_waker(None)
            timer.close()
            if door is not None:
                door.close()
            loop.remove_reader(self._channel.fileno())

    def _answer(self) -> None:
        for frame in self._channel.receive():
            try:
                if frame.startswith(STREAM_MAGIC):
                    self._streams.take(frame)
                    continue
                self._channel.send(self._agent.sync(frame))
                self._streams.associate(*self._agent.association)
            except Exception:
                # The head repeats what got no answer.
                log.exception("a request could not be answered")
        if self._channel.trouble() is not None:
            self._ended.set()

    def _report_events(self) -> None:
        frame = self._agent.push()
        if frame is not None:
            self._channel.send(frame)
