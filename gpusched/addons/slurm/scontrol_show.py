"""`scontrol show`: jobs, nodes, partitions, reservations, steps, settings and host lists."""

from __future__ import annotations

import os
import sys
import time

from gpusched.addons.slurm.command import VERSION, CommandError
from gpusched.addons.slurm.values import (
    INVALID_ID,
    MIN_JOB_AGE_S,
    NULL,
    instant,
    is_job_id,
    job_words,
    long_duration,
    state_of_row,
)
from gpusched.cli.query import quote
from gpusched.errors import NotFound, Refused, UserError
from gpusched.model import hostlist
from gpusched.model.units import printable
from gpusched.paths import MAX_TEXT, read_at_most

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpusched.addons.slurm.nodes import Node, Partition
    from gpusched.addons.slurm.scontrol import ControlLine
    from gpusched.addons.slurm.scontrol_job import JobSurroundings

    Json = dict[str, Any]

_UNLIMITED = "UNLIMITED"


def show(line: ControlLine, texts: list[str]) -> int:
    """`show ENTITY [NAME]`, also as `show ENTITY=NAME`; returns the exit code."""
    entity, equals, value = texts[0].partition("=")
    names = [value, *texts[1:]] if equals else texts[1:]
    word = entity.lower()
    act = _ENTITIES.get(word) or next(
        (found for name, found in _ENTITIES.items() if len(word) > 1 and name.startswith(word)), None
    )
    if act is None:
        if word in _NOT_SHOWN:
            raise CommandError(f"scontrol: error: show {printable(entity)} is not supported")
        raise CommandError(f"invalid entity:{printable(entity)} for keyword:show ")
    if len(names) > 1 and act is not _jobs:
        raise CommandError("too many arguments for keyword:show")
    if (line.is_json and act not in (_jobs, _nodes)) or (line.is_yaml and act is not _jobs):
        raise CommandError(f"scontrol: error: show {printable(entity)} has no JSON form")
    return act(line, names)


# --- host lists -----------------------------------------------------------------------------------


def _hostnames(line: ControlLine, names: list[str]) -> int:
    text = names[0] if names else os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST")
    if text is None:
        line.complain("scontrol: error: no host list given, and SLURM_JOB_NODELIST is not set")
        return 1
    try:
        found = hostlist.expand_all(text)
    except ValueError as error:
        line.complain(f"Invalid hostlist: {text}")
        if line.is_verbose:
            line.complain(f"scontrol: {error}")
        return 1
    sys.stdout.write("".join(f"{printable(name)}\n" for name in found))
    return 0


def _hostlist(line: ControlLine, names: list[str], is_sorted: bool = False) -> int:
    """Fold the names in an argument, or in a file with a name each line."""
    if not names:
        raise CommandError("too few arguments for keyword:show hostlist")
    text = names[0]
    try:
        if text == "-" or text.startswith("/"):
            # As Slurm: a path is a file with names.
            with open(0 if text == "-" else text, "rb") as file:
                content = read_at_most(file, MAX_TEXT, "standard input" if text == "-" else printable(text), "")
            text = ",".join(content.decode("utf-8", "replace").split())
        found = hostlist.expand_all(text)
    except OSError as error:
        raise CommandError(f"scontrol: error: {printable(text)}: {error.strerror}") from None
    except Refused as error:
        raise CommandError(f"scontrol: error: {error.message}") from None
    except ValueError:
        line.complain(f"Invalid hostlist: {text}")
        return 1
    if is_sorted:
        found.sort(key=_by_number)
    sys.stdout.write(f"{printable(hostlist.fold(found))}\n")
    return 0


def _by_number(name: str) -> tuple[str, int, int]:
    begin = name.rstrip("0123456789")
    digits = name[len(begin) :]
    return begin, len(digits) if digits.startswith("0") else 0, int(digits[:18] or 0)


def _hostlist_sorted(line: ControlLine, names: list[str]) -> int:
    return _hostlist(line, names, is_sorted=True)


# --- jobs -----------------------------------------------------------------------------------------


