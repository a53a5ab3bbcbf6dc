"""The parts of a step on other nodes, as srun sees them: starts them together, relays their streams, ends them.

`Pump` serves them on its thread; what they report is for the main thread, which waits for signals and is woken by one.
"""

from __future__ import annotations

import os
import select
import sys
import time

from gpusched.addons.slurm.part_protocol import (
    CHUNK,
    CLOSED,
    ENDED,
    EOF,
    FAILED,
    GO,
    INPUT,
    INPUT_WINDOW,
    NOTE,
    OUTPUT,
    READY,
    SIGNAL,
    SIZE,
    TAKEN,
    USAGE,
    launch_frames,
    read_output,
)
from gpusched.addons.slurm.streams import Labeller, Outlet
from gpusched.cli.run_connection import BACK, LOST, OVER
from gpusched.engine.attach_protocol import ERR, EXIT, OUT, frame, take_frames
from gpusched.engine.attach_protocol import NOTE as SAID
from gpusched.quickjson import dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator, Mapping
    from typing import Any, Protocol

    from gpusched.addons.slurm.step import Step
    from gpusched.addons.slurm.step_tasks import NodeShare
    from gpusched.addons.slurm.streams import Pump
    from gpusched.cli.relay import RawTerminal
    from gpusched.cli.run_connection import RunEnding

    class Connection(Protocol):
        """What is needed of a `RunConnection`."""

        credit: int
        is_open: bool
        end: RunEnding

        @property
        def is_there(self) -> bool: ...

        @property
        def wants_write(self) -> bool: ...

        def fileno(self) -> int: ...
        def pause_ms(self) -> float | None: ...
        def on_ready(self, events: int) -> list[tuple[int, bytes]]: ...
        def send_input(self, content: bytes) -> None: ...
        def acknowledge(self, stream: int, count: int) -> None: ...
        def leave(self) -> None: ...
        def close(self) -> None: ...
else:
    # The other module makes enumerations of its numbers, for which it takes longer than all the rest.
    import _signal as signal

LAUNCH_S = 60.0
"""How long a node may take to prepare its tasks."""
LOST_CODE = -signal.SIGKILL
"""How a task has ended of which nothing will be heard any more."""
_MOST_INPUT = 1 << 20
"""Bytes of input that wait for a node, above which no more is read."""


class StreamTarget:
    """Where srun writes one stream of one task, and the labels of its lines."""

    __slots__ = ("labeller", "outlet")

    def __init__(self, outlet: Outlet, label: bytes | None) -> None:
        self.outlet = outlet
        self.labeller = None if label is None else Labeller(label)

    def put(self, data: bytes) -> None:
        self.outlet.put(data if self.labeller is None else self.labeller.feed(data))

    def end(self) -> None:
        if self.labeller is not None:
            self.outlet.put(self.labeller.end())


class NodePart:
    """The connection to the part of one node. Only the pump's thread uses it once that runs."""

    def __init__(self, share: NodeShare, connection: Connection, launch: Mapping[str, Any]) -> None:
        self.share = share
        self.connection = connection
        self.targets: dict[tuple[int, int], StreamTarget] = {}
        """By task and stream."""
        self.running = set(share.tasks)
        self.is_ready = self.is_over = False
        self.reads_input = True
        self.input = bytearray()
        self._input_credit = INPUT_WINDOW
        self._input_ends = False
        self._inbox = bytearray()
        self._outbox = bytearray(launch_frames(dumps(launch).encode()))
        self._unacknowledged = 0

    @property
    def node(self) -> str:
        return self.share.node

    def say(self, kind: int, content: bytes = b"") -> None:
        self._outbox += frame(kind, content)

    def pass_on(self, frames: bytes) -> None:
        self._outbox += frames

    def give(self, piece: bytes) -> None:
        """Take input for its tasks; an empty piece is its end."""
        if not self.reads_input:
            return
        self.input += piece
        self._input_ends = self._input_ends or not piece

    def push(self) -> None:
        """Hand on to the connection what it takes."""
        while self.input and self._input_credit > 0:
            piece = bytes(self.input[: min(CHUNK, self._input_credit)])
            del self.input[: len(piece)]
            self._input_credit -= len(piece)
            self.say(INPUT, piece)
        if self._input_ends and not self.input:
            self._input_ends = False
            self.say(EOF)
        connection = self.connection
        while self._outbox and connection.is_open and connection.credit > 0:
            piece = bytes(self._outbox[: connection.credit])
            del self._outbox[: len(piece)]
            connection.send_input(piece)

    def acknowledge(self) -> None:
        """Let it send more once what it sent has been written."""
        if self._unacknowledged and not any(target.outlet.is_full for target in self.targets.values()):
            self.connection.acknowledge(OUT, self._unacknowledged)
            self._unacknowledged = 0

    def take(self, data: bytes) -> list[tuple[int, bytes]]:
        """Relay output; returns the other frames. Raises: ValueError, IndexError for what is none."""
        self._unacknowledged += len(data)
        self._inbox += data
        found = []
        for kind, content in take_frames(self._inbox):
            if kind == OUTPUT:
                task, stream, piece = read_output(content)
                self.targets[task, stream].put(piece)
            elif kind == TAKEN:
                self._input_credit += int(content)
            elif kind == CLOSED:
                self.reads_input = False
                self.input.clear()
            else:
                found.append((kind, content))
        return found


