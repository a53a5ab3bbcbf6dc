"""The door of the socket by hand: who is given up for whom when there is no room."""

from __future__ import annotations

import asyncio

import pytest

from gpusched.api import connection_limits
from gpusched.api.connection_limits import ConnectionLimiter, LimitedConnection
from gpusched.model.settings import LimitSettings


class Wire(asyncio.Transport):
    """A connection of this user."""

    def __init__(self, uid: int) -> None:
        super().__init__()
        self.uid = uid
        self.said = b""
        self.is_cut = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.said += bytes(data)

    def close(self) -> None:
        self.is_cut = True

    def abort(self) -> None:
        self.is_cut = True

    def get_write_buffer_size(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "peer_of", lambda wire: (wire.uid, 1))
    monkeypatch.setattr("os.geteuid", lambda: 0)


def connect(doors: ConnectionLimiter, uid: int, *, in_use: bool = False) -> tuple[LimitedConnection, Wire]:
    door, wire = doors(), Wire(uid)
    door.connection_made(wire)
    if in_use:
        door.begin()
    return door, wire


def test_the_only_idle_connection_makes_room_for_its_own_users_next_one() -> None:
    async def scenario() -> None:
        doors = ConnectionLimiter(asyncio.Protocol, lambda: LimitSettings(connections=10))
        busy = [connect(doors, 1000, in_use=True)[1] for _ in range(9)]
        _, idle = connect(doors, 1001)
        new, wire = connect(doors, 1001)
        assert idle.is_cut
        assert not wire.is_cut
        assert not any(one.is_cut for one in busy)
        assert len(doors) == 10
        # It is counted as theirs: with it in use there is nothing to be given up but one of whoever has most.
        new.begin()
        _, third = connect(doors, 1001)
        assert not third.is_cut
        assert [one.is_cut for one in busy].count(True) == 1

    asyncio.run(scenario())
