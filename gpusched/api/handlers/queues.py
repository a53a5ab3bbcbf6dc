"""Handlers about priorities, usage, the account tree, queues and their loans."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from math import isfinite, isinf
from typing import TYPE_CHECKING, Annotated, Any

from aiohttp import web

from gpusched.access import account_by_default, coordinated_accounts, is_admin, is_private, own_accounts
from gpusched.api.asked import Name, RequestBody, RequestQuery, Text, What, about, one_of
from gpusched.api.handlers.jobs import FilterQuery, Ids, NameWords, Queues, Since, Users, filter_of, selected
from gpusched.api.queue_rows import pause_json, queues_and_loans
from gpusched.api.render import plain
from gpusched.api.requests import respond, respond_list, states_of, words
from gpusched.api.visibility import Viewer
from gpusched.errors import NotFound
from gpusched.model.commands import Caller, PauseQueue
from gpusched.model.history import GROUPS, UsageSum
from gpusched.model.job import Job
from gpusched.model.queue_settings import EVERYBODY
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Budget, ClassKey
from gpusched.model.states import JobState
from gpusched.model.tariff import JOULES_PER_KWH
from gpusched.model.units import printable
from gpusched.model.value import fields, replace
from gpusched.ports import JobFilter
from gpusched.scheduler.admission import are_restricted, usable_qos
from gpusched.scheduler.budget import spent_of
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.fairshare import AccountShare, AccountTree
from gpusched.scheduler.priority import Priority, class_key
from gpusched.scheduler.queue import JobClass
from gpusched.scheduler.usage import capacity_of, usage_now

if TYPE_CHECKING:
    from gpusched.daemon.core import Scheduler

_WEEK_S = 7 * 86400.0
_HOUR_S = 3600.0
_WEIGHT = "weight_"
_BY_RESPONSE = "response_ratio"


# --- priorities ---------------------------------------------------------------------------------


class PrioritiesQuery(FilterQuery):
    shared: Annotated[
        bool,
        about(
            "1: rows without id and name, each for all jobs that it fits; `jobs` has the id of each and the number of "
            "its row"
        ),
    ] = False


async def priorities(viewer: Viewer, query: PrioritiesQuery) -> web.Response:
    """The priority of each pending job with its parts and its tier, and the weights of the factors."""
    service = viewer.service
    jobs, rows = _shared_priorities(viewer, selected(viewer, filter_of(viewer, query)))
    settings = {"weights": weights_of(service.settings), "order": service.settings.priority.order}
    # Points of a plug-in may be infinite, which the faster encoder writes as null.
    is_finite = all(isfinite(row["priority"]) for row in rows)
    if query.shared:
        ids = [(job.shown_id, number) for job, number in jobs]
        if is_finite:
            return await respond_list("jobs", ids, {"priorities": rows}, settings)
        return respond(priorities=rows, jobs=ids, **settings)
    whole = ({"id": job.shown_id, "name": viewer.name_of(job), **rows[number]} for job, number in jobs)
    if is_finite:
        return await respond_list("priorities", whole, {}, settings)
    return respond(priorities=list(whole), **settings)


def _shared_priorities(viewer: Viewer, jobs: Iterable[Job]) -> tuple[list[tuple[Job, int]], list[dict[str, Any]]]:
    """Pending jobs in queue order, each with the number of its row; where weights order it, higher tiers first."""
    scheduler = viewer.service.scheduler
    ranking, state = scheduler.planner().state.ranking, scheduler.state
    is_by_weight = scheduler.settings.priority.order != _BY_RESPONSE
    response_of, reserved = responses(scheduler), {one.job_id for one in scheduler.plan.reservations}
    # By identity, since hashing a class takes as long as the rest; the entry keeps it alive.
    known: dict[int, tuple[ClassKey, Callable[[float], Priority], int]] = {}
    numbers: dict[tuple[object, ...], int] = {}
    rows: list[dict[str, Any]] = []
    found: list[tuple[Job, int]] = []
    for job in sorted(jobs, key=lambda job: job.id) if is_by_weight else scheduler.answers.in_queue_order(jobs):
        if job.state is not JobState.PENDING:
            continue
        key = state.class_of(job.id)
        # Classes have no account label, and what has no class is looked at one by one.
        mark = id(key), job.queued_at, job.spec.shown_account, job.id if key is None or job.id in reserved else 0
        number = numbers.get(mark)
        if number is None:
            number = numbers[mark] = len(rows)
            key = key or class_key(job)
            of_class = known.get(id(key))
            if of_class is None:
                of_class = known[id(key)] = key, ranking.priorities(key), ranking.tier(key)
            _, priority, tier = of_class
            total = priority(job.queued_at)
            sees_all = viewer.sees_all_of(job)
            rows.append(
                {
                    "user": job.user,
                    "account": job.spec.shown_account,
                    "queue": job.spec.queue,
                    "priority": total.total,
                    "tier": tier,
                    "parts": dict(total.parts) if sees_all else {},
                    "response": response_of(job) if sees_all else None,
                }
            )
        found.append((job, number))
    if is_by_weight:
        found.sort(key=lambda entry: (-rows[entry[1]]["tier"], -rows[entry[1]]["priority"]))
    return found, rows


def responses(scheduler: Scheduler) -> Callable[[Job], dict[str, Any] | None]:
    """A function that gives the parts of an eligible job's position in the order `response_ratio`, as of now.

    It gives None under other orders.
    """
    planner, state = scheduler.planner(), scheduler.state
    ranking, queue = planner.state.ranking, planner.state.queue
    reservations = {one.job_id: one for one in reversed(scheduler.plan.reservations)}
    # By identity, as hashing a class takes long; the entry keeps it alive.
    known: dict[int, tuple[ClassKey, JobClass | None]] = {}

    def response(job: Job) -> dict[str, Any] | None:
        key = state.class_of(job.id)
        if key is None:
            return None
        found = known.get(id(key))
        if found is None:
            is_by_response = ranking.order_of(key.terms.queue) == _BY_RESPONSE
            found = known[id(key)] = key, queue.class_of_key(key) if is_by_response else None
        job_class = found[1]
        if job_class is None:
            return None
        standing, kept = ranking.response_standing(job_class, key, job.queued_at), reservations.get(job.id)
        return {
            "share": standing.share,
            "turn": standing.turn,
            "waited_s": standing.waited_s,
            "expected_s": standing.expected_s,
            "urgency": standing.urgency,
            "ratio": standing.ratio,
            "is_reserved": kept is not None,
            "reserves_at": standing.reserves_at,
            "fence_at": None if kept is None else kept.fence_at,
        }

    return response


def weights_of(settings: Settings) -> dict[str, float]:
    """Weights by factor name."""
    names = [item.name for item in fields(settings.priority) if item.name.startswith(_WEIGHT)]
    return {name.removeprefix(_WEIGHT): getattr(settings.priority, name) for name in names}


# --- usage --------------------------------------------------------------------------------------


class UsageQuery(RequestQuery):
    hint = "see ghist --help"
    ids: Ids = ""
    users: Users = ""
    names: NameWords = ""
    queues: Queues = ""
    states: Annotated[str, about("comma-separated states of the jobs; all unless given")] = ""
    by: Annotated[str, one_of(GROUPS, "what the sums are by")] = GROUPS[0]
    since: Annotated[Since | None, about("begin of the span; 7 days ago unless given")] = None


async def usage(viewer: Viewer, query: UsageQuery) -> web.Response:
    """Resources that runs held within a time span, summed; open runs count up to now."""
    service, caller = viewer.service, viewer.caller
    scheduler = service.scheduler
    by, now = query.by, scheduler.now()
    since = now - _WEEK_S if query.since is None else query.since
    wanted = JobFilter(
        ids=frozenset(service.job_ids(query.ids, caller)),
        states=states_of(words(query.states)),
        users=words(query.users),
        names=words(query.names),
        queues=words(query.queues),
    )
    if wanted.names or wanted.ids or viewer.is_restricted or is_private("usage", caller, service.settings):
        # Sums over selected or hidden jobs would reveal them.
        own = _own_of(wanted, caller, service.settings)
        found = [] if own is None else scheduler.store.usage_sums(by, own, since, now)
    else:
        found = scheduler.store.usage_sums(by, wanted, since, now)
    found.sort(key=lambda one: (-one.gpu_s, -one.cpu_s, one.name))
    sums = [_sum_json(by, one) for one in found]
    return respond(usage=sums, by=by, since=since, until=now, currency=service.settings.energy.currency)


def _own_of(wanted: JobFilter, caller: Caller, settings: Settings) -> JobFilter | None:
    """The filter restricted to the caller's own jobs; None if only other users' were requested, which are not shown."""
    if is_admin(caller, settings):
        return wanted
    if wanted.users and caller.user not in wanted.users:
        return None
    return replace(wanted, users=frozenset({caller.user}))


def _sum_json(by: str, found: UsageSum) -> dict[str, Any]:
    return {
        by: found.name,
        "jobs": found.jobs,
        "runs": found.runs,
        "gpu_hours": found.gpu_s / _HOUR_S,
        "core_hours": found.cpu_s / _HOUR_S,
        "mem_gib_hours": found.mem_mib_s / 1024 / _HOUR_S,
        "mean_wait_s": found.wait_s / found.started if found.started else None,
        "energy_kwh": None if found.energy_j is None else found.energy_j / JOULES_PER_KWH,
        "cost": found.cost,
        "grams": found.grams,
    }


# --- accounts -----------------------------------------------------------------------------------


class NamedQuery(RequestQuery):
    name: Annotated[str | None, about("only this account or queue, and what is below it")] = None


async def accounts(viewer: Viewer, query: NamedQuery) -> web.Response:
    """The tree of accounts: members, shares, decayed usage, fair-share factors, QOSs; and which are the caller's."""
    service, caller = viewer.service, viewer.caller
    rows = account_rows(service.scheduler)
    own = own_accounts(caller, service.settings)
    if is_private("accounts", caller, service.settings) or is_private("usage", caller, service.settings):
        rows = _on_the_way_to(caller.user, own, rows)
    if query.name is not None:
        rows = _below_account(rows, query.name)
    return respond(
        accounts=rows,
        half_life_s=service.settings.priority.half_life_s,
        user=caller.user,
        own_accounts=own,
        default_account=account_by_default(caller, service.settings),
        coordinated_accounts=coordinated_accounts(caller, service.settings),
    )


