"""Jobs that are suspended, resumed, requeued, preempted and cancelled in any order, by daemons that die in between.

After every turn that reached the engine, what moves is what the table says moves, nothing is booked twice,
and no job has two lives. At the end everybody is let go, and everybody ends.
"""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lab import ANN, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.model.commands import Cancel, Command, Requeue, Resume, Selection, Suspend
from gpusched.model.job import run_id
from gpusched.model.planner_settings import PreemptSettings
from gpusched.model.queue_settings import QosSettings
from gpusched.model.states import JobState, RunState
from gpusched.ports import JobFilter
from gpusched.scheduler.invariants import check_invariants
from gpusched.testing import request

QOS = {"low": QosSettings("low"), "high": QosSettings("high", tier=1, preempts=("low",))}
PICK = st.integers(0, 7)
"""Which of the jobs that there are, counted round."""


class Yielding(RuleBasedStateMachine):
    """One node of three cores and a card, and a daemon that may die before its orders go out."""

    lab: Lab

    @initialize(mode=st.sampled_from(["requeue", "suspend"]))
    def begin(self, mode: str) -> None:
        self.lab = Lab(gpus=1, cpus=3, qos=QOS, preempt=PreemptSettings(mode=mode, min_run_s=5))

    @precondition(lambda self: self.lab.scheduler.state.next_id <= 8)
    @rule(
        qos=st.sampled_from(["low", "low", "high"]),
        cpus=st.integers(1, 3),
        gpus=st.integers(0, 1),
        requeue=st.booleans(),
        runs_s=st.sampled_from([3.0, 40.0]),
        stop_takes_s=st.sampled_from([0.0, 2.0, 100.0]),
        limit_s=st.sampled_from([None, 30]),
    )
    def submit(self, qos, cpus, gpus, requeue, runs_s, stop_takes_s, limit_s) -> None:
        self.lab.outcome = SimulatedOutcome(runs_s=runs_s, stop_takes_s=stop_takes_s)
        self.lab.submit(
            qos=qos, request=request(gpus, cpus=float(cpus)), retry={"requeue": requeue}, time_limit_s=limit_s
        )

    def act(self, kind: type[Suspend | Resume | Requeue | Cancel], pick: int, dies: bool) -> None:
        """Ask for it; with `dies` the daemon is gone after its commit, before its orders."""
        ids = (1 + pick % max(1, self.lab.scheduler.state.next_id - 1),)
        command: Command = Cancel(ANN, Selection(ids=ids)) if kind is Cancel else kind(ANN, ids)
        scheduler = self.lab.scheduler
        if not dies:
            self.lab.ask(command)
            return
        scheduler.engine = _Deaf(self.lab.engine)
        self.lab.ask(command)
        self.restart()

    @rule(pick=PICK, dies=st.booleans())
    def suspend(self, pick: int, dies: bool) -> None:
        self.act(Suspend, pick, dies)

    @rule(pick=PICK, dies=st.booleans())
    def resume(self, pick: int, dies: bool) -> None:
        self.act(Resume, pick, dies)

    @rule(pick=PICK, dies=st.booleans())
    def requeue(self, pick: int, dies: bool) -> None:
        self.act(Requeue, pick, dies)

    @rule(pick=PICK, dies=st.booleans())
    def cancel(self, pick: int, dies: bool) -> None:
        self.act(Cancel, pick, dies)

    @rule(seconds=st.sampled_from([0.0, 1.0, 7.0, 45.0]))
    def let_pass(self, seconds: float) -> None:
        self.lab.tick(seconds)
        self.lab.tick()

    @rule()
    def restart(self) -> None:
        adopt_open_runs(self.lab.restart().state, self.lab.engine)
        self.lab.tick()

    @invariant()
    def what_moves_is_what_the_table_says(self) -> None:
        if not hasattr(self, "lab"):
            return
        jobs, open_runs = self.lab.store.load_active()
        known = {run.id for run in open_runs}
        living = {name: run for name, run in self.lab.engine._runs.items() if run.end is None}
        assert living.keys() <= known
        for job in jobs:
            run = living.get(run_id(job.id, job.run))
            mine = [name for name in living if name.startswith(f"{job.id}.")]
            assert len(mine) <= 1, "two lives at once"
            if run is not None:
                assert (run.still_since is not None) is (job.state is JobState.SUSPENDED)
                assert run.stopped_by is not None or job.state is not JobState.COMPLETING
            if job.state in (JobState.RUNNING, JobState.SUSPENDED):
                assert any(one.job_id == job.id for one in open_runs)

    @invariant()
    def nothing_is_booked_twice(self) -> None:
        if hasattr(self, "lab"):
            assert not check_invariants(self.lab.scheduler.snapshot(self.lab.clock.now()))

    @invariant()
    def runs_account_for_their_time(self) -> None:
        if not hasattr(self, "lab"):
            return
        for run in self.lab.store.runs(range(1, 9)):
            if run.state is RunState.ENDED and run.start_at is not None and run.end_at is not None:
                assert 0 <= run.suspended_s <= run.end_at - run.start_at + 1e-6

    def teardown(self) -> None:
        if not hasattr(self, "lab"):
            return
        for _ in range(60):
            still = [job.id for job in self.lab.scheduler.state.jobs.values() if job.suspended_by == "user"]
            if still:
                self.lab.ask(Resume(ANN, tuple(still)))
            self.lab.tick(50)
        left = {job.id: job.state for job in self.lab.store.jobs(JobFilter()) if not job.state.is_final}
        assert not left


class _Deaf:
    """The engine of a daemon that dies before its orders and tickets go out."""

    def __init__(self, engine: object) -> None:
        self._engine = engine

    def order(self, run: str, order: object) -> None:
        """Lost."""

    def reconcile(self, runs: object, ended: object = ()) -> None:
        """Lost."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


Yielding.TestCase.settings = hypothesis_settings(max_examples=25, stateful_step_count=20, deadline=None)
TestYielding = Yielding.TestCase
