"""Syntax of arrays and sweeps in requests: `0-9,20-30:2%4`, `lr=1e-3,1e-4`, `42_7`, `42_[3-5]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from math import prod
from typing import Any

from gpusched.errors import NotFound, UsageError
from gpusched.lifecycle import arrays
from gpusched.model.job import ArraySpec, Job
from gpusched.model.spec import FIELDS, MAX_NAME
from gpusched.model.tasks import MAX_TASK, TaskSet, parse_tasks
from gpusched.model.units import is_digits, parse_job_id, printable

ARRAY_KEYS = ("array", "sweep", "max_fails")

MOST_NAMES = 100
MOST_PLACES = 200
MOST_IDS = 20_000
"""Jobs that one request may name: it is one step of the event loop, and all other requests wait for it."""

_TASKS = re.compile(r"(\d{1,18})_(?:(\d{1,9})|\[([0-9,:\-]{1,4000})(?:%\d+)?\])")
_SET_HERE = (
    *("GPUSCHED_", "SLURM_", "CUDA_MPS_"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
)
"""Beginnings of the names of variables that the scheduler sets for each job."""
_NEEDED = frozenset({"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "IFS", "LD_LIBRARY_PATH", "PYTHONPATH"})
"""Variables without which shells and programs do not find their files: a swept value would take their place."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_SPAN = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(\d{1,9}))?")
_TASK_SPAN = re.compile(r"(\d{1,9})-(\d{1,9})(?::\d{1,9})?")
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")
_IN_DEPENDENCY = re.compile(
    r"(?<=[:,?])(?:(?P<last>@)(?:_\d{1,9})?|\d{1,18}_\d{1,9}|\d{1,18}-\d{1,18}(?P<delay>\+\d{1,9})?)"
    r"(?=[:,?+]|$)"
)


def read_array(values: Mapping[str, Any]) -> ArraySpec | None:
    """The array of a submission, if any. Raises: UsageError."""
    text, sweep, max_fails = (values.get(key) for key in ARRAY_KEYS)
    if text is None and sweep is None:
        if max_fails is not None:
            raise UsageError(
                "max_fails applies to arrays, and this job is not one", "add -a 0-9, or --sweep lr=1e-3,1e-4"
            )
        return None
    names = _read_sweeps(sweep or ())
    seen = [name for name, _ in names]
    for name in seen:
        if seen.count(name) > 1:
            raise UsageError(f"the sweep names {name} twice", "give all of its values at once: lr=1e-3,1e-4")
    combinations = prod(len(found) for _, found in names)
    # A sweep that only limits how many run at once need not name its tasks: `-a %4`.
    named = text if text is not None and not (names and text.startswith("%")) else f"0-{combinations - 1}{text or ''}"
    wanted, throttle = _read_tasks(named)
    if names:
        highest = wanted.ranges[-1][-1]
        if highest >= combinations:
            raise UsageError(
                f"task {highest} is requested, but the sweep has {combinations} combinations, tasks 0 to "
                f"{combinations - 1}",
                "leave -a out to run all of them",
            )
    _check_places(values, seen)
    return ArraySpec(str(wanted), throttle, max_fails, names)


def _check_places(values: Mapping[str, Any], names: list[str]) -> None:
    """Refuse a placeholder with a misspelt name, which would reach every task unchanged."""
    texts = [str(values[key]) for key in ("name", "stdout", "stderr") if values.get(key)]
    if values.get("script_name") == "wrap":
        texts.append(values.get("script") or "")
    known = {name.lower(): name for name in names}
    places = (place for text in (*texts, *(values.get("argv") or ())) for place in arrays.PLACE.findall(text))
    # Each is compared with each name, so only the first ones are checked.
    strange = (place for place in dict.fromkeys(places) if place not in names and len(place) <= MAX_NAME)
    for place in islice(strange, MOST_PLACES):
        if near := get_close_matches(place.lower(), known, 1):
            raise UsageError(
                f"{{{place}}} does not name a swept value; the names are {', '.join(names)}",
                f"write {{{known[near[0]]}}}; put braces with another meaning into a script",
            )


def _read_tasks(text: str) -> tuple[TaskSet, int | None]:
    numbers, percent, limit = text.partition("%")
    if percent and not (is_digits(limit) and 0 < len(limit) <= 7 and int(limit) > 0):
        raise UsageError(f"{printable(limit, 40)!r} is not a number of concurrent tasks", "write it as -a 0-99%4")
    try:
        return parse_tasks(numbers), int(limit) if percent else None
    except ValueError as error:
        raise UsageError(str(error), "for example: -a 0-9, -a 1,3,5, -a 0-30:2%4") from None


