"""The daemon itself on a virtual clock: jobs go through `daemon.tick`, with its table in memory and simulated runs.

Unlike `planner_run`, which calls the planner alone, this performs everything in the tick: queues, accounts and QOS
admit or refuse, runs fail and are retried after a backoff, reach their limits, and are preempted and requeued. The
clock moves from event to event:

    arrivals     of the trace, and of resubmissions after a refusal
    ends         of runs, from `engine`
    due          begin times, backoffs, deadlines: the daemon's timers
    protection   when a run becomes preemptible, or a pending job passes younger ones

When nothing runs and nothing arrives any more, the clock stops as soon as no job is left; and if some are, when nothing
has happened for longer than the longest period of a budget. Those never start.

The daemon would also poll in between, but here only ages and past usage change by then. Cards have no foreign use and
are free at the instant at which a run ends. A preempted run starts over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any

from gpusched.addons.simulate import engine as simulated
from gpusched.addons.simulate.engine import SimulatedEngine
from gpusched.addons.simulate.event_loop import Progress, play
from gpusched.addons.simulate.outcome import Attempt, Outcome, RunLog
from gpusched.addons.simulate.replay_table import ReplayTable
from gpusched.addons.simulate.trace import CUT, TraceJob, request_of
from gpusched.daemon.core import Scheduler
from gpusched.daemon.nodes import ClusterNode, ClusterNodes
from gpusched.daemon.parts import SchedulerParts
from gpusched.daemon.tick import Reply, Ticker
from gpusched.errors import GpuschedError, UsageError, UserError
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import GpuReading, GpuSample, GpuView, HostSample, NodeView
from gpusched.model.commands import Caller, Submit
from gpusched.model.execution import LaunchSite, Ticket
from gpusched.model.job import Job, JobSpec, Launch, RetryRule, Run, split_run_id
from gpusched.model.mentions import render
from gpusched.model.planner_settings import CeilingSettings
from gpusched.model.queue_settings import AccountSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.scheduler.admission import open_to_all
from gpusched.scheduler.priority import rank_period_s
from gpusched.scheduler.who_preempts import may_preempt

FAILED = frozenset({"failed", "node_fail", "boot_fail"})
"""Words in traces for a job that ended in failure."""
OUT_OF_MEMORY = "out_of_memory"

_AGAIN_S = 600
"""Wait before a resubmission after a refusal because of the number of jobs."""
_FIRST_UID = 2_000_000_000
"""An unused uid, so that no user of a trace has rights on this machine."""
_NO_TEXT = "0" * 64
_ADMINS = "simulated-admins"
_FORGOTTEN_AT = 1024
"""Number of ended jobs at which the table prunes them."""
_JUST_AFTER_S = 0.001
_DAY_S = 86400.0
_PERIOD_S = {"month": 31 * _DAY_S, "quarter": 92 * _DAY_S, "year": 366 * _DAY_S}
"""Longest length of each period of budgets that ends."""
_QUIET_S = 8 * _DAY_S
"""Longer than anything that recurs by the week."""


class NeverStarted(UserError):
    """Jobs that are refused, or wait, until the end: each with the reason."""

    def __init__(self, message: str, hint: str, jobs: Sequence[tuple[TraceJob, str]]) -> None:
        super().__init__(message, hint)
        self.jobs = jobs


@dataclass(frozen=True, slots=True)
class Mishaps:
    """Failures and retries, where the trace does not record them."""

    fail_rate: float = 0.0
    """Fraction of failing runs among jobs with an unknown end; each fails at a random point."""
    seed: int = 0
    retries: int = 0
    """Retries after a failure, with the usual backoff."""


class VirtualClock:
    """A manually set clock."""

    def __init__(self, at: float) -> None:
        self.at = at

    def now(self) -> float:
        """UTC epoch seconds; those of the trace if it does not say when it begins."""
        return self.at


class _WellCards(GpuTracker):
    """Cards that are always healthy, without foreign use, and free as soon as a run has ended.

    Failures of jobs are no evidence against a card, as no admin exists to undrain it.
    """

    def __init__(self, settings: Settings, cards: tuple[GpuView, ...]) -> None:
        super().__init__(settings.gpu)
        self._well = cards

    def views(self, now: float) -> tuple[GpuView, ...]:
        return self._well

    def begin_release(self, uuid: str, run: str, now: float) -> None:
        pass  # no driver to wait for

    def is_released(self, run: str) -> bool:
        return True


def run(
    jobs: Sequence[TraceJob],
    nodes: Sequence[NodeView],
    settings: Settings,
    *,
    mishaps: Mishaps | None = None,
    knows_run_times: bool = True,
    keeps_places: bool = False,
    begins_at: float = 0.0,
    progress: Progress | None = None,
) -> Outcome:
    """The schedule of these jobs on this node, with every run of each.

    Args:
        begins_at: UTC epoch seconds at second 0 of the trace.
        knows_run_times: where no job of the trace states a limit, each is submitted with what it will run; else with
            none.
        keeps_places: put down where each ran.
    Raises: UsageError for what the daemon, or a simulation of it, cannot do; NeverStarted when jobs are left that
    nothing lets start.
    """
    refuse(nodes, settings)
    run_log = RunLog(nodes, settings) if keeps_places else None
    body = DaemonRun(
        jobs, nodes[0], settings, mishaps or Mishaps(), run_log, knows_run_times=knows_run_times, begins_at=begins_at
    )
    return body.outcome(play([begins_at + job.submit_s for job in jobs], body, progress))


def refuse(nodes: Sequence[NodeView], settings: Settings) -> None:
    """Raises: UsageError for unsupported clusters, and for settings that depend on data missing from traces."""
    if len(nodes) > 1:
        raise UsageError(
            f"--tick simulates the daemon of one machine; the cluster has {len(nodes)} nodes",
            "give one node (--nodes 1x8), or leave --tick out",
        )
    if settings.priority.order == "utilisation":
        raise UsageError(
            "the order utilisation needs measured load, which traces do not have", "choose another [priority] order"
        )


def as_simulated(settings: Settings, node: NodeView) -> Settings:
    """The settings for this node, without those that depend on measurements or on human intervention."""
    over = settings.oversubscribe
    needs_ceilings = max(over.cpus, over.mem, over.vram) > 1
    return replace(
        settings,
        node=replace(
            settings.node,
            name=node.name,
            cpus=node.cpus,
            mem_mib=node.mem_mib,
            labels=node.labels or settings.node.labels,
            resources=dict(node.resources) or settings.node.resources,
        ),
        ceiling=CeilingSettings(cpu_fraction=inf, mem_fraction=inf, gpu_fraction=inf)
        if needs_ceilings
        else CeilingSettings(),
        gpu=replace(settings.gpu, mps_dir=None),
        # The single reading stays valid.
        daemon=replace(settings.daemon, poll_s=inf),
        idle=replace(settings.idle, after_s=0.0),
        # Nobody to tell, and every minute to look.
        budget=replace(settings.budget, alert_at=()),
        access=replace(settings.access, admin_group=_ADMINS),
        # Recorded jobs were admitted by the memberships of their time.
        account=open_to_all(settings.account),
        isolation=replace(settings.isolation, enforce=False),
        plugins=(),
    )


class DaemonRun:
    """The daemon's complete tick as a body of `event_loop.play`; single use."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        node: NodeView,
        settings: Settings,
        mishaps: Mishaps,
        run_log: RunLog | None = None,
        *,
        knows_run_times: bool = True,
        begins_at: float = 0.0,
    ) -> None:
        self._jobs = jobs
        self._begins_at = begins_at
        self._has_limits = knows_run_times or any(job.estimate_s != job.run_s for job in jobs)
        self._node = node
        self._mishaps = mishaps
        self._clock = VirtualClock(begins_at)
        self._store = ReplayTable.in_memory()
        self._engine = SimulatedEngine(self._clock, self._end_of)
        self._settings = as_simulated(settings, node)
        cards = tuple(replace(card, utilisation=0.0) for card in node.gpus)
        scripts = {job.spec.launch.script_sha for job in jobs if job.spec is not None}
        texts = {sha: b"" for sha in (_NO_TEXT, *scripts) if sha is not None}
        self._store.commit(Changes(payloads=texts))
        head = ClusterNode(
            site=LaunchSite(node.name, ""),
            boot_id=self._engine.boot_id,
            host=self._host(),
            tracker=_WellCards(self._settings, cards),
        )
        self._scheduler = Scheduler(
            SchedulerParts(
                store=self._store,
                engine=self._engine,
                cluster=ClusterNodes(head),
                settings=self._settings,
                clock=self._clock,
            )
        )
        self._ticker = Ticker(self._scheduler)
        self._scheduler.history.load()
        self._scheduler.observe_gpus(GpuReading(begins_at, "simulated", tuple(map(_sample, cards))))
        self._scheduler.signals.jobs_changed.connect(self._take_in)
        self._callers: dict[str, Caller] = {}
        self._specs: dict[object, JobSpec] = {}
        self._numbers: dict[int, int] = {}
        """By id in the table, of unfinished jobs."""
        self._runs: dict[int, int] = {}
        """The last run of each, by id."""
        self._starts = [-1] * len(jobs)
        self._ends = [-1] * len(jobs)
        self._attempts: list[Attempt] = []
        self._ended: list[int] = []
        self._wakes: list[tuple[float, int]] = []
        """When something is to be looked at again; and the job that must still wait then, 0 for any."""
        self._again: list[tuple[float, int]] = []
        self._refusals: dict[int, GpuschedError] = {}
        self._refused_at = -inf
        self._moved_at = begins_at
        """When a job last came or changed its state."""
        self._quiet_s = max([_QUIET_S, *map(_period_s, self._settings.account.values())])
        self._protected_s = _protected_s(self._settings)
        self._must_look = False
        """Whether it is time to look at everything again."""
        self._run_log = run_log

    # --- time -----------------------------------------------------------------------------------

    def next_at(self, arrives_at: float) -> float:
        now = self._clock.at
        event_at, due_at = self._engine.next_event_at(), self._ticker.next_due()
        if due_at is not None and due_at <= now:
            # Already handled; the daemon would handle it again at its next poll.
            due_at = None
        if arrives_at == inf and event_at is None and self._is_over():
            return inf
        awaited = (arrives_at, event_at, due_at, self._again[0][0] if self._again else None)
        first_at = min(at for at in awaited if at is not None)
        wakes = self._wakes
        while wakes and wakes[0][0] <= first_at and not self._still_waits(wakes[0][1]):
            # No event until then could make a job wait for it.
            heappop(wakes)
        return max(now, min(first_at, wakes[0][0]) if wakes else first_at)

    def _is_over(self) -> bool:
        """Whether nothing can happen any more: edges of periods follow each other for ever."""
        state, now = self._scheduler.state, self._clock.at
        if not state.jobs:
            return not self._again
        if state.open_runs:
            return False
        due_at = state.next_due()
        return now > self._moved_at + self._quiet_s and (due_at is None or due_at <= now)

    def advance(self, now: float) -> None:
        """Set the clock; runs end in the tick."""
        self._clock.at = now
        self._must_look = self._wake()

    def arrive(self, job: int) -> None:
        """Submit a job."""
        self._submit(job)

    def settle(self, now: float) -> None:
        """Resubmit jobs whose wait after a refusal is over, and tick."""
        while self._again and self._again[0][0] <= now:
            self._submit(heappop(self._again)[1])
        if self._must_look:
            self._scheduler.observe_host(self._host())
        self._ticker.tick()
        self._forget()
        if self._refused_at == now and not self._scheduler.state.jobs:
            self._give_up_refused()

    def outcome(self, cycles: int) -> Outcome:
        """The schedule. Raises: NeverStarted if jobs remain."""
        self._check_done()
        self._attempts.sort(key=lambda one: (one.start_s, one.job))
        return Outcome(self._jobs, self._starts, cycles, self._ends, self._attempts, self._run_log)

    def _wake(self) -> bool:
        """Whether every job is due for another look."""
        found = False
        while self._wakes and self._wakes[0][0] <= self._clock.at:
            found |= self._still_waits(heappop(self._wakes)[1])
        return found

    def _still_waits(self, job_id: int) -> bool:
        state = self._scheduler.state
        if not job_id:
            return state.census.pending > 0
        job = state.jobs.get(job_id)
        return job is not None and job.state is JobState.PENDING

    def _host(self) -> HostSample:
        node = self._node
        return HostSample(
            self._clock.now(), node.name, max(1, int(node.cpus)), node.mem_mib, node.mem_mib, 0.0, 0.0, 0.0
        )

    # --- submissions ----------------------------------------------------------------------------

    def _submit(self, number: int) -> None:
        job = self._jobs[number]
        user = job.user or job.queue or "nobody"
        is_urgent = job.spec is not None and job.spec.nice < 0
        mark = f"{user}\0" if is_urgent else user
        caller = self._callers.get(mark)
        if caller is None:
            uid = self._callers[user].uid if user in self._callers else _FIRST_UID + len(self._callers)
            caller = self._callers[mark] = Caller(uid, user, groups={_ADMINS: is_urgent})
        self._ticker.submit(Submit(caller, [self._spec_of(job)], {}), self._answer(number))

    def _answer(self, number: int) -> Reply:
        def take(answer: dict[str, Any] | GpuschedError) -> None:
            if isinstance(answer, GpuschedError):
                self._refusals[number], self._refused_at = answer, self._clock.at
                heappush(self._again, (self._clock.at + _AGAIN_S, number))
                return
            self._refusals.pop(number, None)
            self._moved_at = self._clock.at
            job_id = int(answer["ids"][0])
            self._numbers[job_id] = number
            priority = self._settings.priority
            longest_s = priority.max_age_s if priority.order == "multifactor" else priority.max_wait_s
            if longest_s < inf and priority.order != "fifo":
                heappush(self._wakes, (_just_after(self._clock.at + longest_s, self._settings), job_id))

        return take

    def _spec_of(self, job: TraceJob) -> JobSpec:
        """Submission of a job; equal submissions are one object."""
        if job.spec is not None:
            found = self._specs.get(job.spec)
            if found is None:
                launch = replace(job.spec.launch, env_sha=_NO_TEXT)
                found = self._specs[job.spec] = replace(job.spec, launch=launch)
            return found
        mark = (
            *(job.procs, job.gpus, job.cpus, job.mem_mib, job.gpu_fraction),
            *(job.estimate_s, job.queue, job.account, job.name),
        )
        found = self._specs.get(mark)
        if found is None:
            name = job.name or "job"
            found = self._specs[mark] = JobSpec(
                name=name,
                request=request_of(job, (self._node,)),
                launch=Launch((name,), None, None, _NO_TEXT, "/"),
                retry=RetryRule(retries=self._mishaps.retries),
                queue=job.queue or self._settings.default.queue,
                account=job.account,
                time_limit_s=job.estimate_s if self._has_limits else None,
            )
        return found

    # --- results ----------------------------------------------------------------------------------

    def _end_of(self, ticket: Ticket) -> simulated.SimulatedOutcome:
        """Outcome of a run that starts now."""
        job_id, _ = split_run_id(ticket.run)
        job = self._jobs[self._numbers[job_id]]
        failures = self._scheduler.state.jobs[job_id].failures
        run_s, how = job.run_s, job.outcome
        if job.attempts:
            run_s, how = job.attempts[min(failures, len(job.attempts) - 1)]
        elif not how and self._mishaps.fail_rate:
            chance = Random(f"{self._mishaps.seed}:{job.id}:{failures}")
            if chance.random() < self._mishaps.fail_rate:
                return simulated.SimulatedOutcome(runs_s=chance.randint(1, max(1, run_s)), exit_code=1)
        if how in FAILED:
            return simulated.SimulatedOutcome(runs_s=run_s, exit_code=1)
        if how == OUT_OF_MEMORY:
            return simulated.SimulatedOutcome(runs_s=run_s, exit_code=1, gpu_oom=True)
        if how == CUT and ticket.time_limit_s is not None:
            return simulated.SimulatedOutcome(runs_s=inf)
        return simulated.SimulatedOutcome(runs_s=run_s)

    def _take_in(self, changed: Mapping[int, Job]) -> None:
        for job in changed.values():
            self._moved_at = self._clock.at
            number = self._numbers.get(job.id)
            if number is None:
                continue
            if job.state is JobState.RUNNING:
                if self._runs.get(job.id) == job.run:
                    continue  # a confirmed start
                self._runs[job.id] = job.run
                if self._starts[number] < 0:
                    self._starts[number] = self._second(self._clock.at)
                self._wake_when_unprotected(job)
            elif job.state.is_final:
                self._ends[number] = self._second(self._clock.at)
                for run in self._store.runs([job.id]):
                    self._put_down(number, run)
                del self._numbers[job.id]
                self._runs.pop(job.id, None)
                self._ended.append(job.id)

    def _wake_when_unprotected(self, job: Job) -> None:
        if self._protected_s is not None:
            qos = self._settings.qos.get(job.spec.qos)
            safe_s = self._protected_s if qos is None or qos.min_run_s is None else qos.min_run_s
            heappush(self._wakes, (self._clock.at + safe_s + _JUST_AFTER_S, 0))

    def _put_down(self, number: int, run: Run) -> None:
        start_at = run.intent_at if run.start_at is None else run.start_at
        begin_s, end_s = self._second(start_at), self._second(start_at if run.end_at is None else run.end_at)
        how = "" if run.outcome is None else run.outcome.value.lower()
        self._attempts.append(Attempt(number, begin_s, end_s, how))
        if self._run_log is not None:
            placement = Placement(run.node, run.gpus, run.cpus, run.mem_mib)
            self._run_log.add(number, begin_s, end_s, placement, how)

    def _second(self, at: float) -> int:
        """An instant on the clock of the trace."""
        return round(at - self._begins_at)

    def _forget(self) -> None:
        if len(self._ended) >= _FORGOTTEN_AT:
            self._store.prune(self._ended)
            self._ended.clear()

    def _give_up_refused(self) -> None:
        """Raises: NeverStarted, as resubmission is futile once only refused jobs are left."""
        number, error = min(self._refusals.items())
        refused = [(self._jobs[one], told.message) for one, told in sorted(self._refusals.items())]
        raise NeverStarted(
            f"{_jobs(len(refused))} refused until the end, the first being {self._jobs[number].id}: {error.message}",
            "change the settings, or leave those jobs out",
            refused,
        )

    def _check_done(self) -> None:
        state = self._scheduler.state
        if not state.jobs:
            return
        left = [(self._jobs[self._numbers[job_id]], self._why(state.jobs[job_id])) for job_id in sorted(state.jobs)]
        first, why = left[0]
        left += [(self._jobs[number], told.message) for number, told in sorted(self._refusals.items())]
        raise NeverStarted(
            f"{_jobs(len(left))} never able to start, the first being {first.id}{f': {why}' if why else ''}",
            "change the settings, or give a larger cluster with --nodes",
            left,
        )

    def _why(self, job: Job) -> str:
        reason = self._scheduler.answers.reason_for(job)
        return "" if reason is None else render(reason.text)


def _period_s(account: AccountSettings) -> float:
    """Longest length of a period of this account's budget; 0 if it has none that ends."""
    has_budget = account.gpu_hours is not None or account.gpu_hours_per_user is not None
    return _PERIOD_S.get(account.budget_period, 0.0) if has_budget else 0.0


def _just_after(at: float, settings: Settings) -> float:
    """First recalculation of ranks after this instant."""
    period_s = rank_period_s(settings)
    return at - at % period_s + period_s if period_s > 0 else at + _JUST_AFTER_S


def _protected_s(settings: Settings) -> float | None:
    """How long a run is protected from preemption; None if no run is ever preempted."""
    return settings.preempt.min_run_s if may_preempt(settings) else None


def _jobs(count: int) -> str:
    return "1 job is" if count == 1 else f"{count} jobs are"


def _sample(card: GpuView) -> GpuSample:
    return GpuSample(card.uuid, card.index, card.name, vram_total_mib=card.vram_total_mib, vram_used_mib=0)
