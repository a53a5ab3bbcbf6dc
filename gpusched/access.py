"""Access control: the single place that decides who may do what to which job, for every command and route.

Three kinds of users have rights over other users' jobs: root and the daemon's own user; members of the admin group,
according to the system's user database at the time of the call; operators of a queue and of the queues below it.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import cached_property

from gpusched.errors import Forbidden, NotFound
from gpusched.model.commands import Caller
from gpusched.model.job import Job
from gpusched.model.mentions import JOB, RESERVATION, render
from gpusched.model.queue_settings import chain_of
from gpusched.model.settings import Settings
from gpusched.model.snapshot import CalendarEntry
from gpusched.model.units import is_digits
from gpusched.scheduler.admission import accounts_of, default_account, groups_listed


class Act(str, Enum):
    """An operation on a job, as worded in the audit record."""

    CANCEL = "cancel"
    SIGNAL = "signal"
    HOLD = "hold"
    RELEASE = "release"
    UPDATE = "update"
    PRIORITISE = "change the priority of"
    SUSPEND = "suspend"
    RESUME = "resume"
    REQUEUE = "requeue"
    READ = "read"
    """See everything about it: its name, command, paths, history."""
    SCRIPT = "read the script of"
    OUTPUT = "read the output of"
    """Where the daemon reads it, with the owner's rights; elsewhere the permissions of the file decide."""
    ATTACH = "attach to"
    ENTER = "start a process in"
    REPEAT = "repeat"
    REWRITE = "change what runs in, or who is notified of,"

    def __str__(self) -> str:
        return self.value


_OF_OPERATORS = frozenset(
    {
        *(Act.CANCEL, Act.SIGNAL, Act.HOLD, Act.RELEASE, Act.UPDATE, Act.SUSPEND, Act.RESUME, Act.REQUEUE),
        *(Act.PRIORITISE, Act.READ),
    }
)
_OF_COORDINATORS = frozenset({Act.CANCEL, Act.HOLD, Act.RELEASE, Act.PRIORITISE})
"""Of an account, over its jobs. They see that these exist, but not their commands and paths."""
_OF_ADMINS = _OF_OPERATORS | {Act.SCRIPT}
_OF_ROOT = _OF_ADMINS | {Act.OUTPUT, Act.ATTACH, Act.REWRITE}
"""Changing what a job runs means running code as its owner: this takes root, not just an admin. Repeating a job is
reserved for its owner, since the repetition runs as the caller, and so is starting a process in it: root becomes its
owner for that."""


class Hidden(NotFound):
    """The job exists, but the caller must not learn of it: reported as if it did not exist, and recorded."""


def user_name(uid: int) -> str:
    """Name of a user, or the uid as text if the account no longer exists."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_root(caller: Caller) -> bool:
    """Whether the caller is root or the user the daemon runs as."""
    return caller.uid in (0, os.geteuid())


def is_admin(caller: Caller, settings: Settings) -> bool:
    """Whether the caller is root or currently in the admin group."""
    if is_root(caller):
        return True
    group = settings.access.admin_group
    if group is None:
        return False
    return bool(groups_of(caller, (group,)))


def look_up_groups(uid: int, groups: Collection[str]) -> frozenset[str]:
    """The groups among these that the user is in according to the current user database; none for an unknown user."""
    try:
        user = pwd.getpwuid(uid)
        gids = frozenset(os.getgrouplist(user.pw_name, user.pw_gid))
    except (KeyError, OSError):
        return frozenset()
    return frozenset(group for group in groups if _gid_of(group) in gids)


def _gid_of(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, OSError):
        return None


def groups_of(caller: Caller, groups: Collection[str]) -> frozenset[str]:
    """The Unix groups among these that the user is currently in; looked up once per request."""
    unknown = [group for group in groups if group not in caller.groups]
    if unknown:
        found = look_up_groups(caller.uid, unknown)
        caller.groups.update({group: group in found for group in unknown})
    return frozenset(group for group in groups if caller.groups[group])


def is_group(name: str) -> bool:
    """Whether the user database currently has this group."""
    return _gid_of(name) is not None


def operates(caller: Caller, queue: str, settings: Settings) -> bool:
    """Whether the caller is an operator of the queue or of one above it."""
    known = settings.queue
    passed = set()
    name: str | None = queue
    while name is not None and name in known and name not in passed:
        if caller.user in known[name].operators:
            return True
        passed.add(name)
        name = known[name].parent
    return False


def is_operator(caller: Caller, settings: Settings) -> bool:
    """Whether the caller is an operator of any queue."""
    return any(caller.user in queue.operators for queue in settings.queue.values())


def coordinates(caller: Caller, account: str, settings: Settings) -> bool:
    """Whether the caller is a coordinator of the account or of one above it."""
    return any(caller.user in one.coordinators for one in chain_of(account, settings.account))


def coordinated_accounts(caller: Caller, settings: Settings) -> list[str]:
    """Accounts that the caller coordinates, by name."""
    return sorted(name for name in settings.account if coordinates(caller, name, settings))


def manages(caller: Caller, queue: str, settings: Settings) -> bool:
    """Whether the caller is an admin or an operator of the queue."""
    return is_admin(caller, settings) or operates(caller, queue, settings)


def may(caller: Caller, act: Act, job: Job, settings: Settings) -> bool:
    if caller.uid == job.uid:
        return True
    if is_root(caller):
        return act in _OF_ROOT
    if act in _OF_OPERATORS and operates(caller, job.spec.queue, settings):
        return True
    if act in _OF_COORDINATORS and coordinates(caller, job.spec.account, settings):
        return True
    return act in _OF_ADMINS and is_admin(caller, settings)


def hides(caller: Caller, job: Job, settings: Settings) -> bool:
    """Whether the job's existence is hidden from the caller."""
    if "jobs" not in settings.access.private_data or may(caller, Act.READ, job, settings):
        return False
    return not coordinates(caller, job.spec.account, settings)


