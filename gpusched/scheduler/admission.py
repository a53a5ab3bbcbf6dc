"""Refusals by queues and QOS at submission: requests that waiting cannot help, and too many jobs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpusched.model.bundles import part_of, totals
from gpusched.model.cluster import JobTerms, NodeView
from gpusched.model.job import Job, JobSpec, Request
from gpusched.model.queue_settings import EVERYBODY, AccountSettings, QosSettings, QueueSettings, chain_of
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Reason
from gpusched.model.spec import AUTO, DEFAULT, MAXIMUM, TIME_LIMIT_WORDS, UNLIMITED
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.units import (
    MOST_CHOICES,
    choose,
    closest,
    format_amount_floor,
    format_duration,
    format_size_mib,
    name_some,
    plural,
    printable,
    with_value,
)
from gpusched.model.value import replace
from gpusched.model.variants import each_variant, of_specs, with_variant
from gpusched.scheduler.bundles import fewest_nodes
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.infeasible import Refusal, describe, format_size_floor, on
from gpusched.scheduler.limits import Denial
from gpusched.scheduler.quota import Quotas
from gpusched.scheduler.usage import demand


@dataclass(frozen=True, slots=True)
class Tally:
    """Pending and running jobs, excluding the one being submitted; queues by the name used at submission."""

    by_queue: Mapping[str, int] = field(default_factory=dict)
    by_queue_user: Mapping[tuple[str, str], int] = field(default_factory=dict)
    by_qos_user: Mapping[tuple[str, str], int] = field(default_factory=dict)


NORMAL_QOS = "normal"
"""Slurm's QOS of every job that names none; here it names the default unless it is configured."""


def qos_of(spec: JobSpec, settings: Settings) -> str:
    """QOS of a job: its own or the default; empty for none. While none is configured, its own is only a label."""
    is_default = not (spec.qos and settings.qos) or (spec.qos == NORMAL_QOS and NORMAL_QOS not in settings.qos)
    return settings.default.qos if is_default else spec.qos


def labels_of(spec: JobSpec, user: str, settings: Settings) -> tuple[str, str]:
    """Account and QOS that a submission names although none is configured: kept and shown, without any effect."""
    names_account = not settings.account and spec.account not in ("", user)
    names_qos = not settings.qos and spec.qos not in ("", NORMAL_QOS)
    return spec.account if names_account else spec.account_label, spec.qos if names_qos else spec.qos_label


def as_submitted(spec: JobSpec) -> JobSpec:
    """The submission as requested, to be submitted again: without defaults and caps, labels as the names they were."""
    spec = limit_as_asked(with_variant(spec, 0))
    if spec.variants:
        asked = [limit_as_asked(one) for one in each_variant(spec)]
        spec = replace(spec, variants=of_specs(asked, [one.stated for one in spec.variants]).variants)
    if not (spec.account_label or spec.qos_label):
        return spec
    return replace(spec, account=spec.shown_account, account_label="", qos=spec.shown_qos, qos_label="")


class TimeLimit(NamedTuple):
    seconds: int | None
    source: str
    """As `JobSpec.time_limit_source`."""


def time_limit(spec: JobSpec, settings: Settings) -> TimeLimit:
    """Time limit of a job: the requested one, else the default of its queue or the global one; capped."""
    if spec.time_limit_s is not None or spec.time_limit_source in TIME_LIMIT_WORDS:
        return TimeLimit(spec.time_limit_s, spec.time_limit_source)
    default_s = default_time_limit(spec.queue, settings)
    most_s = longest_time_limit(spec, settings)
    if most_s is not None and (default_s is None or most_s < default_s):
        return TimeLimit(most_s, MAXIMUM)
    return TimeLimit(default_s, "" if default_s is None else DEFAULT)


def labels_left(jobs: Iterable[Job], before: Settings, after: Settings) -> Iterator[str]:
    """Sentences on pending jobs with labels when accounts or QOS are configured for the first time."""
    pending = [job for job in jobs if job.state is JobState.PENDING and job.array_id is None]
    named = [job.shown_id for job in pending if job.spec.account_label]
    if named and after.account and not before.account:
        yield (
            f"{name_some('job', named)} named an account while none was configured; use still counts for the "
            f"user; to move one: gctl update {named[0]} account=NAME"
        )
    named = [job.shown_id for job in pending if job.spec.qos_label]
    if named and after.qos and not before.qos:
        yield (
            f"{name_some('job', named)} named a QOS while none was configured; none applies still; to give one: "
            f"gctl update {named[0]} qos=NAME"
        )


