"""What holds of quotas whatever the queues are and whatever comes and goes."""

from __future__ import annotations

from hypothesis import event, given
from hypothesis import strategies as st

from gpusched.model.cluster import JobTerms
from gpusched.model.queue_settings import QosSettings, QueueSettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.quota import Quotas
from gpusched.testing import node, request

NODES = [node(gpus=8, cpus=32.0, mem_mib=64_000)]
NAMES = ("a", "b", "c", "d", "e", "f")
USERS = ("ann", "bob", "cem")
QOS = ("", "day", "night")
SLACK = 1e-9

gpus = st.sampled_from([None, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0])
parts = st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0, 2.0, 3.0])


@st.composite
def trees(draw: st.DrawFn) -> dict[str, QueueSettings]:
    """Queues with parents that come earlier in the alphabet."""
    made = {}
    for position, name in enumerate(NAMES[: draw(st.integers(0, len(NAMES)))]):
        made[name] = QueueSettings(
            name,
            parent=draw(st.sampled_from([None, *NAMES[:position]])),
            guaranteed_gpus=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0, 4.0])),
            guaranteed_cpus=draw(st.sampled_from([0.0, 0.0, 4.0])),
            max_gpus=draw(gpus),
            max_cpus=draw(st.sampled_from([None, None, 3.0, 16.0])),
            max_mem_mib=draw(st.sampled_from([None, None, 1000])),
            weight=draw(st.sampled_from([None, 0.0, 1.0, 2.5])),
            max_gpus_per_user=draw(st.sampled_from([None, None, 1.0, 3.0])),
            max_gpus_per_job=draw(st.sampled_from([None, None, 0.5, 2.0])),
            max_running_per_user=draw(st.sampled_from([None, None, 1, 3])),
            preemptible=draw(st.sampled_from([True, True, False])),
        )
    return made


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    night = QosSettings(
        "night",
        max_gpus=draw(gpus),
        max_gpus_per_user=draw(gpus),
        max_gpus_per_job=draw(gpus),
        max_running_per_user=draw(st.sampled_from([None, 1, 2])),
    )
    return Settings(queue=draw(trees()), qos={"day": QosSettings("day"), "night": night})


amounts = st.builds(Resources, gpus=parts, cpus=st.sampled_from([0.0, 0.1, 1.0, 2.5]), mem_mib=st.integers(0, 800))
queue_names = st.sampled_from([*NAMES, "gone"])
jobs = st.tuples(queue_names, st.sampled_from(USERS), st.sampled_from(QOS), amounts)
Job = tuple[str, str, str, Resources]


def fresh(settings: Settings) -> Quotas:
    return Quotas(settings, ClusterLayout(NODES, settings))


def counted(job: Job) -> tuple[JobTerms, Resources]:
    return JobTerms(1000, job[1], "lab", job[0], job[2], request()), job[3]


def add_all(quotas: Quotas, held: list[Job]) -> None:
    for job in held:
        quotas.add(*counted(job))


def let_in(quotas: Quotas, wanted: list[Job]) -> list[Job]:
    """Add every job that no limit keeps out."""
    running = []
    for job in wanted:
        if quotas.why_not(*counted(job)) is None:
            quotas.add(*counted(job))
            running.append(job)
    return running


def path_up(settings: Settings, name: str) -> list[str]:
    names = [name]
    while (above := settings.queue[names[-1]].parent if names[-1] in settings.queue else None) is not None:
        names.append(above)
    return names


def below(settings: Settings, name: str, running: list[Job]) -> list[Job]:
    return [job for job in running if name in path_up(settings, job[0])]


def over(held: float, most: float | None) -> bool:
    return most is not None and held > most + len(NAMES) * 1e-6


