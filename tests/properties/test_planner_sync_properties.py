"""Whatever happens, fails or raises: the daemon's planner plans as one that is made from all that the memory shows."""

from __future__ import annotations

from contextlib import suppress
from itertools import accumulate
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import ANN, ROOT, Lab
from lab_stories import MISHAPS, LabStory
from planners import check_each_plan, check_planner
from worlds import CLUSTER, QUEUES, Story, extensions_of, settings_of, story_of

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.errors import NotReady
from gpusched.model.commands import Reload, Reserve, Submit, Unreserve
from gpusched.model.job import ArraySpec
from gpusched.model.value import replace
from gpusched.model.variants import of_specs
from gpusched.ports.tables import FENCES

_SECTIONS = (
    *("priority", "preempt", "placement", "ceiling", "oversubscribe", "license", "limit", "queue", "qos", "account"),
)


class PlannerStory(LabStory):
    """Settings of all kinds, and whoever changes them while jobs come and go."""

    mishaps = (*[""] * 20, *MISHAPS)

    def __init__(self, dice: Random, patch: pytest.MonkeyPatch) -> None:
        self.story = story_of(dice.randrange(1 << 32))
        super().__init__(dice, patch)
        self.has_singletons = False
        self.fenced = 0
        """Checks at which some job had a fence."""
        if dice.random() < 0.5:
            self.lab.scheduler.extensions = extensions_of(self.story)
        self.lab.config = self.config
        self.plans = check_each_plan(self.lab, patch)

    def make_lab(self) -> Lab:
        return Lab(gpus=2, cpus=4, outcome=SimulatedOutcome(runs_s=3), **self.sections(self.story))

    @staticmethod
    def sections(story: Story) -> dict[str, Any]:
        made = settings_of(Story(story.features.difference(CLUSTER, {"cells"}), story.seed, ()))
        rolled = Random(f"{story.seed} fences")
        if rolled.random() < 0.7:
            # Seconds where a lab has hours: room is reserved soon, fences come, and what is reserved settles.
            fences = {
                "reserve_after_s": rolled.choice([0.0, 0.0, 2.0]),
                "reserve_after_runs": rolled.choice([0.0, 0.0, 0.001]),
                "fence_s": rolled.choice([0.5, 3.0, 20.0]),
            }
            made = replace(made, priority=replace(made.priority, **fences))
        return {name: getattr(made, name) for name in _SECTIONS}

    def config(self) -> Any:
        """What a reload reads: other choices of the same features, or the same once more."""
        if self.dice.random() < 0.3:
            return self.lab.settings
        features = frozenset(one for one in sorted(self.story.features) if self.dice.random() < 0.8)
        other = self.sections(Story(features, self.dice.randrange(1 << 16), ()))
        fixed = {name: getattr(self.lab.settings, name) for name in ("oversubscribe", "license")}
        return replace(self.lab.settings, **{**other, **fixed})

    def submission(self) -> Any:
        dice, made = self.dice, super().submission()
        (spec,) = made.specs
        request, scheduler = spec.request, self.lab.scheduler
        if request.gpus == 1 and dice.random() < 0.4:
            request = replace(request, **dice.choice([{"gpu_fraction": 0.5}, {"vram_mib": 20000}]))
        if dice.random() < 0.2:
            request = replace(request, mem_mib=dice.choice([1000, 30000]))
        if dice.random() < 0.1:
            request = replace(request, is_exclusive=True)
        if scheduler.settings.license and dice.random() < 0.2:
            request = replace(request, licenses=(("ansys", 1),))
        changes: dict[str, Any] = {
            "request": request,
            "qos": dice.choice([*scheduler.settings.qos, ""]),
            "account": dice.choice(["", "", "lab"]),
            "queue": dice.choice(QUEUES) if scheduler.settings.queue else "default",
            "dependency": spec.dependency if dice.random() < 0.4 else None,
            "time_limit_s": spec.time_limit_s or dice.choice([None, None, 2, 30]),
        }
        if dice.random() < 0.05:
            changes["array"] = ArraySpec("0-9999", dice.choice([None, 3]), None)
        if dice.random() < 0.1:
            changes["reservation"] = "course"
        spec = replace(spec, **changes)
        if dice.random() < 0.3:
            cores = {"cpus": 1.0, "gpus": 0, "gpu_fraction": None, "vram_mib": None}
            others = [cores, {"cpus": 3.0}, {"mem_mib": 20000}]
            specs = [
                replace(spec, request=replace(request, **other), time_limit_s=dice.choice([None, 2, 30]))
                for other in dice.sample(others, dice.choice([1, 2]))
            ]
            spec = of_specs([spec, *specs], [()] * (len(specs) + 1))
        return Submit(made.caller, [spec], made.payloads)

    def command(self) -> Any:
        dice, now = self.dice, self.lab.clock.now()
        kind = dice.random()
        if kind < 0.05:
            return Reload(ROOT)
        if kind < 0.12:
            amounts = dice.choice([{"gpus": 1}, {"is_node": True, "is_maintenance": True}, {"cpus": 2.0}])
            who = {} if amounts.get("is_maintenance") else {"users": (ANN.user,)}
            start_at = now + dice.choice([0, 2, 20])
            name = dice.choice(["course", "repair"])
            return Reserve(ROOT, name, start_at, dice.choice([2, 60]), ignore_jobs=True, **amounts, **who)
        if kind < 0.15:
            return Unreserve(ROOT, (dice.choice(["course", "repair"]),))
        if kind < 0.5:
            return self.submission()
        return super().command()

    def tick(self) -> None:
        dice, scheduler = self.dice, self.lab.scheduler
        if dice.random() < 0.2:
            # The next one finds the readings too old to start anything on GPUs by them.
            scheduler.head.read_at = float("-inf")
            self.lab.clock.advance(dice.choice([0.0, 20.0]))
            for _ in range(dice.choice([1, 2])):
                self.submit(self.command())
                self.lab.ticker.tick()
            self.check()
        if dice.random() < 0.1:
            scheduler.state.note_checkpoints(dict.fromkeys(scheduler.state.open_runs, self.lab.clock.now()))
        if dice.random() < 0.1:
            scheduler.history.load()
        if dice.random() < 0.05:
            self.lab.lost ^= {1}
        super().tick()

    def check(self) -> None:
        check_planner(self.lab)
        self.fenced += bool(self.lab.scheduler.state.rows[FENCES])
        with suppress(NotReady):
            assert self.lab.ticker.check_planner() == []


def play(seed: int, turns: int) -> PlannerStory:
    with pytest.MonkeyPatch.context() as patch:
        story = PlannerStory(Random(seed), patch)
        story.play(turns)
        return story


def test_stories_contain_fences() -> None:
    fenced = accumulate(play(seed, 40).fenced for seed in range(6))
    assert any(count > 3 for count in fenced)


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=8, deadline=None)
def test_the_planner_equals_one_made_from_memory(seed: int) -> None:
    play(seed, 40)


@pytest.mark.nightly
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=1000, deadline=None)
def test_the_planner_equals_one_made_from_memory_nightly(seed: int) -> None:
    play(seed, 80)
