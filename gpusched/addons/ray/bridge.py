"""The Ray driver: membership and streams for the daemon, which started it and can do without it at any moment.

Ray's core ends the process that it is loaded into when the raylet of the machine dies, and a call to it may block while
the head's directory of nodes is away. Neither may happen to the daemon. See the package for the protocol of the socket.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import sys
import uuid
from typing import Any, NamedTuple

from gpusched.addons.ray import relay as relay_module
from gpusched.addons.ray.probe import check_token_is_required
from gpusched.addons.ray.relay import CHUNK_BYTES, RELAY_VERSION, SECRET_BYTES, AgentRelay
from gpusched.addons.ray.site import RayFolder, RayMember
from gpusched.errors import NotReady

log = logging.getLogger("gpusched.ray")

NAMESPACE = "gpusched"
PERIOD_S = 1.0
_PATIENCE_S = 5.0
"""A membership that takes longer to read is a problem; the streams continue."""
_OPEN_S = 30.0
_CONNECT_S = 3.0
"""To the port of a relay; a firewall may drop what is sent there."""
_WORDS_S = 2.0
"""How long the end of a stream may come before that of its agent, which says why."""
_PACKET_BYTES = 1 << 16
_MOST_PACKET_BYTES = 1 << 17


class _Node(NamedTuple):
    name: str
    address: str
    id: str


class Bridge:
    """Args: control: socket of packets to the daemon. ray: the connected Ray; member: this machine."""

    def __init__(self, control: socket.socket, ray: Any, member: RayMember) -> None:
        self._control = control
        self._ray = ray
        self._member = member
        self._nodes: dict[str, _Node] = {}
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._actors: dict[str, Any] = {}
        """By node id."""
        self._trouble: str | None = None

    async def run(self) -> None:
        """Serve until the daemon hangs up."""
        asyncio.get_running_loop().add_reader(self._control, self._obey)
        reading: asyncio.Task[list[_Node]] | None = None
        while True:
            if reading is None:
                reading = asyncio.create_task(asyncio.to_thread(self._read_nodes))
            done, _ = await asyncio.wait([reading], timeout=_PATIENCE_S)
            if done:
                self._take_nodes(reading)
                reading = None
                await asyncio.sleep(PERIOD_S)
            else:
                self._tell_trouble(f"the head of Ray, {self._member.gcs}, does not list its nodes")

    # --- membership -----------------------------------------------------------------------------------

    def _read_nodes(self) -> list[_Node]:
        """Nodes that Ray believes alive, without the head's own, whose id changes when its raylet is started again."""
        alive = [
            _Node(one["NodeName"], one["NodeManagerAddress"], one["NodeID"])
            for one in self._ray.nodes()
            if one["Alive"]
        ]
        own = self._member.name, self._member.address
        return [node for node in alive if (node.name, node.address) != own]

    def _take_nodes(self, reading: asyncio.Task[list[_Node]]) -> None:
        error = reading.exception()
        if error is not None:
            self._tell_trouble(f"Ray does not list its nodes: {first_line(error)}")
            return
        self._tell_trouble(None)
        found: dict[str, _Node] = {}
        for node in reading.result():
            known = self._nodes.get(node.name)
            if node.name not in found or (known is not None and node.id == known.id):
                found[node.name] = node
        for name, node in self._nodes.items():
            if found.get(name) != node and name in self._streams:
                self._streams.pop(name).cancel()
                self._tell({"closed": name, "why": f"Ray has lost {name}"})
        self._nodes = found
        self._actors = {id_: one for id_, one in self._actors.items() if any(id_ == n.id for n in found.values())}
        self._tell({"nodes": [[*node] for node in found.values()]})

    # --- the daemon -------------------------------------------------------------------------------------

    def _obey(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            # The daemon is gone. Ray's own way to end takes long, and may hang.
            os._exit(0)
        name = json.loads(data)["open"]
        stream = socket.socket(fileno=fds[0])
        stream.setblocking(False)
        before = self._streams.pop(name, None)
        if before is not None:
            before.cancel()
        self._streams[name] = asyncio.create_task(self._connect(name, stream))

    def _tell(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        try:
            if len(data) <= _MOST_PACKET_BYTES:
                self._control.send(data)
        except BlockingIOError:
            pass  # the daemon is slow; all of this is sent again
        except OSError:
            os._exit(0)

    def _tell_trouble(self, trouble: str | None) -> None:
        if trouble is not None or self._trouble is not None:
            self._tell({"trouble": trouble})
        self._trouble = trouble

    # --- streams ----------------------------------------------------------------------------------------

    async def _connect(self, name: str, stream: socket.socket) -> None:
        try:
            why = await self._relay(name, stream)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            why = first_line(error)
        finally:
            stream.close()
        if self._streams.get(name) is asyncio.current_task():
            del self._streams[name]
            self._tell({"closed": name, "why": f"{name}: {why}"})

    async def _relay(self, name: str, stream: socket.socket) -> str:
        """Pass streams on until one side ends; returns why."""
        node = self._nodes.get(name)
        if node is None:
            return "Ray does not know this node"
        connection = uuid.uuid4().hex
        actor = await asyncio.wait_for(self._actor(node), _OPEN_S)
        try:
            direct = await self._connect_direct(node, actor, connection)
            if direct is None:
                await asyncio.wait_for(_result(actor.open.remote(connection)), _OPEN_S)
                self._tell({"opened": name})
                return await _first_end(_send_all(stream, actor, connection), _receive_all(stream, actor, connection))
            try:
                self._tell({"opened": name})
                ended = asyncio.ensure_future(_result(actor.ended.remote(connection)))
                return await _first_end(
                    _copy(stream, direct, None), _copy(direct, stream, ended), asyncio.shield(ended)
                )
            finally:
                direct.close()
        finally:
            actor.close.remote(connection)

    async def _connect_direct(self, node: _Node, actor: Any, connection: str) -> socket.socket | None:
        """A stream to an agent that the relay starts behind it; None where there is no way to the relay's port."""
        secret = secrets.token_bytes(SECRET_BYTES)
        port = await asyncio.wait_for(_result(actor.listen.remote(connection, secret)), _OPEN_S)
        if not port:
            return None
        family = socket.AF_INET6 if ":" in node.address else socket.AF_INET
        direct = socket.socket(family, socket.SOCK_STREAM)
        direct.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(loop.sock_connect(direct, (node.address, port)), _CONNECT_S)
            direct.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_sendall(direct, secret)
            await asyncio.wait_for(_result(actor.serve.remote(connection)), _OPEN_S)
        except (OSError, asyncio.TimeoutError) as error:
            direct.close()
            log.warning("no stream to %s port %d of %s: %s", node.address, port, node.name, first_line(error))
            return None
        except BaseException:
            direct.close()
            raise
        return direct

    async def _actor(self, node: _Node) -> Any:
        """The relay of a node. One that is pinned to an earlier life of the node never runs again."""
        if node.id not in self._actors:
            self._actors[node.id] = await asyncio.to_thread(self._find_actor, node)
        return self._actors[node.id]

    def _find_actor(self, node: _Node) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        relay = self._ray.remote(AgentRelay).options(
            name=f"agent-{node.name}-{node.id}-{RELAY_VERSION}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=100,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        return relay.remote()


async def _result(reference: Any) -> Any:
    return await reference


async def _first_end(*ways: Any) -> str:
    """Run these until one of them has an end to tell of; returns what it says."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return str(done.pop().result())
    finally:
        for task in tasks:
            task.cancel()
        # Their sockets are closed next.
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(source: socket.socket, to: socket.socket, ended: asyncio.Future[Any] | None) -> str:
    """Pass bytes on to the end of the source. Args: ended: says why there are no more; None: the daemon's end."""
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(source, CHUNK_BYTES):
            await loop.sock_sendall(to, data)
    except OSError as error:
        if ended is None:
            return f"the stream to the agent failed: {error.strerror}"
    if ended is None:
        return "the daemon has closed the connection"
    done, _ = await asyncio.wait([ended], timeout=_WORDS_S)
    return str(ended.result()) if done else "the stream of the agent has ended"


async def _send_all(stream: socket.socket, actor: Any, connection: str) -> str:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(stream, CHUNK_BYTES):
        await actor.write.remote(connection, data)
    return "the daemon has closed the connection"


async def _receive_all(stream: socket.socket, actor: Any, connection: str) -> str:
    loop = asyncio.get_running_loop()
    while True:
        data, ended = await actor.read.remote(connection)
        if ended is not None:
            return str(ended)
        await loop.sock_sendall(stream, data)


def first_line(error: BaseException) -> str:
    """A sentence about an error of Ray's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A failed call quotes a traceback, whose last line says what happened.
    text = lines[-1] if lines and "Traceback" in str(error) else (lines[0] if lines else "")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def main(argv: list[str]) -> int:
    """Args: argv: state folder and name of this machine. The environment is that of `site.ray_environment`."""
    logging.basicConfig(level="WARNING", stream=sys.stderr, format="%(message)s", force=True)
    control = socket.socket(fileno=os.dup(0))
    control.setblocking(False)
    folder = RayFolder(*argv)
    member = folder.load()
    if member is None:
        sys.stderr.write("this machine is not in a cluster\n")
        return 1
    try:
        check_token_is_required(member.gcs)
    except NotReady as error:
        sys.stderr.write(f"{error.message}; {error.hint}\n")
        return 1
    import ray

    ray.cloudpickle.register_pickle_by_value(relay_module)
    try:
        ray.init(
            member.gcs,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=member.address,
        )
    except Exception as error:
        sys.stderr.write(f"{first_line(error)}\n")
        return 1
    asyncio.run(Bridge(control, ray, member).run())
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Ray's own way to end takes long, and may hang.
    os._exit(code)
