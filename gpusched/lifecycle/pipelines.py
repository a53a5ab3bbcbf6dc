"""Dependencies between the steps of a pipeline: parsing, ordering, status and resumption.

A step names others in Slurm's syntax with names in place of ids: `prep`, `afterany:train:test`,
`after:server+5`; `,` means all of them and `?` any. A bare name is `afterok`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from gpusched.errors import NotFound
from gpusched.lifecycle.dependencies import KINDS, SINGLETON, Condition, Expression, find_cycle, parse_dependency
from gpusched.model.job import Job
from gpusched.model.pipeline import StepNeed, StepNeeds, pipeline_id
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.units import MAX_SECONDS, is_digits
from gpusched.model.value import replace

STEP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
STEP_NAMES = "up to 100 letters, digits, _, - and ., not beginning with - or ."


def parse_needs(text: str) -> StepNeeds:
    """Parse needs. Raises: ValueError with a sentence that quotes the invalid part."""
    if not text.strip():
        return StepNeeds()
    if "," in text and "?" in text:
        raise ValueError(f"{text!r} mixes ',' (all of) and '?' (any of); use one of them")
    found: list[StepNeed] = []
    for term in text.replace("?", ",").split(","):
        head, colon, rest = term.strip().partition(":")
        kind, words = (head.strip().lower(), rest.split(":")) if colon else ("afterok", [head])
        if kind not in KINDS:
            raise ValueError(f"{kind!r} in {text!r} is not one of {', '.join(KINDS)}")
        found.extend(_parse_need(kind, word.strip(), text) for word in words)
    return StepNeeds(tuple(dict.fromkeys(found)), "?" in text)


def _parse_need(kind: str, word: str, text: str) -> StepNeed:
    step, plus, minutes = (part.strip() for part in word.partition("+"))
    delay_s = 0
    if plus:
        is_number = is_digits(minutes) and len(minutes) <= 9
        if kind != "after" or not is_number or int(minutes) * 60 > MAX_SECONDS:
            raise ValueError(f"{word!r} in {text!r} cannot be read; only after: takes minutes, as in after:server+5")
        delay_s = int(minutes) * 60
    if not STEP_NAME.fullmatch(step):
        raise ValueError(f"{step!r} in {text!r} is not a step name: {STEP_NAMES}")
    return StepNeed(kind, step, delay_s)


def find_circle(needs: Mapping[str, StepNeeds]) -> tuple[str, ...] | None:
    """Find a cycle of steps, returned with its first step repeated at the end; None without one."""
    names = list(needs)
    at = {name: place for place, name in enumerate(names)}
    edges = {at[name]: [at[step] for step in of.steps if step in at] for name, of in needs.items()}
    cycle = find_cycle(edges)
    return None if cycle is None else tuple(names[place] for place in cycle)


def in_order(needs: Mapping[str, StepNeeds]) -> list[str]:
    """Sort the steps topologically, otherwise in the given order. Requires an acyclic graph."""
    names = list(needs)
    at = {name: place for place, name in enumerate(names)}
    left = {name: sum(step in needs for step in of.steps) for name, of in needs.items()}
    waiting: dict[str, list[str]] = {}
    for name, of in needs.items():
        for step in of.steps:
            waiting.setdefault(step, []).append(name)
    ready = [at[name] for name in names if not left[name]]  # sorted, so a heap
    ordered = []
    while ready:
        name = names[heappop(ready)]
        ordered.append(name)
        for follower in waiting.get(name, ()):
            left[follower] -= 1
            if not left[follower]:
                heappush(ready, at[follower])
    return ordered


def dependency_of(needs: StepNeeds, ids: Mapping[str, int], more: str | None) -> str | None:
    """Needs as a dependency in Slurm's syntax, by the ids of their steps, preceded by `more`."""
    terms = [more] if more else []
    kind = ""
    for need in needs.all:
        job = f"{ids[need.step]}+{need.delay_s // 60}" if need.delay_s else str(ids[need.step])
        if need.kind == kind and not needs.is_any:
            terms[-1] += f":{job}"
        else:
            terms.append(f"{need.kind}:{job}")
            kind = need.kind
    return ("?" if needs.is_any else ",").join(terms) or None


def written(expression: Expression) -> str:
    """A dependency as text."""
    terms = []
    for one in expression.conditions:
        if one.kind == SINGLETON:
            terms.append(SINGLETON)
        else:
            job = f"{one.task}={one.job_id}" if one.task else str(one.job_id)
            terms.append(f"{one.kind}:{job}" + (f"+{one.delay_s // 60}" if one.delay_s else ""))
    return ("?" if expression.is_any else ",").join(terms)


# --- status -----------------------------------------------------------------------------------------


def steps_of(jobs: Iterable[Job]) -> dict[str, Job]:
    """The last job of each step, in the order of the first jobs; array tasks belong to their array."""
    found: dict[str, Job] = {}
    for job in sorted(jobs, key=lambda job: job.id):
        if job.spec.step is not None and _is_step(job):
            found[job.spec.step] = job
    return found


def fallbacks_of(jobs: Sequence[Job]) -> list[Job]:
    """Fallbacks of the last job of each step, by id; an array may have one for each failed task.

    Excludes fallbacks of jobs whose step ran again since.
    """
    made = [job for job in jobs if job.spec.fallback_of is not None]
    if not made:
        return []
    last = {job.id for job in steps_of(jobs).values()}
    last.update(job.id for job in jobs if job.array_id in last)
    return sorted((job for job in made if job.spec.fallback_of in last), key=lambda job: job.id)


