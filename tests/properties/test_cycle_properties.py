"""What no cycle may do, whatever queues, QOS, windows, reservations and running jobs there are."""

from __future__ import annotations

from hypothesis import given, note
from hypothesis import strategies as st

from gpusched import testing
from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.job import Job, Request
from gpusched.model.planner_settings import ORDERS, PreemptSettings, PrioritySettings
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement, Plan, Snapshot, Usage, Window
from gpusched.model.value import replace
from gpusched.scheduler.invariants import check_invariants
from gpusched.scheduler.planner import decide
from gpusched.scheduler.priority import terms_of
from gpusched.testing import NOW, job, node

USERS = ("ann", "bob", "eve")
QUEUES = ("vision", "nlp", "free")
TIERS = ("", "low", "high")
LIMITS = (None, 60, 600, 3600)


@st.composite
def chosen(draw: st.DrawFn) -> Settings:
    """Settings of a lab that uses what there is."""
    queues = {
        "vision": QueueSettings(
            "vision",
            guaranteed_gpus=draw(st.sampled_from([0.0, 1.0, 2.0])),
            max_gpus=draw(st.sampled_from([None, 3.0])),
        ),
        "nlp": QueueSettings(
            "nlp",
            guaranteed_gpus=draw(st.sampled_from([0.0, 1.0])),
            order=draw(st.sampled_from([None, "sjf", "drf"])),
            max_gpus_per_user=draw(st.sampled_from([None, 2.0])),
        ),
        "free": QueueSettings("free", weight=draw(st.sampled_from([None, 2.0]))),
    }
    return Settings(
        priority=PrioritySettings(
            order=draw(st.sampled_from(ORDERS)),
            backfill_depth=draw(st.sampled_from([1, 1, 2, 5, 100])),
            backfill=draw(st.sampled_from([True, True, True, False])),
        ),
        preempt=PreemptSettings(mode=draw(st.sampled_from(["requeue", "suspend", "off"])), min_run_s=100.0),
        queue=draw(st.sampled_from([{}, queues])),
        qos=draw(
            st.sampled_from(
                [{}, {"low": QosSettings("low"), "high": QosSettings("high", tier=1, preempts=("low",), max_gpus=4.0)}]
            )
        ),
        account=draw(st.sampled_from([{}, {"lab": AccountSettings("lab", shares=2.0)}])),
    )


def whole(cards: int, cpus: float = 1.0) -> Request:
    """A request for whole cards."""
    return Request(gpus=cards, cpus=cpus)


@st.composite
def waiting_jobs(draw: st.DrawFn) -> list[Job]:
    """Waiting jobs of several users, queues and tiers."""
    made = []
    for number in range(1, draw(st.integers(1, 10)) + 1):
        user = draw(st.sampled_from(USERS))
        made.append(
            job(
                number,
                user=user,
                uid=1000 + USERS.index(user),
                account=draw(st.sampled_from(["lab", "other"])),
                queue=draw(st.sampled_from(QUEUES)),
                qos=draw(st.sampled_from(TIERS)),
                request=draw(st.builds(whole, st.integers(0, 3), st.sampled_from([0.0, 1.0, 3.0]))),
                time_limit_s=draw(st.sampled_from(LIMITS)),
                is_front=draw(st.sampled_from([False, False, False, True])),
                submit_at=NOW - draw(st.sampled_from([0.0, 500.0, 90_000.0])),
            )
        )
    return made


def _stopping(held: Allocation) -> Allocation:
    """It is being ended from now on."""
    return replace(held, is_stopping=True, expected_end_at=min(held.expected_end_at or NOW + 30.0, NOW + 30.0))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Snapshot, list[Job], Settings]:
    """A snapshot whose running jobs the policy itself placed, some time ago."""
    settings = draw(chosen())
    machines: tuple[NodeView, ...] = tuple(node(f"n{i}", gpus=4, cpus=8.0) for i in range(draw(st.integers(1, 2))))
    before = draw(waiting_jobs())
    plain = replace(settings, queue={}, qos={}, preempt=PreemptSettings(mode="off"))
    first = decide(testing.snapshot(*machines, waiting=before, now=NOW - 300), plain)
    running = held_by(first, before, NOW - 300)
    running = [
        _stopping(held) if draw(st.sampled_from([False, False, False, True])) else held
        for held in (replace(held, job_id=held.job_id + 100) for held in running)
        if held.expected_end_at is None or held.expected_end_at > NOW
    ]
    windows = []
    for number in range(draw(st.integers(0, 2))):
        begins_in = draw(st.sampled_from([-50.0, 30.0, 500.0, 2000.0]))
        card = draw(st.integers(0, 3))
        place = Placement("n0", (testing.share(card, "n0"),), 1.0, 0)
        windows.append(Window(f"w{number}", NOW + begins_in, NOW + begins_in + 600.0, (place,), ("ann",)))
    usage = [Usage("lab", user, Resources(gpus=draw(st.sampled_from([0.0, 5e4]))), NOW) for user in USERS]
    after = draw(waiting_jobs())
    made = testing.snapshot(*machines, running=running, waiting=after, usage=usage, windows=windows)
    return made, after, settings