def account_rows(scheduler: Scheduler) -> list[dict[str, Any]]:
    """The tree from the root down, each account before its users and subaccounts."""
    settings, snapshot = scheduler.settings, scheduler.snapshot(scheduler.now())
    layout = ClusterLayout(snapshot.nodes, settings)
    members, usage = scheduler.state.census.members, usage_now(snapshot, layout, settings)
    tree = AccountTree(settings.account, usage, capacity_of(layout), members)
    return [
        {**_standing_json(one), **_members_json(one, settings), "qos": usable_qos(one.user, one.account, settings)}
        for one in tree.shares()
    ]


async def budgets(viewer: Viewer, query: NamedQuery) -> web.Response:
    """GPU-hour budgets of accounts and users in this period: granted, used, booked by running jobs, left."""
    service, caller, scheduler = viewer.service, viewer.caller, viewer.service.scheduler
    is_restricted = is_private("accounts", caller, service.settings) or is_private("usage", caller, service.settings)
    own = own_accounts(caller, service.settings)
    rows = []
    for budget in scheduler.budgets(scheduler.now()):
        is_own = any(name in own for name in budget.accounts)
        if is_restricted and not is_own:
            continue
        if budget.gpu_s is not None:
            rows.append(budget_json(budget, None, budget.gpu_s))
        if budget.user_gpu_s is not None:
            users = sorted({*(user for user, _, _ in budget.spent), *([caller.user] if is_own else [])})
            shown = [user for user in users if user == caller.user or not is_restricted]
            rows += [budget_json(budget, user, budget.user_gpu_s) for user in shown]
    if query.name is not None:
        rows = [row for row in rows if row["account"] == query.name]
        if not rows:
            raise NotFound(f"account {printable(query.name, 60)} has no budget", "list all with: gctl budget")
    return respond(budgets=rows)


