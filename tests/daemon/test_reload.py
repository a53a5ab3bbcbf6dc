"""The config file read again by a running daemon: by request, by command, by signal."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until
from warm import typed

from gpusched.errors import UsageError

BASE = '[gpu]\nsource = "none"\n'


def configure(daemon: Daemon, text: str) -> None:
    (daemon.home / "config.toml").write_text(BASE + text)


def log_of(daemon: Daemon) -> str:
    (path,) = (Path(daemon.call("GET", "/v1/status")["daemon"]["log"]),)
    return path.read_text()


def gctl(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    return typed("gctl", *words, env=daemon.env)


def test_lifting_a_ceiling_starts_the_pending_job(daemon: Daemon) -> None:
    configure(daemon, "[node]\ncpus = 1\n")
    assert daemon.call("POST", "/v1/reload", {})["changed"] == ["node.cpus"]
    first = daemon.submit("sleep", "600", cpus=1)
    daemon.wait_state(first, "RUNNING")
    second = daemon.submit("true", cpus=1)
    assert daemon.state(second) == "PENDING"
    configure(daemon, "[node]\ncpus = 2\n")
    done = gctl(daemon, "reload")
    assert (done.returncode, done.stdout) == (0, "reloaded node.cpus\n"), done.stderr
    daemon.wait(second)


def test_an_invalid_file_is_refused_and_the_daemon_continues_unchanged(daemon: Daemon) -> None:
    configure(daemon, "[daemon]\npoll_s = -3\n")
    with pytest.raises(UsageError, match="poll_s"):
        daemon.call("POST", "/v1/reload", {})
    done = gctl(daemon, "reload")
    assert done.returncode == 2
    assert "poll_s" in done.stderr
    daemon.wait(daemon.submit("true"))


def test_a_tariff_that_cannot_be_read_is_refused_and_the_one_in_force_stays(daemon: Daemon) -> None:
    path = daemon.home / "tariff.csv"
    path.write_text("start,price_per_kwh\n2026-11-23T00:00Z,0.1\n")
    configure(daemon, f'[energy]\ntariff = "{path}"\n')
    done = gctl(daemon, "reload")
    assert (done.returncode, done.stdout, done.stderr) == (0, "reloaded energy.tariff\n", "")
    configure(daemon, f'[energy]\ntariff = "{path}.none"\npue = 1.5\n')
    done = gctl(daemon, "reload")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gctl: error: ")
    assert f"config.toml, line 4: {path}.none: No such file or directory; nothing was reloaded\n" in done.stderr

    # The same file with a mistake: other settings come into force, and its old rows stay.
    path.write_text("start,price_per_kwh\n2026-11-23T00:00,0.1\n")
    configure(daemon, f'[energy]\ntariff = "{path}"\npue = 1.5\n')
    done = gctl(daemon, "reload")
    assert (done.returncode, done.stdout) == (1, "reloaded energy.pue\n")
    assert f"gctl: energy.tariff was not reloaded: {path}:2: 2026-11-23T00:00 has no offset" in done.stderr
    path.write_text("start,price_per_kwh\n2026-11-23T00:00Z,0.12\n")
    assert gctl(daemon, "reload").returncode == 0


def test_settings_that_need_a_restart_are_named(daemon: Daemon) -> None:
    configure(daemon, '[node]\nname = "elsewhere"\n')
    assert daemon.call("POST", "/v1/reload", {}) | {"schema_version": 1} == {
        "schema_version": 1,
        "changed": [],
        "needs_restart": ["node.name"],
    }
    done = gctl(daemon, "reload")
    assert done.returncode == 0
    assert "node.name takes effect after a restart" in done.stderr
    assert daemon.call("GET", "/v1/cluster")["nodes"][0]["name"] != "elsewhere"


def test_unchanged_settings_are_reported_as_such(daemon: Daemon) -> None:
    assert (done := gctl(daemon, "reload")).returncode == 0
    assert (done.stdout, done.stderr) == ("", "gctl: the settings have not changed\n")


def test_a_hangup_reloads_and_logs_it(daemon: Daemon) -> None:
    assert daemon.process is not None
    configure(daemon, "[node]\ncpus = 3\n")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: daemon.call("GET", "/v1/cluster")["nodes"][0]["cpus"] == 3, what="the new setting")
    wait_until(lambda: "changed: node.cpus" in log_of(daemon), what="a word in the log")
    configure(daemon, "[node]\ncpus = 0.5\nwheels = 4\n")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "wheels" in log_of(daemon), what="the complaint in the log")
    assert daemon.call("GET", "/v1/cluster")["nodes"][0]["cpus"] == 3


def test_a_new_preset_applies_and_stated_settings_stay(daemon: Daemon) -> None:
    configure(daemon, '[priority]\npreset = "slurm"\nweight_age = 5\n')
    changed = daemon.call("POST", "/v1/reload", {})["changed"]
    assert {"priority.preset", "priority.weight_age", "priority.weight_fairshare"} <= set(changed)
    configure(daemon, '[priority]\npreset = "slurm"\nweight_age = 5\nweight_fairshare = 10000\n')
    assert daemon.call("POST", "/v1/reload", {})["changed"] == []
    configure(daemon, '[priority]\npreset = "fifo"\nweight_age = 5\n')
    changed = daemon.call("POST", "/v1/reload", {})["changed"]
    assert {"priority.preset", "priority.order"} <= set(changed)
    assert "priority.weight_age" not in changed
