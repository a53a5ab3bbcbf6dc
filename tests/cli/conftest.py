"""Commands as users type them, against a real daemon of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Shell, stopped


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """One scheduler with two simulated GPUs for tests that only look at their own jobs."""
    root = tmp_path_factory.mktemp("cli")
    (root / "home").mkdir()
    (root / "home" / "config.toml").write_text('[node]\nname = "lab1"\ncpus = 64\nmem_mib = 65536\n')
    shell = Shell(root / "home", root, GPUSCHED_FAKE_GPUS="2xA100:80GiB+1xT4:16GiB")
    yield shell
    stopped(shell)


@pytest.fixture
def sh(shared: Shell, tmp_path: Path) -> Shell:
    """The shared scheduler, from a folder of the test's own."""
    shell = Shell(shared.home, tmp_path)
    shell.env = dict(shared.env)
    return shell


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Shell]:
    """A scheduler for this test alone, which starts with the first command."""
    (tmp_path / "work").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text('[node]\nname = "lab1"\ncpus = 8\nmem_mib = 65536\n')
    shell = Shell(tmp_path / "home", tmp_path / "work", GPUSCHED_FAKE_GPUS="2x24GiB")
    shell.is_to_start = True
    yield shell
    stopped(shell)
