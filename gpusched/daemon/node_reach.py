"""What requests reach on other nodes: the output of jobs there. Nothing here runs in a tick; all has a deadline."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.engine.remote.messages import OutputPiece, OutputWanted
from gpusched.engine.remote.relay import MuxTimer, read_whole
from gpusched.engine.remote.remote_engine import RemoteEngine
from gpusched.engine.remote.streams import Stream
from gpusched.errors import NotReady, Refused, TooMany
from gpusched.model.value import decode, encode

ANSWER_S = 5.0
"""How long a node may take to answer, beyond what it was asked to wait."""
PIECE_BYTES = 256 << 10
MOST_ANSWER_BYTES = 1 << 20


class NodeReach:
    """Streams to the agents of other nodes. Must be made and closed on the daemon's event loop."""

    def __init__(self, engines: Mapping[str, RemoteEngine]) -> None:
        self._engines = engines
        self._timers = [MuxTimer(engine.streams) for engine in engines.values()]

    def close(self) -> None:
        for timer in self._timers:
            timer.close()

    async def output(self, node: str, wanted: OutputWanted) -> tuple[OutputPiece, bytes]:
        """A piece of a run's output. Raises: NotReady, Refused, TooMany."""
        there = f"its output is at {wanted.path} there"
        stream = self._open(node, encode(wanted), there)
        found = await read_whole(stream, MOST_ANSWER_BYTES, wanted.wait_s + ANSWER_S)
        if found is None:
            raise self._no_answer(node, there)
        line, newline, data = found.partition(b"\n")
        if not newline:
            raise self._no_answer(node, there)
        try:
            piece = decode(line, OutputPiece)
        except ValueError:
            raise self._no_answer(node, there) from None
        if piece.refused is not None:
            raise Refused(f"node {node} cannot read {piece.path or wanted.path}: {piece.refused}", "look at it there")
        return piece, data

    def _open(self, node: str, header: bytes, there: str) -> Stream:
        """Open a stream. Raises: NotReady, TooMany."""
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
