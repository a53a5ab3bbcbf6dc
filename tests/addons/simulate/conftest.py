"""Where traces are: those that the package brings, and a folder of larger ones where GPUSCHED_TRACES names one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.cases import EXAMPLES


@pytest.fixture(scope="session")
def trace_file():
    """The path of a trace by name; skips the test, and says why, where the trace is not there."""

    def find(name: str) -> Path:
        folder = os.environ.get("GPUSCHED_TRACES")
        for place in (EXAMPLES, *([Path(folder)] if folder else [])):
            if (place / name).exists():
                return place / name
        if folder:
            pytest.skip(f"{folder} (GPUSCHED_TRACES) has no {name}")
        pytest.skip(f"{name} is not shipped; GPUSCHED_TRACES names no folder that has it")

    return find
