"""`squeue --json` and `--yaml`: the shape of Slurm 22.05's documents, data parser v0.0.38."""

from __future__ import annotations

import json
import sys
import time
from operator import itemgetter

from gpusched.addons.slurm.documents import meta
from gpusched.addons.slurm.job import SlurmJob
from gpusched.addons.slurm.job_fields import FIELDS
from gpusched.addons.slurm.nodes import whole
from gpusched.model.hostlist import expand
from gpusched.model.state_names import ACTIVE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Json = dict[str, Any]

_EMPTY_TEXTS = (
    "batch_features burst_buffer burst_buffer_state cluster_features container federation_origin "
    "federation_siblings_active federation_siblings_viable het_job_id_set mcs_label memory_per_tres "
    "state_description system_comment tres_bind tres_freq tres_per_job tres_per_socket"
).split()
_NULLS = (
    "core_spec thread_spec cores_per_socket cpu_frequency_minimum cpu_frequency_maximum cpu_frequency_governor "
    "tasks_per_core tasks_per_socket profile shared sockets_per_node threads_per_core"
).split()
_ZEROS = (
    "association_id delay_boot het_job_id het_job_offset max_cpus max_nodes tasks_per_board resize_time "
    " sockets_per_board time_minimum"
).split()


_OWN_KEYS = frozenset(
    "id job_id name command script_path submit_at eligible_at priority stdin_path stdout_path stderr_path".split()
)
"""Keys in which the jobs of one batch or script differ; all others are equal."""
_OWN = {field.json: field for field in FIELDS if field.json and not _OWN_KEYS.isdisjoint(field.printed.keys.split())}
"""The fields that read one of them, by key of the document."""
_AT_ONCE = 500
KEYS = tuple(
    dict.fromkeys(
        (
            *(key for field in FIELDS if field.json for key in field.printed.keys.split()),
            *"array_id task throttle tasks_left cpus nodes total_cpus cpus_per_task num_tasks ntasks state".split(),
            *"gpus gpu_type mem_mib mem_per_cpu_mib nice suspended_s suspended_at".split(),
        )
    )
)
"""JSON keys of jobs that documents are made of."""


def print_document(jobs: list[Json], cluster: str, *, is_yaml: bool) -> None:
    """Print jobs, as the daemon's list has them with `KEYS` or all keys, in Slurm's shape."""
    if is_yaml:
        documents = [{**job_document(SlurmJob(job)), "cluster": cluster} for job in jobs]
        document = {"meta": meta(), "errors": [], "jobs": documents}
        sys.stdout.write("%YAML 1.1\n--- !!map\n" + "".join(f"{line}\n" for line in _map_lines(document)))
        return
    head = json.dumps({"meta": meta(), "errors": []}, indent=2)[:-2]
    templates = _Templates(cluster)
    sys.stdout.write(f'{head},\n  "jobs": ' + ("[\n" if jobs else "[]"))
    # In pieces, since a long queue makes tens of megabytes.
    for at in range(0, len(jobs), _AT_ONCE):
        some = [SlurmJob(row, templates.now) for row in jobs[at : at + _AT_ONCE]]
        own = zip(*[_texts(field.documents(some)) for field in _OWN.values()])  # noqa: B905
        listed = [template % texts for template, texts in zip(map(templates.of, some), own)]  # noqa: B905
        sys.stdout.write((",\n" if at else "") + ",\n".join(listed))
    sys.stdout.write("\n  ]\n}\n" if jobs else "\n}\n")


_encode = json.JSONEncoder(separators=("\n", ":")).encode


def _texts(values: list[Any]) -> list[str]:
    """The JSON of each of these scalars: encoded together, as a line break is in none of them."""
    return _encode(values)[1:-1].split("\n")


