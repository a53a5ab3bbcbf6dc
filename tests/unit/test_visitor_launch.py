"""The start of a process in a run from outside of it: folder, control group, and what is said if it fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gpusched.engine.linux.as_user import LaunchError
from gpusched.engine.supervisor import launch
from gpusched.engine.supervisor.pty import Pipes
from gpusched.engine.supervisor.visits import environment

PATH = {"PATH": "/usr/bin:/bin"}


class Box:
    """Stands in for the run's control group: notes who has entered it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def enter(self) -> None:
        (self.folder / f"entered-{os.getpid()}").touch()


@pytest.fixture(autouse=True)
def folder_restored() -> Any:
    before = os.getcwd()
    yield
    os.chdir(before)


def ticket(folder: Path, *argv: str) -> dict[str, Any]:
    found = {"uid": os.geteuid(), "user": "me", "argv": list(argv), "script": None, "env": dict(PATH), "umask": 0o22}
    return {**found, "work_dir": str(folder), "pam": False}


def finished(pid: int, streams: Pipes) -> str:
    """Output of a process once it has ended well."""
    streams.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    found = os.read(streams.outputs[0][1], 1000).decode()
    for fd in (streams.input_fd, *(fd for _, fd in streams.outputs)):
        os.close(fd)
    return found


@pytest.mark.parametrize("has_box", [False, True])
def test_it_starts_in_its_folder_and_in_the_control_group_of_the_run(tmp_path: Path, has_box: bool) -> None:
    streams, box = Pipes(), Box(tmp_path) if has_box else None
    pid = launch.start_visitor(ticket(tmp_path, "pwd"), streams, box)  # type: ignore[arg-type]
    assert finished(pid, streams) == f"{tmp_path}\n"
    assert os.listdir(tmp_path) == ([f"entered-{pid}"] if has_box else [])


def test_it_gets_signals_as_a_login_would(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        streams = Pipes()
        pid = launch.start_visitor(ticket(tmp_path, "grep", "^SigIgn", "/proc/self/status"), streams, None)
        ignored = int(finished(pid, streams).split()[1], 16)
        assert not ignored >> (signal.SIGUSR2 - 1) & 1
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [([""], "the command is empty"), (["no-such"], "cannot run no-such: it is not in the job's PATH")],
)
def test_what_cannot_be_started_is_a_sentence(tmp_path: Path, argv: list[str], sentence: str) -> None:
    streams = Pipes()
    with pytest.raises(LaunchError, match=sentence):
        launch.start_visitor(ticket(tmp_path, *argv), streams, None)
    streams.release()
    for fd in (streams.input_fd, *(fd for _, fd in streams.outputs)):
        os.close(fd)


def test_the_job_decides_on_the_schedulers_variables_and_the_client_on_the_others() -> None:
    job = b"A=job\0SLURM_JOB_ID=42\0GPUSCHED_RUN=42.1\0CUDA_VISIBLE_DEVICES=\0SLURMD_NODENAME=n\0EMPTY=\0LINES=a\n=b\0"
    client = {
        "A": "client",
        "NEW": "1",
        **dict.fromkeys(("SLURM_JOB_ID", "GPUSCHED_RUN", "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME"), "99"),
        "SLURM_OVERLAP": "1",
        "CUDA_HOME": "/opt/cuda",
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps",
    }
    assert environment(job, client) == {
        "A": "client",
        "NEW": "1",
        "SLURM_JOB_ID": "42",
        "GPUSCHED_RUN": "42.1",
        "CUDA_VISIBLE_DEVICES": "",
        "SLURMD_NODENAME": "n",
        "SLURM_OVERLAP": "1",
        "CUDA_HOME": "/opt/cuda",
        "EMPTY": "",
        "LINES": "a\n=b",
    }
    assert environment(b"", {}) == {}