def budget_json(budget: Budget, user: str | None, granted_s: float) -> dict[str, Any]:
    """A budget, or a user's part of it, at the instant for which it was made."""
    used_s, booked_s = spent_of(budget, user)
    return {
        "account": budget.account,
        "user": user,
        "period": budget.period.removeprefix(" of ") or "all time",
        "until_at": budget.until_at,
        "granted_gpu_hours": granted_s / _HOUR_S,
        "credit_gpu_hours": budget.credit_s / _HOUR_S if user is None else 0.0,
        "used_gpu_hours": used_s / _HOUR_S,
        "booked_gpu_hours": booked_s / _HOUR_S,
        "left_gpu_hours": max(0.0, granted_s - used_s - booked_s) / _HOUR_S,
        "when_spent": budget.when_spent,
    }


async def qualities_of_service(viewer: Viewer, _: RequestQuery) -> web.Response:
    """Qualities of service: priority, limits and what each may preempt; empty where none is configured."""
    settings = viewer.service.settings
    rows = [{key: value for key, value in plain(one).items() if key not in _LISTS} for one in settings.qos.values()]
    return respond(qos=rows, default=settings.default.qos or None)


_LISTS = ("users", "accounts")
"""/v1/accounts says who may use a QOS; where accounts are private, only of the caller's own accounts."""


