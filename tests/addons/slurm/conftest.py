"""Slurm's commands as people and tools type them, against a real daemon of the tests' own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_lab import SlurmLab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """One daemon like the golden machine, for tests that look only at their own jobs."""
    found = SlurmLab(tmp_path_factory.mktemp("slurm") / "lab")
    yield found
    found.close()


class GoldenQueues:
    """Daemons with the golden machine's queue, one after the other: its running jobs end after some minutes."""

    _LONGEST_S = 100.0
    """The shorter one takes 240 s. A test that begins by then has the rest to itself."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._lab: SlurmLab | None = None
        self._ids: dict[int, str] = {}
        self._until = 0.0

    def get(self) -> tuple[SlurmLab, dict[int, str]]:
        """One whose jobs run on during a test, and the ids of its jobs."""
        if self._lab is None or time.monotonic() > self._until:
            self.close()
            self._until = time.monotonic() + self._LONGEST_S
            self._lab = SlurmLab(self._folders.mktemp("busy") / "lab")
            self._ids = self._lab.submit_golden_queue()
        return self._lab, self._ids

    def close(self) -> None:
        """Nothing stays behind, also when the queue could not be submitted."""
        if self._lab is not None:
            self._lab.close()
            self._lab = None


@pytest.fixture(scope="session")
def golden_queues(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoldenQueues]:
    queues = GoldenQueues(tmp_path_factory)
    yield queues
    queues.close()


@pytest.fixture
def busy(golden_queues: GoldenQueues) -> tuple[SlurmLab, dict[int, str]]:
    """A daemon with the golden machine's queue (jobs 25 to 37) and the ids of its jobs here; to be looked at only."""
    return golden_queues.get()


@pytest.fixture
def own_lab(tmp_path: Path) -> Iterator[SlurmLab]:
    """One daemon like the golden machine for this test alone."""
    found = SlurmLab(tmp_path / "lab")
    yield found
    found.close()
