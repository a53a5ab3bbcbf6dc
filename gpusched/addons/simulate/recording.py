"""The policy's input at one instant as a document that restores it exactly.

    snapshot_version   of this format; readers reject unknown versions
    release            of gpusched that wrote it
    plugins            names of the active plug-ins; their effects are not in the document
    names              display names of jobs with a name other than their id: array tasks
    snapshot           model.snapshot.Snapshot, by its fields
    settings           model.settings.Settings, by its fields

`docs/reference/snapshot.md` lists every field. A new field has a default that means the earlier behaviour, so that
older documents stay readable; any other change of meaning requires a new version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import msgspec
from msgspec import field

from gpusched.errors import UserError
from gpusched.model import value
from gpusched.model.cluster import JobTerms
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Snapshot
from gpusched.model.units import printable
from gpusched.model.value import Value, asdict, fields, replace

VERSION = 2

_HINT = "write a new one with: gpusched debug snapshot FILE"
_KEYS = frozenset({"schema_version", "snapshot_version", "release", "plugins", "names", "snapshot", "settings"})
_MOVED = ("handover", "web")
"""Sections of settings that older documents have, and that add-ons declare now."""
_NAMELESS = "name_of"
"""A function among a snapshot's fields, written as its results."""


class BadRecording(UserError):
    """The document is not a snapshot, is damaged, or has an unknown version."""

    code = "bad_snapshot"


class Pseudonyms(Value):
    """Display names of jobs by id; other jobs go by their id."""

    shown: Mapping[int, str]

    def __call__(self, job_id: int) -> str:
        return self.shown.get(job_id, str(job_id))


