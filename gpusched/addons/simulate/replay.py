"""Replays a recorded snapshot through `decide` and explains the plan; compares it with that of other settings.

Carries out nothing and loads no plug-in: the file is treated as data only.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gpusched import quickjson
from gpusched.addons.simulate.recording import BadRecording, Recording, decode
from gpusched.errors import BrokenInvariant, GpuschedError, NotFound
from gpusched.model.cluster import Allocation
from gpusched.model.job import GpuShare
from gpusched.model.mentions import render
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, Placement, Plan, Preempt, Reason, Snapshot
from gpusched.model.states import ReasonCode
from gpusched.model.units import plural, printable
from gpusched.model.value import replace
from gpusched.scheduler.infeasible import describe, describe_where
from gpusched.scheduler.invariants import check_invariants
from gpusched.scheduler.planner import Planner, decide
from gpusched.scheduler.whatif import alternatives

LARGEST_MIB = 256
"""Maximum size of a file: a queue of 100,000 jobs, all different, takes a fifth of it."""

STDIN = "-"


def queue_position(snapshot: Snapshot, settings: Settings, job_id: int) -> tuple[int, int] | None:
    """Position of a job, from 1, and the length of the queue; None if it is not in the visible part."""
    ordered = Planner.from_snapshot(snapshot, settings).in_order(snapshot.now)
    for place, (_, job) in enumerate(ordered, start=1):
        if job.id == job_id:
            return place, sum(waiting.total for waiting in snapshot.pending)
    return None


# --- the file -----------------------------------------------------------------------------------


def read_recording(path: str) -> Recording:
    """Read a recording from a file; `-` is standard input.

    Raises: NotFound; BadRecording for a file that is too large, is cut short, holds something else, or has an unknown
    version.
    """
    try:
        content = _content(path)
    except FileNotFoundError:
        raise NotFound(f"there is no snapshot {path}", "write one with: gpusched debug snapshot FILE") from None
    except IsADirectoryError:
        raise BadRecording(f"{path} is a folder, not a snapshot", f"ls {path}") from None
    try:
        document = quickjson.loads(content)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else printable(str(error), 80)
        raise BadRecording(
            f"{path} is cut short or damaged, not a JSON document: {why}",
            "write a new one with: gpusched debug snapshot FILE",
        ) from None
    try:
        return decode(document)
    except BadRecording as error:
        raise BadRecording(f"{path}: {error.message}", error.hint) from None


def _content(path: str) -> bytes:
    most = LARGEST_MIB << 20
    if path == STDIN:
        content = sys.stdin.buffer.read(most + 1)
    else:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            is_too_large = stat.S_ISREG(found.st_mode) and found.st_size > most
            content = b"" if is_too_large else file.read(most + 1)
            if is_too_large:
                raise _too_large(path)
    if len(content) > most:
        raise _too_large(path)
    return content


def _too_large(path: str) -> BadRecording:
    return BadRecording(f"{path} is larger than {LARGEST_MIB} MiB, too large for a snapshot", f"ls -lh {path}")


# --- the policy ---------------------------------------------------------------------------------


@contextmanager
def _told_when_it_fails() -> Iterator[None]:
    """Report a failure of the policy itself in a sentence, since such files are written for these cases."""
    try:
        yield
    except GpuschedError:
        raise
    except Exception as error:
        if os.environ.get("GPUSCHED_DEBUG"):
            raise
        raise BrokenInvariant(
            f"the planner fails on this snapshot: {type(error).__name__}: {printable(str(error), 200)}",
            "if gpusched wrote it as it is, report that with the file and what GPUSCHED_DEBUG=1 prints",
        ) from error


def plan_of(recording: Recording, settings: Settings) -> Plan:
    """Plan of `decide` with all reasons computed. Raises: BrokenInvariant if the policy itself fails."""
    with _told_when_it_fails():
        plan = decide(recording.snapshot, settings)
        return replace(plan, reasons=dict(plan.reasons))


# --- a plan in words ----------------------------------------------------------------------------


class Replay:
    """One recording under one set of settings."""

    def __init__(self, recording: Recording, settings: Settings, name: str) -> None:
        self.recording = recording
        self.settings = settings
        self.name = name
        self.plan = plan_of(recording, settings)
        snapshot = recording.snapshot
        self._name_of = snapshot.name_of
        self._class_of = {job.id: waiting for waiting in snapshot.pending for job in waiting.jobs}
        self._starts = {start.job_id: start.placement for start in self.plan.starts}

    def document(self) -> dict[str, Any]:
        """The complete plan in built-in types."""
        plan, now = self.plan, self.recording.snapshot.now
        return {
            "policy": self.name,
            "starts": [{**self._job(start.job_id), **place_of(start.placement)} for start in plan.starts],
            "preempts": [self._preempted(one) for one in plan.preempts],
            "resumes": [self._name_of(one.job_id) for one in plan.resumes],
            "reservations": [
                {
                    **self._job(kept.job_id),
                    **place_of(kept.placement),
                    "start_at": kept.start_at,
                    "in_s": None if kept.start_at is None else kept.start_at - now,
                }
                for kept in plan.reservations
            ],
            "waiting": list(self._waiting()),
            "has_more": any(
                waiting.total > len(waiting.jobs) and all(job.id in self._starts for job in waiting.jobs)
                for waiting in self.recording.snapshot.pending
            ),
        }

    def _job(self, job_id: int) -> dict[str, Any]:
        found = self._class_of.get(job_id)
        return {"job": self._name_of(job_id), **({} if found is None else about_class(found.key))}

    def _preempted(self, one: Preempt) -> dict[str, Any]:
        return {
            "job": self._name_of(one.job_id),
            "mode": one.mode,
            "for": self._name_of(one.for_job),
            "text": render(one.text),
        }

    def _waiting(self) -> Iterator[dict[str, Any]]:
        """Each class with jobs that stay pending, in the order of the plan."""
        classes = {waiting.key: waiting for waiting in self.recording.snapshot.pending}
        for key, reason in self.plan.reasons.items():
            waiting = classes[key]
            left = [job for job in waiting.jobs if job.id not in self._starts]
            yield {
                "jobs": waiting.total - (len(waiting.jobs) - len(left)),
                "first": self._name_of(left[0].id) if left else None,
                **about_class(key),
                **_reason(reason),
            }

    def of_job(self, name: str) -> dict[str, Any]:
        """Outcome for one job, with possible changes to it. Raises: NotFound, BrokenInvariant."""
        with _told_when_it_fails():
            return self._of_job(name)

    def _of_job(self, name: str) -> dict[str, Any]:
        snapshot = self.recording.snapshot
        held = [one for one in snapshot.allocations if self._name_of(one.job_id) == name]
        if held:
            return self._running(name, held)
        job_id = next((job_id for job_id in self._class_of if self._name_of(job_id) == name), None)
        if job_id is None:
            raise NotFound(self._not_there(name), "leave out --job to see those that are")
        waiting = self._class_of[job_id]
        job = next(one for one in waiting.jobs if one.id == job_id)
        planner = Planner.from_snapshot(snapshot, self.settings)
        planner.state.move_to(snapshot.now)
        ranking = planner.state.ranking
        priority = ranking.priority(waiting.key, job.queued_at)
        place = queue_position(snapshot, self.settings, job_id)
        found = {
            **self._job(job_id),
            "waited_s": snapshot.now - job.queued_at,
            "place": None if place is None else place[0],
            "of": None if place is None else place[1],
            "order": ranking.order_of(waiting.key.terms.queue),
            "priority": {"total": priority.total, **dict(priority.parts)},
        }
        if job_id in self._starts:
            return {**found, "verdict": "starts", **place_of(self._starts[job_id])}
        return {**found, "verdict": "waits", **self._why(waiting, job_id), "would_help": self._would_help(job_id)}

    def _why(self, waiting: PendingClass, job_id: int) -> dict[str, Any]:
        kept = next((one for one in self.plan.reservations if one.job_id == job_id), None)
        reserved = None if kept is None else {"start_at": kept.start_at, **place_of(kept.placement)}
        left = [job.id for job in waiting.jobs if job.id not in self._starts]
        reason = self.plan.reasons.get(waiting.key)
        if reason is None or (left and left[0] != job_id and kept is None):
            before = left.index(job_id)
            text = f"waits behind {plural(before, 'job')} of its own class: the same user and request"
            text += "" if reason is None else f"; the first of these {reason.text}"
            reason = Reason(ReasonCode.PRIORITY, text, {} if reason is None else reason.facts)
        return {**_reason(reason), "reservation": reserved}

    def _would_help(self, job_id: int) -> list[dict[str, Any]]:
        found = alternatives(self.recording.snapshot, self.settings, job_id)
        return [{"text": one.text, "option": one.option, "starts_at": one.starts_at} for one in found]

    def _running(self, name: str, held: list[Allocation]) -> dict[str, Any]:
        first = held[0]
        stops = next((one for one in self.plan.preempts if one.job_id == first.job_id), None)
        return {
            "job": name,
            "user": first.terms.user,
            "queue": first.terms.queue,
            "verdict": "runs" if stops is None else "makes room",
            "text": "" if stops is None else render(stops.text),
            "ran_s": self.recording.snapshot.now - first.start_at,
            "ends_at": first.expected_end_at,
            "node": first.node,
            "gpus": _indices(first.gpus),
            "others": [{"node": one.node, "gpus": _indices(one.gpus)} for one in held[1:]],
        }

    def _not_there(self, name: str) -> str:
        cut = [waiting for waiting in self.recording.snapshot.pending if waiting.total > len(waiting.jobs)]
        behind = ", or it is further back in its class than the planner looks" if cut else ""
        return f"job {printable(name, 40)} is neither running nor pending in this snapshot{behind}"


def about_class(key: ClassKey) -> dict[str, Any]:
    """Owner and request of these jobs."""
    where = describe_where(key.terms.request)
    return {
        "user": key.terms.user,
        "account": key.terms.account,
        "queue": key.terms.queue,
        "qos": key.terms.qos,
        "time_limit_s": key.time_limit_s,
        "asks": describe(key.terms.request, full=True) + (f" {where}" if where else ""),
    }


def place_of(place: Placement) -> dict[str, Any]:
    """Node, GPUs by index, cores and memory; for a gang, also its other nodes."""
    return {
        "node": place.node,
        "gpus": _indices(place.gpus),
        "uuids": [share.uuid for share in place.gpus],
        "cpus": place.cpus,
        "mem_mib": place.mem_mib,
        "others": [place_of(other) for other in place.others],
    }


def _indices(shares: Iterable[GpuShare]) -> list[int]:
    return [share.index for share in shares]


def _reason(reason: Reason) -> dict[str, Any]:
    shown = reason.render()
    return {"reason": str(shown.code), "text": shown.text, "facts": shown.facts}


# --- two plans ----------------------------------------------------------------------------------


def differences(before: Replay, after: Replay) -> dict[str, Any]:
    """Effect of the settings of `after` on the plan of `before`."""
    name_of = before.recording.snapshot.name_of
    old = {start.job_id: place_of(start.placement) for start in before.plan.starts}
    new = {start.job_id: place_of(start.placement) for start in after.plan.starts}
    kept_old = {kept.job_id: kept.start_at for kept in before.plan.reservations}
    kept_new = {kept.job_id: kept.start_at for kept in after.plan.reservations}
    stopped_old = {one.job_id for one in before.plan.preempts}
    stopped_new = {one.job_id for one in after.plan.preempts}
    return {
        "start_too": [{"job": name_of(job_id), **new[job_id]} for job_id in new if job_id not in old],
        "start_no_more": [{"job": name_of(job_id), **old[job_id]} for job_id in old if job_id not in new],
        "elsewhere": [
            {"job": name_of(job_id), "from": old[job_id], "to": new[job_id]}
            for job_id in new
            if job_id in old and old[job_id] != new[job_id]
        ],
        "reserved": [
            {"job": name_of(job_id), "from": kept_old.get(job_id), "to": kept_new.get(job_id)}
            for job_id in dict.fromkeys([*kept_old, *kept_new])
            if (job_id in kept_old, kept_old.get(job_id)) != (job_id in kept_new, kept_new.get(job_id))
            and job_id not in new.keys() ^ old.keys()
        ],
        "make_room_too": [name_of(job_id) for job_id in sorted(stopped_new - stopped_old)],
        "make_room_no_more": [name_of(job_id) for job_id in sorted(stopped_old - stopped_new)],
    }


def is_same(found: Mapping[str, Any]) -> bool:
    return not any(found.values())


# --- summary and notes ----------------------------------------------------------------------------


def summary(recording: Recording) -> dict[str, Any]:
    """Sizes of a snapshot's parts."""
    snapshot = recording.snapshot
    return {
        "release": recording.release,
        "now": snapshot.now,
        "nodes": len(snapshot.nodes),
        "gpus": sum(len(node.gpus) for node in snapshot.nodes),
        "running": len({held.job_id for held in snapshot.allocations}),
        "waiting": sum(waiting.total for waiting in snapshot.pending),
        "classes": len(snapshot.pending),
    }


def notes(recording: Recording) -> list[str]:
    """Facts about the file that readers of the plan need, one sentence each."""
    found = []
    if recording.plugins:
        names = ", ".join(printable(name, 40) for name in recording.plugins)
        found.append(f"plug-ins took part ({names}) but are not loaded here: the plan may differ from the daemon's")
    cut = sum(waiting.total - len(waiting.jobs) for waiting in recording.snapshot.pending)
    if cut:
        found.append(f"{plural(cut, 'job')} are further back in their classes than the planner looks")
    with _told_when_it_fails():
        wrong = check_invariants(recording.snapshot, recording.settings)
    return [*found, *(f"booked wrongly: {printable(text)}" for text in wrong)]
