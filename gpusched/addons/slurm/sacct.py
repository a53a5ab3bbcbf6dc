"""sacct: jobs and steps that ended, run or wait, one line each."""

from __future__ import annotations

import sys
import time

from gpusched.addons.slurm.accounting import BASE_KEYS, COLUMNS, AccountingRecord, AccountingView, records_of
from gpusched.addons.slurm.command import Command, Parsed, comma_list, portions, run
from gpusched.addons.slurm.format import AccountingColumn, choose_columns, helpformat, render_table
from gpusched.addons.slurm.job import group_of
from gpusched.addons.slurm.values import is_on, long_state
from gpusched.cli.query import quote
from gpusched.client import connect
from gpusched.errors import NotFound, UsageError, UserError
from gpusched.instants import parse_instant
from gpusched.model.state_names import ACTIVE
from gpusched.model.units import is_digits, printable, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

    from gpusched.client import DaemonConnection

    Json = dict[str, Any]

DEFAULT = "jobid,jobname,partition,account,alloccpus,state,exitcode"
_BRIEF = "jobid,state,exitcode"
_LONG = (
    "jobid,jobidraw,jobname,partition,maxvmsize,maxvmsizenode,maxvmsizetask,avevmsize,maxrss,maxrssnode,maxrsstask,"
    "averss,maxpages,maxpagesnode,maxpagestask,avepages,mincpu,mincpunode,mincputask,avecpu,ntasks,alloccpus,elapsed,"
    "state,exitcode,avecpufreq,reqcpufreqmin,reqcpufreqmax,reqcpufreqgov,reqmem,consumedenergy,maxdiskread,"
    "maxdiskreadnode,maxdiskreadtask,avediskread,maxdiskwrite,maxdiskwritenode,maxdiskwritetask,avediskwrite,reqtres,"
    "alloctres,tresusageinave,tresusageinmax,tresusageinmaxnode,tresusageinmaxtask,tresusageinmin,tresusageinminnode,"
    "tresusageinmintask,tresusageintot,tresusageoutmax,tresusageoutmaxnode,tresusageoutmaxtask,tresusageoutave,"
    "tresusageouttot"
)

COMMAND = Command(
    "sacct",
    "sacct [OPTIONS]",
    """
    -a --allusers  jobs of all users; the default for root
    -A --accounts --account LIST  jobs of these accounts
    -b --brief  job id, state and exit code only
    -B --batch-script  print the scripts of the jobs given with -j
    -c --completion  records of job completion; refused
    -C --constraints LIST  jobs that requested these features
    --delimiter TEXT  column separator of -p and -P
    -D --duplicates  all runs of jobs that ran several times
    -e --helpformat --helpfields  list all columns
    -E --endtime TIME  jobs that existed before this time
    --env-vars  print the environments of the jobs given with -j; refused
    --federation  accepted: there is one cluster
    -f --file FILE  read records from a file; refused
    -F --flags LIST  jobs with these scheduler flags; no job has any
    -g --gid --group LIST  jobs of users in these groups
    -h --help  show this help
    -i --nnodes MIN[-MAX]  jobs on MIN to MAX nodes
    -I --ncpus MIN[-MAX]  jobs with MIN to MAX CPUs
    -j --jobs LIST  these jobs and steps: 42, 42_7, 42.batch, 42.0
    --json  print a JSON document
    -k --timelimit-min TIME  jobs with this time limit, or with -K at least this one
    -K --timelimit-max TIME  with -k: jobs with at most this time limit
    -l --long  print many more columns
    -L --allclusters  accepted: there is one cluster
    --local  accepted: there is one cluster
    -M --clusters --cluster LIST  `all` or the name of this cluster
    --name LIST  jobs with these names
    -n --noheader  print no header
    --noconvert  do not convert units
    -N --nodelist --node LIST  jobs that ran on these nodes
    -o --format LIST  columns: NAME or NAME%WIDTH; see --helpformat
    -p --parsable  separate columns by |, with one at the end of the line
    -P --parsable2  separate columns by |
    -q --qos LIST  jobs with one of these QOS
    -r --partition LIST  jobs in these partitions, which are queues here
    -R --reason LIST  jobs that were pending for one of these reasons
    -s --state LIST  jobs in one of these states between -S and -E
    -S --starttime TIME  jobs that had not ended by this time
    -T --truncate  clip start times to -S and end times to -E
    -u --uid --user LIST  jobs of these users, by name or uid
    --units UNIT  print memory in K, M, G, T or P
    --use-local-uid  accepted: users are always those of this machine
    -v --verbose  accepted
    -W --wckeys LIST  jobs with these workload keys
    --whole-hetjob [yes|no]  accepted: there are no heterogeneous jobs
    -x --associations LIST  jobs of these associations; refused
    -X --allocations  print jobs only, without their scripts and steps
    --yaml  print a YAML document
    """,
    permutes=True,
    has_h=True,
)
_REFUSED = {
    "completion": "there is no separate job completion log; omit --completion",
    "env-vars": "job environments are not stored for display; run env in the job's script",
    "file": "records are available only from the scheduler; omit --file",
    "associations": "associations have no ids here; select with -A ACCOUNT and -u USER",
}
_WINDOW_OPEN = float("inf")


