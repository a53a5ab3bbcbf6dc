"""Slurm's commands as people and tools type them, against a real daemon of the tests' own."""

from __future__ import annotations

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


@pytest.fixture(scope="session")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SlurmLab, dict[int, str]]]:
    """A daemon with the golden machine's queue (jobs 25 to 37) and the ids of its jobs here; to be looked at only."""
    found = SlurmLab(tmp_path_factory.mktemp("busy") / "lab")
    try:
        yield found, found.submit_golden_queue()
    finally:
        # Also when the queue could not be submitted: nothing stays behind.
        found.close()


@pytest.fixture
def own_lab(tmp_path: Path) -> Iterator[SlurmLab]:
    """One daemon like the golden machine for this test alone."""
    found = SlurmLab(tmp_path / "lab")
    yield found
    found.close()
