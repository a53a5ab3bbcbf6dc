"""Connections that a node makes to its runs for their users."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from pathlib import Path

import pytest

from gpusched.engine.linux.as_user import Owner
from gpusched.engine.remote.command_door import listen
from gpusched.engine.remote.services import _connect_as

_UCRED = struct.Struct("3i")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another user")


@pytest.fixture
def nobody() -> Owner:
    found = pwd.getpwnam("nobody")
    return Owner("nobody", found.pw_uid, found.pw_gid)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for one in (tmp_path, *tmp_path.parents[:3]):
        one.chmod(one.stat().st_mode | 0o711)
    return tmp_path


def refuse(*ids: object) -> None:
    raise AssertionError("the identity is that of all threads of this process")


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process nothing may change its identity; a child of it has these calls under other names."""
    own, real = os.getpid(), {name: getattr(os, name) for name in ("setgroups", "setresgid", "setresuid")}
    for name, call in real.items():
        monkeypatch.setattr(os, name, lambda *ids, call=call: refuse() if os.getpid() == own else call(*ids))
    for name in ("seteuid", "setegid", "setuid", "setgid"):
        monkeypatch.setattr(os, name, refuse)


def test_a_connection_is_that_of_the_user_and_works_from_here(
    folder: Path, nobody: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, children = os.fork, list[int]()

    def forked() -> int:
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", forked)
    with listen(str(folder / "door"), 0o600) as listener:
        os.chown(folder / "door", nobody.uid, -1)
        sock = _connect_as(nobody, str(folder / "door"))
        assert sock is not None
        listener.setblocking(True)
        peer, _ = listener.accept()
        with sock, peer:
            _, uid, gid = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            assert (uid, gid) == (nobody.uid, nobody.gid)
            sock.send(b"hello")
            assert peer.recv(16) == b"hello"
    (child,) = children
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def test_a_door_of_somebody_else_stays_shut(folder: Path, nobody: Owner) -> None:
    with listen(str(folder / "door"), 0o600), pytest.raises(PermissionError):
        _connect_as(nobody, str(folder / "door"))


def test_where_nobody_listens_there_is_no_connection(folder: Path, nobody: Owner) -> None:
    assert _connect_as(nobody, str(folder / "door")) is None
    listener = listen(str(folder / "door"), 0o600)
    os.chown(folder / "door", nobody.uid, -1)
    listener.close()
    assert _connect_as(nobody, str(folder / "door")) is None
