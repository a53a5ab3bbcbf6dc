"""sacctmgr: accounts, their users, and qualities of service, read-only: gctl and the config file change them."""

from __future__ import annotations

import sys

from gpusched.addons.slurm.command import Command, Parsed, run
from gpusched.addons.slurm.format import AccountingColumn, choose_columns, render_table
from gpusched.addons.slurm.values import long_duration
from gpusched.client import connect
from gpusched.errors import UserError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from gpusched.client import DaemonConnection

    Json = dict[str, Any]
    Text = Callable[[Json], str]

COMMAND = Command(
    "sacctmgr",
    "sacctmgr [OPTIONS] show|list ENTITY [NAME...] [where KEY=VALUE...] [format=LIST]",
    """
    -h --help  show this help
    -i --immediate  accepted: sacctmgr changes nothing here
    -n --noheader  print no header
    -o --oneliner  accepted: a record is always one line
    -p --parsable  separate columns by |, with one at the end of the line
    -P --parsable2  separate columns by |
    -Q --quiet  accepted
    -r --readonly  accepted: sacctmgr changes nothing here
    -s --associations  include the associations of users or accounts
    -v --verbose  accepted
    """,
    permutes=True,
    has_h=True,
)
_READING = ("show", "list")
_WRITING = {
    "account": "gctl account {verb} NAME KEY=VALUE",
    "user": "gctl account members NAME {change}=USER",
    "association": "gctl account members NAME {change}=USER",
    "qos": "gctl qos {verb} NAME KEY=VALUE",
    "cluster": "gctl reload, after a change of [slurm] cluster_name in the config file",
}
"""What changes each entity."""
_VERBS = {**dict.fromkeys(("add", "create"), "add"), **dict.fromkeys(("delete", "remove"), "remove")}
_WRITING_VERBS = (
    *("add", "create", "modify", "update", "delete", "remove", "archive", "load", "dump", "clear", "reconfigure"),
    "shutdown",
)
_ENTITIES = {
    "association": ("associations", "assoc", "assocs"),
    "user": ("users",),
    "account": ("accounts", "acct", "accts"),
    "qos": ("qoses",),
    "cluster": ("clusters",),
    "tres": (),
}
_WITH = ("withassoc", "withassocs", "withdeleted", "withsubaccounts", "wopinfo", "woplimits", "wolimits", "tree")
_KEYS = ("user", "users", "name", "names", "account", "accounts", "acct", "cluster", "clusters", "qos", "format", "id")


def main() -> int:
    return run(COMMAND, body)


def body(parsed: Parsed) -> int:
    """Print the records that the words ask for; returns the exit code."""
    verb, *words = parsed.operands or ("help",)
    if verb.lower() in ("help", "?"):
        sys.stdout.write(f"Usage: {COMMAND.usage}\n")
        return 0
    found = _verb(verb.lower())
    if found in _WRITING_VERBS:
        raise COMMAND.error(_no_writing(found, words))
    if found not in _READING:
        raise COMMAND.error(f"Invalid keyword: {printable(verb, 60)}\nsacctmgr {COMMAND.usage.partition('] ')[2]}")
    if not words:
        raise COMMAND.error(f"No valid entity in {found} command\nEntities: {', '.join(_ENTITIES)}")
    entity = _entity(words[0])
    if entity is None:
        raise COMMAND.error(
            f"No valid entity in {found} command: {printable(words[0], 60)}\nEntities: {', '.join(_ENTITIES)}"
        )
    where = _Where(entity, words[1:], parsed.has("associations"))
    try:
        with connect() as client:
            table, rows = _TABLES[entity](client, where)
    except UserError as error:
        raise COMMAND.error(printable(error.message, 400)) from None
    columns = _columns(table, where)
    sys.stdout.write(render_table(parsed, columns, rows))
    return 0


def _verb(word: str) -> str:
    """The verb that a word of at least three letters begins."""
    found = [verb for verb in (*_READING, *_WRITING_VERBS) if verb.startswith(word) and len(word) >= 3]
    return found[0] if found else word


def _entity(word: str) -> str | None:
    """The entity that a word names, in singular or plural, cut short to no less than three letters."""
    lower = word.lower()
    for entity, others in _ENTITIES.items():
        if lower in (entity, *others) or (len(lower) >= 3 and entity.startswith(lower)):
            return entity
    return None


