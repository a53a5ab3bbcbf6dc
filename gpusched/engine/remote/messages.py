"""Messages between the head and its nodes: one request, `SyncRequest`, and one reply, `SyncReply`.

Frames may be lost, delayed, duplicated and reordered. What the head wants of a node has a version, which every change
increases: a run in another state, an order that takes effect once, a run to be forgotten. Each request repeats the
changes that the node has not acknowledged, each reply the events that the head has not: a repetition changes nothing.
To an agent that knows nothing yet, the head sends the state of all runs.

A frame is one line, then its parts as JSON documents of the lengths in that line:

    gpusched-sync WIRE_VERSION GPUSCHED_VERSION+FIELDS LENGTH ...

The line keeps its form in all versions, so that both sides can tell whom they are talking to. FIELDS means the
fields of all messages: a field that only one side knows would be ignored by the other, silently. Part 0 is the request
or the reply; those after it are the request's changes, so that a repetition is neither written nor read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, get_args
from zlib import crc32

from msgspec import field

from gpusched import __version__
from gpusched.model.cluster import GpuReading, GpuTargets, HostSample, Isolation, Processor
from gpusched.model.execution import EngineEvent, LaunchSite, OpenRun, Order
from gpusched.model.mig import MigOrder
from gpusched.model.progress import ToldProgress
from gpusched.model.settings import NodeSettings
from gpusched.model.step import TaskUsage
from gpusched.model.value import Value, decode, encode, fields

MAGIC = b"gpusched-sync"
WIRE_VERSION = 6
"""Changes with everything that a node of the previous version would misunderstand."""
MAX_FRAME_BYTES = 64 << 20
MAX_CHANGE_BYTES = 32 << 20
"""Of one change, which may be a run's script and environment."""
USUAL_BYTES = 512 << 10
"""Frames are made about this large, unless a single run needs more."""
MOST_CHANGES = 1000
"""In one request."""
EVENTS_PER_REPLY = 1000
_LONGEST_LINE = 16 << 10


class WantedRun(Value, tag_field="change", tag="run"):
    """A run in the state in which it is to be: `Engine.reconcile`."""

    known: OpenRun

    @property
    def run(self) -> str:
        return self.known.run


class OrderRun(Value, tag_field="change", tag="order"):
    """`Engine.order`, for an order that takes effect once; all others are part of the state of a run."""

    run: str
    order: Order


class ForgetRun(Value, tag_field="change", tag="forget"):
    """A run whose end is recorded, see `Engine.reconcile`."""

    run: str


Change = WantedRun | OrderRun | ForgetRun


class SyncRequest(Value):
    """From the head. What has changed since the node's acknowledgement follows as separate parts."""

    number: int
    """Increases with every request of the session, repetitions included."""
    session: int
    """Of the head, larger at each of its starts; the node refuses those below the largest it has seen."""
    epoch: int = 0
    """Of the agent that the request is for; 0 to ask. Another agent applies nothing of it."""
    versions: tuple[int, ...] = ()
    """Of the changes, in order."""
    as_of: int = 0
    """Version of `runs`."""
    runs: tuple[OpenRun, ...] | None = None
    """All runs of the node, without tickets: `Engine.adopt`. None for an agent that has them."""
    acked_event: int = 0
    """Number of the last event received; the node may drop it and those before it."""
    heard: int = 0
    """Serial of the newest reply received from this epoch; 0 if it proves no contact, see `engine.contact`."""
    acked_reading: int = 0
    """As `acked_event`, of the last reading of the GPUs."""
    wants_report: bool = False
    wanted_reading: int = 0
    """Counts the readings of the GPUs asked for in this session. A new number begins one, part of a later report."""
    mig_orders: tuple[MigOrder, ...] = ()
    """Layouts to make before that reading."""
    gpu_targets: GpuTargets | None = None
    """What the cards are to be like, from the next reading on; None: as they are."""
    cpu_of: tuple[str, ...] = ()
    """Runs whose CPU time the report is to contain."""
    watched: tuple[tuple[int, int], ...] = ()
    """Processes of the node, by pid and start, of which the report is to say whether they are gone."""


class NodeReport(Value):
    """State of a node and its live runs. All instants are by the node's clock."""

    at: float
    owners: dict[int, str]
    """Runs of the processes in `gpus`, by pid."""
    checkpoints: dict[str, float]
    cpu_seconds: dict[str, float]
    gone: tuple[tuple[int, int], ...] = ()
    """Of the watched processes those that have ended."""
    host: HostSample | None = None
    gpus: GpuReading | None = None
    """None: no reading since the last one that the head acknowledged."""
    reading: int = 0
    """Number of `gpus`, counted per epoch."""
    isolation: Isolation | None = None
    processors: tuple[Processor, ...] = ()
    site: LaunchSite | None = None
    settings: NodeSettings | None = None
    """Section [node] of its own settings."""
    trouble: str | None = None
    """Why no run can be started there now: a sentence."""
    progress: Mapping[str, ToldProgress] = field(default_factory=dict)
    """Of its runs that report any in the spool."""


class SyncReply(Value):
    """From a node, as the answer to a request, or unasked when it has news."""

    number: int
    """Of the request; 0 if unasked."""
    session: int
    """Of the request."""
    epoch: int = 0
    """Of the agent: increases at each of its starts."""
    serial: int = 0
    """Increases with every reply of an epoch."""
    boot_id: str = ""
    at: float = 0.0
    """The node's clock."""
    applied: int = 0
    """Version of the last change applied in this session."""
    is_ready: bool = False
    """False: it must get all runs first."""
    first_event: int = 1
    """Number of the first of `events`, counted per session and epoch."""
    events: tuple[EngineEvent, ...] = ()
    report: NodeReport | None = None
    trouble: str | None = None
    """What the engine failed to do; it is tried again."""
    refused: str | None = None
    """Why nothing of the request was applied: a sentence."""


