"""Predictions shown by gq and gsub: when pending jobs start, what would help, and how accurate predictions were."""

from __future__ import annotations

import fcntl
import os
import sys
import time

from gpusched import paths
from gpusched.cli import output, tables
from gpusched.cli.job_options import UPDATES
from gpusched.cli.tables import Column
from gpusched.errors import GpuschedError
from gpusched.model.state_names import COMPACT
from gpusched.model.units import format_duration, plural, printable
from gpusched.paths import make_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import DaemonConnection


_ENOUGH = 5
"""With fewer completed predictions, their accuracy is not reported."""
_ENOUGH_RUNS = 20
_AT_ONCE_S = 5.0
_MINUTE_S = 60.0


def starts_view(client: DaemonConnection, asked: str, values: Values) -> str | dict[str, Any]:
    """Predicted starts of pending jobs, the earliest first; with --json the document."""
    answer = client.call("GET", f"/v1/starts?{asked}")
    rows = answer["starts"]
    found = output.for_programs(values, answer, (row["id"] for row in rows))
    if found is not None:
        return found
    now = time.time()
    note_age(answer, now)
    not_yet = frozenset(answer.get("not_yet", ()))
    columns = [
        Column("JOBID", lambda row: str(row["id"])),
        Column("NAME", lambda row: printable(row["name"]), least=12),
        Column("USER", lambda row: printable(row["user"]), order=2),
        Column("ST", lambda row: COMPACT.get(row["state"], row["state"]), order=1),
        Column("START_TIME", lambda row: "not yet" if row["id"] in not_yet else _starts_at(row, now)),
        Column("NODELIST", lambda row: printable(",".join(row["nodes"]) or "N/A"), order=3),
        Column("REASON", lambda row: f"({row['reason']})", below=True),
    ]
    _note_order(rows)
    return tables.listing(columns, rows, header=not values.get("noheader"))


def _note_order(rows: Sequence[dict[str, Any]]) -> None:
    """Say at a terminal why a job further ahead in line starts after others, if one does."""
    if not sys.stdout.isatty():
        return
    text = overtaken((row["id"], row["reason"]) for row in rows if row["start_high_at"] is not None)
    if text:
        output.note("gq", text)


def overtaken(rows: Iterable[tuple[str, str | None]]) -> str:
    """Why a job that is ahead in line starts after one behind it; empty if none does.

    Args: rows: ids and reasons of jobs with an expected start, the earliest first.
    """
    earlier = False
    for job_id, reason in rows:
        if reason == "Resources" and earlier:
            why = f"jobs behind it fit already, and start first; until when: gq --why {job_id}"
            return f"job {job_id} is further ahead in line than its start tells: {why}"
        earlier = earlier or reason == "Priority"
    return ""


def note_age(told: dict[str, Any], now: float) -> None:
    """Print the age of the starts, if the queue has changed since they were computed."""
    as_of = told.get("as_of")
    if as_of is not None and now - as_of >= 1:
        output.note("gq", f"starts were worked out {round(now - as_of)} s ago; the queue has changed since")


def _starts_at(row: dict[str, Any], now: float) -> str:
    return when(row["start_low_at"], row["start_high_at"], now)


def when(low_at: float | None, high_at: float | None, now: float) -> str:
    """A range as the table shows it: `14:10 - 15:00`, `14:10`, `14:10 - N/A`, `N/A`; other days with the date."""
    if low_at is None and high_at is None:
        return "N/A"
    first, last = ends(low_at, high_at, now)
    if high_at is None:
        return f"{first} - N/A"
    return first if first == last else f"{first} - {last}"


def ends(low_at: float | None, high_at: float | None, now: float) -> tuple[str, str]:
    """Both ends in whole minutes, rounded outwards; equal texts if they are within a minute."""
    last = "" if high_at is None else instant(up_to_minute(high_at, now), now)
    if low_at is None or (high_at is not None and high_at - low_at < _MINUTE_S):
        return last, last
    return instant(low_at, now), last


