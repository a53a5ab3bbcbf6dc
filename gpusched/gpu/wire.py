"""A reading as one line of JSON, from the child that runs the source to the daemon.

Values travel in the order of the dataclasses' fields, so both ends must be the same release; they
are, since the daemon starts the child from its own files.
"""

from __future__ import annotations

import json
from typing import Any

from gpusched.model.cluster import GpuProcess, GpuReading, GpuSample, Xid
from gpusched.model.value import Value

_PROCESS_FIELDS = GpuProcess.__struct_fields__
_SAMPLE_FIELDS = GpuSample.__struct_fields__
_SAMPLE_PROCESSES = _SAMPLE_FIELDS.index("processes")
_SAMPLE_OPENERS = _SAMPLE_FIELDS.index("openers")
_XID_FIELDS = Xid.__struct_fields__
_SAMPLE_XIDS = _SAMPLE_FIELDS.index("xids")


class Answer(Value):
    """One reading and the request it answers."""

    request: int
    reading: GpuReading
    is_last: bool = False
    """The child ends after this: there is nothing to keep a driver open for."""


def encode(answer: Answer) -> bytes:
    """The answer as a line."""
    reading = answer.reading
    document = [
        answer.request,
        answer.is_last,
        reading.at,
        reading.source,
        [_pack_sample(gpu) for gpu in reading.gpus],
        reading.error,
        reading.driver_version,
        reading.notes,
        reading.log_trouble,
        reading.faults_until,
    ]
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Answer:
    """The answer in a line. Raises: ValueError when it is damaged."""
    try:
        request, is_last, at, source, gpus, error, driver_version, notes, *faults = json.loads(line)
        samples = tuple(_unpack_sample(values) for values in gpus)
    except (TypeError, KeyError, IndexError) as problem:
        raise ValueError(f"not an answer: {problem}") from None
    return Answer(request, GpuReading(at, source, samples, error, driver_version, tuple(notes), *faults), is_last)


def _pack_sample(gpu: GpuSample) -> list[Any]:
    values = [getattr(gpu, name) for name in _SAMPLE_FIELDS]
    if gpu.processes is not None:
        values[_SAMPLE_PROCESSES] = [[getattr(process, name) for name in _PROCESS_FIELDS] for process in gpu.processes]
    values[_SAMPLE_OPENERS] = [[getattr(process, name) for name in _PROCESS_FIELDS] for process in gpu.openers]
    values[_SAMPLE_XIDS] = [[getattr(xid, name) for name in _XID_FIELDS] for xid in gpu.xids]
    return values


def _unpack_sample(values: list[Any]) -> GpuSample:
    listed = values[_SAMPLE_PROCESSES]
    if listed is not None:
        values[_SAMPLE_PROCESSES] = tuple(GpuProcess(*process) for process in listed)
    values[_SAMPLE_OPENERS] = tuple(GpuProcess(*process) for process in values[_SAMPLE_OPENERS])
    values[_SAMPLE_XIDS] = tuple(Xid(*xid) for xid in values[_SAMPLE_XIDS])
    return GpuSample(*values)
