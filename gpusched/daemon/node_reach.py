"""What requests reach on other nodes, and programs there on this one: output of jobs, and the daemon's socket.

Nothing here runs in a tick, and every question has a deadline.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from logging import getLogger

from gpusched.engine.remote.loopback import stream_pair
from gpusched.engine.remote.messages import (
    AttachCall,
    CommandCall,
    OutputPiece,
    OutputWanted,
    UsageFound,
    UsageWanted,
    header_from,
)
from gpusched.engine.remote.relay import ByteStream, MuxTimer, SocketRelay, read_whole
from gpusched.engine.remote.remote_engine import RemoteEngine
from gpusched.engine.remote.services import StreamServices
from gpusched.engine.remote.streams import Stream
from gpusched.errors import NotReady, Refused, TooMany
from gpusched.model.commands import NodePeer
from gpusched.model.step import TaskUsage
from gpusched.model.value import decode, encode

log = getLogger("gpusched.daemon")

Adopt = Callable[[socket.socket, NodePeer], Awaitable[None]]
UserOf = Callable[[str, str], int | None]

ANSWER_S = 5.0
"""How long a node may take to answer, beyond what it was asked to wait."""
PIECE_BYTES = 256 << 10
MOST_ANSWER_BYTES = 1 << 20


class RunStream:
    """A stream to a run's part, for one connection of a client."""

    def __init__(self, stream: ByteStream, calls: set[RunStream]) -> None:
        self._stream, self._calls = stream, calls
        self._relay: SocketRelay | None = None
        calls.add(self)

    async def splice(self, sock: socket.socket, *, is_relayed: bool) -> None:
        """Copy both ways between the client's socket and the run until both have ended, or one breaks. Closes both.

        Args: is_relayed: the client is on another node, and the connection to it may break.
        """
        ended = asyncio.Event()
        self._relay = SocketRelay(self._stream, sock, ended.set, peer="relay" if is_relayed else "client")
        try:
            await ended.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Break off what has not ended."""
        self._calls.discard(self)
        if self._relay is None:
            self._stream.break_off()
        else:
            self._relay.close()


class NodeReach:
    """Streams to the agents of other nodes. Must be made and closed on the daemon's event loop.

    Args: own: the name of the daemon's own node, and what serves streams to runs there.
    """

    def __init__(self, engines: Mapping[str, RemoteEngine], own: tuple[str, StreamServices] | None = None) -> None:
        self._own = own
        self._calls: set[RunStream] = set()
        self._engines: dict[str, RemoteEngine] = {}
        self._timers: list[MuxTimer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._serve: tuple[Adopt, UserOf] | None = None
        for node, engine in engines.items():
            self.add(node, engine)

    def add(self, node: str, engine: RemoteEngine) -> None:
        """Include another node."""
        self._engines[node] = engine
        self._timers.append(MuxTimer(engine.streams))
        engine.streams.on_open = partial(self._accept, node)

    def serve_commands(self, adopt: Adopt, user_of: UserOf) -> None:
        """Let programs of jobs on the nodes use the daemon.

        Args: adopt: serves a connection. user_of: the user of an open run on a node; None if there is none.
        """
        self._serve = adopt, user_of

    def _accept(self, node: str, stream: Stream) -> None:
        try:
            call = header_from(stream.header)
        except ValueError as error:
            log.error("node %s opened a stream that cannot be understood: %s", node, error)
            stream.break_off()
            return
        if self._serve is None or not isinstance(call, CommandCall):
            stream.break_off()
            return
        adopt, user_of = self._serve
        # A node acts only for users who have a job there.
        is_of_job = call.run is not None and user_of(node, call.run) == call.uid
        peer = NodePeer(node, call.uid, call.pid, call.start_ticks, call.run if is_of_job else None)
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        SocketRelay(stream, ours)
        task = asyncio.get_running_loop().create_task(self._adopt(adopt, theirs, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _adopt(self, adopt: Adopt, sock: socket.socket, peer: NodePeer) -> None:
        try:
            await adopt(sock, peer)
        except OSError as error:
            log.warning("a program on node %s cannot be served: %s", peer.node, error)
            sock.close()

    def close(self) -> None:
        for timer in self._timers:
            timer.close()
        for call in list(self._calls):
            call.close()

    def call_run(self, node: str, call: AttachCall) -> RunStream:
        """Call a run's part on a node. Raises: NotReady, TooMany."""
        if self._own is not None and node == self._own[0]:
            stream, there = stream_pair(encode(call))
            self._own[1].serve(there)
            return RunStream(stream, self._calls)
        return RunStream(self._open(node, encode(call), "its runs continue there"), self._calls)

    async def output(self, node: str, wanted: OutputWanted) -> tuple[OutputPiece, bytes]:
        """A piece of a run's output. Raises: NotReady, Refused, TooMany."""
        there = f"its output is at {wanted.path} there"
        found = await self._ask(node, encode(wanted), there, wanted.wait_s + ANSWER_S)
        line, _, data = found.partition(b"\n")
        try:
            piece = decode(line, OutputPiece)
        except ValueError:
            raise self._no_answer(node, there) from None
        if piece.refused is not None:
            raise Refused(f"node {node} cannot read {piece.path or wanted.path}: {piece.refused}", "look at it there")
        return piece, data

    async def usage(self, node: str, run: str) -> tuple[TaskUsage, ...]:
        """What the tasks of a run's steps use on a node. Raises: NotReady, TooMany."""
        there = "its runs continue there"
        found = await self._ask(node, encode(UsageWanted(run)), there, ANSWER_S)
        try:
            return decode(found, UsageFound).tasks
        except ValueError:
            raise self._no_answer(node, there) from None

    async def _ask(self, node: str, header: bytes, there: str, timeout_s: float) -> bytes:
        """What a node answers on a stream. Raises: NotReady, TooMany."""
        found = await read_whole(self._open(node, header, there), MOST_ANSWER_BYTES, timeout_s)
        if found is None:
            raise self._no_answer(node, there)
        return found

    def _open(self, node: str, header: bytes, there: str) -> Stream:
        """Open a stream to a node that answers. Raises: NotReady, TooMany."""
        engine = self._engines.get(node)
        if engine is None:
            raise NotReady(f"node {node} is not part of the cluster now; {there}", "see: ginfo")
        link = engine.link
        if link.unreachable_since is not None or link.is_refused or not engine.streams.is_up:
            raise self._no_answer(node, there)
        try:
            return engine.streams.open(header)
        except ValueError as error:
            raise TooMany(f"node {node} is busy with requests: {error}", "try again") from None

    def _no_answer(self, node: str, there: str) -> NotReady:
        engine = self._engines.get(node)
        why = f" ({engine.link.why})" if engine is not None and engine.link.why else ""
        return NotReady(f"node {node} does not answer{why}; {there}", "see: ginfo")
