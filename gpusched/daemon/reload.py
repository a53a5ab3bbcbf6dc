"""Read the settings and reload them in a running daemon: check them, then swap between two ticks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from gpusched import paths
from gpusched.access import check_admin
from gpusched.config import SETTINGS, Loaded, load_settings
from gpusched.config.schema import COUNTS, TABLES, value_of, with_value
from gpusched.config.tariff import TariffError, read_tariff
from gpusched.config.without_effect import without_effect
from gpusched.engine.linux.site_program import why_not_executed
from gpusched.errors import GpuschedError, NotReady, Refused, UsageError
from gpusched.model.cluster import NodeView
from gpusched.model.commands import Reload
from gpusched.model.job import Job
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.scheduler import cells
from gpusched.scheduler.admission import labels_left, membership_findings
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.limits import quota_problems
from gpusched.scheduler.usage import capacity_of


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The settings after a reload."""

    settings: Settings
    changed: tuple[str, ...]
    """Paths whose value has changed."""
    fixed: tuple[str, ...]
    """Paths with another value in the file that applies only after a restart."""
    notes: tuple[str, ...] = ()
    """Valid settings that are probably not intended."""
    written: Settings | None = None
    """Those of the file, including what applies only after a restart."""

    def answer(self) -> dict[str, Any]:
        notes = {"notes": list(self.notes)} if self.notes else {}
        return {"changed": list(self.changed), "needs_restart": list(self.fixed), **notes}


def reread(
    command: Reload,
    running: Settings,
    read: Callable[[], Loaded] | None,
    nodes_under: Callable[[Settings], tuple[NodeView, ...]],
    jobs: Iterable[Job] = (),
) -> Reloaded:
    """The settings to use from now on. Raises: Forbidden, Refused, UsageError; then the current ones stay.

    Args: nodes_under: returns the machines as they would be with these settings; none while their GPUs are unknown.
    jobs: those that have not ended.
    """
    check_admin(command.caller, "reload the settings", running)
    if read is None:
        raise Refused("this scheduler has no config file", "restart it with other settings")
    loaded = read()
    wanted = loaded.settings
    check_promises(wanted)
    _check_machines(loaded, nodes_under(wanted))
    _check_programs(loaded, running)
    _check_tariff(loaded, running)
    differing = _differing(running, wanted)
    fixed = tuple(path for path in differing if path in SETTINGS and SETTINGS[path].needs_restart)
    settings = wanted
    for path in fixed:
        settings = with_value(settings, path, value_of(running, path))
    found = (*membership_findings(settings), *without_effect(loaded))
    notes = (*(f"{text}; {hint}" for _, text, hint in found), *labels_left(jobs, running, settings))
    return Reloaded(settings, tuple(path for path in differing if path not in fixed), fixed, notes, wanted)


def check_promises(settings: Settings) -> None:
    """Refuse contradictory or invalid queue guarantees. Raises: UsageError."""
    for path, text in (*quota_problems(settings, None), *cells.cell_problems(settings)):
        raise UsageError(f"{path}: {text}", "fix the config file; see what it says with: gpusched config show")


def _check_machines(loaded: Loaded, nodes: tuple[NodeView, ...]) -> None:
    """Refuse guarantees that these machines cannot keep. Raises: Refused with file and line."""
    settings = loaded.settings
    if not settings.queue or not nodes:
        return
    layout = ClusterLayout(nodes, settings)
    for path, text in (*quota_problems(settings, capacity_of(layout)), *cells.cell_problems(settings, layout)):
        raise Refused(f"{loaded.place_of(path)}: {text}", "promise less, or see what exists with: ginfo")


def _check_programs(loaded: Loaded, running: Settings) -> None:
    """Refuse a new program of the site that would not be executed here, and so drain the nodes. Raises: Refused."""
    wanted = loaded.settings
    for name, path, before in (
        ("prolog.path", wanted.prolog.path, running.prolog.path),
        ("epilog.path", wanted.epilog.path, running.epilog.path),
    ):
        if path is not None and path != before and (why := why_not_executed(path)) is not None:
            raise Refused(
                f"{loaded.place_of(name)}: {why}", "make it root's alone, see: namei -l PATH   then: gctl reload"
            )


def _check_tariff(loaded: Loaded, running: Settings) -> None:
    """Refuse another tariff file that cannot be used. Raises: Refused with file and line."""
    energy = loaded.settings.energy
    if energy.tariff is None or energy.tariff == running.energy.tariff:
        return
    try:
        read_tariff(energy)
    except TariffError as error:
        raise Refused(
            f"{loaded.place_of('energy.tariff')}: {error.message}; nothing was reloaded", error.hint
        ) from None


