"""The daemon's tick on a virtual clock: the starts of the policy alone, and all that the policy alone does not do."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.cases import EXAMPLES
from gpusched.addons.simulate import daemon_run, planner_run
from gpusched.addons.simulate.cluster import largest, nodes_of, processors
from gpusched.addons.simulate.daemon_run import Mishaps, NeverStarted
from gpusched.addons.simulate.policies import policies_of
from gpusched.addons.simulate.trace import TraceJob, read_trace
from gpusched.errors import UsageError, UserError
from gpusched.model.job import RetryRule
from gpusched.model.planner_settings import OversubscribeSettings, PreemptSettings, PrioritySettings
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.model.settings import LimitSettings, Settings
from gpusched.model.value import replace
from gpusched.periods import period_at
from gpusched.testing import spec

ONE = nodes_of("1x4xA100-80GiB:64")


def gpu_job(name: str, submit_s: int, run_s: int, gpus: int = 1, **parts) -> TraceJob:
    return TraceJob(name, submit_s, run_s, parts.pop("estimate_s", run_s), gpus=gpus, cpus=1.0, **parts)


def both(jobs, nodes, name: str):
    (policy,) = policies_of([name])
    return planner_run.run(jobs, nodes, policy.settings), daemon_run.run(jobs, nodes, policy.settings)


POLICIES = ("fcfs", "fcfs+easy", "fcfs+greedy", "sjf+easy", "saf+cons", "default", "sjf+easy/first")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_shipped_trace_starts_the_same_by_tick_and_policy(policy):
    jobs = read_trace(EXAMPLES / "tiresias_60jobs.csv.gz").jobs
    fast, slow = both(jobs, nodes_of("1x8"), policy)
    assert slow.start_s == fast.start_s
    assert slow.ends_s == fast.end_s
    assert {one.how for one in slow.attempts} == {"completed"}


RIGID = st.builds(
    lambda submit, run, more, procs: (submit, run, run + more, procs),
    st.integers(0, 40),
    st.integers(1, 30),
    st.integers(0, 20),
    st.integers(1, 8),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(RIGID, min_size=1, max_size=25), st.sampled_from(POLICIES[:6]))
def test_rigid_jobs_start_the_same_by_tick_and_policy(rows, policy):
    jobs = [TraceJob(str(n), one[0], one[1], one[2], procs=one[3]) for n, one in enumerate(rows)]
    fast, slow = both(jobs, processors(8), policy)
    assert slow.start_s == fast.start_s


@settings(max_examples=25, deadline=None)
@given(st.lists(RIGID, min_size=1, max_size=25), st.sampled_from(POLICIES))
def test_gpu_jobs_start_the_same_by_tick_and_policy(rows, policy):
    # Of one user: of several the daemon knows at once what a run has used that ends within a `calc_period_s`.
    jobs = [gpu_job(str(n), one[0], one[1], one[3], estimate_s=one[2]) for n, one in enumerate(rows)]
    fast, slow = both(jobs, nodes_of("1x8"), policy)
    assert slow.start_s == fast.start_s


@settings(max_examples=25, deadline=None)
@given(st.lists(RIGID, min_size=1, max_size=25))
@example([(0, 1, 1, gpus) for gpus in (1, 1, 1, 6, 1, 2, 1, 1, 1, 2)])
@example([(0, 17, 17, 6), (1, 1, 1, 4), (1, 1, 1, 5), (1, 1, 1, 5), (0, 18, 18, 7)])
def test_jobs_of_several_users_start_the_same_where_usage_counts_at_once(rows):
    jobs = [gpu_job(str(n), one[0], one[1], one[3], estimate_s=one[2], user=f"u{n % 3}") for n, one in enumerate(rows)]
    rules = Settings(priority=PrioritySettings(calc_period_s=0.0))
    nodes = nodes_of("1x8")
    assert daemon_run.run(jobs, nodes, rules).start_s == planner_run.run(jobs, nodes, rules).start_s


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["fcfs+easy", "sjf+easy", "default"])
def test_a_thousand_jobs_of_a_real_log_start_the_same(trace_file, policy):
    trace = read_trace(trace_file("kth_sp2.swf.gz"))
    fast, slow = both(trace.jobs[:1000], processors(trace.procs), policy)
    assert slow.starts_sha == fast.starts_sha


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "nodes", "count", "most"),
    [("kth_sp2.swf.gz", "100p", 1500, 200), ("philly_jobs.csv.gz", "1x48", 400, 2000)],
)
def test_the_tick_takes_a_bounded_multiple_of_the_policy_time(trace_file, name, nodes, count, most):
    machines = nodes_of(nodes)
    gpus, procs = largest(machines)
    trace = read_trace(trace_file(name))
    trace.keep_those_that_fit(gpus=gpus, procs=procs)
    jobs, (policy,) = trace.jobs[:count], policies_of(["fcfs+easy"])
    at = [time.process_time()]
    for simulate in (planner_run.run, daemon_run.run):
        simulate(jobs, machines, policy.settings)
        at.append(time.process_time())
    ratio = (at[2] - at[1]) / (at[1] - at[0])
    print(f"{name}: {len(jobs)} jobs, {ratio:.0f} times, {len(jobs) / (at[2] - at[1]):.0f} jobs/s by the tick")
    assert ratio < most


# --- what goes wrong ----------------------------------------------------------------------------------


def ends_of(outcome, number: int) -> list[tuple[int, int, str]]:
    return [(one.start_s, one.end_s, one.how) for one in outcome.attempts if one.job == number]


def test_a_job_that_failed_in_the_trace_fails_at_each_attempt():
    jobs = [gpu_job("a", 0, 100, outcome="failed"), gpu_job("b", 0, 50, outcome="completed")]
    once = daemon_run.run(jobs, ONE, Settings())
    assert ends_of(once, 0) == [(0, 100, "failed")]
    outcome = daemon_run.run(jobs, ONE, Settings(), mishaps=Mishaps(retries=2))
    first, second, third = ends_of(outcome, 0)
    assert (first, [how for *_, how in (second, third)]) == ((0, 100, "failed"), ["failed", "failed"])
    # The backoff of 10 s and then 20 s, each a quarter more or less, as the daemon has it.
    assert 107 <= second[0] <= 113
    assert 15 <= third[0] - second[1] <= 25
    assert outcome.ends_s[0] == third[1]
    assert ends_of(outcome, 1) == [(0, 50, "completed")]


def test_runs_fail_by_seed_alone_and_only_with_an_unknown_end():
    known = [gpu_job(f"k{n}", n, 40, outcome="completed") for n in range(30)]
    jobs = [gpu_job(f"u{n}", n, 40) for n in range(60)] + known
    runs = [
        daemon_run.run(jobs, ONE, Settings(), mishaps=Mishaps(fail_rate=0.3, seed=seed, retries=1))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0].attempts != runs[2].attempts
    failed = [one for one in runs[0].attempts if one.how == "failed"]
    assert {one.job for one in failed} <= set(range(60))
    assert 8 <= len({one.job for one in failed}) <= 32
    assert all(1 <= one.end_s - one.start_s <= 40 for one in failed)


def test_a_run_ends_at_its_time_limit():
    jobs = [gpu_job("a", 0, 60, estimate_s=60, outcome="timeout"), gpu_job("b", 1, 20, gpus=4, estimate_s=30)]
    outcome = daemon_run.run(jobs, ONE, Settings())
    assert ends_of(outcome, 0) == [(0, 60, "timeout")]
    assert ends_of(outcome, 1) == [(60, 80, "completed")]


def test_jobs_that_would_take_longer_end_at_their_trace_limits(tmp_path):
    table = tmp_path / "jobs.csv"
    table.write_text("submit_s,duration_s,num_gpus,time_limit_s\n0,7200,4,600\n1,300,4,600\n")
    jobs = read_trace(table).jobs
    planned, ticked = both(jobs, ONE, "default")
    assert list(planned.end_s) == list(ticked.end_s) == [600, 900]
    assert ends_of(ticked, 0) == [(0, 600, "timeout")]


def test_the_daemon_gets_no_run_times_the_trace_does_not_state():
    jobs = [gpu_job("a", 0, 100, gpus=3), gpu_job("b", 1, 100, gpus=4), gpu_job("c", 2, 50)]
    (rules,) = policies_of(["fcfs+easy"])
    assert list(daemon_run.run(jobs, ONE, rules.settings).start_s) == [0, 100, 2]
    assert list(daemon_run.run(jobs, ONE, rules.settings, knows_run_times=False).start_s) == [0, 100, 200]
    stated = [replace(job, estimate_s=2 * job.run_s) for job in jobs]
    assert list(daemon_run.run(stated, ONE, rules.settings, knows_run_times=False).start_s) == [0, 100, 2]


def test_each_recorded_run_of_a_history_job_is_repeated():
    asked = spec(retry=RetryRule(retries=3, backoff_s=0.0), time_limit_s=500)
    job = replace(gpu_job("a", 0, 70), spec=asked, attempts=((5, "failed"), (6, "out_of_memory"), (70, "completed")))
    outcome = daemon_run.run([job], ONE, Settings())
    assert [(end - start, how) for start, end, how in ends_of(outcome, 0)] == [
        (5, "failed"),
        (6, "out_of_memory"),
        (70, "completed"),
    ]


LAB = Settings(
    queue={"theory": QueueSettings("theory", guaranteed_gpus=2), "vision": QueueSettings("vision")},
    preempt=PreemptSettings(min_run_s=300),
)


def test_a_queue_reclaims_its_loan_and_the_lost_work_is_counted():
    jobs = [gpu_job("big", 0, 5000, 4, queue="vision"), gpu_job("mine", 1000, 600, 2, queue="theory")]
    outcome = daemon_run.run(jobs, ONE, LAB)
    assert ends_of(outcome, 0) == [(0, 1000, "preempted"), (1600, 6600, "completed")]
    assert ends_of(outcome, 1) == [(1000, 1600, "completed")]
    assert (outcome.start_s, outcome.ends_s) == ([0, 1000], [6600, 1600])


def test_a_run_is_protected_exactly_as_long_as_configured():
    jobs = [gpu_job("big", 900, 5000, 4, queue="vision"), gpu_job("mine", 1000, 600, 2, queue="theory")]
    outcome = daemon_run.run(jobs, ONE, LAB)
    assert ends_of(outcome, 0)[0] == (900, 1200, "preempted")
    assert outcome.start_s[1] == 1200


def test_without_preemption_a_guaranteed_queue_waits_for_its_gpus():
    jobs = [gpu_job("big", 0, 5000, 4, queue="vision"), gpu_job("mine", 1000, 600, 2, queue="theory")]
    outcome = daemon_run.run(jobs, ONE, replace(LAB, preempt=PreemptSettings(mode="off")))
    assert outcome.start_s == [0, 5000]


def test_a_higher_qos_preempts_a_lower_one():
    levels = {"low": QosSettings("low"), "high": QosSettings("high", tier=1, preempts=("low",), min_run_s=0.0)}
    asked = [spec(request=replace(spec().request, gpus=4), time_limit_s=900, qos=qos) for qos in ("low", "high")]
    jobs = [replace(gpu_job(str(n), 400 * n, 900, 4), spec=one) for n, one in enumerate(asked)]
    outcome = daemon_run.run(jobs, ONE, Settings(qos=levels))
    assert ends_of(outcome, 0)[0] == (0, 400, "preempted")
    assert outcome.start_s == [0, 400]


def test_a_user_at_the_job_limit_resubmits_later():
    queue = QueueSettings("default", max_jobs_per_user=1)
    jobs = [gpu_job("a", 0, 700, user="ann"), gpu_job("b", 10, 5, user="ann"), gpu_job("c", 10, 5, user="bob")]
    outcome = daemon_run.run(jobs, ONE, Settings(queue={"default": queue}))
    assert outcome.start_s == [0, 1210, 10]


def test_an_aged_job_goes_first_without_any_other_event():
    order = PrioritySettings(order="sjf", max_wait_s=1000, backfill=False)
    # One that is shorter, and too wide for the cards that are free, keeps it from them until it is overdue itself.
    jobs = [gpu_job("now", 0, 5000, 2), gpu_job("wide", 25, 50, 4), gpu_job("long", 21, 900)]
    jobs.append(gpu_job("first", 0, 30, 2))
    overdue = daemon_run.run(jobs, ONE, Settings(priority=replace(order, max_wait_s=1000)))
    # Ranks are worked out each minute.
    assert overdue.start_s == [0, 5000, 1080, 0]
    at_once = daemon_run.run(jobs, ONE, Settings(priority=replace(order, max_wait_s=1000, calc_period_s=0)))
    assert at_once.start_s == [0, 5000, 1021, 0]
    patient = daemon_run.run(jobs, ONE, Settings(priority=replace(order, max_wait_s=1e9)))
    assert patient.start_s == [0, 5000, 5050, 0]


def test_ended_jobs_are_pruned_during_the_run_but_kept_in_the_result(monkeypatch):
    monkeypatch.setattr(daemon_run, "_FORGOTTEN_AT", 3)
    jobs = [gpu_job(str(n), n, 7, 1 + n % 4) for n in range(20)]
    outcome = daemon_run.run(jobs, ONE, Settings())
    assert sorted(one.job for one in outcome.attempts) == list(range(20))
    assert min(outcome.ends_s) > 0


def test_placements_of_each_run_are_recorded_on_request():
    jobs = [gpu_job("big", 0, 5000, 4, queue="vision"), gpu_job("mine", 1000, 600, 2, queue="theory")]
    assert daemon_run.run(jobs, ONE, LAB).runs is None
    kept = daemon_run.run(jobs, ONE, LAB, keeps_places=True).runs
    assert sorted((kept.job[n], kept.begin_s[n], kept.how(n)) for n in range(len(kept))) == [
        (0, 0, "preempted"),
        (0, 1600, "completed"),
        (1, 1000, "completed"),
    ]


def test_immediate_failures_drain_no_gpu():
    jobs = [gpu_job(f"f{n}", 10 * n, 3, 4, user=f"u{n % 3}", outcome="failed") for n in range(9)]
    outcome = daemon_run.run([*jobs, gpu_job("last", 100, 50, 4)], ONE, Settings())
    assert outcome.start_s[-1] == 100


def test_cores_can_be_overbooked():
    jobs = [TraceJob(str(n), 0, 100, 100, procs=8) for n in range(3)]
    plain = daemon_run.run(jobs, processors(8), Settings())
    twice = daemon_run.run(jobs, processors(8), Settings(oversubscribe=OversubscribeSettings(cpus=2.0)))
    assert (plain.start_s, twice.start_s) == ([0, 100, 200], [0, 0, 100])


def test_a_recorded_right_to_go_first_is_replayed_and_denied_otherwise():
    asked = [spec(nice=nice, time_limit_s=50, request=replace(spec().request, gpus=4)) for nice in (0, 0, -500)]
    jobs = [replace(gpu_job(str(n), n, 50, 4, user="ann"), spec=one) for n, one in enumerate(asked)]
    assert daemon_run.run(jobs, ONE, Settings()).start_s == [0, 100, 50]


# --- what cannot be simulated ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "rules", "text"),
    [
        (nodes_of("2x4"), Settings(), "the cluster has 2 nodes"),
        (ONE, Settings(priority=PrioritySettings(order="utilisation")), "the order utilisation needs measured load"),
    ],
)
def test_unsupported_options_are_refused(nodes, rules, text):
    with pytest.raises(UsageError, match=text) as caught:
        daemon_run.run([gpu_job("a", 0, 1)], nodes, rules)
    assert caught.value.hint


def test_jobs_refused_until_the_end_are_named_with_the_reason():
    queue = QueueSettings("default", max_gpus=2)
    jobs = [gpu_job("a", 0, 10, 2), gpu_job("wide", 0, 10, 3)]
    with pytest.raises(
        UserError, match="1 job is refused until the end, the first being wide: asked for 3 GPUs; queue"
    ):
        daemon_run.run(jobs, ONE, Settings(queue={"default": queue}))


def test_jobs_that_never_start_are_named_with_the_reason():
    jobs = [gpu_job("a", 0, 10), gpu_job("b", 0, 10)]
    with pytest.raises(UserError, match="2 jobs are never able to start, the first being a: .*0 jobs"):
        daemon_run.run(jobs, ONE, Settings(limit=LimitSettings(running_per_user=0)))


def test_the_clock_stops_when_nothing_is_left_that_can_happen():
    def with_budget(hours: float, period: str) -> Settings:
        return Settings(account={"a": AccountSettings("a", users={"*": 1.0}, gpu_hours=hours, budget_period=period)})

    jobs = [gpu_job(name, 0, 3600, account="a") for name in ("one", "two")]
    for period in ("month", "quarter", "year", "total"):
        found = daemon_run.run(jobs, ONE, with_budget(10, period), begins_at=1e9)
        assert (found.start_s, found.ends_s) == ([0, 0], [3600, 3600])
        assert found.cycles < 10
        with pytest.raises(NeverStarted, match="2 jobs are never able to start, the first being one: ") as caught:
            daemon_run.run(jobs, ONE, with_budget(0.5, period), begins_at=1e9)
        assert [job.id for job, _ in caught.value.jobs] == ["one", "two"]
        assert all("GPU-hours" in why for _, why in caught.value.jobs)


def test_a_budget_comes_back_with_the_calendar():
    account = AccountSettings("a", users={"*": 1.0}, gpu_hours=1, budget_period="month")
    jobs = [gpu_job(name, at, 3600, account="a") for name, at in (("one", 0), ("two", 0), ("three", 10))]
    begins_at = 1e9
    first = period_at(begins_at, "month").until_at
    second = period_at(first, "month").until_at
    found = daemon_run.run(jobs, ONE, Settings(account={"a": account}), begins_at=begins_at)
    assert found.start_s == [0, first - begins_at, second - begins_at]


def test_a_job_lost_with_the_machine_for_good_fails():
    asked = spec(time_limit_s=100, retry=RetryRule(requeue=False))
    job = replace(gpu_job("a", 0, 30), spec=asked, attempts=((30, "node_fail"),))
    outcome = daemon_run.run([job], ONE, Settings())
    assert ends_of(outcome, 0) == [(0, 30, "failed")]


# --- what always holds ------------------------------------------------------------------------------------


ROWS = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 2000), st.integers(1, 4), st.sampled_from(["theory", "vision"])),
    min_size=1,
    max_size=15,
)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.sampled_from([0.0, 0.4]), st.integers(0, 2))
def test_no_resource_is_booked_twice_and_every_job_ends(rows, fail_rate, retries):
    jobs = [gpu_job(str(n), at, run_s, gpus, queue=queue) for n, (at, run_s, gpus, queue) in enumerate(rows)]
    outcome = daemon_run.run(
        jobs, ONE, LAB, mishaps=Mishaps(fail_rate=fail_rate, retries=retries, seed=3), keeps_places=True
    )
    kept = outcome.runs
    spans: dict[int, list[tuple[int, int]]] = {}
    for number in range(len(kept)):
        for part in kept.booking(number).parts:
            spans.setdefault(part.card, []).append((kept.begin_s[number], kept.end_s[number]))
    for held in spans.values():
        held.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(held))
    for number, job in enumerate(jobs):
        own = ends_of(outcome, number)
        assert outcome.start_s[number] == own[0][0] >= job.submit_s
        assert outcome.ends_s[number] == own[-1][1]
        assert all(before[1] <= after[0] for before, after in pairwise(own))
        failed = [one for one in own if one[2] == "failed"]
        assert own[-1][2] == ("failed" if len(failed) > retries else "completed")
        assert all(end - start == job.run_s for start, end, how in own if how == "completed")
        # Backoffs end between two seconds, so that a run may seem to be a second shorter.
        assert all(end - start >= 299 for start, end, how in own if how == "preempted")
        assert all(1 <= end - start <= job.run_s + 1 for start, end, how in own if how == "failed")


def test_a_job_without_a_limit_is_planned_by_similar_jobs():
    name = spec().launch
    short = [spec(name="short", launch=name, request=replace(spec().request, gpus=2)) for _ in range(8)]
    jobs = [replace(gpu_job(f"h{n}", 1000 * n, 100, 2), spec=one) for n, one in enumerate(short)]
    wide = spec(
        name="wide", time_limit_s=400, launch=replace(name, argv=("wide",)), request=replace(spec().request, gpus=4)
    )
    base = 20_000
    long = replace(wide, name="long", time_limit_s=1000, request=replace(spec().request, gpus=2))
    jobs += [
        replace(gpu_job("long", base, 1000, 2), spec=replace(long, launch=replace(name, argv=("long",)))),
        replace(gpu_job("wide", base + 1, 400, 4), spec=wide),
        replace(gpu_job("filler", base + 2, 100, 2), spec=short[0]),
    ]
    rules = PrioritySettings(order="fifo", predict=False, backfill_by="prediction")
    blind = daemon_run.run(jobs, ONE, Settings(priority=rules))
    told = daemon_run.run(jobs, ONE, Settings(priority=replace(rules, predict=True)))
    # Who knows that the filler takes 100 s lets it run while the wide one waits for the long one.
    assert blind.start_s[-1] == base + 1400
    assert told.start_s[-1] == base + 2
    assert told.start_s[-2] == blind.start_s[-2] == base + 1000


def test_a_suspended_run_resumes_where_it_was():
    levels = {"low": QosSettings("low"), "high": QosSettings("high", tier=1, preempts=("low",), min_run_s=0.0)}
    asked = [spec(request=replace(spec().request, cpus=64.0), time_limit_s=900, qos=qos) for qos in ("low", "high")]
    jobs = [replace(TraceJob(str(n), 300 * n, 500 - 300 * n, 900, cpus=64.0), spec=one) for n, one in enumerate(asked)]
    rules = Settings(qos=levels, preempt=PreemptSettings(mode="suspend", min_run_s=0.0))
    outcome = daemon_run.run(jobs, ONE, rules)
    assert ends_of(outcome, 0) == [(0, 700, "completed")]
    assert ends_of(outcome, 1) == [(300, 500, "completed")]
