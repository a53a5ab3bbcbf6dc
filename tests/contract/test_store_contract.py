"""What every job table promises, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.errors import BrokenInvariant
from gpusched.model.alerts import Alert
from gpusched.model.cluster import Clearance, DrainCause, DrainEntry, Drainer, GpuReading, GpuSample
from gpusched.model.job import GpuShare, Job, JobEvent, Notice, Request, Run
from gpusched.model.mig import CardLayout, MigLayout, layout_of
from gpusched.model.pipeline import Pipeline
from gpusched.model.snapshot import Placement
from gpusched.model.states import FINAL_STATES, JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter, Store
from gpusched.ports.tables import (
    ALERTS,
    CLEARANCES,
    DRAINERS,
    DRAINS,
    FENCES,
    KEPT_PLACES,
    MIG_LAYOUTS,
    PIPELINES,
    ChangedRows,
)
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job, launch, run


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = SqliteStore.in_memory() if request.param == "memory" else SqliteStore.open(tmp_path / "gpusched.db")
    yield made
    made.close()


def put(store: Store, *values: Job | Run | JobEvent) -> None:
    """Commit these together."""
    store.commit(
        Changes(
            jobs={value.id: value for value in values if isinstance(value, Job)},
            runs={value.id: value for value in values if isinstance(value, Run)},
            events=[value for value in values if isinstance(value, JobEvent)],
        )
    )


def ended(of: Job, state: JobState = JobState.COMPLETED, at: float = NOW + 60) -> Job:
    return replace(of, state=state, end_at=at)


def found(store: Store, **restrictions: object) -> list[int]:
    return [one.id for one in store.jobs(JobFilter(**restrictions))]  # type: ignore[arg-type]


RICH = job(
    7,
    name='he said "ab\x1b[31m"\nand \udcff left',
    user="zoë",
    state=JobState.COMPLETING,
    request=Request(gpus=2, gpu_type="a100", vram_mib=8192, min_vram_mib=16384, cpus=2.5, mem_mib=4096),
    launch=launch(
        "train",
        "",
        "\udc80\U0001f600",
        "a\0b",
        script_sha="a" * 64,
        script_name="train.sh",
        umask=0o077,
        stdout="%j.out",
        stderr="\udce9.err",
        open_mode="append",
        notice=Notice(10, 60, True),
        stop_signal=2,
        grace_s=1.5,
        gpu_ids="uuid",
    ),
    retry={"retries": 3, "backoff_s": 0.5, "retry_on": ("3", "10-20", "SIGSEGV"), "requeue": False},
    account="vision",
    queue="night",
    nice=-100,
    time_limit_s=3600,
    begin_at=NOW + 0.25,
    dependency="afterok:1:2,afterany:3",
    hold="admin",
    queued_at=NOW + 1,
    eligible_at=NOW + 2,
    start_at=NOW + 3.125,
    run=2,
    failures=1,
    requeues=4,
    exit_code=1,
    signal=9,
    reason=ReasonCode.NONE,
    reason_text='"cancelled" by zoë',
    cancel_at=NOW + 4,
)
RICH = replace(RICH, spec=replace(RICH.spec, hold=True))
RICH_RUN = Run(
    7,
    2,
    RunState.ENDED,
    "n\udcff1",
    "boot",
    NOW,
    gpus=(GpuShare("GPU-a", 0, vram_mib=8192), GpuShare("GPU-b", 3, fraction=0.5), GpuShare("GPU-c", 1)),
    cpus=2.5,
    mem_mib=4096,
    start_at=NOW + 1,
    end_at=NOW + 2,
    priority=-1.25,
    supervisor_pid=4242,
    supervisor_start_ticks=123456789012,
    pid=4243,
    exit_code=0,
    signal=15,
    outcome=JobState.OUT_OF_MEMORY,
    reason=ReasonCode.OUT_OF_MEMORY,
    reason_text="\udc80",
    cpu_s=1.25,
    system_cpu_s=0.5,
    peak_mem_mib=12.5,
    peak_vram_mib=100,
    mean_utilisation=0.5,
    energy_j=3.5,
    stdout_path="/tmp/\udcff.out",
    stderr_path="/tmp/x.err",
)


def test_an_empty_table_returns_nothing(store: Store) -> None:
    assert store.load_active() == ([], [])
    assert store.load(DRAINS) == {}
    assert store.next_job_id() == 1
    assert store.jobs(JobFilter()) == []
    assert store.runs([1]) == []
    assert store.events(1) == []
    assert store.last_job_id(1000) is None
    assert store.check() is None
    assert not store.changed()


def test_every_record_round_trips(store: Store) -> None:
    put(store, RICH, RICH_RUN, JobEvent(7, NOW, "note", "\udcff and \0", 2), JobEvent(7, NOW, "note", '"', None))
    assert store.jobs(JobFilter()) == [RICH]
    assert store.load_active() == ([RICH], [])
    assert store.runs([7]) == [RICH_RUN]
    assert store.events(7) == [JobEvent(7, NOW, "note", "\udcff and \0", 2), JobEvent(7, NOW, "note", '"', None)]
    assert found(store, names=frozenset({RICH.spec.name}), users=frozenset({"zoë"})) == [7]


@pytest.mark.parametrize("state", JobState)
def test_every_state_is_accepted_with_an_end_exactly_when_it_is_final(store: Store, state: JobState) -> None:
    end_at = NOW if state.is_final else None
    put(store, job(1, state=state, end_at=end_at))
    assert store.jobs(JobFilter())[0].state is state
    assert [one.id for one in store.load_active()[0]] == ([] if state.is_final else [1])
    with pytest.raises(BrokenInvariant):
        put(store, job(2, state=state, end_at=None if state.is_final else NOW))
    assert found(store) == [1]


@pytest.mark.parametrize("reason", ReasonCode)
def test_every_reason_round_trips(store: Store, reason: ReasonCode) -> None:
    put(store, job(1, reason=reason))
    assert store.jobs(JobFilter())[0].reason is reason


@pytest.mark.parametrize("outcome", sorted(JobState))
def test_a_run_has_an_outcome_and_an_end_exactly_when_it_has_ended(store: Store, outcome: JobState) -> None:
    first = job(1, state=JobState.RUNNING, run=1)
    over = run(first, state=RunState.ENDED, end_at=NOW, outcome=outcome)
    if not outcome.is_final:
        with pytest.raises(BrokenInvariant):
            put(store, first, over)
        return
    put(store, first, over)
    assert store.runs([1]) == [over]
    for wrong in (
        replace(over, outcome=None),
        replace(over, end_at=None),
        replace(over, state=RunState.RUNNING),
        replace(over, state=RunState.STARTING, outcome=None),
        replace(over, number=0),
    ):
        with pytest.raises(BrokenInvariant):
            put(store, wrong)
    assert store.runs([1]) == [over]


@pytest.mark.parametrize(
    "refused",
    [
        job(2, nice=10_001),
        job(2, nice=-10_001),
        job(2, name=""),
        job(2, run=-1),
        job(2, failures=-1),
        job(2, requeues=-1),
        job(2, hold="nobody"),
        job(0),
        job(-1),
        run(job(99)),
        JobEvent(99, NOW, "note", "of no job"),
    ],
)
def test_a_refused_record_rolls_back_the_whole_commit(store: Store, refused: Job | Run | JobEvent) -> None:
    put(store, job(1), JobEvent(1, NOW, "submitted", "first"))
    changes = Changes(
        jobs={1: ended(job(1)), 3: job(3)},
        runs={"1.1": run(job(1))},
        events=[JobEvent(1, NOW, "ended", "second")],
        payloads={"b" * 64: b"script"},
        rows=ChangedRows({DRAINS: {"n1": DrainEntry("fan")}}),
    )
    if isinstance(refused, Job):
        changes.jobs[refused.id] = refused
    elif isinstance(refused, Run):
        changes.runs[refused.id] = refused
    else:
        changes.events.append(refused)
    with pytest.raises(BrokenInvariant, match="refused a record"):
        store.commit(changes)
    assert store.jobs(JobFilter()) == [job(1)]
    assert store.runs([1, 99]) == []
    assert [event.text for event in store.events(1)] == ["first"]
    assert store.load(DRAINS) == {}
    assert store.next_job_id() == 2
    with pytest.raises(KeyError):
        store.payload("b" * 64)
    # The table goes on as if nothing had been tried.
    put(store, ended(job(1)), job(3))
    assert found(store) == [1, 3]


def test_a_changed_job_replaces_the_row_whatever_changed(store: Store) -> None:
    first = job(1, time_limit_s=60)
    put(store, first)
    moved = replace(first, state=JobState.RUNNING, run=1, start_at=NOW)
    put(store, moved)
    assert store.jobs(JobFilter()) == [moved]
    relimited = replace(moved, spec=replace(moved.spec, time_limit_s=120, nice=5))
    put(store, relimited)
    assert store.jobs(JobFilter()) == [relimited]
    over = ended(relimited)
    put(store, over)
    assert store.jobs(JobFilter()) == [over]
    # A finished job is written again, for example with a late note of its end.
    put(store, replace(over, reason_text="late"))
    assert store.jobs(JobFilter()) == [replace(over, reason_text="late")]


def test_a_changed_run_replaces_the_row(store: Store) -> None:
    first = job(1, state=JobState.RUNNING, run=1)
    attempt = run(first)
    put(store, first, attempt)
    alive = replace(attempt, state=RunState.RUNNING, pid=5, start_at=NOW)
    put(store, alive)
    assert store.load_active() == ([first], [alive])
    over = replace(alive, state=RunState.ENDED, end_at=NOW + 1, outcome=JobState.COMPLETED)
    put(store, over)
    assert store.load_active() == ([first], [])
    assert store.runs([1]) == [over]


def test_an_end_before_the_start_is_recorded_as_clocks_are_set_back(store: Store) -> None:
    first = job(1, state=JobState.FAILED, submit_at=NOW, start_at=NOW, end_at=NOW - 3600, run=1)
    over = run(first, state=RunState.ENDED, outcome=JobState.FAILED, start_at=NOW, end_at=NOW - 3600)
    put(store, first, over)
    assert store.jobs(JobFilter()) == [first]
    assert store.runs([1]) == [over]


def test_active_jobs_and_open_runs_are_loaded_by_id(store: Store) -> None:
    jobs = [job(n, state=JobState.RUNNING, run=2) for n in (11, 2, 30)] + [ended(job(4)), job(3)]
    runs = []
    for one in jobs[:3]:
        over = run(one, number=1, state=RunState.ENDED, end_at=NOW, outcome=JobState.FAILED)
        runs += [run(one, number=2), over]
    put(store, *jobs, *runs)
    active, still_open = store.load_active()
    assert [one.id for one in active] == [2, 3, 11, 30]
    assert [one.id for one in still_open] == ["2.2", "11.2", "30.2"]


def test_runs_are_ordered_by_job_and_number(store: Store) -> None:
    jobs = [job(n, state=JobState.RUNNING, run=11) for n in (1, 2, 3)]
    runs = [
        run(one, number=number, state=RunState.ENDED, end_at=NOW, outcome=JobState.FAILED)
        for one in jobs
        for number in (11, 2, 1)
    ]
    put(store, *jobs, *runs)
    assert [one.id for one in store.runs([3, 1, 3])] == ["1.1", "1.2", "1.11", "3.1", "3.2", "3.11"]
    assert store.runs([]) == []


def test_the_history_keeps_its_order(store: Store) -> None:
    put(store, job(1), job(2), JobEvent(1, NOW + 5, "a", "one"), JobEvent(2, NOW, "b", "other"))
    put(store, JobEvent(1, NOW - 5, "c", "two", 1), JobEvent(1, NOW, "d", "three"))
    assert [event.text for event in store.events(1)] == ["one", "two", "three"]
    assert [event.text for event in store.events(2)] == ["other"]


def test_ids_continue_from_the_largest_ever(store: Store) -> None:
    put(store, job(41), job(7))
    assert store.next_job_id() == 42
    put(store, job(8))
    assert store.next_job_id() == 42


def test_the_last_job_of_a_user_is_found(store: Store) -> None:
    put(store, job(5, uid=1), job(3, uid=1), job(9, uid=2), ended(job(6, uid=1)))
    assert store.last_job_id(1) == 6
    assert store.last_job_id(2) == 9
    assert store.last_job_id(3) is None


def test_filters_are_combined_and_ignored_when_empty(store: Store) -> None:
    put(
        store,
        job(1, user="ann", name="train", queue="day"),
        ended(job(2, user="ann", name="eval", queue="day"), JobState.FAILED, NOW + 10),
        ended(job(3, user="bob", name="train", queue="night"), JobState.COMPLETED, NOW + 20),
        job(4, user="bob", name="train", queue="night", state=JobState.RUNNING),
    )
    assert found(store) == [1, 2, 3, 4]
    assert found(store, ids=frozenset({4, 2, 77})) == [2, 4]
    assert found(store, states=frozenset({JobState.PENDING, JobState.FAILED})) == [1, 2]
    assert found(store, users=frozenset({"bob"})) == [3, 4]
    assert found(store, names=frozenset({"train"})) == [1, 3, 4]
    assert found(store, queues=frozenset({"night"})) == [3, 4]
    assert found(store, users=frozenset({"ann", "bob"}), names=frozenset({"train"}), queues=frozenset({"day"})) == [1]
    assert found(store, users=frozenset({"nobody"})) == []


def test_before_leads_from_a_page_to_older_jobs(store: Store) -> None:
    put(store, job(1), ended(job(2), at=NOW + 10), job(3))
    assert found(store, before=3) == [1, 2]
    assert found(store, before=3, limit=1) == [2]
    assert found(store, before=2, limit=5) == [1]
    assert found(store, before=1) == []


def test_since_keeps_unfinished_jobs_and_later_ends(store: Store) -> None:
    put(store, job(1), ended(job(2), at=NOW + 10), ended(job(3), at=NOW + 20))
    assert found(store, since=NOW) == [1, 2, 3]
    assert found(store, since=NOW + 10) == [1, 2, 3]
    assert found(store, since=NOW + 10.5) == [1, 3]
    assert found(store, since=NOW + 99) == [1]
    assert found(store, since=NOW + 10.5, states=FINAL_STATES) == [3]
    assert found(store, since=NOW + 10.5, states=FINAL_STATES | {JobState.PENDING}) == [1, 3]


def test_a_limit_keeps_the_newest(store: Store) -> None:
    put(store, *(job(n) for n in range(1, 6)))
    assert found(store, limit=2) == [4, 5]
    assert found(store, limit=0) == []
    assert found(store, limit=9) == [1, 2, 3, 4, 5]
    assert found(store, limit=2, ids=frozenset({1, 2, 3})) == [2, 3]


def test_many_thousand_ids_can_be_queried_at_once(store: Store) -> None:
    put(store, job(1), job(39_999))
    assert found(store, ids=frozenset(range(1, 40_000))) == [1, 39_999]
    assert store.runs(range(1, 40_000)) == []


def test_a_users_texts_are_counted_once_each(store: Store) -> None:
    shas = ["c" * 64, "d" * 64, "e" * 64]
    bodies = dict(zip(shas, (b"123", b"4567", b"of nobody"), strict=True))
    mine = [job(number, launch=launch("true", env_sha=shas[0], script_sha=shas[1])) for number in (1, 2)]
    theirs = job(3, uid=1, user="bob", launch=launch("true", env_sha=shas[0]))
    store.commit(Changes(jobs={one.id: one for one in (*mine, theirs)}, payloads=bodies))
    assert store.payload_bytes_of(mine[0].uid) == 7
    assert store.payload_bytes_of(1) == 3
    assert store.payload_bytes_of(2) == 0
    assert store.known_payloads([*shas[:2], "f" * 64]) == set(shas[:2])


def test_a_payload_is_kept_as_first_stored(store: Store) -> None:
    sha = "c" * 64
    store.commit(Changes(payloads={sha: b"\0\xff script"}))
    store.commit(Changes(payloads={sha: b"something else", "d" * 64: b""}))
    assert store.payload(sha) == b"\0\xff script"
    assert store.payload("d" * 64) == b""
    with pytest.raises(KeyError):
        store.payload("e" * 64)


def test_the_last_clearance_of_a_gpu_is_kept(store: Store) -> None:
    assert store.load(CLEARANCES) == {}
    store.commit(
        Changes(rows=ChangedRows({CLEARANCES: {"GPU-b": Clearance("GPU-b", 5.0), "GPU-a": Clearance("GPU-a", 6.5, 3)}}))
    )
    store.commit(Changes(rows=ChangedRows({CLEARANCES: {"GPU-b": Clearance("GPU-b", 7.0, 0)}})))
    assert list(store.load(CLEARANCES).values()) == [Clearance("GPU-a", 6.5, 3), Clearance("GPU-b", 7.0, 0)]


def test_fences_are_set_replaced_and_removed(store: Store) -> None:
    assert store.load(FENCES) == {}
    # A task of an array has no row of its own yet.
    store.commit(Changes(rows=ChangedRows({FENCES: {7: 5.5, 3: 1e9}})))
    store.commit(Changes(rows=ChangedRows({FENCES: {7: None, 8: None, 3: 2e9}})))
    assert store.load(FENCES) == {3: 2e9}


def test_reserved_places_are_set_replaced_and_removed(store: Store) -> None:
    assert store.load(KEPT_PLACES) == {}
    other = Placement("n2", (), 1.0, 0)
    place = Placement("n1", (GpuShare("GPU-a", 0),), 2.0, 512, others=(other,))
    store.commit(Changes(rows=ChangedRows({KEPT_PLACES: {7: place, 3: other}})))
    store.commit(Changes(rows=ChangedRows({KEPT_PLACES: {7: None, 8: None, 3: place}})))
    assert store.load(KEPT_PLACES) == {3: place}


def test_drains_are_set_replaced_and_lifted(store: Store) -> None:
    odd, none = DrainEntry('the "\udcff" fan', DrainCause.GPU_FAULT), DrainEntry("")
    store.commit(Changes(rows=ChangedRows({DRAINS: {"n2": DrainEntry("disk"), "GPU-1": odd, "n1": none}})))
    assert store.load(DRAINS) == {"GPU-1": odd, "n1": none, "n2": DrainEntry("disk")}
    both = DrainEntry("disk and memory")
    store.commit(Changes(rows=ChangedRows({DRAINS: {"n2": both, "GPU-1": None, "unknown": None}})))
    assert store.load(DRAINS) == {"n1": none, "n2": both}


def test_mig_layouts_are_kept_replaced_and_forgotten(store: Store) -> None:
    wanted = CardLayout("GPU-1", "n1", 1, wanted=layout_of(["3g.40gb", "2g.20gb"]), number=7, user="\udcff", at=NOW)
    other = CardLayout("GPU-0", "n1", 0, made=MigLayout(False), failure="no room")
    store.commit(Changes(rows=ChangedRows({MIG_LAYOUTS: {"GPU-1": wanted, "GPU-0": other}})))
    assert list(store.load(MIG_LAYOUTS).values()) == [other, wanted]
    made = replace(wanted, wanted=None, made=wanted.wanted)
    store.commit(Changes(rows=ChangedRows({MIG_LAYOUTS: {"GPU-1": made, "GPU-0": None, "unknown": None}})))
    assert list(store.load(MIG_LAYOUTS).values()) == [made]


def test_who_drained_is_kept_replaced_and_forgotten(store: Store) -> None:
    ann, bob = Drainer("ann", NOW), Drainer('"bob" \udcff', NOW + 0.5)
    store.commit(Changes(rows=ChangedRows({DRAINERS: {"n2": ann, "GPU-1": bob}})))
    assert store.load(DRAINERS) == {"GPU-1": bob, "n2": ann}
    store.commit(Changes(rows=ChangedRows({DRAINERS: {"n2": bob, "GPU-1": None, "unknown": None}})))
    assert store.load(DRAINERS) == {"n2": bob}


def test_an_empty_commit_returns_at_once(store: Store) -> None:
    store.commit(Changes())
    assert store.next_job_id() == 1


def test_own_commits_are_not_foreign_changes(store: Store) -> None:
    put(store, job(1))
    assert not store.changed()


def test_the_inventory_can_be_taken_repeatedly(store: Store) -> None:
    card = GpuSample("GPU-1", 0, "A100", vram_total_mib=40960)
    store.save_gpus("n1", GpuReading(NOW, "simulated", (card,), driver_version="1"))
    store.save_gpus("n1", GpuReading(NOW + 5, "simulated", (replace(card, index=1, vram_total_mib=None),)))
    assert not store.changed()
    assert store.check() is None


def test_equal_requests_of_loaded_jobs_are_one_object(store: Store) -> None:
    shared = job(1).spec
    put(store, *(job(n, spec=shared) for n in range(1, 20)))
    jobs = store.load_active()[0]
    assert len({id(one.spec.request) for one in jobs}) == 1
    assert len({id(one.spec.retry) for one in jobs}) == 1
    assert len({id(one.spec) for one in jobs}) == 1


ALERT = Alert(
    key="7.1 end",
    event="fail",
    counts_as=("fail", "end"),
    uid=1000,
    at=NOW + 1,
    facts=(("job", "7"), ("name", "a\udcff\0{}"), ("at", NOW)),
    targets=("phone",),
    job_id=7,
    run=1,
    settled=("mail", "phone"),
)
OF_NO_JOB = Alert("gpu_lost GPU-1 \udcff", "gpu_lost", ("gpu_lost",), 0, NOW)


def alerts(*rows: Alert) -> Changes:
    return Changes(rows=ChangedRows({ALERTS: {row.key: row for row in rows}}))


def test_alerts_round_trip_oldest_first(store: Store) -> None:
    store.commit(Changes(jobs={7: job(7)}, rows=ChangedRows({ALERTS: {ALERT.key: ALERT, OF_NO_JOB.key: OF_NO_JOB}})))
    assert list(store.load(ALERTS).values()) == [OF_NO_JOB, ALERT]


def test_an_alert_is_replaced_by_its_key_and_can_be_removed(store: Store) -> None:
    store.commit(Changes(jobs={7: job(7)}, rows=ChangedRows({ALERTS: {ALERT.key: ALERT}})))
    told = replace(ALERT, state="told", settled=("phone",))
    store.commit(alerts(told))
    assert list(store.load(ALERTS).values()) == [told]
    store.commit(Changes(rows=ChangedRows({ALERTS: {ALERT.key: None, "never there": None}})))
    assert store.load(ALERTS) == {}


@pytest.mark.parametrize("bad", [ALERT, replace(OF_NO_JOB, state="lost"), replace(OF_NO_JOB, key="")])
def test_an_alert_without_a_job_or_state_rolls_back_the_whole_commit(store: Store, bad: Alert) -> None:
    with pytest.raises(BrokenInvariant):
        store.commit(Changes(jobs={1: job(1)}, rows=ChangedRows({ALERTS: {bad.key: bad}})))
    assert store.load_active() == ([], [])
    assert store.load(ALERTS) == {}


def test_pipelines_are_kept_and_their_numbers_never_reused(store: Store) -> None:
    assert (store.next_pipeline(), store.find(PIPELINES, [1])) == (1, {})
    first = Pipeline(1, 1000, "zo\udcff", "night \udcff", NOW, "[step.a]\nrun = '\udcff'\n")
    store.commit(Changes(rows=ChangedRows({PIPELINES: {1: first}})))
    second = Pipeline(2, 1001, "bob", "day", NOW + 1, "")
    store.commit(Changes(rows=ChangedRows({PIPELINES: {2: second}})))
    assert store.next_pipeline() == 3
    assert store.find(PIPELINES, [1, 7, 2]) == {1: first, 2: second}
    with pytest.raises(BrokenInvariant):
        store.commit(Changes(rows=ChangedRows({PIPELINES: {2: second}})))
    assert (first.id, second.id) == ("p1", "p2")


def test_jobs_are_found_by_their_pipeline(store: Store) -> None:
    put(
        store, job(1, pipeline="p1", step="a"), job(2), job(3, pipeline="p2", step="a"), job(4, pipeline="p1", step="b")
    )
    assert found(store, pipelines=frozenset({"p1"})) == [1, 4]
    assert found(store, pipelines=frozenset({"p1", "p2"})) == [1, 3, 4]
    assert found(store, pipelines=frozenset({"p3"})) == []
