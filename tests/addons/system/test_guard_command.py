"""gpusched system guard: what it writes and takes away again. The rule itself is tried in tests/system."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched.addons.system import guard as command
from gpusched.engine.linux import guard
from gpusched.errors import NotReady, Refused, UsageError


class Kernel:
    """Which units there are, and which of them are guarded."""

    def __init__(self) -> None:
        self.there = {"user.slice", "cron.service"}
        self.on: set[str] = set()

    def put_on(self, unit: str) -> bool | None:
        if unit not in self.there:
            return None
        is_new = unit not in self.on
        self.on.add(unit)
        return is_new

    def take_off(self, unit: str) -> bool | None:
        if unit not in self.there:
            return None
        was_on = unit in self.on
        self.on.discard(unit)
        return was_on

    def is_on(self, unit: str) -> bool | None:
        return unit in self.on if unit in self.there else None

    def marked(self) -> list[str]:
        return sorted(self.on)


class Machine:
    """A machine whose systemd writes down what it is told."""

    def __init__(self, folder: Path, kernel: Kernel) -> None:
        self.units = folder / "units"
        self.units.mkdir()
        self.config = folder / "etc"
        self.config.mkdir()
        self.kernel = kernel
        self.told: list[str] = []

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.units)) for path in self.units.rglob("*") if path.is_file())

    def configure(self, *units: str) -> None:
        (self.config / "config.toml").write_text(f"[isolation]\nguard_units = {list(units)}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    kernel = Kernel()
    made = Machine(tmp_path, kernel)
    monkeypatch.setattr(command, "UNITS", str(made.units))
    monkeypatch.setattr(command.paths, "SYSTEM_CONFIG", str(made.config))
    monkeypatch.setattr(command, "_needs_root", lambda: None)
    monkeypatch.setattr(command, "run_command", lambda *words: made.told.append(" ".join(words[1:])))
    monkeypatch.setattr(command, "commands_folder", lambda: "/srv/gpusched/bin")
    for name in ("put_on", "take_off", "is_on", "marked"):
        monkeypatch.setattr(guard, name, getattr(kernel, name))
    return made


def test_on_guards_now_at_boot_and_when_a_service_starts(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    command.on()
    assert machine.kernel.on == {"user.slice", "cron.service"}
    assert machine.files() == [
        "atd.service.d/50-gpusched-guard.conf",
        "cron.service.d/50-gpusched-guard.conf",
        "gpusched-guard.service",
    ]
    unit = (machine.units / "gpusched-guard.service").read_text()
    assert "\nExecStart=/srv/gpusched/bin/gpusched system guard attach\n" in unit
    drop_in = (machine.units / "cron.service.d" / "50-gpusched-guard.conf").read_text()
    # Neither without the rights of the service's own user, nor so that its failure is the service's.
    assert drop_in.endswith(
        "\n[Service]\nExecStartPost=-+/srv/gpusched/bin/gpusched system guard attach cron.service\n"
    )
    assert machine.told == ["daemon-reload", "enable --quiet gpusched-guard.service"]
    assert capsys.readouterr().out.splitlines()[:3] == [
        "user.slice: guarded",
        "cron.service: guarded",
        "atd.service: not there",
    ]


def test_on_again_changes_nothing_and_follows_the_settings(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    command.on()
    machine.told.clear()
    command.on()
    assert machine.told == ["enable --quiet gpusched-guard.service"]
    machine.configure("user.slice", "docker.service")
    capsys.readouterr()
    command.on()
    assert machine.files() == ["docker.service.d/50-gpusched-guard.conf", "gpusched-guard.service"]
    assert machine.kernel.on == {"user.slice"}
    assert "cron.service: open, no longer in [isolation] guard_units\n" in capsys.readouterr().out


def test_off_leaves_nothing_behind(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    command.on()
    # Also what the settings do not name any more.
    machine.configure("user.slice")
    machine.told.clear()
    capsys.readouterr()
    command.off()
    assert (machine.kernel.on, list(machine.units.iterdir())) == (set(), [])
    assert machine.told == ["disable --quiet gpusched-guard.service", "daemon-reload"]
    assert capsys.readouterr().out.splitlines() == [
        "atd.service: not there",
        "cron.service: open again",
        "user.slice: open again",
    ]
    machine.told.clear()
    command.off()
    assert machine.told == []


def test_status_says_what_is_open(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(command.typer.Exit) as caught:
        command.status()
    assert caught.value.exit_code == 1
    assert capsys.readouterr().out.split("\n")[1:5] == [
        "user.slice   open",
        "cron.service open",
        "atd.service  not there",
        "after a reboot: open",
    ]
    command.on()
    capsys.readouterr()
    command.status(as_json=True)
    assert '"user.slice": "guarded"' in capsys.readouterr().out.replace('":"', '": "')


def test_invalid_units_are_refused(machine: Machine) -> None:
    machine.configure("user.slice", "../cron.service")
    with pytest.raises(UsageError, match=r"guard_units names \.\./cron\.service"):
        command.on()
    assert machine.files() == []


def test_a_kernel_without_device_rules_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(unit: str) -> bool:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(guard, "put_on", refuse)
    with pytest.raises(NotReady, match=r"cannot guard user\.slice: Invalid argument"):
        command.attach(["user.slice"])


def test_only_root_can_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(command.sys, "argv", ["gpusched", "system", "guard", "on"])
    with pytest.raises(Refused) as caught:
        command.on()
    assert caught.value.hint == "sudo gpusched system guard on"
