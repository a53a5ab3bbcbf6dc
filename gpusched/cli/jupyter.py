"""grun --jupyter: JupyterLab on the job's node, and how to reach it from one's own computer.

The token is in the environment of the job alone, which only its user reads: Jupyter then writes `?token=...` into its
output instead. The address in that output says which port it found free on its node.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets

from gpusched.errors import Refused, UsageError
from gpusched.model.units import format_duration, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TOKEN = "JUPYTER_TOKEN"
LEASE_S = 2 * 3600
_PORTS = range(20_000, 30_000)
"""Below those that Linux gives to outgoing connections."""
_TRIES = 200
_ADDRESS = re.compile(rb"(https?)://[^\s/:]+:(\d{1,5})(/\S*)\?token=\.\.\.")
_SECRET = re.compile(r"--?[\w.]*(token|password)\b", re.IGNORECASE)
_MOST_BYTES = 4096


class Notebook:
    """The server of one job. Raises: Refused, UsageError. Args: words: for `jupyter lab`. path: PATH of the job."""

    def __init__(self, words: list[str], path: str) -> None:
        for word in words:
            if _SECRET.match(word):
                raise UsageError(
                    f"{printable(word.partition('=')[0])} would show the secret in the list of processes",
                    "leave it out: grun makes a token; or set it in the file jupyter_server_config.py",
                )
        for program, what in (("jupyter", "no jupyter"), ("jupyter-lab", "a jupyter, but no JupyterLab")):
            if not any(os.access(os.path.join(folder, program), os.X_OK) for folder in path.split(":") if folder):
                raise Refused(
                    f"there is {what} in the PATH of the job",
                    "activate the environment that has it, or install it there with: pip install jupyterlab",
                )
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        fixed = ("--no-browser", "--ip=127.0.0.1", f"--port={port}", f"--ServerApp.port_retries={_TRIES}")
        self.argv = ["jupyter", "lab", *fixed, *words]
        self.token = secrets.token_hex(24)
        self._seen = b""
        self._node: str | None = None

    def add_to(self, spec: dict[str, Any]) -> None:
        """Put token and lease into the spec of the job."""
        spec["env"][TOKEN] = self.token
        # The site may keep variables of such names from jobs.
        spec["env_named"] = sorted({*spec["env_named"], TOKEN})
        spec.setdefault("lease_s", LEASE_S)

    @staticmethod
    def lease_note(lease_s: int) -> str:
        """How the job ends by itself."""
        if not lease_s:
            return "it runs until Ctrl-C, gcancel or its time limit"
        return f"it ends after {format_duration(lease_s)} without computing; change that with --lease"

    def watch(self, node: str | None) -> Notebook:
        """Note the job's node; None for this one."""
        self._node = node
        return self

    def __call__(self, data: bytes) -> list[str] | None:
        """Look for the address in a piece of the output; returns what to say once it is there."""
        self._seen = (self._seen + data)[-_MOST_BYTES - len(data) :]
        found = _ADDRESS.search(self._seen)
        if found is None:
            self._seen = self._seen[-_MOST_BYTES:]
            return None
        scheme, port, path = (part.decode("ascii", "replace") for part in found.groups())
        user = pwd.getpwuid(os.getuid()).pw_name
        here = os.uname().nodename
        way = f"{user}@{here}" if self._node is None else f"-J {user}@{here} {user}@{self._node}"
        return [
            f"on your own computer: ssh -N -L {port}:127.0.0.1:{port} {way}",
            f"then open: {scheme}://127.0.0.1:{port}{path}?token={self.token}",
        ]