def main() -> int:
    return run(COMMAND, body)


def body(parsed: Parsed) -> int:
    """Print what the options ask for; returns the exit code."""
    for long, why in _REFUSED.items():
        if parsed.has(long):
            raise COMMAND.error(f"--{long}: {why}")
    if parsed.operands:
        raise COMMAND.error(
            f"Unknown arguments: {' '.join(printable(word, 40) for word in parsed.operands)}\n"
            "give jobs with -j, users with -u"
        )
    if parsed.has("helpformat"):
        sys.stdout.write(helpformat(COLUMNS.values()))
        return 0
    columns = choose_columns(COMMAND, _form(parsed), COLUMNS.values())
    wanted = SacctQuery(parsed, time.time())
    try:
        with connect() as client:
            wanted.check_names(client)
            if parsed.has("batch-script"):
                return _print_scripts(client, wanted)
            records = _found(client, wanted, columns, parsed)
    except UserError as error:
        raise COMMAND.error(printable(error.message, 400)) from None
    if parsed.has("json") or parsed.has("yaml"):
        from gpusched.addons.slurm.accounting_json import pieces  # rarely used

        # A JSON document is a YAML document.
        for piece in pieces(records):
            sys.stdout.write(piece)
        return 0
    sys.stdout.write(render_table(parsed, columns, records, parsed.get("delimiter", "|")))
    return 0


def _form(parsed: Parsed) -> str:
    for name, _ in reversed(parsed.options):
        if name == "format":
            return ",".join(parsed.all("format"))
        if name in ("long", "brief"):
            return _LONG if name == "long" else _BRIEF
    import os

    return os.environ.get("SACCT_FORMAT") or DEFAULT


def read_job_words(command: Command, words: Iterable[str]) -> dict[str, set[str]]:
    """Jobs and steps of -j: for each id the names of its steps, `""` for the whole job. Raises: CommandError."""
    found: dict[str, set[str]] = {}
    for word in filter(None, map(str.strip, words)):
        job_id, _, step = word.partition(".")
        number, underscore, task = job_id.partition("_")
        tasks = task[1:-1].partition("%")[0] if task[:1] == "[" and task[-1:] == "]" else task
        parts = tasks.replace("-", ",").replace(":", ",").split(",") if underscore else []
        is_id = all(is_digits(part) for part in (number, *parts))
        if not is_id or not (step in ("", "batch", "extern", "interactive") or is_digits(step)):
            raise command.error(f"Bad job/step specified: {printable(word, 60)}")
        if len(number) < 18:
            found.setdefault(str(int(number)) + underscore + task, set()).add(step)
    return found


