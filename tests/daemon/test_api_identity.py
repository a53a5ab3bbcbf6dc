"""Who may talk to a personal daemon: its owner, as the kernel says, and nobody else."""

from __future__ import annotations

import json
import os
import socket
import stat

import pytest
from harness import Daemon


def ask_as(uid: int, path: str) -> bytes:
    """Forks, becomes another user, and asks. The interpreter itself may lie where that user cannot read."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
                sock.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-User: root\r\n\r\n")
                while chunk := sock.recv(65536):
                    os.write(write_fd, chunk)
        except OSError as error:
            os.write(write_fd, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as reader:
        answer = reader.read()
    os.waitpid(child, 0)
    return answer


def test_socket_and_state_belong_to_the_owner_alone(daemon: Daemon) -> None:
    daemon.wait(daemon.submit("/bin/true"))
    assert stat.S_IMODE((daemon.home / "run" / "api.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE((daemon.home / "gpusched.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((daemon.home / "spool").stat().st_mode) & 0o066 == 0
    assert stat.S_IMODE((daemon.home / "run").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused_by_peer_credentials(daemon: Daemon) -> None:
    path = daemon.home / "run" / "api.sock"
    # Open every door that file modes close, so that only the check of the peer is left.
    os.chmod(path, 0o666)
    for folder in (path.parent, *path.parent.parents):
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & 0o001:
            os.chmod(folder, mode | 0o001)
    answer = ask_as(65534, str(path))
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "forbidden"
    assert "belongs to root" in error["message"]
