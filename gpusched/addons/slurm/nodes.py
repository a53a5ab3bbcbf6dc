"""Nodes and partitions as Slurm shows them, from the answer of /v1/cluster. A queue that takes jobs is a partition."""

from __future__ import annotations

from gpusched.addons.slurm.values import memory
from gpusched.model.units import printable, ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Json = dict[str, Any]

SHORT_STATES = {
    "idle": "idle",
    "mixed": "mix",
    "allocated": "alloc",
    "draining": "drng",
    "drained": "drain",
    "reserved": "resv",
    "maint": "maint",
    "down": "down",
}
"""sinfo's abbreviations of the states of our nodes."""


class Node:
    """One node: what it has, what is booked, and its GPUs."""

    def __init__(self, node: Json, cluster: Json) -> None:
        self.json = node
        self.name: str = node["name"]
        self.cluster: str = cluster["cluster_name"]
        self.gpus: list[Json] = [gpu for gpu in cluster["gpus"] if gpu["node"] == self.name]
        self.cpus = max(1, int(node["cpus"]))
        self.cpus_alloc = min(self.cpus, whole(node["cpus_booked"]))
        self.mem_mib = int(node["mem_mib"])
        self.mem_alloc_mib = int(node["mem_booked_mib"])
        self.is_drained: bool = node["state"] == "drained"
        self.is_down: bool = node["state"] not in ("up", "drained")
        here = [
            one
            for one in cluster["reservations"]
            if one["is_active"] and any(place["node"] == self.name and place["is_node"] for place in one["held"])
        ]
        self.is_in_maintenance = any(one["is_maintenance"] for one in here)
        self.is_reserved = bool(here)
        self.reservation: str | None = here[0]["name"] if here else None

    @property
    def is_busy(self) -> bool:
        """Whether any job runs there."""
        return bool(self.json["is_busy"])

    @property
    def state(self) -> str:
        """One of `SHORT_STATES`."""
        if self.is_down:
            return "down"
        if self.is_drained:
            return "draining" if self.is_busy else "drained"
        if self.is_in_maintenance:
            return "maint"
        if self.is_busy:
            return self._use
        return "reserved" if self.is_reserved else "idle"

    @property
    def _use(self) -> str:
        return "allocated" if self.cpus_alloc >= self.cpus else "mixed"

    @property
    def long_state(self) -> str:
        """`MIXED+DRAIN`, as scontrol prints it."""
        if self.is_down:
            return "DOWN"
        words = [self._use if self.is_busy else "idle"]
        words += ["drain"] if self.is_drained else []
        words += ["maintenance"] if self.is_in_maintenance else ["reserved"] if self.is_reserved else []
        return "+".join(words).upper()

    @property
    def cpu_counts(self) -> tuple[int, int, int, int]:
        """Cores allocated, idle, in another state, in total."""
        free = self.cpus - self.cpus_alloc
        is_usable = not (self.is_drained or self.is_down)
        return self.cpus_alloc, free if is_usable else 0, 0 if is_usable else free, self.cpus

    @property
    def features(self) -> str:
        return ",".join(self.json["labels"]) or "(null)"

    @property
    def reason(self) -> str | None:
        """Why it is drained."""
        text = self.json["message"] or self.json["why_not"]
        return printable(text) if text else None

    @property
    def gres(self) -> str:
        """`gpu:a100:4`, several types joined by commas; `(null)` without any."""
        counts: dict[str, int] = {}
        for gpu in self.gpus:
            kind = gpu_type(gpu)
            counts[kind] = counts.get(kind, 0) + 1
        words = [f"gpu:{kind}:{count}" for kind, count in counts.items()]
        words += [f"{name}:{number}" for name, number in self.json["resources"].items()]
        return ",".join(words) or "(null)"

    @property
    def gres_used(self) -> str:
        """`gpu:a100:2(IDX:0-1)`."""
        used: dict[str, list[int]] = {gpu_type(gpu): [] for gpu in self.gpus}
        for gpu in self.used_gpus:
            used[gpu_type(gpu)].append(gpu["index"])
        words = [f"gpu:{kind}:{len(indices)}(IDX:{ranges(indices) or 'N/A'})" for kind, indices in used.items()]
        return ",".join(words) or "(null)"

    @property
    def used_gpus(self) -> list[Json]:
        """The GPUs that jobs hold, wholly or in part."""
        return [gpu for gpu in self.gpus if gpu["jobs"] or gpu["state"] in ("allocated", "mixed", "draining")]

    @property
    def configured(self) -> str:
        """What it has, as trackable resources."""
        return tres(self.cpus, self.mem_mib, len(self.gpus), billing=self.cpus)

    @property
    def allocated(self) -> str:
        """What is booked, as trackable resources; empty if nothing is."""
        return tres(self.cpus_alloc, self.mem_alloc_mib, len(self.used_gpus)) if self.is_busy else ""


class Partition:
    """One queue that takes jobs, with the nodes it may use."""

    def __init__(self, queue: Json, nodes: Sequence[Node]) -> None:
        self.json = queue
        self.name: str = queue["name"]
        self.is_default: bool = queue["is_default"]
        # A daemon not restarted since an upgrade does not tell.
        self.state = "down" if queue.get("state") == "paused" else "up"
        """Slurm's word: `down` accepts jobs and starts none."""
        self.nodes = nodes
        self.default_time_s: float | None = queue["default_time_s"]
        self.max_time_s: float | None = queue["max_time_s"]

    @property
    def starred(self) -> str:
        """The name, with an asterisk for the default one."""
        return printable(self.name) + ("*" if self.is_default else "")

    @property
    def configured(self) -> str:
        return tres(
            sum(node.cpus for node in self.nodes),
            sum(node.mem_mib for node in self.nodes),
            sum(len(node.gpus) for node in self.nodes),
            nodes=len(self.nodes),
            billing=sum(node.cpus for node in self.nodes),
        )


def read_cluster(cluster: Json) -> tuple[list[Node], list[Partition]]:
    """The nodes and partitions in an answer of /v1/cluster, partitions in the order of the config file."""
    nodes = [Node(node, cluster) for node in cluster["nodes"]]
    leaves = [queue for queue in cluster["queues"] if queue["is_leaf"]]
    # Those that are not configured are at the end.
    leaves.sort(key=lambda queue: float("inf") if queue["position"] is None else queue["position"])
    return nodes, [Partition(queue, nodes) for queue in leaves]


def whole(cores: float) -> int:
    """Whole cores that hold a part of one."""
    return int(-(-cores // 1))


def gpu_type(gpu: Json) -> str:
    """The model as `--gres=gpu:TYPE:N` takes it, `a100-sxm4-80gb`, `geforce_rtx_3090`; of MIG its profile."""
    name = gpu["mig_profile"] or gpu["name"].lower().removeprefix("nvidia ")
    # Blanks become what Slurm's own detection makes of them.
    return "".join(char if char.isalnum() or char in "._-" else "_" for char in printable(name).strip()) or "gpu"


def tres(cpus: int, mem_mib: float, gpus: float, *, nodes: int = 0, billing: int = 0) -> str:
    """Trackable resources, `cpu=8,mem=24105M,node=1,billing=8,gres/gpu=4`, without those of which there are none."""
    words = [f"cpu={cpus}"] if cpus else []
    words += [f"mem={memory(mem_mib)}"] if mem_mib else []
    words += [f"node={nodes}"] if nodes else []
    words += [f"billing={billing}"] if billing else []
    words += [f"gres/gpu={whole(gpus)}"] if gpus else []
    return ",".join(words)