def _jobs(line: ControlLine, names: list[str]) -> int:
    from gpusched.addons.slurm import scontrol_job

    words = job_words(names)
    if any(not is_job_id(word) for word in words):
        raise CommandError("" if line.is_quiet else f"scontrol_print_job error: {INVALID_ID}")
    # With states, an array is listed with its tasks.
    which = f"ids={quote(','.join(words))}" if words else f"since={int(time.time() - MIN_JOB_AGE_S)}"
    query = f"states=all&{which}"
    has_document = line.is_json or line.is_yaml
    fields = "" if has_document else f"&fields={','.join([*scontrol_job.JOB_KEYS, 'depends_on'])}"
    try:
        answer = line.client.call("GET", f"/v1/jobs?{query}{fields}")
    except UserError as error:
        line.explain(error)
        raise CommandError("" if line.is_quiet else f"slurm_load_jobs error: {INVALID_ID}") from None
    found = answer["jobs"] if has_document else [dict(zip(answer["fields"], row)) for row in answer["rows"]]  # noqa: B905
    # The row of an array whose tasks have all been started represents none of them.
    jobs = [{**job, "state": state_of_row(job)} for job in found if job["task"] is not None or job["tasks_left"] != ""]
    missing = bool(answer.get("missing"))
    if missing:
        line.complain(f"slurm_load_jobs error: {INVALID_ID}")
    if has_document:
        from gpusched.addons.slurm.squeue_json import print_document

        print_document(jobs, line.client.call("GET", "/v1/cluster")["cluster_name"], is_yaml=line.is_yaml)
        return int(missing)
    if not jobs and not missing:
        sys.stdout.write("No jobs in the system\n")
    now = time.time()
    around = _surroundings(line, jobs, query, now)
    for job in jobs:
        lines = scontrol_job.job_lines(job, around, is_detailed=line.is_detailed, now=now)
        sys.stdout.write(scontrol_job.block(lines, is_one_line=line.is_one_line))
    return int(missing)


_MOST_PARENTS = 1000


def _surroundings(line: ControlLine, jobs: list[Json], query: str, now: float) -> JobSurroundings:
    """Ask for what these jobs' documents do not hold, as far as it is shown."""
    from gpusched.addons.slurm.scontrol_job import JobSurroundings, gpu_kinds

    client = line.client
    parents = dict.fromkeys(one for job in jobs if job["dependency"] for one in job["depends_on"])
    states: dict[str, str] = {}
    if parents:
        ids = quote(",".join(list(parents)[:_MOST_PARENTS]))
        try:
            states = dict(client.call("GET", f"/v1/jobs?fields=id,state&ids={ids}")["rows"])
        except NotFound:
            pass  # the only one is gone
    starts = _starts(line, jobs, query, now)
    if not line.is_detailed:
        return JobSurroundings(states, starts=starts)
    derived: dict[str, int] = {}
    for step in client.call("GET", f"/v1/steps?{query}")["steps"]:
        derived[step["job"]] = max(derived.get(step["job"], 0), step["exit_code"] or 0)
    has_gpus = any(job["gpus"] for job in jobs)
    kinds = gpu_kinds(client.call("GET", "/v1/cluster")) if has_gpus else {}
    return JobSurroundings(states, kinds, derived, starts)


def _starts(line: ControlLine, jobs: list[Json], query: str, now: float) -> dict[str, Json]:
    """When and where the pending jobs among these are expected to start, as `squeue --start` prints it, if known."""
    from gpusched.addons.slurm.scontrol_job import may_start

    if not any(may_start(job, now) for job in jobs):
        return {}
    try:
        starts = line.client.call("GET", f"/v1/starts?{query}")["starts"]
    except UserError:
        return {}  # started or gone meanwhile, or one forecast too many at once
    return {start["id"]: start for start in starts}


# --- nodes and partitions -------------------------------------------------------------------------


def _nodes(line: ControlLine, names: list[str]) -> int:
    from gpusched.addons.slurm.nodes import read_cluster

    cluster = line.client.call("GET", "/v1/cluster")
    nodes, partitions = read_cluster(cluster)
    status = line.client.call("GET", "/v1/status")["daemon"]
    try:
        wanted = hostlist.expand(names[0]) if names else [node.name for node in nodes]
    except ValueError:
        wanted = names[:1]
    by_name = {node.name: node for node in nodes}
    if line.is_json:
        from gpusched.addons.slurm.documents import nodes_document

        sys.stdout.write(nodes_document([by_name[name] for name in wanted if name in by_name], partitions))
        return int(any(name not in by_name for name in wanted))
    code = 0
    for name in wanted:
        if name not in by_name:
            sys.stdout.write("" if line.is_quiet else f"Node {printable(name)} not found\n")
            code = 1
            continue
        lines = _node_lines(by_name[name], partitions, status, is_detailed=line.is_detailed)
        text = " ".join(line.strip() for line in lines) + "\n" if line.is_one_line else ""
        sys.stdout.write(text or "\n   ".join(lines) + "\n\n")
    return code


