"""Plans for installing and removing the system scheduler: the steps that the current state still requires.

Unneeded steps are left out, so the plan after a complete installation is empty.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import gpusched
from gpusched import __version__, paths
from gpusched.engine.launchers import UnitNames
from gpusched.errors import NotReady
from gpusched.model.units import format_duration, plural
from gpusched.paths import replace_file

UNIT = "gpusched.service"
METRICS = "gpusched-metrics.service"
WEB = "gpusched-web.service"
OWN_UNITS = (UNIT, METRICS, WEB)
GUARD = "gpusched-guard.service"
HEAD_UNIT = "gpusched-head.service"
NODE_UNIT = "gpusched-node.service"
UNITS = "/etc/systemd/system"
_WRITTEN_FOR = "/opt/gpusched/bin/"
"""Folder of the commands as written in the shipped unit files."""


@dataclass(frozen=True, slots=True)
class InstallTarget:
    folder: str
    """Folder of the commands, absolute."""
    root: str = ""
    """Prefix of the paths written; if set, systemd is left alone."""
    launcher: str = "auto"
    """The setting [daemon] launcher."""
    checkpoint_dir: str | None = None
    """The setting [life] checkpoint_dir."""

    def at(self, path: str) -> str:
        """The path on the machine, below the root."""
        return self.root + path


def source(name: str) -> str:
    """The text of a file that gpusched ships for /etc."""
    package = os.path.dirname(os.path.abspath(gpusched.__file__))
    for folder in (os.path.join(package, "systemd"), os.path.join(os.path.dirname(package), "systemd")):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return file.read()
    raise NotReady(f"{name} is missing from this installation", "reinstall gpusched with pip")


def unit_text(name: str, site: InstallTarget) -> str:
    """The unit file with the paths of this installation."""
    text = source(name).replace(_WRITTEN_FOR, os.path.join(site.folder, ""))
    if name == UNIT and site.checkpoint_dir:
        # May not exist yet: the first run that needs it creates it.
        text = text.replace("\nProtectHome=", f"\nReadWritePaths=-{site.checkpoint_dir}\nProtectHome=")
    return text


def commands_folder() -> str:
    """Folder of this installation's commands. Raises: NotReady."""
    for folder in (os.path.dirname(os.path.abspath(sys.executable)), sysconfig.get_path("scripts")):
        if os.path.exists(os.path.join(folder, "gpuschedd")):
            return folder
    raise NotReady(
        f"there is no gpuschedd beside {sys.executable}",
        "install gpusched with pip in a separate environment: sudo python3 -m venv /opt/gpusched",
    )


COMMANDS = (
    *("gsub", "grun", "gq", "gcancel", "gwait", "glogs", "gshow", "ginfo", "ghist", "gtop", "gctl"),
    *("gpusched", "gpuschedd"),
)
FORK_CONF = f"{UNITS}/{UNIT}.d/10-fork.conf"
PAM = "/etc/pam.d/gpusched"
CONFIG = f"{paths.SYSTEM_CONFIG}/config.toml"
LINKS = "/usr/local/bin"
MAN = "/usr/local/share/man/man1"
PACKAGED = "/usr/bin"
"""Where a package of the distribution links the commands; it brings the manual pages, too."""
SLICE = UnitNames().slice


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step of a plan."""

    word: str
    """`write`, `link`, `remove`, `run`, or `keep` for a note without an action."""
    target: str
    why: str
    act: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class ServiceState:
    """Current state according to systemd and the daemon."""

    is_enabled: bool = False
    is_active: bool = False
    version: str | None = None
    """Version of the responding daemon; None if none responds."""
    slice_tasks: int | None = None
    """Processes and threads in the slice of all runs, which systemd keeps after the last run ends; None if there is
    no slice, or systemd does not count them."""


def install_plan(site: InstallTarget, service: ServiceState, default_time_s: int | None = None) -> list[PlanStep]:
    """The remaining steps in order, after notes about files that are kept.

    Args: default_time_s: default time limit of jobs, for a new config file.
    """
    units = [
        *write_changed(site, f"{UNITS}/{UNIT}", unit_text(UNIT, site), "the scheduler"),
        *write_changed(site, f"{UNITS}/{METRICS}", unit_text(METRICS, site), "metrics for Prometheus; not enabled"),
        *write_changed(site, f"{UNITS}/{WEB}", unit_text(WEB, site), "the web page; not enabled"),
        *_sandbox(site),
    ]
    files = [*units, *write_once(site, PAM, source("pam.d-gpusched"), "applies limits.conf to jobs")]
    files += _config(site, default_time_s)
    return [*files, *_commands(site), *_systemd(site, service, reload=bool(units))]


def node_plan(site: InstallTarget) -> list[PlanStep]:
    """The same for a machine that runs jobs of another machine's daemon: it has no daemon, so no unit."""
    pam = write_once(site, PAM, source("pam.d-gpusched"), "applies limits.conf to jobs")
    return [*pam, *_config(site, None), *_commands(site)]