def limit_as_asked(spec: JobSpec) -> JobSpec:
    """The submission with the time limit as requested, undoing defaults and caps."""
    if spec.time_limit_source in ("", UNLIMITED):
        return spec
    return replace(spec, time_limit_s=None, time_limit_source=AUTO if spec.time_limit_source == AUTO else "")


def default_time_limit(queue: str, settings: Settings) -> int | None:
    """Default of the queue, of the nearest ancestor with one, or the global one; None if none is set."""
    found = (one.default_time_s for one in chain_of(queue, settings.queue) if one.default_time_s is not None)
    return next(found, settings.default.time_limit_s)


def longest_time_limit_of_queue(queue: str, settings: Settings) -> int | None:
    """Longest time limit that the queue and those above it allow; None if unlimited."""
    limits = (one.max_time_s for one in chain_of(queue, settings.queue))
    return min((limit for limit in limits if limit is not None), default=None)


def longest_time_limit(spec: JobSpec, settings: Settings) -> int | None:
    """Longest time limit that the job's queues and QOS allow; None if unlimited."""
    return min((limit for limit, _ in _time_limits(spec, settings)), default=None)


def why_refused(spec: JobSpec, user: str, settings: Settings, tally: Tally) -> Refusal | None:
    """Refuse a submission that its queue or QOS does not admit; None if both do.

    Checks in order: names, permission to use them, size of one job, number of jobs. Machine capacity is not
    checked here. Neither is account membership: see `membership`, checked when the job is given its account.
    """
    account = spec.account or user
    qos_name = qos_of(spec, settings)
    refused = on("queue", _wrong_queue(spec.queue, settings)) or on("qos", _wrong_qos(qos_name, settings))
    if refused is not None:
        return refused
    chain = list(chain_of(spec.queue, settings.queue))
    qos = settings.qos.get(qos_name)
    return (
        on("queue_access", _not_admitted_to_queue(chain, user, account, settings))
        or (qos and on("qos_access", _not_admitted_to_qos(qos, user, account, settings)))
        or on("policy", _too_large(spec.request, chain, qos))
        or (None if spec.waits_if_infeasible else on("time", _too_long(spec, settings)))
        or on("job_count", _too_many(chain, qos, user, settings, tally))
        or None
    )


# Names


def _wrong_queue(name: str, settings: Settings) -> Refusal | None:
    if not settings.queue:
        return None
    leaves = leaves_of(settings.queue)
    if name not in settings.queue:
        return _unknown("queue", name, leaves, "-q")
    below = sorted(queue.name for queue in settings.queue.values() if queue.parent == name)
    if not below:
        return None
    return Refusal(f"queue {name} takes no jobs itself, only the queues below it do", choose(below, "-q"))


def _wrong_qos(name: str, settings: Settings) -> Refusal | None:
    if not name or name in settings.qos:
        return None
    if settings.qos:
        return _unknown("QOS", name, settings.qos, "--qos")
    hint = "set [default] qos to nothing in the config file"
    return Refusal(f"there is no QOS {name!r}, because none is configured", hint)


def _unknown(what: str, name: str, known: Iterable[str], option: str) -> Refusal:
    names = sorted(known)
    near = closest(name, names)
    hint = f"did you mean {option} {near}?" if near else choose(names, option)
    return Refusal(f"there is no {what} {name!r}", hint)


def leaves_of(queues: Mapping[str, QueueSettings]) -> list[str]:
    parents = {queue.parent for queue in queues.values()}
    return sorted(name for name in queues if name not in parents)


# Who


