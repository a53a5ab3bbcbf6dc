"""Checks of a submission or update before it is recorded; each refuses with a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from gpusched.access import account_by_default, account_groups, admins, manages
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.verbs.images import check_images, with_runtime
from gpusched.errors import Forbidden, Refused
from gpusched.lifecycle.arrays import jobs_in
from gpusched.lifecycle.dependencies import Never, evaluate, find_cycle, parse_dependency
from gpusched.lifecycle.transitions import ends_unsatisfied, new_job
from gpusched.model.bundles import on_each_node, one_node
from gpusched.model.commands import Caller
from gpusched.model.job import Job, JobSpec
from gpusched.model.layout import count_tasks, rearranged
from gpusched.model.queue_settings import chain_of
from gpusched.model.settings import Settings
from gpusched.model.spec import AUTO, DEFAULT
from gpusched.model.units import MOST_CHOICES, format_duration, name_some, printable
from gpusched.model.value import replace
from gpusched.ports import Handover
from gpusched.ports.tables import CALENDAR
from gpusched.predict import limits
from gpusched.scheduler.admission import (
    account_refusal,
    labels_of,
    longest_time_limit,
    qos_of,
    slice_refusal,
    time_limit,
    why_refused,
)
from gpusched.scheduler.burst import burst_limit_s
from gpusched.scheduler.calendar import why_not_admitted
from gpusched.scheduler.cheap import why_not_cheap
from gpusched.scheduler.infeasible import Refusal, refusal, refuse_excluded, whole_memory_mib


def completed(spec: JobSpec, owner: Caller, settings: Settings) -> JobSpec:
    """The submission with account, QOS and time limit filled in, so that later code does not need the settings."""
    asked = spec.account if settings.account else ""
    limit = time_limit(spec, settings)
    account_label, qos_label = labels_of(spec, owner.user, settings)
    spec = with_lease(spec, settings)
    return replace(
        spec,
        account=asked or account_by_default(owner, settings) or owner.user,
        account_label=account_label,
        qos=qos_of(spec, settings),
        qos_label=qos_label,
        time_limit_s=limit.seconds,
        time_limit_source=limit.source,
        engine=_engine_of(spec, settings),
    )


def with_lease(spec: JobSpec, settings: Settings) -> JobSpec:
    """The submission with the cluster's lease, unless it has one or would not profit from it."""
    lost_after_s, retry = settings.cluster.lost_after_s, spec.retry
    if lost_after_s is None or retry.lost_after_s is not None or not retry.requeue or spec.adopted is not None:
        return spec
    return replace(spec, retry=replace(retry, lost_after_s=lost_after_s))


def _engine_of(spec: JobSpec, settings: Settings) -> str | None:
    """What runs the job: as it says, else as its queue does, which has no say about those that need this server."""
    if spec.engine is not None or _needs_this_server(spec) is not None:
        return spec.engine
    return _engine_of_queue(spec.queue, settings)


def _engine_of_queue(queue: str, settings: Settings) -> str | None:
    return next((one.engine for one in chain_of(queue, settings.queue) if one.engine is not None), None)


def without_queue_engine(spec: JobSpec, queue: str, settings: Settings) -> JobSpec:
    """The job without the engine that this queue, which it leaves, gave it; its own one stays."""
    return spec if spec.engine != _engine_of_queue(queue, settings) else replace(spec, engine=None)


def _needs_this_server(spec: JobSpec) -> str | None:
    """What ties the job to this server, in words; None if nothing does."""
    if spec.interactive is not None:
        return "a foreground job"
    if spec.launch.slurm:
        return "a job of gpusched's own sbatch and srun"
    return None if spec.adopted is None else "an adopted process"


def sized(spec: JobSpec, tx: TickTransaction) -> JobSpec:
    """The submission with what only the nodes tell: all of a node's memory, how many nodes of a range, and where its
    client reaches it.
    """
    return _where_it_is_reached(with_runtime(_sized(spec, tx), tx), tx)


