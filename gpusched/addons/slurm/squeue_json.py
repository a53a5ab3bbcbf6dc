"""`squeue --json` and `--yaml`: the shape of Slurm 22.05's documents, data parser v0.0.38."""

from __future__ import annotations

import json
import sys

from gpusched.addons.slurm.command import VERSION
from gpusched.addons.slurm.job_fields import reason_of, start_at
from gpusched.addons.slurm.nodes import all_cpus_of, cpus_of, tres, whole
from gpusched.addons.slurm.scontrol_job import (
    command_of,
    cpus_per_task,
    dependency_of,
    gpus_of,
    gres_of,
    numeric_id,
    priority_of,
    restarts_of,
)
from gpusched.addons.slurm.values import NORMAL_QOS, NULL, admin_comment, first_node, limit_s, tasks_of_row
from gpusched.model.hostlist import expand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

_EMPTY_TEXTS = (
    "batch_features burst_buffer burst_buffer_state cluster_features container federation_origin "
    "federation_siblings_active federation_siblings_viable het_job_id_set mcs_label memory_per_tres prefer "
    "state_description system_comment tres_bind tres_freq tres_per_job tres_per_socket"
).split()
_NULLS = (
    "core_spec thread_spec cores_per_socket cpu_frequency_minimum cpu_frequency_maximum cpu_frequency_governor "
    "tasks_per_core tasks_per_socket profile shared sockets_per_node threads_per_core"
).split()
_ZEROS = (
    "association_id delay_boot het_job_id het_job_offset max_cpus max_nodes tasks_per_board minimum_tmp_disk_per_node "
    "resize_time sockets_per_board time_minimum"
).split()


def print_document(jobs: list[Json], cluster: str, *, is_yaml: bool) -> None:
    """Print whole jobs, as the daemon's list has them, in Slurm's shape."""
    major, minor, micro = (int(part) for part in VERSION.split()[1].split("."))
    document = {
        "meta": {
            "plugin": {"type": "openapi/v0.0.38", "name": "Slurm OpenAPI v0.0.38"},
            "Slurm": {"version": {"major": major, "micro": micro, "minor": minor}, "release": VERSION.split()[1]},
        },
        "errors": [],
        "jobs": [job_document(job, cluster) for job in jobs],
    }
    if is_yaml:
        sys.stdout.write("%YAML 1.1\n--- !!map\n" + "".join(f"{line}\n" for line in _map_lines(document)))
    else:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")


