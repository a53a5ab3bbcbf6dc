"""What goes into the job table comes out equal, whatever the values; and both tables answer alike."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.errors import BrokenInvariant
from gpusched.model.cluster import DrainCause, DrainEntry, Drainer
from gpusched.model.job import GpuShare, Job, JobEvent, JobSpec, Launch, Notice, Request, RetryRule, Run
from gpusched.model.mig import CardLayout, layout_of
from gpusched.model.spec import NICE_MAX
from gpusched.model.states import ACTIVE_STATES, FINAL_STATES, JobState, ReasonCode, RunState
from gpusched.model.value import decode, replace
from gpusched.ports import Changes, JobFilter
from gpusched.ports.tables import DRAINERS, DRAINS, MIG_LAYOUTS, Rows
from gpusched.store import rows
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job, run

# All that bytes can decode to, and more: every character and the surrogates that stand for single bytes.
characters = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(['"', "\\", "\0", "\n", "\x1b", "\udc80", "\udcff", "\udc00", "\U0001f600"]),
)
texts = st.text(characters, max_size=12)
instants = st.floats(-1e12, 1e12, allow_nan=False)
amounts = st.floats(0, 1e12, allow_nan=False)
counts = st.integers(0, 2**62)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


requests = st.builds(
    Request,
    gpus=counts,
    gpu_fraction=maybe(amounts),
    gpu_type=maybe(texts),
    vram_mib=maybe(counts),
    min_vram_mib=maybe(counts),
    cpus=amounts,
    mem_mib=counts,
)
retries = st.builds(
    RetryRule,
    retries=counts,
    backoff_s=amounts,
    backoff_factor=amounts,
    backoff_max_s=amounts,
    retry_on=st.lists(texts, max_size=4).map(tuple),
    requeue=st.booleans(),
)
notices = st.builds(Notice, signal=st.integers(1, 64), before_s=counts, main_only=st.booleans())
launches = st.builds(
    Launch,
    argv=st.lists(texts, max_size=4).map(tuple),
    script_sha=maybe(texts),
    script_name=maybe(texts),
    env_sha=texts,
    work_dir=texts,
    umask=counts,
    stdout=maybe(texts),
    stderr=maybe(texts),
    open_mode=maybe(texts),
    notice=maybe(notices),
    stop_signal=maybe(counts),
    grace_s=maybe(amounts),
    gpu_ids=maybe(texts),
)
specs = st.builds(
    JobSpec,
    name=texts.filter(bool),
    request=requests,
    launch=launches,
    retry=retries,
    account=texts,
    queue=texts,
    nice=st.integers(-10_000, 10_000),
    time_limit_s=maybe(st.integers(1, 2**40)),
    begin_at=maybe(instants),
    dependency=maybe(texts),
    hold=st.booleans(),
)
states = st.sampled_from(sorted(ACTIVE_STATES)).map(lambda state: (state, None)) | st.tuples(
    st.sampled_from(sorted(FINAL_STATES)), instants
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    state, end_at = draw(states)
    return Job(
        id=draw(st.integers(1, 2**40)),
        uid=draw(st.integers(0, 2**32 - 1)),
        user=draw(texts),
        spec=draw(specs),
        state=state,
        submit_at=draw(instants),
        queued_at=draw(instants),
        eligible_at=draw(instants),
        start_at=draw(maybe(instants)),
        end_at=end_at,
        hold=draw(st.sampled_from([None, "user", "admin"])),
        run=draw(counts),
        failures=draw(counts),
        requeues=draw(counts),
        exit_code=draw(maybe(st.integers(-(2**31), 2**31))),
        signal=draw(maybe(st.integers(1, 64))),
        reason=draw(maybe(st.sampled_from(ReasonCode))),
        reason_text=draw(maybe(texts)),
        cancel_at=draw(maybe(instants)),
    )


shares = st.builds(GpuShare, uuid=texts, index=counts, vram_mib=maybe(counts), fraction=maybe(amounts))


@st.composite
def runs(draw: st.DrawFn, job_id: int) -> Run:
    state = draw(st.sampled_from(RunState))
    ended = state is RunState.ENDED
    return Run(
        job_id=job_id,
        number=draw(st.integers(1, 2**40)),
        state=state,
        node=draw(texts),
        boot_id=draw(texts),
        intent_at=draw(instants),
        gpus=tuple(draw(st.lists(shares, max_size=3))),
        cpus=draw(amounts),
        mem_mib=draw(counts),
        start_at=draw(maybe(instants)),
        end_at=draw(instants) if ended else None,
        supervisor_pid=draw(maybe(counts)),
        supervisor_start_ticks=draw(maybe(counts)),
        pid=draw(maybe(counts)),
        exit_code=draw(maybe(st.integers(0, 255))),
        signal=draw(maybe(st.integers(1, 64))),
        outcome=draw(st.sampled_from(sorted(FINAL_STATES))) if ended else None,
        reason=draw(maybe(st.sampled_from(ReasonCode))),
        reason_text=draw(maybe(texts)),
        cpu_s=draw(maybe(amounts)),
        system_cpu_s=draw(maybe(amounts)),
        peak_mem_mib=draw(maybe(amounts)),
        peak_vram_mib=draw(maybe(counts)),
        mean_utilisation=draw(maybe(amounts)),
        energy_j=draw(maybe(amounts)),
        stdout_path=draw(maybe(texts)),
        stderr_path=draw(maybe(texts)),
    )


@pytest.fixture(scope="module")
def store() -> Iterator[SqliteStore]:
    """One table for all examples: each writes over what the ones before it left."""
    with tempfile.TemporaryDirectory() as folder:
        made = SqliteStore.open(os.path.join(folder, "gpusched.db"))
        yield made
        made.close()


@given(texts)
def test_every_text_round_trips_as_plain_text(text: str) -> None:
    stored = rows.pack_text(text)
    assert rows.unpack_text(stored) == text
    stored.encode("utf-8")
    assert "\0" not in stored


@given(st.binary(max_size=20))
def test_every_file_name_round_trips(raw: bytes) -> None:
    name = os.fsdecode(raw)
    assert os.fsencode(rows.unpack_text(rows.pack_text(name))) == raw


@given(texts, texts)
def test_distinct_texts_are_stored_differently(one: str, other: str) -> None:
    assert (rows.pack_text(one) == rows.pack_text(other)) == (one == other)


@given(launches, requests, retries)
def test_documents_round_trip(launch: Launch, request: Request, retry: RetryRule) -> None:
    for value in (launch, request, retry):
        assert decode(rows.pack(value), type(value)) == value


@given(data=st.data())
def test_every_job_with_its_runs_and_history_round_trips(store: SqliteStore, data: st.DataObject) -> None:
    made = data.draw(jobs())
    attempts = {one.id: one for one in data.draw(st.lists(runs(made.id), max_size=3))}
    text = data.draw(texts)
    story = len(store.events(made.id))
    store.commit(Changes({made.id: made}, attempts, [JobEvent(made.id, made.submit_at, "note", text)]))
    assert store.jobs(JobFilter(ids=frozenset({made.id}))) == [made]
    assert store.jobs(JobFilter(ids=frozenset({made.id}), names=frozenset({made.spec.name}))) == [made]
    kept = {one.id: one for one in store.runs([made.id])}
    assert {handle: kept[handle] for handle in attempts} == attempts
    assert store.events(made.id)[story:] == [JobEvent(made.id, made.submit_at, "note", text)]


@given(made=jobs(), data=st.data())
def test_a_number_too_large_for_its_column_rolls_back(store: SqliteStore, made: Job, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(["run", "failures", "queued_at", "uid"]))
    value = float("nan") if field == "queued_at" else 2**63
    before = store.jobs(JobFilter(ids=frozenset({made.id})))
    with pytest.raises(BrokenInvariant):
        store.commit(Changes({made.id: replace(made, **{field: value})}))
    assert store.jobs(JobFilter(ids=frozenset({made.id}))) == before


# --- both tables, side by side ------------------------------------------------------------------

SPECS = tuple(job(name=name, queue=queue, nice=nice).spec for name in "ab" for queue in "dn" for nice in (0, 99_999))
"""Half of them are refused, for their nice value."""


@st.composite
def commits(draw: st.DrawFn) -> Changes:
    changes = Changes()
    for job_id in draw(st.lists(st.integers(1, 6), max_size=4)):
        state, end_at = draw(
            st.sampled_from([(JobState.PENDING, None), (JobState.RUNNING, None), (JobState.FAILED, NOW)])
        )
        if draw(st.integers(0, 19)) == 0:
            end_at = NOW if end_at is None else None
        spec = SPECS[draw(st.sampled_from([0, 0, 2, 4, 6, 6, 1]))]
        # The owner of a job never changes, and its row need not say it again.
        made = job(job_id, spec=spec, state=state, end_at=end_at, user=("ann", "bob")[job_id % 2])
        changes.jobs[job_id] = made
    for job_id in draw(st.lists(st.integers(1, 6), max_size=2)):
        over = {"state": RunState.ENDED, "end_at": NOW, "outcome": JobState.FAILED} if draw(st.booleans()) else {}
        attempt = run(job(job_id), number=draw(st.integers(1, 2)), **over)
        changes.runs[attempt.id] = attempt
    for job_id in draw(st.lists(st.integers(1, 6), max_size=2)):
        changes.events.append(JobEvent(job_id, NOW, "note", draw(st.sampled_from(["x", "\udcff"]))))
    for target in draw(st.lists(st.sampled_from(["n1", "GPU-1"]), max_size=1)):
        changes.rows[DRAINS][target] = draw(st.none() | st.builds(DrainEntry, texts, st.sampled_from(DrainCause)))
        changes.rows[DRAINERS][target] = draw(st.none() | st.builds(Drainer, texts, st.just(NOW)))
    for uuid in draw(st.lists(st.sampled_from(["GPU-1", "GPU-2"]), max_size=1)):
        layout = CardLayout(uuid, draw(texts), 0, wanted=layout_of(["3g.40gb"]), number=7, user=draw(texts), at=NOW)
        changes.rows[MIG_LAYOUTS][uuid] = draw(st.none() | st.just(layout))
    return changes


filters = st.builds(
    JobFilter,
    ids=st.frozensets(st.integers(1, 7), max_size=3),
    states=st.frozensets(st.sampled_from(JobState), max_size=3),
    users=st.frozensets(st.sampled_from(["ann", "bob", "eve"]), max_size=2),
    names=st.frozensets(st.sampled_from("abc"), max_size=2),
    queues=st.frozensets(st.sampled_from("dnx"), max_size=2),
    since=maybe(st.sampled_from([NOW - 1, NOW, NOW + 1])),
    limit=maybe(st.integers(0, 5)),
)


class Mirror:
    """The same table as plain dictionaries."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.runs: dict[str, Run] = {}
        self.events: list[JobEvent] = []
        self.rows = Rows()

    def refuses(self, changes: Changes) -> bool:
        known = self.jobs.keys() | changes.jobs.keys()
        jobs, named = changes.jobs.values(), [*changes.runs.values(), *changes.events]
        return (
            any(one.state.is_final != (one.end_at is not None) or abs(one.spec.nice) > NICE_MAX for one in jobs)
            or any(one.job_id not in known for one in named)
        )  # fmt: skip

    def commit(self, changes: Changes) -> None:
        self.jobs.update(changes.jobs)
        self.runs.update(changes.runs)
        self.events += changes.events
        for table, changed in changes.rows.items():
            for key, value in changed.items():
                self.rows.put(table, key, value)

    def found(self, wanted: JobFilter) -> list[Job]:
        found = [
            job
            for job_id, job in sorted(self.jobs.items())
            if (not wanted.ids or job_id in wanted.ids)
            and (not wanted.states or job.state in wanted.states)
            and (not wanted.users or job.user in wanted.users)
            and (not wanted.names or job.spec.name in wanted.names)
            and (not wanted.queues or job.spec.queue in wanted.queues)
            and (wanted.since is None or job.end_at is None or job.end_at >= wanted.since)
        ]
        return found if wanted.limit is None else found[max(0, len(found) - wanted.limit) :]


@given(st.lists(commits(), max_size=6), st.lists(filters, max_size=4))
def test_the_table_accepts_refuses_and_answers_like_plain_dictionaries(
    history: list[Changes], questions: list[JobFilter]
) -> None:
    store, mirror = SqliteStore.in_memory(), Mirror()
    for changes in history:
        if mirror.refuses(changes):
            with pytest.raises(BrokenInvariant):
                store.commit(changes)
        else:
            store.commit(changes)
            mirror.commit(changes)
        runs = sorted(mirror.runs.values(), key=lambda one: (one.job_id, one.number))
        active = [job for _, job in sorted(mirror.jobs.items()) if not job.state.is_final]
        assert store.load_active() == (active, [one for one in runs if one.outcome is None])
        assert store.next_job_id() == max(mirror.jobs, default=0) + 1
        assert store.runs(range(9)) == runs
    assert [store.events(n) for n in range(9)] == [[e for e in mirror.events if e.job_id == n] for n in range(9)]
    for table in (DRAINS, DRAINERS, MIG_LAYOUTS):
        assert store.load(table) == mirror.rows[table]
    for question in [JobFilter(), *questions]:
        assert store.jobs(question) == mirror.found(question)
