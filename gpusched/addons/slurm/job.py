"""One job as Slurm's commands see it: a row of the daemon's list, and what each output of them derives from it."""

from __future__ import annotations

import time

from gpusched.addons.slurm.nodes import tres, whole
from gpusched.addons.slurm.values import NORMAL_QOS, bare_tasks, first_node, slurm_reason
from gpusched.model.state_names import ACTIVE
from gpusched.model.units import printable, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Json = dict[str, Any]

_MOST_PRIORITY = 4_294_967_294
_FAILED = ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "NODE_FAIL")
_OPEN, _HOPELESS = "(unfulfilled)", "(failed)"


class Alike:
    """What rows of jobs that are alike have in common.

    Args: row: its values by key. own: keys in which they differ.
    """

    __slots__ = ("known", "own", "row")

    def __init__(self, row: Json, own: tuple[str, ...]) -> None:
        self.row = row
        self.own = own
        self.known: dict[object, Any] = {}
        """What was worked out from it so far."""


class SharedRow(dict):  # type: ignore[type-arg]
    """A row of /v1/jobs of a job that may be like others."""

    __slots__ = ("alike",)
    alike: Alike


def shared_rows(answer: Json) -> list[Json]:
    """The rows of an answer of /v1/jobs to `shared=1`."""
    common, own = answer["shared_fields"], tuple(answer["fields"])
    # The keyword of zip that 3.10 has costs time.
    known = [Alike(dict(zip(common, values)), own) for values in answer["shared"]]  # noqa: B905
    rows: list[Json] = []
    for number, *values in answer["rows"]:
        alike = known[number]
        row = SharedRow(alike.row)
        row.update(zip(own, values))  # noqa: B905
        row.alike = alike
        rows.append(row)
    return rows


