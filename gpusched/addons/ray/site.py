"""What this machine is in a Ray cluster: its file, the token, and how its raylet is started."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import stat
import sys
from collections.abc import Mapping
from importlib import metadata

from gpusched.addons.ray.relay import AGENT_VARIABLE, STREAM_VARIABLE
from gpusched.errors import NotReady
from gpusched.extras import install_command
from gpusched.model.value import Value, decode, encode
from gpusched.paths import replace_file

RAY_VERSION = "2.60"
"""The only minor version of Ray that this gpusched uses: its on-disk state and its flags change between them."""
DEFAULT_PORT = 7460
WORKER_PORTS = 20
_OBJECT_STORE_BYTES = 80_000_000
_LONGEST_FOLDER = 107 - len("/s/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""A socket's path has at most 107 bytes."""
_TOKEN_BYTES = 32
_LONGEST_TOKEN = 1000


class RayMember(Value):
    """This machine in a Ray cluster."""

    role: str
    """`head` or `node`."""
    name: str
    """Of this node."""
    address: str
    """Where the other machines reach this one: an IP address."""
    head: str
    """IP address of the head."""
    port: int = DEFAULT_PORT
    """Of the head's directory of nodes (GCS)."""
    first_port: int = DEFAULT_PORT
    """First of the ports that Ray listens on here; for the head, `port`."""

    @property
    def is_head(self) -> bool:
        return self.role == "head"

    @property
    def gcs(self) -> str:
        """Address of the directory of nodes."""
        return f"{self.head}:{self.port}"

    @property
    def ports(self) -> range:
        """Ports that Ray listens on here."""
        return range(self.first_port, self.first_port + 10 + WORKER_PORTS)

    @property
    def stream_ports(self) -> range:
        """Those of them that Ray leaves to the relay."""
        return range(self.first_port + 8, self.first_port + 10)


class RayFolder:
    """Files of this machine's part in a cluster, below the state folder, which several machines may share.

    Args: state: the daemon's state folder. host: name of this machine.
    """

    def __init__(self, state: str, host: str | None = None) -> None:
        self.path = os.path.join(state, "ray")
        self._host = host or socket.gethostname().partition(".")[0]

    @property
    def token(self) -> str:
        return os.path.join(self.path, "token")

    @property
    def known(self) -> str:
        """Names and addresses of the nodes that the head has seen."""
        return os.path.join(self.path, "nodes.json")

    @property
    def member_file(self) -> str:
        return os.path.join(self.path, f"{self._host}.json")

    @property
    def log(self) -> str:
        return os.path.join(self.path, f"{self._host}.log")

    @property
    def keeper(self) -> str:
        """Pid and start time of the process that keeps the raylet running."""
        return os.path.join(self.path, f"{self._host}.pid")

    @property
    def problem(self) -> str:
        """A sentence about the last end of the raylet."""
        return os.path.join(self.path, f"{self._host}.problem")

    @property
    def storage(self) -> str:
        """The head's directory of nodes, on disk."""
        return os.path.join(self.path, "gcs")

    @property
    def session_root(self) -> str:
        """The closed folder around that of Ray."""
        known = os.path.join(self.path, self._host)
        if os.geteuid() == 0 and len(os.fsencode(known)) <= _LONGEST_FOLDER and not os.environ.get("GPUSCHED_HOME"):
            return known
        # A home may be on a network, where sockets do not work, and its path may be too long for one.
        digest = hashlib.sha256(os.fsencode(known)).hexdigest()[:8]
        return f"/tmp/gpusched-ray-{os.geteuid()}-{digest}"

    @property
    def session_path(self) -> str:
        """Folder of Ray's sockets and logs, inside a closed one: Ray opens the folder that it is given to everyone."""
        return os.path.join(self.session_root, "s")

    def session(self) -> str:
        """Make `session_path`: on this machine's own disk, closed to others. Raises: NotReady, OSError."""
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        folder = self.session_root
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise NotReady(f"{folder} is not a private folder of this user", f"remove it: rm -r {folder}")
        return self.session_path

    def make(self) -> None:
        """Create the folder, for this user alone. Raises: OSError."""
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        os.chmod(self.path, 0o700)

    def load(self) -> RayMember | None:
        """None outside of a cluster. Raises: NotReady when the file cannot be read as one."""
        try:
            with open(self.member_file, "rb") as file:
                return decode(file.read(), RayMember)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise NotReady(
                f"{self.member_file} does not say what role this machine has in a cluster: {error}",
                "join again: gpusched cluster leave --force, then gpusched cluster join HEAD",
            ) from None

    def save(self, member: RayMember) -> None:
        self.make()
        replace_file(self.member_file, encode(member))

    def make_token(self) -> None:
        """Write a new token, unless there is one."""
        self.make()
        if not os.path.exists(self.token):
            replace_file(self.token, secrets.token_hex(_TOKEN_BYTES).encode())


