"""gwait: wait for jobs; also implements gsub --wait."""

from __future__ import annotations

import time

from gpusched.cli import output
from gpusched.cli.options import gwait_table
from gpusched.cli.query import ids_in, quote
from gpusched.client import connect
from gpusched.errors import DaemonUnreachable, UsageError
from gpusched.model.state_names import ACTIVE
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from gpusched.cli.parse import Values
    from gpusched.client import DaemonConnection

    T = TypeVar("T")

_POLL_S = 60
_RECONNECT_S = 0.2
_IDS_AT_ONCE = 400
"""The daemon accepts addresses of 8 KiB, and an id may take twenty characters."""
_PATIENCE_S = 30.0
"""How long a waiting command tolerates an unreachable daemon, for example during a restart."""


def main() -> int:
    return output.run("gwait", body)


@output.command(gwait_table)
def body(values: Values, operands: list[str]) -> int:
    """Wait; returns 0 only if every job COMPLETED."""
    ids = ids_in(operands)
    if not ids:
        raise UsageError("no jobs given", "for example: gwait 41 42   or: gwait @   for your last one")
    with connect() as client:
        if any(word.startswith("@") for word in ids):
            # Resolved once: the last job changes with the next submission.
            last = client.call("GET", "/v1/jobs/@")["job"]["id"]
            ids = [last + word[1:] if word.startswith("@") else word for word in ids]
        return await_all(client, ids, values.get("timeout_s"), "gwait", values)


def await_all(
    client: DaemonConnection,
    ids: list[str],
    timeout_s: float | None,
    command: str,
    values: dict[str, Any] | None = None,
) -> int:
    """Wait for all of these and report those that did not complete."""
    values = values or {}
    try:
        answer = wait_until_done(client, ids, timeout_s)
    except KeyboardInterrupt:
        output.note(command, "stopped waiting; the jobs are not affected")
        return 130
    document: dict[str, Any] = {key: answer[key] for key in ("done", "jobs", "not_needed") if key in answer}
    is_shown = output.show(values, document, (f"{job['id']} {job['state']}" for job in answer["jobs"]))
    if not is_shown and not answer["done"]:
        open_ids = [job["id"] for job in answer["jobs"] if job["state"] in ACTIVE]
        output.note(command, f"timed out; still unfinished: {', '.join(open_ids)}")
    # Steps that a pipeline skipped because nothing failed are not failures.
    bad = [
        job for job in answer["jobs"] if job["state"] != "COMPLETED" and job["id"] not in answer.get("not_needed", ())
    ]
    if answer["done"] and not is_shown:
        for job in bad:
            output.note(command, ending(job))
    return 0 if answer["done"] and not bad else 1


def await_one(
    client: DaemonConnection, job_id: str, command: str, as_json: bool = False, also: dict[str, Any] | None = None
) -> int:
    """Wait for one job; returns the job's exit code. Ctrl-C leaves the job alone.

    Args: also: further keys of the JSON document.
    """
    try:
        job = wait_until_done(client, [job_id], None)["jobs"][0]
    except KeyboardInterrupt:
        output.note(command, f"stopped waiting; job {job_id} is not affected; cancel it with: gcancel {job_id}")
        return 130
    if as_json:
        output.print_json({"job": client.call("GET", f"/v1/jobs/{job_id}")["job"], **(also or {})})
    if job["state"] != "COMPLETED":
        output.note(command, ending(job))
    return output.exit_code_of(job)


def ending(job: dict[str, Any], noun: str = "job") -> str:
    """A sentence on how a job or an array ended."""
    why = printable(job["reason_text"] or job["reason"] or "")
    return f"{noun} {job['id']} is {job['state']}" + (f": {why}" if why else "")


def wait_until_done(client: DaemonConnection, ids: list[str], timeout_s: float | None) -> dict[str, Any]:
    """The daemon's answer once all have ended or the timeout has expired. Waits through restarts of the daemon."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    answers = [
        _wait_until_done(client, ids[at : at + _IDS_AT_ONCE], deadline) for at in range(0, len(ids), _IDS_AT_ONCE)
    ]
    if len(answers) == 1:
        return answers[0]
    return {
        "done": all(answer["done"] for answer in answers),
        "not_needed": [job_id for answer in answers for job_id in answer.get("not_needed", ())],
        "jobs": [job for answer in answers for job in answer["jobs"]],
    }


def _wait_until_done(client: DaemonConnection, ids: list[str], deadline: float | None) -> dict[str, Any]:
    names = quote(",".join(ids))
    while True:
        left_s = _POLL_S if deadline is None else max(0.0, min(_POLL_S, deadline - time.monotonic()))
        answer = call_patiently(client, f"/v1/wait?ids={names}&timeout_s={left_s:.3f}")
        if answer["done"] or (deadline is not None and time.monotonic() >= deadline):
            return answer


def call_patiently(client: DaemonConnection, path: str) -> dict[str, Any]:
    """GET that survives a restart of the daemon. Raises: DaemonUnreachable if it stays down."""
    return patiently(lambda: client.call("GET", path))


def patiently(ask: Callable[[], T]) -> T:
    """Ask again while the daemon restarts; the question must be safe to repeat. Raises: DaemonUnreachable."""
    away_since = None
    while True:
        try:
            return ask()
        except (DaemonUnreachable, ConnectionError):
            # Counted from the first failure: the daemon may have held the request for longer than that.
            away_since = away_since or time.monotonic()
            if time.monotonic() > away_since + _PATIENCE_S:
                raise
            time.sleep(_RECONNECT_S)