def _where_it_is_reached(spec: JobSpec, tx: TickTransaction) -> JobSpec:
    """The submission, placed on the daemon's own node if a client stays connected to it on one node and names none.

    A connection to another node leads through the daemon, and has to be made again after its restart.
    """
    request = spec.request
    if len(tx.nodes) == 1 or spec.interactive is None or request.nodes > 1 or request.nodelist:
        return spec
    if request.bundles is not None:
        return spec
    return replace(spec, request=replace(request, nodelist=(tx.nodes[0].name,)))


def _sized(spec: JobSpec, tx: TickTransaction) -> JobSpec:
    layout, bundles = spec.layout, spec.request.bundles
    if bundles is not None and spec.request.nodes == 1 and len(tx.nodes) == 1:
        # There is one way to lay it out.
        spec = replace(spec, request=one_node(spec.request))
    if layout is None or not (layout.is_all_mem or layout.nodes_max):
        return spec
    if spec.request.bundles is not None:
        if not layout.is_all_mem:
            return spec
        mem_mib = whole_memory_mib(spec.request, tx.nodes, tx.settings)
        return replace(spec, request=on_each_node(spec.request, mem_mib=mem_mib))
    found = spec
    for count in range(spec.request.nodes, (layout.nodes_max or spec.request.nodes) + 1):
        try:
            arranged, _ = rearranged(spec.request, layout, {"nodes": count, "nodes_max": layout.nodes_max})
        except ValueError:
            continue  # its GPUs cannot be spread evenly over this many
        request = replace(spec.request, **arranged.amounts())
        if layout.is_all_mem:
            request = replace(request, mem_mib=whole_memory_mib(request, tx.nodes, tx.settings))
        this = replace(spec, request=request)
        if refusal(request, tx.nodes, tx.settings) is None:
            return this
        found = this if found is spec else found
    return found


def _all_sized(specs: Sequence[JobSpec], tx: TickTransaction) -> list[JobSpec]:
    known: dict[tuple[object, ...], JobSpec] = {}
    done = []
    for spec in specs:
        # The jobs of a batch share these objects.
        mark = id(spec.request), id(spec.layout), spec.launch.image is None or spec.is_for_slurm
        made = known.get(mark)
        if made is None:
            made = known[mark] = _sized(with_runtime(spec, tx), tx)
        done.append(
            _where_it_is_reached(spec if made.request is spec.request else replace(spec, request=made.request), tx)
        )
    return done


_filled_in = attrgetter("account", "account_label", "qos", "qos_label", "time_limit_s", "time_limit_source", "engine")


def complete_all(specs: Sequence[JobSpec], owner: Caller, tx: TickTransaction) -> list[JobSpec]:
    """Apply `completed` and `sized` to each submission, computing defaults once per distinct set of fields."""
    if tx.settings.cluster.lost_after_s is not None:
        specs = [with_lease(spec, tx.settings) for spec in specs]
    known: dict[tuple[object, ...], JobSpec] = {}
    done = []
    for spec in specs:
        mark = (spec.queue, _needs_this_server(spec), *_filled_in(spec))
        made = known.get(mark)
        if made is None:
            made = known[mark] = completed(spec, owner, tx.settings)
        if _filled_in(made) == _filled_in(spec):
            done.append(spec)
            continue
        done.append(
            replace(
                spec,
                account=made.account,
                account_label=made.account_label,
                qos=made.qos,
                qos_label=made.qos_label,
                time_limit_s=made.time_limit_s,
                time_limit_source=made.time_limit_source,
                engine=made.engine,
            )
        )
    if all(spec.layout is None and spec.interactive is None for spec in done):
        return done
    return _all_sized(done, tx)


