"""Clients of pending foreground jobs: end a job whose client is gone, unless it is to be kept.

The client is the process that submitted the job; the table has its identity. It therefore does not matter how
it ended (KILL, a closed terminal, a restart of the machine), or whether a daemon was running then. A stopped
process (Ctrl-Z) has not ended. Once the job has started, its supervisor notices the end of its client.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.daemon.state import DaemonState
from gpusched.daemon.tick import Ticker
from gpusched.daemon.verbs.cancel import awaited
from gpusched.engine.linux import proctree
from gpusched.model.commands import LoseClients
from gpusched.model.job import ClientProcess, Job


class ClientWatch:
    """Checks at each poll whether clients are alive. Other jobs cost nothing."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker, self._scheduler = ticker, ticker.scheduler
        self._state: DaemonState | None = None
        self._clients: dict[int, ClientProcess] = {}

    def changed(self, jobs: Mapping[int, Job]) -> None:
        """Called after each commit with the jobs whose rows changed."""
        for job in jobs.values():
            client = awaited(job)
            if client is not None:
                self._clients[job.id] = client
            else:
                self._clients.pop(job.id, None)

    def poll(self) -> None:
        """Have the next tick end the jobs whose clients are gone."""
        state = self._scheduler.state
        if self._state is not state:
            # The first look, or the table was reloaded.
            self._state = state
            self._clients.clear()
            self.changed(state.jobs)
        boot_id = self._scheduler.head.host.boot_id
        gone = [
            job_id
            for job_id, client in self._clients.items()
            if client.boot_id != boot_id or not proctree.lives(client.pid, client.start_ticks)
        ]
        if gone:
            self._ticker.submit(LoseClients(tuple(gone)))
