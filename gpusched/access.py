"""Who may do what to whose: the one place that answers it, for every command and every route.

Three kinds of people have rights over what is not theirs: root and the daemon's own user; members of the admin group,
as the system's user database says at the time of the call; operators of a queue and of the queues below it. Whoever
has none of them is a stranger to the job.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Collection
from enum import Enum

from gpusched.errors import Forbidden, NotFound
from gpusched.model.commands import Caller
from gpusched.model.job import Job
from gpusched.model.settings import Settings
from gpusched.scheduler.admission import accounts_of, default_account, groups_listed


class Act(str, Enum):
    """What is done to a job, in the words of the audit record."""

    CANCEL = "cancel"
    SIGNAL = "signal"
    HOLD = "hold"
    RELEASE = "release"
    UPDATE = "update"
    SUSPEND = "suspend"
    RESUME = "resume"
    REQUEUE = "requeue"
    READ = "read"
    """See all about it: its name, its command, its paths, its story."""
    SCRIPT = "read the script of"
    ATTACH = "attach to"
    REPEAT = "repeat"
    REWRITE = "change what runs in, or who is told of,"

    def __str__(self) -> str:
        return self.value


_OF_OPERATORS = frozenset(
    {
        *(Act.CANCEL, Act.SIGNAL, Act.HOLD, Act.RELEASE, Act.UPDATE, Act.SUSPEND, Act.RESUME, Act.REQUEUE),
        Act.READ,
    }
)
_OF_ADMINS = _OF_OPERATORS | {Act.SCRIPT}
_OF_ROOT = _OF_ADMINS | {Act.ATTACH, Act.REWRITE}
"""Whoever changes what runs, runs something as the owner: for that an admin needs to be root. To repeat a job is for
its owner alone, as what is repeated runs as whoever asks."""


class Hidden(NotFound):
    """There is such a job, and the caller must not learn of it: told as if there were none, and recorded."""


def user_name(uid: int) -> str:
    """Name of a user, or the number as text when the account is gone."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_root(caller: Caller) -> bool:
    """Whether this is root, or the user that the daemon itself runs as."""
    return caller.uid in (0, os.geteuid())


def is_admin(caller: Caller, settings: Settings) -> bool:
    """Whether this is root, or in the admin group right now."""
    if is_root(caller):
        return True
    group = settings.access.admin_group
    if group is None:
        return False
    return bool(groups_of(caller, (group,)))


def look_up_groups(uid: int, groups: Collection[str]) -> frozenset[str]:
    """Those of these groups in which the user database has this user at this moment; none for an unknown user."""
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
    """Those of these Unix groups that the user is in at this moment; what was looked up once holds for the request."""
    unknown = [group for group in groups if group not in caller.groups]
    if unknown:
        found = look_up_groups(caller.uid, unknown)
        caller.groups.update({group: group in found for group in unknown})
    return frozenset(group for group in groups if caller.groups[group])


def is_group(name: str) -> bool:
    """Whether the user database has such a group at this moment."""
    return _gid_of(name) is not None


def operates(caller: Caller, queue: str, settings: Settings) -> bool:
    """Whether this is an operator of the queue, or of one above it."""
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
    """Whether there is a queue of which this is an operator."""
    return any(caller.user in queue.operators for queue in settings.queue.values())


def manages(caller: Caller, queue: str, settings: Settings) -> bool:
    """Whether this is an admin, or an operator of the queue."""
    return is_admin(caller, settings) or operates(caller, queue, settings)


def may(caller: Caller, act: Act, job: Job, settings: Settings) -> bool:
    """Whether the caller may do this to the job."""
    if caller.uid == job.uid:
        return True
    if is_root(caller):
        return act in _OF_ROOT
    if act in _OF_OPERATORS and operates(caller, job.spec.queue, settings):
        return True
    return act in _OF_ADMINS and is_admin(caller, settings)


def hides(caller: Caller, job: Job, settings: Settings) -> bool:
    """Whether the caller must not learn that there is such a job."""
    return "jobs" in settings.access.private_data and not may(caller, Act.READ, job, settings)


def check(caller: Caller, act: Act, job: Job, settings: Settings) -> None:
    """Refuse what the caller may not do to the job. Raises: Forbidden; Hidden for a job not theirs to know."""
    if may(caller, act, job, settings):
        return
    if hides(caller, job, settings):
        raise unknown(job.shown_id)
    raise Forbidden(
        f"job {job.shown_id} belongs to {job.user}, not to {caller.user}", "list your own jobs with: gq --me"
    )


def unknown(shown_id: str) -> Hidden:
    """As of a job that does not exist."""
    return Hidden(f"there is no job {shown_id}", "list the jobs with: gq -a")


def check_admin(caller: Caller, what: str, settings: Settings) -> None:
    """Refuse what only admins may do to the daemon and its machines. Raises: Forbidden."""
    if not is_admin(caller, settings):
        raise Forbidden(f"only an admin may {what}, not {caller.user}", "ask " + admins(settings))


def admins(settings: Settings) -> str:
    """Whom a user can ask."""
    group = settings.access.admin_group
    return f"root, or a member of group {group}" if group else "root"


def is_private(what: str, caller: Caller, settings: Settings) -> bool:
    """Whether data of this kind (`usage`, `accounts`, `reservations`, `jobs`) of others are hidden from the caller."""
    return what in settings.access.private_data and not is_admin(caller, settings)


def no_job(job_id: int, next_id: int) -> NotFound:
    """The error about a job that the table does not have; one that was pruned is told from one that never was."""
    if 0 < job_id < next_id:
        return NotFound(
            f"there is no job {job_id} any more: it ended long ago and was pruned",
            "history.keep_days sets how long jobs are kept: gpusched config show",
        )
    return NotFound(f"there is no job {job_id}", "list the jobs with: gq -a")


def account_by_default(owner: Caller, settings: Settings) -> str | None:
    """The account of a job of theirs that names none; None where it must name one."""
    if not settings.account:
        return owner.user
    return default_account(owner.user, account_groups(owner, settings), settings)


def own_accounts(owner: Caller, settings: Settings) -> list[str]:
    """Accounts that this user may submit to; without configured ones that of their own name."""
    return accounts_of(owner.user, account_groups(owner, settings), settings) if settings.account else [owner.user]


def account_groups(owner: Caller, settings: Settings) -> frozenset[str]:
    """Those of the Unix groups that the configured accounts list which this user is in."""
    return groups_of(owner, groups_listed(settings))
