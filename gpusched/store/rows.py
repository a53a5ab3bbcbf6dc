"""Conversion of values to rows and back: one column per field, by its type.

    str                as it is; as a JSON string if TEXT cannot hold it
    bool, Enum         a number, its word
    a value, a tuple   a JSON document with every field, so that a later default changes no old job

Texts may hold lone surrogates for bytes that are not UTF-8 (`os.fsdecode`), which SQLite's TEXT cannot hold.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import lru_cache
from json import dumps, loads
from operator import attrgetter
from typing import Any, Generic, TypeVar

from gpusched.model.job import GpuShare, Job, JobEvent, JobSpec, Run
from gpusched.model.resources import Resources
from gpusched.model.snapshot import Usage
from gpusched.model.value import Value, convert, decode, encode, fields

V = TypeVar("V", bound=Value)
Row = Sequence[Any]

_needs_quoting = re.compile('\\A"|[\0\ud800-\udfff]').search


def pack_text(text: str) -> str:
    """Encode a text for a TEXT column: as it is, or rarely as a JSON string."""
    if text.isprintable() and text[:1] != '"':
        # Nearly all are; this costs a quarter of the expression.
        return text
    return dumps(text) if _needs_quoting(text) else text


def unpack_text(stored: str) -> str:
    return str(loads(stored)) if stored.startswith('"') else stored


def pack(value: object) -> str:
    return encode(value).decode()


@lru_cache(maxsize=256)
def pack_gpus(shares: tuple[GpuShare, ...]) -> str:
    """Encode GPU shares: a run has the same ones in each of its rows."""
    return pack(shares)


@lru_cache(maxsize=256)
def unpack_gpus(stored: str) -> tuple[GpuShare, ...]:
    """Decode GPU shares: few distinct lists, each shared by many runs. Raises: ValueError for an invalid one."""
    return decode(stored, tuple[GpuShare, ...])


Change = Callable[[Any], Any]


def coding(kind: Any) -> tuple[Change, Change] | None:
    """Encoder and decoder for columns of this type; None when values are stored unchanged, as NULL always is."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (kind,) = [part for part in parts if part is not types.NoneType]
        return coding(kind)
    if kind in (int, float):
        return None
    if kind is str:
        return pack_text, unpack_text
    if kind is bool:
        return int, bool
    if isinstance(kind, type) and issubclass(kind, Enum):
        return attrgetter("_value_"), {one.value: one for one in kind}.__getitem__
    if kind == tuple[GpuShare, ...]:
        return pack_gpus, unpack_gpus
    return pack, lambda stored: decode(stored, kind)


class Columns(Generic[V]):
    """The fields of a value, each in a column of its name, except those stored differently."""

    def __init__(self, kind: type[V], without: Collection[str] = (), first: Sequence[str] = ()) -> None:
        """Args: first: columns that precede the others, as far as they are fields."""
        found = {one.name: coding(one.type) for one in fields(kind) if one.name not in without}
        self.names = (*(name for name in first if name in found), *(name for name in found if name not in first))
        self._kind = kind
        self._get = attrgetter(*self.names)
        self._changes = [(at, *change) for at, name in enumerate(self.names) if (change := found[name]) is not None]

    def row(self, value: V) -> list[Any]:
        row = list(self._get(value))
        for at, into, _ in self._changes:
            if (part := row[at]) is not None:
                row[at] = into(part)
        return row

    def values(self, row: Row) -> list[Any]:
        """Decode the fields in these columns. Raises: KeyError, TypeError, ValueError for invalid ones."""
        parts = list(row)
        for at, _, out in self._changes:
            if (stored := parts[at]) is not None:
                parts[at] = out(stored)
        return parts

    def read(self, row: Row) -> V:
        """Decode the value in these columns, all of them present. Raises: as `values`."""
        return self._kind(**dict(zip(self.names, self.values(row), strict=True)))


