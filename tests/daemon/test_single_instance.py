"""One daemon per home; stale sockets and locks of dead ones are no obstacle; broken surroundings are named."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from harness import Daemon
from support import wait_until

from gpusched import paths
from gpusched.client import connect


def error_of(line: str) -> dict[str, str]:
    assert line.startswith("error "), line
    found: dict[str, str] = json.loads(line.removeprefix("error "))
    return found


def test_a_second_daemon_is_refused_and_the_first_continues(daemon: Daemon) -> None:
    second = Daemon(daemon.home)
    error = error_of(second.try_start())
    assert "already running" in error["message"]
    assert second.process is not None
    assert second.process.wait(timeout=60) == 1
    assert daemon.wait(daemon.submit("/bin/true"))[0]["state"] == "COMPLETED"


def test_a_stale_socket_and_lock_do_not_prevent_the_start(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    daemon.kill()
    assert (daemon.home / "run" / "api.sock").exists()
    daemon.start()
    assert daemon.wait(daemon.submit("/bin/true"))[0]["state"] == "COMPLETED"


def test_another_file_instead_of_the_socket_is_replaced(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(start=False)
    (daemon.home / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as nobody:
        nobody.bind(str(daemon.home / "run" / "api.sock"))
    daemon.start()
    assert daemon.call("GET", "/v1/status")["daemon"]["jobs"]["running"] == 0


def test_a_clean_stop_leaves_runs_alone(daemon: Daemon) -> None:
    job_id = daemon.submit("/bin/sleep", "1000")
    pid = daemon.pid_of(job_id)
    assert daemon.call("POST", "/v1/shutdown", {}) == {"schema_version": 1, "stopping": True}
    daemon.reap()
    os.kill(pid, 0)
    assert not (daemon.home / "run" / "api.sock").exists()
    daemon.start()
    job = daemon.job(job_id)
    assert (job["state"], job["run"], job["runs"][0]["pid"]) == ("RUNNING", 1, pid)


def test_a_corrupt_database_is_named_and_left_alone(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(start=False)
    database = daemon.home / "gpusched.db"
    database.write_bytes(b"this is no database, and long enough to look at" * 100)
    error = error_of(daemon.try_start())
    daemon.reap()
    assert error["code"] == "store_broken"
    assert str(database) in error["message"]
    assert error["hint"]
    assert database.read_bytes().startswith(b"this is no database")


def test_a_newer_database_is_refused(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    daemon.stop()
    with sqlite3.connect(daemon.home / "gpusched.db") as connection:
        connection.execute("PRAGMA user_version = 999")
    connection.close()
    error = error_of(daemon.try_start())
    daemon.reap()
    assert error["code"] == "store_broken"
    assert "999" in error["message"]
    # Let the fixture close what it made: the file is as this release left it, but for the number.
    with sqlite3.connect(daemon.home / "gpusched.db") as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("[daemon]\npoll_s = -1\n", "poll_s"),
        ("[daemon]\npol_s = 1\n", "pol_s"),
        ("[colour]\nred = 1\n", "colour"),
        ("[daemon\n", "config.toml"),
        ('[gpu]\nfake = "lots"\nsource = "simulated"\n', "lots"),
    ],
)
def test_an_unreadable_config_is_named(make_daemon: Callable[..., Daemon], config: str, says: str) -> None:
    daemon = make_daemon(start=False)
    (daemon.home / "config.toml").write_text(config)
    error = error_of(daemon.try_start())
    daemon.reap()
    assert says in error["message"]
    assert error["code"] == "usage"


def test_a_home_deeper_than_a_socket_address_works(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(start=False)
    deep = Daemon(daemon.home / ("d" * 60) / ("e" * 60))
    deep.start()
    try:
        assert deep.wait(deep.submit("/bin/true"))[0]["state"] == "COMPLETED"
    finally:
        deep.close()


def test_terminate_and_interrupt_are_clean_stops(make_daemon: Callable[..., Daemon]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        daemon = make_daemon()
        assert daemon.process is not None
        daemon.process.send_signal(number)
        assert daemon.process.wait(timeout=60) == 0
        daemon.process = None
        assert "stopped; runs continue" in (daemon.home / "log" / "gpuschedd.log").read_text()


def test_a_foreign_change_of_the_table_is_noticed(daemon: Daemon) -> None:
    job_id = daemon.submit("/bin/true", hold=True)
    with sqlite3.connect(daemon.home / "gpusched.db", timeout=60) as connection:
        connection.execute("UPDATE jobs SET hold = NULL WHERE id = ?", (int(job_id),))
    connection.close()
    assert daemon.wait(job_id)[0]["state"] == "COMPLETED"


def test_a_client_waits_for_a_starting_daemon(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever came while a daemon started whose client had been killed was told that another one is already running."""
    home = make_daemon(start=False).home
    monkeypatch.setenv("GPUSCHED_HOME", str(home))
    for name in ("GPUSCHED_SOCKET", "GPUSCHED_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    lock = FileLock(paths.lock_file())
    lock.acquire()
    found: list[str] = []

    def ask() -> None:
        with connect() as client:
            found.append(client.call("GET", "/v1/status")["daemon"]["version"])

    asking = threading.Thread(target=ask)
    asking.start()
    output = Path(paths.daemon_output())
    wait_until(
        lambda: output.exists() and "already running" in output.read_text(), what="the refusal of a second daemon"
    )
    # The other one is gone before it was ready: this client's next try is the daemon.
    lock.release()
    asking.join(timeout=60)
    assert len(found) == 1
    with connect(autostart=False) as client:
        client.call("POST", "/v1/shutdown", {})