def _sandbox(site: InstallTarget) -> Iterator[PlanStep]:
    """Keep runs that are children of the daemon out of its sandbox."""
    if site.launcher == "fork":
        yield from write_changed(site, FORK_CONF, source("gpusched-fork.conf"), 'no sandbox, for launcher = "fork"')
    elif os.path.exists(site.at(FORK_CONF)):
        yield _removal(site, FORK_CONF, "systemd starts the runs, so the daemon is sandboxed")


_COMMENTED_LIMIT = "# [default]\n# time_limit_s = 86400 "


def _config(site: InstallTarget, default_time_s: int | None) -> Iterator[PlanStep]:
    text, why = source("default-config.toml"), "settings, all of them commented out"
    if default_time_s is not None:
        text = text.replace(_COMMENTED_LIMIT, f"[default]\ntime_limit_s = {default_time_s}  ", 1)
        why = f"settings: a time limit of {format_duration(default_time_s)} for jobs that give none"
    return write_once(site, CONFIG, text, why)


def write_changed(site: InstallTarget, path: str, text: str, why: str) -> Iterator[PlanStep]:
    """Write a file unless it has this text."""
    if read_text(site.at(path)) != text:
        yield PlanStep("write", site.at(path), why, lambda: write_text(site.at(path), text))


def write_once(site: InstallTarget, path: str, text: str, why: str) -> Iterator[PlanStep]:
    """Write a file once; from then on it belongs to the administrator."""
    found = read_text(site.at(path))
    if found is None:
        yield PlanStep("write", site.at(path), why, lambda: write_text(site.at(path), text))
    elif found != text:
        yield PlanStep("keep", site.at(path), "already there, and yours")


def _commands(site: InstallTarget) -> Iterator[PlanStep]:
    """Commands and manual pages for all users, unless a package has put both where the distribution keeps them."""
    if os.path.realpath(site.at(f"{PACKAGED}/gpusched")) == os.path.realpath(os.path.join(site.folder, "gpusched")):
        return
    yield from _links(site)
    yield from _manual(site)


def _manual(site: InstallTarget) -> Iterator[PlanStep]:
    from gpusched.cli.admin.man_pages import MARK, man_pages  # loads every command

    pages: dict[str, str] = {}
    for name, text in man_pages().items():
        path = site.at(f"{MAN}/{name}")
        found = read_text(path)
        if found is not None and not found.startswith(MARK):
            yield PlanStep("keep", path, "not from gpusched")
        elif found != text:
            pages[path] = text

    def write() -> None:
        for path, text in pages.items():
            write_text(path, text)

    if pages:
        yield PlanStep("write", site.at(MAN), f"{plural(len(pages), 'manual page')}: man gsub", write)


def _manual_removal(site: InstallTarget) -> Iterator[PlanStep]:
    """Pages that an installation of any release wrote."""
    from gpusched.cli.admin.man_pages import MARK  # loads every command

    folder = site.at(MAN)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    paths = [os.path.join(folder, name) for name in names if name.startswith("g") and name.endswith(".1")]
    pages = [path for path in paths if (read_text(path) or "").startswith(MARK)]

    def remove_pages() -> None:
        for path in pages:
            os.unlink(path)
        # Debian has its parent from the start, but not this folder: the installation has made it.
        if not os.listdir(folder):
            os.rmdir(folder)

    if pages:
        yield PlanStep("remove", folder, f"{plural(len(pages), 'manual page')} of gpusched", remove_pages)


def _links(site: InstallTarget) -> Iterator[PlanStep]:
    if site.folder == LINKS:
        return
    for name in COMMANDS:
        link, target = site.at(f"{LINKS}/{name}"), os.path.join(site.folder, name)
        if os.path.realpath(link) == os.path.realpath(target) or not os.path.exists(site.folder):
            continue
        if os.path.lexists(link) and not _is_ours(link):
            yield PlanStep("keep", link, f"not from gpusched; call {target} by its path")
        else:
            yield PlanStep("link", link, target, lambda link=link, target=target: _link(link, target))  # type: ignore[misc]


def _is_ours(link: str) -> bool:
    """Whether a link may be replaced: its target, which need not exist, is a command of the same name."""
    return os.path.islink(link) and os.path.basename(os.readlink(link)) == os.path.basename(link)


def _systemd(site: InstallTarget, service: ServiceState, *, reload: bool) -> Iterator[PlanStep]:
    if site.root:
        return
    if reload:
        yield system_command("systemctl", "daemon-reload")
    if not service.is_enabled:
        yield system_command("systemctl", "enable", "--quiet", UNIT, why="starts at boot")
    if not service.is_active:
        yield system_command("systemctl", "start", UNIT, why="and waits until it answers")
    elif reload or service.version != __version__:
        other = f"{service.version} runs; " if service.version not in (None, __version__) else ""
        yield system_command("systemctl", "restart", UNIT, why=f"{other}jobs keep running")


