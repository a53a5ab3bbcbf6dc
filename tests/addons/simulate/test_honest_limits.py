"""What false, careless and careful time limits gain, on a machine with a little more work than it can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import pytest

from gpusched.addons.simulate import cluster
from gpusched.addons.simulate.event_loop import play
from gpusched.addons.simulate.planner_run import PlannerRun
from gpusched.addons.simulate.policies import Policy, policies_of
from gpusched.addons.simulate.trace import CUT, TraceJob
from gpusched.model.value import replace

HOUR_S, SLICE_S = 3600, 600
PROCS = 8
DAYS = 10
SEEDS = 2


class Resubmitting(PlannerRun):
    """Submits a job as another one ends."""

    def __init__(self, jobs: Sequence[TraceJob], then: Mapping[int, int], policy: Policy) -> None:
        super().__init__(jobs, cluster.processors(PROCS), policy.settings, predict=policy.predict)
        self._then = then
        self.ends_s: dict[int, int] = {}

    def end(self, job_id: int) -> None:
        """A run is over."""
        super().end(job_id)
        number = job_id - 1
        self.ends_s[number] = self._now
        if number in self._then:
            self.arrive(self._then[number])


def crowd(dice: Random, *, load: float = 1.1) -> list[TraceJob]:
    """Jobs of many who each state three times what their job takes."""
    jobs, at = [], 0.0
    while at < DAYS * 24 * HOUR_S:
        at += dice.expovariate(load * PROCS / (2.6 * HOUR_S))
        run_s = int(dice.choice([600, HOUR_S, 2 * HOUR_S, 2 * HOUR_S, 4 * HOUR_S, 6 * HOUR_S]) * dice.uniform(0.7, 1.3))
        name = f"train{run_s // HOUR_S}.py"
        jobs.append(TraceJob("", int(at), run_s, 3 * run_s, procs=1, user=dice.choice("abcdefgh"), name=name))
    return jobs


def now_and_then(dice: Random, run_s: Sequence[int]) -> list[TraceJob]:
    """One user's jobs, one every six hours."""
    jobs, at = [], 0.0
    while at < DAYS * 24 * HOUR_S:
        at += dice.expovariate(1 / (6 * HOUR_S))
        one_s = int(dice.choice(run_s) * dice.uniform(0.8, 1.2))
        jobs.append(TraceJob("", int(at), one_s, one_s, procs=1, user="lou", name="lou.py"))
    return jobs


def slices(job: TraceJob, how: str) -> list[TraceJob]:
    """What its user submits one after the other for this job."""
    if how == "honest":
        return [replace(job, estimate_s=3 * job.run_s)]
    if how == "no limit":
        return [job]
    found, left_s, limit_s = [], job.run_s, SLICE_S
    while left_s > limit_s:
        found.append(replace(job, run_s=limit_s, estimate_s=limit_s, outcome=CUT))
        # What was done is kept where slices repeat: the liar at their best. Who doubles begins anew.
        left_s, limit_s = (left_s - limit_s, limit_s) if how == "repeats" else (left_s, 2 * limit_s)
    return [*found, replace(job, run_s=left_s, estimate_s=limit_s)]


def completions_s(seed: int, how: str, policy: str) -> list[int]:
    """From submission to the end of the work, of each job of the user who states limits in this way."""
    dice = Random(seed)
    others, own = crowd(dice), now_and_then(dice, [2 * HOUR_S])
    if how == "no limit":
        others = [replace(job, estimate_s=job.run_s) for job in others]
    return own_completions_s(others, [slices(job, how) for job in own], policy)


def own_completions_s(others: Sequence[TraceJob], chains: Sequence[Sequence[TraceJob]], policy: str) -> list[int]:
    """From the first submission to the last end of each of these chains, beside the jobs of others."""
    jobs = [*others, *(chain[0] for chain in chains)]
    arrivals_s = [job.submit_s for job in jobs]
    then, lasts = {}, []
    for number, chain in enumerate(chains, len(others)):
        last = number
        for later in chain[1:]:
            then[last] = len(jobs)
            last = len(jobs)
            jobs.append(later)
        lasts.append(last)
    (chosen,) = policies_of([policy])
    body = Resubmitting(jobs, then, chosen)
    play(arrivals_s, body)
    return [body.ends_s[last] - chain[0].submit_s for last, chain in zip(lasts, chains, strict=True)]


POLICIES = ["fair", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("throughput", "spf+sjbf:own"))]


@pytest.mark.parametrize("policy", POLICIES)
def test_false_short_limits_gain_nothing(policy: str) -> None:
    honest, free, *false = (
        sum(sum(completions_s(seed, words, policy)) for seed in range(SEEDS))
        for words in ("honest", "no limit", "repeats", "doubles")
    )
    assert min(false) > honest
    # Where it is the turn of a user who has used little, their jobs start at once, whatever is said of their length.
    assert min(false) > 0.98 * free


def mean_slowdown(seed: int, factor: float | None, policy: str) -> float:
    """Of a user whose jobs last ten minutes or eight hours, with limits of so many times that; None: always a week."""
    dice = Random(seed)
    others, own = crowd(dice), now_and_then(dice, [600, 8 * HOUR_S])
    stated = [replace(job, estimate_s=7 * 24 * HOUR_S if factor is None else int(factor * job.run_s)) for job in own]
    found = own_completions_s(others, [[job] for job in stated], policy)
    return sum(one / job.run_s for one, job in zip(found, own, strict=True)) / len(own)


@pytest.mark.parametrize("policy", POLICIES)
def test_careful_limits_pay_whatever_others_state(policy: str) -> None:
    careful, careless = (sum(mean_slowdown(seed, factor, policy) for seed in range(SEEDS)) for factor in (1.2, None))
    assert careful < careless