def _not_admitted_to_queue(
    chain: Iterable[QueueSettings], user: str, account: str, settings: Settings
) -> Refusal | None:
    barred = barred_by(chain, user, account, settings)
    if barred is None:
        return None
    others = [
        name
        for name in leaves_of(settings.queue)
        if barred_by(chain_of(name, settings.queue), user, account, settings) is None
    ]
    hint = choose(others, "-q") if others else "see who may use which with: ginfo queues"
    return Refusal(f"user {user} of account {printable(account)} may not submit to queue {barred.name}", hint)


def barred_by(chain: Iterable[QueueSettings], user: str, account: str, settings: Settings) -> QueueSettings | None:
    """Nearest queue with an access list, from the bottom up, if it denies the user; None if the user is admitted."""
    for queue in chain:
        if queue.users or queue.accounts:
            return None if _admits(queue.users, queue.accounts, user, account, settings) else queue
    return None


def _not_admitted_to_qos(qos: QosSettings, user: str, account: str, settings: Settings) -> Refusal | None:
    names = usable_qos(user, account, settings)
    if qos.name in names:
        return None
    hint = choose(names, "--qos") if names else "submit without --qos"
    return Refusal(f"user {user} of account {printable(account)} may not use QOS {qos.name}", hint)


def usable_qos(user: str | None, account: str, settings: Settings) -> list[str]:
    """QOSs open to a user's jobs of an account; without a user, to those of all of its users."""
    return [
        one.name
        for one in settings.qos.values()
        if not (one.users or one.accounts) or _admits(one.users, one.accounts, user, account, settings)
    ]


def _admits(
    users: Collection[str], accounts: Collection[str], user: str | None, account: str, settings: Settings
) -> bool:
    """Whether the lists name this user, this account or any of its ancestors."""
    path = (account, *(one.name for one in chain_of(account, settings.account)))
    return user in users or any(name in accounts for name in path)


# How much


def _too_large(request: Request, chain: Sequence[QueueSettings], qos: QosSettings | None) -> Refusal | None:
    """Refuse more than one job, one user or all jobs together may ever hold."""
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
            # Fractions apply to a single card: 2.5 GPUs cannot be requested.
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
    """Lower bound of the GPUs that the request counts as; slices by memory count as 0 until placed on a card."""
    if request.vram_mib is not None:
        return 0.0
    return float(request.total_gpus) if request.card_fraction is None else request.nodes * request.card_fraction


def _too_much_else(request: Request, chain: Iterable[QueueSettings]) -> Refusal | None:
    cpus, mem_mib = totals(request)
    for queue in chain:
        who = f"queue {queue.name}"
        if queue.max_cpus is not None and cpus > queue.max_cpus:
            option = f"-c {format_amount_floor(queue.max_cpus)}"
            return _too_much(plural(cpus, "CPU"), who, plural(queue.max_cpus, "CPU"), option, request)
        if queue.max_mem_mib is not None and mem_mib > queue.max_mem_mib:
            most = f"{format_size_mib(queue.max_mem_mib)} of memory"
            asked = f"{format_size_mib(int(mem_mib))} of memory"
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


def why_infeasible(spec: JobSpec, cpus: Sequence[float], settings: Settings) -> Reason | None:
    """Why a job that was accepted nevertheless cannot start as the nodes and settings are; None if it may.

    Args: cpus: cores of each node.
    """
    request = spec.request
    if not _have_cores(request, cpus):
        there = f"{plural(max(cpus, default=0), 'CPU')} on {plural(len(cpus), 'node')}"
        asked = plural(request.cpus, "CPU") + (f" on each of {request.nodes} nodes" if request.nodes > 1 else "")
        if request.bundles is not None:
            asked = describe(request, full=True)
        return Reason(ReasonCode.PARTITION_CONFIG, f"asked for {asked}; there are {there}", {})
    refused = _too_long(spec, settings)
    if refused is None:
        return None
    _, where = min(_time_limits(spec, settings))
    is_qos = where.startswith("QOS ")
    return Reason(ReasonCode.QOS_MAX_TIME if is_qos else ReasonCode.PARTITION_CONFIG, refused.text, {})


def _have_cores(request: Request, cpus: Sequence[float]) -> bool:
    bundles = request.bundles
    if bundles is None:
        return sum(1 for one in cpus if request.cpus <= one) >= request.nodes
    counts = range(1, bundles.most + 1)
    rooms = [bisect_right(counts, one, key=lambda count: part_of(request, count).cpus) for one in cpus]
    return fewest_nodes(rooms, request) is not None


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
    """The queue and its descendants."""
    return [other for other in queues if any(queue.name == name for queue in chain_of(other, queues))]


