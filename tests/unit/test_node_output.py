"""What a node keeps of output that could not be written where it was wanted, and for how long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpusched.daemon.watch.node_output import KeptOutput, due, kept_in, sweep
from gpusched.model.settings import LimitSettings

NOW = 1e9
DAY_S = 86400.0
MIB = 1 << 20
SETTINGS = LimitSettings(node_output_keep_days=10, node_output_total_mib=8)


def kept(run: str, days: float, mib: int) -> KeptOutput:
    return KeptOutput(run, 1000, NOW - days * DAY_S, mib * MIB)


@pytest.mark.parametrize(
    ("found", "spooled", "gone"),
    [
        pytest.param([], set(), [], id="nothing"),
        pytest.param([kept("1.1", 11, 1), kept("2.1", 9, 1)], set(), ["1.1"], id="the old"),
        pytest.param([kept("1.1", 11, 1)], {"1.1"}, [], id="not of a run in the spool"),
        pytest.param([kept("1.1", 3, 4), kept("2.1", 2, 4), kept("3.1", 1, 4)], set(), ["1.1"], id="too much"),
        pytest.param([kept("1.1", 3, 4), kept("2.1", 2, 9)], {"1.1"}, ["2.1"], id="the next where one is in use"),
        pytest.param([kept("1.1", 3, 9), kept("2.1", 2, 9)], set(), ["1.1", "2.1"], id="each above the total"),
        pytest.param([kept("1.1", 3, 4), kept("2.1", 2, 4)], set(), [], id="just as much as may be"),
    ],
)
def test_what_is_removed(found: list[KeptOutput], spooled: set[str], gone: list[str]) -> None:
    assert [one.run for one in due(found, spooled, SETTINGS, NOW)] == gone


def test_only_folders_of_runs_are_looked_at(tmp_path: Path) -> None:
    for name, days in (("1.1", 20), ("2.1", 1), ("notes", 20)):
        file = tmp_path / name / "home" / "out"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x" * MIB)
        for path in (file, file.parent):
            os.utime(path, (NOW - days * DAY_S, NOW - days * DAY_S))
    (tmp_path / "1.1" / "away").symlink_to(tmp_path / "notes")
    os.utime(tmp_path / "1.1" / "away", (0, 0), follow_symlinks=False)
    assert [one.run for one in kept_in(str(tmp_path))] == ["1.1", "2.1"]
    (tmp_path / "spool").mkdir()
    sweep(str(tmp_path), str(tmp_path / "spool"), SETTINGS, NOW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.1", "notes", "spool"]
    assert (tmp_path / "notes" / "home" / "out").exists()


def test_a_node_that_never_kept_any_has_nothing_to_do(tmp_path: Path) -> None:
    sweep(str(tmp_path / "none"), str(tmp_path / "no spool yet"), SETTINGS, NOW)


def test_nothing_is_removed_while_it_is_not_known_what_runs(tmp_path: Path) -> None:
    (tmp_path / "1.1").mkdir()
    os.utime(tmp_path / "1.1", (0, 0))
    with pytest.raises(FileNotFoundError):
        sweep(str(tmp_path), str(tmp_path / "lost spool"), SETTINGS, NOW)
    assert (tmp_path / "1.1").exists()
