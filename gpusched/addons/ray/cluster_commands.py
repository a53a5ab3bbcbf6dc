"""gpusched cluster: several machines, reached through Ray."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from gpusched import __version__, paths
from gpusched.addons.ray.cluster_plan import (
    ClusterPlace,
    agent_command,
    bring_token,
    change_engine,
    check_ports,
    forget_files,
    keep_running,
    new_token,
    own_address,
    save_member,
    stop_running,
    why_not_up,
)
from gpusched.addons.ray.keeper import RayKeeper, keeper_pid, last_problem
from gpusched.addons.ray.probe import HeadAnswer, ask_head, check_token_is_required, check_versions
from gpusched.addons.ray.site import (
    DEFAULT_PORT,
    RayFolder,
    RayMember,
    check_ray,
    check_token,
    read_known,
    valid_token,
    write_known,
)
from gpusched.addons.system.command import carry_out, check_trust, held_runs, needs_systemd
from gpusched.addons.system.system_plan import PlanStep, commands_folder, system_command
from gpusched.cli import output, tables
from gpusched.cli.admin.daemon import Json, stop_daemon
from gpusched.client import connect, start_daemon
from gpusched.errors import DaemonUnreachable, GpuschedError, NotReady, Refused, UsageError
from gpusched.model.units import is_digits, plural, printable

app = typer.Typer(
    help="Several machines with one queue, reached through Ray: see docs/howto/several-machines.md.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

UP_S = 300.0
"""How long init and join wait for this machine to be part of the cluster. On a busy one Ray starts slowly."""
_TROUBLE_S = 90.0
"""They give up earlier once something has failed for this long; it may be fixed by then."""
_LOOK_S = 0.5
_REST, _MOST_REST_S = 3, 5.0
"""They pause this many times as long as the last question to the head took, and at most so long: a question costs a
second of CPU time, and Ray gives a starting raylet 15 seconds for everything."""

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Plan = Annotated[bool, typer.Option("--plan", help="Print the plan and do nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Even while jobs run here; they continue, and are not recorded.")]
Name = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Name of this node; default: that of the machine.")
]
Address = Annotated[
    str | None, typer.Option("--address", metavar="IP", help="Where other machines reach this one, if it has several.")
]

_INIT_DONE = """\
The head is up: {name} at {gcs}. On each other machine, with the same gpusched installed:
    {sudo}gpusched cluster join {target}
