"""`preset = "auto"`: chooses the preset by replaying the last weeks under each.

The measure is the mean completion (submission to end) of all jobs. A preset is eligible only if it stays within
bounds relative to `fair` on the same jobs (`BOUNDS`), so that completion is never bought from wide jobs, from
the longest waits, or from users who have used little. `fair` itself is always eligible. `auto` only ever changes
to an eligible preset that is significantly better in two judgements in a row, nights apart. A preset in force
that leaves the bounds twice in a row is replaced by `fair`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from msgspec import field

from gpusched.model.presets import CHOICES, FAIR
from gpusched.model.units import plural
from gpusched.model.value import Value, replace

ALPHA = 0.05
"""Significance level."""
MARGIN = 0.01
"""Minimum relative improvement that justifies a change."""
BOUNDS: Mapping[str, tuple[float, str]] = {
    "longest_wait_s": (2.0, "the longest wait would be"),
    "wide_wait_s": (1.5, "wide jobs would wait"),
    "light_wait_s": (1.25, "users who use little would wait"),
}
"""Maximum ratio to the value under `fair`, and its wording."""
SLACK_S = 600.0
"""Excess below this is within every bound."""
MOST_JOBS = 10_000
LEAST_JOBS = 200
LEAST_DAYS = 7.0
"""Minimum history in days."""
APART_S = 20 * 3600.0
"""Judgements closer together than this, such as one requested by an admin, count as one."""

_DAY_S = 86400.0


class PresetWorth(Value):
    """Results of one preset, in seconds; None if there was no such job."""

    completion_s: float
    """Mean, from submission to end."""
    wait_s: float
    """Mean."""
    longest_wait_s: float
    wide_wait_s: float | None = None
    """Mean of jobs that need half of the GPUs of the machine or more, and at least two."""
    light_wait_s: float | None = None
    """Mean of the jobs of users who have used less than an equal share; None with one user."""


class PresetGain(Value):
    """A preset compared with the one in force, over contiguous blocks of the jobs."""

    parts: int
    """0 if there were too few jobs for any block."""
    better: int
    """Number of blocks in which its completion was shorter."""
    worse: int
    p: float
    """Probability of doing as well by chance, corrected for the number of presets."""


class Judgement(Value):
    """One replay of the last weeks under every preset."""

    at: float
    """UTC epoch seconds of its end."""
    jobs: int
    since_at: float
    """Submission of the first of the jobs."""
    in_force: str
    worth: Mapping[str, PresetWorth]
    gains: Mapping[str, PresetGain]
    """By preset, except the one in force."""


class TrialResult(Value):
    """Answer of the process that replays the last weeks."""

    jobs: int = 0
    worth: Mapping[str, PresetWorth] = field(default_factory=dict)
    gains: Mapping[str, PresetGain] = field(default_factory=dict)
    error: str | None = None
    """Why everything else is missing."""
    is_too_much: bool = False
    """Whether fewer jobs might have succeeded."""

    def makes_sense(self, in_force: str) -> bool:
        """Whether every preset is present, with plausible values."""
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
    """Decision of `auto`, persisted across restarts."""

    in_force: str = FAIR
    since_at: float | None = None
    """When it came into force; None: from the beginning."""
    candidate: str | None = None
    """Comes into force if the next judgement agrees."""
    candidate_at: float | None = None
    why: str = "not judged yet"
    """A clause, without an instant."""
    tried_at: float | None = None
    """Start of the last judgement, whatever its outcome; before the first, the earliest time one was possible."""
    judgement: Judgement | None = None
    """The last completed judgement."""
    problem: str | None = None
    """Why the last judgement failed."""
    most_jobs: int = MOST_JOBS
    """Only this many of the newest jobs are replayed; lowered after a replay that took too long."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Presets outside the bounds in the last judgement, and how."""


def too_little(jobs: int, span_s: float) -> str | None:
    """Why this many jobs are too few to judge by; None if they suffice."""
    if jobs >= LEAST_JOBS and span_s >= LEAST_DAYS * _DAY_S:
        return None
    if not jobs:
        return "too little history: no job has ended yet"
    return (
        f"too little history: {plural(jobs, 'job')} that ended in {span_s / _DAY_S:.1f} days, {LEAST_JOBS} in "
        f"{LEAST_DAYS:.0f} days are needed"
    )


def with_too_little(state: PresetState, why: str) -> PresetState:
    """State after too little history: the preset in force stays."""
    return replace(state, why=why, candidate=None, candidate_at=None, problem=None, judgement=None, excluded={})


def with_problem(state: PresetState, why: str) -> PresetState:
    """State after a failed judgement: the preset in force stays."""
    return replace(state, problem=why)


def with_fewer_jobs(state: PresetState, why: str) -> PresetState:
    """State after a replay exceeded its budget: the next one uses half as many jobs."""
    return replace(state, problem=why, most_jobs=max(5 * LEAST_JOBS, state.most_jobs // 2))


def beyond_bounds(worth: PresetWorth, fair: PresetWorth) -> str | None:
    """How a preset exceeds its bounds relative to `fair`; None if it is eligible."""
    for name, (most, said) in BOUNDS.items():
        value, base = getattr(worth, name), getattr(fair, name)
        if value is None or base is None or value <= base + SLACK_S:
            continue
        if value > most * base:
            times = f"{value / base:.1f} times as long" if base > 0 else "where no job waits"
            return f"{said} {times}"
    return None


def decide(state: PresetState, judgement: Judgement) -> PresetState:
    """Preset in force after one more judgement, and why."""
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
    """Preset preferred by this judgement alone, and why; None: the one in force."""
    worth = judgement.worth
    if in_force in excluded:
        return FAIR, f"under {in_force} {excluded[in_force]} as under {FAIR}"
    others = [name for name in CHOICES if name in judgement.gains]
    better = {name: 1.0 - worth[name].completion_s / worth[in_force].completion_s for name in others}
    sure = [
        name for name in others if name not in excluded and better[name] > MARGIN and judgement.gains[name].p < ALPHA
    ]
    if sure:
        # The first among equals.
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
