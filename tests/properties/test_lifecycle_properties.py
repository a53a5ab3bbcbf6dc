"""Whatever happens to a job, in whatever order: legal moves only, and no count is ever exceeded."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpusched.errors import BrokenInvariant
from gpusched.lifecycle import run_transitions, transitions
from gpusched.model.execution import COMES_BACK, RunEnded, RunLost, RunNeverStarted, RunStarted, RunStopping
from gpusched.model.job import Job, JobEvent, RetryRule, Run
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.testing import NOW, job, share

SETTINGS = Settings()
RULES = st.builds(
    RetryRule,
    retries=st.integers(0, 3),
    retry_on=st.sampled_from([(), ("exit",), ("exit", "signal", "oom", "node_fail"), ("timeout", "3")]),
    requeue=st.booleans(),
)


class JobLife(RuleBasedStateMachine):
    """One job, driven by every event that could reach it in its state."""

    job: Job
    run: Run | None

    @initialize(retry=RULES)
    def submit(self, retry: RetryRule) -> None:
        self.now = NOW
        self.job = job(7, retry=retry, time_limit_s=60)
        self.run = None
        self.story: list[JobEvent] = []
        self.numbers: list[int] = []
        self.cancelled = False

    @property
    def has_open_run(self) -> bool:
        return self.run is not None and self.run.state is not RunState.ENDED

    @property
    def is_releasing(self) -> bool:
        return self.job.state is JobState.COMPLETING and not self.has_open_run

    def become(self, after: Job, events: Iterable[JobEvent], run: Run | None = None) -> None:
        """Check one move and make it."""
        before, told = self.job, list(events)
        if after.state is not before.state:
            assert (before.state, after.state) in transitions.TRANSITIONS
            assert not before.state.is_final
        if after.state is JobState.PENDING and before.state is not JobState.PENDING:
            assert not self.cancelled
            assert told, "a job that waits again says why"
        assert all(event.job_id == 7 and event.text for event in told)
        self.job, self.run = after, run if run is not None else self.run
        self.story += told
        self.now += 1.0

    @precondition(lambda self: self.job.state is JobState.PENDING)
    @rule()
    def start(self) -> None:
        assert not self.cancelled
        placement = Placement("n1", (share(0),), 1.0, 0)
        after, run, events = run_transitions.start_run(self.job, placement, {"n1": "boot"}, self.now)
        self.numbers.append(run.number)
        self.become(after, events, run)

    @precondition(lambda self: self.has_open_run)
    @rule()
    def confirm(self) -> None:
        event = RunStarted(self.run.id, self.now, 10, 20, 11)
        after, run, events = run_transitions.run_started(self.job, self.run, event)
        assert after is self.job
        self.become(after, events, run)

    @precondition(lambda self: self.has_open_run)
    @rule(why=st.sampled_from(["cancel", "preempt", "timeout", "leftovers"]))
    def stop(self, why: str) -> None:
        after, run, events = run_transitions.run_stopping(self.job, self.run, RunStopping(self.run.id, self.now, why))
        self.become(after, events, run)

    @precondition(lambda self: self.has_open_run)
    @rule(
        exit_code=st.sampled_from([0, 1, 3, None]),
        stopped_by=st.sampled_from([None, None, None, "cancel", "timeout", *COMES_BACK]),
        is_done=st.booleans(),
        launch_error=st.sampled_from([None, None, None, "no such directory"]),
        gpu_oom=st.booleans(),
        gpus_clean=st.booleans(),
    )
    def end(self, exit_code, stopped_by, is_done, launch_error, gpu_oom, gpus_clean) -> None:
        event = RunEnded(
            self.run.id,
            None if launch_error else self.now - 0.5,
            self.now,
            exit_code=exit_code,
            signal=9 if exit_code is None else None,
            stopped_by=stopped_by,
            is_done=is_done and exit_code == 0,
            launch_error=launch_error,
            gpu_oom=gpu_oom,
        )
        failures = self.job.failures
        after, run, events = run_transitions.run_ended(
            self.job, self.run, event, SETTINGS, self.now, gpus_clean=gpus_clean
        )
        assert run.state is RunState.ENDED
        assert run.outcome is not None
        assert (after.state is JobState.COMPLETING) is not gpus_clean
        if stopped_by in COMES_BACK and exit_code == 0 and launch_error is None and self.job.spec.retry.requeue:
            # The work goes on, whatever else happened, unless the run says that there is none left.
            assert (run.outcome is JobState.COMPLETED) is event.is_done
            assert after.failures == failures
        self.become(after, events, run)

    @precondition(lambda self: self.has_open_run)
    @rule(gpus_clean=st.booleans())
    def lose(self, gpus_clean) -> None:
        event = RunLost(self.run.id, self.now, "its supervisor is gone")
        after, run, events = run_transitions.run_lost(
            self.job, self.run, event, SETTINGS, self.now, gpus_clean=gpus_clean
        )
        self.become(after, events, run)

    @precondition(lambda self: self.has_open_run and self.run.state is RunState.STARTING)
    @rule()
    def revoke(self) -> None:
        event = RunNeverStarted(self.run.id, self.now, "the claim was revoked")
        counts = self.job.failures, self.job.requeues
        after, run, events = run_transitions.run_never_started(self.job, self.run, event, SETTINGS, self.now)
        assert (after.failures, after.requeues) == counts
        self.become(after, events, run)

    @precondition(lambda self: self.is_releasing)
    @rule()
    def finish(self) -> None:
        self.become(*run_transitions.finish(self.job, self.run, SETTINGS, self.now))
        assert self.job.state is not JobState.COMPLETING

    @precondition(lambda self: not self.job.state.is_final)
    @rule()
    def cancel(self) -> None:
        after, events = transitions.cancel(self.job, self.now, "ann")
        self.cancelled = True
        self.become(after, events)
        assert self.job.state in (JobState.CANCELLED, JobState.COMPLETING)

    @precondition(lambda self: not self.job.state.is_final)
    @rule(held=st.booleans())
    def hold(self, held) -> None:
        act = transitions.hold if held else transitions.release
        after, event = act(self.job, self.now, "ann")
        assert after.state is self.job.state
        self.become(after, [event])

    @precondition(lambda self: self.has_open_run)
    @rule(by_owner=st.booleans())
    def preempt(self, by_owner) -> None:
        counts = self.job.failures, self.job.requeues, self.job.queued_at
        was_stopping = self.job.state is JobState.COMPLETING
        if by_owner:
            after, events = transitions.requeue(self.job, self.now, "ann", is_owner=True)
        else:
            after, events = transitions.preempt(self.job, self.now, "job 12")
        if by_owner and self.job.spec.time_limit_s is not None and not was_stopping:
            counts = *counts[:2], self.now
        assert after.state is JobState.COMPLETING
        assert (after is self.job) is was_stopping
        assert (after.failures, after.requeues, after.queued_at) == counts
        self.become(after, events)

    @precondition(lambda self: self.job.state in (JobState.RUNNING, JobState.SUSPENDED))
    @rule(by=st.sampled_from(["user", "policy"]))
    def suspend(self, by) -> None:
        self.become(*transitions.suspend(self.job, self.now, by, "why"))
        assert self.job.state is JobState.SUSPENDED

    @precondition(lambda self: self.job.state is JobState.SUSPENDED)
    @rule()
    def resume(self) -> None:
        before = self.run.suspended_s
        after, run, events = transitions.resume(self.job, self.run, self.now, "why")
        assert run.suspended_s == before + self.now - self.job.suspended_at
        self.become(after, events, run)

    @precondition(lambda self: self.job.state is JobState.PENDING)
    @rule()
    def give_up_on_dependency(self) -> None:
        self.become(*transitions.give_up(self.job, self.now, ReasonCode.DEPENDENCY_NEVER_SATISFIED, "job 3 failed"))

    @precondition(lambda self: self.job.state.is_final)
    @rule()
    def nothing_moves_a_final_job(self) -> None:
        placement = Placement("n1", (), 1.0, 0)
        attempts = [
            lambda: transitions.cancel(self.job, self.now, "ann"),
            lambda: transitions.hold(self.job, self.now, "ann"),
            lambda: transitions.give_up(self.job, self.now, ReasonCode.DEPENDENCY_NEVER_SATISFIED, "x"),
            lambda: run_transitions.start_run(self.job, placement, "boot", self.now),
        ]
        if self.run is not None:
            event = RunEnded(self.run.id, self.now, self.now, exit_code=0)
            run = self.run
            attempts += [
                lambda: run_transitions.finish(self.job, run, SETTINGS, self.now),
                lambda: run_transitions.run_ended(self.job, run, event, SETTINGS, self.now, gpus_clean=True),
            ]
        for attempt in attempts:
            try:
                attempt()
            except BrokenInvariant:
                continue
            raise AssertionError(f"{self.job.state} moved")

    @invariant()
    def counts_hold(self) -> None:
        assert 0 <= self.job.failures <= self.job.spec.retry.retries
        assert 0 <= self.job.requeues <= SETTINGS.life.max_requeues

    @invariant()
    def the_end_is_set_exactly_when_it_has_ended(self) -> None:
        assert (self.job.end_at is not None) is self.job.state.is_final
        assert not self.job.state.is_final or (self.job.reason is not None and self.job.reason_text)

    @invariant()
    def a_job_runs_exactly_while_it_has_a_run(self) -> None:
        if self.job.state is JobState.PENDING or self.job.state.is_final:
            assert not self.has_open_run
        if self.job.state in (JobState.RUNNING, JobState.SUSPENDED):
            assert self.has_open_run

    @invariant()
    def marks_of_a_run_go_with_it(self) -> None:
        assert (self.job.suspended_at is not None) is (self.job.state is JobState.SUSPENDED)
        if self.job.state is not JobState.COMPLETING:
            assert (self.job.suspended_by is not None) is (self.job.state is JobState.SUSPENDED)
        assert self.job.preempt_at is None or self.job.state is JobState.COMPLETING
        assert not self.job.is_front or self.job.state.is_final or self.job.state is JobState.PENDING

    @invariant()
    def a_run_number_is_used_once(self) -> None:
        assert self.numbers == sorted(set(self.numbers))
        assert self.job.run == (self.numbers[-1] if self.numbers else 0)

    @invariant()
    def a_cancelled_job_says_what_cancelled_it(self) -> None:
        if self.job.state is JobState.CANCELLED:
            assert self.job.reason in (ReasonCode.CANCELLED_BY_USER, ReasonCode.DEPENDENCY_NEVER_SATISFIED)


JobLife.TestCase.settings = hypothesis_settings(max_examples=30, stateful_step_count=25, deadline=None)
TestJobLife = JobLife.TestCase
