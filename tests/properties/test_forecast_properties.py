"""The future that a fork of the planner plays is what then happens where runs last as long as it takes them to last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_events import apply_events, planner_of
from test_schedule_properties import CLUSTERS, some_request, some_settings
from worlds import FILLERS, GRACE_S, Story, World, shrunk, story_of

from gpusched.lifecycle.dependencies import Parent, parse_dependency
from gpusched.model.cluster import Allocation, JobTerms
from gpusched.model.snapshot import ClassKey, PendingJob, Prediction, PreemptMode
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.scheduler import forecast
from gpusched.scheduler.forecast import Arrival, Future, StartForecast, class_key_of
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.state import PlannerState
from gpusched.testing import NOW

PLANS = 40
"""Of each play, as preemption may go on for ever."""


def lasts_s(job_id: int, limit_s: float | None, run_s: float) -> float | None:
    """How long each run lasts: some for all of their time, some for a part of it, some without end."""
    if limit_s is None:
        return (run_s + 7.0, None, run_s + 40.0)[job_id % 3]
    return max((1.0, 0.4, 0.8)[job_id % 3] * limit_s, run_s)


class Truth(World):
    """A world that goes on by itself: runs end when they have lasted, nothing fails, and nobody interferes."""

    def __init__(self, world: World, arrivals: Iterable[Arrival]) -> None:
        self.__dict__.update(world.__dict__)
        self.started: dict[int, float] = {}
        self.is_over = False
        self._arrivals = {one.job.id: one for one in arrivals}
        self._ends: dict[int, float | None] = {}
        self._left_s: dict[int, float | None] = {}
        self._awake: dict[int, tuple[Allocation, ...]] = {}
        self._victims: set[int] = set()
        self._queued_at: dict[int, float] = {}
        # Of those that run now, it is only known what they hold.
        self._requeued = set()
        self._keys = {job_id: class_key_of(pieces) for job_id, pieces in self.running.items()}
        for job_id, pieces in self.running.items():
            first = pieces[0]
            limit_at = first.expected_end_at
            if first.is_stopping or (limit_at is not None and limit_at <= self.now):
                self._ends[job_id] = self.now if limit_at is None else max(self.now, limit_at)
                continue
            limit_s = None if limit_at is None else limit_at - first.start_at
            length_s = lasts_s(job_id, limit_s, self.now - first.start_at)
            end_at = None if length_s is None else max(self.now, first.start_at + length_s)
            if first.is_suspended:
                self._left_s[job_id] = None if end_at is None else end_at - self.now
                self._awake[job_id] = tuple(
                    replace(one, cpus=one.cpus + one.suspended_cpus, suspended_cpus=0.0, is_suspended=False)
                    for one in pieces
                )
                self._suspended_at[job_id] = self.now
            else:
                self._ends[job_id] = end_at

    def play(self, planner: Planner) -> Mapping[int, float]:
        """The first start of each job from now on, as this planner has it; it is told of all that happens."""
        is_first = True
        self._may_change = bool(planner.state.odd_runs) or not planner.state.can_never_preempt or self.has(FILLERS)
        for _ in range(PLANS):
            plan = planner.plan(self.now)
            for start in plan.starts:
                key = self.waiting[start.job_id][0]
                length_s = lasts_s(start.job_id, key.time_limit_s, 0.0)
                self._ends[start.job_id] = None if length_s is None else self.now + length_s
                self.started.setdefault(start.job_id, self.now)
            self._queued_at.update((start.job_id, self.waiting[start.job_id][1].queued_at) for start in plan.starts)
            was_still = any(self._suspended_at[one.job_id] < self.now for one in plan.resumes)
            self.carry_out(plan, Random(0))
            self._tell(planner)
            if is_first and planner.state.has_ceilings:
                self.settings = replace(self.settings, ceiling=forecast._no_ceiling(self.settings))
                self.tell("SettingsChanged", self.settings)
            is_first = False
            moves = was_still or any(one.mode == PreemptMode.SUSPEND for one in plan.preempts)
            if not (self._leave_late(self.now, is_last_call=True) or moves) and not self._move_on():
                self.is_over = True
                break
            self._tell(planner)
        return self.started

    def _tell(self, planner: Planner) -> None:
        if not self._may_change:
            # Nothing is charged again, so that the planner itself counts what was used.
            self.events = [one for one in self.events if one[0] != "UsageCharged"]
            for name, what in self.events:
                if name == "RunEnded":
                    planner.state.run_ended(what[0])
            self.events = [one for one in self.events if one[0] != "RunEnded"]
        apply_events(planner, self)

    def _move_on(self) -> bool:
        instants = [at for at in self._ends.values() if at is not None]
        instants += [one.at for one in self._arrivals.values()]
        instants += [at for one in self.windows for at in (one.start_at, one.end_at) if at > self.now]
        instants += [at for key, _ in self.waiting.values() if (at := last_start_at(key)) < inf]
        if self._may_change:
            instants += [at for job_id in self.running if (at := self._safe_until(job_id)) > self.now]
        if not instants:
            return False
        self.now = max(self.now, min(instants))
        for job_id in sorted(job_id for job_id, at in self._ends.items() if at is not None and at <= self.now):
            self._end(job_id)
        for job_id in sorted(job_id for job_id, one in self._arrivals.items() if one.at <= self.now):
            one = self._arrivals.pop(job_id)
            self._queue(one.key, one.job)
        self._leave_late(self.now)
        if self.windows:
            self.windows = tuple(one for one in self.windows if one.end_at > self.now)
            self.tell("WindowsChanged", self.windows)
        return True

    def _safe_until(self, job_id: int) -> float:
        first = self.running[job_id][0]
        qos = self.settings.qos.get(first.terms.qos)
        safe_s = self.settings.preempt.min_run_s if qos is None or qos.min_run_s is None else qos.min_run_s
        return first.start_at + safe_s

    def _leave_late(self, now: float, *, is_last_call: bool = False) -> bool:
        """Let those leave that miss their deadline. Args: is_last_call: that is, their last start is now."""
        late = {
            job_id
            for job_id, (key, _) in self.waiting.items()
            if last_start_at(key) < now or (is_last_call and last_start_at(key) == now)
        }
        for job_id in sorted(late):
            if job_id in self.waiting:
                self._leave(job_id)
        return bool(late)

    # --- what the daemon does, where the world has it simpler -----------------------------------------

    def _end(self, job_id: int) -> None:
        del self._ends[job_id]
        first, was_used, count = self.running[job_id][0], dict(self.usage), len(self.events)
        comes_back = job_id in self._requeued
        self._requeued.discard(job_id)
        key = self._keys[job_id]
        super()._end(job_id)
        if job_id in self._victims:
            # What a run has lost to others is not charged.
            self.usage, self.events[count:] = was_used, [one for one in self.events[count:] if one[0] == "RunEnded"]
        self._victims.discard(job_id)
        if comes_back:
            queued_at = self._queued_at.get(job_id, first.start_at)
            self._queue(replace(key, is_front=True), PendingJob(job_id, queued_at))

    def _stop(self, job_id: int) -> None:
        gone_at, end_at = self.now + self.running[job_id][0].grace_s, self._ends[job_id]
        self._ends[job_id] = gone_at if end_at is None else min(end_at, gone_at)
        self._victims.add(job_id)
        self._change_run(job_id, is_stopping=True, expected_end_at=gone_at)

    def _suspend(self, job_id: int) -> None:
        end_at = self._ends.pop(job_id)
        self._left_s[job_id] = None if end_at is None else end_at - self.now
        self._awake[job_id], self._suspended_at[job_id] = self.running[job_id], self.now
        cpus = self.running[job_id][0].cpus
        self._change_run(job_id, cpus=0.0, suspended_cpus=cpus, is_suspended=True, expected_end_at=None)

    def _resume(self, job_id: int) -> None:
        by_s, left_s = self.now - self._suspended_at.pop(job_id), self._left_s.pop(job_id)
        self._ends[job_id] = None if left_s is None else self.now + left_s
        self.running[job_id] = tuple(
            replace(
                one,
                start_at=one.start_at + by_s,
                expected_end_at=None if one.expected_end_at is None else one.expected_end_at + by_s,
                predicted_end_at=None if one.predicted_end_at is None else one.predicted_end_at + by_s,
            )
            for one in self._awake.pop(job_id)
        )
        self._change_run(job_id)


def last_start_at(key: ClassKey) -> float:
    """The last start that meets the deadline of a job."""
    return inf if key.deadline_at is None else key.deadline_at - (key.time_limit_s or 0)


def told_otherwise(story: Story) -> str | None:
    """What a fork of the planner makes of the present of a story, where that is not what happens."""
    features = story.features - {"starts that fail", "node changes", "setting changes"}
    world = World(replace(story, features=features))
    world.settings = replace(world.settings, life=replace(world.settings.life, grace_s=GRACE_S))
    planner = planner_of(world)
    for number in story.steps:
        dice = world.step(number)
        apply_events(planner, world)
        world.carry_out(planner.plan(world.now), dice)
        apply_events(planner, world)
    arrivals = some_arrivals_of(world)
    truth = Truth(world, arrivals)
    future = Future(planner.fork(), world.now, lasts_s, arrivals)
    wanted = [*world.waiting, *(one.job.id for one in arrivals), *world.running]
    told = future.play(wanted, PLANS)
    happens = truth.play(planner)
    different = {job_id: (told.get(job_id), happens.get(job_id)) for job_id in {**told, **happens}}
    # Only what happens until the first of them has made all its plans.
    until = inf if future._is_over and truth.is_over else min(future.now, truth.now)
    different = {
        job_id: pair
        for job_id, pair in different.items()
        if pair[0] != pair[1] and min(at for at in pair if at is not None) < until
    }
    return str(dict(sorted(different.items()))) if different else None


def some_arrivals_of(world: World) -> list[Arrival]:
    """Jobs that become eligible later."""
    dice = world.dice("arrivals")
    kinds = [dice.choice(world._kinds) for _ in range(dice.randint(0, 3))]
    found = []
    for number, key in enumerate(kinds):
        at = world.now + dice.choice([1.0, 10.0, 100.0])
        found.append(Arrival(at, key, PendingJob(world._last + 1 + number, at)))
    return found


@given(seed=st.integers(0, 1 << 32))
def test_the_future_is_what_then_happens(seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecast, "TOGETHER", 0.0)
        patch.setattr(forecast, "SWIFTER", 1)
        story = story_of(seed, most_steps=8)
        if told_otherwise(story) is not None:
            story = shrunk(story, lambda one: told_otherwise(one) is not None)
            pytest.fail(f"{sorted(story.features)}, {story.seed}, {story.steps}: {told_otherwise(story)}")


# --- answers do not depend on earlier questions -----------------------------------------------------


def drawn(cluster, dice):
    """A planner, its random settings, and the last instant that it planned."""
    chosen = some_settings(dice)
    planner = Planner(PlannerState(CLUSTERS[cluster], chosen))
    now, last = NOW, 0
    for _ in range(dice.randint(1, 5)):
        now += dice.choice([0.0, 1.0, 5.0])
        for _ in range(dice.randint(0, 6)):
            last += 1
            number = dice.randrange(3)
            limit_s = dice.choice([2, 5, 10, 30, None])
            key = ClassKey(JobTerms(1000 + number, f"u{number}", "", "default", request=some_request(dice)), 0, limit_s)
            planner.state.job_queued(planner.state.class_of_key(key), now, last)
        planner.schedule(now)
    return planner, chosen, now


def some_arrivals(dice, snapshot):
    """Jobs that become eligible by time, and jobs that follow pending ones or each other."""
    waiting = [job.id for one in snapshot.pending for job in one.jobs]
    arrivals, last = [], max(waiting, default=0) + 1000
    for _ in range(dice.randint(0, 4)):
        last += 1
        key = ClassKey(JobTerms(1000, "u0", "", "default", request=some_request(dice)), 0, dice.choice([2, 10, None]))
        at = snapshot.now + dice.choice([0.0, 3.0, 20.0])
        parents = [*waiting, *(one.job.id for one in arrivals)]
        if parents and dice.random() < 0.5:
            kind = dice.choice(["afterok", "after", "afterany", "after+1"])
            parent = dice.choice(parents)
            text = f"after:{parent}+1" if kind == "after+1" else f"{kind}:{parent}"
            known = {parent: Parent(JobState.PENDING)}
            arrivals.append(Arrival(at, key, PendingJob(last, at), parse_dependency(text), known))
        else:
            arrivals.append(Arrival(at, key, PendingJob(last, at)))
    return arrivals


@pytest.mark.parametrize("cluster", CLUSTERS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=12)
def test_a_shared_forecast_answers_as_a_new_one(cluster, seed):
    dice = Random(seed)
    planner, chosen, now = drawn(cluster, dice)
    snapshot = planner.state.snapshot(now, dice.choice([None, 2]))
    arrivals = some_arrivals(dice, snapshot)
    wanted = [job.id for waiting in snapshot.pending for job in waiting.jobs] + [one.job.id for one in arrivals]
    known = {job_id: Prediction(1.0, 2.0, 5.0, 9) for job_id in wanted if dice.random() < 0.3}
    loaded = Planner.from_snapshot(snapshot, chosen)
    shared = StartForecast(snapshot, chosen, known.get, arrivals, planner=loaded)
    dice.shuffle(wanted)
    for job_id in wanted:
        fresh = StartForecast(snapshot, chosen, known.get, arrivals).ranges([job_id])
        assert shared.ranges([job_id]) == fresh
    # The planner that all of them share is left as it was.
    assert loaded.state.snapshot(now) == PlannerState.from_snapshot(snapshot, chosen).snapshot(now)
