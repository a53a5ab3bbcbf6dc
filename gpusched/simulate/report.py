"""All measures of a schedule in one form: as a document, as rows of a table, as lines to read.

The shapes of the document and of the rows are stable: names are only ever added. `docs/reference/simulation.md` has
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpusched.model.units import format_duration
from gpusched.simulate.comparison import Comparison
from gpusched.simulate.metrics import QUEUE, USER, Group, Misses, Worth, groups, late, party, past_deadline, worth
from gpusched.simulate.metrics_over_time import OverTime, Series, over_time
from gpusched.simulate.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one policy made of a trace, measured."""

    policy: str
    starts_sha: str
    worth: Worth
    timed: OverTime | None
    """None for a schedule that does not know where its jobs ran."""
    wait_bound_s: int | None
    late: Misses | None
    """Jobs that waited longer than the bound; None without one."""
    overdue: Misses | None
    """Jobs that missed their deadline; None where no job has one."""
    what: str
    """By whom shares are told apart: `user` or `queue`."""
    users: Mapping[str, Group]
    queues: Mapping[str, Group]


def measure(
    policy: str,
    outcome: Outcome,
    size: float,
    wait_bound_s: int | None = None,
    series: Series | None = None,
    by: str | None = None,
) -> Schedule:
    """All measures of an outcome on so many GPUs, or processors where no job asks for GPUs (`metrics.size_of`).

    Args: by: whose shares, `user` or `queue`; None: as `metrics.party` has it.
    """
    what, _ = party(outcome.jobs, by)
    overdue = past_deadline(outcome)
    return Schedule(
        policy=policy,
        starts_sha=outcome.starts_sha,
        worth=worth(outcome, size),
        timed=None if outcome.runs is None else over_time(outcome, series, by),
        wait_bound_s=wait_bound_s,
        late=None if wait_bound_s is None else late(outcome, wait_bound_s),
        overdue=overdue if overdue.jobs else None,
        what=what,
        users=groups(outcome, USER),
        queues=groups(outcome, QUEUE),
    )


_TIMED = (
    "fragmentation",
    "fgd_fragmentation",
    "node_spread",
    "node_spread_now",
    "finish_time_fairness",
    "unfair",
    "dominant_fairness",
)


def document(schedule: Schedule) -> dict[str, Any]:
    """One policy as JSON has it. What is not known is null."""
    made: dict[str, Any] = {"policy": schedule.policy, **asdict(schedule.worth)}
    timed = {} if schedule.timed is None else asdict(schedule.timed)
    made |= {name: timed.get(name) for name in _TIMED}
    made["late"] = _misses(schedule.late)
    if made["late"] is not None:
        made["late"]["bound_s"] = schedule.wait_bound_s
    made["overdue"] = _misses(schedule.overdue)
    shares = timed.get("dominant_share", {})
    for name, listed in (("users", schedule.users), ("queues", schedule.queues)):
        has_shares = name == f"{schedule.what}s"
        made[name] = [
            {"name": one, **asdict(group), "dominant_share": shares.get(one) if has_shares else None}
            for one, group in listed.items()
        ]
    made["starts_sha"] = schedule.starts_sha
    return made


def _misses(misses: Misses | None) -> dict[str, Any] | None:
    return None if misses is None else {**asdict(misses), "part": misses.part}


def row(schedule: Schedule) -> dict[str, Any]:
    """One policy as a row of CSV: the document without users and queues, names of parts joined by `_`."""
    found = document(schedule)
    made = {"policy": found["policy"]}
    for name, value in found.items():
        if name in ("users", "queues", "policy"):
            continue
        parts = _PARTS.get(name)
        if parts is None:
            made[name] = value
        else:
            made |= {f"{name}_{part}": None if value is None else value[part] for part in parts}
    return made


_SPREAD = ("mean", "median", "p95", "p99", "most")
_MISSES = ("jobs", "missed", "by_s", "part")
_PARTS = {
    "wait_s": _SPREAD,
    "completion_s": _SPREAD,
    "slowdown": _SPREAD,
    "finish_time_fairness": _SPREAD,
    "late": (*_MISSES, "bound_s"),
    "overdue": _MISSES,
}