def with_auto_limits(specs: Sequence[JobSpec], user: str, tx: TickTransaction) -> tuple[list[JobSpec], list[str]]:
    """The submissions with a time limit for `-t auto`, and a sentence on each; an empty one for the others.

    If too few similar jobs have ended, a job gets the default for jobs without a time limit.
    """
    found, said = list(specs), [""] * len(specs)
    for at, spec in enumerate(specs):
        if spec.time_limit_source == AUTO and spec.time_limit_s is None:
            found[at], said[at] = _with_auto_limit(spec, user, tx)
    return found, said


def _with_auto_limit(spec: JobSpec, user: str, tx: TickTransaction) -> tuple[JobSpec, str]:
    advice = tx.advise_limit(user, spec)
    if advice is None:
        spec = replace(spec, time_limit_source="")
        limit = time_limit(spec, tx.settings)
        known = f"fewer than {limits.LEAST} jobs like it have ended"
        if limit.seconds is None:
            return spec, f"no time limit: {known}"
        words = "the default" if limit.source == DEFAULT else "the longest that is allowed"
        return spec, f"time limit {format_duration(limit.seconds)}, {words}: {known}"
    most_s = longest_time_limit(spec, tx.settings)
    limit_s = advice.limit_s if most_s is None else min(most_s, advice.limit_s)
    shown = f"time limit {format_duration(limit_s)}"
    if limit_s < advice.limit_s:
        shown += f", the longest that is allowed, in place of {format_duration(advice.limit_s)}"
    return replace(spec, time_limit_s=limit_s), f"{shown}: {advice.why}"


def name_notes(specs: Iterable[JobSpec], settings: Settings) -> list[str]:
    """A note on queues, accounts and QOS that a user's jobs name while none is configured: a typo must be noticed.

    They are kept and shown with the job, whose use counts for its user.
    """
    specs = list(specs)
    queues = set() if settings.queue else {spec.queue for spec in specs} - {settings.default.queue}
    found = {
        "queue": ("queues", sorted(queues)),
        "account": ("accounts", sorted({spec.account_label for spec in specs if spec.account_label})),
        "QOS": ("QOS", sorted({spec.qos_label for spec in specs if spec.qos_label})),
    }
    named = [f"{kind} {printable(name, 60)}" for kind, (_, names) in found.items() for name in names]
    if not named:
        return []
    kinds = name_some("", [many for many, names in found.values() if names]).replace(" and ", " or ")
    are = "are just names" if named[1:] else "is just a name"
    counts = f"; use counts for {specs[0].account}" if found["account"][1] else ""
    return [f"no {kinds} are configured, so {name_some('', named, MOST_CHOICES)} {are}{counts}"]


def pause_notes(queues: Iterable[str], tx: TickTransaction) -> list[str]:
    """A note for each queue that is paused: its jobs are accepted and wait."""
    found = (tx.state.pauses.why(name) for name in sorted({*queues}))
    return [f"{why.text}; nothing starts from it now" for why in found if why is not None]


def check_submission(specs: Sequence[JobSpec], owner: Caller, tx: TickTransaction, copies: int = 1) -> None:
    """Refuse invalid completed submissions of one user. Raises: Refused.

    Args: copies: number of jobs that each of them stands for.
    """
    check_images(specs, owner, tx)
    kinds: dict[tuple[object, ...], list[JobSpec]] = {}
    for spec in specs:
        # The jobs of a batch share one request object, so comparing its id is enough.
        names = (spec.account, spec.queue, spec.qos, spec.reservation)
        when = (spec.time_limit_s, spec.deadline_at, spec.begin_at)
        mark = (id(spec.request), *names, *when, spec.if_infeasible, spec.engine, spec.burst, spec.start_when)
        kinds.setdefault(mark, []).append(spec)
    for alike in kinds.values():
        check_size(alike, tx)
        check_account(alike[0], owner, tx)
        check_admitted(alike[0], owner.user, tx, copies * sum(map(jobs_in, alike)))
        check_burst(alike[0], tx.settings)
        if alike[0].is_for_slurm:
            for spec in alike:
                check_handover(spec, owner, tx)
        else:
            check_can_fit(alike[0], tx)
            check_reservation(alike[0], owner.user, tx)
        check_deadline(alike[0], max(tx.now, alike[0].begin_at or tx.now))
        if (why := why_not_cheap(alike[0], tx.tariff)) is not None:
            raise Refused(*why, "deadline")
    for dependency, waits in {(spec.dependency, spec.waits_if_infeasible) for spec in specs if spec.dependency}:
        check_dependency(dependency, tx, may_be_unknown=waits)


