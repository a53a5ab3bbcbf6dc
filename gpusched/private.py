"""Folders for their owner alone. Commands at the prompt import this."""

from __future__ import annotations

import errno
import os
import stat

from gpusched.errors import NotReady

_OURS = frozenset(
    {
        *("config.toml", "notify.toml", "preset.json", "start.lock", "daemon.lock", "gpusched.db", "api.sock"),
        "limit-hint",
    }
)
_FOLDERS = frozenset({"log", "run", "spool", "checkpoints", "snapshots", "calls"})


def make_private(folder: str) -> None:
    """Make a folder with mode 0700 whatever the umask, those that lead to it too, or tighten the one that is there.

    One that may be in use for something else is left as it is. Raises: OSError; NotReady when others could reach it.
    """
    if not os.path.isdir(folder):
        above = os.path.dirname(folder)
        if not os.path.isdir(above):
            make_private(above)
        try:
            os.mkdir(folder, 0o700)
            os.chmod(folder, 0o700)
        except FileExistsError:
            # Another command was as fast; or a file, which the next line tells of.
            pass
    found = os.stat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if found.st_uid != os.geteuid():
        raise NotReady(
            f"the scheduler's folder {folder} belongs to uid {found.st_uid}, who could read all that is in it",
            "set GPUSCHED_HOME to a folder of your own",
        )
    mode = stat.S_IMODE(found.st_mode)
    if not mode & 0o077:
        return
    names = set(os.listdir(folder))
    if "gpusched.db" not in names and not names <= _OURS | _FOLDERS:
        raise NotReady(
            f"others can look into the scheduler's folder {folder} (mode {mode:o}), and it holds other things, too",
            f"chmod 700 {folder}, or set GPUSCHED_HOME to a folder of its own",
        )
    os.chmod(folder, 0o700)