@given(all_settings(), st.lists(jobs, max_size=30))
def test_no_limit_is_ever_exceeded(settings, wanted):
    running = let_in(fresh(settings), wanted)
    for name, queue in settings.queue.items():
        inside = below(settings, name, running)
        assert not over(sum(job[3].gpus for job in inside), queue.max_gpus)
        assert not over(sum(job[3].cpus for job in inside), queue.max_cpus)
        assert not over(sum(job[3].mem_mib for job in inside), queue.max_mem_mib)
        assert not any(over(job[3].gpus, queue.max_gpus_per_job) for job in inside)
        for user in USERS:
            own = [job for job in inside if job[1] == user]
            assert not over(sum(job[3].gpus for job in own), queue.max_gpus_per_user)
            assert queue.max_running_per_user is None or len(own) <= queue.max_running_per_user
    limits = settings.qos["night"]
    night = [job for job in running if job[2] == "night"]
    assert not over(sum(job[3].gpus for job in night), limits.max_gpus)
    assert not any(over(job[3].gpus, limits.max_gpus_per_job) for job in night)
    for user in USERS:
        own = [job for job in night if job[1] == user]
        assert not over(sum(job[3].gpus for job in own), limits.max_gpus_per_user)
        assert limits.max_running_per_user is None or len(own) <= limits.max_running_per_user


@given(all_settings(), st.lists(jobs, max_size=15), jobs)
def test_a_refused_job_would_exceed_the_named_limit(settings, wanted, job):
    quotas = fresh(settings)
    let_in(quotas, wanted)
    denial = quotas.why_not(*counted(job))
    if denial is None:
        return
    event("turned away")
    limit, held, needed = (float(denial.facts[name]) for name in ("limit", "held", "needed"))
    assert held + needed > limit
    assert needed > 0


@given(all_settings(), st.lists(jobs, max_size=12), st.lists(jobs, max_size=12), st.randoms())
def test_removing_undoes_adding_exactly_in_any_order(settings, stay, go, random):
    quotas, wanted = fresh(settings), fresh(settings)
    mixed = [(job, False) for job in stay] + [(job, True) for job in go]
    random.shuffle(mixed)
    for job, _ in mixed:
        quotas.add(*counted(job))
    leaving = [job for job, leaves in mixed if leaves]
    random.shuffle(leaving)
    for job in leaving:
        quotas.remove(*counted(job))
    add_all(wanted, stay)
    assert_same(quotas, wanted)


@given(all_settings(), st.lists(jobs, max_size=8), st.lists(jobs, max_size=8))
def test_a_copy_is_equal_and_does_not_touch_the_original(settings, before, after):
    quotas, untouched = fresh(settings), fresh(settings)
    add_all(quotas, before)
    add_all(untouched, before)
    twin = quotas.copy()
    assert_same(twin, quotas)
    add_all(twin, after)
    assert_same(quotas, untouched)
    add_all(untouched, after)
    assert_same(twin, untouched)


def assert_same(one: Quotas, other: Quotas) -> None:
    """Equal to the last bit in everything that can be asked, also of users and QOS."""
    probes = [Resources(gpus=0.5, cpus=1.0), Resources(gpus=1.0), Resources(cpus=0.1, mem_mib=1)]
    for name in (*NAMES, "gone"):
        assert one.used(name) == other.used(name)
        assert one.running(name) == other.running(name)
        for probe in probes:
            assert one.rank(name, probe) == other.rank(name, probe)
            for user in USERS:
                for qos in QOS:
                    where = JobTerms(1000, user, "lab", name, qos, request())
                    assert one.why_not(where, probe) == other.why_not(where, probe)
    assert one.ledger() == other.ledger()


@given(all_settings(), st.lists(jobs, max_size=15), jobs, st.lists(jobs, max_size=15))
def test_a_guarantee_does_not_shrink_by_usage_of_others(settings, held, job, others):
    quotas = fresh(settings)
    add_all(quotas, held)
    before = quotas.is_within_guarantee(job[0], job[3])
    path = path_up(settings, job[0])
    add_all(quotas, [other for other in others if not set(path_up(settings, other[0])) & set(path)])
    assert quotas.is_within_guarantee(job[0], job[3]) == before


