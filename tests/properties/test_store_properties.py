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
from gpusched.model.cluster import Drainer
from gpusched.model.job import GpuShare, Job, JobEvent, JobSpec, Launch, Notice, Request, RetryRule, Run
from gpusched.model.mig import CardLayout, layout_of
from gpusched.model.states import ACTIVE_STATES, FINAL_STATES, JobState, ReasonCode, RunState
from gpusched.model.value import decode, replace
from gpusched.ports import Changes, JobFilter
from gpusched.store import rows
from gpusched.store.memory import MemoryStore
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
        made = job(job_id, spec=spec, state=state, end_at=end_at, user=draw(st.sampled_from(["ann", "bob"])))
        changes.jobs[job_id] = made
    for job_id in draw(st.lists(st.integers(1, 6), max_size=2)):
        over = {"state": RunState.ENDED, "end_at": NOW, "outcome": JobState.FAILED} if draw(st.booleans()) else {}
        attempt = run(job(job_id), number=draw(st.integers(1, 2)), **over)
        changes.runs[attempt.id] = attempt
    for job_id in draw(st.lists(st.integers(1, 6), max_size=2)):
        changes.events.append(JobEvent(job_id, NOW, "note", draw(st.sampled_from(["x", "\udcff"]))))
    for target in draw(st.lists(st.sampled_from(["n1", "GPU-1"]), max_size=1)):
        changes.drains[target] = draw(st.none() | st.just("fan"))
        changes.drainers[target] = draw(st.none() | st.builds(Drainer, texts, st.just(NOW)))
    for uuid in draw(st.lists(st.sampled_from(["GPU-1", "GPU-2"]), max_size=1)):
        layout = CardLayout(uuid, draw(texts), 0, wanted=layout_of(["3g.40gb"]), number=7, user=draw(texts), at=NOW)
        changes.mig_layouts[uuid] = draw(st.none() | st.just(layout))
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


def accepted(store: MemoryStore | SqliteStore, changes: Changes) -> bool:
    try:
        store.commit(changes)
    except BrokenInvariant:
        return False
    return True


@given(st.lists(commits(), max_size=6), st.lists(filters, max_size=4))
def test_both_stores_accept_refuse_and_answer_the_same(history: list[Changes], questions: list[JobFilter]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        disk, memory = SqliteStore.open(os.path.join(folder, "gpusched.db")), MemoryStore()
        try:
            for changes in history:
                assert accepted(disk, changes) == accepted(memory, changes)
                assert disk.load_active() == memory.load_active()
                assert disk.next_job_id() == memory.next_job_id()
            assert disk.load_drains() == memory.load_drains()
            assert disk.load_drainers() == memory.load_drainers()
            assert disk.load_mig_layouts() == memory.load_mig_layouts()
            assert disk.runs(range(9)) == memory.runs(range(9))
            assert [disk.events(n) for n in range(9)] == [memory.events(n) for n in range(9)]
            assert disk.last_job_id(1000) == memory.last_job_id(1000)
            for question in [JobFilter(), *questions]:
                assert disk.jobs(question) == memory.jobs(question)
        finally:
            disk.close()