class OutputWanted(Value, tag_field="stream", tag="output"):
    """Header of a stream from the head, on which the node answers with an `OutputPiece` on a line, then bytes."""

    run: str
    user: str
    uid: int
    path: str
    keep: int = 0
    """How many rotated files there may be."""
    is_error: bool = False
    cursor: str = ""
    """Of the piece before; empty to begin."""
    lines: int | None = None
    """Begin at the last lines; None: with the oldest output."""
    most: int = 0
    """Bytes of the piece."""
    wait_s: float = 0.0
    """How long to wait for more output."""


class OutputPiece(Value):
    """What was found of a run's output; its bytes follow."""

    cursor: str
    is_found: bool = False
    """Whether there is a file."""
    is_skipped: bool = False
    """Whether output was rotated away before it could be read."""
    path: str | None = None
    """Where the output is, if not where it was wanted."""
    refused: str | None = None
    """Why it cannot be read: a sentence."""


class CommandCall(Value, tag_field="stream", tag="command"):
    """Header of a stream from a node: the connection of a program there that wants to talk to the daemon."""

    uid: int
    pid: int
    start_ticks: int
    run: str | None
    """The run to which it belongs, as the node knows; None for none."""


class AttachCall(Value, tag_field="stream", tag="attach"):
    """Header of a stream from the head: the connection of a client of this user to a run's supervisor."""

    run: str
    user: str
    uid: int
    token: str = ""
    """Of the door that an `EnterOrder` opens; empty for the socket of a foreground run."""
    is_return: bool = False
    """The client was connected before: where nobody listens now, nobody will."""


class UsageWanted(Value, tag_field="stream", tag="usage"):
    """Header of a stream from the head, on which the node answers with a `UsageFound`."""

    run: str


class UsageFound(Value):
    """What the tasks of a run's steps use on the node."""

    tasks: tuple[TaskUsage, ...]


StreamHeader = OutputWanted | CommandCall | AttachCall | UsageWanted


class Frame(NamedTuple):
    """An unpacked frame; `parts` is empty for another wire version, or other fields."""

    wire: int
    version: str
    mark: str
    """See `fields_mark`."""
    parts: list[bytes]


@cache
def fields_mark() -> str:
    """Placeholder of `message_fields`."""
    return f"{crc32(repr(sorted(message_fields().items())).encode()):08x}"


def message_fields() -> dict[str, list[str]]:
    """The names of the fields of all messages, and of everything in them, by class."""
    found: dict[str, list[str]] = {}
    waiting: list[Any] = [SyncRequest, SyncReply, Change, StreamHeader]
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, Value) and kind.__name__ not in found:
            found[kind.__name__] = list(kind.__struct_fields__)
            waiting += [field.type for field in fields(kind)]
    return found


def pack(head: SyncRequest | SyncReply, changes: Sequence[bytes] = ()) -> bytes:
    """Make a frame. Args: changes: as by `encode`."""
    parts = [encode(head), *changes]
    version = f"{__version__}+{fields_mark()}"
    line = " ".join([MAGIC.decode(), str(WIRE_VERSION), version, *(str(len(part)) for part in parts)])
    return b"".join([line.encode(), b"\n", *parts])


def unpack(frame: bytes) -> Frame:
    """Split a frame. Raises: ValueError when it is none."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(frame):,} bytes; at most {MAX_FRAME_BYTES:,} are accepted")
    line, newline, _ = frame[:_LONGEST_LINE].partition(b"\n")
    words = line.split(b" ")
    if not newline or words[0] != MAGIC or len(words) < 3:
        raise ValueError(f"not a frame of a gpusched node: {frame[:40]!r}")
    wire, (version, _, mark) = int(words[1]), words[2].decode().partition("+")
    if wire != WIRE_VERSION or mark != fields_mark():
        return Frame(wire, version, mark, [])
    at, parts = len(line) + 1, []
    for word in words[3:]:
        end = at + int(word)
        parts.append(frame[at:end])
        at = end
    if at != len(frame) or not parts:
        raise ValueError(f"a frame of {len(frame):,} bytes that should have {at:,}")
    return Frame(wire, version, mark, parts)


def change_from(body: bytes) -> Change:
    """Decode a change. Raises: ValueError."""
    wanted: Any = Change
    found: Change = decode(body, wanted)
    return found


def header_from(body: bytes) -> StreamHeader:
    """Decode the header of a stream. Raises: ValueError."""
    wanted: Any = StreamHeader
    found: StreamHeader = decode(body, wanted)
    return found


def version_trouble(who: str, frame: Frame) -> str | None:
    """Why the sender of this frame and this gpusched cannot talk; None when they can.

    Args: who: the sender.
    """
    if (frame.wire, frame.mark) == (WIRE_VERSION, fields_mark()):
        return None
    theirs, ours = f"wire version {frame.wire}", f"wire version {WIRE_VERSION}"
    if frame.wire == WIRE_VERSION:
        # Two states of the code between two versions, which is what developers have.
        theirs, ours = f"{theirs}, messages {frame.mark or 'unknown'}", f"{ours}, messages {fields_mark()}"
    return (
        f"{who} runs gpusched {frame.version} ({theirs}), this is gpusched {__version__} ({ours}); "
        "install the same version on both"
    )
