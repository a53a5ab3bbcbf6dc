"""Plans for making, joining and leaving a cluster on Ray: the steps, and what they change in the settings."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from gpusched import paths
from gpusched.addons.ray.keeper import check_admission, end_leftovers, keeper_pid, last_problem
from gpusched.addons.ray.site import RayFolder, RayMember, check_token, valid_token
from gpusched.addons.system.system_plan import (
    HEAD_UNIT,
    NODE_UNIT,
    UNITS,
    InstallTarget,
    PlanStep,
    commands_folder,
    node_plan,
    read_text,
    remove,
    system_command,
    unit_text,
    write_changed,
    write_text,
)
from gpusched.config.document import KeyChange
from gpusched.errors import GpuschedError, NotReady, Refused, UsageError
from gpusched.model.units import printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_STOP_S = 20.0
_SSH_S = 60.0


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """Where the commands work: for all users of this machine, or for one."""

    folder: RayFolder
    is_system: bool
    config: str

    def unit(self, member: RayMember) -> str:
        return HEAD_UNIT if member.is_head else NODE_UNIT


def with_engine(text: str, engine: str | None) -> str:
    """Settings with `engine` in [cluster], or without it for None; every other line stays as it is.

    A section at the end that held nothing else goes with it.
    """
    from gpusched.config.edit import with_changes  # an editor of TOML, which no other step needs

    changed, header = with_changes(text, [KeyChange(("cluster", "engine"), engine)]), "[cluster]\n"
    if changed == text or not changed.endswith(header):
        return changed
    return changed.removesuffix(header).removesuffix("\n")


def own_address(towards: str | None) -> str:
    """IP address at which other machines reach this one. Args: towards: one of them. Raises: UsageError."""
    # Connecting such a socket sends nothing; it only asks for the route.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards or "192.0.2.1", 9))
            found = str(probe.getsockname()[0])
            if not found.startswith("127."):
                return found
        except OSError:
            pass
    own = sorted(
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    )
    if len(own) != 1:
        many = f"it has {', '.join(own)}" if own else "it has only its own"
        raise UsageError(f"cannot tell at which address other machines reach this one: {many}", "name it: --address IP")
    return own[0]


def check_ports(member: RayMember, option: str) -> None:
    """Raises: NotReady when something listens on one of the ports."""
    for port in member.ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("", port))
            except OSError as error:
                first = member.first_port + 100
                raise NotReady(
                    f"port {port} cannot be used: {error.strerror}; Ray needs {member.ports.start} to "
                    f"{member.ports.stop - 1}",
                    f"choose others: {option} {first}",
                ) from None


def keep_running(place: ClusterPlace, member: RayMember) -> Iterator[PlanStep]:
    """Start Ray here, and keep it running."""
    if not place.is_system:
        target = f"gpusched cluster run > {place.folder.log}"
        yield PlanStep(
            "start", target, "in the background; keeps Ray running until this machine restarts", _start(place)
        )
        return
    unit, site = place.unit(member), InstallTarget(commands_folder())
    yield from write_changed(site, f"{UNITS}/{unit}", unit_text(unit, site), "keeps Ray running")
    if not member.is_head:
        yield from node_plan(site)
    yield system_command("systemctl", "daemon-reload")
    yield system_command("systemctl", "enable", "--quiet", "--now", unit, why="now and at boot")


def _start(place: ClusterPlace) -> Callable[[], None]:
    def start() -> None:
        place.folder.make()
        if os.path.exists(place.folder.problem):
            os.unlink(place.folder.problem)
        argv = [os.path.join(commands_folder(), "gpusched"), "cluster", "run"]
        with open(place.folder.log, "ab") as log:
            subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True, close_fds=True
            )

    return start


def stop_running(place: ClusterPlace, member: RayMember) -> Iterator[PlanStep]:
    """End Ray here; jobs keep running."""
    if place.is_system:
        unit = place.unit(member)
        if os.path.exists(f"{UNITS}/{unit}"):
            yield system_command("systemctl", "disable", "--quiet", "--now", unit, why="jobs keep running")
            yield PlanStep("remove", f"{UNITS}/{unit}", "", lambda: remove(f"{UNITS}/{unit}"))
            yield system_command("systemctl", "daemon-reload")
    pid = keeper_pid(place.folder)
    if pid is not None or not place.is_system:
        yield PlanStep("stop", "Ray on this machine", "jobs keep running", lambda: stop_keeper(place.folder))


def stop_keeper(folder: RayFolder) -> None:
    """End the keeper and what it keeps running. Raises: NotReady."""
    pid = keeper_pid(folder)
    if pid is not None:
        os.kill(pid, 15)
        until = time.monotonic() + _STOP_S
        while keeper_pid(folder) is not None:
            if time.monotonic() > until:
                raise NotReady(f"the process that keeps Ray running (pid {pid}) does not end", f"kill -9 {pid}")
            time.sleep(0.05)
    end_leftovers(folder)


def change_engine(place: ClusterPlace, engine: str | None) -> Iterator[PlanStep]:
    """Set or remove the setting [cluster] engine. Raises: Refused where the file cannot be changed safely."""
    text = read_text(place.config) or ""
    why = "is a link" if os.path.islink(place.config) else None
    try:
        changed = with_engine(text, engine)
    except (tomllib.TOMLDecodeError, Refused):
        changed, why = "", "is written in a form that this command cannot change"
    if changed == text:
        return
    what = f'[cluster] engine = "{engine}"' if engine is not None else "without [cluster] engine"
    if not text and os.path.exists(place.config) and os.path.getsize(place.config):
        why = "cannot be read as text"
    if why is not None:
        raise Refused(f"{place.config} {why}", f"change the file yourself, and run this command again: {what}")
    yield PlanStep("change", place.config, what, lambda: _rewrite(place.config, changed))


def _rewrite(path: str, text: str) -> None:
    """Replace a settings file; its mode and owner stay."""
    before = os.stat(path) if os.path.exists(path) else None
    if before is None:
        write_text(path, text)
        return
    write_text(path, text)
    os.chmod(path, before.st_mode & 0o7777)
    os.chown(path, before.st_uid, before.st_gid)


def forget_files(place: ClusterPlace, member: RayMember) -> Iterator[PlanStep]:
    """Remove what this machine knows of the cluster; the token only if no other machine shares the folder."""
    folder = place.folder

    def forget() -> None:
        shutil.rmtree(folder.session_root, ignore_errors=True)
        mark = paths.NODE_MARK if place.is_system else paths.node_mark()
        for path in (folder.member_file, folder.problem, folder.log, folder.keeper, f"{folder.keeper}.lock", mark):
            if os.path.exists(path):
                os.unlink(path)
        if member.is_head:
            shutil.rmtree(folder.storage, ignore_errors=True)
            if os.path.exists(folder.known):
                os.unlink(folder.known)
        others = [name for name in os.listdir(folder.path) if name.endswith(".json") and name != "nodes.json"]
        if not others and os.path.exists(folder.token):
            os.unlink(folder.token)

    yield PlanStep("remove", folder.member_file, "this machine's part in the cluster, and the token", forget)


def agent_command(place: ClusterPlace, member: RayMember) -> list[str]:
    """Command of this node's agent."""
    command = [os.path.join(commands_folder(), "gpusched"), "agent", member.name, "--address", member.address]
    return [*command, "--system"] if place.is_system else command


