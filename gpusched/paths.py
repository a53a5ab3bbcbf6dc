"""Where a scheduler keeps what: one root with GPUSCHED_HOME, else the XDG folders.

Strings in, strings out: commands at the prompt import this. Nothing is created here.
"""

from __future__ import annotations

import os

SYSTEM_SOCKET = "/run/gpusched/api.sock"


def home() -> str | None:
    """GPUSCHED_HOME as an absolute path, or None."""
    root = os.environ.get("GPUSCHED_HOME")
    return os.path.abspath(os.path.expanduser(root)) if root else None


def _xdg(variable: str, *default: str) -> str:
    base = os.environ.get(variable, "")
    # The XDG specification has relative paths ignored.
    if not base.startswith("/"):
        base = os.path.join(os.path.expanduser("~"), *default)
    return os.path.join(base, "gpusched")


def state_dir() -> str:
    """Root of the database, the spool and the log."""
    return home() or _xdg("XDG_STATE_HOME", ".local", "state")


def runtime_dir() -> str:
    """Folder of the socket and the locks."""
    if home() is None and os.environ.get("XDG_RUNTIME_DIR", "").startswith("/"):
        return os.path.join(os.environ["XDG_RUNTIME_DIR"], "gpusched")
    return os.path.join(state_dir(), "run")


def database() -> str:
    """The job table."""
    return os.path.join(state_dir(), "gpusched.db")


def spool_dir() -> str:
    """Claims and results of runs."""
    return os.path.join(state_dir(), "spool")


def checkpoint_dir() -> str:
    """Folders in which jobs keep what they need to go on."""
    return os.path.join(state_dir(), "checkpoints")


def log_file() -> str:
    """The daemon's log."""
    return os.path.join(state_dir(), "log", "gpuschedd.log")


def daemon_output() -> str:
    """What a daemon that a client started prints before its log is open."""
    return os.path.join(state_dir(), "log", "gpuschedd.out")


def socket_path() -> str:
    """The personal daemon's socket."""
    return os.path.join(runtime_dir(), "api.sock")


def lock_file() -> str:
    """Held by the one daemon of this home."""
    # Beside the database, which is what it protects: a runtime folder may differ from login to login.
    return os.path.join(state_dir(), "daemon.lock")


def start_lock() -> str:
    """Held by the client that starts the daemon."""
    return os.path.join(state_dir(), "start.lock")


def notify_file() -> str:
    """The user's own TOML file with whom to tell; it need not exist."""
    root = home()
    return os.path.join(root if root else _xdg("XDG_CONFIG_HOME", ".config"), "notify.toml")


def config_file() -> str:
    """The TOML file with the settings; it need not exist."""
    chosen = os.environ.get("GPUSCHED_CONFIG")
    if chosen:
        return os.path.abspath(os.path.expanduser(chosen))
    root = home()
    return os.path.join(root if root else _xdg("XDG_CONFIG_HOME", ".config"), "config.toml")