class Recording(Value):
    """The policy's complete input, immutable."""

    snapshot: Snapshot
    settings: Settings
    release: str = ""
    plugins: tuple[str, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of the jobs in the snapshot that have a name other than their id."""

    @classmethod
    def of(cls, snapshot: Snapshot, settings: Settings, release: str = "", plugins: Iterable[str] = ()) -> Recording:
        """Record a snapshot with the names of all its jobs, so that it no longer needs the caller to look them up."""
        names = {job_id: name for job_id in _ids(snapshot) if (name := snapshot.name_of(job_id)) != str(job_id)}
        return cls(_named(snapshot, names), settings, release, tuple(plugins), names)


def _named(snapshot: Snapshot, names: Mapping[int, str]) -> Snapshot:
    return replace(snapshot, name_of=Pseudonyms(names) if names else str)


def _ids(snapshot: Snapshot) -> Iterable[int]:
    """Every id that a plan of this snapshot can mention."""
    for held in snapshot.allocations:
        yield held.job_id
        if held.array_id is not None:
            yield held.array_id
    for waiting in snapshot.pending:
        yield from (job.id for job in waiting.jobs)
        if waiting.key.throttle is not None:
            yield waiting.key.throttle[0]


def encode(recording: Recording) -> dict[str, Any]:
    """Convert a recording to a document of built-in types."""
    snapshot, settings = recording.snapshot, value.plain(recording.settings)
    del settings["of_add_ons"]  # no plan depends on them
    return {
        "snapshot_version": VERSION,
        "release": recording.release,
        "plugins": recording.plugins,
        "names": {str(job_id): name for job_id, name in recording.names.items()},
        "snapshot": {one.name: value.plain(getattr(snapshot, one.name)) for one in _PARTS},
        "settings": settings,
    }


_PARTS = tuple(one for one in fields(Snapshot) if one.name != _NAMELESS)
_Parts = msgspec.defstruct(
    "Parts",
    [(one.name, one.type) if one.required else (one.name, one.type, one.default) for one in _PARTS],
    bases=(Value,),
    module=__name__,
)
"""A snapshot without job names."""


class _Document(Value):
    snapshot_version: int
    release: str
    plugins: tuple[str, ...]
    names: dict[int, str]
    snapshot: Any
    settings: Settings
    schema_version: int = 1


def decode(document: Any) -> Recording:
    """Restore a recording from its document. Raises: BadRecording with the invalid location, or the version."""
    if type(document) is not dict or "snapshot_version" not in document:
        raise BadRecording("this is not a gpusched snapshot", _HINT)
    version, release = document["snapshot_version"], document.get("release")
    if type(version) is not int or not 1 <= version <= VERSION:
        by = f" (gpusched {printable(release, 40)})" if type(release) is str and release else ""
        shown = printable(repr(version), 40)
        raise BadRecording(
            f"the snapshot is of version {shown}{by}, and this release reads version {VERSION}",
            "read it with the release of gpusched that wrote it",
        )
    try:
        _check_numbers(document)
        found = value.convert({**document, "settings": _without_add_ons(document.get("settings"))}, _Document)
        parts = found.snapshot if version > 1 else _with_terms(found.snapshot)
        snapshot = Snapshot(**asdict(value.convert(parts, _Parts, "snapshot")))
        _check(snapshot)
    except ValueError as error:
        raise BadRecording(f"the snapshot is damaged: {printable(str(error), 200)}", _HINT) from None
    except RecursionError:
        raise BadRecording("the snapshot is damaged: it is nested too deeply", _HINT) from None
    return Recording(_named(snapshot, found.names), found.settings, found.release, found.plugins, found.names)


def _without_add_ons(settings: Any) -> Any:
    """Without sections that are those of add-ons now."""
    return {name: part for name, part in settings.items() if name not in _MOVED} if type(settings) is dict else settings


def _with_terms(part: Any) -> Any:
    """A part of a snapshot of version 1 in the present form: there, the fields of `JobTerms` are among all others."""
    if isinstance(part, list):
        return [_with_terms(item) for item in part]
    if not isinstance(part, dict) or "uid" not in part:
        return {name: _with_terms(item) for name, item in part.items()} if isinstance(part, dict) else part
    terms = {name: part[name] for name in JobTerms.__struct_fields__ if part.get(name) is not None}
    rest = {name: _with_terms(item) for name, item in part.items() if name not in JobTerms.__struct_fields__}
    return {**rest, "terms": terms}


_LATEST = 253402214400.0
"""The last day of the year 9999, the limit of calendars."""

_LARGEST = 1 << 63
"""Upper bound of counts, sizes and ids; integers of thousands of digits are slow to add and overflow floats."""


def _check_numbers(part: Any) -> None:
    """Reject impossible numbers. Raises: ValueError."""
    if isinstance(part, dict):
        for item in part.values():
            _check_numbers(item)
    elif isinstance(part, list):
        for item in part:
            _check_numbers(item)
    elif not (isfinite(part) if isinstance(part, float) else not isinstance(part, int) or abs(part) <= _LARGEST):
        raise ValueError(f"{printable(repr(part), 40)} cannot be stored in a snapshot")


def _check(snapshot: Snapshot) -> None:
    """Check the policy's preconditions. Raises: ValueError."""
    if not 0 <= snapshot.now < _LATEST:
        raise ValueError(f"now is {snapshot.now:g}, which is not an instant")
    nodes = [node.name for node in snapshot.nodes]
    if len(set(nodes)) < len(nodes):
        raise ValueError("it has two nodes of one name")
    cards = [gpu.uuid for node in snapshot.nodes for gpu in node.gpus]
    if len(set(cards)) < len(cards):
        raise ValueError("it has two GPUs of one UUID")
    waiting = [job.id for one in snapshot.pending for job in one.jobs]
    if len(set(waiting)) < len(waiting):
        raise ValueError("it has a job that waits twice")
    if len({one.key for one in snapshot.pending}) < len(snapshot.pending):
        raise ValueError("it has a class of jobs twice")
    for one in snapshot.pending:
        if not one.jobs or one.total < len(one.jobs):
            raise ValueError("it has a class of jobs whose number is wrong")