which copies the token by ssh. Without ssh: {sudo}gpusched cluster token here, and there: cluster join --token-file -
Nodes: gpusched cluster status, ginfo
"""
_TOKEN_HINT = "it is printed on the head by: gpusched cluster token"
_TOKEN_NOTE = (
    "Anyone with the token can run anything as {user} on every node. Ray sends it unencrypted: use it in a network "
    "that you trust, and let a firewall close ports {first} to {last} to all others."
)


@app.command()
def init(
    yes: Yes = False,
    plan: Plan = False,
    name: Name = None,
    address: Address = None,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=1024, max=65000, help="First of the 30 ports that Ray uses.")
    ] = DEFAULT_PORT,
) -> None:
    """Make this machine the head of a cluster: its daemon then starts jobs on every node that joins.

    Shows the plan, asks, carries it out and waits until Ray answers. Jobs keep running, and nothing is lost when Ray
    dies: it only lists the nodes, and carries messages.

    example: sudo gpusched cluster init
    """
    place = _place()
    found = place.folder.load()
    if found is not None and not found.is_head:
        raise Refused(
            f"this machine is node {found.name} of the cluster of {found.head}",
            "leave it first: gpusched cluster leave",
        )
    if found is not None and keeper_pid(place.folder) is not None and not list(change_engine(place, "ray")):
        raise Refused(f"this machine is already the head {found.name}", "see its nodes: gpusched cluster status")
    check_ray()
    _needs_scheduler(place)
    own = address or own_address(None)
    member = found or RayMember("head", name or _own_name(place), own, own, port, port)
    if keeper_pid(place.folder) is None:
        check_ports(member, "--port")
    steps = [
        *new_token(place),
        *save_member(place, member, found),
        *(keep_running(place, member) if keeper_pid(place.folder) is None else ()),
        _wait_step(place, member),
        *change_engine(place, "ray"),
        _restart_step(place),
    ]
    if carry_out(steps, f"{member.name} becomes the head of a cluster:", [_note(member)], yes=yes, plan=plan):
        target = member.head if member.port == DEFAULT_PORT else member.gcs
        sys.stdout.write(_INIT_DONE.format(name=member.name, gcs=member.gcs, target=target, sudo=_sudo(place)))


@app.command()
def join(
    head: Annotated[str, typer.Argument(metavar="HEAD[:PORT]", help="The machine of `gpusched cluster init`.")],
    yes: Yes = False,
    plan: Plan = False,
    name: Name = None,
    address: Address = None,
    token_file: Annotated[
        str | None,
        typer.Option("--token-file", metavar="FILE", help="Read the token from FILE, or from standard input for -."),
    ] = None,
    ports: Annotated[
        int | None,
        typer.Option(
            "--ports",
            metavar="N",
            min=1024,
            max=65000,
            help="First of the 30 ports that Ray uses; default: the head's.",
        ),
    ] = None,
) -> None:
    """Make this machine a node of a cluster: the head's daemon then starts jobs here.

    Shows the plan, asks, carries it out and waits until the head's daemon has reached this machine. The token, without
    which the head admits no one, is copied by ssh unless it is already here or comes with --token-file.

    example: sudo gpusched cluster join lab1
    """
    place = _place()
    host, head_address, port = _head(head)
    _refuse_second(place, head_address)
    check_ray()
    _refuse_own_scheduler(place)
    own = address or own_address(head_address)
    member = RayMember("node", name or _own_name(place), own, head_address, port, ports or port)
    if own == head_address and ports is None:
        raise Refused(f"{host} is this machine", "join from the other machines; the head is a node already")
    token, source = _given_token(token_file), "standard input" if token_file == "-" else token_file
    steps = [
        *bring_token(place, member, host, token, source),
        *save_member(place, member, None),
        *keep_running(place, member),
        _wait_step(place, member),
    ]
    check_ports(member, "--ports")
    title = f"{member.name} ({member.address}) becomes a node of the cluster of {host}:"
    if carry_out(steps, title, [_note(member)], yes=yes, plan=plan):
        sys.stdout.write(f"{member.name} is part of the cluster; the head's ginfo lists it, and {host} sends it jobs\n")


@app.command()
def leave(
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="On the head: forget this node, which is gone for good.")
    ] = None,
    yes: Yes = False,
    plan: Plan = False,
    force: Force = False,
) -> None:
    """Take this machine out of its cluster; on the head with a name, forget a node that is gone for good.

    Refused while jobs run here. The head without a name ends the cluster.

    example: gpusched cluster leave
    """
    place = _place()
    member = _loaded(place, force)
    if node is not None and node != member.name:
        _forget(place, member, node, yes=yes, plan=plan, force=force)
        return
    if not member.is_head:
        spool = os.path.join(paths.state_dir(), f"agent-{member.name}", "spool")
        running = held_runs(spool)
        if running and not force:
            raise Refused(
                f"{plural(running, 'job')} still running here, and how they end would not be recorded",
                f"drain it and wait (on the head: gctl drain {member.name}); to leave them running: --force",
            )
        steps = [*stop_running(place, member), *forget_files(place, member)]
        if carry_out(steps, f"{member.name} leaves the cluster of {member.head}:", [], yes=yes, plan=plan):
            sys.stdout.write(f"To have the head forget it, there: gpusched cluster leave {member.name}\n")
        return
    busy = sorted(name for name, count in _jobs_by_node().items() if count and name != member.name)
    if busy and not force:
        raise Refused(
            f"jobs run on {', '.join(busy)}, and how they end would not be recorded",
            "wait for them or cancel them (gq, gcancel); to leave them running: --force",
        )
    steps = [
        *change_engine(place, None),
        _restart_step(place),
        *stop_running(place, member),
        *forget_files(place, member),
    ]
    carry_out(steps, f"Ending the cluster of {member.name}:", [], yes=yes, plan=plan)


@app.command()
def status(as_json: Json = False) -> None:
    """Show the nodes of this machine's cluster. Exit code 1 when this machine is not part of one, or Ray is not up.

    example: gpusched cluster status
    """
    place = _place()
    member = place.folder.load()
    if member is None:
        raise NotReady("this machine is not in a cluster", "gpusched cluster init, or gpusched cluster join HEAD")
    answer = ask_head(member.gcs, place.folder)
    rows = _node_rows(place, member, answer)
    is_up = answer.alive(member.name) is not None
    if as_json:
        keys = ("name", "role", "address", "ray", "state", "note")
        nodes = [dict(zip(keys, row, strict=True)) for row in rows]
        output.print_json({"head": member.gcs, "this": member.name, "ray": answer.ray, "nodes": nodes})
    else:
        shown = [[*row[:5], printable(row[5])] for row in rows]
        tables.print_table(["NODE", "ROLE", "ADDRESS", "RAY", "STATE", "NOTE"], shown)
    if not is_up:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check this machine's part in its cluster and say how to mend it. Exit code 1 when a check fails.

    example: gpusched cluster doctor
    """
    checks = list(_examine(_place()))
    if as_json:
        keys = ("check", "ok", "text", "hint")
        output.print_json({"checks": [dict(zip(keys, check, strict=True)) for check in checks]})
    else:
        for check, is_ok, text, hint in checks:
            typer.echo(f"{'ok  ' if is_ok else 'FAIL'} {check}: {printable(text)}")
            if not is_ok and hint:
                typer.echo(f"     -> {printable(hint)}")
    if not all(is_ok for _, is_ok, _, _ in checks):
        raise typer.Exit(1)


