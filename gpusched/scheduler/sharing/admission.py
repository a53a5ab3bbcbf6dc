"""What the queues and QOS refuse at submission: what no waiting would change, and too many jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpusched.model.job import AUTO, DEFAULT, MAXIMUM, TIME_LIMIT_WORDS, UNLIMITED, JobSpec, Request
from gpusched.model.settings import QosSettings, QueueSettings, Settings
from gpusched.model.spelling import closest
from gpusched.model.units import format_amount_floor, format_duration, format_size_mib, plural, printable
from gpusched.model.value import replace
from gpusched.scheduler.capacity import Refusal, format_size_floor
from gpusched.scheduler.sharing.upward import chain_of
from gpusched.scheduler.words import choose


@dataclass(frozen=True, slots=True)
class Tally:
    """Jobs that wait or run now, without the one that asks; queues by the name the jobs were submitted to."""

    by_queue: Mapping[str, int] = field(default_factory=dict)
    by_queue_user: Mapping[tuple[str, str], int] = field(default_factory=dict)
    by_qos_user: Mapping[tuple[str, str], int] = field(default_factory=dict)


def qos_of(spec: JobSpec, settings: Settings) -> str:
    """The QOS that a job has: its own, or the default; empty for none."""
    return spec.qos or settings.default.qos


class TimeLimit(NamedTuple):
    """A time limit and where it comes from."""

    seconds: int | None
    source: str
    """As `JobSpec.time_limit_source`."""


def time_limit(spec: JobSpec, settings: Settings) -> TimeLimit:
    """The time limit that a job gets: what it asks for, else the default of its queue, or of all, as far as allowed."""
    if spec.time_limit_s is not None or spec.time_limit_source in TIME_LIMIT_WORDS:
        return TimeLimit(spec.time_limit_s, spec.time_limit_source)
    default_s = default_time_limit(spec.queue, settings)
    most_s = longest_time_limit(spec, settings)
    if most_s is not None and (default_s is None or most_s < default_s):
        return TimeLimit(most_s, MAXIMUM)
    return TimeLimit(default_s, "" if default_s is None else DEFAULT)


def limit_as_asked(spec: JobSpec) -> JobSpec:
    """The submission with what was asked for of a time limit, not with what came of it."""
    if spec.time_limit_source in ("", UNLIMITED):
        return spec
    return replace(spec, time_limit_s=None, time_limit_source=AUTO if spec.time_limit_source == AUTO else "")


def default_time_limit(queue: str, settings: Settings) -> int | None:
    """The default of a queue, of the next one above it that has any, or of all; None without."""
    found = (one.default_time_s for one in chain_of(queue, settings.queue) if one.default_time_s is not None)
    return next(found, settings.default.time_limit_s)


def longest_time_limit(spec: JobSpec, settings: Settings) -> int | None:
    """The longest time limit that its queues and QOS allow; None where any is."""
    return min((limit for limit, _ in _time_limits(spec, settings)), default=None)


def why_refused(spec: JobSpec, user: str, settings: Settings, tally: Tally) -> Refusal | None:
    """Refuse a submission that its queue or QOS does not admit; None when they do.

    Names first, then who may use them, then how much one job may ask for, then how many jobs there may
    be. What machines can hold is not looked at here, nor whether the user is a member of the account: that is
    `membership`, asked only when the job is given its account.
    """
    account = spec.account or user
    qos_name = qos_of(spec, settings)
    refused = _wrong_queue(spec.queue, settings) or _wrong_qos(qos_name, spec, settings)
    if refused is not None:
        return refused
    chain = list(chain_of(spec.queue, settings.queue))
    qos = settings.qos.get(qos_name)
    return (
        _not_admitted_to_queue(chain, user, account, settings)
        or (qos and _not_admitted_to_qos(qos, user, account, settings))
        or _too_large(spec.request, chain, qos)
        or _too_long(spec, settings)
        or _too_many(chain, qos, user, settings, tally)
        or None
    )


# Names


def _wrong_queue(name: str, settings: Settings) -> Refusal | None:
    if not settings.queue:
        return None
    leaves = _leaves(settings.queue)
    if name not in settings.queue:
        return _unknown("queue", name, leaves, "-q")
    below = sorted(queue.name for queue in settings.queue.values() if queue.parent == name)
    if not below:
        return None
    return Refusal(f"queue {name} takes no jobs itself, only the queues below it do", choose(below, "-q"))


def _wrong_qos(name: str, spec: JobSpec, settings: Settings) -> Refusal | None:
    if not name or name in settings.qos:
        return None
    if settings.qos:
        return _unknown("QOS", name, settings.qos, "--qos")
    hint = "submit without --qos" if spec.qos else "set [default] qos to nothing in the config file"
    return Refusal(f"there is no QOS {name!r}, because none is configured", hint)


def _unknown(what: str, name: str, known: Iterable[str], option: str) -> Refusal:
    names = sorted(known)
    near = closest(name, names)
    hint = f"did you mean {option} {near}?" if near else choose(names, option)
    return Refusal(f"there is no {what} {name!r}", hint)


def _leaves(queues: Mapping[str, QueueSettings]) -> list[str]:
    parents = {queue.parent for queue in queues.values()}
    return sorted(name for name in queues if name not in parents)


# Who


def _not_admitted_to_queue(
    chain: Iterable[QueueSettings], user: str, account: str, settings: Settings
) -> Refusal | None:
    barred = _barred_by(chain, user, account, settings)
    if barred is None:
        return None
    others = [
        name
        for name in _leaves(settings.queue)
        if _barred_by(chain_of(name, settings.queue), user, account, settings) is None
    ]
    hint = choose(others, "-q") if others else "see who may use which with: ginfo queues"
    return Refusal(f"user {user} of account {printable(account)} may not submit to queue {barred.name}", hint)


def _barred_by(chain: Iterable[QueueSettings], user: str, account: str, settings: Settings) -> QueueSettings | None:
    """The nearest queue that says who may use it decides, from the bottom up; None when it admits the user."""
    for queue in chain:
        if queue.users or queue.accounts:
            return None if _admits(queue.users, queue.accounts, user, account, settings) else queue
    return None


def _not_admitted_to_qos(qos: QosSettings, user: str, account: str, settings: Settings) -> Refusal | None:
    def admits(one: QosSettings) -> bool:
        everybody = not (one.users or one.accounts)
        return everybody or _admits(one.users, one.accounts, user, account, settings)

    if admits(qos):
        return None
    others = [other.name for other in settings.qos.values() if admits(other)]
    hint = choose(others, "--qos") if others else "submit without --qos"
    return Refusal(f"user {user} of account {printable(account)} may not use QOS {qos.name}", hint)


def _admits(users: Collection[str], accounts: Collection[str], user: str, account: str, settings: Settings) -> bool:
    """Whether this user, this account or any account above it is named."""
    path = (account, *(one.name for one in chain_of(account, settings.account)))
    return user in users or any(name in accounts for name in path)


# How much


def _too_large(request: Request, chain: Sequence[QueueSettings], qos: QosSettings | None) -> Refusal | None:
    """More than a job, a user or all jobs together may ever hold."""
    for where, limits in _limited(chain, qos):
        found = [
            (limit, who)
            for limit, who in (
                (limits.max_gpus_per_job, f"a job in {where}"),
                (limits.max_gpus_per_user, f"a user in {where}"),
                (limits.max_gpus, where),
            )
            if limit is not None
        ]
        if not found or not request.gpus:
            continue
        limit, who = min(found, key=lambda one: one[0])
        if not limit:
            asked = plural(request.gpus, "GPU")
            return Refusal(f"asked for {asked}; {who} may hold none", "name another one, or ask for no GPU")
        most, count = plural(limit, "GPU"), _gpus(request)
        if count > limit:
            # Parts are of one card only: 2.5 GPUs cannot be asked for.
            option = f"-g {int(limit) if limit > 1 else format_amount_floor(limit)}"
            return _too_much(plural(count, "GPU"), who, most, option, request)
    return _too_much_else(request, chain)


def _limited(
    chain: Iterable[QueueSettings], qos: QosSettings | None
) -> Iterator[tuple[str, QueueSettings | QosSettings]]:
    for queue in chain:
        yield f"queue {queue.name}", queue
    if qos is not None:
        yield f"QOS {qos.name}", qos


def _gpus(request: Request) -> float:
    """GPUs that the request counts as at least; slices by memory count nothing before there is a card."""
    if request.vram_mib is not None:
        return 0.0
    return request.nodes * (request.gpus if request.gpu_fraction is None else request.gpu_fraction)


def _too_much_else(request: Request, chain: Iterable[QueueSettings]) -> Refusal | None:
    cpus, mem_mib = request.cpus * request.nodes, request.mem_mib * request.nodes
    for queue in chain:
        who = f"queue {queue.name}"
        if queue.max_cpus is not None and cpus > queue.max_cpus:
            option = f"-c {format_amount_floor(queue.max_cpus)}"
            return _too_much(plural(cpus, "CPU"), who, plural(queue.max_cpus, "CPU"), option, request)
        if queue.max_mem_mib is not None and mem_mib > queue.max_mem_mib:
            most = f"{format_size_mib(queue.max_mem_mib)} of memory"
            asked = f"{format_size_mib(mem_mib)} of memory"
            return _too_much(asked, who, most, f"-m {format_size_floor(queue.max_mem_mib)}", request)
    return None


def _too_much(asked: str, who: str, most: str, option: str, request: Request) -> Refusal:
    text = f"asked for {asked}; {who} may hold at most {most}"
    if request.nodes > 1:
        return Refusal(
            f"asked for {asked} on {request.nodes} nodes; {who} may hold at most {most}",
            f"ask for fewer nodes, or for at most {option} on all of them together",
        )
    return Refusal(text, f"ask for less: {option}")


# How long


def _time_limits(spec: JobSpec, settings: Settings) -> list[tuple[int, str]]:
    qos = settings.qos.get(qos_of(spec, settings))
    return [
        (limits.max_time_s, where)
        for where, limits in _limited(chain_of(spec.queue, settings.queue), qos)
        if limits.max_time_s is not None
    ]


def _too_long(spec: JobSpec, settings: Settings) -> Refusal | None:
    limits = _time_limits(spec, settings)
    if not limits:
        return None
    most_s, where = min(limits)
    most = format_duration(most_s)
    if spec.time_limit_s is None:
        if spec.time_limit_source != UNLIMITED:
            return None
        return Refusal(f"asked for no time limit; {where} allows at most {most}", f"ask for one: -t {most}")
    if spec.time_limit_s <= most_s:
        return None
    asked = format_duration(spec.time_limit_s)
    return Refusal(f"asked for a time limit of {asked}; {where} allows at most {most}", f"ask for less: -t {most}")


# How many


def _too_many(
    chain: Iterable[QueueSettings], qos: QosSettings | None, user: str, settings: Settings, tally: Tally
) -> Refusal | None:
    for queue in chain:
        if queue.max_jobs is None and queue.max_jobs_per_user is None:
            continue
        names = _below(queue.name, settings.queue)
        all_jobs = sum(tally.by_queue.get(name, 0) for name in names)
        if queue.max_jobs is not None and all_jobs >= queue.max_jobs:
            return Refusal(
                f"queue {queue.name} may hold {plural(queue.max_jobs, 'job')} and holds {all_jobs}",
                f"wait until some have ended, or cancel some: gq -q {queue.name}",
            )
        own_jobs = sum(tally.by_queue_user.get((name, user), 0) for name in names)
        if queue.max_jobs_per_user is not None and own_jobs >= queue.max_jobs_per_user:
            return _too_many_of_user(f"queue {queue.name}", user, queue.max_jobs_per_user, own_jobs)
    if qos is not None and qos.max_jobs_per_user is not None:
        own_jobs = tally.by_qos_user.get((qos.name, user), 0)
        if own_jobs >= qos.max_jobs_per_user:
            return _too_many_of_user(f"QOS {qos.name}", user, qos.max_jobs_per_user, own_jobs)
    return None


def _too_many_of_user(where: str, user: str, most: int, held: int) -> Refusal:
    return Refusal(
        f"user {user} may have {plural(most, 'job')} in {where} and has {held}",
        f"wait until some have ended, or cancel some: gq -u {user}",
    )


def _below(name: str, queues: Mapping[str, QueueSettings]) -> list[str]:
    """The queue and all below it, whose jobs are its own too."""
    return [other for other in queues if any(queue.name == name for queue in chain_of(other, queues))]