def _no_writing(verb: str, words: list[str]) -> str:
    way = _WRITING.get(_entity(words[0]) or "" if words else "", "gctl account|qos {verb} NAME KEY=VALUE")
    ours = _VERBS.get(verb, "modify")
    way = way.format(verb=ours, change="remove" if ours == "remove" else "add")
    return f"{verb}: sacctmgr only shows accounts and qualities of service\nan administrator changes them with: {way}"


class _Where:
    """What follows the entity: names, conditions and the format. Raises: CommandError."""

    def __init__(self, entity: str, words: list[str], with_associations: bool) -> None:
        self.names: list[str] = []
        self.conditions: dict[str, list[str]] = {}
        self.form: str | None = None
        self.has_associations = with_associations or entity == "association"
        at = 0
        while at < len(words):
            key, equals, value = words[at].partition("=")
            key = key.lower()
            at += 1
            if not equals and at < len(words) and words[at].startswith("="):
                value, equals = words[at][1:], "="
                at += 1
            if equals and not value and at < len(words) and "=" not in words[at]:
                value = words[at]
                at += 1
            if key in ("where", "set") and not equals:
                continue
            if key in _WITH:
                self.has_associations |= key.startswith("withassoc")
            elif not equals:
                self.names += [word for word in words[at - 1].split(",") if word]
            elif "format".startswith(key) and len(key) > 2:
                self.form = value
            elif key in _KEYS:
                self.conditions[_ALIASES.get(key, key)] = [word for word in value.split(",") if word]
            else:
                raise COMMAND.error(f"Unknown condition: {printable(words[at - 1], 80)}")
        if entity == "association":
            # As Slurm: a bare word is no condition on associations.
            if self.names:
                raise COMMAND.error(f"Unknown condition: {printable(self.names[0], 80)}")
        elif self.names:
            key = {"user": "user", "account": "account", "cluster": "cluster"}.get(entity, "name")
            self.conditions.setdefault(key, []).extend(self.names)
        if "name" in self.conditions and entity != "qos":
            self.conditions.setdefault(entity, []).extend(self.conditions.pop("name"))

    def accepts(self, **values: str) -> bool:
        """Whether a record has what the conditions name; keys that it does not have are no condition on it."""
        return all(
            value in self.conditions[key] or (key == "user" and not self.conditions[key])
            for key, value in values.items()
            if key in self.conditions
        )


_ALIASES = {
    "users": "user",
    "names": "name",
    "accounts": "account",
    "acct": "account",
    "clusters": "cluster",
}


# --- tables -------------------------------------------------------------------------------------------


class _Table:
    """The columns of an entity, and those that it shows by default."""

    def __init__(self, rows: str, default: str, with_associations: str = "") -> None:
        """Args: rows: title, width and key of the text, one a line."""
        self.columns: list[AccountingColumn] = []
        for row in filter(None, rows.splitlines()):
            *title, width, key = row.split()
            self.columns.append(AccountingColumn(" ".join(title), int(width), _text_of(key)))
        self.default = default
        self.with_associations = with_associations or default


def _text_of(key: str) -> Text:
    return lambda row: printable(str(row.get(key, "")))


