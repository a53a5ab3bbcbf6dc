"""A root daemon for all users, and the path to the people who ask it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "daemon"))

from people import SystemDaemon


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes system daemons; all are ended, with their jobs, when the test is over."""
    made: list[SystemDaemon] = []

    def of(config: str = "", fake_gpus: str = "2x24GiB") -> SystemDaemon:
        daemon = SystemDaemon(config, fake_gpus)
        made.append(daemon)
        daemon.start()
        return daemon

    yield of
    for daemon in made:
        daemon.close()
