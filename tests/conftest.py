"""Puts shared helpers on the path, so that every tier can say `from support import ...`, and makes Ctrl-C work.

Generated cases are judged by what they find, not by how fast a busy machine runs them. They are the same ones each
time, so that a change is judged by what it changed; GPUSCHED_SEARCH=1 looks for new ones, and for many more of them.
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
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from accidents import AccidentLab
    from harness import Daemon
    from shell import Shell

settings.register_profile(
    "gpusched",
    max_examples=200 if os.environ.get("GPUSCHED_SEARCH") else 15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("GPUSCHED_SEARCH"),
)
settings.load_profile("gpusched")

# Else each worker would rewrite all tests' assertions, and each command that is typed compile what it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), *(str(TESTS / name) for name in ("cli", "daemon", "security"))]


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


def pytest_configure() -> None:
    from ready_table import use_ready_tables

    use_ready_tables()


def pytest_sessionstart(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", None)
    if worker is not None:
        from rewriting import rewrite_share
        from warm import use_addresses

        use_addresses(*worker["nests"])
        rewrite_share(session.config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let all workers of xdist fork from the same processes, see `warm`."""
    from warm import addresses

    node.workerinput["nests"] = addresses()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test in a worker of xdist without telling the controller of each fixture that was made in no time."""
    if not hasattr(item.config, "workerinput") or item.config.getoption("xmlpath", None):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        # As much as `--durations` shows unless it is asked for more.
        if report.when == "call" or not report.passed or report.sections or report.duration >= 0.005:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


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


@pytest.fixture
def make_daemon(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Daemon]]:
    """Makes daemons; each is started unless told otherwise, and gone, with its jobs, when the test is over.

    Through the night they compare their planner with the job table after every tick.
    """
    from harness import Daemon

    from gpusched.daemon.failures import CHECK_VARIABLE

    made: list[Daemon] = []
    is_nightly = request.node.get_closest_marker("nightly") is not None

    def make(*, start: bool = True, **options: str) -> Daemon:
        daemon = Daemon(tmp_path / f"home{len(made)}", **options)
        made.append(daemon)
        if is_nightly:
            daemon.env[CHECK_VARIABLE] = "1"
        if start:
            daemon.start()
        return daemon

    yield make
    for daemon in made:
        if daemon.process is not None:
            daemon.close()
        daemon.disconnect()
        for file in (daemon.home / "log" / "gpuschedd.log", daemon.home / "daemon.out"):
            found = [line for line in file.read_text().splitlines() if " planner" in line] if file.exists() else []
            assert not found, found


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running daemon without GPUs."""
    return make_daemon()


@pytest.fixture
def gpu_daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running daemon with four simulated GPUs."""
    return make_daemon(fake_gpus="4x24GiB")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell and a scheduler with two simulated GPUs, for tests that only look at their own jobs."""
    from shell import Shell, stopped

    root = tmp_path_factory.mktemp("cli")
    (root / "home").mkdir()
    (root / "home" / "config.toml").write_text('[node]\nname = "lab1"\ncpus = 64\nmem_mib = 65536\n')
    shell = Shell(root / "home", root, GPUSCHED_FAKE_GPUS="2xA100:80GiB+1xT4:16GiB")
    yield shell
    stopped(shell)


@pytest.fixture
def sh(shared: Shell, tmp_path: Path) -> Shell:
    """The shared scheduler, from a folder of the test's own."""
    from shell import Shell

    shell = Shell(shared.home, tmp_path)
    shell.env = dict(shared.env)
    return shell


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Shell]:
    """A scheduler for this test alone, which starts with the first command."""
    from shell import Shell, stopped

    (tmp_path / "work").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text('[node]\nname = "lab1"\ncpus = 8\nmem_mib = 65536\n')
    shell = Shell(tmp_path / "home", tmp_path / "work", GPUSCHED_FAKE_GPUS="2x24GiB")
    shell.is_to_start = True
    yield shell
    stopped(shell)
