"""Fixtures: real daemons that are gone, with their jobs, when the test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Daemon


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Makes daemons; each is started unless told otherwise, and closed at the end."""
    made: list[Daemon] = []

    def make(*, start: bool = True, **options: str) -> Daemon:
        daemon = Daemon(tmp_path / f"home{len(made)}", **options)
        made.append(daemon)
        if start:
            daemon.start()
        return daemon

    yield make
    for daemon in made:
        if daemon.process is not None:
            daemon.close()
        daemon.disconnect()


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running daemon without GPUs."""
    return make_daemon()


@pytest.fixture
def gpu_daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running daemon with four simulated GPUs."""
    return make_daemon(fake_gpus="4x24GiB")
