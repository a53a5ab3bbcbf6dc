"""Real libraries that speak Slurm, on real small jobs. They are used, never imitated: see `test_client_calls.py`.

They live in an environment of their own, since they need much that gpusched does not:

    .venv/bin/python -m tools.slurm_clients

installs them there and runs these tests.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_lab import SlurmLab

PYTHON = os.environ.get("GPUSCHED_SLURM_CLIENTS", "")
"""Interpreter of the environment that has the libraries."""

SCRIPTS = sorted(Path(__file__).parent.glob("with_*.py"))

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="installs many libraries; run with: python -m tools.slurm_clients"),
]


@pytest.fixture
def clients_lab(tmp_path: Path) -> Iterator[SlurmLab]:
    lab = SlurmLab(tmp_path / "lab", env={"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"})
    # As in an activated environment: some libraries have programs of their own.
    lab.env["PATH"] = f"{os.path.dirname(PYTHON)}:{lab.env['PATH']}"
    yield lab
    lab.close()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem.removeprefix("with_"))
def test_library_works(clients_lab: SlurmLab, script: Path) -> None:
    done = subprocess.run(
        [PYTHON, script], cwd=clients_lab.work, env=clients_lab.env, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}\n{clients_lab.ok('sacct -a')}"