def why_not_up(place: ClusterPlace) -> str:
    """What is known of a raylet that does not come up."""
    if keeper_pid(place.folder) is None and not place.is_system:
        return "the process that keeps it running has ended"
    return last_problem(place.folder) or "it is still starting"


def new_token(place: ClusterPlace) -> Iterator[PlanStep]:
    """Make a token, unless there is one. Raises: NotReady when others can read that."""
    if os.path.exists(place.folder.token):
        check_token(place.folder.token)
        return
    yield PlanStep("write", place.folder.token, "a new token, which only you can read", lambda: _make_token(place))


def _make_token(place: ClusterPlace) -> None:
    _make_state(place)
    place.folder.make_token()


def bring_token(
    place: ClusterPlace, member: RayMember, host: str, given: str | None, source: str | None
) -> Iterator[PlanStep]:
    """Bring the token of the cluster here, unless it is, and ask the head whether it admits this machine with it.

    Args: host: the head as typed. given: the token if there is one to take; None to copy it by ssh. source: where it
    is from, in words.
    Raises: Refused, NotReady when the token that is here is another one, or the head does not admit it.
    """
    path, is_new = place.folder.token, not os.path.exists(place.folder.token)
    if is_new and given is not None:
        yield PlanStep("write", path, f"from {source}", lambda: _keep_token(place, given))
    elif is_new:
        ssh = _ssh_command(place, host)
        yield PlanStep("run", shlex.join(ssh), f"copies the token to {path}", lambda: _copy_token(place, ssh))
    else:
        if given is not None:
            _refuse_other_token(place, given)
        check_token(path)
        check_admission(place.folder, member)
    yield PlanStep(
        "ask", f"the head {member.gcs}", "whether it admits this machine", lambda: _admit(place, member, is_new)
    )