def _node_lines(node: Node, partitions: list[Partition], status: Json, *, is_detailed: bool) -> list[str]:
    here = node.json
    names = ",".join(printable(one.name) for one in partitions if node in one.nodes)
    lines = [
        f"NodeName={node.name} Arch={here['architecture']} CoresPerSocket=1 ",
        f"CPUAlloc={node.cpus_alloc} CPUEfctv={node.cpus} CPUTot={node.cpus} CPULoad={here['load_average']:.2f}",
        f"AvailableFeatures={node.features}",
        f"ActiveFeatures={node.features}",
        f"Gres={node.gres}",
    ]
    if is_detailed:
        lines += ["GresDrain=N/A", f"GresUsed={node.gres_used}"]
    lines += [
        f"NodeAddr={node.name} NodeHostName={node.name} Version={VERSION.split()[1]}",
        f"OS={printable(here['system'])} ",
        f"RealMemory={node.mem_mib} AllocMem={node.mem_alloc_mib} FreeMem={here['mem_available_mib']} "
        f"Sockets={node.cpus} Boards=1",
        f"State={node.long_state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A",
        f"Partitions={names} ",
        f"BootTime={instant(here['boot_at'], 'None')} SlurmdStartTime={instant(status['started_at'], 'None')}",
        "LastBusyTime=Unknown",
        f"CfgTRES={node.configured}",
        f"AllocTRES={node.allocated}",
        "CapWatts=n/a",
        "CurrentWatts=0 AveWatts=0",
        "ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s",
    ]
    if node.reason:
        who = f" [{here['drained_by']}@{instant(here['drained_at'])}]" if here["drained_by"] else ""
        lines.append(f"Reason={node.reason}{who}")
    return lines


def _partitions(line: ControlLine, names: list[str]) -> int:
    from gpusched.addons.slurm.nodes import read_cluster

    _, partitions = read_cluster(line.client.call("GET", "/v1/cluster"))
    wanted = [one for one in partitions if not names or one.name == names[0]]
    if names and not wanted:
        sys.stdout.write("" if line.is_quiet else f"Partition {printable(names[0])} not found\n")
        return 1
    for one in wanted:
        lines = _partition_lines(one)
        text = " ".join(lines) + "\n" if line.is_one_line else "\n   ".join(lines) + "\n\n"
        sys.stdout.write(text)
    return 0


def _partition_lines(one: Partition) -> list[str]:
    default = "NONE" if one.default_time_s is None else long_duration(one.default_time_s)
    accounts = ",".join(printable(name) for name in one.json["accounts"]) or "ALL"
    return [
        f"PartitionName={printable(one.name)}",
        f"AllowGroups=ALL AllowAccounts={accounts} AllowQos=ALL",
        f"AllocNodes=ALL Default={'YES' if one.is_default else 'NO'} QoS=N/A",
        f"DefaultTime={default} DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO",
        f"MaxNodes=UNLIMITED MaxTime={long_duration(one.max_time_s)} MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED",
        f"Nodes={hostlist.fold(node.name for node in one.nodes) or NULL}",
        "PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO",
        f"OverTimeLimit=NONE PreemptMode={one.json['preempt_mode'].upper()}",
        f"State={one.state.upper()} TotalCPUs={sum(node.cpus for node in one.nodes)} TotalNodes={len(one.nodes)} "
        "SelectTypeParameters=NONE",
        f"JobDefaults={NULL}",
        "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED",
        f"TRES={one.configured}",
    ]


# --- reservations ---------------------------------------------------------------------------------


def _reservations(line: ControlLine, names: list[str]) -> int:
    from gpusched.addons.slurm.nodes import tres, whole

    found = line.client.call("GET", "/v1/reservations")["reservations"]
    shown = [one for one in found if not names or one["name"] == names[0]]
    if not shown:
        if names:
            sys.stdout.write("" if line.is_quiet else f"Reservation {printable(names[0])} not found\n")
            return 1
        sys.stdout.write("No reservations in the system\n")
    for one in shown:
        held, window = one["held"], one["next"]
        cpus = sum(whole(place["cpus"]) for place in held)
        gpus = sum(len(place["gpus"]) for place in held)
        flags = [word for word, is_so in (("MAINT", one["is_maintenance"]), ("SPEC_NODES", True)) if is_so]
        lines = [
            f"ReservationName={printable(one['name'])} StartTime={instant(window['start_at'])} "
            f"EndTime={instant(window['end_at'])} Duration={long_duration(window['end_at'] - window['start_at'])}",
            f"Nodes={hostlist.fold(place['node'] for place in held)} NodeCnt={len(held)} CoreCnt={cpus} "
            f"Features={NULL} PartitionName={NULL} Flags={','.join(flags)}",
            f"TRES={tres(cpus, 0, gpus)}",
            f"Users={_names(one['users'])} Groups={NULL} Accounts={_names(one['accounts'])} Licenses={NULL} "
            f"State={'ACTIVE' if one['is_active'] else 'INACTIVE'} BurstBuffer={NULL} Watts=n/a",
            f"MaxStartDelay={NULL}",
        ]
        text = " ".join(lines) + " \n" if line.is_one_line else "\n   ".join(lines) + "\n\n"
        sys.stdout.write(text)
    return 0