@app.command()
def token() -> None:
    """Print the cluster's token, for `gpusched cluster join --token-file` on another machine. It is a secret.

    example: ssh lab1 gpusched cluster token | gpusched cluster join lab1 --token-file - --yes
    """
    place = _place()
    _loaded(place)
    check_token(place.folder.token)
    with open(place.folder.token, encoding="ascii") as file:
        sys.stdout.write(f"{file.read().strip()}\n")


@app.command()
def run() -> None:
    """Keep Ray running on this machine, in the foreground; init and join start this for you.

    example: gpusched cluster run
    """
    place = _place()
    member = _loaded(place)
    RayKeeper(place.folder, member, agent_command(place, member)).run()


# --- where, who, what is there ---------------------------------------------------------------------------


def _place() -> ClusterPlace:
    """For root everything belongs to the system's scheduler, unless GPUSCHED_HOME names another."""
    is_system = os.geteuid() == 0 and paths.home() is None
    if is_system:
        paths.serve_system()
    elif paths.finds_system():
        raise Refused("this machine has a system scheduler, which only root can make part of a cluster", "use sudo")
    return ClusterPlace(RayFolder(paths.state_dir()), is_system, paths.config_file())


def _sudo(place: ClusterPlace) -> str:
    return "sudo " if place.is_system else ""


def _loaded(place: ClusterPlace, force: bool = False) -> RayMember:
    try:
        member = place.folder.load()
    except NotReady:
        if not force:
            raise
        member = RayMember("node", _own_name(place), "127.0.0.1", "127.0.0.1")
    if member is None:
        raise NotReady("this machine is not in a cluster", "gpusched cluster init, or gpusched cluster join HEAD")
    return member