def check_nice(nice: int | None, queue: str, caller: Caller, settings: Settings) -> None:
    """Refuse a nice value that overtakes other users' jobs, unless the caller has rights over the queue.

    Raises: Forbidden.
    """
    if nice is None or nice >= 0 or manages(caller, queue, settings):
        return
    raise Forbidden(
        f"nice {nice} would put the job ahead of other users' jobs, and {caller.user} is neither an admin nor an "
        f"operator of queue {queue}",
        f"use 0 or more, or ask {admins(settings)}",
        "nice",
    )


def check_size(specs: Sequence[JobSpec], tx: TickTransaction) -> None:
    """Refuse arrays with too many tasks."""
    most = tx.settings.limit.array
    for spec in specs:
        if spec.array is not None and jobs_in(spec) > most:
            raise Refused(
                f"the array has {jobs_in(spec)} tasks; the limit is {most}",
                "split it, or raise [limit] array in the config file",
                "array",
            )


def check_update(before: Job, after: Job, owner: Caller, tx: TickTransaction) -> None:
    """Refuse an invalid change to an unfinished job of this owner. Raises: Refused."""
    old, new = before.spec, after.spec
    problem = new.request.contradiction()
    if problem:
        raise Refused(
            f"job {after.shown_id} cannot be changed like this: {problem}", f"see it with: gshow {after.shown_id}"
        )
    if new.is_for_slurm:
        check_handover(new, owner, tx)
    elif new.request != old.request or old.is_for_slurm:
        check_can_fit(new, tx, old.request.exclude)
    is_moved = new.reservation not in (None, old.reservation)
    # Queues, QOS and reservations may be limited to accounts: a former member must not enter others with one.
    if is_moved or (new.account, new.queue, new.qos) != (old.account, old.queue, old.qos):
        check_account(new, owner, tx, "account=")
    if _asks(new) != _asks(old):
        jobs = tx.state.arrays.left(before)
        with tx.state.active.with_more(old, before.user, -jobs):
            check_admitted(new, after.user, tx, max(1, jobs))
    is_asking = new.reservation in tx.state.rows[CALENDAR] and _asks(new) != _asks(old)
    if not new.is_for_slurm and (new.reservation != old.reservation or is_asking or old.is_for_slurm):
        check_reservation(new, after.user, tx)
    if (new.deadline_at, new.time_limit_s, after.eligible_at) != (
        old.deadline_at,
        old.time_limit_s,
        before.eligible_at,
    ):
        check_deadline(new, max(tx.now, after.eligible_at))
    is_other = new.dependency != old.dependency
    if new.dependency and is_other:
        check_dependency(new.dependency, tx, may_be_unknown=new.waits_if_infeasible)
    if is_other or new.name != old.name:
        check_circle(after, tx)


def _asks(spec: JobSpec) -> tuple[object, ...]:
    """Fields that queues, accounts and QOS decide admission by."""
    return spec.queue, spec.account, spec.qos, spec.time_limit_s, spec.request


def check_admitted(spec: JobSpec, user: str, tx: TickTransaction, jobs: int = 1) -> None:
    """Refuse similar jobs unless their queue, account and QOS admit all of them."""

    refused = slice_refusal(spec, user, tx.nodes, tx.settings)
    if refused is not None:
        raise Refused(refused.text, refused.hint, "policy")

    def found(others: int) -> Refusal | None:
        with tx.state.active.with_more(spec, user, others) as tally:
            return why_refused(spec, user, tx.settings, tally)

    refused = found(0)
    if refused is not None:
        raise Refused(refused.text, refused.hint, refused.about)
    if jobs == 1 or found(jobs - 1) is None:
        return
    fit, too_many = 1, jobs
    while too_many - fit > 1:
        middle = (fit + too_many) // 2
        fit, too_many = (middle, too_many) if found(middle - 1) is None else (fit, middle)
    refused = found(fit)
    if refused is not None:
        text = f"only {fit} of these {jobs} jobs would be accepted; then {refused.text}"
        raise Refused(text, refused.hint, refused.about)