class SacctQuery:
    """The jobs, steps and times that the options select. Raises: CommandError."""

    def __init__(self, parsed: Parsed, now: float) -> None:
        self.now = now
        self.jobs = read_job_words(COMMAND, split_ids(",".join(parsed.all("jobs"))))
        self.has_jobs = bool(parsed.all("jobs"))
        self.states = _states(parsed)
        self.users = _users(parsed, self.has_jobs or parsed.has("nodelist"))
        since, until = parsed.get("starttime"), parsed.get("endtime")
        self.has_window = bool(since or until)
        self.until = _instant(until, now) if until else _WINDOW_OPEN
        if since:
            self.since = max(0.0, _instant(since, now))
        elif self.has_jobs:
            self.since = 0.0
        elif self.states:
            self.since = now
        else:
            today = time.localtime(now)
            self.since = time.mktime((*today[:3], 0, 0, 0, 0, 0, -1))
        if self.until < self.since:
            raise COMMAND.error(f"Start time requested ({since or 'the default'}) is after the end time ({until})")
        self.is_truncated = parsed.has("truncate")
        self.only_jobs = parsed.has("allocations")
        self.duplicates = parsed.has("duplicates")
        self.clusters = comma_list(parsed.all("clusters"))
        self.units = _units(parsed)
        self.converts = not parsed.has("noconvert")
        self.query = {
            "names": ",".join(comma_list(parsed.all("name"))),
            "queues": ",".join(comma_list(parsed.all("partition"))),
            "users": ",".join(self.users),
        }
        if self.since:
            self.query["since"] = repr(self.since)
        # Without a time, jobs in a state now: those that ended can only be found among named ones.
        is_of_now = bool(self.states) and not (self.has_jobs or self.has_window)
        self.query["states"] = ",".join(ACTIVE) if is_of_now else "all"
        self.filters: list[Callable[[Json], bool]] = []
        self.filter_keys: list[str] = []
        self._read_filters(parsed)

    def _read_filters(self, parsed: Parsed) -> None:
        """Filters by what the daemon does not filter by."""
        for long, key, default in (
            ("accounts", "account", ""),
            ("qos", "qos", "normal"),
            ("constraints", "constraint", ""),
            ("wckeys", "wckey", ""),
        ):
            if words := comma_list(parsed.all(long)):
                self._add(key, _one_of(key, frozenset(words), default))
        if words := comma_list(parsed.all("reason")):
            reasons = frozenset(word.lower() for word in words)
            self._add("reason", lambda job: str(job["reason"] or "None").lower() in reasons)
        if words := comma_list(parsed.all("gid")):
            members = _group_ids(words)
            self._add("uid", lambda job: group_of(job["uid"])[0] in members)
        if parsed.has("flags"):
            self._add("id", lambda job: False)
        for long, key in (("nnodes", "nodes"), ("ncpus", "cpus")):
            if parsed.has(long):
                low, high = _range(long, parsed.get(long))
                self._add(key, _between(key, low, high))
        if parsed.has("timelimit-min") or parsed.has("timelimit-max"):
            self._read_limits(parsed)
        if parsed.has("nodelist"):
            nodes = frozenset(comma_list(parsed.all("nodelist")))
            self._add("node", lambda job: is_on(job, nodes))

    def _read_limits(self, parsed: Parsed) -> None:
        from gpusched.addons.slurm.values import parse_limit_s

        found = []
        for long in ("timelimit-min", "timelimit-max"):
            try:
                found.append(parse_limit_s(parsed.get(long)) or _WINDOW_OPEN if parsed.has(long) else None)
            except ValueError:
                raise COMMAND.error(f"Invalid time limit specified: {printable(parsed.get(long), 60)}") from None
        low, high = found
        if low is None:
            raise COMMAND.error("--timelimit-max requires --timelimit-min")
        self._add("time_limit_s", _between("time_limit_s", low, low if high is None else high))

    def _add(self, key: str, accepts: Callable[[Json], bool]) -> None:
        self.filters.append(accepts)
        self.filter_keys.append(key)

    def text(self) -> str:
        """What the daemon filters by, as a query."""
        return "&".join(f"{key}={quote(value)}" for key, value in self.query.items() if value)

    def check_names(self, client: DaemonConnection) -> None:
        """Refuse users who do not exist and have no jobs."""
        import pwd

        for name in self.users:
            try:
                pwd.getpwnam(name)
            except (KeyError, ValueError):
                if not client.call("GET", f"/v1/jobs?states=all&limit=1&fields=id&users={quote(name)}")["rows"]:
                    raise COMMAND.error(f"Invalid user id: {printable(name, 60)}") from None

    def accepts(self, record: AccountingRecord) -> bool:
        """Whether a job was in the time asked for, and then in one of the states."""
        job = record.job
        if job["submit_at"] > self.until:
            return False
        ended_at, started_at = record.end_at, record.start_at
        is_there = ended_at is None or ended_at >= self.since
        if not self.states:
            return is_there
        if record.state in self.states and (ended_at is None or self.since <= ended_at <= self.until):
            return True
        if not (is_there and self.has_window):
            return False
        # What it was meanwhile.
        has_waited = started_at is None or started_at > self.since
        if "PENDING" in self.states and has_waited and job["submit_at"] <= self.until:
            return True
        return "RUNNING" in self.states and started_at is not None and started_at <= self.until


def _one_of(key: str, words: frozenset[str], default: str) -> Callable[[Json], bool]:
    return lambda job: (job[key] or default) in words


def _between(key: str, low: float, high: float) -> Callable[[Json], bool]:
    return lambda job: low <= (_WINDOW_OPEN if job[key] is None else job[key]) <= high


def _range(long: str, text: str) -> tuple[float, float]:
    low, dash, high = text.partition("-")
    if not all(is_digits(part) for part in ((low, high) if dash else (low,))):
        raise COMMAND.error(f"Invalid --{long} specified: {printable(text, 60)}")
    return float(low), float(high if dash else low)


