"""Fixtures: real daemons that are gone, with their jobs, when the test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Daemon

from gpusched.daemon.failures import CHECK_VARIABLE


@pytest.fixture
def make_daemon(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Daemon]]:
    """Makes daemons; each is started unless told otherwise, and closed at the end.

    Through the night they compare their planner with the job table after every tick.
    """
    made: list[Daemon] = []
    is_nightly = request.node.get_closest_marker("nightly") is not None

    def make(*, start: bool = True, **options: str) -> Daemon:
        daemon = Daemon(tmp_path / f"home{len(made)}", **options)
        made.append(daemon)
        if is_nightly:
            daemon.env[CHECK_VARIABLE] = "1"
        if start:
            daemon.start()
        return daemon

    yield make
    for daemon in made:
        if daemon.process is not None:
            daemon.close()
        daemon.disconnect()
        for file in (daemon.home / "log" / "gpuschedd.log", daemon.home / "daemon.out"):
            found = [line for line in file.read_text().splitlines() if " planner" in line] if file.exists() else []
            assert not found, found


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running daemon without GPUs."""
    return make_daemon()


@pytest.fixture
def gpu_daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running daemon with four simulated GPUs."""
    return make_daemon(fake_gpus="4x24GiB")