_BY_NAME, _BY_GROUP, _AS_EVERYBODY = range(3)
"""How an account lists a user, most specific first."""


def are_restricted(accounts: Mapping[str, AccountSettings]) -> bool:
    """Whether membership is enforced: as soon as one account lists users or groups.

    An account's members are those it lists itself; membership is not inherited in either direction. Slurm calls a
    pair of account and user an association. As long as no account has a list, all are open: such a configuration
    says how GPUs are shared, not between whom.
    """
    return any(account.users or account.groups for account in accounts.values())


def groups_listed(settings: Settings) -> frozenset[str]:
    """Unix groups that accounts list; the caller looks up their members."""
    return frozenset(group for account in settings.account.values() for group in account.groups)


def accounts_of(user: str, groups: Collection[str], settings: Settings) -> list[str]:
    """Accounts that the user is a member of, by name.

    Args: groups: the user's Unix groups among those that accounts list.
    """
    return sorted(_listings(user, groups, settings.account))


def default_account(user: str, groups: Collection[str], settings: Settings) -> str | None:
    """Account of a job that names none: the only one that lists the user; None if there is not exactly one.

    A listing by name takes precedence over one by group, and that over a listing of all users.
    """
    found = _listings(user, groups, settings.account)
    best = min(found.values(), default=None)
    names = [name for name, how in found.items() if how == best]
    return names[0] if len(names) == 1 else None


def _listings(user: str, groups: Collection[str], accounts: Mapping[str, AccountSettings]) -> dict[str, int]:
    """How each account that the user is a member of lists the user."""
    if not are_restricted(accounts):
        return dict.fromkeys(accounts, _AS_EVERYBODY)
    found = {}
    for name, account in accounts.items():
        if user in account.users:
            found[name] = _BY_NAME
        elif not set(account.groups).isdisjoint(groups):
            found[name] = _BY_GROUP
        elif EVERYBODY in account.users:
            found[name] = _AS_EVERYBODY
    return found


def account_refusal(
    account: str, user: str, groups: Collection[str], settings: Settings, option: str = "-A"
) -> Refusal | None:
    """Refuse an account that the user is not a member of, listing the user's accounts; None for a member.

    Checked when a job is given its account, not later: jobs keep running when their user or account is removed
    from the settings. A job that names no account and has no default is charged to its user's name; while no account
    is configured, every job is, and the account that it names is a label.

    Args: option: how the account was typed, `-A` or `account=`.
    """
    if not settings.account:
        return None
    own = accounts_of(user, groups, settings)
    if account in own:
        return None
    hint = choose(own, option) if own else _ask_admin(account, user, settings)
    if account in ("", user) and account not in settings.account and len(own) != 1:
        if own:
            return Refusal(f"user {user} is a member of {_some(own)}, so the job must name one", hint)
        return Refusal(f"user {user} is not a member of any account", hint)
    shown = printable(account, 60)
    if account not in settings.account and "accounts" not in settings.access.private_data:
        near = closest(account, own)
        only = f"; user {user} is a member of {_some(own)}" if own else ""
        return Refusal(
            f"there is no account '{shown}'{only}", f"did you mean {with_value(option, near)}?" if near else hint
        )
    others = f"only of {_some(own)}" if own else "nor of any other"
    return Refusal(f"user {user} is not a member of account {shown}, {others}", hint)


def _ask_admin(account: str, user: str, settings: Settings) -> str:
    shown = account if account in settings.account and "accounts" not in settings.access.private_data else "NAME"
    return f"ask an admin to add {user} to users of [account.{printable(shown, 60)}] in the config file"


def _some(names: list[str]) -> str:
    return name_some("", names, MOST_CHOICES)


def open_to_all(accounts: Mapping[str, AccountSettings]) -> dict[str, AccountSettings]:
    """Copy of the accounts with all users as members, for replays: recorded jobs were already admitted."""
    return {
        name: replace(account, users={EVERYBODY: 1.0, **account.users}, groups=()) for name, account in accounts.items()
    }


