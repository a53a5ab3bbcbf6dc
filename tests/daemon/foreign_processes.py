"""Processes that are on a simulated GPU without a job: real ones, of the test or of other users."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpusched.engine.linux import proctree

SLEEPS = "import signal, time\ntime.sleep(1000)"
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(1000)"
)
PARENT = (
    "import subprocess, sys\nchild = subprocess.Popen(['sleep', '1000'])\nprint(child.pid, flush=True)\nchild.wait()"
)
IN_SHELL = {SLEEPS: "exec sleep 1000", STUBBORN: "trap '' TERM; echo up; exec sleep 1000"}


class ForeignProcesses:
    """Cards in a file, and who is on them."""

    def __init__(self, folder: Path, cards: int = 2, vram: str = "24GiB") -> None:
        self.path = folder / "gpus.json"
        self.cards: list[dict[str, Any]] = [{"vram": vram, "processes": []} for _ in range(cards)]
        self._started: list[subprocess.Popen[bytes]] = []
        self.write()

    def write(self) -> None:
        """Have the daemon read the cards as they are now."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps({"gpus": self.cards}))
        fresh.chmod(0o644)
        os.replace(fresh, self.path)

    def start(self, code: str = SLEEPS, *, user: str | None = None, **options: Any) -> subprocess.Popen[bytes]:
        """A process of this user; default: of the test's."""
        command = [sys.executable, "-c", code]
        identity: dict[str, Any] = {}
        if user is not None:
            # Others may not be able to execute the interpreter of the tests.
            command = ["/bin/sh", "-c", IN_SHELL[code]]
            identity = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        process = subprocess.Popen(command, cwd="/", **identity, **options)
        self._started.append(process)
        return process

    def put(self, card: int, *pids: int, vram: str | None = "15GiB", user: str = "eva", **facts: Any) -> None:
        """Only these are on the card now."""
        rows = [{"pid": pid, "vram": vram, "user": user, "name": "python"} for pid in pids]
        self.cards[card].update({"processes": rows, **facts})
        self.write()

    def close(self) -> None:
        """End them all, with what they have started."""
        for process in self._started:
            if process.poll() is None:
                proctree.kill_tree(process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextlib.contextmanager
def foreign_processes_in(folder: Path, cards: int = 2) -> Iterator[ForeignProcesses]:
    """Cards and their foreign processes, gone when it is over."""
    made = ForeignProcesses(folder, cards)
    try:
        yield made
    finally:
        made.close()
