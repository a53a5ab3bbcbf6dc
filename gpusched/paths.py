"""Locations of files: below GPUSCHED_HOME if set, else XDG folders; fixed ones for the system daemon.

Strings in, strings out: command-line clients import this. Creates nothing but private folders. `read_at_most` is how
files that others wrote are read, `replace_file` how files are written that must be whole.
"""

from __future__ import annotations

import errno
import os
import stat

from gpusched.errors import NotReady, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

SYSTEM_CONFIG = "/etc/gpusched"
SYSTEM_STATE = "/var/lib/gpusched"
SYSTEM_SOCKET = "/run/gpusched/api.sock"
NODE_MARK = f"{SYSTEM_STATE}/node"
"""Written by the agent of a cluster for all users: this machine is a node of it, and gets its jobs from there."""
SYSTEM_UNIT = "/etc/systemd/system/gpusched.service"

MAX_REQUEST = 96 << 20
"""Bytes of the largest request that the daemon takes, and so of the largest script or batch: JSON escapes can inflate a
script at its limit sixfold."""
MAX_TEXT = 16 << 20
"""Bytes of the largest settings, tables and lists that people write."""
_PIECE = 1 << 16

_root: str | None = None
"""Path prefix of a system daemon, empty for the machine's own root; None in every other process."""


def serve_system(root: str = "") -> None:
    """Switch this process to the paths of the system daemon, below `root` for a trial."""
    global _root
    _root = os.path.abspath(root) if root.strip("/") else ""


def is_system() -> bool:
    """Whether this process is the system daemon."""
    return _root is not None


def system_root() -> str:
    """Path prefix of a system daemon on trial; empty for the machine's own."""
    return _root or ""


def finds_system() -> bool:
    """Whether commands use the system daemon: it runs or is installed, and no variable overrides it.

    Where it is installed, its restart must not lead to a personal daemon.
    """
    if os.environ.get("GPUSCHED_SOCKET") or home() is not None:
        return False
    return os.path.exists(SYSTEM_SOCKET) or os.path.lexists(SYSTEM_UNIT)


def is_coming_back() -> bool:
    """Whether the system daemon is restarting: systemd keeps its runtime folder over a restart, not over a stop."""
    return os.path.isdir(os.path.dirname(SYSTEM_SOCKET))


def start_command() -> str:
    """Command that starts the daemon of the user's commands."""
    return "sudo systemctl start gpusched" if finds_system() else "gpusched daemon start"


def stop_command() -> str:
    """Command that stops it."""
    return "sudo systemctl stop gpusched" if finds_system() else "gpusched daemon stop"


def restart_command() -> str:
    """Command that restarts it."""
    return "sudo systemctl restart gpusched" if finds_system() else f"{stop_command()}, {start_command()}"


def home() -> str | None:
    """GPUSCHED_HOME as an absolute path, or None."""
    root = os.environ.get("GPUSCHED_HOME")
    return os.path.abspath(os.path.expanduser(root)) if root else None


def _xdg(variable: str, *default: str) -> str:
    base = os.environ.get(variable, "")
    # The XDG specification says to ignore relative paths.
    if not base.startswith("/"):
        base = os.path.join(os.path.expanduser("~"), *default)
    return os.path.join(base, "gpusched")


def state_dir() -> str:
    """Root of the database, the spool and the log."""
    if _root is not None:
        return _root + SYSTEM_STATE
    return home() or _xdg("XDG_STATE_HOME", ".local", "state")


def runtime_dir() -> str:
    """Folder of the socket and the locks."""
    if _root is not None:
        return os.path.dirname(_root + SYSTEM_SOCKET)
    if home() is None and os.environ.get("XDG_RUNTIME_DIR", "").startswith("/"):
        return os.path.join(os.environ["XDG_RUNTIME_DIR"], "gpusched")
    return os.path.join(state_dir(), "run")


def database() -> str:
    """The job table."""
    return os.path.join(state_dir(), "gpusched.db")


def id_record() -> str:
    """The next ids, for when the job table is lost."""
    return os.path.join(state_dir(), "next-ids")


def series_file() -> str:
    """Time series of cards, queues and runs."""
    return os.path.join(state_dir(), "series.db")


def preset_file() -> str:
    """Choice of `[priority] preset = "auto"`, for the daemon of the user's commands."""
    folder = SYSTEM_STATE if _root is None and finds_system() else state_dir()
    return os.path.join(folder, "preset.json")


def session_file() -> str:
    """Number of the daemon's last start as the head of a cluster."""
    return os.path.join(state_dir(), "session")


def known_nodes_file() -> str:
    """What the other nodes of the cluster were like when they last reported."""
    return os.path.join(state_dir(), "nodes.json")


def handover_dir() -> str:
    """Answers of Slurm's sbatch about jobs that are handed over."""
    return os.path.join(state_dir(), "handed-over")


def spool_dir() -> str:
    """Claims and results of runs."""
    return os.path.join(state_dir(), "spool")


def checkpoint_dir() -> str:
    """Folders with jobs' checkpoints."""
    return os.path.join(state_dir(), "checkpoints")


def log_file() -> str:
    """The daemon's log."""
    return os.path.join(state_dir(), "log", "gpuschedd.log")


def settings_log() -> str:
    """Who changed which setting, and when."""
    return os.path.join(state_dir(), "settings.jsonl")


