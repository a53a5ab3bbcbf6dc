"""Tries a whole server by ssh: installation, users, kills, reboots, upgrade, removal. For a machine that you can spare.

    python -m pytest tests/server --server root@host --server-destroys
    python -m pytest tests/server --server root@127.0.0.1 --ssh-options="-p 2222 -i key" --server-destroys \\
        --power-cut-command "./crash.sh" --patience 20

It needs: root by ssh without a password; systemd, cgroup v2, Python 3.10 with venv, sudo; pip on it must find the
dependencies of gpusched, with its own settings. It **removes an installation that is there, with its job table**, makes
accounts that are missing (alice, bob, carol; others by --users), puts the source into /srv/gpusched-tried, reboots.
Without GPUs it simulates two. It waits for states, never for an amount of time; --patience multiplies the ceilings,
and the project's time limit per test does not apply: an installation may take an hour on a slow machine.

At the end it prints what was tried. The tests build on each other, in their order: do not spread them over processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import Machine

TOLD: list[tuple[str, str, float]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("server", "a whole server, by ssh")
    group.addoption("--server", metavar="ROOT@HOST", help="address for ssh; or GPUSCHED_SERVER")
    group.addoption("--ssh-options", metavar="TEXT", default="", help="more options for ssh, as one text")
    group.addoption("--users", metavar="A,B,C", default="alice,bob,carol", help="three ordinary accounts")
    group.addoption("--server-destroys", action="store_true", help="yes, remove what is installed on it, and reboot it")
    group.addoption("--power-cut-command", metavar="CMD", help="run here: cuts the power and starts it again")
    group.addoption(
        "--keep-environment", action="store_true", help="use the /opt/gpusched that is there, with new code"
    )
    group.addoption("--package", metavar="FILE", help="a Debian package to try, see test_package.py")
    group.addoption("--newer-package", metavar="FILE", help="a later release of it")
    group.addoption("--patience", metavar="TIMES", type=float, default=1.0, help="multiplies all ceilings")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each step has a ceiling of its own, which --patience multiplies; pytest's timeout would not know of it."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """The server."""
    option = request.config.getoption
    address = option("--server", default=None) or os.environ.get("GPUSCHED_SERVER")
    if not address:
        pytest.skip("no server to try it on: --server ROOT@HOST or GPUSCHED_SERVER")
    if not option("--server-destroys", default=False):
        pytest.skip(f"{address} is left alone without --server-destroys: what is installed there would be removed")
    made = Machine(
        address,
        option("--ssh-options"),
        tuple(option("--users").split(",")),
        patience=option("--patience"),
        power_cut=option("--power-cut-command"),
        keeps_environment=option("--keep-environment"),
    )
    yield made
    made.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    # A server that is skipped has nothing to tell.
    if "server" in item.path.parts and (report.when == "call" or report.skipped or report.failed):
        words = item.name.removeprefix("test_").replace("_", " ")
        TOLD.append((words, report.outcome, report.duration))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not any(outcome != "skipped" for _, outcome, _ in TOLD):
        return
    terminalreporter.section("the server")
    for words, outcome, seconds in TOLD:
        terminalreporter.write_line(f"{outcome:<8} {seconds:6.0f} s  {words}")
