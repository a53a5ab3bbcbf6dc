"""`preset = "auto"`: which preset is in force, judged by what each would have made of the last weeks.

The measure is the mean completion (submission to end) of all jobs. A preset is eligible only when it stays within
bounds of what `fair` makes of the same jobs (`BOUNDS`), so that completion is never bought from wide jobs, from those
who wait longest, or from users who have used little. `fair` itself always is. The most that `auto` does is to change
over to an eligible preset that is better beyond chance in two judgements in a row, nights apart. What is in force and
leaves the bounds twice in a row is given up for `fair`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from msgspec import field

from gpusched.model.presets import CHOICES, FAIR
from gpusched.model.units import plural
from gpusched.model.value import Value, replace

ALPHA = 0.05
"""What chance does as well less often than this is significant."""
MARGIN = 0.01
"""What is better by less than this part is not worth a change."""
BOUNDS: Mapping[str, tuple[float, str]] = {
    "longest_wait_s": (2.0, "the longest wait would be"),
    "wide_wait_s": (1.5, "wide jobs would wait"),
    "light_wait_s": (1.25, "users who use little would wait"),
}
"""How many times as long as under `fair` it may be at most, and how that is said."""
SLACK_S = 600.0
"""What is longer by less than this is within every bound."""
MOST_JOBS = 10_000
LEAST_JOBS = 200
LEAST_DAYS = 7.0
"""Of less nothing can be learned."""
APART_S = 20 * 3600.0
"""Two judgements nearer to each other than this, as when an admin asks for one, count as one."""

_DAY_S = 86400.0


class PresetWorth(Value):
    """What became of the jobs under one preset, in seconds; None where there was no such job."""

    completion_s: float
    """Mean, from submission to end."""
    wait_s: float
    """Mean."""
    longest_wait_s: float
    wide_wait_s: float | None = None
    """Mean of jobs that need half of the GPUs of the machine or more, and at least two."""
    light_wait_s: float | None = None
    """Mean of the jobs of users who have used less than an equal part; None with one user."""


class PresetGain(Value):
    """A preset against the one in force, over contiguous parts of the jobs."""

    parts: int
    """0 when there were too few jobs for any."""
    better: int
    """The number of parts in which its completion was less."""
    worse: int
    p: float
    """How often chance alone does as well, corrected for the number of presets."""


class Judgement(Value):
    """One replay of the last weeks under every preset."""

    at: float
    """UTC epoch seconds of its end."""
    jobs: int
    since_at: float
    """Of the first of the jobs."""
    in_force: str
    worth: Mapping[str, PresetWorth]
    """By preset."""
    gains: Mapping[str, PresetGain]
    """By preset, but for the one in force."""


class TrialResult(Value):
    """What the process that replays the last weeks answers with."""

    jobs: int = 0
    worth: Mapping[str, PresetWorth] = field(default_factory=dict)
    gains: Mapping[str, PresetGain] = field(default_factory=dict)
    error: str | None = None
    """Why there is nothing else."""
    is_too_much: bool = False
    """Whether fewer jobs might have gone well."""

    def makes_sense(self, in_force: str) -> bool:
        """Whether every preset is there, with values that a replay can have."""
        if set(self.worth) != set(CHOICES) or set(self.gains) != set(CHOICES) - {in_force}:
            return False
        times = (
            one
            for worth in self.worth.values()
            for one in (worth.wait_s, worth.longest_wait_s, worth.wide_wait_s, worth.light_wait_s)
            if one is not None
        )
        return (
            self.jobs > 0
            and all(0 < worth.completion_s < inf for worth in self.worth.values())
            and all(0 <= one < inf for one in times)
            and all(0 <= gain.p <= 1 for gain in self.gains.values())
        )


class PresetState(Value):
    """What `auto` has decided, kept over restarts."""

    in_force: str = FAIR
    since_at: float | None = None
    """When it was changed over to; None: from the beginning."""
    candidate: str | None = None
    """Would be changed over to if the next judgement says the same."""
    candidate_at: float | None = None
    why: str = "not judged yet"
    """A clause, without an instant."""
    tried_at: float | None = None
    """When a judgement was last begun, whatever came of it; before the first, since when one could have been."""
    judgement: Judgement | None = None
    """The last that came to its end."""
    problem: str | None = None
    """Why the last one did not."""
    most_jobs: int = MOST_JOBS
    """Only this many of the newest are replayed; fewer once more took too long."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Presets that left the bounds in the last judgement, and how."""