def up_to_minute(at: float, now: float) -> float:
    """The late end of a range as all views show it: whole minutes, rounded up, unless it is now."""
    return at if at <= now + _AT_ONCE_S else -(-at // _MINUTE_S) * _MINUTE_S


def instant(at: float, now: float) -> str:
    """`14:10` today, `2026-12-24T14:10` on other days, `now` within seconds."""
    if at <= now + _AT_ONCE_S:
        return "now"
    local, today = time.localtime(at), time.localtime(now)
    return time.strftime("%H:%M" if local[:3] == today[:3] else "%Y-%m-%dT%H:%M", local)


_UNTIL = {
    "PartitionDown": "unknown while the queue is paused",
    "JobHeldUser": "unknown while it is held",
    "JobHeldAdmin": "unknown while it is held",
    "JobHeldGpuFault": "unknown while it is held",
    "Dependency": "unknown until the jobs that it depends on have ended",
    "JobArrayTaskLimit": "unknown until one of its running tasks has ended",
    "BudgetSpent": "unknown until there is room in the budget",
    "UserLimit": "unknown while that limit holds",
    "ReqNodeNotAvail": "unknown until what it needs is available again",
    "LoadCeiling": "unknown while the machine is that busy",
    "HandedOver": "unknown, the other scheduler decides",
}
"""What is said of a start that cannot be told, by the reason that the job waits for."""
_NEAR = 50
"""Places from the front of the queue up to which runs of unknown length alone keep a start unknown."""


def unknown(reason: str | None, place: int | None) -> str:
    """Why no start can be told of a job that waits for this reason, at this place of the queue."""
    if reason in _UNTIL:
        return _UNTIL[reason]
    endless = "neither time limits nor earlier runs tell when the jobs before it end"
    return f"unknown, {endless}" if place is None or place <= _NEAR else f"unknown, it is far behind, or {endless}"


BOUNDS = ("reserves_at", "delay_ends_at")
"""Facts of `why` with their own line: until when other jobs may start ahead of a job, or delay it."""


def _bound_lines(facts: dict[str, Any], start: dict[str, Any] | None, now: float) -> list[str]:
    """Until when other jobs may start ahead of a job, or delay it, in relation to its expected start."""
    reserves_at, delay_ends_at = (facts.get(name) for name in BOUNDS)
    told = [start[end] for end in ("low_at", "high_at") if start[end] is not None] if start else []
    if reserves_at is not None and reserves_at > now:
        at = instant(up_to_minute(reserves_at, now), now)
        if not told:
            return [f"other jobs may start ahead of it until {at}; after that, resources are reserved for it"]
        if reserves_at > max(told):
            return [f"if it has not started by {at}, resources are reserved for it from then on"]
        return [
            f"other jobs may start ahead of it until {at}; after that, resources are reserved for it until it starts"
        ]
    if delay_ends_at is None:
        return []
    if delay_ends_at <= now:
        return ["only the jobs that run there still delay it"]
    at = instant(up_to_minute(delay_ends_at, now), now)
    if not told:
        return [f"other jobs may delay it until {at} at most"]
    if delay_ends_at > max(told):
        return [f"other jobs may delay it beyond that, until {at} at most"]
    return [f"no job that starts after {at} delays it"]


def why_lines(why: dict[str, Any], now: float) -> list[str]:
    """The predictions of `gq --why`; empty unless the job is pending."""
    if why["state"] != "PENDING":
        return []
    lines = _priority(why)
    if why.get("place") is not None:
        lines.append(f"position in the queue: {why['place']} of {why['of']}")
    condition = " and its dependencies succeed" if why["reason"] == "Dependency" else ""
    lines.append(f"start: {_start(why.get('start'), now, condition, unknown(why['reason'], why.get('place')))}")
    lines.extend(_likely(why.get("start"), now))
    lines.extend(_bound_lines(why.get("facts", {}), why.get("start"), now))
    accuracy = why.get("accuracy")
    if why.get("start") and accuracy and accuracy["count"] >= _ENOUGH:
        lines.append(
            f"accuracy so far: {accuracy['inside']:.0%} of {accuracy['count']} jobs started within their range, "
            f"half of them within {format_duration(accuracy['median_error_s'])} of its beginning"
        )
        if accuracy.get("likely_count", 0) >= _ENOUGH:
            lines[-1] += (
                f"; {accuracy['likely_inside']:.0%} of {accuracy['likely_count']} within the range for four in five"
            )
    if expected := expected_text(why.get("expected")):
        lines.append(f"expected to run {expected}")
    for one in why.get("leanings", ()):
        lines.append(f"node {one['node']} is {'preferred' if one['points'] > 0 else 'avoided'}: {one['text']}")
    if why.get("burst"):
        lines.append(why["burst"])
    if why.get("preemption"):
        lines.append(f"preemption: {why['preemption']}")
    lines.extend(_advice(why["id"], one, now) for one in why.get("alternatives", ()))
    return lines


def _priority(why: dict[str, Any]) -> list[str]:
    """The parts of the job's priority in its queue; empty in orders without parts."""
    if why.get("order") in ORDERS_BY_WEIGHT:
        return [f"priority: {priority_text(why['priority'])}"]
    found = why.get("response")
    if not found:
        return []
    expected = "unknown" if found["expected_s"] is None else format_duration(found["expected_s"])
    return [
        f"response ratio: {found['ratio']:.2f} (turn {found['turn']}, share {found['share']:.2f}, waited "
        f"{format_duration(found['waited_s'])}, expected {expected}, urgency {found['urgency']:.2f})"
    ]


ORDERS_BY_WEIGHT = ("multifactor", "hybrid", "priority")
"""Orders in which the parts of the weighted sum count."""


def priority_text(priority: Mapping[str, float]) -> str:
    """`13682.0 (age 0.0, fairshare 500.0)`."""
    parts = ", ".join(f"{name} {value:.1f}" for name, value in priority.items() if name != "total")
    return f"{priority['total']:.1f} ({parts})"


def expected_text(expected: dict[str, Any] | None) -> str:
    """The expected run time of a pending job and its basis; empty if there is none."""
    if not expected or expected["length_s"] is None:
        return ""
    length = format_duration(expected["length_s"])
    by = expected.get("by")
    if by is None:
        return length
    if by == "prediction" and not expected["is_stated"]:
        return f"{length}, like similar jobs"
    if by == "overruns":
        limit = format_duration(expected["time_limit_s"])
        return f"{length} instead of {limit}: {plural(expected['overruns'], 'similar job')} reached the time limit"
    said = expected["predictions"]
    text = f"{length}, as predicted" if by == "prediction" else f"{length}, its time limit"
    if said["runs"] < _ENOUGH_RUNS or not expected["is_stated"]:
        return text if by == "prediction" else ""
    whose = f"{expected['user']}'s last {said['runs']} jobs" if said["is_own"] else f"the last {said['runs']} jobs"
    return (
        f"{text}: limits of {whose} were off by a factor of {said['limit_factor']:.1f}, "
        f"predictions by {said['guess_factor']:.1f}"
    )


def _likely(start: dict[str, Any] | None, now: float) -> list[str]:
    """The range that holds four in five starts, once enough jobs have started to know it."""
    if start is None or start.get("likely_high_at") is None:
        return []
    first, last = ends(start["likely_low_at"], start["likely_high_at"], now)
    between = f"at {last}" if first == last else f"between {first} and {last}"
    return [f"four in five jobs with this estimate started {between}"]


def limit_lines(found: dict[str, Any]) -> list[str]:
    """The line of `gsub --dry-run` about an implicit time limit; empty if one was stated or none applies."""
    if found["limit_text"]:
        return [found["limit_text"]]
    words = {"default": "the default", "maximum": "the maximum"}.get(found["time_limit_source"] or "")
    return [] if words is None else [f"time limit {format_duration(found['time_limit_s'])}, {words}"]


def forecast_lines(found: dict[str, Any]) -> list[str]:
    """Lines of `gsub --dry-run` after the verdict: the predicted start, and what would make it earlier."""
    if found["verdict"] != "waits":
        return []
    now = time.time()
    span = {"low_at": found["start_low_at"], "high_at": found["start_at"]}
    is_known = any(at is not None for at in span.values())
    condition = " and its dependencies succeed" if found["reason"] == "Dependency" else ""
    return [
        f"start: {_start(span if is_known else None, now, condition, unknown(found['reason'], None))}",
        *(one["text"] for one in found["alternatives"]),
    ]


def _start(found: dict[str, Any] | None, now: float, condition: str, unknown: str) -> str:
    if found is None:
        return unknown
    first, last = ends(found["low_at"], found["high_at"], now)
    if not last:
        return f"{first}, if jobs run as long as usual{condition}; the latest start is unknown"
    if first == last:
        return f"{last} at the latest, if no later submission goes ahead of it{condition}"
    return (
        f"between {first}, if jobs run as long as usual, and {last}, if they use their full time limits and "
        f"no later submission goes ahead of it{condition}"
    )


def _advice(job_id: str, one: dict[str, Any], now: float) -> str:
    line = one["text"] if one["starts"] == "now" else f"{one['text']} ({instant(one['starts'], now)})"
    key = one["update"].partition("=")[0]
    return f"{line}: gctl update {job_id} {one['update']}" if key in UPDATES else line


BUDGET_S = 0.5
SAID_S = 86_400.0
"""After a hint, no further one is requested for this long."""
SLOW_S = 0.1
"""An answer that takes longer and contains no hint is not requested again for `REST_S`."""
REST_S = 600.0
_OFF = ("0", "no", "off", "false")
_NO_PERSON = (
    *("GPUSCHED_JOB_ID", "SLURM_JOB_ID"),
    *("CI", "GITHUB_ACTIONS", "GITLAB_CI", "JENKINS_URL", "BUILDKITE", "TEAMCITY_VERSION", "TF_BUILD"),
)
"""Variables that indicate a job or continuous integration."""


def is_typed_by_hand() -> bool:
    """Whether a person typed this command at a terminal and has not disabled hints.

    A shell gives each typed command its own process group; the commands of a script share the script's.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()) or os.getpgrp() != os.getpid():
        return False
    if os.environ.get("GPUSCHED_HINTS", "").lower() in _OFF:
        return False
    return not any(os.environ.get(name, "").lower() not in ("", *_OFF) for name in _NO_PERSON)


def say(client: DaemonConnection, job_id: str) -> None:
    """Print the effect of a time limit, at most once a day, if it is known within the budget. Never fails."""
    try:
        make_private(paths.state_dir())
        mark = os.open(paths.limit_hint(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except (OSError, GpuschedError):
        # Without a record, the hint would be repeated each time.
        return
    try:
        # Of several processes at once, as from xargs, only one asks.
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        began = time.time()
        if began < os.fstat(mark).st_mtime <= began + SAID_S:
            return
        # Recorded first, so that a command killed meanwhile does not lead to a second hint.
        _rest_until(mark, began + REST_S)
        text = _text(client.try_once(f"/v1/jobs/{job_id}/limit-hint", BUDGET_S), job_id)
        now = time.time()
        if text:
            _rest_until(mark, now + SAID_S)
            output.note("gsub", text)
        elif now - began < SLOW_S:
            _rest_until(mark, now)
    except OSError:
        return
    except KeyboardInterrupt:
        # The job is accepted; only the hint is given up.
        return
    finally:
        os.close(mark)


def _rest_until(mark: int, at: float) -> None:
    os.utime(mark, (at, at))


def _text(answer: dict[str, Any] | None, job_id: str) -> str:
    hint = answer and answer["hint"]
    if not hint:
        return ""
    from gpusched.model.units import format_duration

    now = time.time()
    with_limit = instant(hint["start_at"], now)
    expected = "would start now" if with_limit == "now" else f"is expected to start at about {with_limit}"
    default_s, without_at = hint["time_limit_s"], hint["start_without_at"]
    without = "without one" if default_s is None else f"with the default of {format_duration(default_s)}"
    otherwise = "at an unknown time" if without_at is None else f"at about {instant(without_at, now)}"
    return (
        f"jobs like it took {hint['usual']}; with -t {hint['typed']} it {expected}, {without} {otherwise}: "
        f"gctl update {job_id} time={hint['typed']}"
    )