def _members_json(one: AccountShare, settings: Settings) -> dict[str, Any]:
    """The members of an account, all users as `*`; null for a user, and for an account that is not configured."""
    account = settings.account.get(one.account) if one.user is None else None
    if account is None:
        return {"users": None, "groups": None, "coordinators": None}
    users = sorted(account.users) if are_restricted(settings.account) else [EVERYBODY]
    return {"users": users, "groups": list(account.groups), "coordinators": list(account.coordinators)}


def _standing_json(one: AccountShare) -> dict[str, Any]:
    return {
        "account": one.account,
        "user": one.user,
        "depth": one.depth,
        "shares": one.shares,
        "norm_shares": one.norm_shares,
        "gpu_hours": one.used.gpus / _HOUR_S,
        "vram_gib_hours": one.used.vram_mib / 1024 / _HOUR_S,
        "core_hours": one.used.cpus / _HOUR_S,
        "mem_gib_hours": one.used.mem_mib / 1024 / _HOUR_S,
        "usage_s": one.usage,
        "effective_usage": one.effective_usage,
        # JSON has no infinity: without usage there is no level.
        "level_fs": None if isinf(one.level_fs) else one.level_fs,
        "fairshare": one.factor,
    }


def _on_the_way_to(user: str, own: Collection[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A user's own rows and accounts and the accounts above them, without other users' usage in these."""
    kept: dict[int, dict[str, Any]] = {}
    above: list[int] = []
    for at, row in enumerate(rows):
        del above[row["depth"] :]
        above.append(at)
        if row["user"] == user or (row["user"] is None and row["account"] in own):
            kept.update({place: rows[place] for place in above})
    return [row if row["user"] == user else {**row, **_HIDDEN} for _, row in sorted(kept.items())]


_HIDDEN = dict.fromkeys(
    (
        "gpu_hours",
        "vram_gib_hours",
        "core_hours",
        "mem_gib_hours",
        "usage_s",
        "effective_usage",
        "level_fs",
        "fairshare",
        "users",
        "groups",
        "coordinators",
    )
)


def _below_account(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """One account with its whole subtree. Raises: NotFound."""
    for at, row in enumerate(rows):
        if row["account"] == name and row["user"] is None:
            end = at + 1
            while end < len(rows) and rows[end]["depth"] > row["depth"]:
                end += 1
            return rows[at:end]
    names = sorted({row["account"] for row in rows if row["account"]})
    raise NotFound(
        f"there is no account {printable(name, 60)!r}", "accounts: " + ", ".join(map(printable, names)) if names else ""
    )


# --- queues -------------------------------------------------------------------------------------


class ResumeBody(RequestBody):
    hint = "for example: gctl queue resume vision"
    queue: Annotated[Name, about("The queue; those below it are paused with it.", min_length=1)]
    what: What | None = None


class PauseBody(ResumeBody):
    hint = "for example: gctl queue pause vision"
    message: Annotated[Text | None, about("Why, for all users.")] = None


async def pause(viewer: Viewer, body: PauseBody) -> web.Response:
    """Start nothing new from a queue and those below it; for admins and its operators."""
    return await _pause(viewer, body, is_resumed=False)


async def resume(viewer: Viewer, body: ResumeBody) -> web.Response:
    """Start jobs of a paused queue again."""
    return await _pause(viewer, body, is_resumed=True)


async def _pause(viewer: Viewer, body: ResumeBody, *, is_resumed: bool) -> web.Response:
    command = PauseQueue(viewer.caller, is_resumed=is_resumed, **body.printable())
    answer = await viewer.service.daemon.ask(command)
    return respond(queue=answer["queue"], is_changed=answer["is_changed"], **pause_json(answer["pause"]))


async def queues(viewer: Viewer, query: NamedQuery) -> web.Response:
    """Queues: what each is guaranteed, uses, borrows and lends, whether it is paused, and every loan."""
    rows, loans = queues_and_loans(viewer)
    name = query.name
    if name is None:
        return respond(queues=rows, loans=loans)
    if all(row["name"] != name for row in rows):
        names = ", ".join(printable(row["name"]) for row in rows)
        raise NotFound(f"there is no queue {printable(name, 60)!r}", f"queues: {names}")
    return respond(
        queues=[row for row in rows if name in (row["name"], row["parent"])],
        loans=[loan for loan in loans if name in (loan["lender"], loan["borrower"])],
    )
