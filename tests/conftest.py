"""Puts this folder on the path, so that every tier can say `from support import ...`, and makes Ctrl-C work.

Generated cases are judged by what they find, not by how fast a busy machine runs them. They are the same ones each
time, so that a change is judged by what it changed; GPUSCHED_SEARCH=1 looks for new ones.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from accidents import AccidentLab

settings.register_profile(
    "gpusched",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("GPUSCHED_SEARCH"),
)
settings.load_profile("gpusched")

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _forget_what_daemons_warned_of() -> Iterator[None]:
    """A command prints the warnings of its daemon at its end; those of one test are none of the next one's."""
    yield
    client = sys.modules.get("gpusched.client")
    if client is not None:
        client.warnings.clear()


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and every command that a test types would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", None)
    if worker is not None:
        from rewriting import rewrite_share

        rewrite_share(session.config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect twelve thousand tests, none of which is garbage, nor is to be traversed with each later garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    with contextlib.suppress(ImportError):  # where xdist is not installed, the order does not matter
        from distribution import sort_tests

        sort_tests(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests as `distribution` does, unless the command line says how."""
    if config.getoption("dist") != "load" or config.getoption("maxschedchunk") is not None:
        return None
    from distribution import BothEnds

    return BothEnds(config, log)


@pytest.fixture
def accidents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AccidentLab]]:
    """Make labs in which accidents of GPUs happen. Args: as of `AccidentLab`, less the monkeypatch."""
    from accidents import AccidentLab

    made: list[AccidentLab] = []

    def make(gpus: int = 4, **sections: Any) -> AccidentLab:
        made.append(AccidentLab(monkeypatch, gpus, **sections))
        return made[-1]

    yield make
    for lab in made:
        lab.close()
