"""How everything but jobs and runs becomes rows of columns, and how it comes back."""

from __future__ import annotations

from json import loads
from typing import Any

from gpusched.model.alerts import Alert
from gpusched.model.calendar import CalendarEntry, Estimate
from gpusched.model.cluster import Clearance
from gpusched.model.job import GpuShare, JobEvent
from gpusched.model.pipeline import Pipeline
from gpusched.model.resources import Resources
from gpusched.model.snapshot import Placement, Usage
from gpusched.store.codec import Row
from gpusched.store.packing import counts, pack, pack_text, unpack_text

USAGE_COLUMNS = ("account", "user", "gpu_s", "vram_mib_s", "cpu_s", "mem_mib_s", "at")
RESERVATION_COLUMNS = (
    "name",
    "start_at",
    "duration_s",
    "every_s",
    "until_at",
    "held",
    "users",
    "accounts",
    "made_by",
    "made_at",
    "message",
)
ESTIMATE_COLUMNS = tuple(Estimate.__struct_fields__)
PIPELINE_COLUMNS = tuple(Pipeline.__struct_fields__)
ALERT_COLUMNS = tuple(Alert.__struct_fields__)
CLEARANCE_COLUMNS = tuple(Clearance.__struct_fields__)
EVENT_COLUMNS = ("job_id", "at", "kind", "text", "run")


def usage_row(usage: Usage) -> tuple[Any, ...]:
    """USAGE_COLUMNS of what a user has used."""
    used = usage.used
    amounts = (used.gpus, used.vram_mib, used.cpus, used.mem_mib)
    return (pack_text(usage.account), pack_text(usage.user), *amounts, usage.at)


def read_usage(row: Row) -> Usage:
    """The usage of USAGE_COLUMNS."""
    account, user, *amounts, at = row
    return Usage(unpack_text(account), unpack_text(user), Resources(*amounts), at)


def clearance_row(clearance: Clearance) -> tuple[Any, ...]:
    """CLEARANCE_COLUMNS of a GPU that was said to be well."""
    return (pack_text(clearance.uuid), clearance.at, clearance.ecc_errors)


def read_clearance(row: Row) -> Clearance:
    """The clearance of CLEARANCE_COLUMNS."""
    uuid, at, ecc_errors = row
    return Clearance(unpack_text(uuid), at, ecc_errors)


def reservation_row(entry: CalendarEntry) -> tuple[Any, ...]:
    """RESERVATION_COLUMNS of an entry of the calendar."""
    return (
        pack_text(entry.name),
        entry.start_at,
        entry.duration_s,
        entry.every_s,
        entry.until_at,
        pack(entry.held),
        pack(entry.users),
        pack(entry.accounts),
        pack_text(entry.made_by),
        entry.made_at,
        pack_text(entry.message),
    )


def read_reservation(row: Row) -> CalendarEntry:
    """The entry of RESERVATION_COLUMNS. Raises: KeyError, TypeError, ValueError when the row makes no sense."""
    name, start_at, duration_s, every_s, until_at, held, users, accounts, made_by, made_at, message = row
    return CalendarEntry(
        name=unpack_text(name),
        start_at=start_at,
        duration_s=duration_s,
        held=tuple(map(_placement, loads(held))),
        users=tuple(loads(users)),
        accounts=tuple(loads(accounts)),
        every_s=every_s,
        until_at=until_at,
        made_by=unpack_text(made_by),
        made_at=made_at,
        message=unpack_text(message),
    )


def _placement(parts: dict[str, Any]) -> Placement:
    parts["gpus"] = tuple(GpuShare(**share) for share in parts["gpus"])
    parts["others"] = tuple(map(_placement, parts["others"]))
    parts["resources"], parts["licenses"] = counts(parts["resources"]), counts(parts["licenses"])
    return Placement(**parts)


def estimate_row(estimate: Estimate) -> tuple[Any, ...]:
    """ESTIMATE_COLUMNS of an estimate."""
    return (estimate.job_id, estimate.made_at, estimate.low_at, estimate.high_at, estimate.start_at)


def read_estimate(row: Row) -> Estimate:
    """The estimate of ESTIMATE_COLUMNS."""
    return Estimate(*row)


def pipeline_row(pipeline: Pipeline) -> tuple[Any, ...]:
    """PIPELINE_COLUMNS of a pipeline."""
    user, name, source = map(pack_text, (pipeline.user, pipeline.name, pipeline.source))
    return (pipeline.number, pipeline.uid, user, name, pipeline.submit_at, source)


def read_pipeline(row: Row) -> Pipeline:
    """The pipeline of PIPELINE_COLUMNS."""
    number, uid, user, name, submit_at, source = row
    return Pipeline(number, uid, unpack_text(user), unpack_text(name), submit_at, unpack_text(source))


def alert_row(alert: Alert) -> tuple[Any, ...]:
    """ALERT_COLUMNS of a row of the outbox."""
    parts = {name: getattr(alert, name) for name in ALERT_COLUMNS}
    parts["key"] = pack_text(alert.key)
    for name in _ALERT_LISTS:
        parts[name] = pack(parts[name])
    return tuple(parts.values())


def read_alert(row: Row) -> Alert:
    """The alert of ALERT_COLUMNS. Raises: KeyError, TypeError, ValueError when the row makes no sense."""
    parts = dict(zip(ALERT_COLUMNS, row, strict=True))
    parts["key"] = unpack_text(parts["key"])
    for name in _ALERT_LISTS:
        parts[name] = tuple(loads(parts[name]))
    parts["facts"] = tuple((name, value) for name, value in parts["facts"])
    return Alert(**parts)


_ALERT_LISTS = ("counts_as", "facts", "targets", "settled")


def event_row(event: JobEvent) -> tuple[Any, ...]:
    """EVENT_COLUMNS of a line of a story."""
    return (event.job_id, event.at, event.kind, pack_text(event.text), event.run)


def read_event(row: Row) -> JobEvent:
    """The line of EVENT_COLUMNS."""
    job_id, at, kind, text, run = row
    return JobEvent(job_id, at, kind, unpack_text(text), run)
