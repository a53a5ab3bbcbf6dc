"""gpusched system: installs and removes the system scheduler."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import typer

import gpusched
from gpusched import __version__, paths
from gpusched.addons.system.guard import app as guard_app
from gpusched.addons.system.system_plan import (
    CONFIG,
    HEAD_UNIT,
    NODE_UNIT,
    UNIT,
    UNITS,
    InstallTarget,
    PlanStep,
    ServiceState,
    commands_folder,
    install_plan,
    look,
    node_plan,
    uninstall_plan,
)
from gpusched.errors import DaemonUnreachable, GpuschedError, NotReady, Refused, UsageError
from gpusched.model.units import parse_duration_s, plural, printable

app = typer.Typer(
    help="Install and remove the system scheduler, which systemd runs for all users.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.add_typer(guard_app, name="guard")

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Plan = Annotated[bool, typer.Option("--plan", help="Print the plan and do nothing.")]
Root = Annotated[
    str | None, typer.Option("--root", metavar="DIR", help="Write below DIR and leave systemd alone, for inspection.")
]

_NEXT = """\
The system scheduler is running. Everyone on this machine can use it:
    {example}
    gq
Settings:   {config}   then: sudo systemctl reload gpusched
Log:        journalctl -u gpusched
Health:     sudo gpusched doctor
Prometheus: sudo systemctl enable --now gpusched-metrics
Web page:   sudo systemctl enable --now gpusched-web
Upgrade:    install the new release in the same place, then run this command again
"""


_NODE_NEXT = """\
This machine can become a node. On the head:
    sudo ssh {node} gpusched --version      must answer without a password
    [cluster] nodes = ["{node}"]            in /etc/gpusched/config.toml, then: sudo systemctl restart gpusched
