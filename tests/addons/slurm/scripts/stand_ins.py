"""What the stand-ins for torch, Ray, MPI and their like share: ranks that really meet over a socket. Standard library.

    table = meet(rank, world, "n1", 29500)

Rank 0 listens, the others connect, and all of them get the same table: what each rank is and has, and the address from
which it came. `STAND_IN_FAIL_RANK=3` has that rank fail once all have met, while the others wait for it, as ranks do in
a collective operation.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

PATIENCE_S = 60.0


def resolve(host: str) -> str:
    """Address of a node. Where all nodes are one machine, their names lead nowhere: the test says where to."""
    return os.environ.get("STAND_IN_ADDRESS") or socket.gethostbyname(host)


def facts(**more: Any) -> dict[str, Any]:
    """What a process is and has."""
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {
        "node": os.environ["SLURMD_NODENAME"],
        "host": socket.gethostname(),
        "gpus": [int(card) for card in cards.split(",") if card],
        "cpus": len(os.sched_getaffinity(0)),
        "job": os.environ["SLURM_JOB_ID"],
        "step": os.environ.get("SLURM_STEP_ID"),
        **more,
    }


def connect(host: str, port: int) -> socket.socket:
    """A connection to who listens there, now or soon."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            stream = socket.create_connection((resolve(host), port), timeout=PATIENCE_S)
            break
        except OSError as error:
            if time.monotonic() > until:
                sys.exit(f"{host}:{port} cannot be reached from {socket.gethostname()}: {error}")
            time.sleep(0.05)
    # Between two processes on one machine it may have connected to itself.
    if stream.getsockname() == stream.getpeername():
        stream.close()
        return connect(host, port)
    return stream


def listen(host: str, port: int) -> socket.socket:
    """A listener on the address that this name leads to. Raises: OSError, on any other machine above all."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((resolve(host), port))
    except OSError:
        server.close()
        raise
    server.listen(64)
    server.settimeout(PATIENCE_S)
    return server


def say(stream: socket.socket, message: Any) -> None:
    stream.sendall(json.dumps(message).encode() + b"\n")


def hear(stream: socket.socket) -> Any:
    """The next message; None at the end."""
    line = b""
    while not line.endswith(b"\n"):
        more = stream.recv(1)
        if not more:
            return None
        line += more
    return json.loads(line)


def meet(rank: int, world: int, host: str, port: int, **more: Any) -> list[dict[str, Any]]:
    """Wait for all ranks; returns what each of them is and has, in order."""
    own = facts(rank=rank, world=world, **more)
    if rank == 0:
        server = listen(host, port)
        peers: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
        while len(peers) < world - 1:
            stream, (address, _) = server.accept()
            found = hear(stream)
            if found is None or found["rank"] in (0, *peers) or found["world"] != world:
                sys.exit(f"rank 0 of {world} met somebody else than expected: {found}")
            peers[found["rank"]] = (stream, {**found, "from": address})
        table = [{**own, "from": resolve(host)}, *(peers[number][1] for number in sorted(peers))]
        for stream, _ in peers.values():
            say(stream, table)
    else:
        stream = connect(host, port)
        say(stream, own)
        table = hear(stream)
        if table is None:
            sys.exit(f"rank {rank} of {world} was left by rank 0")
    assert [one["rank"] for one in table] == list(range(world)), table
    _perhaps_fail(rank)
    return table


def _perhaps_fail(rank: int) -> None:
    failing = os.environ.get("STAND_IN_FAIL_RANK", "")
    if not failing:
        return
    if rank == int(failing):
        sys.stderr.write(f"rank {rank} fails\n")
        sys.exit(9)
    time.sleep(600)


def report(table: list[dict[str, Any]]) -> None:
    """Print what was found, for the test; rank 0 alone does."""
    print("TABLE " + json.dumps(table), flush=True)