_ASSOCIATION = """
Cluster 10 cluster
Account 10 account
User 10 user
Partition 10 -
Share 9 share
Priority 10 -
GrpJobs 7 -
GrpTRES 13 -
GrpSubmit 9 -
GrpWall 11 -
GrpTRESMins 13 -
MaxJobs 7 -
MaxTRES 13 -
MaxTRESPerNode 14 -
MaxSubmit 9 -
MaxWall 11 -
MaxTRESMins 13 -
QOS 20 qos
Def QOS 9 default_qos
GrpTRESRunMin 13 -
ID 6 id
ParentName 10 parent
ParentID 8 -
Fairshare 9 share
MaxCPUs 8 -
MaxNodes 8 -
MaxCPUMins 11 -
GrpCPUs 8 -
GrpNodes 8 -
"""
_LIMITS = (
    "share,priority,grpjobs,grptres,grpsubmit,grpwall,grptresmins,maxjobs,maxtres,maxtrespernode,maxsubmit,maxwall,"
    "maxtresmins,qos,defqos,grptresrunmin"
)
_ASSOCIATIONS = _Table(_ASSOCIATION, f"cluster,account,user,partition,{_LIMITS}")
_USERS = _Table(
    f"Def Acct 10 default_account\nDef WCKey 10 -\nAdmin 9 admin\n{_ASSOCIATION}\nDefaultAccount 14 default_account"
    "\nAdminLevel 10 admin",
    "user,defacct,admin",
    "user,defacct,admin,cluster,account,partition,share,priority,maxjobs,maxnodes,maxcpus,maxsubmit,maxwall,"
    "maxcpumins,qos,defqos",
)
_ACCOUNTS = _Table(
    f"Descr 20 account\nOrg 20 organization\n{_ASSOCIATION}\nDescription 20 account\nOrganization 20 organization",
    "account,descr,org",
    f"account,descr,org,cluster,parentname,user,{_LIMITS}",
)
_QOS = _Table(
    """
Name 10 name
Priority 10 priority
GraceTime 10 grace
Preempt 10 preempt
PreemptExemptTime 19 exempt
PreemptMode 11 mode
Flags 40 -
UsageThres 10 -
UsageFactor 11 factor
GrpTRES 13 grp_tres
GrpTRESMins 13 -
GrpTRESRunMin 13 -
GrpJobs 7 -
GrpSubmit 9 -
GrpWall 11 -
MaxTRES 13 max_tres
MaxTRESPerNode 14 -
MaxTRESMins 13 -
MaxWall 11 max_wall
MaxTRESPU 13 max_tres_user
MaxJobsPU 9 max_jobs_user
MaxSubmitPU 11 max_submit_user
MaxTRESPA 13 -
MaxTRESRunMinsPA 16 -
MaxTRESRunMinsPU 16 -
MaxJobsPA 9 -
MaxSubmitPA 11 -
MinTRES 13 -
ID 6 id
Description 20 name
""",
    "name,priority,gracetime,preempt,preemptexempttime,preemptmode,flags,usagethres,usagefactor,grptres,grptresmins,"
    "grptresrunmin,grpjobs,grpsubmit,grpwall,maxtres,maxtrespernode,maxtresmins,maxwall,maxtrespu,maxjobspu,"
    "maxsubmitpu,maxtrespa,maxtresrunminspa,maxtresrunminspu,maxjobspa,maxsubmitpa,mintres",
)
_CLUSTERS = _Table(
    """
Cluster 10 cluster
ControlHost 15 host
ControlPort 12 port
RPC 5 rpc
Share 9 share
GrpJobs 7 -
GrpTRES 13 -
GrpSubmit 9 -
MaxJobs 7 -
MaxTRES 13 -
MaxSubmit 9 -
MaxWall 11 -
QOS 20 qos
Def QOS 9 -
NodeCount 9 nodes
NodeNames 20 names
Flags 20 -
""",
    "cluster,controlhost,controlport,rpc,share,grpjobs,grptres,grpsubmit,maxjobs,maxtres,maxsubmit,maxwall,qos,defqos",
)
_TRES = _Table("Type 8 type\nName 15 name\nID 6 id", "type,name,id")


def _columns(table: _Table, where: _Where) -> list[AccountingColumn]:
    """The columns of the format. Raises: CommandError."""
    form = where.form or (table.with_associations if where.has_associations else table.default)
    return choose_columns(COMMAND, form, table.columns, "Unknown field '{}'")


def _associations(client: DaemonConnection) -> list[Json]:
    """Accounts and their users as associations; the top is `root`, and the caller has one in each own account."""
    answer = client.call("GET", "/v1/accounts")
    cluster = str(client.call("GET", "/v1/cluster")["cluster_name"])
    default_qos = client.call("GET", "/v1/qos")["default"] or ""
    rows: list[Json] = answer["accounts"]
    there = {(row["account"], row["user"]) for row in rows}
    missing = [name for name in answer["own_accounts"] if (name, answer["user"]) not in there]
    for name in missing:
        at = next((at for at, row in enumerate(rows) if (row["account"], row["user"]) == (name, None)), len(rows) - 1)
        like: Json = rows[at] if rows else {}
        depth = int(like.get("depth", 0)) + 1
        rows.insert(at + 1, {**like, "account": name, "user": answer["user"], "shares": 1.0, "depth": depth})
    found: list[Json] = []
    parents: list[str] = []
    for number, row in enumerate(rows, 1):
        account = row["account"] or "root"
        if row["user"] is None:
            del parents[row["depth"] :]
            parent = parents[-1] if parents else ""
            parents.append(account)
        else:
            parent = ""
        shares = float(row["shares"] or 0)
        found.append(
            {
                "cluster": cluster,
                "account": account,
                "user": row["user"] or "",
                "parent": parent,
                "share": str(int(shares)) if shares == int(shares) else f"{shares:g}",
                "qos": ",".join(sorted(row.get("qos", ()))) or "normal",
                "default_qos": default_qos,
                "default_account": (answer["default_account"] or "") if row["user"] == answer["user"] else account,
                "admin": "Administrator" if row["user"] == "root" else "None",
                "organization": account,
                "id": number,
            }
        )
    return found