def _own_name(place: ClusterPlace) -> str:
    from gpusched.config import load_settings

    named = load_settings(place.config, os.environ).settings.node.name
    return named or socket.gethostname().partition(".")[0]


def _head(text: str) -> tuple[str, str, int]:
    """Name as typed, address and port. Raises: UsageError, NotReady."""
    host, _, digits = text.partition(":")
    if not host or (digits and not (is_digits(digits) and 0 < int(digits) < 65536)):
        raise UsageError(f"{text!r} is not HEAD[:PORT]", "for example: gpusched cluster join lab1")
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise NotReady(f"there is no address of {host}", "name the head by its IP address") from None
    return host, str(found[0][4][0]), int(digits) if digits else DEFAULT_PORT


def _given_token(token_file: str | None) -> str | None:
    if token_file is None:
        return None
    try:
        if token_file == "-":
            text = sys.stdin.read(10_000)
        else:
            with open(token_file, encoding="ascii", errors="replace") as file:
                text = file.read(10_000)
    except OSError as error:
        raise UsageError(f"--token-file {token_file}: {error.strerror}", _TOKEN_HINT) from None
    found = valid_token(text)
    if found is None:
        raise UsageError(f"--token-file {token_file} holds no token", _TOKEN_HINT)
    return found


def _refuse_second(place: ClusterPlace, head: str) -> None:
    member = place.folder.load()
    if member is None:
        return
    what = "the head of a cluster" if member.is_head else f"node {member.name} of the cluster of {member.head}"
    same = not member.is_head and member.head == head
    hint = "see: gpusched cluster doctor" if same else "leave it first: gpusched cluster leave"
    raise Refused(f"this machine is already {what}", hint)


def _needs_scheduler(place: ClusterPlace) -> None:
    if not place.is_system:
        return
    needs_systemd()
    # Root is about to run it, now and at every boot.
    check_trust(commands_folder())
    if not os.path.lexists(paths.SYSTEM_UNIT):
        raise NotReady("the head needs the system scheduler", "sudo gpusched system install")


def _refuse_own_scheduler(place: ClusterPlace) -> None:
    """A daemon of this machine books the GPUs that the head would book."""
    if place.is_system:
        needs_systemd()
        check_trust(commands_folder())
        if os.path.lexists(paths.SYSTEM_UNIT):
            raise Refused(
                "this machine has its own scheduler, which books the same GPUs", "sudo gpusched system uninstall"
            )
        return
    try:
        with connect(autostart=False) as client:
            pid = client.call("GET", "/v1/status")["daemon"]["pid"]
    except (GpuschedError, OSError):
        return
    if os.path.exists(f"/proc/{pid}"):
        raise Refused("a scheduler of your own runs here, which books the same GPUs", "gpusched daemon stop")


# --- steps -----------------------------------------------------------------------------------------------


def _note(member: RayMember) -> str:
    from gpusched.access import user_name

    user = user_name(os.geteuid())
    return _TOKEN_NOTE.format(user=user, first=member.ports.start, last=member.ports.stop - 1)


def _restart_step(place: ClusterPlace) -> PlanStep:
    if place.is_system:
        return system_command("systemctl", "restart", "gpusched.service", why="jobs keep running")
    return PlanStep("restart", "your scheduler's daemon", "jobs keep running", _restart_daemon)


def _restart_daemon() -> None:
    stop_daemon()
    start_daemon()


def _wait_step(place: ClusterPlace, member: RayMember) -> PlanStep:
    target = f"until Ray on {member.name} answers" if member.is_head else "until the head has reached this machine"
    return PlanStep("wait", target, f"at most {UP_S / 60:g} min", lambda: _wait(place, member))