def _refuse_other_token(place: ClusterPlace, token: str) -> None:
    with open(place.folder.token, encoding="ascii", errors="replace") as file:
        if file.read().strip() != token:
            raise Refused(f"{place.folder.token} holds another token", "remove that file if it is of an old cluster")


def _keep_token(place: ClusterPlace, token: str) -> None:
    _make_state(place)
    place.folder.make()
    paths.replace_file(place.folder.token, token.encode())


def _ssh_command(place: ClusterPlace, host: str) -> list[str]:
    command = ["ssh", "-o", "ConnectTimeout=10"]
    if not sys.stdin.isatty():
        command += ["-o", "BatchMode=yes"]
    # root may rarely log in from elsewhere; the person who typed sudo may.
    user = os.environ.get("SUDO_USER")
    if place.is_system and user:
        return ["sudo", "-u", user, *command, host, "sudo", "-n", "gpusched", "cluster", "token"]
    return [*command, host, "gpusched", "cluster", "token"]


def _copy_token(place: ClusterPlace, ssh: list[str]) -> None:
    said = ""
    try:
        done = subprocess.run(ssh, capture_output=True, timeout=_SSH_S, check=False)
        found = valid_token(done.stdout.decode("ascii", "replace")) if done.returncode == 0 else None
        lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        said = f": {printable(lines[-1], 200)}" if lines and found is None else ""
    except subprocess.TimeoutExpired:
        found = None
    except OSError as error:
        found, said = None, f": {error.strerror}"
    if found is None:
        raise NotReady(
            f"the token could not be copied from the head by ssh{said}",
            "print it there: gpusched cluster token; and here: gpusched cluster join HEAD --token-file FILE",
        )
    _keep_token(place, found)


def _admit(place: ClusterPlace, member: RayMember, has_new_token: bool) -> None:
    try:
        check_admission(place.folder, member)
    except GpuschedError:
        if has_new_token:
            os.unlink(place.folder.token)
        raise


def _make_state(place: ClusterPlace) -> None:
    if not place.is_system:
        paths.make_private(paths.state_dir())
    elif not os.path.isdir(paths.state_dir()):
        os.makedirs(paths.state_dir(), mode=0o711)


def save_member(place: ClusterPlace, member: RayMember, found: RayMember | None) -> Iterator[PlanStep]:
    """Write down what this machine is, unless that is `found`."""
    if member == found:
        return
    what = "head" if member.is_head else "node"
    why = f"{what} {member.name} at {member.address}, ports {member.ports.start} to {member.ports.stop - 1}"

    def save() -> None:
        _make_state(place)
        place.folder.save(member)

    yield PlanStep("write", place.folder.member_file, why, save)
