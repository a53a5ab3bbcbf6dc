"""The daemon as srun asks it: with patience, since it may be restarted while a step runs."""

from __future__ import annotations

import sys
import time

from gpusched.client import DaemonConnection, chosen_socket
from gpusched.errors import DaemonUnreachable, NotReady

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NOTE_AFTER_S = 15.0
"""A daemon that has been away for this long is waited for with a note."""
_RETRY_S = 0.2


class PatientClient:
    """The daemon, asked with patience: it may be restarted while a step runs."""

    def __init__(self) -> None:
        self._client = DaemonConnection(chosen_socket()[0])

    def ask(self, method: str, path: str, body: object, patience_s: float) -> dict[str, Any]:
        """One request, repeated while nothing answers: every one of a step may be. Raises: UserError, NotReady."""
        began = time.monotonic()
        until, is_told = began + patience_s, False
        while True:
            try:
                return self._client.call(method, path, body)
            except (DaemonUnreachable, OSError) as error:
                self._client.close()
                if time.monotonic() > until:
                    raise (
                        error
                        if isinstance(error, DaemonUnreachable)
                        else NotReady("the daemon closed the connection", "see: gpusched daemon status")
                    ) from None
            except NotReady:
                # A full disk, for example.
                if time.monotonic() > until:
                    raise
            if not is_told and time.monotonic() > began + NOTE_AFTER_S:
                is_told = True
                sys.stderr.write("srun: the scheduler is not responding; waiting for it\n")
            time.sleep(_RETRY_S)