class Parts:
    """All of them. Methods above the line are for the main thread, the others are called by `Pump`.

    Args: main: the thread that waits for signals; SIGCHLD wakes it.
    """

    def __init__(self, pump: Pump, main: int) -> None:
        self._pump = pump
        self._main = main
        self._parts: list[NodePart] = []
        # Both threads use these, each only appending or popping, which are atomic.
        self._events: list[tuple[str, NodePart, Any]] = []
        self._orders: list[bytes] = []
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        self._has_begun = self._leaves = False
        self.are_lost = False
        """Whether a node may still run its tasks: it was left or given up without a word of how they ended."""
        self._give_up_at = time.monotonic() + LAUNCH_S
        self.terminal: RawTerminal | None = None
        """That of srun, while it is the first task's on another node."""
        self.user_cpu_s = self.system_cpu_s = 0.0
        self.peaks_kib: list[int] = []

    def add(self, share: NodeShare, connection: Connection, launch: Mapping[str, Any]) -> NodePart:
        part = NodePart(share, connection, launch)
        self._parts.append(part)
        return part

    def add_target(self, part: NodePart, task: int, stream: int, fd: int, label: bytes | None) -> None:
        """Let a stream of a task be written to a descriptor of srun's."""
        part.targets[task, stream] = StreamTarget(self._pump.outlet(fd), label)

    @property
    def running(self) -> list[int]:
        """Tasks that have not ended, as far as is known."""
        return sorted(task for part in self._parts for task in part.running)

    def take_events(self) -> Iterator[tuple[str, NodePart, Any]]:
        """What has happened: `go`, `failed`, `ended`, `note`, `lost` or `killed`, where, and facts.

        What is not iterated over stays: tasks may have ended by the time their start is seen.
        """
        while self._events:
            yield self._events.pop(0)

    def report(self, step: Step) -> None:
        """Tell the step what happened while its tasks run."""
        for event in self.take_events():
            self._report(step, *event)

    def report_rest(self, step: Step) -> None:
        """Tell the step what happened since: its last tasks may have ended just as it looked whether any runs."""
        for what, part, fact in self.take_events():
            if what in ("lost", "killed") and not fact:
                # The ends of its tasks are known, but not all that they have written.
                step.say(f"error: Node failure on {part.node}: output of its tasks may be missing")
                step.is_cut_short = True
            else:
                self._report(step, what, part, fact)

    @staticmethod
    def _report(step: Step, what: str, part: NodePart, fact: Any) -> None:
        if what == "note":
            sys.stderr.write(f"{fact}\n")
        elif what == "ended":
            step.take_ended(part.node, fact)
        elif what in ("lost", "killed"):
            if what == "lost":
                step.say(f"error: Node failure on {part.node}")
            step.take_ended(part.node, [(task, LOST_CODE) for task in fact])
            if step.running and not step.options.has("no-kill"):
                step.terminate()

    def restore_terminal(self) -> None:
        if self.terminal is not None:
            self.terminal.restore()

    def signal(self, number: int) -> None:
        """Signal all tasks."""
        self._order(frame(SIGNAL, b"%d" % number))

    def resize(self, rows: int, columns: int) -> None:
        """Tell the size of srun's terminal."""
        self._order(frame(SIZE, b"%d %d" % (rows, columns)))

    def leave(self) -> None:
        """Go, whatever they still do: that ends what still runs."""
        self._order(b"")

    def _order(self, words: bytes) -> None:
        self._orders.append(words)
        os.write(self._wake_in, b"x")

    # --- on the pump's thread ---------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return not self._leaves and any(not part.is_over for part in self._parts)

    @property
    def wants_input(self) -> bool:
        """Whether input is to be read: somebody takes it, and nobody lags too far behind."""
        readers = [part for part in self._parts if part.reads_input and not part.is_over]
        return all(len(part.input) < _MOST_INPUT for part in readers) and (bool(readers) or self._pump.has_sinks)

    def give(self, piece: bytes) -> None:
        for part in self._parts:
            part.give(piece)
            part.push()

    def register(self, poll: select.poll) -> float | None:
        """Register what is waited for; returns how long at most, in milliseconds."""
        poll.register(self._wake_out, select.POLLIN)
        pauses = [] if self._has_begun else [max(0.0, self._give_up_at - time.monotonic()) * 1000]
        for part in self._parts:
            if part.is_over:
                continue
            part.acknowledge()
            part.push()
            connection = part.connection
            if (fd := connection.fileno()) >= 0:
                poll.register(fd, select.POLLIN | (select.POLLOUT if connection.wants_write else 0))
            if (pause_ms := connection.pause_ms()) is not None:
                pauses.append(pause_ms)
        return min(pauses, default=None)

    def on_ready(self, ready: Mapping[int, int]) -> None:
        """Serve what is ready, and what is due."""
        if self._wake_out in ready:
            os.read(self._wake_out, 4096)
        while self._orders:
            self._carry_out(self._orders.pop(0))
        for part in self._parts:
            if not part.is_over:
                self._serve(part, ready.get(part.connection.fileno(), 0))
        if not self._has_begun:
            self._begin(time.monotonic())

    def _carry_out(self, words: bytes) -> None:
        if words:
            for part in self._parts:
                part.pass_on(words)
            return
        self._leaves = True
        for part in self._parts:
            # What it says travels behind its last byte, and ends the tasks.
            self.are_lost |= self._has_begun and bool(part.running) and not part.connection.is_there
            part.connection.leave()
            part.connection.on_ready(select.POLLOUT)
            part.connection.close()

    def _serve(self, part: NodePart, events: int) -> None:
        try:
            for kind, content in part.connection.on_ready(events):
                if kind == OUT:
                    for inner, words in part.take(content):
                        self._hear(part, inner, words)
                elif kind == ERR:
                    part.connection.acknowledge(ERR, len(content))
                    self._pump.outlet(2).put(content)
                elif kind in (LOST, BACK, SAID):
                    self._tell("note", part, f"srun: {content.decode('utf-8', 'replace')}")
                elif kind in (EXIT, OVER):
                    self._end(part, content.decode("utf-8", "replace") if kind == OVER else "")
        except (ValueError, IndexError, KeyError) as error:
            self._end(part, f"it sent an invalid message: {error}")
        part.push()

    def _hear(self, part: NodePart, kind: int, content: bytes) -> None:
        if kind == READY:
            part.is_ready = True
        elif kind == NOTE:
            self._tell("note", part, content.decode("utf-8", "surrogateescape"))
        elif kind == FAILED:
            part.is_over = True
            self._tell("failed", part, content.decode("utf-8", "surrogateescape"))
        elif kind == ENDED:
            ended = [(int(task), int(code)) for task, code in loads(content)]
            part.running.difference_update(task for task, _ in ended)
            self._tell("ended", part, ended)
        elif kind == USAGE:
            user_s, system_s, peaks = loads(content)
            self.user_cpu_s += user_s
            self.system_cpu_s += system_s
            self.peaks_kib += peaks
            part.is_over = True
            self._close(part)

    def _end(self, part: NodePart, why: str) -> None:
        """The connection is over before the part was."""
        if part.is_over:
            return
        part.is_over = True
        end = part.connection.end
        self._close(part)
        if not self._has_begun:
            self._tell("failed", part, end.sentence or why or "the job ended there")
            return
        lost = sorted(part.running)
        part.running.clear()
        self.are_lost |= bool(lost) and not end.is_known
        self._tell("killed" if end.is_known else "lost", part, lost)

    def _close(self, part: NodePart) -> None:
        for target in part.targets.values():
            target.end()
        part.connection.close()

    def _begin(self, now: float) -> None:
        """Start all tasks once every node is ready."""
        if all(part.is_ready for part in self._parts):
            self._has_begun = True
            for part in self._parts:
                part.say(GO)
                part.push()
                part.connection.on_ready(0)
            self._tell("go", self._parts[0], None)
        elif now >= self._give_up_at:
            self._has_begun = True
            late = next(part for part in self._parts if not part.is_ready)
            self._tell("failed", late, f"no answer within {LAUNCH_S:.0f} s")

    def _tell(self, what: str, part: NodePart, fact: object) -> None:
        self._events.append((what, part, fact))
        signal.pthread_kill(self._main, signal.SIGCHLD)