def check(caller: Caller, act: Act, job: Job, settings: Settings) -> None:
    """Check that the caller may do this to the job. Raises: Forbidden; Hidden for a job hidden from the caller."""
    if may(caller, act, job, settings):
        return
    if hides(caller, job, settings):
        raise unknown(job.shown_id)
    raise Forbidden(
        f"job {job.shown_id} belongs to {job.user}, not to {caller.user}", "list your own jobs with: gq --me"
    )


def unknown(shown_id: str) -> Hidden:
    """The error for a hidden job, equal to that for one that does not exist."""
    return Hidden(f"there is no job {shown_id}", "list the jobs with: gq -a")


def check_admin(caller: Caller, what: str, settings: Settings) -> None:
    """Check that the caller is an admin. Raises: Forbidden."""
    if not is_admin(caller, settings):
        raise Forbidden(f"only an admin may {what}, not {caller.user}", "ask " + admins(settings))


def admins(settings: Settings) -> str:
    """The users to contact, as named in hints."""
    group = settings.access.admin_group
    return f"root, or a member of group {group}" if group else "root"


def is_private(what: str, caller: Caller, settings: Settings) -> bool:
    """Whether other users' `usage`, `accounts`, `reservations`, `jobs` or their `names` are hidden from the caller."""
    return what in settings.access.private_data and not is_admin(caller, settings)


def no_job(job_id: int, next_id: int) -> NotFound:
    """The error for a job that is not in the table; distinguishes pruned jobs from ones that never existed."""
    if 0 < job_id < next_id:
        return NotFound(
            f"there is no job {job_id} any more: it ended long ago and was pruned",
            "history.keep_days sets how long jobs are kept: gpusched config show",
        )
    return NotFound(f"there is no job {job_id}", "list the jobs with: gq -a")


def account_by_default(owner: Caller, settings: Settings) -> str | None:
    """The account of a user's jobs that name none; None if they must name one."""
    if not settings.account:
        return owner.user
    return default_account(owner.user, account_groups(owner, settings), settings)


def own_accounts(owner: Caller, settings: Settings) -> list[str]:
    """Accounts that the user may submit to; if none are configured, the one of the user's own name."""
    return accounts_of(owner.user, account_groups(owner, settings), settings) if settings.account else [owner.user]


def account_groups(owner: Caller, settings: Settings) -> frozenset[str]:
    """The Unix groups listed by configured accounts that the user is in."""
    return groups_of(owner, groups_listed(settings))


class Audience:
    """What one reader may know of jobs and reservations, for the duration of a request or an alert.

    What it finds out is kept: a list has thousands of jobs.
    """

    def __init__(
        self,
        caller: Caller,
        settings: Settings,
        find: Callable[[int], Job | None],
        active: Mapping[int, Job],
        calendar: Mapping[str, CalendarEntry],
    ) -> None:
        """Args: find: a job by id, also an ended one. active: jobs that have not ended."""
        self.caller = caller
        self._settings = settings
        self._find = find
        self._active = active
        self._calendar = calendar
        self.is_restricted = is_private("jobs", caller, settings)
        """Some jobs of other users may be hidden from the reader."""
        self.hides_calendar = is_private("reservations", caller, settings)
        """Some reservations are hidden from the reader."""
        self._known: dict[tuple[str, str], bool] = {}

    def sees(self, job: Job) -> bool:
        """Whether the reader may know that the job exists."""
        return job.uid == self.caller.uid or not (self.is_restricted and hides(self.caller, job, self._settings))

    def may_use(self, entry: CalendarEntry) -> bool:
        """Whether a reservation is for the reader, by user name or account; maintenance is for all."""
        if entry.is_maintenance or self.caller.user in entry.users:
            return True
        return any(name in self._accounts for name in entry.accounts)

    @cached_property
    def _accounts(self) -> frozenset[str]:
        own = {job.spec.account for job in self._active.values() if job.uid == self.caller.uid}
        return frozenset(own_accounts(self.caller, self._settings)) | own

    def knows(self, kind: str, name: str) -> bool:
        """Whether the reader may know what a text mentions."""
        found = self._known.get((kind, name))
        if found is None:
            found = self._known[kind, name] = self._may_know(kind, name)
        return found

    def _may_know(self, kind: str, name: str) -> bool:
        if kind == JOB:
            if not self.is_restricted:
                return True
            # A task has the owner of its array. In a user's own words anything may follow a mark: ids of the table have
            # 18 digits at most.
            number = name.partition("_")[0]
            job = self._find(int(number)) if is_digits(number) and len(number) < 19 else None
            return job is not None and self.sees(job)
        if kind == RESERVATION:
            entry = self._calendar.get(name) if self.hides_calendar else None
            return entry is None or self.may_use(entry)
        return not (self.is_restricted or self.hides_calendar)

    def text(self, text: str) -> str:
        """A sentence for the reader."""
        return render(text, self.knows)