def comparison_document(before: str, after: str, found: Comparison) -> dict[str, Any]:
    """Who gains and who loses, as JSON has it."""
    winners, losers = len(found.winners), len(found.losers)
    return {
        "before": before,
        "after": after,
        "what": found.what,
        "gain": winners,
        "lose": losers,
        "same": len(found.listed) - winners - losers,
        "listed": [
            {"name": one.name, "before": asdict(one.before), "after": asdict(one.after)} for one in found.listed
        ],
    }


def parties(schedule: Schedule) -> Mapping[str, Group]:
    """The users, or the queues, whichever shares are told of."""
    return schedule.users if schedule.what == "user" else schedule.queues


# --- to read ----------------------------------------------------------------------------------------


def lines(schedules: Sequence[Schedule]) -> list[list[str]]:
    """Every measure as a line: its name and a cell for each policy.

    Left out is what no policy has, and what says nothing: fairness among one, balance of one node, work preempted
    where nothing was.
    """
    rows = [row(schedule) for schedule in schedules]
    needless = set()
    if max(len(schedule.users) for schedule in schedules) < 2:
        needless.add("user_fairness")
    if max(len(schedule.queues) for schedule in schedules) < 2:
        needless.add("queue_fairness")
    if needless == {"user_fairness", "queue_fairness"}:
        needless.add("dominant_fairness")
    if not any(schedule.timed is not None and schedule.timed.node_spread_now for schedule in schedules):
        needless |= {"node_spread", "node_spread_now"}
    if not any(schedule.worth.preemptions for schedule in schedules):
        needless |= {"preemptions", "preempted_gpu_s"}
    made = []
    for name, (title, shown) in TITLES.items():
        values = [one[name] for one in rows]
        if name not in needless and any(value is not None for value in values):
            made.append([title, *("-" if value is None else shown(value) for value in values)])
    return made


def _number(value: float) -> str:
    return f"{value:,.2f}"


def _count(value: float) -> str:
    return f"{value:,}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


_PLACES = (("mean", "mean"), ("median", "median"), ("p95", "p95"), ("p99", "p99"), ("most", "most"))
TITLES = {
    "jobs": ("jobs", _count),
    **{f"wait_s_{part}": (f"wait, {word}", format_duration) for part, word in _PLACES},
    "wide_wait_s": ("wait of 8 GPUs and more, mean", format_duration),
    **{f"completion_s_{part}": (f"completion, {word}", format_duration) for part, word in _PLACES},
    **{f"slowdown_{part}": (f"slowdown, {word}", _number) for part, word in _PLACES},
    "makespan_s": ("makespan", format_duration),
    "jobs_per_hour": ("jobs per hour", _number),
    "utilisation": ("utilisation", _percent),
    "fragmentation": ("idle, of no use to who waits", _percent),
    "fgd_fragmentation": ("idle, of no use to usual jobs", _percent),
    "node_spread": ("nodes, spread of their use", _percent),
    "node_spread_now": ("nodes, spread at each instant", _percent),
    "user_fairness": ("fairness of users' slowdowns", _number),
    "queue_fairness": ("fairness of queues' slowdowns", _number),
    "dominant_fairness": ("fairness of dominant shares", _number),
    **{f"finish_time_fairness_{part}": (f"against a fair share, {word}", _number) for part, word in _PLACES},
    "unfair": ("jobs slower than that", _percent),
    "late_missed": ("waited beyond the bound", _count),
    "late_part": ("part of all jobs", _percent),
    "late_by_s": ("beyond it by, mean", format_duration),
    "overdue_jobs": ("jobs with a deadline", _count),
    "overdue_missed": ("missed", _count),
    "overdue_part": ("part of those", _percent),
    "overdue_by_s": ("late by, mean", format_duration),
    "preemptions": ("runs preempted", _count),
    "preempted_gpu_s": ("GPU time of those", format_duration),
}
"""By the name of a column, how a line of the details is called, and how its values are shown."""
