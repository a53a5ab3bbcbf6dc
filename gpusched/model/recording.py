"""What the policy was given at one instant, as one document that gives exactly the same back.

    snapshot_version   of this form; a reader that does not know it refuses the document
    release            of gpusched that wrote it
    plugins            names of the plug-ins that took part; what they did is not in the document
    names              what people call the jobs whose name is not their id: tasks of arrays
    snapshot           model.snapshot.Snapshot, by its fields
    settings           model.settings.Settings, by its fields

`docs/reference/snapshot.md` lists every field. A field that comes new has a default that means what was before, so that
older documents stay readable; what it means otherwise takes a new version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import field

from gpusched.errors import UserError
from gpusched.model import documents
from gpusched.model.documents import Mismatch
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Snapshot
from gpusched.model.units import printable
from gpusched.model.value import Value, replace

VERSION = 1

_HINT = "write a new one with: gpusched debug snapshot FILE"
_KEYS = frozenset({"schema_version", "snapshot_version", "release", "plugins", "names", "snapshot", "settings"})
_NAMELESS = "name_of"
"""The field of a snapshot that is a function, and is written as the names that it gives."""


class BadRecording(UserError):
    """A document that is no snapshot, is damaged, or is of a version that is not known."""

    code = "bad_snapshot"


class Names(Value):
    """What people call jobs, by id; of all others the id itself."""

    shown: Mapping[int, str]

    def __call__(self, job_id: int) -> str:
        return self.shown.get(job_id, str(job_id))


class Recording(Value):
    """The policy's whole input, with nothing in it that changes later."""

    snapshot: Snapshot
    settings: Settings
    release: str = ""
    plugins: tuple[str, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    """Of the jobs in the snapshot whose name is not their id."""

    @classmethod
    def of(cls, snapshot: Snapshot, settings: Settings, release: str = "", plugins: Iterable[str] = ()) -> Recording:
        """Look up the names of all jobs of the snapshot, which holds them itself from then on."""
        names = {job_id: name for job_id in _ids(snapshot) if (name := snapshot.name_of(job_id)) != str(job_id)}
        return cls(_named(snapshot, names), settings, release, tuple(plugins), names)


def _named(snapshot: Snapshot, names: Mapping[int, str]) -> Snapshot:
    return replace(snapshot, name_of=Names(names) if names else str)


def _ids(snapshot: Snapshot) -> Iterable[int]:
    """Every id that a plan of this snapshot can speak of."""
    for held in snapshot.allocations:
        yield held.job_id
        if held.array_id is not None:
            yield held.array_id
    for waiting in snapshot.pending:
        yield from (job.id for job in waiting.jobs)
        if waiting.key.throttle is not None:
            yield waiting.key.throttle[0]


def encode(recording: Recording) -> dict[str, Any]:
    """The document of a recording, in built-in types."""
    snapshot = recording.snapshot
    names = [name for name in Snapshot.__struct_fields__ if name != _NAMELESS]
    return {
        "snapshot_version": VERSION,
        "release": recording.release,
        "plugins": list(recording.plugins),
        "names": {str(job_id): name for job_id, name in recording.names.items()},
        "snapshot": {name: documents.plain(getattr(snapshot, name)) for name in names},
        "settings": documents.plain(recording.settings),
    }


def decode(document: Any) -> Recording:
    """The recording of a document. Raises: BadRecording with the place that is wrong, or the version."""
    if type(document) is not dict or "snapshot_version" not in document:
        raise BadRecording("that is no snapshot of gpusched", _HINT)
    version, release = document["snapshot_version"], document.get("release")
    if version != VERSION or type(version) is not int:
        by = f" (gpusched {printable(release, 40)})" if type(release) is str and release else ""
        shown = printable(repr(version), 40)
        raise BadRecording(
            f"the snapshot is of version {shown}{by}, and this release reads version {VERSION}",
            "read it with the release of gpusched that wrote it",
        )
    try:
        return _decode(document)
    except Mismatch as error:
        raise BadRecording(f"the snapshot is damaged: {error}", _HINT) from None
    except RecursionError:
        raise BadRecording("the snapshot is damaged: it is nested too deeply", _HINT) from None


def _decode(document: dict[str, Any]) -> Recording:
    for key in document:
        if key not in _KEYS:
            raise Mismatch(f"has {printable(repr(key), 40)}, which this release does not know")
    for key in _KEYS - {"schema_version"}:
        if key not in document:
            raise Mismatch(f"lacks {key}")
    names = {}
    for key, name in _part(dict[str, str], document, "names").items():
        if not (key.isascii() and key.isdigit()) or len(key) > len(str(1 << 63)):
            raise Mismatch(f"names {printable(repr(key), 40)}, which is no id of a job")
        names[int(key)] = name
    snapshot: Snapshot = _part(Snapshot, document, "snapshot")
    recording = Recording(
        _named(snapshot, names),
        _part(Settings, document, "settings"),
        _part(str, document, "release"),
        _part(tuple[str, ...], document, "plugins"),
        names,
    )
    _check(snapshot)
    return recording


def _part(kind: Any, document: dict[str, Any], key: str) -> Any:
    try:
        return documents.read(kind, document[key])
    except Mismatch as error:
        error.where.append(key)
        raise


def _check(snapshot: Snapshot) -> None:
    """What the policy takes for granted. Raises: Mismatch."""
    nodes = [node.name for node in snapshot.nodes]
    if len(set(nodes)) < len(nodes):
        raise Mismatch("has two nodes of one name")
    cards = [gpu.uuid for node in snapshot.nodes for gpu in node.gpus]
    if len(set(cards)) < len(cards):
        raise Mismatch("has two GPUs of one UUID")
    waiting = [job.id for one in snapshot.pending for job in one.jobs]
    if len(set(waiting)) < len(waiting):
        raise Mismatch("has a job that waits twice")
    if len({one.key for one in snapshot.pending}) < len(snapshot.pending):
        raise Mismatch("has a class of jobs twice")
    for one in snapshot.pending:
        if not one.jobs or one.total < len(one.jobs):
            raise Mismatch("has a class of jobs whose number is wrong")