def held_by(plan: Plan, jobs: list[Job], now: float) -> list[Allocation]:
    """What the starts of a plan hold."""
    by_id = {one.id: one for one in jobs}
    return [
        Allocation(
            job_id=start.job_id,
            terms=terms_of(by_id[start.job_id]),
            node=start.placement.node,
            gpus=start.placement.gpus,
            cpus=start.placement.cpus,
            mem_mib=start.placement.mem_mib,
            start_at=now,
            expected_end_at=None if (limit := by_id[start.job_id].spec.time_limit_s) is None else now + limit,
        )
        for start in plan.starts
    ]


def carried_out(case: tuple[Snapshot, list[Job], Settings], plan: Plan) -> Snapshot:
    """The world right after the plan: its starts run, its victims are being stopped."""
    snapshot, jobs, _ = case
    victims = {one.job_id for one in plan.preempts}
    running = [_stopping(held) if held.job_id in victims else held for held in snapshot.allocations]
    started = {start.job_id for start in plan.starts}
    return testing.snapshot(
        *snapshot.nodes,
        running=[*running, *held_by(plan, jobs, NOW)],
        waiting=[one for one in jobs if one.id not in started],
        usage=snapshot.usage,
        windows=snapshot.windows,
    )


@given(cases())
def test_nothing_is_booked_twice_and_equal_inputs_give_equal_plans(case):
    snapshot, _, settings = case
    plan = decide(snapshot, settings)
    assert plan == decide(snapshot, settings)
    assert check_invariants(carried_out(case, plan)) == []


@given(cases())
def test_every_waiting_class_has_a_reason_or_starts(case):
    snapshot, _, settings = case
    plan = decide(snapshot, settings)
    started = {start.job_id for start in plan.starts}
    for waiting in snapshot.pending:
        left = [one for one in waiting.jobs if one.id not in started]
        assert bool(left) is (waiting.key in plan.reasons)
        assert not left or plan.reasons[waiting.key].text


@given(cases())
def test_a_reserved_start_is_never_delayed_by_backfill(case):
    _, _, settings = case
    plan = decide(case[0], settings)
    again = decide(carried_out(case, plan), settings)
    kept = {one.job_id: one.start_at for one in again.reservations}
    started = {start.job_id for start in again.starts}
    promised = {one.job_id: one.start_at for one in plan.reservations}
    # The order may change with what was started (fair shares, DRF): then another job may be the one with a reservation.
    if settings.priority.order in ("drf", "fairshare", "multifactor", "hybrid") or settings.queue:
        return
    qos_of = {one.id: settings.qos.get(one.spec.qos) for one in case[1]}
    for job_id, start_at in promised.items():
        note(f"job {job_id} was promised {start_at}")
        if job_id in started or start_at is None:
            continue
        qos = qos_of[job_id]
        if qos is not None and qos.max_gpus is not None:
            # While a limit keeps it waiting no machines are kept for it, only its turn below the limit.
            continue
        assert job_id in kept
        assert kept[job_id] is not None
        assert kept[job_id] <= start_at


@given(cases())
def test_started_jobs_exceed_no_queue_or_user_maximum(case):
    snapshot, jobs, settings = case
    plan = decide(snapshot, settings)
    after = carried_out(case, plan)
    before = _gpus_by(snapshot.allocations)
    for group, gpus in _gpus_by(after.allocations).items():
        most = _maximum(group, settings)
        if most is not None and gpus > before.get(group, 0):
            assert gpus <= most
    assert len(jobs) >= len(plan.starts)


