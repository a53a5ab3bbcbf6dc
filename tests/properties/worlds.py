"""Generated clusters, settings and stories of events, for properties of what plans cycle after cycle.

A story is a set of features, a seed, and one number for each step, all drawn from one number: hundreds of draws by
Hypothesis would take minutes to shrink, and many would be alike. Each feature and step draws from a generator of its
own, so that the rest of a story stays what it is without it: `shrunk` leaves out those that a failure does not need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from math import inf
from random import Random
from typing import Any

from bundles import laid_out

from gpusched import testing
from gpusched.model.cluster import Allocation, HostSample, JobTerms, NodeView
from gpusched.model.job import Request
from gpusched.model.planner_settings import (
    ORDERS,
    STRATEGIES,
    CeilingSettings,
    OversubscribeSettings,
    PlacementSettings,
    PreemptSettings,
    PrioritySettings,
)
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.model.resources import NOTHING
from gpusched.model.settings import LimitSettings, Settings
from gpusched.model.snapshot import (
    Budget,
    ClassKey,
    PendingClass,
    PendingJob,
    Placement,
    Plan,
    PreemptMode,
    Snapshot,
    Urgency,
    Usage,
    Window,
)
from gpusched.model.value import Value, replace
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.plugins import Extensions
from gpusched.scheduler.usage import charged, footprint
from gpusched.testing import NOW

CLUSTER = (
    *("several nodes", "large nodes", "unlike cards", "links", "host memory", "MIG instances", "labels"),
    *("custom resources", "measured load", "faults"),
)
CHOICES = (
    *("order", "weights", "periods", "short max wait", "no backfill", "backfill depth", "one place"),
    *("patience", "short fences", "fair-share steps"),
    *("shortest first", "backfill by prediction", "strategy", "ceilings", "oversubscription", "licenses"),
    *("queues", "guarantees", "maxima", "queue orders", "queue tree", "cells", "per-user limits"),
    *("QOS", "QOS limits", "accounts", "no preemption", "suspension", "no reclaim"),
    *("calendar", "filter plug-in", "score plug-in", "sort plug-in", "permit plug-in"),
)
JOBS = (
    *("gangs", "slices", "fractions", "exclusive nodes", "constraints", "node lists", "array throttles"),
    *("predictions", "plans", "deadlines", "urgent dependents", "no time limits", "types of cards"),
)
EVENTS = (
    *("jobs leave", "starts that fail", "expected ends", "stops", "checkpoints", "node changes"),
    *("setting changes", "class changes", "long pauses"),
)
FILLERS = "spent budgets"
ARRAYS = "arrays"
FEATURES = (*CLUSTER, *CHOICES, *JOBS, *EVENTS, FILLERS, ARRAYS)

RESTRAINTS = frozenset({"no reclaim", "no backfill", "ceilings", "MIG instances", "faults", "cells"})
"""Features that keep others from showing; drawn half as often."""

FOUNDATIONS = frozenset({"queues", "QOS", "several nodes", "suspension", "no time limits"})
"""Features that others build on; drawn twice as often."""

USERS = ("ann", "bob", "eve")
QUEUES = ("default", "vision", "nlp", "free")
GRACE_S = 3.0

Event = tuple[str, tuple[Any, ...]]
"""Name of an event of the planner, and what it says."""


class Story(Value):
    """What a world is made of and what happens in it."""

    features: frozenset[str]
    seed: int
    steps: tuple[int, ...]


def story_of(seed: int, most_steps: int = 30) -> Story:
    """A story with few features, with many, or with most."""
    dice = Random(seed)
    odds = dice.choice([0.1, 0.2, 0.35, 0.6])
    features = frozenset(
        name
        for name in FEATURES
        if name not in (FILLERS, ARRAYS)
        and dice.random() < odds * (0.5 if name in RESTRAINTS else 2 if name in FOUNDATIONS else 1)
    )
    # From dice of its own, so that the stories of recorded seeds stay what they are.
    features |= {name for name in (FILLERS, ARRAYS) if Random(f"{seed} {name}").random() < odds}
    if "suspension" in features:
        features = features - {"no preemption"} | {"QOS"}
    return Story(features, dice.randrange(1 << 16), tuple(range(dice.randint(5, most_steps))))


def shrunk(story: Story, fails: Callable[[Story], bool]) -> Story:
    """A story that fails too, from which no feature and no step can be left out."""
    steps = story.steps
    while len(steps) > 1 and fails(replace(story, steps=steps[:-1])):
        steps = steps[:-1]
    story, before = replace(story, steps=steps), None
    while story != before:
        before = story
        for name in sorted(story.features):
            less = replace(story, features=story.features - {name})
            story = less if fails(less) else story
        for number in story.steps:
            less = replace(story, steps=tuple(other for other in story.steps if other != number))
            story = less if less.steps and fails(less) else story
    return story


class World:
    """The truth that a planner is to follow, kept by the simplest means; `events` says what has changed."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.now = NOW
        self.settings = settings_of(story)
        self.extensions = extensions_of(story)
        self.nodes = nodes_of(story)
        self.waiting: dict[int, tuple[ClassKey, PendingJob]] = {}
        self.running: dict[int, tuple[Allocation, ...]] = {}
        self.usage: dict[tuple[str, str], Usage] = {}
        self.windows: tuple[Window, ...] = ()
        self.events: list[Event] = []
        self.seen: Counter[str] = Counter(story.features)
        """How often each feature has come up, also of plans and events."""
        self._keys: dict[int, ClassKey] = {}
        """Of running jobs."""
        self._array_of: dict[int, int] = {}
        """Of tasks without a row."""
        self._requeued: set[int] = set()
        """Victims that wait again when they have ended."""
        self._suspended_at: dict[int, float] = {}
        self._last = 0
        dice = self.dice("kinds")
        self._kinds = [self._some_key(dice) for _ in range(dice.randint(1, 6))]
        if self.has("calendar"):
            self._keep_windows(self.dice("calendar"))

    def has(self, feature: str) -> bool:
        """Whether the story has this feature."""
        return feature in self.story.features

    def dice(self, feature: str) -> Random:
        """The generator of one feature."""
        return Random(f"{self.story.seed} {feature}")

    def tell(self, name: str, *what: Any) -> None:
        """Record an event."""
        self.seen[name] += 1
        self.events.append((name, what))

    def take_events(self) -> list[Event]:
        """What has changed since this was last asked."""
        taken, self.events = self.events, []
        return taken

    def snapshot(self) -> Snapshot:
        """All of it, as the policy wants it."""
        classes: dict[ClassKey, list[PendingJob]] = {}
        for key, job in sorted(self.waiting.values(), key=lambda one: (one[1].queued_at, one[1].id)):
            classes.setdefault(key, []).append(job)
        return Snapshot(
            self.now,
            self.nodes,
            tuple(held for _, pieces in sorted(self.running.items()) for held in pieces),
            tuple(PendingClass(key, tuple(jobs), len(jobs)) for key, jobs in classes.items()),
            tuple(usage for _, usage in sorted(self.usage.items())),
            self.windows,
            budgets=self.budgets,
        )

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """That of bob is spent."""
        spent = (("bob", 1e9, 0.0),)
        made = Budget("lab", ("", "lab", "vision"), user_gpu_s=1e9, spent=spent, when_spent="filler")
        return (made,) if self.has(FILLERS) else ()

    # --- one step -------------------------------------------------------------------------------

    def step(self, number: int) -> Random:
        """Let time pass and things happen. Returns the generator of the step, for what follows."""
        dice = self.dice(f"step {number}")
        pauses = [0.0, 0.0, 1.0, 1.0, 5.0, 5.0, 20.0]
        self.now += dice.choice([*pauses, 61.0, 400.0, 90_000.0] if self.has("long pauses") else pauses)
        self._end_runs(dice)
        for feature, happen, odds in (
            ("jobs leave", self._let_one_leave, 0.3),
            ("expected ends", self._expect_ends, 0.5),
            ("stops", self._stop_one, 0.2),
            ("checkpoints", self._checkpoint_one, 0.3),
            ("measured load", self._measure_loads, 0.5),
            ("node changes", self._change_a_node, 0.3),
            ("calendar", self._keep_windows, 0.3),
            ("setting changes", self._change_settings, 0.15),
            ("class changes", self._change_a_class, 0.3),
        ):
            if self.has(feature) and dice.random() < odds:
                happen(dice)
        for _ in range(dice.choice([0, 1, 2, 3, 5])):
            if dice.random() < 0.15:
                self._kinds[dice.randrange(len(self._kinds))] = self._some_key(dice)
            self._last += 1
            key = dice.choice(self._kinds)
            if self.has("QOS") and dice.random() < 0.15:
                # Few enough that others run when they come.
                key = replace(key, terms=replace(key.terms, qos="high"))
            self._queue(key, PendingJob(self._last, self.now - dice.choice([0.0, 0.0, 7.0, 100.0])))
        if self.has(ARRAYS):
            self._submit_array(self.dice(f"array {number}"))
        return dice

    def _submit_array(self, dice: Random) -> None:
        if dice.random() < 0.5:
            return
        self._last += 1
        array_id, queued_at = self._last, self.now - dice.choice([0.0, 0.0, 7.0])
        for _ in range(dice.choice([1, 3, 8, 20])):
            self._last += 1
            self._array_of[self._last] = array_id
        self._queue_tasks(array_id, dice.choice(self._kinds), queued_at)

    def _queue_tasks(self, array_id: int, key: ClassKey, queued_at: float) -> None:
        """Queue the tasks of an array that have no row, in this class from now on."""
        ids = [job_id for job_id, of in self._array_of.items() if of == array_id]
        for job_id in ids:
            fence_at = self.waiting[job_id][1].fence_at if job_id in self.waiting else None
            self.waiting[job_id] = key, PendingJob(job_id, queued_at, fence_at)
        ranges: list[range] = []
        for job_id in ids:
            first = ranges.pop().start if ranges and ranges[-1].stop == job_id else job_id
            ranges.append(range(first, job_id + 1))
        self.tell("TasksQueued", array_id, key, queued_at, tuple(ranges))
        for job_id in ids:
            if (fence_at := self.waiting[job_id][1].fence_at) is not None:
                self.tell("JobFenced", job_id, fence_at)

    def carry_out(self, plan: Plan, dice: Random) -> None:
        """What the daemon does with a plan; some of its starts may fail."""
        self.seen.update({"starts": len(plan.starts), "preempts": len(plan.preempts), "resumes": len(plan.resumes)})
        self.seen.update(
            {"reserved": len(plan.reservations), "suspended": sum(one.mode == "suspend" for one in plan.preempts)}
        )
        for start in plan.starts:
            if self.has("starts that fail") and dice.random() < 0.2:
                self.seen["failed"] += 1
                continue
            key, job = self.waiting.pop(start.job_id)
            self._keys[start.job_id] = key
            held = _held_by(key, start.job_id, start.placement, self.now)
            pieces = tuple(replace(one, is_filler=start.is_filler) for one in held)
            if start.job_id in self._array_of and key.throttle is None:
                pieces = tuple(replace(one, array_id=self._array_of[start.job_id]) for one in pieces)
            self.running[start.job_id] = pieces
            self.seen["fillers"] += start.is_filler
            self.tell("RunStarted", start.job_id, key, start.placement, pieces)
            self._split(key, job)
        for one in plan.preempts:
            if one.mode == PreemptMode.SUSPEND:
                self._suspend(one.job_id)
            else:
                if one.mode == PreemptMode.REQUEUE:
                    self._requeued.add(one.job_id)
                self._stop(one.job_id)
        for resumed in plan.resumes:
            self._resume(resumed.job_id)
        self._fence(plan)

    # --- what happens ---------------------------------------------------------------------------

    def _fence(self, plan: Plan) -> None:
        """Keep the fences of those that have a reservation."""
        for one in plan.reservations:
            found = self.waiting.get(one.job_id)
            if found is not None and one.fence_at is not None and found[1].fence_at != one.fence_at:
                self.waiting[one.job_id] = found[0], replace(found[1], fence_at=one.fence_at)
                self.tell("JobFenced", one.job_id, one.fence_at)
            self.seen["passed fences"] += one.fence_at is not None and one.fence_at <= self.now

    def _queue(self, key: ClassKey, job: PendingJob) -> None:
        self.waiting[job.id] = key, job
        self.tell("JobQueued", key, job)

    def _leave(self, job_id: int) -> tuple[ClassKey, PendingJob]:
        found = self.waiting.pop(job_id)
        if not self._split(*found):
            self.tell("JobLeft", job_id)
        return found

    def _split(self, key: ClassKey, task: PendingJob) -> bool:
        """Tell of the rest of an array of which this task is no longer a part; False for any other job."""
        array_id = self._array_of.pop(task.id, None)
        if array_id is not None:
            self._queue_tasks(array_id, key, task.queued_at)
        return array_id is not None

    def _let_one_leave(self, dice: Random) -> None:
        if self.waiting:
            self._leave(dice.choice(sorted(self.waiting)))

    def _change_a_class(self, dice: Random) -> None:
        """Something else is learned of the jobs of a class, or its owner changes them."""
        if not self.waiting:
            return
        key, _ = self.waiting[dice.choice(sorted(self.waiting))]
        predicted_s = dice.choice([None, 1, 4, 12])
        changed = replace(key, predicted_s=predicted_s, nice=dice.choice([key.nice, key.nice, 5]))
        for job_id, (own, job) in sorted(self.waiting.items()):
            if own == key and job_id not in self._array_of:
                self._leave(job_id)
                self._queue(changed, job)
        for array_id in sorted(set(self._array_of.values())):
            own, job = next(self.waiting[one] for one, of in self._array_of.items() if of == array_id)
            if own == key:
                throttle = dice.choice([key.throttle, None, (array_id, 1), (array_id, 3)])
                self._queue_tasks(array_id, replace(changed, throttle=throttle), job.queued_at)

    def _end_runs(self, dice: Random) -> None:
        for job_id, pieces in sorted(self.running.items()):
            end_at = pieces[0].expected_end_at
            is_due = end_at is not None and end_at <= self.now
            is_still = pieces[0].is_suspended
            if dice.random() < (0.75 if is_due else 0.3 if pieces[0].is_stopping else 0.03 if is_still else 0.12):
                self._end(job_id)

    def _end(self, job_id: int) -> None:
        pieces = self.running.pop(job_id)
        self.tell("RunEnded", job_id)
        layout, rate, first = ClusterLayout(self.nodes, self.settings), NOTHING, pieces[0]
        for held in pieces:
            booking = layout.booking(held.terms.uid, held)
            rate = rate if booking is None else rate + footprint(layout, booking)
        qos = self.settings.qos.get(first.terms.qos)
        mark, half_life_s = (first.terms.account, first.terms.user), self.settings.priority.half_life_s
        factor = 0.0 if first.is_filler else 1.0 if qos is None else qos.usage_factor
        usage = charged(self.usage.get(mark), *mark, rate, first.start_at, self.now, self.now, half_life_s, factor)
        self.usage[mark] = usage
        self.tell("UsageCharged", usage)
        key = self._keys.pop(job_id)
        if job_id in self._requeued:
            self._requeued.remove(job_id)
            self._queue(replace(key, is_front=True), PendingJob(job_id, first.start_at))

    def _change_run(self, job_id: int, **parts: Any) -> None:
        pieces = self.running[job_id] = tuple(replace(held, **parts) for held in self.running[job_id])
        self.tell("RunChanged", job_id, pieces)

    def _expect_ends(self, dice: Random) -> None:
        for job_id, pieces in sorted(self.running.items()):
            if dice.random() < 0.4 and not (pieces[0].is_stopping or pieces[0].is_suspended):
                ends_at = [self.now + 3.0, self.now + 30.0, None]
                self._change_run(job_id, predicted_end_at=dice.choice(ends_at), reported_end_at=dice.choice(ends_at))

    def _stop_one(self, dice: Random) -> None:
        if self.running:
            self._stop(dice.choice(sorted(self.running)))

    def _stop(self, job_id: int) -> None:
        first = self.running[job_id][0]
        ends_at = self.now + first.grace_s
        if not first.is_stopping:
            self._change_run(
                job_id, is_stopping=True, predicted_end_at=None, reported_end_at=None, expected_end_at=ends_at
            )

    def _checkpoint_one(self, dice: Random) -> None:
        if self.running:
            self._change_run(dice.choice(sorted(self.running)), checkpoint_at=self.now)

    def _suspend(self, job_id: int) -> None:
        held = self.running[job_id][0]
        self._suspended_at[job_id] = self.now
        self._change_run(
            *(job_id,),
            cpus=0.0,
            suspended_cpus=held.cpus,
            is_suspended=True,
            expected_end_at=None,
            predicted_end_at=None,
            reported_end_at=None,
        )

    def _resume(self, job_id: int) -> None:
        held, key = self.running[job_id][0], self._keys[job_id]
        start_at = held.start_at + self.now - self._suspended_at.pop(job_id)
        self._change_run(
            job_id,
            cpus=held.suspended_cpus,
            suspended_cpus=0.0,
            is_suspended=False,
            start_at=start_at,
            expected_end_at=None if key.time_limit_s is None else start_at + key.time_limit_s,
        )

    def _measure_loads(self, dice: Random) -> None:
        self._put_nodes(replace(node, load=_some_load(dice, node, self.now)) for node in self.nodes)

    def _change_a_node(self, dice: Random) -> None:
        number = dice.randrange(len(self.nodes))
        node = self.nodes[number]
        if node.why_not or node.gpu_error:
            changed = replace(node, why_not=None, gpu_error=None)
        elif dice.random() < 0.2:
            changed = replace(node, **dice.choice([{"why_not": "drained"}, {"gpu_error": "no driver"}]))
        else:
            index = dice.randrange(len(node.gpus))
            well = {"is_present": True, "why_not": None, "why_not_whole": None, "foreign_mib": 0, "over_mib": 0}
            parts = dice.choice(
                [
                    *(well, well, well),
                    {"is_present": False, "why_not": "lost"},
                    {"why_not": "drained"},
                    {"foreign_mib": 9000, "why_not_whole": "in foreign use"},
                    {"over_mib": 5000},
                    {"utilisation": dice.choice([None, 0.1, 0.95])},
                ]
            )
            cards = (*node.gpus[:index], replace(node.gpus[index], **parts), *node.gpus[index + 1 :])
            changed = replace(node, gpus=cards)
        self._put_nodes((*self.nodes[:number], changed, *self.nodes[number + 1 :]))

    def _put_nodes(self, nodes: Iterable[NodeView]) -> None:
        self.nodes = tuple(nodes)
        self.tell("NodesChanged", self.nodes)

    def _keep_windows(self, dice: Random) -> None:
        """Open a window, forget one or those that are over."""
        windows = [one for one in self.windows if one.end_at > self.now or dice.random() < 0.3]
        if windows and dice.random() < 0.3:
            windows.remove(dice.choice(windows))
        name = dice.choice(["course", "repair", "night"])
        start_at = self.now + dice.choice([0.0, 5.0, 20.0, 100.0])
        end_at = start_at + dice.choice([5.0, 30.0, 300.0])
        if not any(one.name == name and start_at < one.end_at and one.start_at < end_at for one in windows):
            users = () if name == "repair" else (dice.choice(USERS),)
            accounts = ("lab",) if name == "course" else ()
            windows.append(Window(name, start_at, end_at, self._some_places(dice), users, accounts))
        self.windows = tuple(sorted(windows, key=lambda one: (one.start_at, one.name)))
        self.tell("WindowsChanged", self.windows)

    def _some_places(self, dice: Random) -> tuple[Placement, ...]:
        found = []
        for node in dice.sample(self.nodes, dice.randint(1, len(self.nodes))):
            cards = dice.sample(node.gpus, dice.randint(0, len(node.gpus)))
            shares = tuple(testing.share(card.index, node.name) for card in sorted(cards, key=lambda card: card.index))
            found.append(
                Placement(node.name, shares, float(dice.randint(0 if shares else 1, 3)), dice.choice([0, 4096]))
            )
        return tuple(sorted(found, key=lambda place: place.node))

    def _change_settings(self, dice: Random) -> None:
        """Other settings of the same features, but for what may be booked, which is held by then."""
        features = frozenset(name for name in self.story.features if name not in CHOICES or dice.random() < 0.8)
        other = settings_of(Story(features, dice.randrange(1 << 16), ()))
        self.settings = replace(other, oversubscribe=self.settings.oversubscribe, license=self.settings.license)
        self.tell("SettingsChanged", self.settings)

    # --- jobs -----------------------------------------------------------------------------------

    def _some_key(self, dice: Random) -> ClassKey:
        number = dice.randrange(len(USERS))
        limits_s = [1, 5, 10, 30, 30, 300, 300] + ([None] * 4 if self.has("no time limits") else [])
        request = self._some_request(dice)
        has = self._has_now(dice)
        limit_s = dice.choice(limits_s)
        terms = JobTerms(
            uid=1000 + number,
            user=USERS[number],
            account=dice.choice(["", "lab", "vision"]) if self.has("accounts") else "",
            queue=dice.choice([*QUEUES, "free", "free"]) if self.has("queues") else "default",
            qos=dice.choice(["", "low", "low", "low", "low", "safe"]) if self.has("QOS") else "",
            request=request,
            reservation=dice.choice(["course", "night", "gone"]) if has("calendar", 0.15) else None,
            can_requeue=dice.random() < 0.8,
            can_suspend=not request.gpus and not request.is_exclusive,
        )
        return ClassKey(
            terms,
            nice=dice.choice([0, 0, 0, 1, 700]),
            time_limit_s=limit_s,
            deadline_at=self.now + dice.choice([20.0, 200.0]) if has("deadlines", 0.3) else None,
            inherited=Urgency(-100, dice.choice(["", "high"])) if has("urgent dependents", 0.2) else None,
            throttle=(900 + dice.randrange(3), dice.randint(1, 2)) if has("array throttles", 0.3) else None,
            predicted_s=dice.choice([1, 4, 12, 40]) if has("predictions", 0.6) else None,
            plan_s=dice.choice([1, 3, 12]) if limit_s is not None and has("plans", 0.5) else None,
        )

    def _has_now(self, dice: Random) -> Any:
        return lambda feature, odds: dice.random() < odds and self.has(feature)

    def _some_request(self, dice: Random) -> Request:
        has = self._has_now(dice)
        is_gang = has("gangs", 0.3) and len(self.nodes) > 1
        parts: dict[str, Any] = {
            "nodes": dice.randint(2, len(self.nodes)) if is_gang else 1,
            "is_exclusive": has("exclusive nodes", 0.25),
            "constraint": dice.choice(["big", "!big", "big|fast"]) if has("constraints", 0.15) else None,
            "prefer": "fast" if has("constraints", 0.25) else None,
            "exclude": ("n1",) if has("node lists", 0.1) else (),
            "resources": (("scratch", dice.randint(1, 2)),) if has("custom resources", 0.2) else (),
            "licenses": ((dice.choice(["ansys", "matlab"]), 1),) if has("licenses", 0.3) else (),
        }
        if not is_gang and has("node lists", 0.1):
            parts["nodelist"] = ("n0",)
        if is_gang and dice.random() < 0.4:
            return laid_out(dice, len(self.nodes), **{name: part for name, part in parts.items() if name != "nodes"})
        if self.has("suspension") and dice.random() < 0.7:
            return Request(cpus=dice.choice([4.0, 7.0]), **{**parts, "is_exclusive": False})
        if dice.random() < 0.2:
            return Request(
                cpus=dice.choice([0.0, 0.1, 1.0, 4.0, 7.0]), mem_mib=dice.choice([0, 1024, 40 * 1024]), **parts
            )
        parts["cpus"] = dice.choice([0.0, 0.0, 1.0, 2.5])
        parts["gpus"] = dice.randint(1, min(4, max(len(node.gpus) for node in self.nodes)))
        if has("slices", 0.4):
            parts["vram_mib"] = dice.choice([1, 4096, 12_288])
        elif has("fractions", 0.4):
            return Request(**{**parts, "gpus": 1, "gpu_fraction": dice.choice([0.1, 0.5, 1 / 3, 0.9])})
        elif is_gang and parts["gpus"] > 1 and dice.random() < 0.5:
            parts["tail_gpus"] = dice.randint(1, parts["gpus"] - 1)
        if has("types of cards", 0.2):
            parts.update(dice.choice([{"gpu_type": "h100"}, {"gpu_type": "a100"}, {"min_vram_mib": 40_000}]))
        if has("links", 0.2):
            parts["is_linked"] = True
        return Request(**parts)