def _instant(text: str, now: float) -> float:
    try:
        return parse_instant(text, now, is_past=True)
    except (ValueError, OverflowError):
        raise COMMAND.error(f"Invalid time specification (pos=0): {printable(text, 80)}") from None


def _states(parsed: Parsed) -> frozenset[str]:
    found = set()
    for word in comma_list(parsed.all("state")):
        state = long_state(word)
        if state is None:
            raise COMMAND.error(f"Invalid job state specified: {printable(word, 60)}")
        found.add(state)
    return frozenset(found)


def _users(parsed: Parsed, selects_otherwise: bool) -> list[str]:
    """The users whose jobs to show, by name; none for all."""
    import os
    import pwd

    named = comma_list(parsed.all("uid"))
    if parsed.has("allusers") or "-1" in named:
        return []
    found = []
    for word in named:
        if is_digits(word):
            try:
                found.append(pwd.getpwuid(int(word[:10])).pw_name)
            except (KeyError, OverflowError):
                raise COMMAND.error(f"Invalid user id: {printable(word, 60)}") from None
        else:
            found.append(word)
    if found or selects_otherwise or os.geteuid() == 0:
        return found
    return [pwd.getpwuid(os.geteuid()).pw_name]


def _group_ids(words: Iterable[str]) -> set[int]:
    import grp

    found = set()
    for word in words:
        try:
            found.add(int(word) if is_digits(word) else grp.getgrnam(word).gr_gid)
        except (KeyError, ValueError):
            raise COMMAND.error(f"Invalid group id: {printable(word, 60)}") from None
    return found


def _units(parsed: Parsed) -> str:
    if not parsed.has("units"):
        return ""
    unit = parsed.get("units").upper()
    if unit not in ("K", "M", "G", "T", "P"):
        raise COMMAND.error(f"Invalid --units specified: {printable(parsed.get('units'), 40)}")
    return unit


# --- asking ---------------------------------------------------------------------------------------


def _found(
    client: DaemonConnection, wanted: SacctQuery, columns: Iterable[AccountingColumn], parsed: Parsed
) -> list[AccountingRecord]:
    """The selected records, by id."""
    is_json = parsed.has("json") or parsed.has("yaml")
    columns = COLUMNS.values() if is_json else columns
    names = [column.title for column in columns]
    cluster = _cluster(client, wanted, is_json or "Cluster" in names)
    view = AccountingView(wanted.now, cluster, wanted.units, wanted.converts)
    fields = dict.fromkeys(BASE_KEYS)
    fields.update(dict.fromkeys(key for column in columns for key in column.keys.split()))
    fields.update(dict.fromkeys(wanted.filter_keys))
    needs_runs = is_json or wanted.duplicates or any(column.is_measured for column in columns)
    jobs = _jobs(client, wanted, [*fields, *(["runs"] if needs_runs else [])])
    jobs = [job for job in jobs if job["tasks_left"] != "" and all(accepts(job) for accepts in wanted.filters)]
    _mark_unstarted(client, jobs)
    steps = _steps(client, wanted, jobs) if _needs_steps(wanted, names, jobs) else {}
    found: list[AccountingRecord] = []
    for job in jobs:
        rows = records_of(
            view, job, steps.get(job["job_id"], []), only_job=wanted.only_jobs, duplicates=wanted.duplicates
        )
        found += _kept(rows, wanted)
    if wanted.is_truncated:
        for record in found:
            _truncate(record, wanted)
    return found


def _needs_steps(wanted: SacctQuery, names: Collection[str], jobs: Iterable[Json]) -> bool:
    if not wanted.only_jobs or "DerivedExitCode" in names:
        return any(job["run"] for job in jobs)
    return "ExitCode" in names and any(job["is_foreground"] and job["state"] == "FAILED" for job in jobs)


def _kept(rows: list[AccountingRecord], wanted: SacctQuery) -> list[AccountingRecord]:
    """Of the rows of one job those that are selected: all of a run, or the named steps."""
    found: list[AccountingRecord] = []
    keeps = False
    for row in rows:
        if row.is_job:
            keeps = wanted.accepts(row)
        if keeps and (not wanted.has_jobs or _is_named(row, wanted.jobs)):
            found.append(row)
    return found


def _is_named(row: AccountingRecord, named: dict[str, set[str]]) -> bool:
    job = row.job
    ids = [str(job["job_id"]), str(job["id"]), str(job["array_id"])]
    steps = set().union(*(named.get(one, ()) for one in ids))
    if not steps:
        # `42_[1,3-5]`: the daemon has found these tasks.
        prefix = f"{job['array_id']}_["
        steps = set().union(*(found for one, found in named.items() if one.startswith(prefix)))
    suffix = row.raw_id.partition(".")[2]
    return "" in steps or suffix in steps


