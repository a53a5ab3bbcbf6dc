"""gpusched system guard: keeps processes outside of jobs off the GPUs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from gpusched import paths
from gpusched.addons.system.system_plan import (
    GUARD,
    UNITS,
    InstallTarget,
    commands_folder,
    read_text,
    remove,
    run_command,
    unit_text,
    write_text,
)
from gpusched.cli import output, tables
from gpusched.engine.linux import guard
from gpusched.errors import NotReady, Refused, UsageError
from gpusched.model.units import printable

app = typer.Typer(
    help="Keep logins, user services and cron off the GPUs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

DROP_IN = "50-gpusched-guard.conf"
_WORDS = {True: "guarded", False: "open", None: "not there"}
_HEAD = "# Written by `gpusched system guard on`, removed by `gpusched system guard off`.\n"


@app.command()
def on() -> None:
    """Guard the units of [isolation] guard_units now and at every boot. Can be repeated.

    Root processes are exempt. GPUs that are already open stay open.

    example: sudo gpusched system guard on
    """
    _needs_root()
    folder = commands_folder()
    units = _units()
    for unit in units:
        _say(unit, _put_on(unit))
    command = f"{os.path.join(folder, 'gpusched')} system guard attach"
    files = {f"{UNITS}/{GUARD}": unit_text(GUARD, InstallTarget(folder))}
    for unit in units:
        if unit.endswith(".service"):
            # Its control group disappears when it stops, and the rule with it.
            text = f"{_HEAD}[Service]\nExecStartPost=-+{command} {unit}\n"
            files[f"{UNITS}/{unit}.d/{DROP_IN}"] = text
    stale = [path for path in _drop_ins() if path not in files]
    for path in stale:
        remove(path)
    for unit in [unit for unit in guard.marked() if unit not in units]:
        guard.take_off(unit)
        sys.stdout.write(f"{unit}: open, no longer in [isolation] guard_units\n")
    changed = [path for path, text in files.items() if read_text(path) != text]
    for path in changed:
        write_text(path, files[path])
    if changed or stale:
        run_command("systemctl", "daemon-reload")
    run_command("systemctl", "enable", "--quiet", GUARD)
    sys.stdout.write(f"enabled at boot: {UNITS}/{GUARD}\n")


@app.command()
def off() -> None:
    """Remove the guard now and from future boots. Can be repeated.

    example: sudo gpusched system guard off
    """
    _needs_root()
    for line in lift():
        sys.stdout.write(f"{line}\n")


def lift() -> list[str]:
    """Remove the guard from all units; returns the outcome for each. Raises: NotReady."""
    known = {_unit_of(path) for path in _drop_ins()}
    said = []
    for unit in sorted({*_units(), *known, *guard.marked()}):
        try:
            was_on = guard.take_off(unit)
        except OSError as error:
            raise NotReady(f"cannot lift the guard of {unit}: {error.strerror}", "see: gpusched doctor") from None
        said.append(f"{unit}: {'open again' if was_on else _WORDS[was_on]}")
    gone = _drop_ins()
    for path in gone:
        remove(path)
    if os.path.exists(f"{UNITS}/{GUARD}"):
        run_command("systemctl", "disable", "--quiet", GUARD)
        os.unlink(f"{UNITS}/{GUARD}")
        gone.append(GUARD)
    if gone:
        run_command("systemctl", "daemon-reload")
    return said


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document with schema_version.")] = False,
) -> None:
    """Show which units are guarded. Exit code 1 when an existing unit is not."""
    units = _units()
    try:
        found = {unit: _WORDS[guard.is_on(unit)] for unit in units}
    except PermissionError:
        # Other users get the state from the record.
        noted = guard.guarded(units)
        found = {unit: _WORDS[unit in noted if guard.is_there(unit) else None] for unit in units}
    except OSError as error:
        raise NotReady(f"cannot read the state from the kernel: {error.strerror}", "see: gpusched doctor") from None
    boot = os.path.exists(f"{UNITS}/{GUARD}")
    if as_json:
        output.print_json({"guard": {"units": found, "at_boot": boot}})
    else:
        tables.print_table(("UNIT", "GPUS"), [(printable(unit), word) for unit, word in found.items()])
        sys.stdout.write(f"after a reboot: {'the same' if boot else 'open'}\n")
    if "open" in found.values():
        raise typer.Exit(1)


@app.command(hidden=True)
def attach(units: Annotated[list[str] | None, typer.Argument(metavar="[UNIT]...")] = None) -> None:
    """Guard these units now, or those of the settings. systemd runs this at boot and when a service starts."""
    _needs_root()
    for unit in units or _units():
        _say(unit, _put_on(unit))


def _put_on(unit: str) -> bool | None:
    try:
        return guard.put_on(unit)
    except OSError as error:
        raise NotReady(
            f"cannot guard {unit}: {error.strerror}", "this needs a kernel with CONFIG_CGROUP_BPF; see: gpusched doctor"
        ) from None


def _say(unit: str, is_new: bool | None) -> None:
    word = "not there" if is_new is None else "guarded" if is_new else "already guarded, renewed"
    sys.stdout.write(f"{unit}: {word}\n")


def _needs_root() -> None:
    if os.geteuid() != 0:
        raise Refused("only root can guard the GPUs", f"sudo gpusched {' '.join(sys.argv[1:])}")
    if not os.path.isdir("/run/systemd/system"):
        raise NotReady("this machine does not run systemd, so it has no units to guard", "see docs/howto/isolation.md")


def _unit_of(drop_in: str) -> str:
    return os.path.basename(os.path.dirname(drop_in)).removesuffix(".d")


def _units() -> tuple[str, ...]:
    from gpusched.config import load_settings

    units = load_settings(f"{paths.SYSTEM_CONFIG}/config.toml", {}).settings.isolation.guard_units
    for unit in units:
        if "/" in unit or unit.rpartition(".")[2] not in ("slice", "service"):
            raise UsageError(
                f"[isolation] guard_units names {unit}, which is neither a slice nor a service",
                "for example: guard_units = ['user.slice', 'cron.service']",
            )
    return units


def _drop_ins() -> list[str]:
    try:
        folders = sorted(os.listdir(UNITS))
    except OSError:
        return []
    paths_of = [f"{UNITS}/{name}/{DROP_IN}" for name in folders if name.endswith(".service.d")]
    return [path for path in paths_of if os.path.exists(path)]
