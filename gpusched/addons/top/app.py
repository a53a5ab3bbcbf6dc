"""gtop on textual: keys in, changed lines out. What is shown is made by `frame`, what it means by `state`."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Coroutine
from typing import Any, ClassVar
from urllib.parse import urlencode

from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.driver import Driver
from textual.events import Key, MouseScrollDown, MouseScrollUp, Resize
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from gpusched.addons.top.feed import LogReader, TopConnection, boards, find_next
from gpusched.addons.top.frame import WIDEST, frame
from gpusched.addons.top.state import PANES, Log, TopState
from gpusched.addons.top.text import Line, clean
from gpusched.errors import GpuschedError

_REST_S = 0.4
"""The cursor rests on a job for this long before it is asked why that waits: the answer costs the daemon a plan."""
_WHY_S = 30.0
"""How long an answer about why a job waits is kept."""
_MESSAGE_S = 8.0
_RESERVATIONS_S = 10.0
_TICK_S = 1.0


def has_light_ground(colors: str) -> bool:
    """Whether a terminal is light by COLORFGBG, whose last number is that of the ground: `0;15`, `0;default;15`."""
    return colors.rpartition(";")[2] in ("7", "15")


def styles(*, is_light: bool) -> dict[str, Style]:
    """Blue, orange and grey differ for all eyes, and are darker on light ground; letters and words say the same."""
    blue, orange, grey = (f"color({number})" for number in ((25, 130, 241) if is_light else (33, 208, 245)))
    return {
        "": Style(),
        "title": Style(bold=True),
        "good": Style(color=blue),
        "warn": Style(color=orange, bold=True),
        "dim": Style(color=grey),
        "key": Style(bold=True, underline=True),
        "mark": Style(bold=True),
        "head": Style(color=grey, underline=True),
        "ask": Style(bold=True, reverse=True),
        "card": Style(bold=True),
        "full": Style(color=blue, bold=True),
    }


_STYLES = styles(is_light=has_light_ground(os.environ.get("COLORFGBG", "")))
_CURSOR = Style(reverse=True)
_KEYS = {
    "up": -1,
    "k": -1,
    "down": 1,
    "j": 1,
}


class TopScreen(Widget):
    """The whole terminal as lines; repaints those that have changed."""

    DEFAULT_CSS = "TopScreen { width: 100%; height: 100%; background: ansi_default; color: ansi_default; }"

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []
        self._strips: list[Strip] = []

    def show(self, lines: list[Line]) -> None:
        """Draw these lines in place of the last ones."""
        width = self.size.width
        changed = [
            number for number, line in enumerate(lines) if number >= len(self._lines) or self._lines[number] != line
        ]
        if len(lines) != len(self._lines):
            changed = list(range(len(lines)))
            self._strips = []
        self._strips += [Strip.blank(width)] * (len(lines) - len(self._strips))
        for number in changed:
            strip = Strip([Segment(text, _style(style)) for text, style in lines[number] if text])
            self._strips[number] = strip.adjust_cell_length(width)
        self._lines = lines
        if changed:
            self.refresh(*(Region(0, number, width, 1) for number in changed))

    def forget(self) -> None:
        """Redraw all lines the next time."""
        self._lines, self._strips = [], []

    def render_line(self, y: int) -> Strip:
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)


def _style(words: str) -> Style:
    if words.startswith("cursor"):
        return _STYLES[words[7:]] + _CURSOR
    return _STYLES[words]


class TopApp(App[int]):
    """The application. Args: state: with the options applied; socket_path: of the daemon."""

    BINDINGS: ClassVar[list[BindingType]] = []
    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: ansi_default; color: ansi_default; }"

    def __init__(self, state: TopState, socket_path: str, driver_class: type[Driver] | None = None) -> None:
        super().__init__(driver_class=driver_class, ansi_color=True)
        self.animation_level = "none"
        self.state = state
        self._socket_path = socket_path
        self._screen = TopScreen()
        self._actions = TopConnection(socket_path)
        self._tasks: set[asyncio.Task[None]] = set()
        self._board_task: asyncio.Task[None] | None = None
        self._why_task: asyncio.Task[None] | None = None
        self._search_task: asyncio.Task[None] | None = None
        self._reserved_at = float("-inf")
        self._why_known: dict[str, tuple[float, dict[str, Any]]] = {}
        self._asked: dict[str, str] = {}
        self._reader: LogReader | None = None
        self._log_task: asyncio.Task[None] | None = None
        self._message_until = 0.0
        self._clock = (0.0, 0.0)
        """The daemon's time, and ours on the monotonic clock, at the last answer."""
        self._stop = threading.Event()
        self._turn = asyncio.Lock()
        self.failure: Exception | None = None
        """The exception that ended it."""

    def compose(self) -> ComposeResult:
        yield self._screen

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        # A lost terminal and a polite kill leave by the same way as q, which restores the terminal.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self.leave)
        self._listen()
        self.set_interval(_TICK_S, self._tick)

    def on_unmount(self) -> None:
        self._stop.set()
        if self._reader is not None:
            self._reader.close()

    def leave(self) -> None:
        self.exit(0)

    def _handle_exception(self, error: Exception) -> None:
        # Told after the terminal is as it was, in the words of the other commands.
        self.failure = self.failure or error
        self.exit(1)

    # --- the board --------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Ask for the board with the parameters as they are now."""
        if self._board_task is not None:
            self._board_task.cancel()
        self._asked = self.state.query()
        self._board_task = self._start(self._receive(self._asked))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._handle_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))

    async def _receive(self, asked: dict[str, str]) -> None:
        connection = TopConnection(self._socket_path)
        state = self.state
        try:
            async for answer in boards(connection, lambda: asked):
                if isinstance(answer, dict):
                    state.away_since = None
                    self._clock = float(answer["now"]), time.monotonic()
                    state.take(answer, asked["view"])
                elif isinstance(answer, GpuschedError) and answer.code not in ("no_daemon", "not_ready"):
                    self._say(_sentence(answer), is_refusal=True)
                elif state.away_since is None:
                    state.away_since = time.time()
                    state.question = None
                self._changed()
        finally:
            connection.close()

    def _changed(self) -> None:
        """Draw, and ask for other rows or reasons if the cursor has come to any."""
        self._draw()
        if self.state.query() != self._asked:
            self._listen()
        self._look_why()
        self._look_log()
        self._look_reservations()

    def _tick(self) -> None:
        """Draw the passing of time."""
        if self._clock[1] and self.state.away_since is None:
            self.state.now = self._clock[0] + time.monotonic() - self._clock[1]
        if self.state.message and self.state.typing is None and time.monotonic() > self._message_until:
            self.state.message = ""
        self._look_reservations()
        self._draw()

    def _draw(self) -> None:
        size = self._screen.size
        if size.width and size.height:
            self._screen.show(frame(self.state, size.width, size.height))

    def on_resize(self, event: Resize) -> None:
        self._screen.forget()
        self.call_after_refresh(self._changed)

    def _say(self, text: str, *, is_refusal: bool = False) -> None:
        self.state.say(text, is_refusal=is_refusal)
        self._message_until = time.monotonic() + _MESSAGE_S

    # --- why and log ------------------------------------------------------------------------------

    def _look_why(self) -> None:
        """Ask why the job under the cursor waits, unless that is known; forget about the one before."""
        row = self.state.row()
        job = row["id"] if row is not None and self.state.pane == "jobs" and row["state"] == "PENDING" else None
        known = self._why_known.get(job or "")
        if known is not None and time.monotonic() - known[0] < _WHY_S:
            self.state.why = known[1]
            return
        if self.state.why is not None and self.state.why["id"] != job:
            self.state.why = None
        if job is not None and (self._why_task is None or self._why_task.done()):
            self._why_task = self._start(self._ask_why(job))

    async def _ask_why(self, job: str) -> None:
        await asyncio.sleep(_REST_S)
        row = self.state.row()
        if row is None or row["id"] != job or self.state.away_since is not None:
            # The cursor has moved.
            self.call_later(self._look_why)
            return
        try:
            answer = (await self._call("GET", f"/v1/jobs/{job}/why"))["why"]
        except (GpuschedError, OSError):
            # The job may be gone; its sentence is on the board anyway.
            answer = {"id": job, "text": None, "alternatives": []}
        if len(self._why_known) > 100:
            self._why_known.clear()
        self._why_known[job] = time.monotonic(), {**answer, "id": job}
        self._changed()

    async def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        # One connection, and one request at a time on it.
        async with self._turn:
            return await self._actions.call(method, path, body)

    def _look_log(self) -> None:
        """Beside a wide list: read the output of the job under the cursor once that rests on it."""
        state, row = self.state, self.state.row()
        shown = state.log
        if shown is not None and not shown.is_of_cursor:
            return
        has_output = row is not None and row.get("tasks") is None and row.get("start_at") is not None
        is_beside = self._screen.size.width >= WIDEST and state.pane == "jobs" and state.away_since is None
        job = row["id"] if row is not None and has_output and is_beside else None
        if shown is not None and shown.job != job:
            self._close_log()
        if job is not None and state.log is None and (self._log_task is None or self._log_task.done()):
            self._log_task = self._start(self._open_log(job))

    async def _open_log(self, job: str) -> None:
        await asyncio.sleep(_REST_S)
        row = self.state.row()
        if self.state.log is None and row is not None and row["id"] == job:
            self._read_log(Log(job, is_of_cursor=True))
            self._draw()
        else:
            # The cursor has moved.
            self.call_later(self._look_log)

    def _close_log(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self.state.log = None

    def _toggle_log(self) -> None:
        row = self.state.row()
        shown = self.state.log
        self._close_log()
        if (
            row is None
            or self.state.pane != "jobs"
            or (shown is not None and not shown.is_of_cursor and shown.job == row["id"])
        ):
            return
        if row["tasks"] is not None:
            self._say(f"job {row['id']} is an array; unfold it with t, and look at one of its tasks", is_refusal=True)
            return
        self._read_log(Log(row["id"]))

    def _read_log(self, log: Log) -> None:
        self.state.log = log
        loop = asyncio.get_running_loop()

        def take(lines: list[str], note: str) -> None:
            def apply() -> None:
                log.lines.extend(clean(line) for line in lines)
                log.note = note or log.note
                self._draw()

            if not self._stop.is_set():
                loop.call_soon_threadsafe(apply)

        reader = self._reader = LogReader(self._socket_path, log.job, take)
        threading.Thread(target=reader.run, args=(self._stop.wait,), name="log", daemon=True).start()

    # --- keys -------------------------------------------------------------------------------------

    async def on_event(self, event: Any) -> None:
        # Before textual's own handling, which would move a focus with tab.
        if isinstance(event, Key):
            event.stop()
            event.prevent_default()
            self._press(event)
            return
        await super().on_event(event)

    def on_mouse_scroll_down(self, _: MouseScrollDown) -> None:
        self.state.move(3)
        self._changed()

    def on_mouse_scroll_up(self, _: MouseScrollUp) -> None:
        self.state.move(-3)
        self._changed()

    def _press(self, event: Key) -> None:
        key, char = event.key, event.character or ""
        state = self.state
        if key == "ctrl+c":
            self.leave()
        elif key == "ctrl+z":
            self.action_suspend_process()
        elif state.question is not None:
            self._answer_question(key, char)
        elif state.typing is not None:
            self._type_filter(key, char)
        elif key in ("q", "f10"):
            self.leave()
        elif state.has_help or state.has_warnings:
            state.has_help = state.has_warnings = False
        elif state.away_since is None:
            self._command(key, char)
        self._changed()

    def _answer_question(self, key: str, char: str) -> None:
        state = self.state
        question = state.question
        assert question is not None
        if key == "enter" or (question.count is None and char in "yYnN" and char):
            if char in ("y", "Y") and question.count is None:
                question.typed = "y"
            state.question = None
            if question.is_confirmed:
                self._start(self._act(question.command, question.path, question.body))
            else:
                self._say("nothing was done")
        elif key == "escape":
            state.question = None
            self._say("nothing was done")
        elif key == "backspace":
            question.typed = question.typed[:-1]
        elif len(char) == 1 and char.isprintable() and len(question.typed) < 10:
            question.typed += char

    def _type_filter(self, key: str, char: str) -> None:
        state = self.state
        assert state.typing is not None
        if key == "enter":
            state.set_filter(state.typing)
        elif key == "escape":
            state.typing, state.message = None, ""
        elif key == "backspace":
            state.typing = state.typing[:-1]
        elif key == "ctrl+u":
            state.typing = ""
        elif len(char) == 1 and char.isprintable():
            state.typing, state.message = state.typing + char, ""

    def _command(self, key: str, char: str) -> None:
        state = self.state
        page = max(1, state.visible - 1)
        if key in _KEYS:
            state.move(_KEYS[key])
        elif key in ("pagedown", "ctrl+f", "ctrl+d"):
            state.move(page)
        elif key in ("pageup", "ctrl+b"):
            state.move(-page)
        elif key in ("home", "g"):
            state.go(0)
        elif key == "end" or char == "G":
            state.go(state.total - 1)
        elif key == "space":
            state.mark()
        elif char == "U":
            state.marked.clear()
        elif char == "/":
            state.typing, state.message = state.filter, ""
        elif key == "tab":
            state.choose(PANES[(PANES.index(state.pane) + 1) % len(PANES)])
        elif char in "12345" and char:
            state.choose(PANES[int(char) - 1])
        elif char == "o":
            state.next_sort()
        elif char == "t" or key == "enter":
            state.fold()
        elif char == "w":
            state.is_wide_detail = not state.is_wide_detail
        elif char == "l":
            self._toggle_log()
        elif char == "m":
            state.is_mine = not state.is_mine
            state.restart()
        elif char == "u":
            row = state.row()
            if row is not None and "user" in row and state.pane != "reservations":
                state.set_filter("" if state.filter == f"user:{row['user']}" else f"user:{row['user']}")
        elif char == "n":
            self._next_match()
        elif char == "e":
            state.has_ended = not state.has_ended
            state.restart()
        elif char == "!":
            state.has_warnings = True
        elif char == "?" or key == "f1":
            state.has_help = True
        elif char == "c" or key == "f9":
            state.ask("cancel")
        elif char in ("h", "r", "R"):
            state.ask({"h": "hold", "r": "release", "R": "requeue"}[char])
        elif char in ("+", "-"):
            state.ask("nicer" if char == "+" else "less nice")
        elif key == "escape":
            state.marked.clear()
            if state.filter:
                state.set_filter("")

    def _next_match(self) -> None:
        """Go to the next row, of all that there are, whose name or id has the word that was last filtered by."""
        state = self.state
        if state.view not in ("active", "ended") or state.pane != "jobs":
            return
        if not state.sought:
            self._say("n goes to the next row with the word of a filter: type / and a word")
        elif self._search_task is None or self._search_task.done():
            self._search_task = self._start(self._find_next())

    async def _find_next(self) -> None:
        state = self.state

        async def ask(asked: dict[str, str]) -> dict[str, Any]:
            return await self._call("GET", f"/v1/board?{urlencode(asked)}")

        sought, query = state.sought, state.search()
        try:
            place = await find_next(ask, state)
        except (GpuschedError, OSError) as error:
            self._say(_sentence(error) if isinstance(error, GpuschedError) else "the daemon went away", is_refusal=True)
            return
        if state.search() != query or state.pane != "jobs":
            # Another order or filter by now.
            return
        if place is None:
            self._say(f"no row has {clean(sought, 40)}")
        else:
            state.go(place)
        self._changed()

    # --- reservations -----------------------------------------------------------------------------

    def _look_reservations(self) -> None:
        """Ask for reservations and maintenance while they are shown."""
        if self.state.pane != "reservations" or self.state.away_since is not None:
            return
        if time.monotonic() - self._reserved_at > _RESERVATIONS_S:
            self._reserved_at = time.monotonic()
            self._start(self._ask_reservations())

    async def _ask_reservations(self) -> None:
        try:
            found = (await self._call("GET", "/v1/reservations"))["reservations"]
        except (GpuschedError, OSError):
            # The line above says if the daemon is away.
            return
        self.state.reservations = [{**one, "id": one["name"]} for one in found]
        self.state.follow()
        self._draw()

    async def _act(self, command: str, path: str, body: dict[str, Any]) -> None:
        try:
            answer = await self._call("POST", path, body)
        except GpuschedError as error:
            self._say(_sentence(error), is_refusal=True)
        except OSError:
            self._say(f"the daemon went away; it may have done: {command}", is_refusal=True)
        else:
            self._say(_done(command, answer))
            self.state.marked.clear()
        self._changed()


def _sentence(error: GpuschedError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message


def _done(command: str, answer: dict[str, Any]) -> str:
    """What an action has done, in one sentence."""
    for key, text in (("ended", "had ended before"), ("unchanged", "was so before"), ("missing", "is not there")):
        ids = answer.get(key)
        if ids and not (answer.get("cancelled") or answer.get("changed") or answer.get("signalled")):
            return f"{command}: {', '.join(map(str, ids[:5]))} {text}"
    return f"done: {command}"


def run(state: TopState, socket_path: str) -> int:
    """Show the board until the user leaves. Returns the exit code."""
    for name in ("COLUMNS", "LINES"):
        # The terminal knows its size better, also once that has changed.
        os.environ.pop(name, None)
    app = TopApp(state, socket_path)
    code = app.run(mouse=False)
    if app.failure is not None:
        raise app.failure
    return code or 0
