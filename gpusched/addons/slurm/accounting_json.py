"""`sacct --json`: the document of Slurm 22.05, from the same records as the columns."""

from __future__ import annotations

import signal

from gpusched import quickjson
from gpusched.addons.slurm.accounting import BATCH, AccountingRecord
from gpusched.addons.slurm.command import user_of
from gpusched.addons.slurm.documents import meta
from gpusched.addons.slurm.values import slurm_reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    Json = dict[str, Any]

_TRES_IDS = {"cpu": 1, "mem": 2, "energy": 3, "node": 4, "billing": 5}
_GRES_ID = 1001
_MOST_MINUTES = 2**32 - 1
"""Slurm's number for no limit."""


def pieces(records: Iterable[AccountingRecord]) -> Iterator[str]:
    """The document in pieces: a line for each job, with its script and steps inside."""
    yield f'{{"meta":{quickjson.dumps(meta("db"))},"errors":[],"jobs":['
    job: Json | None = None
    comma = "\n"
    for record in records:
        if not record.is_job and job is not None:
            job["steps"].append(_step(record))
            continue
        if job is not None:
            yield comma + quickjson.dumps(job)
            comma = ",\n"
        job = _job(record)
    if job is not None:
        yield comma + quickjson.dumps(job)
    yield "\n]}\n"


def _job(record: AccountingRecord) -> Json:
    job = record.job
    limit_s = job["time_limit_s"]
    is_task = job["task"] is not None
    return {
        "account": job["account"],
        "comment": {"administrator": job.admin_comment, "job": job["comment"], "system": None},
        "allocation_nodes": record.nodes if record.is_started else 0,
        "array": {
            "job_id": int(job["array_id"] or 0),
            "limits": {"max": {"running": {"tasks": job["throttle"] or 0}}},
            "task": None if is_task else job["tasks_left"] or None,
            "task_id": job["task"],
        },
        "association": {
            "account": job["account"],
            "cluster": record.view.cluster,
            "partition": None,
            "user": job["user"],
        },
        "cluster": record.view.cluster,
        "constraints": job["constraint"] or "",
        "container": None,
        "derived_exit_code": _exit(*record.derived_exit),
        "time": {
            **_times(record),
            "eligible": _instant(job["eligible_at"]),
            "submission": _instant(job["submit_at"]),
            "limit": _MOST_MINUTES if limit_s is None else int(-(-limit_s // 60)),
        },
        "exit_code": _exit(*record.exit_status),
        "flags": ["CLEAR_SCHEDULING"],
        "group": job.group[1],
        "het": {"job_id": 0, "job_offset": None},
        "job_id": job["job_id"],
        "name": record.name,
        "mcs": {"label": ""},
        "nodes": record.node,
        "partition": job["queue"],
        "priority": round(job["priority"] or 0),
        "qos": job.qos,
        "required": {"CPUs": record.cpus, "memory": int(job["mem_mib"] or 0)},
        "kill_request_user": _user_name(record.canceller),
        "reservation": {"id": 0, "name": job["reservation"] or 0},
        "state": {"current": record.state, "reason": slurm_reason(job["reason"])},
        "steps": [],
        "tres": {"allocated": _tres(record.allocated), "requested": _tres(record.requested)},
        "user": job["user"],
        "wckey": {"wckey": job["wckey"] or "", "flags": []},
        "working_directory": job["work_dir"],
    }


def _step(record: AccountingRecord) -> Json:
    energy = [_energy(record)]
    usage = {"max": [], "min": [], "average": energy, "total": energy}
    return {
        "nodes": {
            "list": [record.node] if record.step is None else record.step["nodes"],
            "count": record.nodes,
            "range": record.node,
        },
        "tres": {"requested": usage, "consumed": usage, "allocated": _tres(record.allocated)},
        "time": _times(record),
        "exit_code": _exit(*record.exit_status),
        "tasks": {"count": 1 if record.step is None else record.step["tasks"]},
        "CPU": {"requested_frequency": {"min": 0, "max": 0}, "governor": "0"},
        "kill_request_user": _user_name(record.canceller),
        "state": record.state,
        "statistics": {"CPU": {"actual_frequency": 0}, "energy": {"consumed": energy[0]["count"]}},
        "step": {
            "job_id": record.job["job_id"],
            "het": {"component": None},
            "id": "batch" if record.kind == BATCH else str(record.step["step"] if record.step else 0),
            "name": record.name,
        },
        "task": {"distribution": "Unknown"},
    }


def _times(record: AccountingRecord) -> Json:
    total, user, system = (
        {"seconds": round(cpu_s * 1e6) // 1_000_000, "microseconds": round(cpu_s * 1e6) % 1_000_000}
        for cpu_s in record.cpu_times or (0.0, 0.0, 0.0)
    )
    return {
        "elapsed": record.elapsed_s,
        "end": _instant(record.end_at),
        "start": _instant(record.start_at),
        "suspended": int(record.job["suspended_s"] or 0) if record.step is None else 0,
        "system": system,
        "total": total,
        "user": user,
    }


def _instant(at: float | None) -> int:
    return 0 if at is None else int(at)


def _exit(code: int, number: int) -> Json:
    if number:
        try:
            name = signal.Signals(number).name.removeprefix("SIG")
        except ValueError:
            name = str(number)
        return {"status": "SIGNALED", "return_code": code, "signal": {"signal_id": number, "name": name}}
    return {"status": "ERROR" if code else "SUCCESS", "return_code": code}


def _energy(record: AccountingRecord) -> Json:
    return {"type": "energy", "name": None, "id": _TRES_IDS["energy"], "count": int(record.figure("energy_j") or 0)}


def _tres(amounts: dict[str, int]) -> list[Json]:
    """Trackable resources as a list; memory in MiB."""
    found: list[Json] = []
    for name, count in amounts.items():
        kind, _, rest = name.partition("/")
        found.append({"type": kind, "name": rest or None, "id": _TRES_IDS.get(kind, _GRES_ID), "count": count})
    return found


def _user_name(uid: int | None) -> str | None:
    return None if uid is None else user_of(uid)