def uninstall_plan(site: InstallTarget, service: ServiceState, *, purge: bool) -> list[PlanStep]:
    """Remove everything; settings and job table only with `purge`."""
    steps: list[PlanStep] = []
    units = [path for path in (*(f"{UNITS}/{name}" for name in OWN_UNITS), FORK_CONF) if os.path.exists(site.at(path))]
    # systemctl fails each time for a unit that was removed by hand.
    there = [name for name in OWN_UNITS if f"{UNITS}/{name}" in units]
    if there and not site.root:
        steps.append(system_command("systemctl", "disable", "--quiet", "--now", *there, why="jobs keep running"))
    if service.is_active and UNIT not in there:
        steps.append(system_command("systemctl", "stop", UNIT, why="jobs keep running"))
    if os.path.exists(site.at(f"{UNITS}/{GUARD}")) and not site.root:
        steps.append(PlanStep("run", "gpusched system guard off", "logins can use the GPUs again", _lift_guard))
    if service.slice_tasks:
        steps.append(PlanStep("keep", SLICE, "jobs run in it; it disappears at the next reboot"))
    elif service.slice_tasks is not None:
        steps.append(system_command("systemctl", "stop", SLICE, why="no job is in it"))
    steps += [_removal(site, path, "") for path in units]
    if read_text(site.at(PAM)) == source("pam.d-gpusched"):
        steps.append(_removal(site, PAM, ""))
    for name in COMMANDS:
        link = f"{LINKS}/{name}"
        if site.folder != LINKS and os.path.islink(site.at(link)) and _is_ours(site.at(link)):
            steps.append(_removal(site, link, ""))
    steps += _manual_removal(site)
    if units and not site.root:
        steps.append(system_command("systemctl", "daemon-reload"))
    for path, what in ((paths.SYSTEM_CONFIG, "settings"), (paths.SYSTEM_STATE, "job table, logs of the daemon")):
        if purge and os.path.exists(site.at(path)):
            steps.append(_removal(site, path, f"{what}, deleted"))
        elif os.path.exists(site.at(path)):
            steps.append(PlanStep("keep", site.at(path), f"{what}; --purge deletes it"))
    return steps


def _lift_guard() -> None:
    from gpusched.cli.admin.guard import lift  # imports this module

    lift()


def look(environ: Mapping[str, str], version: Callable[[], str | None]) -> ServiceState:
    """Query systemd, and the daemon for its version."""

    def says(*words: str, unit: str = UNIT) -> str:
        done = subprocess.run(["systemctl", *words, unit], capture_output=True, text=True, check=False, env=environ)
        return done.stdout.strip()

    # A service that is activating runs the old unit and may fail: do not wait for it.
    is_active = says("is-active") in ("active", "reloading", "activating")
    tasks = says("show", "--property=TasksCurrent", "--value", unit=SLICE)
    # systemd answers for any name: without tasks the slice may not exist.
    has_slice = says("is-active", unit=SLICE) == "active" and tasks.isdigit()
    version_now = version() if is_active else None
    return ServiceState(says("is-enabled") == "enabled", is_active, version_now, int(tasks) if has_slice else None)


def _removal(site: InstallTarget, path: str, why: str) -> PlanStep:
    return PlanStep("remove", site.at(path), why, lambda: remove(site.at(path)))


def system_command(*words: str, why: str = "") -> PlanStep:
    """A step that runs a command of the system's."""
    return PlanStep("run", " ".join(words), why, lambda: run_command(*words))


def run_command(*words: str) -> None:
    """Raises: NotReady with the first line of the command's output."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NotReady(
            f"{' '.join(words)} failed{': ' + said[0] if said else ''}", f"see why: journalctl -u {UNIT} -n 30"
        )


def read_text(path: str) -> str | None:
    """None if there is no such file, "" if it cannot be read as text."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return "" if os.path.exists(path) else None


def write_text(path: str, text: str) -> None:
    """Write a world-readable file atomically."""
    _make_folder(os.path.dirname(path))
    replace_file(path, text.encode(), 0o644)


def _link(link: str, target: str) -> None:
    _make_folder(os.path.dirname(link))
    if os.path.lexists(link):
        os.unlink(link)
    os.symlink(target, link)


def _make_folder(path: str) -> None:
    before = os.umask(0o022)
    try:
        os.makedirs(path, exist_ok=True)
    finally:
        os.umask(before)


def remove(path: str) -> None:
    """Remove a file or folder, and its folder of drop-ins if that is left empty."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
        folder = os.path.dirname(path)
        # The folder may hold other drop-ins for the service.
        if folder.endswith(".service.d") and not os.listdir(folder):
            os.rmdir(folder)
