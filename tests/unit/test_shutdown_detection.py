"""Whether the machine goes down, asked of a first process that is made up."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from gpusched.engine import going_down


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "systemctl"
    monkeypatch.setattr(going_down, "_SYSTEMCTL", (str(tmp_path / "nothing"), str(program)))
    monkeypatch.setattr(going_down, "_RUNS_HERE", str(tmp_path))
    return program


def says(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("answer", "goes_down"),
    [("echo stopping; exit 1", True), ("echo running", False), ("echo degraded; exit 1", False), ("exit 1", False)],
)
def test_systemd_is_asked(systemctl: Path, answer: str, goes_down: bool) -> None:
    says(systemctl, answer)
    assert going_down.machine_goes_down() is goes_down


def test_systemd_is_asked_with_the_right_arguments_and_a_clean_environment(systemctl: Path, tmp_path: Path) -> None:
    says(systemctl, f'echo "$@ $LC_ALL $HOME" > {tmp_path}/asked; echo stopping')
    assert going_down.machine_goes_down()
    assert (tmp_path / "asked").read_text() == "is-system-running C \n"


def test_without_systemd_the_answer_is_no(systemctl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(systemctl, "echo stopping")
    monkeypatch.setattr(going_down, "_RUNS_HERE", str(tmp_path / "absent"))
    assert not going_down.machine_goes_down()
    monkeypatch.setattr(going_down, "_RUNS_HERE", str(tmp_path))
    systemctl.unlink()
    assert not going_down.machine_goes_down()


def test_a_silent_systemd_times_out(systemctl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(going_down, "_PATIENCE_S", 0.2)
    says(systemctl, "exec sleep 98765")
    before = set(psutil.Process().children())
    assert not going_down.machine_goes_down()
    # Neither itself nor, as what is left of it, a zombie; other tests may have left children of their own.
    assert set(psutil.Process().children()) <= before


def test_blocked_signals_are_not_inherited(systemctl: Path) -> None:
    says(systemctl, "grep SigBlk /proc/self/status | grep -q '0000000000000000$' && echo stopping")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    try:
        assert going_down.machine_goes_down()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_caller_that_ignores_its_children_is_answered(systemctl: Path) -> None:
    says(systemctl, "echo stopping")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert going_down.machine_goes_down()
    finally:
        signal.signal(signal.SIGCHLD, before)