def _differing(one: Settings, other: Settings) -> list[str]:
    """Paths of settings that differ: `daemon.poll_s`, `queue.vision`, `plugins.load`."""
    paths = [path for path in SETTINGS if value_of(one, path) != value_of(other, path)]
    for section in (COUNTS, *TABLES):
        old, new = getattr(one, section), getattr(other, section)
        paths += [f"{section}.{name}" for name in {**old, **new} if old.get(name) != new.get(name)]
    return sorted(paths)


log = getLogger("gpusched.daemon")
_RELOAD = "then: sudo systemctl reload gpusched"
_HINT = f"fix the config file (gpusched config check lists all errors), {_RELOAD}"
RUNNING_PER_USER = 1000
"""Limit of the system daemon: jobs without cores could otherwise mean a hundred thousand supervisors."""


class SettingsFile:
    """The config file, and for the system daemon a copy of the last valid one.

    A typo in the file must not leave a machine without its scheduler after a restart or reboot: the system
    daemon keeps a copy of each file that it has put into use, and starts with that copy if the file is wrong.
    `problem` says why the settings in force differ from the file, and what to do; every command shows it until
    it is fixed.
    """

    def __init__(self, chosen: str) -> None:
        """Args: chosen: the preset to use for `auto`."""
        self.problem: tuple[str, str] | None = None
        self._chosen = chosen
        self._accepted = os.path.join(paths.state_dir(), "config.accepted.toml")

    def read(self) -> Loaded:
        """Read the current file. Raises: SettingsError; NotReady if other users may write it."""
        if paths.is_system():
            _check_trusted(paths.config_file())
        return _completed(load_settings(paths.config_file(), os.environ, chosen=self._chosen))

    def choose(self, preset: str) -> None:
        """Use this preset for `auto` from now on."""
        self._chosen = preset

    def at_start(self) -> Settings:
        """Settings of the file, or of the last accepted file. Raises: SettingsError, UsageError, NotReady."""
        try:
            settings = self.read().settings
            check_promises(settings)
            return settings
        except (UsageError, NotReady) as error:
            return self.fall_back(error)

    def fall_back(self, error: GpuschedError) -> Settings:
        """The last accepted settings, when the daemon cannot start with those of the file. Raises: the error."""
        found = self._last_accepted() if paths.is_system() and self.problem is None else None
        if found is None:
            raise error
        settings, at = found
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
        # The file may be valid and yet not fit this machine; a check of the file would not show that.
        hint = f"{error.hint}; {_RELOAD}" if isinstance(error, NotReady) and error.hint else _HINT
        self.problem = f"{error.message}; using the settings of {used} until that is fixed", hint
        return settings

    def accept(self, settings: Settings) -> None:
        """Keep a copy of the file, now in use, for a restart after a faulty change.

        No copy is kept if settings of the file apply only from the next start, which may fail with them.
        """
        self.problem = None
        if not paths.is_system():
            return
        draft = f"{self._accepted}.new"
        try:
            try:
                with open(paths.config_file(), "rb") as file:
                    content = file.read()
            except FileNotFoundError:
                content = b""
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            # The file may have changed since the settings were read.
            if self._load_copy(draft).settings == settings:
                os.replace(draft, self._accepted)
            else:
                os.unlink(draft)
        except (OSError, UsageError) as error:
            log.warning("could not keep a copy of the settings: %s", error)

    def _last_accepted(self) -> tuple[Settings, float] | None:
        try:
            at = os.stat(self._accepted).st_mtime
            settings = self._load_copy(self._accepted).settings
            check_promises(settings)
        except (OSError, UsageError):
            # The copy may be from an older release with other setting names.
            return None
        return settings, at

    def _load_copy(self, path: str) -> Loaded:
        # A variable that names another file would override the path.
        environment = {key: text for key, text in os.environ.items() if key != "GPUSCHED_CONFIG"}
        return _completed(load_settings(path, environment, chosen=self._chosen))


def _completed(loaded: Loaded) -> Loaded:
    limit = loaded.settings.limit
    coordinated = next((name for name, one in loaded.settings.account.items() if one.coordinators), None)
    if coordinated is not None and not paths.is_system():
        raise UsageError(
            f"account {coordinated} has coordinators, but a personal scheduler has one user alone",
            f"remove coordinators from [account.{coordinated}]; for several users: gpusched system install",
        )
    if not paths.is_system() or limit.running_per_user is not None:
        return loaded
    limit = replace(limit, running_per_user=RUNNING_PER_USER)
    return replace(loaded, settings=replace(loaded.settings, limit=limit))


def _check_trusted(file: str) -> None:
    """Refuse a settings file that users other than root may write, since its contents run as root."""
    for path in (file, os.path.dirname(file)):
        try:
            found = os.stat(path)
        except OSError:
            continue
        if found.st_uid != 0 or found.st_mode & 0o022:
            raise NotReady(
                f"{path} is writable by users other than root, and root's daemon executes what it says",
                f"chown root {path} && chmod go-w {path}",
            )
