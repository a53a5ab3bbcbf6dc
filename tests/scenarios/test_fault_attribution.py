"""Whose fault a failure is: XID numbers, and runs that fail in their first seconds on one card."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.lifecycle.failures import (
    Evidence,
    GpuFault,
    add_evidence,
    attribute_to_foreign_use,
    attribute_to_gpu,
    awaits_faults,
    fault_of,
    suspicion,
)
from gpusched.model.cluster import DrainCause, Xid
from gpusched.model.commands import Drain
from gpusched.model.job import Job, RetryRule, Run
from gpusched.model.settings import FaultSettings
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import Value, replace
from gpusched.ports.tables import DRAINS
from gpusched.testing import NOW, gpu_uuid, job, request, run, share

SETTINGS = FaultSettings()


def ended(of: Job, *cards: int, lasted_s: float = 3.0, at: float = NOW, **parts: object) -> Run:
    shares = tuple(share(card) for card in cards or (0,))
    fields = {"outcome": JobState.FAILED, "reason": ReasonCode.NON_ZERO_EXIT_CODE, "exit_code": 1, **parts}
    return run(of, state=RunState.ENDED, gpus=shares, start_at=at - lasted_s, end_at=at, **fields)


def judged(run: Run, told: GpuFault, settings: FaultSettings = SETTINGS) -> Run:
    return attribute_to_gpu(run, fault_of(run, (told,), settings.xid_victim))


def fault(xid: int | None, card: int = 0, at: float = NOW) -> GpuFault:
    return GpuFault(gpu_uuid("n1", card), card, xid, at)


XIDS = {
    "an illegal access of the program is its own": (fault(31), JobState.FAILED),
    "so is an engine exception": (fault(13), JobState.FAILED),
    "and a cleanup after it": (fault(45), JobState.FAILED),
    "what is only noted changes nothing": (fault(63), JobState.FAILED),
    "memory that cannot be corrected is the card's": (fault(48), JobState.NODE_FAIL),
    "so is a card that fell off the bus": (fault(79), JobState.NODE_FAIL),
    "and a contained memory error": (fault(94), JobState.NODE_FAIL),
    "one on another card is not": (fault(79, card=1), JobState.FAILED),
    "one before the run is not": (fault(79, at=NOW - 60), JobState.FAILED),
    "one that is told of a little late is": (fault(79, at=NOW + 3), JobState.NODE_FAIL),
    "one long after is not": (fault(79, at=NOW + 60), JobState.FAILED),
    "a lost card is": (fault(None, at=NOW - 1), JobState.NODE_FAIL),
    "one that was lost before the run is not": (fault(None, at=NOW - 60), JobState.FAILED),
    "one that is lost before it was clean of the run is": (fault(None, at=NOW + 60), JobState.NODE_FAIL),
    "another card that is lost is not": (fault(None, card=1), JobState.FAILED),
}


@pytest.mark.parametrize("name", XIDS)
def test_xids_are_attributed(name: str) -> None:
    told, expected = XIDS[name]
    after = judged(ended(job(1)), told, SETTINGS)
    assert after.outcome is expected
    assert (after.reason is ReasonCode.GPU_FAILED) is (expected is JobState.NODE_FAIL)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (JobState.FAILED, JobState.NODE_FAIL),
        (JobState.OUT_OF_MEMORY, JobState.NODE_FAIL),
        (JobState.TIMEOUT, JobState.NODE_FAIL),
        (JobState.COMPLETED, JobState.COMPLETED),
        (JobState.CANCELLED, JobState.CANCELLED),
        (JobState.PREEMPTED, JobState.PREEMPTED),
    ],
)
def test_only_failures_are_attributed(outcome: JobState, expected: JobState) -> None:
    assert judged(ended(job(1), outcome=outcome), fault(79), SETTINGS).outcome is expected


@pytest.mark.parametrize(
    ("outcome", "faults_until", "now", "expected"),
    [
        (JobState.FAILED, NOW - 0.1, NOW + 1, True),
        (JobState.OUT_OF_MEMORY, NOW - 0.1, NOW + 1, True),
        (JobState.FAILED, NOW, NOW + 1, False),
        (JobState.FAILED, None, NOW + 1, False),
        (JobState.COMPLETED, NOW - 0.1, NOW + 1, False),
        (JobState.FAILED, NOW - 0.1, NOW + 30, False),
        (JobState.FAILED, NOW - 0.1, NOW - 3600, False),
    ],
    ids=["unread", "out of memory", "read", "nothing tells", "ended well", "waited enough", "clock set back"],
)
def test_a_failed_run_awaits_faults_from_before_its_end(
    outcome: JobState, faults_until: float | None, now: float, expected: bool
) -> None:
    assert awaits_faults(ended(job(1), outcome=outcome), faults_until, now, 30.0) is expected


def test_the_list_of_hardware_xids_is_a_setting() -> None:
    assert judged(ended(job(1)), fault(31), replace(SETTINGS, xid_victim=(31,))).outcome is JobState.NODE_FAIL


CARD = gpu_uuid("n1", 0)
CROWDED = {
    "somebody had taken the memory": ({CARD: 9000}, JobState.OUT_OF_MEMORY, 3.0, True),
    "what all desktops take is no excuse": ({CARD: 900}, JobState.OUT_OF_MEMORY, 3.0, False),
    "that of another card neither": ({gpu_uuid("n1", 1): 9000}, JobState.OUT_OF_MEMORY, 3.0, False),
    "who had it for a while has filled it by itself": ({CARD: 9000}, JobState.OUT_OF_MEMORY, 60.0, False),
    "another failure has another cause": ({CARD: 9000}, JobState.FAILED, 3.0, False),
}


@pytest.mark.parametrize("name", CROWDED)
def test_out_of_memory_is_attributed(name: str) -> None:
    foreign, outcome, lasted_s, is_theirs = CROWDED[name]
    before = ended(job(1), outcome=outcome, lasted_s=lasted_s)
    after = attribute_to_foreign_use(before, foreign, SETTINGS.early_s, 1024)
    assert (after.reason is ReasonCode.GPU_FOREIGN_USE) is is_theirs
    assert is_theirs or after is before


def test_host_out_of_memory_is_never_the_fault_of_gpu_neighbours() -> None:
    before = replace(ended(job(1), outcome=JobState.OUT_OF_MEMORY, lasted_s=3.0), reason=ReasonCode.MEM_LIMIT)
    assert attribute_to_foreign_use(before, {CARD: 9000}, SETTINGS.early_s, 1024) is before


# --- the first seconds ----------------------------------------------------------------------------


class End(Value):
    """A run of `user` that has ended on these cards so many minutes after the first."""

    user: str
    minute: float = 0
    cards: tuple[int, ...] = (0,)
    job_id: int | None = None
    lasted_s: float = 3.0
    outcome: JobState = JobState.FAILED
    code: int | None = 1


def after(ends: list[End], settings: FaultSettings = SETTINGS) -> set[int]:
    """Cards that are suspect after these ends."""
    evidence: Evidence = {}
    found = set()
    for number, end in enumerate(ends, start=1):
        one = job(end.job_id or number, user=end.user)
        at = NOW + end.minute * 60
        last = ended(one, *end.cards, lasted_s=end.lasted_s, at=at, outcome=end.outcome, exit_code=end.code)
        evidence = add_evidence(evidence, one, last, settings)
        found |= {card for card in range(4) if suspicion(evidence.get(gpu_uuid("n1", card), ()), settings) is not None}
    return found


WELL = JobState.COMPLETED
EARLY: dict[str, tuple[list[End], set[int]]] = {
    "two users in a row": ([End("ann"), End("bob")], {0}),
    "one user, however often": ([End("ann", minute) for minute in range(30)], set()),
    "two users on two cards": ([End("ann"), End("bob", cards=(1,))], set()),
    "two users with somebody's success between": ([End("ann"), End("eva", outcome=WELL), End("bob")], set()),
    "two users with a run between that lasted": ([End("ann"), End("eva", lasted_s=60), End("bob")], set()),
    "a short success between": ([End("ann"), End("eva", lasted_s=0.1, outcome=WELL, code=0), End("bob")], set()),
    "a cancelled run between says nothing": ([End("ann"), End("eva", outcome=JobState.CANCELLED), End("bob")], {0}),
    "two users, hours apart": ([End("ann"), End("bob", 90)], set()),
    "runs that lasted before they failed": ([End("ann", lasted_s=60), End("bob", lasted_s=60)], set()),
    "a program that is not there": ([End("ann", code=127), End("bob")], set()),
    "wrong options": ([End("ann"), End("bob", code=2)], set()),
    "runs that a signal ended": ([End("ann", code=None), End("bob", code=None)], {0}),
    "GPU memory that ran out": ([End("ann", outcome=JobState.OUT_OF_MEMORY), End("bob")], set()),
    "runs on several cards": ([End("ann", cards=(0, 1)), End("bob", cards=(0, 1))], set()),
    "a job that fails on every card": (
        [End("ann", job_id=7), End("ann", 1, (1,), job_id=7), End("bob", 2, (1,))],
        set(),
    ),
    "a job that fails here, and one that fails everywhere": (
        [End("bob"), End("ann", 1, job_id=7), End("ann", 2, (1,), job_id=7)],
        {0},
    ),
}


@pytest.mark.parametrize("name", EARLY)
def test_gpus_become_suspect(name: str) -> None:
    ends, expected = EARLY[name]
    assert after(ends) == expected


ENDS = st.builds(
    End,
    user=st.sampled_from(["ann", "bob", "eva"]),
    minute=st.floats(0, 100),
    cards=st.sampled_from([(0,), (1,), (0, 1)]),
    job_id=st.integers(1, 6),
    lasted_s=st.sampled_from([0.1, 5.0, 30.0]),
    outcome=st.sampled_from([JobState.FAILED, JobState.COMPLETED, JobState.TIMEOUT, JobState.CANCELLED]),
    code=st.sampled_from([None, 0, 1, 2, 127]),
)


@given(st.lists(ENDS, max_size=30))
def test_a_single_user_never_makes_a_gpu_suspect(ends: list[End]) -> None:
    ends = sorted(ends, key=lambda end: end.minute)
    assert after([replace(end, user="ann") for end in ends]) == set()


@given(st.lists(ENDS, max_size=30))
def test_a_disabled_check_makes_no_gpu_suspect(ends: list[End]) -> None:
    assert after(sorted(ends, key=lambda end: end.minute), replace(SETTINGS, early_users=0)) == set()


@given(st.lists(ENDS, max_size=30))
def test_surviving_runs_keep_every_gpu_trusted(ends: list[End]) -> None:
    assert after([replace(end, lasted_s=60) for end in sorted(ends, key=lambda end: end.minute)]) == set()


# --- in the daemon ----------------------------------------------------------------------------------


def test_a_victim_of_its_gpu_runs_again_elsewhere_free() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=10, exit_code=1))
    job_id = lab.submit(request=request(gpus=1), retry=RetryRule(retries=0))
    lab.tick(5)
    lab.xids[0] = (31, 48)
    lab.outcome = SimulatedOutcome(runs_s=10)
    lab.tick(1)
    lab.tick(5)
    lab.tick(1)
    first, second = lab.store.runs([job_id])
    assert (first.outcome, first.reason) == (JobState.NODE_FAIL, ReasonCode.GPU_FAILED)
    assert first.reason_text is not None
    assert first.reason_text.startswith("hardware fault of GPU 0: XID 48 (memory error")
    assert second.gpus[0].index == 1
    assert (lab.job(job_id).failures, lab.job(job_id).requeues) == (0, 1)
    lab.tick(20)
    lab.tick(1)
    assert lab.job(job_id).state is JobState.COMPLETED
    assert lab.store.load(DRAINS)["GPU-0"].text.startswith("suspect: XID 48")


def test_a_job_without_memory_left_by_foreign_processes_runs_again_free() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=3, exit_code=1, gpu_oom=True))
    job_id = lab.submit(request=request(gpus=1), retry=RetryRule(retries=0))
    lab.strangers[0] = 70000
    lab.tick(1)
    lab.outcome = SimulatedOutcome(runs_s=10)
    for seconds in (3, 40, 1, 1):
        lab.tick(seconds)
    first, second = lab.store.runs([job_id])
    assert (first.outcome, first.reason) == (JobState.NODE_FAIL, ReasonCode.GPU_FOREIGN_USE)
    assert first.reason_text == "68.4G of GPU 0 was held without a booking; it had ended as OUT_OF_MEMORY"
    assert second.gpus[0].index == 1
    assert (lab.job(job_id).failures, lab.job(job_id).requeues) == (0, 1)


def test_a_program_fault_is_a_failure() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=10, exit_code=1))
    job_id = lab.submit(request=request(gpus=1))
    lab.xids[0] = (31,)
    lab.tick(5)
    lab.tick(6)
    lab.tick(1)
    assert lab.job(job_id).state is JobState.FAILED
    assert lab.store.load(DRAINS) == {}


def test_a_gpu_on_which_several_users_fail_is_drained_until_cleared() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=2, exit_code=1))
    for caller in (ANN, BOB):
        lab.ask(lab.submission(caller, request=request(gpus=1)))
        lab.tick(3)
        lab.tick(1)
    (drain,) = lab.store.load(DRAINS).values()
    assert drain.cause is DrainCause.EARLY_FAILURES
    assert drain.text.startswith("suspect: jobs of 2 users in a row failed here in their first 10 s (ann's 1, bob's 2)")
    lab.restart()
    job_id = lab.submit(request=request(gpus=1))
    assert lab.store.runs([job_id])[0].gpus[0].index == 1
    status = lab.scheduler.head.tracker.status("GPU-0")
    assert status.state == "suspect"
    lab.tick(5)
    lab.tick(1)
    lab.ask(Drain(ROOT, ("0",), None))
    assert lab.store.load(DRAINS) == {}
    job_id = lab.submit(request=request(gpus=1))
    assert lab.store.runs([job_id])[0].gpus[0].index == 0


def test_a_full_disk_only_delays_the_drain() -> None:
    lab = Lab(gpus=1)
    lab.xids[0] = (79,)
    lab.store.is_full = True
    lab.tick(1)
    assert lab.store.load(DRAINS) == {}
    lab.store.is_full = False
    lab.tick(1)
    assert lab.store.load(DRAINS)["GPU-0"].text.startswith("suspect: XID 79")
    lab.tick(1)
    lab.ask(Drain(ROOT, ("0",), None))
    lab.tick(1)
    assert lab.store.load(DRAINS) == {}


def test_a_fault_from_before_the_daemon_start_drains_the_gpu() -> None:
    lab = Lab(gpus=2)
    happened_at = lab.clock.now() - 7200
    why = "suspect: XID 79 (fallen off the bus), found in the kernel's log 2:00:01 later; once it works again"
    lab.logged[0] = (Xid(79, happened_at, 5),)
    lab.tick(1)
    assert lab.store.load(DRAINS)["GPU-0"].text.startswith(why)
    assert [fault.at for fault in lab.scheduler.gpu_faults.of("GPU-0")] == [happened_at]


def test_a_cleared_fault_does_not_return_when_the_log_is_read_again() -> None:
    lab = Lab(gpus=1)
    old = (Xid(79, lab.clock.now() - 7200, 5),)
    lab.logged[0] = old
    lab.tick(1)
    lab.ask(Drain(ROOT, ("0",), None))
    # The reader of the GPUs was started again, then the daemon.
    lab.logged[0] = old
    lab.tick(1)
    assert lab.store.load(DRAINS) == {}
    lab.logged[0] = old
    lab.restart()
    lab.tick(1)
    assert lab.store.load(DRAINS) == {}
    assert lab.scheduler.head.tracker.status("GPU-0").state == "idle"
    lab.logged[0] = (Xid(79, lab.clock.now() - 0.5, 6),)
    lab.tick(1)
    assert lab.store.load(DRAINS)["GPU-0"].text.startswith("suspect: XID 79")


def test_a_gpu_without_events_finds_its_victims_in_the_log() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=10, exit_code=1))
    job_id = lab.submit(request=request(gpus=1), retry=RetryRule(retries=0))
    lab.tick(5)
    lab.tick(6)
    lab.logged[0] = (Xid(94, lab.clock.now() - 2, 1),)
    lab.tick(1)
    assert lab.store.runs([job_id])[0].reason is ReasonCode.GPU_FAILED


def test_a_fault_of_a_partitioned_gpu_makes_victims_of_the_jobs_on_its_instances() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=100, exit_code=1))
    lab.health = {0: {"mig_enabled": True, "mig_instances": 1}, 1: {"mig_parent": "GPU-0", "mig_profile": "7g.80gb"}}
    job_id = lab.submit(request=request(gpus=1))
    lab.tick(1)
    assert [one.uuid for one in lab.store.runs([job_id])[0].gpus] == ["GPU-1"]
    lab.tick(97)
    lab.xids[0] = (94,)
    lab.tick(1)
    lab.tick(3)
    lab.tick(3)
    first = lab.store.runs([job_id])[0]
    assert (first.outcome, first.reason) == (JobState.NODE_FAIL, ReasonCode.GPU_FAILED)
