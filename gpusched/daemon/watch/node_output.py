"""Output on a node that could not be written where it was wanted: counts it, and removes what is old or too much.

The supervisor makes a folder of the user's for each such run, see `engine.supervisor.launch`. The head reads it through
the agent, which knows nothing of jobs: it keeps what changed lately, and everything of runs that are in its spool.
"""

from __future__ import annotations

import os
import re
import threading
from logging import getLogger
from typing import NamedTuple

from gpusched.clock import SystemClock
from gpusched.daemon.watch.checkpoints import remove
from gpusched.engine import spool as files
from gpusched.model.settings import LimitSettings

log = getLogger("gpusched.agent")
SWEEP_S = 3600.0
_DAY_S = 86400.0
_MIB = 1 << 20
_RUN = re.compile(r"\d{1,18}\.\d{1,9}")


class KeptOutput(NamedTuple):
    """The folder of one run."""

    run: str
    uid: int
    changed_at: float
    size: int
    """In bytes."""


class NodeOutputKeeper:
    """Sweeps the folders when an agent starts, and every hour. Args: folder: their parent; spool: of the runs here."""

    def __init__(self, folder: str, spool: str, settings: LimitSettings) -> None:
        self._folder, self._spool, self._settings = folder, spool, settings
        # What a jump of the clock makes old is not removed.
        self._clock = SystemClock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="outputs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; what was not removed is left to the next agent."""
        self._closing.set()

    def _work(self) -> None:
        while True:
            try:
                sweep(self._folder, self._spool, self._settings, self._clock.now())
            except OSError as error:
                log.warning("output in %s cannot be managed: %s", self._folder, error)
            if self._closing.wait(SWEEP_S):
                return


def kept_in(folder: str) -> list[KeptOutput]:
    """What is kept there, the oldest first. Raises: OSError."""
    found = []
    try:
        names = [name for name in os.listdir(folder) if _RUN.fullmatch(name)]
    except FileNotFoundError:
        return []
    for name in names:
        uid, changed_at, size = os.lstat(f"{folder}/{name}").st_uid, 0.0, 0
        for root, folders, entries in os.walk(f"{folder}/{name}"):
            for entry in (*folders, *entries):
                try:
                    status = os.lstat(f"{root}/{entry}")
                except FileNotFoundError:
                    continue
                changed_at, size = max(changed_at, status.st_mtime), size + status.st_blocks * 512
        found.append(KeptOutput(name, uid, changed_at, size))
    return sorted(found, key=lambda one: (one.changed_at, one.run))


def due(kept: list[KeptOutput], spooled: set[str], settings: LimitSettings, now: float) -> list[KeptOutput]:
    """What is to be removed: the old, and beyond the total the oldest. Args: spooled: runs to leave alone."""
    found = []
    too_much = sum(one.size for one in kept) - settings.node_output_total_mib * _MIB
    for one in kept:
        is_old = now - one.changed_at > settings.node_output_keep_days * _DAY_S
        if one.run not in spooled and (is_old or too_much > 0):
            found.append(one)
            too_much -= one.size
    return found


def sweep(folder: str, spool: str, settings: LimitSettings, now: float) -> None:
    """Remove what is due, each with the rights of its user. Args: spool: of the runs here. Raises: OSError."""
    kept = kept_in(folder)
    if not kept:
        # A new node has no spool yet either.
        return
    for one in due(kept, files.runs_in(spool), settings, now):
        remove(f"{folder}/{one.run}", one.uid)
        log.warning("removed the output of run %s that was kept here (%d MiB)", one.run, one.size // _MIB)
