"""Print the results of gpusched backup and gpusched restore, and wait for the daemon before a restore."""

from __future__ import annotations

import os
import sys

from filelock import FileLock, Timeout

from gpusched import paths
from gpusched.access import user_name
from gpusched.cli import output
from gpusched.engine.spool import runs_in
from gpusched.errors import DaemonBusy, Forbidden
from gpusched.model.units import name_some, plural, printable
from gpusched.paths import make_private
from gpusched.store.backup import backup, restore
from gpusched.store.id_record import read_ids

_NAMED = 20


def make(file: str, as_json: bool) -> None:
    """Copy the job table of this scheduler to a file, whether or not its daemon runs. Raises: Forbidden."""
    _choose_table("gpusched backup")
    made = backup(paths.database(), file, paths.settings_log())
    if as_json:
        output.print_json(
            {"file": made.path, "size_bytes": made.size_bytes, "jobs": made.jobs, "unfinished": made.unfinished}
        )
        return
    size = f"{made.size_bytes / (1 << 20):.1f} MiB"
    sys.stdout.write(
        f"wrote {printable(made.path)}: {plural(made.jobs, 'job')}, {made.unfinished} unfinished, {size}\n"
    )


def put_back(file: str | None, hold: bool, as_json: bool) -> None:
    """Replace the job table with a backup, or with an empty one, while no daemon runs and none can start.

    Raises: DaemonBusy if a daemon runs; Forbidden.
    """
    _choose_table("gpusched restore")
    if not paths.is_system():
        make_private(paths.state_dir())
    lock = FileLock(paths.lock_file(), mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DaemonBusy(
            f"a daemon is running for {paths.state_dir()} and would overwrite the restored table",
            f"stop it first with: {paths.stop_command()}; its jobs keep running",
        ) from None
    try:
        present = runs_in(paths.spool_dir()) if os.path.isdir(paths.spool_dir()) else set()
        next_job, next_pipeline = read_ids(paths.id_record())
        ids = [next_job - 1, *(int(run.partition(".")[0]) for run in present)]
        found = restore(
            file,
            paths.database(),
            hold=hold,
            ids_in_use=ids,
            pipelines_in_use=[next_pipeline - 1],
            by=user_name(os.geteuid()),
            record=paths.settings_log(),
        )
    finally:
        lock.release()
    unknown = sorted(present - found.open_runs)
    if as_json:
        output.print_json(
            {
                "database": found.path,
                "kept": found.kept,
                "jobs": found.jobs,
                "held": [str(job_id) for job_id in found.held],
                "unknown_runs": unknown,
                "next_job_id": found.next_id,
            }
        )
        return
    done = "began an empty job table" if file is None else f"restored {plural(found.jobs, 'job')}"
    sys.stdout.write(f"{done}; the next id is {found.next_id}\n")
    if found.kept:
        output.note("gpusched", f"the previous table was kept as {printable(found.kept)}")
    if found.held:
        output.note(
            "gpusched",
            f"held, since they may have run after the backup: "
            f"{name_some('job', list(map(str, found.held)), _NAMED)}; "
            "check them (gq, glogs), then: gctl release ID or gcancel ID",
        )
    if unknown:
        output.note("gpusched", f"not in the backup, so the daemon will end them: {name_some('run', unknown, _NAMED)}")
    output.note("gpusched", f"continue with: {paths.start_command()}")


def _choose_table(command: str) -> None:
    """Select the table of the daemon that commands talk to; the system daemon's belongs to root."""
    if not paths.finds_system():
        return
    if os.geteuid() != 0:
        raise Forbidden("the job table of this machine's scheduler is root's", f"run as root: sudo {command} FILE")
    paths.serve_system()
