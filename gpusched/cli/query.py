"""Shared by the commands about jobs: query strings, Slurm's state abbreviations, and cells of their tables."""

from __future__ import annotations

from gpusched.errors import NotFound
from gpusched.model.units import format_duration, gpu_list, id_ranges, printable, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import DaemonConnection


def query(values: Values) -> str:
    parts = {
        "ids": ",".join(values.get("ids", ())),
        "states": ",".join(values.get("states", ())),
        "users": ",".join([*values.get("users", ()), *mine(values)]),
        "names": ",".join(values.get("names", ())),
        "queues": ",".join(values.get("queues", ())),
        "limit": str(values.get("limit", "")),
        "since": str(values.get("since", "")),
    }
    return "&".join(f"{key}={quote(value)}" for key, value in parts.items() if value)


def ids_in(operands: Iterable[str]) -> list[str]:
    """The ids in these operands, each of which may list several, `41,42`. Raises: UsageError."""
    return [word for operand in operands for word in split_ids(operand)]


def check_names(client: DaemonConnection, users: list[str], queues: list[str]) -> None:
    """Refuse unknown users without jobs, and unknown queues. Raises: NotFound."""
    for name in users:
        if not is_user(name) and not _has_jobs(client, "users", name):
            raise NotFound(f"there is no user {printable(name, 60)!r}", "see whose jobs there are with: gq -a")
    for name in queues:
        try:
            client.call("GET", f"/v1/queues?name={quote(name)}")
        except NotFound:
            # A removed queue may still have jobs.
            if not _has_jobs(client, "queues", name):
                raise


def is_user(name: str) -> bool:
    """Whether this machine has a user of this name."""
    import pwd

    try:
        pwd.getpwnam(name)
    except (KeyError, OSError, ValueError):
        return False
    return True


def _has_jobs(client: DaemonConnection, key: str, name: str) -> bool:
    return bool(client.call("GET", f"/v1/jobs?states=all&limit=1&fields=id&{key}={quote(name)}")["rows"])


def quote(text: str) -> str:
    """Percent-encode a query value as urllib does, without importing it."""
    safe = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~,@"
    return "".join(chr(byte) if byte in safe else f"%{byte:02X}" for byte in text.encode("utf-8", "surrogateescape"))


def mine(values: Values) -> list[str]:
    """The caller's name if --me was given."""
    if not values.get("me"):
        return []
    import os
    import pwd

    return [pwd.getpwuid(os.geteuid()).pw_name]


def elapsed(job: dict[str, Any], now: float) -> str:
    """How long a pending job has waited; the run time of any other, without time spent suspended."""
    return format_duration(elapsed_s(job, now))


def elapsed_s(job: dict[str, Any], now: float) -> float:
    """As `elapsed`, in seconds."""
    return max(0.0, now - float(job["submit_at"])) if job["state"] == "PENDING" else run_time_s(job, now)


def run_time_s(job: dict[str, Any], now: float) -> float:
    """The run time of a job in seconds, without time spent suspended; 0 while it is pending."""
    if job["state"] == "PENDING" or job["start_at"] is None:
        return 0.0
    until = job["end_at"] or job["suspended_at"] or now
    return max(0.0, float(until - job["start_at"] - job["suspended_s"]))


def places(gpus: Iterable[dict[str, Any]]) -> str:
    """Nodes with their GPUs, `n1:0,1`; nodes with the same indexes share a word, `n[1-4]:0-7`."""
    cards: dict[str, list[int]] = {}
    for gpu in gpus:
        cards.setdefault(gpu["node"], []).append(gpu["index"])
    if len(cards) < 2:
        return "".join(f"{node}:{gpu_list(indexes)}" for node, indexes in cards.items())
    from gpusched.model.hostlist import fold  # few jobs have several nodes

    nodes: dict[str, list[str]] = {}
    for node, indexes in cards.items():
        nodes.setdefault(gpu_list(indexes), []).append(node)
    return " ".join(f"{fold(names)}:{indexes}" for indexes, names in nodes.items())


def where(job: dict[str, Any], now: float, sentence: str | None = None) -> str:
    """Node and GPUs of a job that holds any, otherwise why it is pending or how it ended; `sentence` is appended."""
    if job["state"] in ("RUNNING", "COMPLETING", "SUSPENDED"):
        found = places(job["gpus"]) or job["node"] or ""
        if job.get("idle_at") is not None:
            found += f" idle {format_duration(max(0.0, now - job['idle_at']))}"
        if job["reason"] == "NodeUnreachable":
            found += " (NodeUnreachable)"
    elif job["reason"] and job["reason"] != "None":
        found = f"({job['reason']})"
    else:
        return job["node"] or ""
    return f"{found} {sentence}".strip() if sentence else found


_WIDEST = 24


def shown_id(job_id: str, tasks_left: str | None, throttle: int | None) -> str:
    """The id of an array with the tasks that have not started, `42_[7-99%4]`; otherwise the job's id."""
    if not tasks_left:
        return job_id
    limit = f"%{throttle}" if throttle is not None else ""
    return f"{job_id}_[{_short(tasks_left, _WIDEST)}{limit}]"


def folded_ids(ids: Sequence[str]) -> str:
    """Several ids in one word, `412-9999 (9,588 jobs)`; a single one is returned unchanged."""
    if len(ids) == 1:
        return ids[0]
    return folded_ranges(id_ranges(tuple(map(int, one.split("_"))) for one in ids), len(ids))


def folded_ranges(ranges: str, count: int) -> str:
    """As `folded_ids`, for ranges of ids as folded by the daemon."""
    return f"{_short(ranges, _WIDEST // 2)} ({count:,} jobs)"


def shorter_id(shown: str) -> str:
    """An id of `shown_id` or `folded_ranges` where there is little room: `412-9999 (9,588)`, `42_[7-99]`."""
    head, bracket, tail = shown.partition("_[")
    if bracket:
        tasks = _short(tail.rstrip("]").partition("%")[0], _WIDEST // 3)
        return f"{head}_[{tasks}]"
    return shown.replace(" jobs)", ")")


def _short(ids: str, width: int) -> str:
    """As many of these ids and ranges as fit; the first is always included."""
    if len(ids) <= width or "," not in ids:
        return ids
    return (ids[:width].rpartition(",")[0] or ids.partition(",")[0]) + ",..."