def job_document(job: Json, cluster: str) -> Json:
    """One job; texts that are not set are empty, times UTC epoch seconds or 0, the limit is in minutes."""
    is_pending = job["state"] == "PENDING"
    node = "" if is_pending else job["node"] or ""
    cpus, nodes, mem_mib = cpus_of(job), int(job["nodes"]), job["mem_mib"] or 0
    all_cpus = all_cpus_of(job)
    amounts = tres(all_cpus, job["total_mem_mib"], gpus_of(job), nodes=nodes, billing=all_cpus)
    limit = limit_s(job)
    dependency, command = dependency_of(job), command_of(job)
    is_held = node and job["state"] in ("RUNNING", "SUSPENDED", "COMPLETING")
    ends_at = job["end_at"]
    if ends_at is None and limit is not None and start_at(job) is not None:
        ends_at = (start_at(job) or 0.0) + (job["suspended_s"] or 0.0) + limit
    return {
        **dict.fromkeys(_EMPTY_TEXTS, ""),
        **dict.fromkeys(_NULLS),
        **dict.fromkeys(_ZEROS, 0),
        "account": job["account"] or "",
        "accrue_time": _seconds(job["eligible_at"]),
        "array_job_id": int(job["array_id"] or 0),
        "array_task_id": job["task"],
        "array_max_tasks": job["throttle"] or 0,
        "array_task_string": tasks_of_row(job),
        "batch_flag": job["is_batch"],
        "batch_host": first_node(node),
        "flags": [],
        "cluster": cluster,
        "command": "" if command == NULL else command,
        "admin_comment": admin_comment(job) or "",
        "comment": job["comment"] or "",
        "contiguous": False,
        "billable_tres": float(all_cpus),
        "cpus_per_task": cpus_per_task(job) if job["cpus_per_task"] else None,
        "cpus_per_tres": f"gres:gpu:{job['cpus_per_gpu']}" if job["cpus_per_gpu"] else "",
        "deadline": _seconds(job["deadline_at"]),
        "dependency": "" if dependency == NULL else dependency,
        "derived_exit_code": _wait_status(job),
        "eligible_time": _seconds(job["eligible_at"]),
        "end_time": _seconds(ends_at),
        "excluded_nodes": ",".join(job["exclude"]),
        "exit_code": _wait_status(job),
        "features": job["constraint"] or "",
        "gres_detail": _gres_detail(job) if is_held else [],
        "group_id": _group(job)[0],
        "group_name": _group(job)[1],
        "job_id": int(numeric_id(job)) if job.get("job_id") is None else job["job_id"],
        "job_resources": {} if not node else _resources(node, all_cpus, nodes, mem_mib),
        "job_state": job["state"],
        "last_sched_evaluation": _seconds(job["start_at"]),
        "licenses": ",".join(f"{name}:{number}" for name, number in job["licenses"].items()),
        "name": job["name"],
        "nodes": node,
        "nice": job["nice"] or None,
        "tasks_per_node": job["ntasks_per_node"] or 0,
        "cpus": all_cpus,
        "node_count": nodes,
        "tasks": job["num_tasks"] or 1,
        "partition": job["queue"],
        "memory_per_node": None if job["mem_per_cpu_mib"] else mem_mib or None,
        "memory_per_cpu": job["mem_per_cpu_mib"],
        "minimum_cpus_per_node": cpus,
        "preempt_time": _seconds(job["preempt_at"]),
        "pre_sus_time": whole(job["suspended_s"] or 0),
        "priority": priority_of(job),
        "qos": job["qos"] or NORMAL_QOS,
        "reboot": False,
        "required_nodes": ",".join(job["nodelist"]),
        "requeue": job["requeue"] is not False,
        "restart_cnt": restarts_of(job),
        "resv_name": job["reservation"] or "",
        "show_flags": ["SHOW_ALL", "SHOW_DETAIL", "SHOW_LOCAL"],
        "start_time": _seconds(start_at(job)),
        "state_reason": reason_of(job),
        "standard_error": job["stderr_path"] or job["stdout_path"] or "",
        "standard_input": job["stdin_path"] or "/dev/null",
        "standard_output": job["stdout_path"] or "",
        "submit_time": _seconds(job["submit_at"]),
        "suspend_time": _seconds(job["suspended_at"]),
        "time_limit": None if limit is None else int(limit // 60),
        "tres_per_node": gres_of(job),
        "tres_per_task": f"gres:gpu:{job['gpus_per_task']}" if job["gpus_per_task"] else "",
        "tres_req_str": amounts,
        "tres_alloc_str": "" if is_pending else amounts,
        "user_id": job["uid"],
        "user_name": job["user"],
        "wckey": job["wckey"] or "",
        "current_working_directory": job["work_dir"] or "",
    }


def _seconds(at: float | None) -> int:
    return int(at or 0)


def _wait_status(job: Json) -> int:
    """Exit code and signal as wait(2) combines them."""
    return (job["exit_code"] or 0) << 8 | (job["signal"] or 0)


def _group(job: Json) -> tuple[int, str]:
    import grp
    import pwd

    try:
        number = pwd.getpwuid(job["uid"]).pw_gid
        return number, grp.getgrgid(number).gr_name
    except (KeyError, OverflowError):
        return job["uid"], ""


def _gres_detail(job: Json) -> list[str]:
    """Of each node with GPUs of the job, `gpu:2(IDX:0,1)`."""
    indices: dict[str, list[str]] = {}
    for gpu in job["gpus"]:
        indices.setdefault(gpu["node"], []).append(str(gpu["index"]))
    kind = f"{job['gpu_type']}:" if job["gpu_type"] else ""
    return [f"gpu:{kind}{len(those)}(IDX:{','.join(those)})" for those in indices.values()]


def _resources(node: str, all_cpus: int, nodes: int, mem_mib: int) -> Json:
    amounts = {"cpus_used": 0, "memory_used": 0, "memory_allocated": mem_mib}
    return {
        "nodes": node,
        "allocated_cpus": all_cpus,
        "allocated_hosts": nodes,
        "allocated_nodes": [{"sockets": {}, "nodename": name, **amounts} for name in expand(node)],
    }


# --- YAML --------------------------------------------------------------------------------------------


def _map_lines(values: Json) -> list[str]:
    lines: list[str] = []
    for key, value in values.items():
        word = f"!!str {key}: "
        if isinstance(value, dict) and value:
            lines += [f"{word}!!map", *(f"  {line}" for line in _map_lines(value))]
        elif isinstance(value, list) and value:
            lines.append(f"{word}!!seq")
            for one in value:
                if isinstance(one, dict):
                    lines += ["- !!map", *(f"  {line}" for line in _map_lines(one))]
                else:
                    lines.append(f"- {_scalar(one)}")
        else:
            lines.append(word + _scalar(value))
    return lines


def _scalar(value: Any) -> str:
    """A value with its tag; texts that YAML could read as something else in quotes."""
    if value is None or value == "":
        return "!!null null"
    if isinstance(value, (dict, list)):
        return "!!map {}" if isinstance(value, dict) else "!!seq []"
    if isinstance(value, bool):
        return f"!!bool {'true' if value else 'false'}"
    if isinstance(value, int):
        return f"!!int {value}"
    if isinstance(value, float):
        return f"!!float {value:f}"
    text = str(value)
    is_plain = text.isprintable() and (text[0].isalnum() or text[0] == "/") and text == text.strip()
    is_plain = is_plain and not text.endswith(":") and not any(mark in text for mark in (": ", " #"))
    return f"!!str {text if is_plain else json.dumps(text)}"
