"""gpusched snapshots: what copies of code there are, and dropping those that nobody needs."""

from __future__ import annotations

import os
import sys
import time

from gpusched.cli import output, tables
from gpusched.client import connect
from gpusched.model.units import format_duration, printable
from gpusched.snapshots.retention import kept
from gpusched.snapshots.snapshot import folder_of, show_size, sweep

_SHOWN_IDS = 5


def show(is_sweeping: bool, as_json: bool) -> None:
    """Print the list, the one used longest ago first; before that, drop what no unfinished job needs."""
    with connect() as client:
        home = folder_of(client.socket_path)

        def users() -> dict[str, list[str]]:
            found: dict[str, list[str]] = {}
            for job_id, name in client.call("GET", "/v1/jobs?fields=id,snapshot")["rows"]:
                if name:
                    found.setdefault(name, []).append(job_id)
            return found

        dropped = sweep(home, lambda: set(users())) if is_sweeping else []
        needed, here = users(), kept(home)
    now = time.time()
    if as_json:
        rows = [
            {
                "name": one.name,
                "root": one.root,
                "files": one.files,
                "bytes": one.size,
                "used_at": one.used_at,
                "jobs": needed.get(one.name, []),
            }
            for one in here
        ]
        output.print_json({"folder": home, "snapshots": rows, "dropped": dropped})
        return
    if dropped:
        sys.stdout.write(f"dropped {len(dropped)} that no unfinished job needs\n")
    lines = []
    for one in here:
        ids = needed.get(one.name, [])
        jobs = ",".join(ids[:_SHOWN_IDS]) + (",..." if len(ids) > _SHOWN_IDS else "")
        unused = format_duration(max(0.0, now - one.used_at))
        lines.append([one.name, show_size(one.size), str(one.files), unused, jobs or "-", printable(one.root)])
    if lines:
        tables.print_table(["NAME", "SIZE", "FILES", "UNUSED", "JOBS", "CODE"], lines, frozenset({1, 2, 3}))
    total = show_size(sum(one.size for one in here))
    sys.stdout.write(f"{len(here)} snapshots, {total}, in {printable(os.path.realpath(home))}\n")
