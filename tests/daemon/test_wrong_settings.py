"""A typo in the config file of a machine's daemon: it starts on the last settings that were good, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from people import BOB, NEEDS_ROOT, SystemDaemon

from gpusched.errors import GpuschedError

sys.path.append(str(Path(__file__).parent.parent / "security"))

from attacks import as_user, connect

pytestmark = NEEDS_ROOT

GOOD = "[limit]\njobs = 77\n"
WRONG = "[limit]\njobz = 78\n"


@pytest.fixture
def daemon() -> Iterator[SystemDaemon]:
    made = SystemDaemon(GOOD)
    yield made
    made.close()


def typed(daemon: SystemDaemon, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.typed(command, *words, env={**os.environ, "GPUSCHED_SOCKET": str(daemon.socket)})


def settings_check(daemon: SystemDaemon) -> dict[str, object]:
    (found,) = [check for check in daemon.call("GET", "/v1/doctor")["checks"] if check["check"] == "settings"]
    return dict(found)


def restart(daemon: SystemDaemon) -> None:
    daemon.stop()
    daemon.start()


def test_a_restart_with_a_typo_keeps_the_last_good_settings(daemon: SystemDaemon) -> None:
    daemon.start()
    assert settings_check(daemon)["ok"] is True
    daemon.configure(WRONG)
    restart(daemon)
    bob = daemon.person(BOB)
    job = bob.submit("/bin/true")
    assert daemon.wait(job)[0]["state"] == "COMPLETED"
    found = settings_check(daemon)
    assert found["ok"] is False
    assert "jobz" in str(found["text"])
    assert "the settings of 20" in str(found["text"])
    assert "systemctl reload gpusched" in str(found["hint"])
    assert str(daemon.settings) in str(found["text"])
    log = (daemon.state_dir / "log" / "gpuschedd.log").read_text()
    assert "jobz" in log
    # Again: the copy is not overwritten by the file that is wrong.
    restart(daemon)
    assert settings_check(daemon)["ok"] is False
    daemon.configure(GOOD)
    daemon.call("POST", "/v1/reload", {})
    assert settings_check(daemon)["ok"] is True


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_a_restart_with_a_missing_plugin_keeps_the_last_good_settings(daemon: SystemDaemon, is_reloaded: bool) -> None:
    daemon.start()
    daemon.configure(GOOD + '[plugins]\nload = ["no_such_module"]\n')
    if is_reloaded:
        # It counts from the next start, so that nothing is known of it yet.
        assert daemon.call("POST", "/v1/reload", {})["needs_restart"] == ["plugins.load"]
    restart(daemon)
    found = settings_check(daemon)
    assert found["ok"] is False
    assert "no_such_module" in str(found["text"])
    assert daemon.call("GET", "/v1/status")["daemon"]["limits"]["jobs"] == 77


def test_a_restart_with_a_file_writable_by_others_uses_the_copy(daemon: SystemDaemon) -> None:
    daemon.start()
    daemon.settings.chmod(0o666)
    daemon.settings.write_text("[limit]\njobs = 5\n")
    restart(daemon)
    found = settings_check(daemon)
    assert "is writable by users other than root" in str(found["text"])
    assert f"chmod go-w {daemon.settings}" in str(found["hint"]), "not a look into a file in which nothing is wrong"
    assert "systemctl reload gpusched" in str(found["hint"])
    assert daemon.call("GET", "/v1/status")["daemon"]["limits"]["jobs"] == 77


def test_every_admin_command_says_so_and_no_other(daemon: SystemDaemon) -> None:
    daemon.start()
    daemon.configure(WRONG)
    restart(daemon)
    for command, words in (("gq", ()), ("ginfo", ()), ("gsub", ("-H", "--", "true")), ("gq", ("--json",))):
        done = typed(daemon, command, *words)
        assert done.returncode == 0, done
        (line,) = [line for line in done.stderr.splitlines() if "warning" in line]
        assert line.startswith(f"{command}: warning: ")
        assert "jobz" in line
        assert "systemctl reload gpusched" in line
    assert json.loads(done.stdout)["jobs"]
    # A command that fails says both.
    assert "warning" in typed(daemon, "gshow", "4711").stderr
    heads = raw_heads(daemon, BOB)
    assert "gpusched-warning" not in heads
    assert "gpusched-warning" in raw_heads(daemon, "root")
    daemon.configure(GOOD)
    daemon.call("POST", "/v1/reload", {})
    assert typed(daemon, "gq").stderr == ""


def raw_heads(daemon: SystemDaemon, user: str) -> str:
    def ask() -> str:
        with connect(daemon.socket) as sock:
            sock.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
            return sock.recv(65536).decode(errors="replace").partition("\r\n\r\n")[0].lower()

    return as_user(user, ask)


def test_reloaded_settings_are_the_last_good_ones(daemon: SystemDaemon) -> None:
    daemon.start()
    daemon.configure("[default]\nqueue = 'night'\n")
    daemon.call("POST", "/v1/reload", {})
    daemon.configure("[default]\nqueue = 'other'\n" + WRONG)
    with pytest.raises(GpuschedError, match="jobz"):
        daemon.call("POST", "/v1/reload", {})
    restart(daemon)
    job = daemon.person(BOB).submit("/bin/true", hold=True)
    assert daemon.call("GET", f"/v1/jobs/{job}")["job"]["queue"] == "night"


def test_a_start_without_earlier_good_settings_refuses_a_typo(daemon: SystemDaemon) -> None:
    daemon.configure(WRONG)
    assert "jobz" in daemon.try_start()
    daemon.reap()
    daemon.configure(GOOD)
    daemon.start()
    copy = daemon.state_dir / "config.accepted.toml"
    assert (copy.stat().st_uid, copy.stat().st_mode & 0o777) == (0, 0o600)
    daemon.stop()
    copy.unlink()
    daemon.configure(WRONG)
    assert "jobz" in daemon.try_start()
    daemon.reap()
    daemon.configure(GOOD)
    daemon.start()