def check_account(spec: JobSpec, owner: Caller, tx: TickTransaction, option: str = "-A") -> None:
    """Refuse an account that the job's owner does not belong to, whatever the caller's rights."""
    found = account_refusal(spec.account, owner.user, account_groups(owner, tx.settings), tx.settings, option)
    if found is not None:
        raise Refused(found.text, found.hint, "account")


def check_can_fit(spec: JobSpec, tx: TickTransaction, excluded: Iterable[str] = ()) -> None:
    """Refuse a request that could not run here even with everything free; one that waits if only for cores or nodes.

    Args: excluded: nodes that it left out before, which may have gone since.
    """
    wrong = refuse_excluded(spec.request, tx.nodes, excluded)
    if wrong is not None:
        raise Refused(wrong.text, wrong.hint, wrong.about)
    found = refusal(spec.request, tx.nodes, tx.settings)
    if found is not None and spec.waits_if_infeasible:
        found = refusal(on_each_node(replace(spec.request, nodes=1), cpus=0.0), tx.nodes, tx.settings)
    if found is None:
        return
    hint = found.hint
    if found.about == "cpus" and count_tasks(spec.request, spec.layout) > spec.request.nodes:
        hint = "ask for fewer tasks (-n), or for fewer cores for each of them (-c)"
    raise Refused(found.text, hint, found.about)


def check_handover(spec: JobSpec, owner: Caller, tx: TickTransaction) -> None:
    """Refuse a job that cannot be handed over, or would lose in Slurm what it cannot be without. Raises: Refused."""
    what = _needs_this_server(spec)
    if what is not None:
        raise Refused(f"{what} runs on this server and cannot be handed over", "leave out --engine slurm", "engine")
    handover = tx.handover
    why = NO_SLURM if handover is None else handover.why_not()
    if handover is None or why is not None:
        raise Refused(f"the job cannot be handed over: {why}", _NO_SLURM_HINT, "engine")
    handover.losses(spec)
    handover.check(new_job(1, owner, spec, tx.now), tx.settings.queue.get(spec.queue))


def check_burst(spec: JobSpec, settings: Settings) -> None:
    """Refuse --burst where it could have no effect. Raises: Refused."""
    if not spec.burst:
        return
    if spec.is_for_slurm:
        raise Refused("the job is handed over to Slurm at once, and cannot burst", "leave out --burst", "burst")
    if spec.engine is not None:
        text = f"--burst may hand the job over to Slurm, and engine {spec.engine} keeps it here"
        raise Refused(text, "leave out one of the two", "burst")
    if burst_limit_s(spec.queue, settings) is None:
        hint = f"leave out --burst, or ask {admins(settings)} to set burst_after_s of the queue"
        raise Refused(f"jobs of queue {spec.queue} do not burst", hint, "burst")


def handover_notes(specs: Iterable[JobSpec], handover: Handover | None) -> list[str]:
    """What jobs lose by being handed over, each sentence once; empty if none is."""
    found: dict[str, None] = {}
    # The jobs of a batch share their requests.
    for spec in {(id(one.request), one.launch.notice, one.nice): one for one in specs if one.is_for_slurm}.values():
        found.update(dict.fromkeys([HANDED_OVER_NOTE, *(() if handover is None else handover.losses(spec))]))
    return list(found)