def _wait(place: ClusterPlace, member: RayMember) -> None:
    began = time.monotonic()
    pid_file = os.path.join(paths.state_dir(), f"agent-{member.name}", "agent.pid")
    is_known = False
    asked_s = 0.0
    while (passed_s := time.monotonic() - began) < UP_S:
        time.sleep(max(_LOOK_S, min(_REST * asked_s, _MOST_REST_S)))
        if not is_known:
            asked_at = time.monotonic()
            try:
                known = ask_head(member.gcs, place.folder).alive(member.name)
            except GpuschedError:
                has_ended = keeper_pid(place.folder) is None and not place.is_system and passed_s > 10
                if has_ended or (passed_s > _TROUBLE_S and last_problem(place.folder) is not None):
                    break
                continue
            finally:
                asked_s = time.monotonic() - asked_at
            is_known = known is not None and known.address == member.address
            asked_s = 0.0 if is_known else asked_s
        if is_known and (member.is_head or _is_served(pid_file)):
            return
    if is_known:
        raise NotReady(
            f"Ray has node {member.name}, and the head's daemon has not reached it yet",
            f"on {member.head}: gpusched cluster doctor; undo it here with: gpusched cluster leave",
        )
    raise NotReady(
        f"Ray does not come up on this machine: {why_not_up(place)}",
        "see: gpusched cluster doctor; undo it with: gpusched cluster leave",
    )


def _is_served(pid_file: str) -> bool:
    """Whether an agent runs, which only a daemon starts."""
    from gpusched.engine.linux import proctree

    try:
        with open(pid_file, encoding="ascii") as file:
            pid, start_ticks = map(int, file.read().split())
    except (OSError, ValueError):
        return False
    return proctree.lives(pid, start_ticks)


def _forget(place: ClusterPlace, member: RayMember, node: str, *, yes: bool, plan: bool, force: bool) -> None:
    if not member.is_head:
        hint = f"on {member.head}: gpusched cluster leave {printable(node)}"
        raise Refused(f"only the head can forget node {printable(node)}", hint)
    known = read_known(place.folder.known)
    if node not in known:
        names = ", ".join(sorted(known)) or "none"
        raise UsageError(f"there is no node {printable(node)}; nodes: {names}", "see: gpusched cluster status")
    if ask_head(member.gcs, place.folder).alive(node) is not None:
        raise Refused(f"node {node} is part of the cluster now", "on that machine: gpusched cluster leave")
    running = _jobs_by_node().get(node, 0)
    if running and not force:
        raise Refused(
            f"{plural(running, 'job')} on {node} may be alive, and its GPUs are booked for them",
            f"bring the node back, or cancel them and give it up: gpusched cluster leave {node} --force",
        )

    def forget() -> None:
        write_known(place.folder.known, {name: at for name, at in known.items() if name != node})

    steps = [PlanStep("forget", f"node {node}", place.folder.known, forget), _restart_step(place)]
    carry_out(steps, f"The cluster forgets {node}:", [], yes=yes, plan=plan)


# --- what can be seen ------------------------------------------------------------------------------------


def _cluster() -> dict[str, Any] | None:
    """What the daemon knows of its nodes; None without a daemon."""
    try:
        with connect(autostart=False) as client:
            return client.call("GET", "/v1/cluster")
    except (DaemonUnreachable, GpuschedError, OSError):
        return None


def _jobs_by_node() -> dict[str, int]:
    from gpusched.model.hostlist import expand

    try:
        with connect(autostart=False) as client:
            jobs = client.call("GET", "/v1/jobs")["jobs"]
    except (GpuschedError, OSError):
        return {}
    found: dict[str, int] = {}
    for job in jobs:
        for name in expand(job["node"]) if job.get("node") else ():
            found[name] = found.get(name, 0) + 1
    return found