def _names(names: list[str]) -> str:
    return ",".join(printable(name) for name in names) or NULL


# --- settings -------------------------------------------------------------------------------------


def _config(line: ControlLine, _: list[str]) -> int:
    client = line.client
    daemon = client.call("GET", "/v1/status")["daemon"]
    priorities = client.call("GET", "/v1/priorities?limit=1")
    cluster = client.call("GET", "/v1/cluster")
    node, *others = cluster["nodes"]
    sys.stdout.write(f"Configuration data as of {instant(time.time())}\n")
    rows = _config_rows(daemon, cluster["cluster_name"], node, priorities, 1 + len(others))
    sys.stdout.write("".join(f"{key:<23} = {printable(str(value))}\n" for key, value in sorted(rows, key=_by_key)))
    sys.stdout.write(f"\nSlurmctld(primary) at {node['name']} is UP\n")
    return 0


def _by_key(row: tuple[str, object]) -> str:
    return row[0].lower()


def _config_rows(daemon: Json, cluster: str, node: Json, priorities: Json, nodes: int) -> list[tuple[str, object]]:
    """What Slurm's settings would be, had they the values in force here."""
    import pwd

    isolation, limits, weights = node["isolation"], daemon["limits"], priorities["weights"]
    is_limited = isolation["memory"] == "cgroup"
    order = "multifactor" if priorities["order"] == "multifactor" else priorities["order"]
    try:
        user = f"{daemon['user']}({pwd.getpwnam(daemon['user']).pw_uid})"
    except KeyError:
        user = daemon["user"]
    return [
        ("AccountingStorageTRES", "cpu,mem,energy,node,billing,gres/gpu"),
        ("AccountingStorageType", "accounting_storage/gpusched"),
        ("BOOT_TIME", instant(daemon["started_at"])),
        ("ClusterName", cluster),
        ("DefMemPerNode", _UNLIMITED),
        ("FirstJobId", 1),
        ("GresTypes", "gpu"),
        ("JobRequeue", 1),
        ("KillWait", f"{int(daemon['grace_s'])} sec"),
        ("MaxArraySize", limits["array"] + 1),
        ("MaxJobCount", limits["jobs"]),
        ("MaxMemPerNode", _UNLIMITED),
        ("MaxNodeCount", nodes),
        ("MinJobAge", f"{MIN_JOB_AGE_S} sec"),
        ("OverTimeLimit", "0 min"),
        ("PriorityType", f"priority/{order}"),
        ("PriorityWeightAge", int(weights.get("age", 0))),
        ("PriorityWeightAssoc", 0),
        ("PriorityWeightFairShare", int(weights.get("fairshare", 0))),
        ("PriorityWeightJobSize", int(weights.get("size", 0))),
        ("PriorityWeightPartition", int(weights.get("queue", 0))),
        ("PriorityWeightQOS", int(weights.get("qos", 0))),
        ("ProctrackType", "proctrack/cgroup" if is_limited else "proctrack/linuxproc"),
        ("SchedulerType", "sched/backfill"),
        ("SelectType", "select/cons_tres"),
        ("SelectTypeParameters", "CR_CPU_MEMORY"),
        ("SlurmUser", user),
        ("SlurmctldHost[0]", node["name"]),
        ("SlurmctldLogFile", daemon["log"]),
        ("SlurmdSpoolDir", daemon["spool"]),
        ("SLURM_CONF", daemon["config"]),
        ("SLURM_VERSION", VERSION.split()[1]),
        ("StateSaveLocation", daemon["home"]),
        ("TaskPlugin", "task/cgroup" if is_limited else "task/none"),
        ("TmpFS", "/tmp"),
    ]


def _steps(line: ControlLine, names: list[str]) -> int:
    from gpusched.addons.slurm.scontrol_steps import show_steps

    return show_steps(line, names)


def list_pids(line: ControlLine, texts: list[str]) -> int:
    """`listpids [ID[.STEP]]`: the processes of jobs on this node."""
    from gpusched.addons.slurm.scontrol_steps import list_pids as found

    return found(line, texts)


_ENTITIES: dict[str, Callable[[ControlLine, list[str]], int]] = {
    "jobs": _jobs,
    "jobid": _jobs,
    "nodes": _nodes,
    "partitions": _partitions,
    "reservations": _reservations,
    "steps": _steps,
    "config": _config,
    "hostnames": _hostnames,
    "hostlistsorted": _hostlist_sorted,
    "hostlist": _hostlist,
}
"""By plural; any beginning of two letters or more will do, so the commoner of two comes first."""
_NOT_SHOWN = (
    *("aliases", "assoc_mgr", "bbstat", "burstbuffer", "daemons", "dwstat", "federation", "frontend", "licenses"),
    *("slurmd", "topology"),
)