What this machine offers ([node] cpus, mem_mib, labels):   {config}
"""

_NO_DEFAULT_TIME = (
    "Jobs submitted without a time limit will have none, so their end is unknown. To set a default, which -t "
    "overrides: --default-time 1d, or later [default] time_limit_s in the config file. See docs/howto/time-limits.md."
)


@app.command()
def install(
    yes: Yes = False,
    plan: Plan = False,
    root: Root = None,
    default_time: Annotated[
        str | None,
        typer.Option(
            "--default-time",
            metavar="TIME",
            help="Default time limit of jobs, such as 1d, written to a new config file; default: none.",
        ),
    ] = None,
    is_node: Annotated[
        bool, typer.Option("--node", help="Prepare a node of another machine's scheduler; nothing is started here.")
    ] = False,
) -> None:
    """Install the system scheduler.

    Uses the installation that this command belongs to. Shows the plan, asks, carries it out and waits until the daemon
    answers. Existing files are left as they are, so it can be run again at any time, for example after an upgrade.
    Settings in /etc/gpusched/config.toml are never changed.

    example: sudo /opt/gpusched/bin/gpusched system install
    """
    below = _below(root)
    limit_s = _default_time(default_time, f"{below}{paths.SYSTEM_CONFIG}/config.toml")
    _needs_root(below)
    folder = commands_folder()
    if not below:
        needs_systemd()
        check_trust(folder)
    site = _site(folder, below)
    if is_node:
        _install_node(site, limit_s, yes=yes, plan=plan)
        return
    service = ServiceState() if below else look(os.environ, _running_version)
    steps = install_plan(site, service, limit_s)
    title = f"gpusched {__version__} in {os.path.dirname(folder)} becomes the system scheduler:"
    notes = ["No users or groups are created. systemd creates /var/lib/gpusched, /run/gpusched and /etc/gpusched."]
    if limit_s is None and any(step.word == "write" and step.target == site.at(CONFIG) for step in steps):
        notes.append(_NO_DEFAULT_TIME)
    notes += [] if below else _personal_daemons()
    if carry_out(steps, title, notes, yes=yes, plan=plan) and not below:
        config = f"{paths.SYSTEM_CONFIG}/config.toml"
        sys.stdout.write(next_commands(config, example_for(_ask("/v1/cluster"))))


def _install_node(site: InstallTarget, limit_s: int | None, *, yes: bool, plan: bool) -> None:
    """Raises: UsageError, Refused."""
    if limit_s is not None:
        raise UsageError("--default-time is a setting of the scheduler, not of a node", "set it on the head")
    if os.path.exists(site.at(f"{UNITS}/{UNIT}")):
        raise Refused(
            "this machine has its own scheduler, which would book its GPUs a second time",
            "remove it first, its settings stay: sudo gpusched system uninstall",
        )
    title = f"gpusched {__version__} in {os.path.dirname(site.folder)} runs jobs of another machine's scheduler:"
    notes = ["Nothing is started: the head's daemon reaches this machine as root, by ssh."]
    if carry_out(node_plan(site), title, notes, yes=yes, plan=plan):
        sys.stdout.write(_NODE_NEXT.format(config=site.at(CONFIG), node=os.uname().nodename))


@app.command()
def uninstall(
    yes: Yes = False,
    plan: Plan = False,
    root: Root = None,
    purge: Annotated[bool, typer.Option("--purge", help="Also delete settings and job table.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even while jobs run; they continue unrecorded.")] = False,
) -> None:
    """Remove the system scheduler. Settings, job table and the Python environment are kept.

    Refused while jobs run. Pending jobs stay in the table for a later installation.

    example: sudo gpusched system uninstall
    """
    below = _below(root)
    _needs_root(below)
    if not below:
        needs_systemd()
        running = _running_jobs()
        if running and not force:
            raise Refused(
                f"{plural(running, 'job')} still running, and how they end would not be recorded",
                "wait for them or cancel them (gq, gcancel); to leave them running: --force",
            )
    site = _site(commands_folder(), below)
    if any(os.path.exists(site.at(f"{UNITS}/{unit}")) for unit in (HEAD_UNIT, NODE_UNIT)):
        raise Refused("this machine is in a cluster, whose Ray would keep running", "sudo gpusched cluster leave")
    steps = uninstall_plan(site, ServiceState() if below else look(os.environ, lambda: None), purge=purge)
    carry_out(steps, "Removing the system scheduler:", [], yes=yes, plan=plan)


def carry_out(steps: list[PlanStep], title: str, notes: list[str], *, yes: bool, plan: bool) -> bool:
    """Show the steps, ask, carry them out. False if nothing was done. Raises: Refused without a terminal."""
    if not any(step.act for step in steps):
        sys.stdout.write("nothing to do\n")
        return False
    lines = [title, *(f"  {step.word:<7} {step.target}{_remark(step)}" for step in steps), *notes]
    sys.stdout.write("\n".join(lines) + "\n")
    # Also in a pipe: the next steps may take a while.
    sys.stdout.flush()
    if plan:
        return False
    if not yes:
        if not sys.stdin.isatty():
            raise Refused("standard input is not a terminal, so nothing can be confirmed", "confirm with --yes")
        if not typer.confirm("Proceed?"):
            raise typer.Exit(1)
    for step in steps:
        if step.act is not None:
            try:
                step.act()
            except OSError as error:
                raise NotReady(
                    f"cannot {step.word} {step.target}: {error.strerror}", "fix this and run the command again"
                ) from None
    sys.stdout.write("done\n")
    return True


def _remark(step: PlanStep) -> str:
    if not step.why:
        return ""
    return f" -> {step.why}" if step.word == "link" else f"   ({step.why})"


def _below(root: str | None) -> str:
    if root is None:
        return ""
    if not root.strip("/"):
        raise UsageError(f"--root {root} is not a folder to install below", "leave it out to install on this machine")
    return os.path.abspath(root)


def _default_time(text: str | None, config: str) -> int | None:
    """In seconds. Raises: UsageError, also if a config file exists, which is never changed."""
    if text is None:
        return None
    try:
        limit_s = parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"--default-time: {error}", "for example: --default-time 1d") from None
    if os.path.lexists(config):
        raise UsageError(
            f"--default-time is for a new config file, but {config} exists",
            f"set in that file: [default] time_limit_s = {limit_s}",
        )
    return limit_s


def _needs_root(below: str) -> None:
    if os.geteuid() != 0 and not below:
        raise Refused(
            "only root can install or remove the system scheduler",
            f"sudo {sys.argv[0]} {' '.join(sys.argv[1:])}".rstrip(),
        )


def needs_systemd() -> None:
    if not os.path.isdir("/run/systemd/system"):
        raise NotReady("this machine does not run systemd", "start the daemon yourself, as root: gpuschedd --system")


def check_trust(folder: str) -> None:

    if not is_plain(folder):
        raise Refused(f"systemd cannot use the path {folder!r}", "install it in a path of letters and digits")
    found = first_doubt(parts_of_installation(folder))
    if found is not None:
        raise Refused(
            f"root must not run this installation: {found}",
            "install it where only root can write and everyone can read: sudo python3 -m venv /opt/gpusched, then "
            "sudo /opt/gpusched/bin/pip install the same package",
        )


def _site(folder: str, below: str) -> InstallTarget:
    from gpusched.config import load_settings

    config = f"{below}{paths.SYSTEM_CONFIG}/config.toml"
    settings = load_settings(config, {}).settings
    checkpoints = settings.life.checkpoint_dir
    if checkpoints is not None and not is_plain(checkpoints):
        raise Refused(f"systemd cannot use the path {checkpoints!r}", f"set another one in {config}")
    return InstallTarget(folder, below, settings.daemon.launcher, checkpoints, _pages)


def _pages() -> Mapping[str, str]:
    from gpusched.addons.system.man_pages import man_pages  # loads every command

    return man_pages()


def next_commands(config: str, example: str) -> str:
    """What to type after an installation."""
    return _NEXT.format(config=config, example=example)


def example_for(cluster: dict[str, Any] | None) -> str:
    """A first job that can run here; without a GPU it includes the reason where that may surprise."""
    if cluster is None:
        return "gsub -- hostname"
    if not cluster["gpus"]:
        error = next((node["gpu_error"] for node in cluster["nodes"] if node["gpu_error"]), None)
        why = f"no GPU answers: {printable(error, 200)}" if error else "no GPU was found on this machine"
        return f"gsub -- hostname        # {why}"
    if any(node["gpu_source"] == "nvml" for node in cluster["nodes"]):
        return "gsub -g 1 -- nvidia-smi"
    if any(node["gpu_source"] == "amdsmi" for node in cluster["nodes"]):
        return "gsub -g 1 -- rocm-smi"
    return "gsub -g 1 --wrap 'echo $CUDA_VISIBLE_DEVICES'        # the GPUs are simulated"


def _running_version() -> str | None:
    status = _status()
    return None if status is None else str(status["version"])


def _running_jobs() -> int:
    status = _status()
    if status is not None:
        return sum(count for state, count in status["jobs"].items() if state != "pending")
    return held_runs(f"{paths.SYSTEM_STATE}/spool")


def held_runs(spool: str) -> int:
    """Number of live supervisors, read from the spool without a daemon."""
    from gpusched.engine.spool import read_record, runs_in

    if not os.path.isdir(spool):
        return 0
    held = 0
    for run in runs_in(spool):
        try:
            record = read_record(spool, run)
        except (OSError, ValueError):
            continue
        held += record is not None and record.is_held
    return held


def _status() -> dict[str, Any] | None:
    answer = _ask("/v1/status")
    return None if answer is None else dict(answer["daemon"])


def _ask(path: str) -> dict[str, Any] | None:
    """Reply of the system daemon; None if there is none."""
    from gpusched.client import DaemonConnection

    try:
        with DaemonConnection(paths.SYSTEM_SOCKET) as client:
            return client.call("GET", path, timeout_s=30.0)
    except (DaemonUnreachable, GpuschedError, OSError):
        return None


def _personal_daemons() -> list[str]:
    """Owners of running personal schedulers: installing sends their commands to the system scheduler."""
    import psutil

    from gpusched.client import DAEMON

    found = set()
    for process in psutil.process_iter(["cmdline", "username"]):
        words = process.info["cmdline"] or []
        if "--system" not in words and any(
            word in ("gpusched.daemon", DAEMON) or word.endswith("/gpuschedd") for word in words
        ):
            found.add(str(process.info["username"]))
    if not found:
        return []
    return [
        f"Personal schedulers of {', '.join(sorted(found))} keep running, but from now on commands use the system "
        "scheduler; docs/howto/install.md shows how to reach the old ones."
    ]


_PLAIN = re.compile(r"/[A-Za-z0-9/._+@-]*")
_MOST_LINKS = 40


def parts_of_installation(folder: str) -> Iterator[str]:
    """Everything that root would execute: commands in `folder`, interpreter, libraries, this package."""
    yield os.path.join(folder, "gpuschedd")
    yield sys.executable
    package = os.path.dirname(os.path.abspath(gpusched.__file__))
    yield from (path for path in sys.path if os.path.exists(path))
    yield from _system_trust_below(sys.prefix if sys.prefix != sys.base_prefix else package)
    if not package.startswith(sys.prefix + os.sep):
        yield from _system_trust_below(package)


def _system_trust_below(folder: str) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        yield root
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(root, name)))):
            yield os.path.join(root, name)


def first_doubt(paths: Iterable[str]) -> str | None:
    """The first reason not to run one of these as root; checks each component of each path, including links."""
    known: dict[str, str | None] = {}
    for path in paths:
        for step in _steps(path):
            if step not in known:
                known[step] = doubt(step)
            if known[step] is not None:
                return known[step]
    return None


def is_plain(path: str) -> bool:
    """Whether a unit file accepts this path without quotes."""
    return _PLAIN.fullmatch(path) is not None


def _steps(path: str) -> Iterator[str]:
    """Every component of the path from the root, including the targets of links."""
    at, left, links = "/", deque(part for part in path.split("/") if part), 0
    yield at
    while left:
        part = left.popleft()
        if part == ".":
            continue
        if part == "..":
            at = os.path.dirname(at)
            continue
        step = os.path.join(at, part)
        yield step
        try:
            target = os.readlink(step)
        except OSError:
            at = step
            continue
        links += 1
        if links > _MOST_LINKS:
            return
        at = "/" if target.startswith("/") else at
        left.extendleft(reversed([part for part in target.split("/") if part]))


def doubt(path: str) -> str | None:
    """Why root should not run this file, or why other users cannot; None if neither applies."""
    try:
        found = os.lstat(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != 0:
        return f"{path} belongs to {_user(found.st_uid)}, who could make root run anything"
    if stat.S_ISLNK(found.st_mode):
        return None
    if mode & 0o002:
        return f"everyone can write {path} (mode {mode:o})"
    if mode & 0o020 and (others := _others_in(found.st_gid)):
        return f"{others} can write {path} through its group (mode {mode:o})"
    if stat.S_ISDIR(found.st_mode) and not mode & 0o001:
        return f"users cannot enter {path} (mode {mode:o}), and so not run the commands"
    # Python recompiles if it cannot read a compiled file.
    if stat.S_ISREG(found.st_mode) and not mode & 0o004 and not path.endswith(".pyc"):
        return f"users cannot read {path} (mode {mode:o}), and so not run the commands"
    return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _others_in(gid: int) -> str:
    """A member of a group other than root; empty if there is none."""
    if gid == 0:
        return ""
    try:
        members = grp.getgrgid(gid).gr_mem
    except KeyError:
        return f"group {gid}"
    members = [*members, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == gid and user.pw_uid)]
    return next((name for name in members if name != "root"), "")
