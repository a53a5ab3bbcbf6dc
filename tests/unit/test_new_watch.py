"""A watch is one file and its line in the tuple of `daemon/core`: the test adds one to a copy of the package.

It acts, wakes the daemon and tells once; when it raises, it is dropped alone, and people are told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support import copy_package

ROOT = Path(__file__).resolve().parents[2]
WATCH = '''
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.state import DaemonState
from gpusched.daemon.watches import NodeReading, Told, Watch
from gpusched.model.job import JobEvent
from gpusched.model.settings import Settings


class LongWaits(Watch):
    """Notes in the story of a job that it has waited for an hour."""

    name = "long waits"

    def __init__(self) -> None:
        self.told: Told[int] = Told()
        self.readings = self.reloads = 0
        self.is_broken = False

    def observe(self, found: NodeReading) -> None:
        self.readings += 1

    def reload(self, state: DaemonState, settings: Settings) -> None:
        self.reloads += 1

    def next_due(self, state: DaemonState, settings: Settings) -> float | None:
        return min((job.submit_at + 3600 for job in state.jobs.values() if job.id not in self.told), default=None)

    def carry_out(self, tx: TickTransaction) -> None:
        for job in list(tx.state.jobs.values()):
            if job.submit_at + 3600 <= tx.now and self.told.note(job.id, tx):
                tx.put_job(job, JobEvent(job.id, tx.now, "note", "has waited for an hour"))
                if self.is_broken:
                    raise KeyError("a bug")
'''
LINES = {
    "from gpusched.daemon.watch.mps import MpsRuns\n": "from gpusched.daemon.watch.long_waits import LongWaits\n",
    "                CheapStarts(),\n": "                LongWaits(),\n",
}
PROBE = """
import json
from lab import Lab
from gpusched.daemon.checks import daemon_checks
from gpusched.testing import request

lab = Lab()
scheduler = lab.scheduler
scheduler.guard._monotonic = lab.clock.now
(watch,) = [one for one in scheduler.watches.all if one.name == "long waits"]
steps = lambda: next(one.text for one in daemon_checks(lab.ticker) if one.check == "daemon steps")
notes = lambda: [one.text for one in lab.store.events(1) if one.kind == "note"]
job = lab.job(lab.submit(request=request(1), begin_at=lab.clock.now() + 1e6))
found = {"due": lab.ticker.next_due() == job.submit_at + 3600}
watch.is_broken = True
lab.tick(3600)
started = lab.job(lab.submit(request=request(1)))
lab.tick(1)
found |= {"broken": [notes(), sorted(watch.told), steps()], "starts": lab.job(started.id).run}
watch.is_broken = False
lab.tick(10)
lab.tick(10)
found |= {"notes": notes(), "readings": watch.readings > 0, "reloads": watch.reloads, "steps": steps()}
print(json.dumps(found))
"""


def test_a_new_watch_is_a_file_and_a_line(tmp_path: Path) -> None:
    copy_package(tmp_path)
    (tmp_path / "gpusched/daemon/watch/long_waits.py").write_text(f"from __future__ import annotations\n{WATCH}")
    core = tmp_path / "gpusched/daemon/core.py"
    text = core.read_text()
    for before, line in LINES.items():
        assert text.count(before) == 1
        text = text.replace(before, before + line)
    core.write_text(text)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    notes, told, steps = found.pop("broken")
    assert (notes, told) == ([], [])
    assert steps.startswith("watch on long waits failed 1 time")
    assert "KeyError" in steps
    assert found == {
        "due": True,
        "starts": 1,
        "notes": ["has waited for an hour"],
        "readings": True,
        "reloads": 2,
        "steps": "all working; 1 failed earlier and recovered",
    }