def read_known(path: str) -> dict[str, str]:
    """Addresses of the nodes that Ray has ever had, by name; empty where nothing can be read."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return {str(name): str(address) for name, address in found.items()} if isinstance(found, dict) else {}


def write_known(path: str, known: dict[str, str]) -> None:
    """Raises: OSError."""
    replace_file(path, json.dumps(known, indent=1, sort_keys=True).encode())


def valid_token(text: str) -> str | None:
    """The token in a text; None if it is none: one word of printable ASCII."""
    words = text.split()
    if len(words) != 1 or not words[0].isascii() or not words[0].isprintable() or len(words[0]) > _LONGEST_TOKEN:
        return None
    return words[0]


def check_token(path: str) -> None:
    """Raises: NotReady unless the file is a token that only this user can read."""
    renew = "gpusched cluster init on the head, gpusched cluster join HEAD on a node"
    try:
        found = os.stat(path)
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read(_LONGEST_TOKEN + 2)
    except OSError as error:
        raise NotReady(
            f"there is no token to authenticate with: {path}: {error.strerror}", f"make one: {renew}"
        ) from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise NotReady(
            f"the token {path} can be read by others (uid {found.st_uid}, mode {mode:o}); who has it can run anything "
            "on every node",
            f"remove it and make a new one: {renew}",
        )
    if valid_token(text) is None:
        raise NotReady(f"{path} holds no token", f"remove it and make a new one: {renew}")


def check_ray() -> None:
    """Raises: NotReady unless this Python has the Ray that gpusched was tried with."""
    install = f"install it: {install_command('ray')}"
    try:
        found = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise NotReady("Ray is not installed, which the nodes of this cluster are reached by", install) from None
    if not found.startswith(f"{RAY_VERSION}."):
        raise NotReady(f"Ray {found} is installed, and this gpusched works with Ray {RAY_VERSION}", install)


def without_ray(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which nothing configures Ray."""
    own = (AGENT_VARIABLE, STREAM_VARIABLE)
    return {key: value for key, value in environ.items() if not key.startswith("RAY_") and key not in own}


def ray_environment(folder: RayFolder, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of everything of Ray on this machine. The token itself is in none."""
    return without_ray(environ) | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": folder.token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "4",
        "RAY_health_check_initial_delay_ms": "2000",
        # Runs inherit from the agent, and the agent from a worker.
        "RAY_worker_niceness": "0",
        "RAY_worker_oom_score_adjustment": "0",
        # Direct children of a worker, nothing further down: runs belong to the first process.
        "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "0",
    }


def raylet_environment(
    folder: RayFolder, member: RayMember, agent: list[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Environment of this machine's raylet. Args: agent: command of the node's agent."""
    streams = [member.address, *member.stream_ports]
    made = ray_environment(folder, environ) | {
        AGENT_VARIABLE: json.dumps(agent),
        STREAM_VARIABLE: json.dumps(streams),
    }
    if member.is_head:
        made |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": folder.storage}
    return made


def raylet_command(folder: RayFolder, member: RayMember) -> list[str]:
    """The command that starts this machine's part of Ray, and lasts as long as that. Raises: NotReady, OSError."""
    port = member.first_port
    role = [f"--address={member.gcs}"]
    if member.is_head:
        role = ["--head", f"--port={port}", "--include-dashboard=false", f"--dashboard-port={port + 7}"]
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
        f"--temp-dir={folder.session()}",
        f"--node-ip-address={member.address}",
        f"--node-name={member.name}",
        *("--num-cpus=0", "--num-gpus=0", f"--object-store-memory={_OBJECT_STORE_BYTES}"),
        *("--include-log-monitor=false", "--disable-usage-stats", "--log-style=record", "--log-color=false"),
        f"--object-manager-port={port + 1}",
        f"--node-manager-port={port + 2}",
        f"--runtime-env-agent-port={port + 3}",
        f"--dashboard-agent-listen-port={port + 4}",
        f"--dashboard-agent-grpc-port={port + 5}",
        f"--metrics-export-port={port + 6}",
        f"--min-worker-port={port + 10}",
        f"--max-worker-port={port + 9 + WORKER_PORTS}",
    ]