@given(all_settings(), st.lists(jobs, max_size=15), jobs, st.lists(jobs, max_size=15))
def test_limits_of_a_queue_do_not_depend_on_others(settings, held, job, others):
    quotas = fresh(settings)
    job = (job[0], job[1], "", job[3])
    add_all(quotas, held)
    before = quotas.why_not(*counted(job))
    path = path_up(settings, job[0])
    add_all(quotas, [other for other in others if not set(path_up(settings, other[0])) & set(path)])
    assert quotas.why_not(*counted(job)) == before


@given(all_settings(), st.lists(jobs, max_size=10), jobs, st.lists(jobs, min_size=1, max_size=10))
def test_the_rank_only_gets_worse_as_the_queue_holds_more(settings, held, job, more):
    quotas = fresh(settings)
    add_all(quotas, held)
    ranks = [quotas.rank(job[0], job[3])]
    for other in more:
        quotas.add(*counted(other))
        ranks.append(quotas.rank(job[0], job[3]))
    assert ranks == sorted(ranks)


@given(all_settings(), st.lists(jobs, max_size=10), amounts)
def test_ranks_of_all_queues_are_a_strict_order(settings, held, amount):
    quotas = fresh(settings)
    add_all(quotas, held)
    names = {*settings.queue, "gone", "other"}
    leaves = names - {queue.parent for queue in settings.queue.values()}
    assert len({quotas.rank(name, amount) for name in leaves}) == len(leaves)
    assert sorted(quotas.rank(name, amount) for name in leaves)


@st.composite
def full_houses(draw: st.DrawFn) -> tuple[Settings, list[Job], list[Job]]:
    """Queues that hold more than their guarantees, and jobs that would like to have some of it."""
    names = [*NAMES[:4], "gone"]
    made = {}
    for position, name in enumerate(names[:4]):
        made[name] = QueueSettings(
            name,
            parent=draw(st.sampled_from([None, None, *names[:position]])),
            guaranteed_gpus=draw(st.sampled_from([0.0, 1.0, 2.0, 4.0])),
            guaranteed_cpus=draw(st.sampled_from([0.0, 0.0, 4.0])),
            preemptible=draw(st.sampled_from([True, True, True, False])),
        )
    one = st.tuples(
        st.sampled_from(names),
        st.just("ann"),
        st.just(""),
        st.builds(Resources, gpus=st.sampled_from([0.0, 0.5, 1.0, 2.0]), cpus=st.sampled_from([0.0, 1.0, 3.0])),
    )
    return (
        Settings(queue=made),
        draw(st.lists(one, min_size=1, max_size=8)),
        draw(st.lists(one, min_size=1, max_size=4)),
    )


@given(full_houses())
def test_reclaiming_leaves_both_queues_their_guarantee(case):
    settings, held, claims = case
    quotas = fresh(settings)
    add_all(quotas, held)
    for claim in claims:
        for victim in held:
            if not quotas.may_reclaim(claim[0], claim[3], victim[0], victim[3]):
                continue
            event("taken back")
            assert quotas.is_within_guarantee(claim[0], claim[3])
            assert_may_lose(settings, quotas, claim, victim)


def assert_may_lose(settings: Settings, quotas: Quotas, claim: Job, victim: Job) -> None:
    """No queue on the victim's side is protected, and none is left with less than its guarantee."""
    common = set(path_up(settings, claim[0])) & set(path_up(settings, victim[0]))
    after = quotas.copy()
    after.remove(*counted(victim))
    for name in path_up(settings, victim[0]):
        if name in common:
            continue
        queue = settings.queue.get(name)
        assert queue is None or queue.preemptible
        promised = quotas.guaranteed(name)
        for kind in ("gpus", "cpus"):
            had, has, own = (getattr(one, kind) for one in (quotas.used(name), after.used(name), promised))
            assert has >= own - SLACK or had <= own + SLACK


