"""Visibility for one caller: which jobs, and which of their fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import starmap
from typing import Any

from aiohttp import web

from gpusched.access import Act, Audience, Hidden, check, is_admin, is_operator, is_private, may
from gpusched.api.auth import caller_of
from gpusched.api.job_rows import DividedRows, RowMaker
from gpusched.api.render import JOB_FIELDS, JobContext, event_json, run_json
from gpusched.api.service import ApiService, service_of
from gpusched.errors import NotFound, Refused
from gpusched.lifecycle.dependencies import parse_dependency
from gpusched.model.commands import Caller
from gpusched.model.job import Job, JobEvent, Run
from gpusched.model.mentions import JOB, is_name, mentions
from gpusched.ports.tables import CALENDAR

MASKED = {name: one.mask for name, one in JOB_FIELDS.items() if not one.is_public}
"""Values shown to users without rights over a job in place of its other keys."""
NO_NAME = "-"
"""Shown in place of a job's name where names are private."""

_OF_RUN = frozenset(
    {
        *("run", "state", "node", "gpus", "cpus", "mem_mib", "start_at", "end_at", "exit_code", "signal", "outcome"),
        *("reason", "suspended_s", "idle_at"),
    }
)
_CALENDAR_FACTS = frozenset({"reservation", "begins_at", "ends_at"})