def _gpus_by(allocations) -> dict[tuple[str, ...], int]:
    tally: dict[tuple[str, ...], int] = {}
    for held in allocations:
        for group in (
            ("queue", held.terms.queue),
            ("user", held.terms.queue, held.terms.user),
            ("qos", held.terms.qos),
        ):
            tally[group] = tally.get(group, 0) + len(held.gpus)
    return tally


def _maximum(group: tuple[str, ...], settings: Settings) -> float | None:
    kind, name, *_ = group
    if kind == "qos":
        qos = settings.qos.get(name)
        return qos.max_gpus if qos else None
    queue = settings.queue.get(name)
    if queue is None:
        return None
    return queue.max_gpus if kind == "queue" else queue.max_gpus_per_user


@given(cases())
def test_only_preemptible_runs_become_victims(case):
    snapshot, jobs, settings = case
    plan = decide(snapshot, settings)
    by_id = {held.job_id: held for held in snapshot.allocations}
    waiting = {one.id: one for one in jobs}
    assert not (plan.preempts and settings.preempt.mode == "off")
    assert len({one.job_id for one in plan.preempts}) == len(plan.preempts)
    claimants = {one.for_job for one in plan.preempts}
    assert claimants <= {one.job_id for one in plan.reservations}
    for preempt in plan.preempts:
        victim, claimant = by_id[preempt.job_id], waiting[preempt.for_job]
        assert not victim.is_stopping
        assert NOW - victim.start_at >= settings.preempt.min_run_s
        by_qos = claimant.spec.qos == "high" and victim.terms.qos == "low" and bool(settings.qos)
        by_queue = bool(settings.queue) and victim.terms.queue != claimant.spec.queue
        assert by_qos or by_queue
        assert (preempt.mode == "suspend") <= (settings.preempt.mode == "suspend" and not victim.gpus)


@given(cases())
def test_a_preemption_is_not_repeated_for_the_same_job(case):
    plan = decide(case[0], case[2])
    if not plan.preempts:
        return
    again = decide(carried_out(case, plan), case[2])
    first = {one.for_job for one in plan.preempts}
    order_is_fixed = case[2].priority.order in ("fifo", "priority", "sjf") and not case[2].queue
    assert not order_is_fixed or not first & {one.for_job for one in again.preempts}


@given(cases())
def test_no_job_runs_into_a_window_of_others(case):
    snapshot, jobs, settings = case
    plan = decide(snapshot, settings)
    limits = {one.id: one.spec.time_limit_s for one in jobs}
    for start in plan.starts:
        limit = limits[start.job_id]
        end_at = float("inf") if limit is None else NOW + limit
        cards = {share.uuid for share in start.placement.gpus}
        for window in snapshot.windows:
            kept = {share.uuid for place in window.held for share in place.gpus}
            if window.start_at < end_at and window.end_at > NOW:
                assert not cards & kept


@given(cases())
def test_a_queue_gets_its_guarantee_when_all_others_are_preemptible(case):
    """Demand within the guarantee starts, or somebody is asked to make room, or is being asked already."""
    snapshot, _, settings = case
    settings = replace(settings, preempt=PreemptSettings(mode="requeue", min_run_s=0.0), qos={})
    if not settings.queue or snapshot.windows:
        return
    plan = decide(snapshot, settings)
    held = _gpus_by(carried_out(case, plan).allocations)
    asked = {one.for_job for one in plan.preempts}
    for waiting in snapshot.pending:
        queue, gpus = settings.queue[waiting.key.terms.queue], waiting.key.terms.request.gpus
        code = str(plan.reasons[waiting.key].code) if waiting.key in plan.reasons else "None"
        if waiting.key not in plan.reasons or gpus != 1 or waiting.key.terms.request.cpus or code.startswith("Queue"):
            continue
        if held.get(("queue", queue.name), 0) + gpus <= queue.guaranteed_gpus:
            borrowers = [
                one
                for one in snapshot.allocations
                if not one.is_stopping
                and len(one.gpus) == 1
                and one.queue != queue.name
                and held[("queue", one.queue)] > settings.queue[one.queue].guaranteed_gpus
            ]
            is_served = bool(asked) or any(one.is_stopping for one in snapshot.allocations)
            assert is_served or not borrowers
