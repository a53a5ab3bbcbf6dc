"""scontrol requeue in the job that it requeues: the end of the run comes before the answer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
from pathlib import Path

import pytest
from slurm_lab import SlurmLab


def answer_after_term(server: socket.socket) -> None:
    """Send the client TERM as soon as it has asked, as its job's supervisor does, and answer it then."""
    connection, _ = server.accept()
    with connection:
        asked = b""
        while b"}" not in asked:
            asked += connection.recv(65536)
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        os.kill(pid, signal.SIGTERM)
        body = b'{"changed":["1"]}'
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with contextlib.suppress(BrokenPipeError):
            # A client that has died of it, as one outside of the job does.
            connection.sendall(head.encode() + body)


@pytest.mark.parametrize("job", [{"SLURM_JOB_ID": "1"}, {}], ids=["inside", "outside"])
def test_outlives_the_run_in_a_job_alone(lab: SlurmLab, tmp_path: Path, job: dict[str, str]) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        thread = threading.Thread(target=answer_after_term, args=(server,))
        thread.start()
        done = lab.type("scontrol requeue 1; exit $?", GPUSCHED_SOCKET=str(path), **job)
        thread.join()
    assert done.code == (0 if job else 128 + signal.SIGTERM)