class Viewer:
    """One caller's view of jobs, for the duration of a request."""

    def __init__(self, service: ApiService, caller: Caller) -> None:
        self.service = service
        self.caller = caller
        self._settings = service.settings
        state = service.scheduler.state
        self.audience = Audience(caller, self._settings, self._found, state.jobs, state.rows[CALENDAR])
        """What the caller may know of jobs and reservations that a text mentions."""
        self.is_restricted = self.audience.is_restricted
        """Some jobs of other users may be hidden from the caller."""
        self.hides_names = is_private("names", caller, self._settings)
        """Names of some jobs of other users are hidden from the caller."""
        self._sees_all: dict[tuple[int, str], bool] = {}
        self._makers: dict[tuple[str, ...], tuple[RowMaker, RowMaker]] = {}

    @property
    def is_admin(self) -> bool:
        """Whether the caller may see everything about all jobs."""
        return is_admin(self.caller, self._settings)

    @property
    def is_operator(self) -> bool:
        """Whether the caller operates a queue, and so some other users' jobs."""
        return is_operator(self.caller, self._settings)

    # --- which jobs -----------------------------------------------------------------------------------

    def sees(self, job: Job) -> bool:
        """Whether the caller may know that the job exists."""
        return self.audience.sees(job)

    def sees_all_of(self, job: Job) -> bool:
        """Whether the caller may see the job's command and paths, and its name in any case."""
        owner_and_queue = job.uid, job.spec.queue
        found = self._sees_all.get(owner_and_queue)
        if found is None:
            # Depends on nothing else of a job, and a list has thousands.
            found = self._sees_all[owner_and_queue] = may(self.caller, Act.READ, job, self._settings)
        return found

    def sees_name(self, job: Job) -> bool:
        """Whether the caller may see the job's name."""
        return not self.hides_names or self.sees_all_of(job)

    def name_of(self, job: Job) -> str:
        """The job's name; `-` where it is hidden from the caller."""
        return job.spec.name if self.sees_name(job) else NO_NAME

    def _found(self, job_id: int) -> Job | None:
        return self.service.find_all([job_id]).get(job_id)

    def find(self, job_id: int) -> Job:
        """A job visible to the caller. Raises: NotFound, with the same message if the job is hidden."""
        job = self._found(job_id)
        if job is None or not self.sees(job):
            raise self.missing(job_id)
        return job

    def find_all(self, ids: Iterable[int]) -> dict[int, Job]:
        """The jobs among these that exist and are visible to the caller."""
        return {job_id: job for job_id, job in self.service.find_all(ids).items() if self.sees(job)}

    def missing(self, job_id: int) -> NotFound:
        """The error for a job that does not exist or is hidden from the caller."""
        if not self.is_restricted:
            return self.service.no_job(job_id)
        # Pruned jobs must not be distinguishable from hidden ones either.
        kind = Hidden if self.service.find_all([job_id]) else NotFound
        return kind(f"there is no job {job_id}", "list the jobs with: gq -a")

    def read(self, text: str, act: Act = Act.READ) -> Job:
        """The named job, if the caller may do this to it. Raises: NotFound, Forbidden, UsageError."""
        job = self.find(self.service.job_id(text, self.caller))
        self.check(job, act)
        return job

    def check(self, job: Job, act: Act = Act.READ) -> None:
        """Check that the caller may do this to the job. Raises: Forbidden, Hidden."""
        check(self.caller, act, job, self._settings)

    def check_dependency(self, dependency: str | None) -> None:
        """Refuse a dependency on a hidden job, as on one that does not exist. Raises: Refused."""
        if not (dependency and self.is_restricted):
            return
        try:
            conditions = parse_dependency(dependency).conditions
        except ValueError:
            return  # reported where the submission is read
        for one in conditions:
            if one.job_id and (job := self.service.find_all([one.job_id]).get(one.job_id)) and not self.sees(job):
                text = f"there is no job {one.shown_id} to depend on"
                raise HiddenDependency(text, "list the jobs with: gq -a", "dependency")

    # --- how much of them -----------------------------------------------------------------------------

    def job_json(self, job: Job, ctx: JobContext) -> dict[str, Any]:
        """A job as visible to this caller."""
        return self.rows(JOB_FIELDS)(job, ctx)

    def rows(self, names: Iterable[str]) -> Callable[[Job, JobContext], dict[str, Any]]:
        """A function that returns the selected keys of a job, in this order, as visible to this caller."""
        whole, part = self._makers_of(names)
        return lambda job, ctx: self._shown(whole(job, ctx)) if self.sees_all_of(job) else part(job, ctx)

    def encodable_rows(self, names: Iterable[str]) -> Callable[[Job, JobContext], dict[str, Any]]:
        """The same for lists that are encoded at once."""
        whole, part = self._makers_of(names)

        def row(job: Job, ctx: JobContext) -> dict[str, Any]:
            if self.sees_all_of(job):
                return self._shown(whole.encodable(job, ctx))
            return part.encodable(job, ctx)

        return row

    def divided_rows(self, names: Iterable[str]) -> DividedRows:
        """The same, with what jobs have in common apart."""
        return DividedRows(self.sees_all_of, self._shown, *self._makers_of(names))

    def _makers_of(self, names: Iterable[str]) -> tuple[RowMaker, RowMaker]:
        """Makers of rows for those with rights over the job, and for others."""
        names = tuple(names)
        makers = self._makers.get(names)
        if makers is None:
            hidden = {**MASKED, "name": NO_NAME} if self.hides_names else MASKED
            masked = {name: value for name, value in hidden.items() if name in names}
            makers = self._makers[names] = RowMaker(names), RowMaker(names, masked)
        return makers

    def _shown(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.is_restricted and isinstance(row.get("intruders"), list):
            row["intruders"] = [{**one, "job": self.name(one["job"])} for one in row["intruders"]]
        return row

    def run_json(self, job: Job, run: Run) -> dict[str, Any]:
        """A run of a job as visible to this caller."""
        found = run_json(run)
        if self.sees_all_of(job):
            return found
        return {name: value if name in _OF_RUN else None for name, value in found.items()}

    def story(self, job: Job, events: Iterable[JobEvent]) -> list[dict[str, Any]]:
        """The history of a job; empty for callers without rights over it."""
        if not self.sees_all_of(job):
            return []
        return [event_json(event) for event in events]

    def outcome(self, job: Job) -> dict[str, Any]:
        """The job's state, for clients that wait for it."""
        return {
            "id": job.shown_id,
            "state": job.state.value,
            "exit_code": job.exit_code,
            "signal": job.signal,
            "run": job.run,
            "reason": job.reason and str(job.reason),
            "reason_text": job.reason_text if self.sees_all_of(job) else None,
        }

    def facts(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Facts behind a reason, without those that consist of names hidden from the caller."""
        hidden = {name for name, value in facts.items() if self._is_hidden(value)}
        if "reservation" in hidden:
            hidden |= _CALENDAR_FACTS
        shown = {name: value for name, value in facts.items() if name not in hidden}
        if variants := shown.get("variants"):
            shown["variants"] = [{**one, "facts": self.facts(one["facts"])} for one in variants]
        return shown

    def _is_hidden(self, value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._is_hidden, value))
        return isinstance(value, str) and is_name(value) and not all(starmap(self.audience.knows, mentions(value)))

    def job_of(self, handle: str | None) -> str | None:
        """The id of a run's job; `-` if that is hidden from the caller, None without a run."""
        return None if handle is None else self.name(self.service.scheduler.answers.name_of_run(handle))

    def name(self, shown_id: str | None) -> str | None:
        """A job's id; `-` if the job is hidden from the caller."""
        return shown_id if shown_id is None or self.audience.knows(JOB, shown_id) else "-"


class HiddenDependency(Refused, Hidden):
    """A dependency on a job hidden from the caller."""

    code = Refused.code
    http_status = Refused.http_status


def viewer_of(request: web.Request) -> Viewer:
    """The view of the request's caller. Raises: Forbidden."""
    return Viewer(service_of(request), caller_of(request))