def _read_sweeps(lines: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if len(lines) > MOST_NAMES:
        raise UsageError(f"the sweep has {len(lines)} names; at most {MOST_NAMES} are accepted", "sweep fewer")
    # Counted before expansion: twenty characters can mean millions of values.
    combinations = prod(max(1, _count(line.partition("=")[2])) for line in lines)
    if combinations > MAX_TASK:
        raise UsageError(
            f"the sweep has {combinations} combinations; at most {MAX_TASK} are accepted", "name fewer values"
        )
    return tuple(_read_sweep(line) for line in lines)


def _count(text: str) -> int:
    """Number of values in a list; an unreadable one counts as one."""
    spans = [_SPAN.fullmatch(word) for word in text.split(",")]
    return sum(
        1 if span is None else abs(int(span[2]) - int(span[1])) // max(1, int(span[3] or 1)) + 1 for span in spans
    )


def _read_sweep(line: str) -> tuple[str, tuple[str, ...]]:
    name, equals, text = line.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise UsageError(
            f"{printable(line, 60)!r} is not NAME=VALUES; the name is a word of letters, digits and _",
            "for example: --sweep lr=1e-3,1e-4 --sweep seed=0..4",
        )
    if name.startswith(_SET_HERE):
        raise UsageError(
            f"{name} cannot be swept: the scheduler sets it for each job",
            f"sweep a name of your own: my_{name.lower()}",
        )
    if name in _NEEDED:
        raise UsageError(
            f"{name} cannot be swept: the job's programs need the variable as it is",
            f"sweep a name of your own: my_{name.lower()}",
        )
    values = tuple(_values(name, text)) if text else ()
    if not values:
        raise UsageError(f"the sweep {name} has no values", "for example: --sweep lr=1e-3,1e-4")
    return name, values


def _looks_like_a_range(word: str) -> bool:
    """Whether a value was probably meant as a range: `0..1e2`, `0.1..0.5`, `{1..4}`, `1..`; not `../data`."""
    ends = [end.strip() for end in word.strip().strip("{}[]").split("..")]
    if len(ends) < 2 or "/" in word:
        return False
    numbers = [_NUMBER.fullmatch(end) is not None for end in ends]
    return (any(numbers) and (numbers[0] or not ends[0])) or all(len(end) == 1 and end.isalpha() for end in ends)


def _is_like_tasks(word: str) -> bool:
    """Whether a value is written as the tasks of `-a`: `0-9`, `0-9:2`."""
    found = _TASK_SPAN.fullmatch(word)
    return found is not None and int(found[1]) < int(found[2])


def _no_range(name: str, word: str) -> UsageError:
    return UsageError(
        f"the sweep {name} has {printable(word, 40)!r}, which is not a range: whole numbers LOW..HIGH or "
        "LOW..HIGH..STEP",
        f"for example {name}=0..4 or {name}=0..100..10, or a list: {name}=1e-3,1e-4; for this text in all tasks: "
        f"-E {name}={printable(word, 40)}",
    )


def _values(name: str, text: str) -> Iterator[str]:
    words = text.split(",")
    for word in words:
        span = _SPAN.fullmatch(word)
        if span is None:
            if _looks_like_a_range(word) or (len(words) == 1 and _is_like_tasks(word)):
                raise _no_range(name, word)
            yield word
            continue
        low, high, step = int(span[1]), int(span[2]), int(span[3] or 1)
        if step < 1 or abs(high - low) // step > MAX_TASK:
            raise _no_range(name, word)
        sign = 1 if high >= low else -1
        yield from map(str, range(low, high + sign, sign * step))


# --- ids ----------------------------------------------------------------------------------------------


def task_ids(text: str, find: Callable[[int], Job]) -> list[int] | None:
    """Ids of the tasks that `42_7` or `42_[3-5]` names; None for a text of another form.

    Args: find: returns a job by id, or raises NotFound. Raises: NotFound, UsageError.
    """
    match = _TASKS.fullmatch(text)
    if match is None:
        return None
    array = find(parse_job_id(match[1]))
    if not array.is_array:
        raise NotFound(f"job {array.shown_id} is not an array and has no tasks", f"see it with: gshow {array.shown_id}")
    try:
        wanted = parse_tasks(match[2] or match[3])
    except ValueError as error:
        raise UsageError(str(error), f"for example: {array.id}_7 or {array.id}_[3-5]") from None
    there = arrays.all_tasks(array)
    if len(wanted) > MOST_IDS:
        raise UsageError(
            f"{printable(text, 60)} is {len(wanted)} tasks; at most {MOST_IDS} are accepted at once",
            f"name the whole array, {array.id}, or ask in parts",
        )
    for number in wanted:
        if number not in there:
            raise NotFound(f"array {array.id} has no task {number}; it has {there}", f"see it with: gshow {array.id}")
    return [arrays.task_id(array, number) for number in wanted]


def id_range(text: str) -> range | None:
    """The ids of `221-230`, as `gq` shows equal jobs; None for a text of another form. Raises: UsageError."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    low, high = int(match[1]), int(match[2])
    if low < 1 or high < low:
        raise UsageError(f"{text!r} is not a range of jobs", "write the smaller id first, for example: 221-230")
    if high - low >= MOST_IDS:
        raise UsageError(
            f"{text} is {high - low + 1} jobs; at most {MOST_IDS} are accepted at once",
            "ask in parts, or select them by name, queue or user (-n -q -u)",
        )
    return range(low, high + 1)


def resolve_tasks(dependency: str, find: Callable[[int], Job], last: Callable[[], int]) -> str:
    """A dependency in the form that is recorded: `@` and ranges replaced by ids, tasks with theirs, `afterok:42_7=50`.

    Args: last: returns the id of the caller's last job. Raises: NotFound, UsageError.
    """
    if len(dependency) > (most := FIELDS["dependency"].most):
        raise UsageError(
            f"the dependency has {len(dependency)} characters; at most {most} are accepted", "name fewer jobs"
        )
    if "=" in dependency:
        raise UsageError(f"{dependency!r} is not a dependency", "write it as afterok:41 or afterok:41:42_7,afterany:43")

    count = 0

    def ids_of(match: re.Match[str]) -> str:
        nonlocal count
        delay = match["delay"] or ""
        if (several := id_range(match[0].removesuffix(delay))) is not None:
            count += len(several)
            if count > most // 2:
                raise UsageError(f"the ranges of the dependency name {count} jobs", "name fewer jobs, or an array")
            return ":".join(f"{job_id}{delay}" for job_id in several)
        text = f"{last()}{match[0][1:]}" if match["last"] else match[0]
        ids = task_ids(text, find)
        return text if ids is None else f"{text}={ids[0]}"

    return _IN_DEPENDENCY.sub(ids_of, dependency)