def too_little(jobs: int, span_s: float) -> str | None:
    """Why this many jobs are too few to judge by; None when it can."""
    if jobs >= LEAST_JOBS and span_s >= LEAST_DAYS * _DAY_S:
        return None
    if not jobs:
        return "too little history: no job has ended yet"
    return (
        f"too little history: {plural(jobs, 'job')} that ended in {span_s / _DAY_S:.1f} days, {LEAST_JOBS} in "
        f"{LEAST_DAYS:.0f} days are needed"
    )


def with_too_little(state: PresetState, why: str) -> PresetState:
    """Nothing could be judged: what is in force stays."""
    return replace(state, why=why, candidate=None, candidate_at=None, problem=None, judgement=None, excluded={})


def with_problem(state: PresetState, why: str) -> PresetState:
    """A judgement came to nothing: what is in force stays."""
    return replace(state, problem=why)


def with_fewer_jobs(state: PresetState, why: str) -> PresetState:
    """A replay took more than it may: the next one is of half as many jobs."""
    return replace(state, problem=why, most_jobs=max(5 * LEAST_JOBS, state.most_jobs // 2))


def beyond_bounds(worth: PresetWorth, fair: PresetWorth) -> str | None:
    """How a preset is worse than `fair` by more than may be; None when it is eligible."""
    for name, (most, said) in BOUNDS.items():
        value, base = getattr(worth, name), getattr(fair, name)
        if value is None or base is None or value <= base + SLACK_S:
            continue
        if value > most * base:
            times = f"{value / base:.1f} times as long" if base > 0 else "where nobody waits"
            return f"{said} {times}"
    return None


def decide(state: PresetState, judgement: Judgement) -> PresetState:
    """What is in force after one more judgement, and why."""
    worth, now = judgement.worth, judgement.at
    found = {name: beyond_bounds(one, worth[FAIR]) for name, one in worth.items() if name != FAIR}
    excluded = {name: how for name, how in found.items() if how is not None}
    base = replace(state, judgement=judgement, excluded=excluded, problem=None)
    wanted, why = _wanted(state.in_force, judgement, excluded)
    if wanted is None:
        return replace(base, candidate=None, candidate_at=None, why=why)
    if wanted != state.candidate or state.candidate_at is None:
        return replace(base, candidate=wanted, candidate_at=now, why=f"{why}; changes over if it is so again")
    if now - state.candidate_at < APART_S:
        return replace(base, why=f"{why}; changes over if it is so again the next night")
    return replace(base, in_force=wanted, since_at=now, candidate=None, candidate_at=None, why=f"{why}, twice in a row")


def _wanted(in_force: str, judgement: Judgement, excluded: Mapping[str, str]) -> tuple[str | None, str]:
    """The preset that this judgement alone would have, and why; None: the one in force."""
    worth = judgement.worth
    if in_force in excluded:
        return FAIR, f"under {in_force} {excluded[in_force]} as under {FAIR}"
    others = [name for name in CHOICES if name in judgement.gains]
    better = {name: 1.0 - worth[name].completion_s / worth[in_force].completion_s for name in others}
    sure = [
        name for name in others if name not in excluded and better[name] > MARGIN and judgement.gains[name].p < ALPHA
    ]
    if sure:
        # The first of equal ones.
        best = max(sure, key=better.__getitem__)
        return best, f"{best} is {better[best]:.0%} better{_sureness(judgement.gains[best])}"
    name = max(others, key=better.__getitem__, default=None)
    if name is None or better[name] <= MARGIN:
        return None, "no other preset would be better"
    text = f"{name} would be {better[name]:.0%} better"
    if name in excluded:
        return None, f"{text}, but {excluded[name]} as under {FAIR}"
    return None, f"{text}, not significant{_sureness(judgement.gains[name])}"


def _sureness(gain: PresetGain) -> str:
    if not gain.parts:
        return " (too few jobs to tell it from chance)"
    return f" (better in {gain.better} of {plural(gain.parts, 'part')}, p = {gain.p:.2g})"