class _Templates:
    """Texts of jobs, as `json.dumps` writes them with an indent, with places for the values that each has of its own.

    That takes long, and a queue has thousands: jobs that are alike share one.
    """

    def __init__(self, cluster: str) -> None:
        self._cluster, self.now = cluster, time.time()
        self._own: tuple[str, ...] = ()
        self._others_of: Callable[[Json], Any] = itemgetter("id", "id")
        """The values of the keys in which jobs that are alike may differ, and that are not put in one by one."""

    def of(self, job: SlurmJob) -> str:
        alike = job.alike
        if alike is None:
            return self._template(job)
        if alike.own is not self._own:
            self._own = alike.own
            self._others_of = itemgetter("state", *(key for key in alike.own if key not in _OWN_KEYS))
        others = self._others_of(job.row)
        found: str | None = alike.known.get(others)
        if found is None:
            found = alike.known[others] = self._template(job)
        return found

    def _template(self, job: SlurmJob) -> str:
        document = {**job_document(job), "cluster": self._cluster, **dict.fromkeys(_OWN)}
        long = {key: value for key, value in document.items() if isinstance(value, (dict, list)) and value}
        texts = dict(zip(document, _texts([None if key in long else value for key, value in document.items()])))  # noqa: B905
        texts.update({key: json.dumps(value, indent=2).replace("\n", "\n      ") for key, value in long.items()})
        texts.update(dict.fromkeys(_OWN, _PLACE))
        lines = ",\n".join([f'      "{key}": {text}' for key, text in texts.items()])
        return f"    {{\n{lines}\n    }}".replace("%", "%%").replace(_PLACE, "%s")


_PLACE = "\0"


def job_document(job: SlurmJob) -> Json:
    """One job; texts that are not set are empty, times UTC epoch seconds or 0, the limit is in minutes."""
    row, per_cpu_mib = job.row, job.row["mem_per_cpu_mib"]
    return {
        **dict.fromkeys(_EMPTY_TEXTS, ""),
        **dict.fromkeys(_NULLS),
        **dict.fromkeys(_ZEROS, 0),
        **{field.json: field.documents([job])[0] for field in FIELDS if field.json},
        "array_job_id": int(row["array_id"] or 0),
        "array_task_id": row["task"],
        "array_max_tasks": row["throttle"] or 0,
        "array_task_string": job.tasks_left,
        "flags": [],
        "billable_tres": float(job.total_cpus),
        "cpus_per_task": job.cpus_per_task if row["cpus_per_task"] else None,
        "gres_detail": _gres_detail(row) if job.nodes and row["state"] in ACTIVE else [],
        "job_resources": _resources(job) if job.nodes else {},
        "nice": row["nice"] or None,
        "memory_per_node": None if per_cpu_mib else job.least_mib,
        "memory_per_cpu": per_cpu_mib,
        "pre_sus_time": whole(row["suspended_s"] or 0),
        "reboot": False,
        "show_flags": ["SHOW_ALL", "SHOW_DETAIL", "SHOW_LOCAL"],
        "suspend_time": int(row["suspended_at"] or 0),
        "tres_alloc_str": "" if job.is_pending else job.tres,
    }


def _gres_detail(row: Json) -> list[str]:
    """Of each node with GPUs of the job, `gpu:2(IDX:0,1)`."""
    indices: dict[str, list[str]] = {}
    for gpu in row["gpus"]:
        indices.setdefault(gpu["node"], []).append(str(gpu["index"]))
    kind = f"{row['gpu_type']}:" if row["gpu_type"] else ""
    return [f"gpu:{kind}{len(those)}(IDX:{','.join(those)})" for those in indices.values()]


def _resources(job: SlurmJob) -> Json:
    amounts = {"cpus_used": 0, "memory_used": 0, "memory_allocated": job.row["mem_mib"] or 0}
    return {
        "nodes": job.nodes,
        "allocated_cpus": job.total_cpus,
        "allocated_hosts": int(job.row["nodes"]),
        "allocated_nodes": [{"sockets": {}, "nodename": name, **amounts} for name in expand(job.nodes)],
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
