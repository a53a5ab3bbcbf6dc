"""What the daemon says about jobs that are followed, as soon as there is something new."""

from __future__ import annotations

import os
import threading
from collections import deque

from gpusched.cli.gwait import call_patiently
from gpusched.cli.query import quote
from gpusched.errors import GpuschedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.client import Client

ASK_S = 0.05
ASK_S_PER_JOB = 0.0005
"""Between two questions to the daemon, which answers when something has changed."""


class News:
    """Asks the daemon in a thread of its own, so that output is printed meanwhile, also while no daemon is there."""

    def __init__(self, client: Client, ids: list[str]) -> None:
        self._client = client
        self._ids = ",".join(ids)
        self._answers: deque[dict[str, Any] | Exception] = deque()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._rest = threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    def fileno(self) -> int:
        """Readable when there is an answer."""
        return self._reader

    def take(self) -> list[dict[str, Any]]:
        """What was answered since. Raises: what kept the daemon from answering."""
        try:
            os.read(self._reader, 4096)
        except BlockingIOError:
            return []
        found = []
        while self._answers:
            answer = self._answers.popleft()
            if isinstance(answer, Exception):
                raise answer
            found.append(answer)
        return found

    def _ask(self) -> None:
        version = ""
        while True:
            path = f"/v1/logs?ids={quote(self._ids)}&since={version}&timeout_s=60"
            try:
                answer = call_patiently(self._client, path)
            except (GpuschedError, OSError) as error:
                self._tell(error)
                return
            self._tell(answer)
            if answer["done"]:
                return
            version = answer["version"]
            if answer["more"]:
                continue
            self._rest.wait(ASK_S + ASK_S_PER_JOB * len(answer["jobs"]))

    def _tell(self, answer: dict[str, Any] | Exception) -> None:
        self._answers.append(answer)
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            pass  # full of news already