class SlurmJob:
    """A row of /v1/jobs or /v1/history, of which each property reads no more keys than it needs.

    Args:
        now: UTC epoch seconds.
        expected: of /v1/starts, when and where a pending job is expected to start.
    """

    __slots__ = ("expected", "now", "row")

    def __init__(self, row: Json, now: float | None = None, expected: Json | None = None) -> None:
        self.row = row
        self.now = time.time() if now is None else now
        self.expected = expected or {}

    def __getitem__(self, key: str) -> Any:
        return self.row[key]

    def get(self, key: str) -> Any:
        """A key that was not always asked for; None if it is not there."""
        return self.row.get(key)

    @property
    def alike(self) -> Alike | None:
        """What its row has in common with others; None for a job that is treated by itself."""
        return None if self.expected else getattr(self.row, "alike", None)

    # --- what it is ---------------------------------------------------------------------------------

    @property
    def is_pending(self) -> bool:
        return bool(self.row["state"] == "PENDING")

    @property
    def shown_id(self) -> str:
        """`42`, `42_7`, `42_[1-10%2]`."""
        return f"{self.row['id']}_[{self.tasks_left}]" if self.row["tasks_left"] else str(self.row["id"])

    @property
    def numeric_id(self) -> int:
        """Its own id, which a task has, too; a task that has not started yet shares its array's, as in Slurm."""
        row = self.row
        is_part = row["task"] is not None and self.is_pending and not row["run"]
        return int(row["array_id"] if is_part else row["job_id"])

    @property
    def order_of_id(self) -> tuple[int, int]:
        return order_of_id(self.row["id"])

    @property
    def tasks_left(self) -> str:
        """The tasks of an array that have not started, `1-10%2`; empty for any other job."""
        if not self.row["tasks_left"]:
            return ""
        limit = self.row["throttle"]
        return bare_tasks(self.row["tasks_left"]) + (f"%{limit}" if limit else "")

    @property
    def qos(self) -> str:
        return self.row["qos"] or NORMAL_QOS

    @property
    def group(self) -> tuple[int | None, str]:
        """Number and name of the primary group of its user; None and empty for a user who is gone."""
        return group_of(self.row["uid"])

    @property
    def command(self) -> str:
        """Its command, a script by its whole path; empty for text that has no file."""
        command, path = self.row["command"], self.row["script_path"]
        if path:
            name = path.rpartition("/")[2]
            for written in (name, "'" + name.replace("'", "'\"'\"'") + "'"):
                if f"{command} ".startswith(f"{written} "):
                    return str(path + command[len(written) :])
            return str(path)
        return "" if command.partition(" ")[0] in ("wrap", "stdin") else str(command)

    @property
    def admin_comment(self) -> str | None:
        """Its id in the Slurm that it was handed over to, in words."""
        return f"Slurm job {self.row['native_id']}" if self.row.get("native_id") else None

    @property
    def licenses(self) -> str:
        return ",".join(f"{name}:{number}" for name, number in self.row["licenses"].items())

    # --- how it stands ------------------------------------------------------------------------------

    @property
    def reason(self) -> str:
        """Slurm's word, or several with commas; tools expect one for every job that failed."""
        found = ",".join(map(slurm_reason, (self.row["reason"] or "None").split(",")))
        return "NonZeroExitCode" if found == "None" and self.row["state"] in _FAILED else found

    @property
    def priority(self) -> int:
        """A whole number as Slurm's; 0 of a job that is held or never started."""
        if self.row["hold"] or self.row["priority"] is None:
            return 0
        return max(1, min(_MOST_PRIORITY, round(float(self.row["priority"]))))

    @property
    def restarts(self) -> int:
        """How often it was started again, or will be."""
        # One that is handed over is pending with its run.
        waits = self.is_pending and self.row["reason"] != "HandedOver"
        return int(self.row["run"]) if waits else max(0, int(self.row["run"]) - 1)

    @property
    def exit_status(self) -> str:
        """`code:signal`."""
        return f"{self.row['exit_code'] or 0}:{self.row['signal'] or 0}"

    def dependency(self, states: Mapping[str, str]) -> str:
        """The conditions that are not satisfied, each with its standing: `afterok:25(unfulfilled)`.

        Args: states: of the jobs that it depends on, by id; the condition on an unknown one is kept.
        """
        row = self.row
        is_hopeless = row["reason"] == "DependencyNeverSatisfied"
        if not row["dependency"] or not (self.is_pending or is_hopeless):
            return ""
        words = []
        for group in row["dependency"].replace("?", ",?").split(","):
            mark, term = ("?", group[1:]) if group[:1] == "?" else (",", group)
            kind, colon, ids = term.partition(":")
            if not colon:
                words.append(f"{mark}{term}{_HOPELESS if is_hopeless else _OPEN}")
                continue
            for one in split_ids(ids.replace(":", ",")):
                standing = _standing(kind, states.get(one.partition("+")[0]))
                if standing == _OPEN and is_hopeless and states.get(one) is None:
                    standing = _HOPELESS
                if standing is not None:
                    words.append(f"{mark}{kind}:{one}{standing}")
        return "".join(words)[1:]

    # --- times --------------------------------------------------------------------------------------

    @property
    def limit_s(self) -> float | None:
        """The time limit as Slurm shows it, rounded up to whole minutes."""
        limit = self.row["time_limit_s"]
        return None if limit is None else -(-limit // 60) * 60

    @property
    def run_time_s(self) -> float:
        """Seconds that the last run has taken, without those suspended."""
        row = self.row
        if row["start_at"] is None or row["state"] == "PENDING":
            return 0.0
        until: float = row["end_at"] or row["suspended_at"] or self.now
        return max(0.0, until - float(row["start_at"]) - float(row["suspended_s"] or 0))

    @property
    def left_s(self) -> float | None:
        """Seconds until its time limit, below 0 beyond it; None without one."""
        return None if self.limit_s is None else self.limit_s - int(self.run_time_s)

    @property
    def waited_s(self) -> float:
        """From its submission until it started, or until now."""
        started = self.row["start_at"]
        return max(0.0, (self.now if started is None or self.is_pending else started) - float(self.row["submit_at"]))

    @property
    def start_at(self) -> float | None:
        """When it started or is expected to, as far as is known."""
        row = self.row
        found: float | None = row["start_at"] or row["end_at"]
        if self.is_pending:
            found = expected_at(self.expected) if self.expected else None
            if found is None and row["eligible_at"] is not None and row["eligible_at"] > self.now:
                found = row["eligible_at"]
        return found

    @property
    def end_at(self) -> float | None:
        """When it ended, or will at its limit."""
        if self.row["end_at"] is not None:
            return float(self.row["end_at"])
        started, limit = self.start_at, self.limit_s
        return None if started is None or limit is None else started + float(self.row["suspended_s"] or 0) + limit

    # --- where, and with what -----------------------------------------------------------------------

    @property
    def nodes(self) -> str:
        """The nodes that it has or had, folded; empty while it waits."""
        return "" if self.is_pending else self.row["node"] or ""

    @property
    def batch_host(self) -> str:
        return first_node(self.nodes)

    @property
    def cpus(self) -> int:
        """Whole cores on each node; a job that books none still runs on one."""
        return max(1, whole(self.row["cpus"]))

    @property
    def total_cpus(self) -> int:
        """Whole cores on all nodes together."""
        nodes, total = int(self.row["nodes"]), self.row["total_cpus"]
        return self.cpus * nodes if total == self.row["cpus"] * nodes else max(nodes, whole(total))

    @property
    def least_mib(self) -> int | None:
        """Memory of each core or, if that was not stated, of each node."""
        return self.row["mem_per_cpu_mib"] or self.row["mem_mib"] or None

    @property
    def cpus_per_task(self) -> int:
        """Whole cores of each task."""
        row = self.row
        stated = row["cpus_per_task"]
        tasks = max(1, -(-(row.get("num_tasks") or row.get("ntasks") or row["nodes"]) // row["nodes"]))
        return max(1, whole(stated) if stated else self.cpus // int(tasks))

    @property
    def total_gpus(self) -> int:
        """GPUs on all nodes together; a part of a card counts as one."""
        return len(self.row["gpus"]) if self.row["gpus"] and not self.is_pending else int(self.row["total_gpus"])

    @property
    def tres(self) -> str:
        """Trackable resources on all nodes together."""
        cpus = self.total_cpus
        return tres(cpus, self.row["total_mem_mib"], self.total_gpus, nodes=int(self.row["nodes"]), billing=cpus)

    @property
    def gres(self) -> str:
        """`gres:gpu:a100:2`, what each node is asked for; empty without GPUs, or if only their total was asked for."""
        row = self.row
        is_even = not row["nodes_max"] and row["total_gpus"] == row["gpus_per_node"] * row["nodes"]
        return self.gres_of(row["gpus_per_node"]) if row["gpus_per_node"] and is_even else ""

    def gres_of(self, count: int) -> str:
        """So many GPUs of the type asked for."""
        kind = self.row["gpu_type"]
        return f"gres:gpu:{printable(kind) + ':' if kind else ''}{count}"


def order_of_id(text: str) -> tuple[int, int]:
    """What ids are sorted by."""
    array, _, task = text.partition("_")
    return int(array), int(task or -1)


_groups: dict[int, tuple[int | None, str]] = {}


def group_of(uid: int) -> tuple[int | None, str]:
    """Number and name of a user's primary group; None and empty for a user who is gone."""
    if uid not in _groups:
        import grp
        import pwd

        gid: int | None = None
        name = ""
        try:
            gid = pwd.getpwuid(uid).pw_gid
            name = str(gid)
            name = grp.getgrgid(gid).gr_name
        except (KeyError, OverflowError):
            pass
        _groups[uid] = gid, name
    return _groups[uid]


def expected_at(start: Json) -> float | None:
    """When a job starts at the latest, of an entry of /v1/starts; the earliest instant if there is no latest."""
    found: float | None = start["start_high_at"]
    return start["start_low_at"] if found is None else found


def _standing(kind: str, state: str | None) -> str | None:
    """Standing of a condition on a job; None if it is fulfilled."""
    if state is None or state == "PENDING":
        return _OPEN
    if kind == "after":
        return None
    if state in ACTIVE:
        return _OPEN
    if kind in ("afterok", "aftercorr"):
        return None if state == "COMPLETED" else _HOPELESS
    if kind == "afternotok":
        return _HOPELESS if state == "COMPLETED" else None
    return None