@given(full_houses(), st.booleans())
def test_queues_do_not_reclaim_in_turns(case, may_cut):
    """What was taken back by a job is not taken back again, at once, by the one that lost it."""
    settings, held, claims = case
    quotas = fresh(settings)
    add_all(quotas, held)
    for claim in claims:
        for victim in held:
            if not quotas.may_reclaim(claim[0], claim[3], victim[0], victim[3], may_cut=may_cut):
                continue
            event("taken back")
            after = quotas.copy()
            after.remove(*counted(victim))
            after.add(*counted(claim))
            assert not after.may_reclaim(victim[0], victim[3], claim[0], claim[3], may_cut=may_cut)


@given(full_houses())
def test_reclaiming_at_once_leaves_every_queue_its_guarantee(case):
    """Victim after victim, as in one cycle: they are leaving, and the claims hold what they will get."""
    settings, held, claims = case
    settings = replace(settings, queue={name: replace(queue, parent=None) for name, queue in settings.queue.items()})
    quotas = fresh(settings)
    add_all(quotas, held)
    after = quotas.copy()
    left = list(held)
    for claim in claims:
        for victim in list(left):
            if quotas.may_reclaim(claim[0], claim[3], victim[0], victim[3]):
                event("taken back")
                quotas.leave(victim[0], victim[3])
                quotas.add(*counted(claim))
                after.remove(*counted(victim))
                left.remove(victim)
                break
    before = fresh(settings)
    add_all(before, held)
    for name in settings.queue:
        own = quotas.guaranteed(name)
        had, has = before.used(name), after.used(name)
        if own.gpus:
            # Cores may be less after a claim of GPUs; nothing goes before guaranteed GPUs.
            assert has.gpus >= min(had.gpus, own.gpus) - SLACK


@given(trees(), st.lists(jobs, max_size=15))
def test_the_ledger_adds_up(queues, held):
    settings = Settings(queue={name: replace(queue, parent=None) for name, queue in queues.items()})
    quotas = fresh(settings)
    total = 0.0
    for job in held:
        # The machines are never overbooked.
        if total + job[3].gpus <= 8:
            quotas.add(*counted(job))
            total += job[3].gpus
    names = {*settings.queue, *(job[0] for job in held)}
    promised = {name: quotas.guaranteed(name).gpus for name in names}
    lent = dict.fromkeys(names, 0.0)
    borrowed = dict.fromkeys(names, 0.0)
    for loan in quotas.ledger():
        assert loan.lender != loan.borrower
        assert any((loan.amount.gpus, loan.amount.cpus, loan.amount.mem_mib))
        lent[loan.lender] += loan.amount.gpus
        borrowed[loan.borrower] += loan.amount.gpus
    for name in names:
        idle = promised[name] - quotas.used(name).gpus
        assert lent[name] <= max(0.0, idle) + SLACK
        assert borrowed[name] <= max(0.0, -idle) + SLACK
        assert not (lent[name] and borrowed[name])
    above = sum(max(0.0, quotas.used(name).gpus - promised[name]) for name in names)
    unpromised = max(0.0, 8 - sum(promised.values()))
    wanted = max(0.0, above - unpromised) if any(promised.values()) else 0.0
    assert abs(sum(lent.values()) - wanted) < 1e-6
    assert abs(sum(borrowed.values()) - wanted) < 1e-6


@given(all_settings(), st.lists(jobs, max_size=15))
def test_loans_are_between_siblings(settings, held):
    quotas = fresh(settings)
    add_all(quotas, held)
    for loan in quotas.ledger():
        parents = [
            settings.queue[name].parent if name in settings.queue else None for name in (loan.lender, loan.borrower)
        ]
        assert parents[0] == parents[1]
