"""The bridge between the daemon and Ray: which nodes it tells of, and how bytes travel to the agent of a node."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched.addons.ray import bridge as module
from gpusched.addons.ray import relay as relay_module
from gpusched.addons.ray.bridge import Bridge
from gpusched.addons.ray.relay import AGENT_VARIABLE, SECRET_BYTES, STREAM_VARIABLE, AgentRelay
from gpusched.addons.ray.site import RayMember

CAT = """
import os
while data := os.read(0, 65536):
    while data:
        data = data[os.write(1, data):]
"""
HEAD = RayMember("head", "n1", "10.0.0.1", "10.0.0.1")


class FakeRay:
    """A membership: name, address and id of each node alive."""

    def __init__(self) -> None:
        self.alive: list[tuple[str, str, str]] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeName": name, "NodeManagerAddress": address, "NodeID": id_, "Alive": True}
            for name, address, id_ in self.alive
        ]


class Told:
    """A bridge, and what the daemon hears of it."""

    def __init__(self) -> None:
        self.ray = FakeRay()
        self._theirs, self._ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self.bridge = Bridge(self._theirs, self.ray, HEAD)

    def nodes(self, *alive: tuple[str, str, str]) -> dict[str, str]:
        """Node ids by name that the daemon is told of once these are alive."""
        self.ray.alive = list(alive)

        async def read() -> None:
            reading = asyncio.ensure_future(asyncio.to_thread(self.bridge._read_nodes))
            await asyncio.wait([reading])
            self.bridge._take_nodes(reading)

        asyncio.run(read())
        message = json.loads(self._ours.recv(1 << 16))
        return {name: id_ for name, _, id_ in message["nodes"]}

    def close(self) -> None:
        self._theirs.close()
        self._ours.close()


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.close()


def test_the_head_is_no_node_and_another_machine_of_its_name_is(told: Told) -> None:
    assert told.nodes(("n1", "10.0.0.1", "a"), ("n2", "10.0.0.2", "b")) == {"n2": "b"}
    # The daemon says that this one cannot be used, with its address.
    assert told.nodes(("n1", "10.0.0.1", "a"), ("n1", "10.0.0.9", "c")) == {"n1": "c"}


@pytest.mark.parametrize("order", [1, -1], ids=["known-first", "known-last"])
def test_of_two_nodes_with_one_name_the_known_one_stays(told: Told, order: int) -> None:
    known, second = ("n2", "10.0.0.2", "b"), ("n2", "10.0.0.3", "c")
    assert told.nodes(known) == {"n2": "b"}
    assert told.nodes(*(known, second)[::order]) == {"n2": "b"}
    # The raylet of a machine that has joined again, or another machine once the first is gone.
    assert told.nodes(second) == {"n2": "c"}


class Handle:
    """A relay as its callers see it, and how often they have called."""

    def __init__(self, relay: AgentRelay) -> None:
        self._relay = relay
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> SimpleNamespace:
        method = getattr(self._relay, name)

        def remote(*args: Any) -> asyncio.Task[Any]:
            self.calls[name] += 1
            return asyncio.ensure_future(method(*args))

        return SimpleNamespace(remote=remote)


class Relayed:
    """The bridge, and the relay of node `n2`, without Ray between them. The agent repeats what it reads."""

    def __init__(self, agent: str = CAT) -> None:
        self._environ = pytest.MonkeyPatch()
        self._environ.setenv(AGENT_VARIABLE, json.dumps([sys.executable, "-c", agent]))
        self.relay = AgentRelay()
        self.handle = Handle(self.relay)
        theirs, self._control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs = theirs
        self._control.setblocking(False)
        self.bridge = Bridge(theirs, FakeRay(), HEAD)
        node = module._Node("n2", "127.0.0.1", "b")
        self.bridge._nodes["n2"], self.bridge._actors["b"] = node, self.handle
        self._streams: list[socket.socket] = []

    def listen_on(self, *ports: int) -> None:
        self._environ.setenv(STREAM_VARIABLE, json.dumps(["127.0.0.1", *ports]))

    def open(self) -> socket.socket:
        """The daemon's end of a new stream, as it asks for one."""
        ours, theirs = socket.socketpair()
        for one in (ours, theirs):
            one.setblocking(False)
        before = self.bridge._streams.pop("n2", None)
        if before is not None:
            before.cancel()
        self.bridge._streams["n2"] = asyncio.ensure_future(self.bridge._connect("n2", theirs))
        self._streams.append(ours)
        return ours

    async def hear(self) -> dict[str, Any]:
        """What the bridge tells next."""
        message: dict[str, Any] = json.loads(await asyncio.get_running_loop().sock_recv(self._control, 1 << 16))
        return message

    def play(self, story: Callable[[], Awaitable[None]]) -> None:
        async def to_the_end() -> None:
            try:
                await asyncio.wait_for(story(), 60)
            finally:
                for stream in self._streams:
                    stream.close()
                for task in list(self.bridge._streams.values()):
                    await asyncio.wait([task])
                async with self.relay._changing:
                    await self.relay._end()

        try:
            asyncio.run(to_the_end())
        finally:
            self._environ.undo()
            self._theirs.close()
            self._control.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def repeated(stream: socket.socket, data: bytes) -> bool:
    """Whether the agent at the other end repeats this."""
    loop = asyncio.get_running_loop()
    sending = asyncio.ensure_future(loop.sock_sendall(stream, data))
    found = b""
    while len(found) < len(data) and (more := await loop.sock_recv(stream, 1 << 16)):
        found += more
    await sending
    return found == data


