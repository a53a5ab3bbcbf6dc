"""The units as systemd reads them: no unknown directive, no value that it would ignore."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "systemd"
ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("name", sorted(path.name for path in UNITS.glob("*.service")))
def test_systemd_has_nothing_to_say_about_a_unit(name: str, tmp_path: Path) -> None:
    # Where the package is not installed, its executables are missing.
    text = re.sub(r"(?m)^(Exec\w+=)\S+", r"\1/bin/true", (UNITS / name).read_text())
    (tmp_path / name).write_text(text)
    assert ANALYZE is not None
    done = subprocess.run(
        [ANALYZE, "verify", "--man=no", str(tmp_path / name)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
