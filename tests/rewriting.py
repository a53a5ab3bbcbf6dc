"""The assertions of a fresh clone are rewritten once, not by each worker of pytest-xdist.

pytest rewrites the assertions of a test module when it is first imported, and keeps the result beside it. All workers
import all modules in one order at one time, so that each of them would do it all.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config, worker: int, workers: int) -> None:
    """Rewrite the modules that nobody has rewritten yet, each worker from another place on."""
    if sys.dont_write_bytecode:
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = len(files) * worker // workers
    # Names private to pytest. Without them each worker rewrites all, as everywhere else.
    hook: Any = rewrite
    try:
        for file in files[first:] + files[:first]:
            folder = hook.get_cache_dir(file)
            kept = folder / (file.stem + hook.PYC_TAIL)
            if not kept.exists():
                folder.mkdir(parents=True, exist_ok=True)
                stamp, code = hook._rewrite_test(file, config)
                hook._write_pyc(config.stash[hook.assertstate_key], code, stamp, kept)
    except (AttributeError, TypeError, OSError):
        return