NO_SLURM = "no Slurm is configured on this server"
_NO_SLURM_HINT = "keep it on this cluster with --engine local, or name Slurm's own commands in [handover] commands"
HANDED_OVER_NOTE = (
    "handed over to Slurm, whose priorities, limits and places apply; fair share, preemption, start estimates and the "
    "watch on idle GPUs of this server do not"
)


def check_reservation(spec: JobSpec, user: str, tx: TickTransaction) -> None:
    """Refuse a job in a reservation that it can never run in."""
    found = why_not_admitted(spec, user, tx.state.rows[CALENDAR], tx.now)
    if found is not None:
        raise Refused(found.text, found.hint, found.about or "reservation")


def check_deadline(spec: JobSpec, eligible_at: float) -> None:
    """Refuse a job that could not end by its deadline if it started as soon as it is eligible."""
    if spec.deadline_at is None:
        return
    left_s = spec.deadline_at - eligible_at
    if left_s < 0:
        raise Refused(
            f"the deadline is {format_duration(-left_s)} before the job could start",
            "choose a later --deadline",
            "deadline",
        )
    if left_s < (spec.time_limit_s or 0):
        raise Refused(
            f"the job may run {format_duration(spec.time_limit_s)}, but its deadline is "
            f"{format_duration(left_s)} after it could start",
            f"ask for less time: -t {format_duration(int(left_s))}" if left_s >= 1 else "choose a later --deadline",
            "deadline",
        )


def check_dependency(dependency: str, tx: TickTransaction, *, may_be_unknown: bool = False) -> None:
    """Refuse an unreadable dependency, and one on unknown jobs unless these may be: then it is never satisfied."""
    try:
        expression = parse_dependency(dependency)
    except ValueError as error:
        hint = "write it as afterok:41 or afterok:41:42,afterany:43"
        raise Refused(str(error), hint, "dependency") from None
    if may_be_unknown:
        return
    lookup = tx.state.lookup_parents(tx.jobs, expression)
    for one in expression.conditions:
        if one.job_id and lookup(one.job_id) is None:
            gone = " any more" if one.job_id < tx.state.next_id else ""
            text = f"there is no job {one.shown_id}{gone} to depend on"
            raise Refused(text, "list the jobs with: gq -a", "dependency")


def never_starts(spec: JobSpec, tx: TickTransaction, shown_id: str = "ID") -> str | None:
    """Text on a job whose dependency can never be satisfied, to follow its name; None while it may.

    Such a job is not refused: for a script that submits both jobs, it is a matter of moments whether the named
    one has failed yet.
    """
    if not spec.dependency:
        return None
    expression = parse_dependency(spec.dependency)
    verdict = evaluate(expression, tx.state.lookup_parents(tx.jobs, expression))
    if not isinstance(verdict, Never):
        return None
    ends = ends_unsatisfied(spec, tx.settings, is_spared=verdict.is_spared)
    change = f"gctl update {shown_id} dependency="
    fate = "cancelled at once" if ends else f"pending until the dependency is changed: {change}"
    return f"can never start: {verdict.text}; {fate}"


def keep_unknown_unknown(specs: Sequence[JobSpec], tx: TickTransaction) -> None:
    """Leave out ids that dependencies on unknown jobs name: otherwise a new job could become what they wait for."""
    state = tx.state
    if state.dependents.highest_named < state.next_id:
        return
    count = sum(1 + (0 if spec.array is None else jobs_in(spec)) for spec in specs)
    while taken := [one for one in range(state.next_id, state.next_id + count) if state.dependents.is_named(one)]:
        state.next_id = taken[-1] + 1


def check_circle(after: Job, tx: TickTransaction) -> None:
    """Refuse a changed dependency or name that would create a cycle."""
    cycle = find_cycle(tx.state.edges_with(after))
    if cycle:
        # Jobs in a cycle are pending, so they are active.
        names = [job.shown_id for job_id in cycle if (job := tx.state.find(job_id)) is not None]
        raise Refused(
            "the jobs would wait for each other: " + " -> ".join(names),
            f"see what they wait for with: gshow {names[0]}",
        )
