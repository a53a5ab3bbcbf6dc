"""Limits of /etc/security/limits.conf for a job, through PAM: a session is opened in the process to be limited.

The service's file should contain only pam_limits. pam_systemd would move the job out of its run's cgroup, and thus
out of its limits.

Source: pam_start(3), pam_open_session(3), pam_limits(8).
"""

from __future__ import annotations

import ctypes
import os

from gpusched.engine.linux.as_user import LaunchError

SERVICE = "gpusched"
FILE = "/etc/pam.d/gpusched"
LIBRARY = "libpam.so.0"
PAM_SUCCESS = 0
PAM_CONV_ERR = 19
PAM_DATA_SILENT = 0x40000000


def is_wanted() -> bool:
    """Whether the administrator has created the service's file. Without it, PAM would use that for unknown services."""
    return os.path.exists(FILE)


def open_session(user: str, folder: str | None = None) -> None:
    """Open a session for this process, as root. It lasts until the job ends, and is never closed. Raises: LaunchError.

    Args: folder: of the service's file, instead of /etc/pam.d.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise LaunchError(f"cannot set the limits of user {user}: {error}, and there is {FILE}") from None
    talk_type = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    # No user can answer a prompt.
    talk = talk_type(lambda *_: PAM_CONV_ERR)
    conversation = (ctypes.c_void_p * 2)(ctypes.cast(talk, ctypes.c_void_p), None)
    handle = ctypes.c_void_p()
    library.pam_strerror.restype = ctypes.c_char_p
    who = (SERVICE.encode(), os.fsencode(user), ctypes.byref(conversation))
    if folder is None:
        code = library.pam_start(*who, ctypes.byref(handle))
    else:
        code = library.pam_start_confdir(*who, os.fsencode(folder), ctypes.byref(handle))
    if code == PAM_SUCCESS:
        code = library.pam_open_session(handle, 0)
    words = library.pam_strerror(handle, code) or b"?"
    if handle:
        # Frees what the library holds, and leaves the session open.
        library.pam_end(handle, PAM_DATA_SILENT | code)
    if code != PAM_SUCCESS:
        text = words.decode("utf-8", "replace")
        raise LaunchError(f"cannot set the limits of user {user}: {text} (see {FILE} and /etc/security/limits.conf)")
