"""Rows of lists of jobs. Most jobs of a long queue are alike, so what they have in common is made and encoded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from gpusched.api.render import JOB_FIELDS, JobContext, RunField, Source, encode
from gpusched.model.job import Job, JobSpec, Run
from gpusched.model.states import JobState
from gpusched.model.value import fields

_OWN_PARTS = frozenset({"name", "launch", "key"})
"""Fields of a spec in which the jobs of one batch or script differ."""
_TERMS = tuple(part.name for part in fields(JobSpec) if part.name not in _OWN_PARTS)
_LAUNCH = ("work_dir", "submit_dir", "open_mode", "only_holds")
_ROW = (
    *("user", "uid", "hold", "cancelled_by", "start_at", "end_at", "preempt_at", "suspended_at", "exit_code"),
    *("signal", "run", "failures", "fallback_id"),
)
_terms_of, _launch_of, _row_of = attrgetter(*_TERMS), attrgetter(*_LAUNCH), attrgetter(*_ROW)
"""What jobs that are alike have in common: parts of their specs, of how they are launched, and of their rows."""
_sort_of = attrgetter("time_limit_s", "queue", "qos", "nice", "account")
"""Part of that, to look a job up by."""
_COMMON_ATTRIBUTES = frozenset({"state.value", "task", "tasks_left", "restarts", *_ROW})
_COMMON_ATTRIBUTES |= {f"spec.launch.{name}" for name in _LAUNCH}
_COMMON_FUNCTIONS = frozenset(
    {
        *("array_id", "array_tasks", "throttle", "sweep", "qos", "dependency", "depends_on", "gpu_request", "variants"),
        *("num_tasks", "ntasks", "ntasks_per_node", "ntasks_per_gpu", "cpus_per_task", "cpus_per_gpu", "gpus_per_task"),
        *("mem_per_cpu_mib", "mem_per_gpu_mib", "nodes_max", "total_cpus", "total_mem_mib", "licenses", "resources"),
        *("is_foreground", "is_batch", "notify", "notify_to", "submit_dir", "fallback_id", "fallback_of"),
        *("progress", "progress_text", "eta_at"),
    }
)
"""Keys whose functions read nothing else for a pending job without a run that is no array."""
_MOST_SORTS = 2000
_FEW = 8
Shown = Callable[[dict[str, Any]], dict[str, Any]]


def _is_common(name: str, source: Source) -> bool:
    if isinstance(source, RunField):
        return True
    if not isinstance(source, str):
        return name in _COMMON_FUNCTIONS
    parts = source.split(".")
    return source in _COMMON_ATTRIBUTES or (parts[0] == "spec" and parts[1] not in _OWN_PARTS)


OWN_KEYS = frozenset(name for name, key in JOB_FIELDS.items() if not _is_common(name, key.source))
"""Keys in which pending jobs differ that are otherwise alike."""


def _laid_out(run: Run) -> dict[str, float]:
    """What a run of a job with bundles has in place of what was asked for: its nodes, and the most on one of them."""
    parts = run.on_each_node
    return {
        "nodes": len(parts),
        "cpus": max(part.cpus for part in parts),
        "mem_mib": max(part.mem_mib for part in parts),
        "gpus_per_node": max(len(part.gpus) for part in parts),
    }


@dataclass(slots=True)
class _Alike:
    """Jobs that are alike."""

    marks: tuple[Any, ...]
    """What they have in common."""
    row: dict[str, Any]
    """The row of one of them."""
    text: dict[str, Any] | None = None
    """The same, for encoding: neighboring keys that they have in common are one text, below the first of them."""
    number: int | None = None
    """Its place among those of `RowMaker.divided`."""


class RowMaker:
    """Makes rows of jobs: documents with some of the keys of `JOB_FIELDS`, in this order.

    Attributes are read in one call, and fields of runs are skipped for jobs without one: a list has thousands.
    """

    def __init__(self, names: Iterable[str], hidden: Mapping[str, Any] | None = None) -> None:
        """Args: hidden: by key, the value that replaces it in each row."""
        hidden = {} if hidden is None else hidden
        self._blank: dict[str, Any] = {name: hidden.get(name) for name in names}
        made = {name: JOB_FIELDS[name].source for name in self._blank if name not in hidden}
        self._attributes = {name: how for name, how in made.items() if isinstance(how, str)}
        # Two extra attributes: a getter of one attribute returns no tuple.
        self._read = attrgetter(*self._attributes.values(), "id", "id")
        self._of_run = [(name, how.make) for name, how in made.items() if isinstance(how, RunField)]
        self._blank.update({name: how.without for name, how in made.items() if isinstance(how, RunField)})
        self._other = [(name, how) for name, how in made.items() if not isinstance(how, (str, RunField))]
        self.own = tuple(name for name in self._blank if name in OWN_KEYS)
        """Keys of which each job has a value of its own."""
        self._own_blank = {name: self._blank[name] for name in self.own}
        self.common = tuple(name for name in self._blank if name not in OWN_KEYS)
        self._own_attributes = [name for name in self._attributes if name in OWN_KEYS]
        self._read_own = attrgetter(*(self._attributes[name] for name in self._own_attributes), "id", "id")
        self._other_own = [(name, how) for name, how in self._other if name in OWN_KEYS]
        self._pays = len(self._other) - len(self._other_own) > _FEW
        """Whether finding out what a job has in common with others takes less time than its values."""
        self._alike: dict[tuple[Any, ...], _Alike] = {}

    def __call__(self, job: Job, ctx: JobContext) -> dict[str, Any]:
        alike = self._alike_of(job, ctx) if self._pays else None
        return self._whole(job, ctx) if alike is None else self._with_own(alike.row.copy(), job, ctx)

    def encodable(self, job: Job, ctx: JobContext) -> dict[str, Any]:
        """The row as `encode` takes it, with ready texts in it."""
        alike = self._alike_of(job, ctx)
        if alike is None:
            return self._whole(job, ctx)
        if alike.text is None:
            alike.text = self._text(alike.row)
        return self._with_own(alike.text.copy(), job, ctx)

    def divided(self, job: Job, ctx: JobContext, common: list[list[Any]], shown: Shown) -> list[Any]:
        """The row as the number of what it has in common with others, which is added to `common`, and own values.

        Args: shown: what is shown of a row that has nothing in common.
        """
        alike = self._alike_of(job, ctx)
        if alike is None:
            row = shown(self._whole(job, ctx))
            common.append([row[name] for name in self.common])
            return [len(common) - 1, *[row[name] for name in self.own]]
        if alike.number is None:
            alike.number = len(common)
            common.append([alike.row[name] for name in self.common])
        row = self._with_own(self._own_blank.copy(), job, ctx)
        return [alike.number, *row.values()]

    def _whole(self, job: Job, ctx: JobContext) -> dict[str, Any]:
        run = ctx.run
        row = self._blank.copy()
        row.update(zip(self._attributes, self._read(job), strict=False))
        for name, make in self._other:
            row[name] = make(job, ctx)
        if run is not None:
            if job.spec.request.bundles is not None and run.native is None:
                row.update((name, amount) for name, amount in _laid_out(run).items() if name in row)
            for name, make_of_run in self._of_run:
                row[name] = make_of_run(run, job, ctx)
        return row

    def _with_own(self, row: dict[str, Any], job: Job, ctx: JobContext) -> dict[str, Any]:
        row.update(zip(self._own_attributes, self._read_own(job), strict=False))
        for name, make in self._other_own:
            row[name] = make(job, ctx)
        return row

    def _alike_of(self, job: Job, ctx: JobContext) -> _Alike | None:
        """What it has in common with others; None for jobs that are treated one by one."""
        spec = job.spec
        if (
            ctx.run is not None
            or job.state is not JobState.PENDING
            or job.array_id is not None
            or spec.array is not None
        ):
            return None
        # Requests by identity, since equal ones mostly share one object and hashing takes long.
        sort = id(spec.request), job.uid, *_sort_of(spec)
        marks = _terms_of(spec), _launch_of(spec.launch), _row_of(job)
        found = self._alike.get(sort)
        if found is None or found.marks != marks:
            if len(self._alike) >= _MOST_SORTS:
                self._alike.clear()
            # The marks keep the request alive.
            found = self._alike[sort] = _Alike(marks, self._whole(job, ctx))
        return found

    def _text(self, row: Mapping[str, Any]) -> dict[str, Any]:
        pieces: dict[str, Any] = {}
        together: dict[str, Any] = {}

        def put() -> None:
            if together:
                first = next(iter(together))
                pieces[first] = msgspec.Raw(encode(together)[len(first) + 4 : -1])
                together.clear()

        for name, value in row.items():
            if name in OWN_KEYS:
                # Masked ones have the same value everywhere.
                put()
                pieces[name] = value
            else:
                together[name] = value
        put()
        return pieces


class DividedRows:
    """Rows in two parts for one viewer, see `RowMaker.divided`."""

    def __init__(self, sees_all_of: Callable[[Job], bool], shown: Shown, whole: RowMaker, part: RowMaker) -> None:
        """Args: whole, part: for jobs that the viewer may see all of, and for others."""
        self._sees_all_of, self._shown, self._whole, self._part = sees_all_of, shown, whole, part
        self.own_fields, self.common_fields = whole.own, whole.common
        self.common: list[list[Any]] = []
        """Values of `common_fields`, by number."""

    def __call__(self, job: Job, ctx: JobContext) -> list[Any]:
        """The number of a job's entry in `common`, then its own values."""
        return (self._whole if self._sees_all_of(job) else self._part).divided(job, ctx, self.common, self._shown)