def _is_step(job: Job) -> bool:
    """Whether a job of a pipeline is a step, rather than a task of one or a fallback."""
    return job.array_id is None and job.spec.fallback_of is None


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    state: str
    """PENDING before the first start, RUNNING until every job has ended, fallbacks included, then COMPLETED, FAILED or
    CANCELLED. A fallback does not repair its step, which stays failed."""
    counts: Mapping[str, int]
    """Number of steps by job state."""
    not_needed: frozenset[str]
    """Steps left out because others succeeded: they were to run after a failure that did not occur."""
    fallbacks: Mapping[str, int]
    """Number of fallbacks of steps, by job state."""


def pipeline_status(jobs: Sequence[Job]) -> PipelineStatus:
    """Derive the status of a pipeline from all of its jobs, past ones included."""
    steps = steps_of(jobs)
    spare = _not_needed(steps, names_of(jobs))
    counts = Counter(job.state.value for job in steps.values())
    states = {job.state for name, job in steps.items() if name not in spare}
    fallbacks = fallbacks_of(jobs)
    if any(not state.is_final for state in (*states, *(job.state for job in fallbacks))):
        has_begun = any(job.run or job.state is not JobState.PENDING for job in jobs)
        word = "RUNNING" if has_begun else "PENDING"
    elif states <= {JobState.COMPLETED}:
        word = "COMPLETED"
    else:
        word = "CANCELLED" if states <= {JobState.COMPLETED, JobState.CANCELLED} else "FAILED"
    tried = Counter(job.state.value for job in fallbacks)
    return PipelineStatus(word, dict(sorted(counts.items())), spare, dict(sorted(tried.items())))


def names_of(jobs: Iterable[Job]) -> dict[int, str]:
    """Step of every job that was ever in the pipeline, by id."""
    return {job.id: job.spec.step for job in jobs if job.spec.step is not None and _is_step(job)}


def conditions_of(job: Job) -> Expression:
    """Dependencies of a job; empty without any."""
    return parse_dependency(job.spec.dependency) if job.spec.dependency else Expression(())


def _not_needed(steps: Mapping[str, Job], names: Mapping[int, str]) -> frozenset[str]:
    found: set[str] = set()
    left = [name for name, job in steps.items() if job.reason is ReasonCode.DEPENDENCY_NEVER_SATISFIED]
    is_growing = True
    while is_growing:
        is_growing = False
        for name in left:
            # Most steps come after their dependencies, so that one pass usually covers a whole chain.
            if name not in found and _is_spared(conditions_of(steps[name]), steps, names, found):
                found.add(name)
                is_growing = True
    return frozenset(found)


def _is_spared(expression: Expression, steps: Mapping[str, Job], names: Mapping[int, str], spared: set[str]) -> bool:
    def spares(one: Condition) -> bool:
        name = names.get(one.job_id)
        if name is None:
            return False
        return name in spared or (one.kind == "afternotok" and steps[name].state is JobState.COMPLETED)

    verdicts = [spares(one) for one in expression.conditions]
    return all(verdicts) if expression.is_any else any(verdicts)


# --- resumption -------------------------------------------------------------------------------------


def to_resume(jobs: Sequence[Job]) -> list[str]:
    """Steps to run again, in dependency order: all that ended in a state other than COMPLETED.

    Steps that were not needed stay so, unless a step they depend on runs again.
    """
    steps, names = steps_of(jobs), names_of(jobs)
    spare = _not_needed(steps, names)
    again = {
        name
        for name, job in steps.items()
        if job.state.is_final and job.state is not JobState.COMPLETED and name not in spare
    }
    parents = {name: {names.get(one.job_id) for one in conditions_of(steps[name]).conditions} for name in spare}
    while more := {name for name in spare - again if parents[name] & again}:
        again |= more
    needs = {
        name: StepNeeds(tuple(StepNeed(one.kind, names[one.job_id]) for one in _inside(steps[name], names)))
        for name in steps
        if name in again
    }
    return in_order(needs)


def _inside(job: Job, names: Mapping[int, str]) -> list[Condition]:
    return [one for one in conditions_of(job).conditions if one.job_id in names]


def moved(job: Job, names: Mapping[int, str], ids: Mapping[str, int]) -> str | None:
    """Rewrite a job's dependency for the current ids of its steps."""
    expression = conditions_of(job)
    conditions = tuple(
        replace(one, job_id=ids[names[one.job_id]]) if one.job_id in names else one for one in expression.conditions
    )
    return written(replace(expression, conditions=conditions)) or None


def unknown(number: int) -> NotFound:
    """Error for a pipeline that does not exist or is not visible to the caller."""
    return NotFound(
        f"there is no pipeline {pipeline_id(number)}", "list them with: gq --tree, ended ones with: gq --tree -a"
    )


def step_ids(number: int, jobs: Sequence[Job], *, unfinished: bool) -> list[int]:
    """Ids of a pipeline's steps, followed by their fallbacks; with `unfinished`, only unfinished ones if there are any.

    Raises: NotFound without jobs, since every pipeline has some.
    """
    found = [*steps_of(jobs).values(), *fallbacks_of(jobs)]
    if not found:
        raise unknown(number)
    active = [job.id for job in found if not job.state.is_final]
    return active if active and unfinished else [job.id for job in found]
