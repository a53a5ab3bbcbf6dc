"""Files that are replaced whole, or not at all."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from gpusched.paths import replace_file


def test_the_mode_is_as_wanted_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for mode in (0o600, 0o644, 0o600):
        replace_file(str(path), b"text", mode)
        assert path.stat().st_mode & 0o777 == mode
    assert [found.name for found in tmp_path.iterdir()] == ["state"]


def test_a_file_that_cannot_be_written_whole_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state"
    replace_file(str(path), b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As a disk that fills up in the middle: the system writes ten bytes and reports no error.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            replace_file(str(path), bytes(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"before"
