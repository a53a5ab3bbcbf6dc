"""The account a job runs as, as it is when the job starts, and what the job's environment has from it."""

from __future__ import annotations

import os
import pwd

from gpusched.engine.users import LaunchError

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
LINGER = "/var/lib/systemd/linger"
"""Has a file for each user whose runtime folder is there without a login. Source: logind.conf(5), loginctl(1)."""


def account_of(uid: int, user: str) -> pwd.struct_passwd:
    """The account of the user who submitted the job. Raises: LaunchError when it is gone or somebody else's by now."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        raise LaunchError(f"cannot start as user {user}: this machine has no account with uid {uid} any more") from None
    if account.pw_name != user:
        # A number that was given to somebody else after its owner had left.
        raise LaunchError(f"cannot start as user {user}: uid {uid} is the account {account.pw_name} now")
    return account


def complete(env: dict[str, str], uid: int, foreign: bool, account: pwd.struct_passwd | None = None) -> None:
    """Add what every account has and this environment lacks, and take out what points to where nothing will be.

    Args: account: that of `uid` where it is known already.
    The submitter's runtime folder goes with their last login, in the middle of the job, unless the account lingers.
    """
    env.setdefault("PATH", DEFAULT_PATH)
    if not env.keys() >= {"HOME", "USER", "LOGNAME", "SHELL"}:
        try:
            account = account or pwd.getpwuid(uid)
        except KeyError:
            account = None
        if account is not None:
            env.setdefault("HOME", account.pw_dir or "/")
            env.setdefault("USER", account.pw_name)
            env.setdefault("LOGNAME", account.pw_name)
            env.setdefault("SHELL", account.pw_shell or "/bin/sh")
    folder = env.get("XDG_RUNTIME_DIR")
    if folder and not _will_be_there(folder, uid, foreign):
        del env["XDG_RUNTIME_DIR"]
        if f"={folder}/" in env.get("DBUS_SESSION_BUS_ADDRESS", ""):
            del env["DBUS_SESSION_BUS_ADDRESS"]


def _will_be_there(folder: str, uid: int, foreign: bool) -> bool:
    try:
        if os.stat(folder).st_uid != uid:
            return False
    except (OSError, ValueError):
        return False
    if not foreign or folder != f"/run/user/{uid}":
        return True
    try:
        return os.path.exists(f"{LINGER}/{pwd.getpwuid(uid).pw_name}")
    except KeyError:
        return False