def slurm_commands() -> str:
    """Folder of the Slurm commands that jobs have at the end of their PATH."""
    return os.path.join(state_dir(), "slurm", "bin")


def limit_hint() -> str:
    """An empty file of the user; until its modification time, `gsub` gives no hint about limits."""
    return os.path.join(state_dir(), "limit-hint")


def daemon_output() -> str:
    """Output of a daemon started by a client, until its log is open."""
    return os.path.join(state_dir(), "log", "gpuschedd.out")


def socket_path() -> str:
    """Socket of this daemon; in a client, of the personal daemon."""
    return os.path.join(runtime_dir(), "api.sock")


def agent_dir(node: str) -> str:
    """Folder of the agent of a node."""
    return os.path.join(state_dir(), f"agent-{node}")


def agent_socket(node: str) -> str:
    """Socket by which programs of jobs on a node reach the daemon on another machine."""
    return os.path.join(agent_dir(node), "api.sock")


def node_mark() -> str:
    """File by which the agent of a node says that this machine is one. A home may be that of several machines."""
    return os.path.join(state_dir(), "node" if is_system() else f"node-{os.uname().nodename}")


def is_of_agent(socket: str) -> bool:
    """Whether a socket is that of an agent, which is started again whenever its connection was lost."""
    return os.path.basename(socket) == "api.sock" and os.path.basename(os.path.dirname(socket)).startswith("agent-")


def lock_file() -> str:
    """Lock of the only daemon of this home."""
    # Beside the database that it protects, as the runtime folder may differ between logins.
    return os.path.join(state_dir(), "daemon.lock")


def start_lock() -> str:
    """Lock of a client that starts the daemon."""
    return os.path.join(state_dir(), "start.lock")


def notify_file() -> str:
    """The user's own TOML file with alert targets; optional."""
    return os.path.join(_config_dir(), "notify.toml")


def site_templates() -> str:
    """Folder of the site's templates for `gsub`."""
    return os.path.join(f"{system_root()}{SYSTEM_CONFIG}", "templates")


def own_templates() -> str:
    """Folder of the user's own templates for `gsub`."""
    return os.path.join(_config_dir(), "templates")


def views_file() -> str:
    """The user's saved views of `gq`."""
    return os.path.join(_config_dir(), "gq-views")


def config_file() -> str:
    """The TOML file with the settings; optional."""
    chosen = os.environ.get("GPUSCHED_CONFIG")
    if chosen:
        return os.path.abspath(os.path.expanduser(chosen))
    if _root is None and finds_system():
        return os.path.join(SYSTEM_CONFIG, "config.toml")
    return os.path.join(_config_dir(), "config.toml")


def _config_dir() -> str:
    if _root is not None:
        return _root + SYSTEM_CONFIG
    return home() or _xdg("XDG_CONFIG_HOME", ".config")


_OURS = frozenset(
    {
        *("config.toml", "notify.toml", "preset.json", "start.lock", "daemon.lock", "gpusched.db", "api.sock"),
        *("limit-hint", "gq-views", "next-ids", "series.db"),
    }
)
_FOLDERS = frozenset({"log", "run", "spool", "checkpoints", "snapshots", "calls", "slurm", "templates"})


def make_private(folder: str) -> None:
    """Create a folder and its parents with mode 0700 regardless of the umask, or tighten an existing folder.

    Leaves a folder unchanged that may serve another purpose. Raises: OSError; NotReady if other users could reach it.
    """
    if not os.path.isdir(folder):
        above = os.path.dirname(folder)
        if not os.path.isdir(above):
            make_private(above)
        try:
            os.mkdir(folder, 0o700)
            os.chmod(folder, 0o700)
        except FileExistsError:
            # Another command was faster; or it is a file, which the next line reports.
            pass
    found = os.stat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if found.st_uid != os.geteuid():
        raise NotReady(
            f"the scheduler's folder {folder} belongs to uid {found.st_uid}, who could read everything in it",
            "set GPUSCHED_HOME to one of your folders",
        )
    mode = stat.S_IMODE(found.st_mode)
    if not mode & 0o077:
        return
    names = set(os.listdir(folder))
    if "gpusched.db" not in names and not names <= _OURS | _FOLDERS:
        raise NotReady(
            f"other users can look into the scheduler's folder {folder} (mode {mode:o}), and it holds other files too",
            f"chmod 700 {folder}, or set GPUSCHED_HOME to a separate folder",
        )
    os.chmod(folder, 0o700)


def read_at_most(file: BinaryIO, most: int, shown: str, hint: str) -> bytes:
    """All bytes of an open file, which may never end, as /dev/zero or a pipe.

    Args: most: bytes; shown: the file's name, for the error. Raises: Refused if there are more; OSError.
    """
    pieces: list[bytes] = []
    left = most + 1
    while left and (piece := file.read(min(left, _PIECE))):
        pieces.append(piece)
        left -= len(piece)
    if not left:
        size = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
        raise Refused(f"{shown} is larger than {size}, the most that is read", hint)
    return b"".join(pieces)


def replace_file(path: str, data: bytes, mode: int = 0o600) -> None:
    """Replace a file durably, once all of it was written. Raises: OSError."""
    draft = f"{path}.new"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        os.fchmod(fd, mode)
        file.write(data)
        file.flush()
        os.fsync(fd)
    os.replace(draft, path)