IDENTITY_COLUMNS = ("id", "uid", "user", "submit_at")
_JOBS = Columns(Job, without=("spec",), first=IDENTITY_COLUMNS)
_STATES = Columns(Job, without=("spec", *IDENTITY_COLUMNS))
_SPEC_COLUMNS = frozenset(
    {
        *("name", "request", "launch", "retry", "account", "queue", "nice", "time_limit_s", "begin_at", "dependency"),
        *("hold", "qos", "deadline_at", "reservation", "key", "pipeline"),
    }
)
"""Parts of a spec with their own columns."""
EXTRAS = tuple(name for name in JobSpec.__struct_fields__ if name not in _SPEC_COLUMNS)
"""The remaining, rarely used ones: one document of those that differ from the default."""
_SPECS = Columns(JobSpec, without=EXTRAS)
_EXTRAS = {one.name: one for one in fields(JobSpec) if one.name in EXTRAS}
_SHARED = tuple(_SPECS.names.index(name) for name in ("request", "launch", "retry"))
_extras_of = attrgetter(*EXTRAS)
_NO_EXTRAS = tuple(_EXTRAS[name].default for name in EXTRAS)

STATE_COLUMNS = _STATES.names
SPEC_COLUMNS = (*("submit_hold" if name == "hold" else name for name in _SPECS.names), "extras")
JOB_COLUMNS = (*_JOBS.names, *SPEC_COLUMNS)
_OF_JOB = len(_JOBS.names)

state_row = _STATES.row
"""STATE_COLUMNS of a job."""


def spec_row(spec: JobSpec) -> list[Any]:
    values = _extras_of(spec)
    given = zip(EXTRAS, values, _NO_EXTRAS, strict=True) if values != _NO_EXTRAS else ()
    return [*_SPECS.row(spec), pack({name: value for name, value, default in given if value != default})]


def job_row(job: Job, spec: Sequence[Any]) -> list[Any]:
    """JOB_COLUMNS of a job whose spec has already been packed."""
    return [*_JOBS.row(job), *spec]


class JobReader:
    """Builds jobs from rows. Equal parts become one object: specs, requests, launches, retry rules, user names."""

    def __init__(self) -> None:
        self._specs: dict[Row, JobSpec] = {}
        self._shared: dict[Any, Any] = {}

    def job(self, row: Row) -> Job:
        """Decode JOB_COLUMNS. Raises: KeyError, TypeError, ValueError for an invalid row."""
        parts = dict(zip(_JOBS.names, _JOBS.values(row[:_OF_JOB]), strict=True))
        parts["user"] = self._shared.setdefault(parts["user"], parts["user"])
        stored = row[_OF_JOB:]
        spec = self._specs.get(stored)
        if spec is None:
            spec = self._specs[stored] = self._spec(stored)
        return Job(spec=spec, **parts)

    def _spec(self, stored: Row) -> JobSpec:
        values = _SPECS.values(stored[:-1])
        for at in _SHARED:
            values[at] = self._shared.setdefault(values[at], values[at])
        extras = {name: convert(part, _EXTRAS[name].type) for name, part in loads(stored[-1]).items()}
        return JobSpec(**dict(zip(_SPECS.names, values, strict=True)), **extras)


RUNS = Columns(Run)
EVENTS = Columns(JobEvent)


class UsageColumns:
    """A user's usage, its amounts in columns of their own."""

    names = ("account", "user", "gpu_s", "vram_mib_s", "cpu_s", "mem_mib_s", "at")

    def row(self, usage: Usage) -> Row:
        used = usage.used
        amounts = (used.gpus, used.vram_mib, used.cpus, used.mem_mib)
        return (pack_text(usage.account), pack_text(usage.user), *amounts, usage.at)

    def read(self, row: Row) -> Usage:
        account, user, *amounts, at = row
        return Usage(unpack_text(account), unpack_text(user), Resources(*amounts), at)