def _truncate(record: AccountingRecord, wanted: SacctQuery) -> None:
    if record.start_at is not None:
        record.start_at = max(record.start_at, wanted.since)
    until = min(wanted.until, wanted.now)
    if record.start_at is not None:
        record.end_at = until if record.end_at is None else min(record.end_at, until)


def _jobs(client: DaemonConnection, wanted: SacctQuery, fields: list[str]) -> list[Json]:
    path = "/v1/history" if "runs" in fields else "/v1/jobs"
    path = f"{path}?fields={','.join(fields)}&{wanted.text()}"
    if not wanted.has_jobs:
        rows = client.call("GET", path)["rows"]
    else:
        rows = [row for ids in portions(wanted.jobs) for row in _named_jobs(client, path, ids)]
    jobs: list[Json] = [dict(zip(fields, row)) for row in rows]  # noqa: B905  3.10 can, but the keyword costs
    by_id = {job["job_id"]: job for job in jobs}
    return [by_id[job_id] for job_id in sorted(by_id)]


def _named_jobs(client: DaemonConnection, path: str, ids: list[str]) -> list[list[Any]]:
    """The rows of those of these jobs that exist."""
    try:
        rows: list[list[Any]] = client.call("GET", f"{path}&ids={quote(','.join(ids))}")["rows"]
    except (NotFound, UsageError):
        if len(ids) == 1:
            return []
        # One of them is not a task of its array, which spoils the request.
        middle = len(ids) // 2
        return _named_jobs(client, path, ids[:middle]) + _named_jobs(client, path, ids[middle:])
    return rows


def _mark_unstarted(client: DaemonConnection, jobs: list[Json]) -> None:
    """Tell jobs that ended while waiting to run again from jobs whose last run ended with them."""
    doubtful = [job for job in jobs if job["run"] and job["state"] in ("CANCELLED", "DEADLINE", "FAILED")]
    by_id = {str(job["job_id"]): job for job in doubtful}
    for ids in portions([name for name, job in by_id.items() if "runs" not in job]):
        path = "/v1/history?states=all&fields=job_id,runs"
        for job_id, runs in _named_jobs(client, path, ids):
            by_id[str(job_id)]["last_run"] = runs[-1] if runs else None
    for job in doubtful:
        last = job["last_run"] if "last_run" in job else (job["runs"] or [None])[-1]
        ended_at = None if last is None else last["end_at"]
        job["is_unstarted"] = bool(ended_at and job["end_at"] and ended_at < job["end_at"])


def _steps(client: DaemonConnection, wanted: SacctQuery, jobs: Iterable[Json]) -> dict[int, list[Json]]:
    """The steps of jobs that have run, by job."""
    if wanted.has_jobs:
        queries = [
            f"states=all&ids={','.join(ids)}" for ids in portions([str(job["job_id"]) for job in jobs if job["run"]])
        ]
    else:
        queries = [wanted.text()]
    found: dict[int, list[Json]] = {}
    for query in queries:
        try:
            steps = client.call("GET", f"/v1/steps?all_runs=1&{query}")["steps"]
        except NotFound:
            continue  # jobs that were pruned meanwhile
        for step in steps:
            found.setdefault(step["job_id"], []).append(step)
    return found


def _cluster(client: DaemonConnection, wanted: SacctQuery, shows_it: bool) -> str:
    """The name of the cluster, asked for only where it matters. Raises: CommandError for another one."""
    others = [word for word in wanted.clusters if word != "all"]
    if not (others or shows_it):
        return ""
    name = str(client.call("GET", "/v1/cluster")["cluster_name"])
    for word in others:
        if word != name:
            raise COMMAND.error(
                f"'{printable(word, 60)}' can't be reached now, or it is an invalid entry for --cluster.  "
                "Use 'sacctmgr list clusters' to see available clusters."
            )
    return name


def _print_scripts(client: DaemonConnection, wanted: SacctQuery) -> int:
    if not wanted.jobs:
        raise COMMAND.error("--batch-script requires -j ID")
    for job_id in wanted.jobs:
        try:
            text = client.call("GET", f"/v1/jobs/{quote(job_id)}/script")["script"]
        except (NotFound, UsageError):
            continue
        sys.stdout.write(f"Batch Script for {job_id}\n{'-' * 80}\n{text or 'NONE'}".rstrip("\n") + "\n")
    return 0
