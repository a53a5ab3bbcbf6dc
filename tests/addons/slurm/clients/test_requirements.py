"""What the slow suite installs."""

from __future__ import annotations

from pathlib import Path

from tools.slurm_clients import libraries

NAMES = {
    "dask": "dask-jobqueue",
    "hydra": "hydra-submitit-launcher",
    "psij": "psij-python",
    "simple_slurm": "simple-slurm",
}


def test_every_library_that_is_tried_is_installed() -> None:
    wanted = {line.partition(">")[0].partition("[")[0] for line in libraries()}
    tried = {path.stem.removeprefix("with_") for path in Path(__file__).parent.glob("with_*.py")}
    assert {NAMES.get(name, name) for name in tried} <= wanted
    assert len(tried) == 10