def test_bytes_go_directly_and_not_in_calls() -> None:
    one = Relayed()
    one.listen_on(free_port())

    async def story() -> None:
        stream = one.open()
        assert await one.hear() == {"opened": "n2"}
        for number in range(50):
            assert await repeated(stream, b"%d" % number)
        assert await repeated(stream, bytes(range(256)) * 4096)
        assert one.handle.calls == {"listen": 1, "serve": 1, "ended": 1}
        pid = one.relay._child.pid if one.relay._child else 0
        stream = one.open()
        assert await one.hear() == {"opened": "n2"}
        assert await repeated(stream, b"again")
        assert one.relay._child is not None
        assert one.relay._child.pid != pid

    one.play(story)


def test_bytes_go_in_calls_where_no_port_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Relayed()

    async def story() -> None:
        # None is free; then: a firewall refuses the one that is.
        with socket.create_server(("127.0.0.1", 0)) as taken:
            one.listen_on(taken.getsockname()[1])
            stream = one.open()
            assert await one.hear() == {"opened": "n2"}
            assert await repeated(stream, b"first")
        one.listen_on(free_port())
        one.bridge._nodes["n2"] = module._Node("n2", "127.9.9.9", "b")
        stream = one.open()
        assert await one.hear() == {"opened": "n2"}
        assert await repeated(stream, b"second")
        assert (one.handle.calls["open"], one.handle.calls["serve"]) == (2, 0)

    one.play(story)


def test_a_port_of_a_relay_starts_no_agent_without_the_secret() -> None:
    one = Relayed()
    port = free_port()
    one.listen_on(port)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        secret = b"s" * SECRET_BYTES
        assert await one.relay.listen("one", secret) == port
        for wrong in (b"", b"x" * SECRET_BYTES, secret[:-1], b"GET / HTTP/1.1\r\n\r\n" + secret):
            with socket.create_connection(("127.0.0.1", port)) as stream:
                stream.setblocking(False)
                await loop.sock_sendall(stream, wrong)
                stream.shutdown(socket.SHUT_WR)
                try:
                    assert await loop.sock_recv(stream, 1) == b""
                except ConnectionResetError:
                    pass
            assert one.relay._child is None
        with socket.create_connection(("127.0.0.1", port)) as stream:
            stream.setblocking(False)
            await loop.sock_sendall(stream, secret)
            assert await one.relay.serve("one") > 0
            assert await repeated(stream, b"in")
        # And it is open for one stream.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    one.play(story)


@pytest.mark.parametrize("is_direct", [True, False])
def test_the_end_of_an_agent_says_why(is_direct: bool) -> None:
    one = Relayed("import sys; sys.stdin.read(3); sys.exit('no room')")
    if is_direct:
        one.listen_on(free_port())

    async def story() -> None:
        stream = one.open()
        assert await one.hear() == {"opened": "n2"}
        stream.send(b"end")
        assert await one.hear() == {"closed": "n2", "why": "n2: the agent ended with 1: no room"}

    one.play(story)


@pytest.mark.parametrize(
    ("ends", "fresh_s", "why"),
    [
        ("os._exit(1)", 60.0, "the agent ended with 1: a warning"),
        ("os._exit(1)", -1.0, "the agent ended with 1"),
        ("os.kill(os.getpid(), 9)", 60.0, "the agent ended with -9"),
    ],
    ids=["just before", "long before", "killed"],
)
@pytest.mark.parametrize("is_direct", [True, False])
def test_only_what_an_agent_wrote_just_before_its_end_is_why(
    monkeypatch: pytest.MonkeyPatch, is_direct: bool, ends: str, fresh_s: float, why: str
) -> None:
    monkeypatch.setattr(relay_module, "_FRESH_S", fresh_s)
    one = Relayed(f"import os, sys; sys.stderr.write('a warning\\n'); sys.stdin.read(3); {ends}")
    if is_direct:
        one.listen_on(free_port())

    async def story() -> None:
        stream = one.open()
        assert await one.hear() == {"opened": "n2"}
        stream.send(b"end")
        assert await one.hear() == {"closed": "n2", "why": f"n2: {why}"}

    one.play(story)


def test_an_agent_ends_with_the_stream_of_the_daemon() -> None:
    one = Relayed()
    one.listen_on(free_port())

    async def story() -> None:
        stream = one.open()
        assert await one.hear() == {"opened": "n2"}
        child = one.relay._child
        assert child is not None
        stream.close()
        assert await one.hear() == {"closed": "n2", "why": "n2: the daemon has closed the connection"}
        await child.wait()

    one.play(story)