Finding = tuple[str, str, str]
"""Path of a setting, a sentence, and the remedy."""


def membership_findings(settings: Settings) -> Iterator[Finding]:
    """Find accounts open to all users because no account lists any, and accounts with no possible member."""
    accounts = settings.account
    if not are_restricted(accounts):
        if accounts:
            text = f"no account lists users or groups, so any user may submit to {_some(sorted(accounts))}"
            hint = f'list the members of each, such as users = ["ann", "bob"]; users = "{EVERYBODY}" keeps one open'
            yield f"account.{next(iter(accounts))}.users", text, hint
        return
    above = {account.parent for account in accounts.values()}
    for name, account in accounts.items():
        if not (account.users or account.groups or name in above):
            text = f"account {name} has no members, so no one can submit to it"
            hint = f'list them, such as users = ["ann"], or open it: users = "{EVERYBODY}"'
            yield f"account.{name}.users", text, hint


def unknown_members(
    settings: Settings, is_user: Callable[[str], bool], is_group: Callable[[str], bool]
) -> Iterator[Finding]:
    """Find users and groups that accounts, queues and QOSs list but this machine does not have."""
    for path, where, noun, names in names_listed(settings):
        is_known = is_user if noun == "user" else is_group
        unknown = [name for name in names if not is_known(name)]
        if unknown:
            text = f"{where} lists {name_some(noun, unknown, MOST_CHOICES)}, unknown on this machine"
            yield path, text, f"add the {noun}, or correct the name: getent {_DATABASES[noun]} NAME"


def names_listed(settings: Settings) -> Iterator[tuple[str, str, str, list[str]]]:
    """Lists of users and groups: path of the setting, `account vision`, `user` or `group`, and the names."""
    tables: tuple[tuple[str, str, Mapping[str, object]], ...] = (
        ("account", "account", settings.account),
        ("queue", "queue", settings.queue),
        ("qos", "QOS", settings.qos),
    )
    for section, what, table in tables:
        for name, one in table.items():
            for key, noun in (("users", "user"), ("groups", "group"), ("operators", "user"), ("coordinators", "user")):
                names = [each for each in getattr(one, key, ()) if each != EVERYBODY]
                if names:
                    yield f"{section}.{name}.{key}", f"{what} {name}", noun, names


_DATABASES = {"user": "passwd", "group": "group"}


def slice_refusal(spec: JobSpec, user: str, nodes: Iterable[NodeView], settings: Settings) -> Refusal | None:
    """Refuse a slice larger than its queue or QOS allows one job or one user; None if it is allowed.

    The fraction of a card depends on the cards, which `why_refused` does not know. While a node's driver is
    broken its cards are unknown, so nothing is refused.
    """
    nodes = tuple(nodes)
    if spec.request.vram_mib is None or any(node.gpu_error is not None for node in nodes):
        return None
    layout = ClusterLayout(nodes, settings)
    # Quotas without any running job.
    quotas = Quotas(settings, layout)
    terms = JobTerms(-1, user, spec.account, spec.queue, qos_of(spec, settings))

    def denial(request: Request) -> Denial | None:
        found = quotas.why_not(terms, demand(layout, request))
        return found if found is not None and found.facts.get("resource") == "gpus" else None

    refused = denial(spec.request)
    if refused is None:
        return None
    text = f"asked for {describe(spec.request)}; {refused.text}"
    limit = refused.facts["limit"]
    assert isinstance(limit, float)
    smaller_mib = (int(limit * size) // spec.request.total_gpus for size in _sizes(layout))
    for vram_mib in sorted(smaller_mib, reverse=True):
        if 0 < vram_mib < spec.request.vram_mib and denial(replace(spec.request, vram_mib=vram_mib)) is None:
            return Refusal(text, f"ask for less: --vram {format_size_floor(vram_mib)}, or name another queue or QOS")
    return Refusal(text, "name another queue or QOS, or ask for no GPU")


def _sizes(layout: ClusterLayout) -> set[int]:
    return {card.view.vram_total_mib for card in layout.cards if card.view.vram_total_mib is not None}