def _node_rows(place: ClusterPlace, member: RayMember, answer: HeadAnswer) -> list[list[str]]:
    """Name, role, address, Ray's view, the daemon's view, a note."""
    cluster = _cluster() if member.is_head else None
    seen = {node["name"]: node for node in cluster["nodes"]} if cluster is not None else {}
    alive = {node.name: node for node in answer.nodes if node.is_alive}
    known = read_known(place.folder.known) if member.is_head else {}
    rows = []
    for name in sorted(known.keys() | alive.keys() | {member.name}, key=lambda one: (one != member.name, one)):
        node = alive.get(name)
        is_head = node.is_head if node is not None else (name == member.name and member.is_head)
        shown = seen.get(name, {})
        where = node.address if node is not None else known.get(name, member.address if name == member.name else "-")
        rows.append(
            [
                *(name, "head" if is_head else "node", where, "alive" if node is not None else "gone"),
                *(str(shown.get("state", "-")), str(shown.get("why_not") or "")),
            ]
        )
    return rows


def _examine(place: ClusterPlace) -> Iterator[tuple[str, bool, str, str]]:
    """Check, whether it is fine, a sentence, a remedy. Later checks are left out where an earlier one explains them."""
    try:
        member = _loaded(place)
    except GpuschedError as error:
        yield "cluster", False, error.message, error.hint or ""
        return
    what = "head" if member.is_head else f"node of {member.head}"
    yield "cluster", True, f"{member.name} at {member.address}, {what}; gpusched {__version__}", ""
    for check, text, act in (
        ("ray", "the version that this gpusched works with", check_ray),
        ("token", f"{place.folder.token}, which only this user can read", lambda: check_token(place.folder.token)),
    ):
        try:
            act()
        except GpuschedError as error:
            yield check, False, error.message, error.hint or ""
            return
        yield check, True, text, ""
    pid, unit = keeper_pid(place.folder), place.unit(member)
    again = f"sudo systemctl restart {unit}" if place.is_system else "gpusched cluster run >/dev/null 2>&1 &"
    is_kept = pid is not None
    yield "keeper", is_kept, f"keeps Ray running (pid {pid})" if is_kept else "nothing keeps Ray running here", again
    try:
        answer = ask_head(member.gcs, place.folder)
    except GpuschedError as error:
        yield "head", False, error.message, error.hint or ""
        return
    yield "head", True, f"{member.gcs} answers, and accepts the token", ""
    for check, text, act in (
        ("strangers", "callers without the token are refused", lambda: check_token_is_required(member.gcs)),
        ("versions", f"Ray {answer.ray}, Python {answer.python} on both sides", lambda: check_versions(answer)),
    ):
        try:
            act()
        except GpuschedError as error:
            yield check, False, error.message, error.hint or ""
        else:
            yield check, True, text, ""
    node = answer.alive(member.name)
    if node is None:
        why = last_problem(place.folder)
        yield "member", False, f"Ray does not have {member.name}{': ' + why if why else ''}", again
    elif node.address != member.address:
        yield "member", False, f"another machine, {node.address}, is {member.name}", "join again under another name"
    else:
        yield "member", True, f"Ray has {member.name}", ""
    if member.is_head:
        yield from _examine_head(place, member)


def _examine_head(place: ClusterPlace, member: RayMember) -> Iterator[tuple[str, bool, str, str]]:
    is_kept = os.path.isdir(place.folder.storage)
    text = f"{place.folder.storage}: nodes stay joined when the head restarts" if is_kept else "kept in memory only"
    yield "directory", is_kept, text, "stop and start Ray on this machine"
    is_set = not list(change_engine(place, "ray"))
    yield "engine", is_set, '[cluster] engine is "ray"' if is_set else '[cluster] engine is not "ray"', "cluster init"
    cluster = _cluster()
    if cluster is None:
        yield "daemon", False, "the scheduler's daemon does not answer", paths.start_command()
        return
    for node in cluster["nodes"]:
        if node["name"] != member.name:
            is_up = not node["why_not"]
            hint = f"on {node['name']}: gpusched cluster doctor"
            yield f"node {node['name']}", is_up, "the daemon reaches it" if is_up else str(node["why_not"]), hint
