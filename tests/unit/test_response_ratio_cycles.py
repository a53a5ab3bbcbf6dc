"""In the order `response_ratio`, a planner that goes on from its last cycle plans as one made from its snapshot."""

from __future__ import annotations

from gpusched.model.cluster import JobTerms
from gpusched.model.job import Request
from gpusched.model.planner_settings import PreemptSettings, PrioritySettings
from gpusched.model.queue_settings import AccountSettings, QueueSettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, Usage
from gpusched.scheduler.fairshare import FairShare
from gpusched.scheduler.planner import Planner, decide
from gpusched.scheduler.state import PlannerState
from gpusched.testing import NOW, node

AT_ONCE = PrioritySettings(reserve_after_s=0.0, reserve_after_runs=0.0, calc_period_s=0.0)
HOUR = 3600


def key(user: str = "ann", cpus: float = 1.0, limit_s: int = 60, **parts: object) -> ClassKey:
    """Of jobs that take cores."""
    terms = {name: parts.pop(name) for name in JobTerms.__struct_fields__ if name in parts}
    return ClassKey(JobTerms(1000, user, request=Request(cpus=cpus), **terms), 0, limit_s, **parts)


def queue_all(planner: Planner, *jobs: tuple[int, ClassKey, float]) -> None:
    """Jobs by id, key and the time they have waited by now."""
    for number, wanted, waited_s in jobs:
        planner.state.job_queued(planner.state.class_of_key(wanted), NOW - waited_s, number)


def starts_of(planner: Planner, now: float = NOW) -> list[int]:
    """Ids of the jobs that it starts, which are those that a planner made from its snapshot starts."""
    expected = [start.job_id for start in decide(planner.fork().state.snapshot(now), planner.state.settings).starts]
    assert [start.job_id for start in planner.schedule(now)] == expected
    return expected


def test_backfilled_arrivals_start_by_their_ratio():
    planner = Planner(PlannerState((node(cpus=8.0),), Settings(priority=AT_ONCE)))
    queue_all(planner, (1, key(cpus=2.0, limit_s=2 * HOUR), 0.0))
    assert starts_of(planner) == [1]
    long, short = key(limit_s=2 * HOUR), key()
    # The older long one goes first among those that could get a reservation, but not among those that fill gaps.
    queue_all(planner, (2, key(cpus=8.0), 500.0), (3, long, 100.0), (4, long, 0.0), (5, short, 50.0), (6, short, 40.0))
    assert starts_of(planner) == [5, 6, 3, 4]


def test_jobs_of_guaranteed_queues_are_backfilled():
    queues = {name: QueueSettings(name, guaranteed_cpus=4.0) for name in ("nlp", "vision")}
    settings = Settings(priority=AT_ONCE, queue=queues, preempt=PreemptSettings(mode="off"))
    planner = Planner(PlannerState((node(cpus=8.0),), settings))
    queue_all(planner, (1, key(cpus=5.0, limit_s=2 * HOUR, queue="nlp"), 0.0))
    assert starts_of(planner) == [1]
    small = [(3, key(queue="nlp"), 10.0), (4, key("bob", queue="vision"), 10.0), (5, key("eve", queue="nlp"), 10.0)]
    queue_all(planner, (2, key(cpus=4.0, queue="vision"), 500.0), *small)
    assert sorted(starts_of(planner)) == [3, 4, 5]


def test_users_without_an_open_run_are_not_compared():
    planner = Planner(PlannerState((node(cpus=2.0),), Settings(priority=AT_ONCE)))
    planner.state.fairshare.reset(
        Usage("", user, Resources(cpus=hours * HOUR), NOW) for user, hours in (("ann", 1.0), ("bob", 2.0), ("eve", 1e6))
    )
    queue_all(planner, (1, key("eve", cpus=2.0), 0.0))
    assert starts_of(planner) == [1]
    queue_all(planner, (2, key("bob", cpus=2.0), 100.0), (3, key("ann", cpus=2.0), 0.0))
    assert starts_of(planner) == []
    planner.state.run_ended(1)
    # Beside eve's use, that of ann and bob would be the same.
    assert starts_of(planner, NOW + 1) == [3]


def test_departed_users_take_no_part_of_their_accounts_shares():
    accounts = {name: AccountSettings(name) for name in ("lab", "vision")}

    def shares(has_guest: bool) -> list[float]:
        fairshare = FairShare(Settings(account=accounts), Resources(cpus=8.0))
        users = [fairshare.of("lab", "ann"), fairshare.of("vision", "bob")]
        fairshare.reset(Usage(one.account, one.user, Resources(cpus=100.0), NOW) for one in users)
        for one in users:
            fairshare.add_pending(one)
        if has_guest:
            guest = fairshare.of("lab", "eve")
            fairshare.add_pending(guest)
            fairshare.remove_pending(guest)
        fairshare.compare(NOW)
        return [one.share for one in users]

    assert shares(has_guest=True) == shares(has_guest=False) == [1.0, 1.0]


def test_members_without_jobs_take_no_part_of_their_accounts_share():
    members = dict.fromkeys(("ann", "carl", "dora", "emil"), 1.0)
    accounts = {
        "lab": AccountSettings("lab", shares=2.0),
        "vision": AccountSettings("vision", parent="lab", shares=1.0, users=members),
        "robots": AccountSettings("robots", parent="lab", shares=1.0, users={"fred": 1.0}),
        "guests": AccountSettings("guests", shares=1.0, users={"bob": 1.0, "gina": 3.0}),
    }
    fairshare = FairShare(Settings(account=accounts), Resources(cpus=8.0))
    users = [fairshare.of("vision", "ann"), fairshare.of("guests", "bob")]
    fairshare.reset(
        Usage(one.account, one.user, Resources(cpus=cpu_s), NOW) for one, cpu_s in zip(users, (2e4, 1e4), strict=True)
    )
    for one in users:
        fairshare.add_pending(one)
    fairshare.compare(NOW)
    # Each is due the whole share of the top account, 2 and 1, and has used just that.
    assert [one.share for one in users] == [1.0, 1.0]
    # With another member's job there, ann is due half of it.
    fairshare.add_pending(fairshare.of("vision", "carl"))
    fairshare.compare(NOW)
    assert [one.share for one in users] == [2.0, 1.0]
    # It takes no part any more once that has gone, ...
    fairshare.remove_pending(fairshare.of("vision", "carl"))
    fairshare.compare(NOW)
    assert [one.share for one in users] == [1.0, 1.0]
    # ... and a member of another account takes part of that one's, however many there are.
    fairshare.add_pending(fairshare.of("guests", "gina"))
    fairshare.compare(NOW)
    assert [one.share for one in users] == [1.0, 4.0]


def test_long_waiting_jobs_are_in_the_first_current_band():
    fairshare = FairShare(Settings(), Resources(cpus=8.0))
    light, middle, heavy = users = [fairshare.of("", user) for user in ("light", "middle", "heavy")]
    fairshare.reset(
        Usage("", one.user, Resources(cpus=used), NOW) for one, used in zip(users, (0.0, 1e4, 2e4), strict=True)
    )
    for one in users:
        fairshare.add_pending(one)
    fairshare.compare(NOW)
    assert middle.share == 1.0
    assert fairshare.first_band < middle.band
    for one in (light, heavy):
        fairshare.remove_pending(one)
    # The share of the last one stays, but old jobs no longer stand before the band of others.
    assert list(fairshare.compare(NOW)) == [middle]
    assert fairshare.first_band == middle.band
