"""Documents of --json in the form of Slurm's OpenAPI v0.0.38."""

from __future__ import annotations

from gpusched import quickjson
from gpusched.addons.slurm.command import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpusched.addons.slurm.nodes import Node, Partition

    Json = dict[str, Any]


def meta(plugin: str = "") -> Json:
    """What each document says of the release whose form it has. Args: plugin: `db` for documents of accounting."""
    release = VERSION.split()[1]
    major, minor, micro = map(int, release.split("."))
    name = f"Slurm OpenAPI {plugin.upper()} v0.0.38".replace("  ", " ")
    return {
        "plugin": {"type": f"openapi/{plugin}v0.0.38", "name": name},
        "Slurm": {"version": {"major": major, "micro": micro, "minor": minor}, "release": release},
    }


def document(**content: Any) -> str:
    """A document with Slurm's `meta` and `errors` before its content."""
    return quickjson.dumps({"meta": meta(), "errors": [], **content}) + "\n"


def nodes_document(nodes: Sequence[Node], partitions: Sequence[Partition]) -> str:
    """`sinfo --json`."""
    return document(nodes=[_node(node, partitions) for node in nodes])


def _node(node: Node, partitions: Sequence[Partition]) -> Json:
    here = node.json
    state = {"draining": "mixed", "drained": "idle", "maint": "idle", "reserved": "idle"}.get(node.state, node.state)
    features = ",".join(here["labels"])
    gres = "" if node.gres == "(null)" else node.gres
    return {
        "architecture": here["architecture"],
        "boards": 1,
        "boot_time": here["boot_at"] or 0,
        "comment": "",
        "cores": 1,
        "cpu_load": round(here["load_average"] * 100),
        "free_memory": here["mem_available_mib"],
        "cpus": node.cpus,
        "features": features,
        "active_features": features,
        "gres": gres,
        "gres_drained": "N/A",
        "gres_used": "" if node.gres_used == "(null)" else node.gres_used,
        "mcs_label": "",
        "name": node.name,
        "address": node.name,
        "hostname": node.name,
        "state": state,
        "state_flags": ["DRAIN"] if node.is_drained else [],
        "operating_system": here["system"],
        "owner": None,
        "partitions": [one.name for one in partitions if node in one.nodes],
        "real_memory": node.mem_mib,
        "reason": node.reason or "",
        "reason_changed_at": int(here["drained_at"] or 0),
        "reason_set_by_user": here["drained_by"],
        "sockets": node.cpus,
        "threads": 1,
        "temporary_disk": 0,
        "weight": 1,
        "tres": node.configured,
        "slurmd_version": VERSION.split()[1],
        "alloc_memory": node.mem_alloc_mib,
        "alloc_cpus": node.cpus_alloc,
        "idle_cpus": node.cpus - node.cpus_alloc,
        "tres_used": node.allocated or None,
    }