def _show_associations(client: DaemonConnection, where: _Where) -> tuple[_Table, Iterable[Json]]:
    return _ASSOCIATIONS, _matching(_associations(client), where)


def _matching(rows: Iterable[Json], where: _Where) -> list[Json]:
    return [row for row in rows if where.accepts(cluster=row["cluster"], account=row["account"], user=row["user"])]


def _show_users(client: DaemonConnection, where: _Where) -> tuple[_Table, Iterable[Json]]:
    rows = [row for row in _matching(_associations(client), where) if row["user"]]
    # snakemake asks for the account of a user without asking for associations.
    is_of_users = where.form is not None and "account" in where.form.lower()
    if where.has_associations or is_of_users:
        return _USERS, rows
    return _USERS, {row["user"]: row for row in reversed(rows)}.values()


def _show_accounts(client: DaemonConnection, where: _Where) -> tuple[_Table, Iterable[Json]]:
    rows = _matching(_associations(client), where)
    return _ACCOUNTS, rows if where.has_associations else [row for row in rows if not row["user"]]


def _show_qos(client: DaemonConnection, where: _Where) -> tuple[_Table, Iterable[Json]]:
    known = client.call("GET", "/v1/qos")["qos"]
    rows = [_qos_row(one, number) for number, one in enumerate(known, 1)]
    if not rows:
        rows = [
            {"name": "normal", "priority": "0", "grace": "00:00:00", "mode": "cluster", "factor": "1.000000", "id": 1}
        ]
    return _QOS, [row for row in rows if where.accepts(name=row["name"])]


def _qos_row(one: Json, number: int) -> Json:
    def count(key: str) -> str:
        return "" if one[key] is None else str(one[key])

    def gpus(key: str) -> str:
        return "" if one[key] is None else f"gres/gpu={one[key]:g}"

    return {
        "name": one["name"],
        "priority": str(round(one["factor"] * 100)),
        "grace": long_duration(0),
        "preempt": ",".join(one["preempts"]),
        "exempt": "" if one["min_run_s"] is None else long_duration(one["min_run_s"]),
        "mode": "cluster",
        "factor": f"{one['usage_factor']:.6f}",
        "grp_tres": gpus("max_gpus"),
        "max_tres": gpus("max_gpus_per_job"),
        "max_wall": "" if one["max_time_s"] is None else long_duration(one["max_time_s"]),
        "max_tres_user": gpus("max_gpus_per_user"),
        "max_jobs_user": count("max_running_per_user"),
        "max_submit_user": count("max_jobs_per_user"),
        "id": number,
    }


def _show_clusters(client: DaemonConnection, where: _Where) -> tuple[_Table, Iterable[Json]]:
    answer = client.call("GET", "/v1/cluster")
    names = [node["name"] for node in answer["nodes"]]
    qos = [one["name"] for one in client.call("GET", "/v1/qos")["qos"]]
    row = {
        "cluster": answer["cluster_name"],
        "host": names[0],
        "port": "0",
        "rpc": "0",
        "share": "1",
        "qos": ",".join(sorted(qos)) or "normal",
        "nodes": str(len(names)),
        "names": ",".join(names),
    }
    return _CLUSTERS, [row] if where.accepts(cluster=str(row["cluster"])) else []


_TRACKED = (
    ("cpu", "", 1),
    ("mem", "", 2),
    ("energy", "", 3),
    ("node", "", 4),
    ("billing", "", 5),
    ("fs", "disk", 6),
    ("vmem", "", 7),
    ("pages", "", 8),
    ("gres", "gpu", 1001),
    ("gres", "gpumem", 1002),
    ("gres", "gpuutil", 1003),
)


def _show_tres(client: DaemonConnection, where: _Where) -> tuple[_Table, Iterable[Json]]:
    return _TRES, [{"type": kind, "name": name, "id": number} for kind, name, number in _TRACKED]


_TABLES: dict[str, Callable[[DaemonConnection, _Where], tuple[_Table, Iterable[Json]]]] = {
    "association": _show_associations,
    "user": _show_users,
    "account": _show_accounts,
    "qos": _show_qos,
    "cluster": _show_clusters,
    "tres": _show_tres,
}
