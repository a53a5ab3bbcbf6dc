"""Dependencies in Slurm's words: `afterok:1:2,afterany:3`, and `?` in place of `,` for "any of".

after      has started, or was cancelled before it could
afterany   has ended
afterok    has COMPLETED
afternotok has ended in any other way
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from gpusched.model.states import JobState
from gpusched.model.units import parse_job_id

KINDS = ("after", "afterany", "afterok", "afternotok")
_LATER = ("aftercorr", "afterburstbuffer", "expand", "singleton")

Parent = tuple[JobState, float | None]
"""State of a job and the start of its last run, if it has had one."""

Lookup = Callable[[int], Parent | None]
"""What is known of a job; None when it does not exist any more."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One job and what must have become of it."""

    kind: str
    job_id: int


@dataclass(frozen=True, slots=True)
class Expression:
    """All of the conditions, or any of them."""

    conditions: tuple[Condition, ...]
    is_any: bool = False

    @property
    def job_ids(self) -> tuple[int, ...]:
        """The jobs that are named, each once, ascending."""
        return tuple(sorted({condition.job_id for condition in self.conditions}))


@dataclass(frozen=True, slots=True)
class Satisfied:
    """The job may start."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """It may come true: `ids` are the jobs that it waits for."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Never:
    """It cannot come true any more: `id` is the job that decided it."""

    text: str
    id: int


Verdict = Satisfied | Waiting | Never


def parse_dependency(text: str) -> Expression:
    """Read a dependency. Raises: ValueError with a sentence that quotes what cannot be read."""
    if "," in text and "?" in text:
        raise ValueError(f"{text!r} mixes ',' (all of) and '?' (any of); use one of them")
    conditions: list[Condition] = []
    for term in text.replace("?", ",").split(","):
        conditions.extend(_parse_term(term.strip(), text))
    return Expression(tuple(dict.fromkeys(conditions)), "?" in text)


def _parse_term(term: str, text: str) -> list[Condition]:
    kind, colon, rest = term.partition(":")
    kind = kind.strip().lower()
    if kind in _LATER:
        raise ValueError(f"the dependency {kind!r} in {text!r} is not supported; there are {', '.join(KINDS)}")
    if kind not in KINDS or not colon:
        raise ValueError(
            f"{term!r} in the dependency {text!r} cannot be read; write it as afterok:41 or afterany:41:42"
        )
    return [Condition(kind, _parse_id(word.strip(), kind, text)) for word in rest.split(":")]


def _parse_id(word: str, kind: str, text: str) -> int:
    if "+" in word:
        raise ValueError(f"a delay as in {word!r} is not supported in the dependency {text!r}; use --begin for times")
    if "_" in word:
        raise ValueError(f"{word!r} in the dependency {text!r} is one task of an array; name a whole job")
    try:
        return parse_job_id(word)
    except ValueError as error:
        raise ValueError(f"{kind} in the dependency {text!r}: {error}") from None


def evaluate(expression: Expression, lookup: Lookup) -> Verdict:
    """Whether the dependency holds, as far as is known of the jobs it names."""
    waiting: list[int] = []
    texts: list[str] = []
    never: Never | None = None
    for condition in expression.conditions:
        verdict = _evaluate_one(condition, lookup)
        if isinstance(verdict, Satisfied):
            if expression.is_any:
                return verdict
        elif isinstance(verdict, Never):
            if not expression.is_any:
                return verdict
            never = never or verdict
        else:
            waiting.extend(verdict.ids)
            texts.append(verdict.text)
    if waiting:
        joined = (" or " if expression.is_any else " and ").join(texts[:_NAMED])
        more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
        return Waiting(f"waits for {joined}{more}", tuple(dict.fromkeys(waiting)))
    return Satisfied() if never is None else never


_NAMED = 3
_WAITS = {
    "after": "job {} to start",
    "afterany": "job {} to end",
    "afterok": "job {} to complete",
    "afternotok": "job {} to fail",
}


def _evaluate_one(condition: Condition, lookup: Lookup) -> Verdict:
    kind, job_id = condition.kind, condition.job_id
    known = lookup(job_id)
    if known is None:
        return Never(f"depends on job {job_id}, which is not in the job table any more", job_id)
    state, start_at = known
    if kind == "after" and (start_at is not None or state.is_final):
        return Satisfied()
    if not state.is_final:
        return Waiting(_WAITS[kind].format(job_id), (job_id,))
    if kind == "afterok" and state is not JobState.COMPLETED:
        return Never(f"depends on the success of job {job_id}, which ended as {state}", job_id)
    if kind == "afternotok" and state is JobState.COMPLETED:
        return Never(f"depends on the failure of job {job_id}, which ended as {state}", job_id)
    return Satisfied()


def find_cycle(edges: Mapping[int, Collection[int]]) -> tuple[int, ...] | None:
    """A circle of jobs that wait for each other, first job repeated at the end; None when there is none.

    Args: edges: the jobs that each job names; jobs that name none may be left out.
    """
    done: set[int] = set()
    for root in sorted(edges):
        path: list[int] = []
        on_path: set[int] = set()
        # Each entry is a job to enter, or None to leave the last one: chains may be long, so no recursion.
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