def _held_by(key: ClassKey, job_id: int, placement: Placement, now: float) -> Iterable[Allocation]:
    """What a run that starts now holds on each of its nodes."""
    planned_s, limit_s = key.planned_s, key.time_limit_s
    for place in (placement, *placement.others):
        yield Allocation(
            job_id,
            key.terms,
            place.node,
            place.gpus,
            place.cpus,
            place.mem_mib,
            now,
            None if limit_s is None else now + limit_s,
            None if planned_s is None or planned_s == limit_s else now + planned_s,
            place.resources,
            place.licenses,
            place.is_exclusive,
            array_id=None if key.throttle is None else key.throttle[0],
            grace_s=GRACE_S,
        )


# --- clusters -----------------------------------------------------------------------------------


def nodes_of(story: Story) -> tuple[NodeView, ...]:
    """One to three nodes."""
    dice = Random(f"{story.seed} nodes")
    count = dice.randint(2, 3) if "several nodes" in story.features else 1
    return tuple(_some_node(story, f"n{number}") for number in range(count))


def _some_node(story: Story, name: str) -> NodeView:
    def rolls(feature: str, odds: float) -> bool:
        return feature in story.features and Random(f"{story.seed} {name} {feature}").random() < odds

    dice = Random(f"{story.seed} {name}")
    count = dice.choice([1, 2, 4, 4, 4] + ([8, 8, 8, 8] if "large nodes" in story.features else []))
    mem_mib = dice.choice([8 * 1024, 64 * 1024])
    of_host = rolls("host memory", 0.4)
    cards = []
    for index in range(count):
        parts: dict[str, Any] = {"vram_total_mib": mem_mib, "has_host_memory": True} if of_host else {}
        if rolls("unlike cards", 0.7) and index % 2 and not of_host:
            parts = {"name": "NVIDIA H100", "vram_total_mib": dice.choice([81_920, 81_920, None])}
        if rolls("links", 0.7):
            parts |= {"link_group": index // 2} if dice.random() < 0.8 else {"numa": index // 2}
        if rolls("faults", 0.5):
            fault = dice.choice(["", "", "", "", "", "", "drained", "foreign", "single", "lost"])
            parts |= {
                "": {},
                "drained": {"why_not": "drained"},
                "foreign": {"foreign_mib": 9000, "why_not_whole": "in foreign use"},
                "single": {"can_share": False},
                "lost": {"is_present": False, "why_not": "lost"},
            }[fault]
        if rolls("MIG instances", 0.5) and not of_host and index == count - 1:
            parts |= {"name": "NVIDIA A100 MIG 2g.20gb", "mig_profile": "2g.20gb", "vram_total_mib": 20_096}
        parts["utilisation"] = dice.choice([None, 0.0, 0.0, 0.9])
        cards.append(testing.gpu_view(index, name, **parts))
    labels = tuple(sorted(label for label in ("big", "fast") if "labels" in story.features and dice.random() < 0.5))
    made = testing.node(name, cards, cpus=dice.choice([7.5, 16.0, 16.0]), mem_mib=mem_mib, labels=labels)
    if "custom resources" in story.features:
        made = replace(made, resources=(("scratch", dice.randint(1, 4)),))
    is_measured = not story.features.isdisjoint({"measured load", "ceilings", "oversubscription", "order"})
    return replace(made, load=_some_load(dice, made, NOW)) if is_measured else made


def _some_load(dice: Random, node: NodeView, now: float) -> HostSample | None:
    busy = dice.choice([None, 0.0, 0.0, 0.0, 0.3, 0.95])
    left_mib = dice.choice([node.mem_mib, node.mem_mib, node.mem_mib // 2, 100])
    at = now - dice.choice([0.0, 4.0])
    made = HostSample(
        at, node.name, int(node.cpus), node.mem_mib, left_mib, busy, dice.choice([None, 1.0, 1.0, 1.0, 90.0]), 1.0
    )
    return made if dice.random() < 0.95 else None


# --- settings -----------------------------------------------------------------------------------


def settings_of(story: Story) -> Settings:
    """The defaults, on a scale of seconds rather than hours, and what the features of the story ask for."""

    def has(feature: str) -> bool:
        return feature in story.features

    def dice(feature: str) -> Random:
        return Random(f"{story.seed} {feature}")

    priority: dict[str, Any] = {"calc_period_s": 7.0, "half_life_s": 1000.0}
    if has("order"):
        priority["order"] = dice("order").choice(ORDERS)
    patience = dice("patience")
    priority |= {
        "reserve_after_s": patience.choice([0.0, 3.0, 25.0]) if has("patience") else 0.0,
        "reserve_after_runs": patience.choice([0.0, 0.001, 0.01]) if has("patience") else 0.0,
    }
    if has("short fences"):
        priority["fence_s"] = dice("short fences").choice([0.5, 3.0, 25.0])
    if has("fair-share steps"):
        priority["fairshare_step"] = dice("fair-share steps").choice([1.0, 1.01, 4.0])
    if has("weights"):
        priority |= _some_weights(dice("weights"))
    if has("periods"):
        rolled = dice("periods")
        priority |= {
            "half_life_s": rolled.choice([0.5, 20.0, 1e9]),
            "calc_period_s": rolled.choice([0.0, 1.0, 60.0]),
        }
    if has("short max wait"):
        rolled = dice("short max wait")
        priority |= {"max_age_s": rolled.choice([inf, 3.0, 25.0]), "max_wait_s": rolled.choice([3.0, 25.0])}
    if has("backfill depth"):
        priority["backfill_depth"] = dice("backfill depth").choice([0, 2, 3, 5, 50])
    priority["backfill"] = not has("no backfill")
    priority["backfill_elsewhere"] = not has("one place")
    priority["backfill_order"] = "shortest" if has("shortest first") else "line"
    priority["backfill_by"] = "prediction" if has("backfill by prediction") else "limit"
    made = Settings(
        priority=PrioritySettings(**priority),
        preempt=PreemptSettings(
            mode="off" if has("no preemption") else "suspend" if has("suspension") else "requeue",
            min_run_s=dice("preempt").choice([0.0, 0.0, 5.0]),
            reclaim=not has("no reclaim"),
        ),
    )
    if has("strategy"):
        made = replace(made, placement=PlacementSettings(dice("strategy").choice(STRATEGIES)))
    if has("ceilings"):
        made = replace(made, ceiling=_some_ceilings(dice("ceilings")))
    if has("oversubscription"):
        rolled = dice("oversubscription")
        over = OversubscribeSettings(*(rolled.choice([1.0, 1.5, 2.0]) for _ in range(3)))
        made = replace(made, oversubscribe=over)
    if has("licenses"):
        made = replace(made, license={"ansys": 1, "matlab": 2})
    if has("per-user limits") and not has("queues"):
        made = replace(made, limit=LimitSettings(running_per_user=dice("per-user limits").randint(1, 3)))
    if has("queues"):
        made = replace(made, queue=_some_queues(story))
    if has("QOS"):
        made = replace(made, qos=_some_qos(dice("QOS"), has("QOS limits")))
    if has("accounts"):
        accounts = AccountSettings("lab", shares=2.0, users={"ann": 3.0}), AccountSettings("vision", parent="lab")
        made = replace(made, account={one.name: one for one in accounts})
    return made


def _some_weights(dice: Random) -> dict[str, Any]:
    return {
        "weight_age": dice.choice([0.0, 1000.0, 1e7]),
        "weight_fairshare": dice.choice([0.0, 100.0, 10_000.0]),
        "weight_size": dice.choice([0.0, 100.0]),
        "weight_fit": dice.choice([0.0, 30.0]),
        "weight_deadline": dice.choice([0.0, 100.0]),
        "weight_short": dice.choice([0.0, 500.0]),
        "weight_whole": dice.choice([0.0, 500.0]),
        "favor_small": dice.random() < 0.3,
    }


def _some_ceilings(dice: Random) -> CeilingSettings:
    return CeilingSettings(
        cpu_fraction=dice.choice([None, 0.5]),
        mem_fraction=dice.choice([None, 0.9]),
        disk_mib_s=dice.choice([None, 50.0]),
        gpu_fraction=dice.choice([None, 0.5]),
    )


def _some_queues(story: Story) -> dict[str, QueueSettings]:
    made = {}
    for name in QUEUES[1:]:
        dice = Random(f"{story.seed} {name}")
        parts: dict[str, Any] = {"factor": dice.choice([0.0, 0.0, 1.0]), "preemptible": dice.random() < 0.85}
        rolled = {feature: dice.random() < 0.7 for feature in CHOICES}

        def has(feature: str, rolled: dict[str, bool] = rolled) -> bool:
            return feature in story.features and rolled[feature]

        guarantee = float(dice.randint(1, 4)), dice.choice([0.0, 0.0, 2.0]), dice.choice([None, 2.0])
        if has("guarantees"):
            parts |= dict(zip(("guaranteed_gpus", "guaranteed_cpus", "weight"), guarantee, strict=True))
        most = dice.choice([None, 2.0, 4.0]), dice.choice([None, 4.0])
        if has("maxima"):
            parts |= dict(zip(("max_gpus", "max_cpus"), most, strict=True))
        users = dice.choice([None, 1.0, 2.0]), dice.choice([None, 1, 2])
        if has("per-user limits"):
            parts |= dict(zip(("max_gpus_per_user", "max_running_per_user"), users, strict=True))
        order, cells = dice.choice(ORDERS), (dice.choice(["2", "2", "1", "n0:2", "4"]),)
        if has("queue orders"):
            parts["order"] = order
        if has("cells"):
            parts["cells"] = cells
        if has("queue tree") and name != "vision":
            parts["parent"] = "vision"
        made[name] = QueueSettings(name, **parts)
    return made


def _some_qos(dice: Random, has_limits: bool) -> dict[str, QosSettings]:
    limits = {"max_gpus": 4.0, "max_gpus_per_user": dice.choice([None, 2.0]), "max_running_per_user": 2}
    made = (
        QosSettings("low", usage_factor=dice.choice([0.0, 1.0, 2.0]), min_run_s=dice.choice([None, None, 0.0, 5.0])),
        QosSettings("high", tier=1, factor=0.5, preempts=("low",), **(limits if has_limits else {})),
        QosSettings("safe", preemptible=False, tier=dice.choice([0, 2])),
    )
    return {one.name: one for one in made}


def extensions_of(story: Story) -> Extensions:
    """Plug-ins with a mind of their own."""

    def filters(key: ClassKey, node: NodeView) -> str | None:
        return "not there" if (key.terms.uid + int(node.name[1:])) % 5 == 2 else None

    def score(key: ClassKey, node: NodeView) -> float:
        return float((7 * key.terms.uid + int(node.name[1:])) % 3)

    def sort(key: ClassKey) -> float:
        return 300.0 * (key.terms.uid % 3)

    def permit(_key: ClassKey, job: PendingJob, place: Placement) -> str | None:
        return "not yet" if (job.id + len(place.gpus)) % 6 == 0 else None

    has = story.features.__contains__
    return Extensions(
        sorts=(("points", sort),) if has("sort plug-in") else (),
        filters=(("places", filters),) if has("filter plug-in") else (),
        scores=(("likes", score),) if has("score plug-in") else (),
        permits=(("gate", permit),) if has("permit plug-in") else (),
    )
