"""Dependencies in Slurm's syntax: `afterok:1:2,afterany:3`, with `?` in place of `,` for "any of".

after      has started, or was cancelled before its start; `after:1+10` ten minutes later
afterany   has ended
afterok    has COMPLETED
afternotok has ended in any other state
aftercorr  as afterok; for an array, the task with the same number
singleton  every earlier unfinished job of the same user and name has ended

A job has ended once it will not run again: one that is retried or requeued has not. A task of an array is recorded by
its id, `afterok:42_7=50`, and shown without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gpusched.model.mentions import mention_job
from gpusched.model.states import JobState
from gpusched.model.units import MAX_SECONDS, is_digits, parse_job_id
from gpusched.model.value import Value

KINDS = ("after", "afterany", "afterok", "afternotok", "aftercorr")
SINGLETON = "singleton"
IMAGE = "image"
"""Kind of a condition that no text can state: a job waits for the one that pulls its image."""
_UNKNOWN_HERE = ("afterburstbuffer", "expand")


class Parent(NamedTuple):
    """State of a job named in a dependency, as far as dependencies need it."""

    state: JobState
    start_at: float | None = None
    """Start of its last run, if any."""
    end_at: float | None = None
    """Set when the state is final."""
    is_left_out: bool = False
    """It ended because its own dependency could never be satisfied."""
    text: str = ""
    """How the pull of an image has ended, or where it pulls to."""


Lookup = Callable[[int], Parent | None]
"""Look up a job by id; None once it is deleted."""


class Condition(Value):
    """One job and the required outcome; `singleton` has no job and id 0."""

    kind: str
    job_id: int = 0
    delay_s: int = 0
    """For `after`: delay after the start."""
    task: str = ""
    """For an array task: its display id, `42_7`."""

    @property
    def shown_id(self) -> str:
        """Id for display."""
        return self.task or str(self.job_id)

    @property
    def array_id(self) -> int | None:
        """For a task: id of its array."""
        return int(self.task.partition("_")[0]) if self.task else None


class Expression(Value):
    """A conjunction or disjunction of conditions."""

    conditions: tuple[Condition, ...]
    is_any: bool = False

    @property
    def job_ids(self) -> tuple[int, ...]:
        """Named jobs, ascending, without duplicates."""
        return tuple(sorted({condition.job_id for condition in self.conditions if condition.job_id}))

    @property
    def is_singleton(self) -> bool:
        """Whether it depends on earlier jobs of the same user and name."""
        return any(condition.kind == SINGLETON for condition in self.conditions)


@dataclass(frozen=True, slots=True)
class Satisfied:
    """The job can start from `at` on."""

    at: float = 0.0
    text: str = ""
    """The event that `at` is computed from, if any."""


@dataclass(frozen=True, slots=True)
class Unsatisfied:
    """Still undecided: `ids` are the unfinished jobs it depends on."""

    text: str
    ids: tuple[int, ...]
    is_image: bool = False
    """Its image is being pulled."""


@dataclass(frozen=True, slots=True)
class Never:
    """Can never be satisfied: `id` is the deciding job."""

    text: str
    id: int
    is_spared: bool = False
    """Caused by success elsewhere: an expected failure did not occur, or a job to follow it was left out."""
    is_image: bool = False
    """Its image could not be pulled."""


Verdict = Satisfied | Unsatisfied | Never


@lru_cache(maxsize=4096)
def parse_dependency(text: str) -> Expression:
    """Parse a dependency. Raises: ValueError with a sentence that quotes the invalid part."""
    if "," in text and "?" in text:
        raise ValueError(f"{text!r} mixes ',' (all of) and '?' (any of); use one of them")
    conditions: list[Condition] = []
    for term in text.replace("?", ",").split(","):
        conditions.extend(_parse_term(term.strip(), text, conditions))
    return Expression(tuple(dict.fromkeys(conditions)), "?" in text)


def _parse_term(term: str, text: str, before: list[Condition]) -> list[Condition]:
    kind, colon, rest = term.partition(":")
    kind = kind.strip().lower()
    if kind == SINGLETON and not colon:
        return [Condition(SINGLETON)]
    if kind.isdigit() and before and before[-1].job_id:
        # `afterok:1,2` repeats the preceding word, as intended by tools that write it.
        kind, colon, rest = before[-1].kind, ":", term
    if kind in _UNKNOWN_HERE:
        known = ", ".join((*KINDS, SINGLETON))
        raise ValueError(f"the dependency {kind!r} in {text!r} is not supported; there are {known}")
    if kind not in KINDS or not colon:
        raise ValueError(
            f"{term!r} in the dependency {text!r} cannot be read; write it as afterok:41 or afterany:41:42"
        )
    return [_parse_job(word.strip(), kind, text) for word in rest.split(":")]


def _parse_job(word: str, kind: str, text: str) -> Condition:
    given, plus, minutes = word.partition("+")
    delay_s = 0
    if plus:
        if kind != "after":
            raise ValueError(f"{word!r} in the dependency {text!r}: only after: takes minutes, as in after:41+10")
        digits = minutes.strip()
        if not is_digits(digits) or len(digits) > 9 or int(digits) * 60 > MAX_SECONDS:
            raise ValueError(f"{word!r} in the dependency {text!r} is not a job and minutes, as in after:41+10")
        delay_s = int(digits) * 60
    task, equals, number = given.rpartition("=")
    if bool(equals) != ("_" in given) or (equals and not _TASK.fullmatch(task)):
        raise ValueError(f"{word!r} in the dependency {text!r} is not a job; array tasks are written as 42_7")
    try:
        return Condition(kind, parse_job_id(number.strip()), delay_s, task)
    except ValueError as error:
        raise ValueError(f"{kind} in the dependency {text!r}: {error}") from None


_TASK = re.compile(r"\d+_\d+")
_ITS_ID = re.compile(r"=\d+")


def as_typed(dependency: str | None) -> str | None:
    """Convert a dependency to the form typed by people: array tasks without ids."""
    return dependency and _ITS_ID.sub("", dependency)


def evaluate(expression: Expression, lookup: Lookup, earlier: int | None = None) -> Verdict:
    """Evaluate the dependency from the known states of its jobs.

    Args: earlier: the first unfinished earlier job of the same user and name, for `singleton`.
    """
    if expression.conditions and expression.conditions[0].kind == IMAGE:
        # Whatever else it waits for, and also if any of that would do.
        return _evaluate_pull(expression.conditions[0], lookup)
    waiting: list[int] = []
    texts: list[str] = []
    never: Never | None = None
    held: list[Satisfied] = []
    for condition in expression.conditions:
        verdict = _evaluate_one(condition, lookup, earlier)
        if isinstance(verdict, Satisfied):
            held.append(verdict)
        elif isinstance(verdict, Never):
            # With "any of", spared only if every impossible condition is; otherwise if any is.
            if never is None or (never.is_spared if expression.is_any else verdict.is_spared):
                never = verdict
        else:
            waiting.extend(verdict.ids)
            texts.append(verdict.text)
    if held and expression.is_any:
        return min(held, key=lambda verdict: verdict.at)
    if never is not None and not expression.is_any:
        return never
    if waiting:
        joined = (" or " if expression.is_any else " and ").join(texts[:_NAMED])
        more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
        return Unsatisfied(f"waits for {joined}{more}", tuple(dict.fromkeys(waiting)))
    return max(held, key=lambda verdict: verdict.at, default=Satisfied()) if never is None else never


def awaiting_image(expression: Expression | None, pull: int) -> Expression:
    """The dependency of a job whose image is being pulled by this job."""
    rest = Expression(()) if expression is None else expression
    return Expression((Condition(IMAGE, pull), *rest.conditions), rest.is_any)


def _evaluate_pull(condition: Condition, lookup: Lookup) -> Verdict:
    """A pull that has succeeded is no condition any more: its end pins the image of the jobs that wait for it."""
    known = lookup(condition.job_id)
    if known is None:
        return Never(
            f"its image was pulled by {_mention_job(condition)}, which is not in the job table", condition.job_id
        )
    if not known.state.is_final:
        what = "is being pulled by" if known.state is not JobState.PENDING else "is to be pulled by"
        text = f"its image {what} {_mention_job(condition)}{known.text}"
        return Unsatisfied(text, (condition.job_id,), is_image=True)
    return Never(f"its image was not pulled, {_mention_job(condition)}: {known.text}", condition.job_id, is_image=True)


def _mention_job(condition: Condition) -> str:
    return mention_job(condition.shown_id)


_NAMED = 3
_WAITS = {
    "after": "{} to start",
    "afterany": "{} to end",
    "afterok": "{} to complete",
    "aftercorr": "{} to complete",
    "afternotok": "{} to fail",
}
_FREE = Satisfied()


def _evaluate_one(condition: Condition, lookup: Lookup, earlier: int | None) -> Verdict:
    kind, job_id, job = condition.kind, condition.job_id, _mention_job(condition)
    if kind == SINGLETON:
        if earlier is None:
            return _FREE
        return Unsatisfied(f"{mention_job(str(earlier))}, which has the same name, to end", (earlier,))
    known = lookup(job_id)
    if known is None:
        return Never(f"depends on {job}, which is not in the job table", job_id)
    state = known.state
    if kind == "after" and (known.start_at is not None or state.is_final):
        return _FREE if not condition.delay_s else _delayed(condition, known)
    if not state.is_final:
        return Unsatisfied(_WAITS[kind].format(job), (job_id,))
    if kind in ("afterok", "aftercorr") and state is not JobState.COMPLETED:
        return Never(f"depends on the success of {job}, which ended as {state}", job_id, known.is_left_out)
    if kind == "afternotok" and state is JobState.COMPLETED:
        return Never(f"depends on the failure of {job}, which ended as {state}", job_id, is_spared=True)
    return _FREE


def _delayed(condition: Condition, known: Parent) -> Satisfied:
    """Apply the delay to the start, or to the end of a job that never started."""
    minutes, job = condition.delay_s // 60, _mention_job(condition)
    if known.start_at is not None:
        return Satisfied(known.start_at + condition.delay_s, f"{minutes} min after the start of {job}")
    text = f"{minutes} min after the end of {job}, which was never started"
    return Satisfied((known.end_at or 0.0) + condition.delay_s, text)


def find_cycle(edges: Mapping[int, Collection[int]]) -> tuple[int, ...] | None:
    """Find a dependency cycle, returned with its first job repeated at the end; None without one.

    Args: edges: dependencies of each job; jobs without any may be omitted.
    """
    done: set[int] = set()
    for root in sorted(edges):
        path: list[int] = []
        on_path: set[int] = set()
        # Each entry is a job to enter, or None to leave the last one; no recursion, as chains may be long.
        stack: list[int | None] = [root]
        while stack:
            job_id = stack.pop()
            if job_id is None:
                left = path.pop()
                on_path.discard(left)
                done.add(left)
            elif job_id in on_path:
                return (*path[path.index(job_id) :], job_id)
            elif job_id not in done:
                path.append(job_id)
                on_path.add(job_id)
                stack.append(None)
                stack.extend(sorted(edges.get(job_id, ()), reverse=True))
    return None
