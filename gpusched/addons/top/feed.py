"""gtop's connections: the board as it changes, answers to single requests, the output of a job."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

from gpusched import errors
from gpusched.addons.top.state import TopState
from gpusched.cli.follow import OutputRequest, begin, files_of, open_tail, selected_runs
from gpusched.client import DaemonConnection, error_from, reach
from gpusched.model.units import printable
from gpusched.tail import NodeTail, Tail

WAIT_S = 5.0
"""How long the daemon holds a request back until something changes."""
PATIENCE_S = 20.0
"""An answer that takes longer than its wait and this does not come."""
AGAIN_S = 1.0
_LOG_S = 0.5
_FIRST_LINES = 200
MOST_LINE = 2000


class TopConnection:
    """One connection to the daemon on the event loop; requests one at a time. Opens itself when it is needed."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, path: str, body: object = None, wait_s: float = 0.0) -> dict[str, Any]:
        """Send a request. Raises: the error in the answer; OSError if there is none."""
        # asyncio.wait_for of Python < 3.12 forgets that it was cancelled when the answer comes at the same moment.
        timer = asyncio.get_running_loop().call_later(wait_s + PATIENCE_S, self.close)
        try:
            return await self._call(method, path, body)
        except BaseException as error:
            # The answer may be half read, or still to come.
            if not isinstance(error, errors.GpuschedError):
                self.close()
            raise
        finally:
            timer.cancel()

    async def _call(self, method: str, path: str, body: object) -> dict[str, Any]:
        if self._streams is None:
            sock = socket.socket(socket.AF_UNIX)
            try:
                reach(sock, self._path)
                sock.setblocking(False)
                self._streams = await asyncio.open_unix_connection(sock=sock)
            except BaseException:
                sock.close()
                raise
        reader, writer = self._streams
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: gpusched\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            sizes = [int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")]
            found = json.loads(await reader.readexactly(sizes[0] if sizes else 0) or b"{}")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            raise ConnectionResetError("the daemon closed the connection") from None
        if int(lines[0].split()[1]) != 200:
            raise error_from(found.get("error", {}))
        return dict(found)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def boards(
    connection: TopConnection, query: Callable[[], dict[str, str]]
) -> AsyncIterator[dict[str, Any] | Exception]:
    """Answers of GET /v1/board as they change, or why there is none; asks again by itself.

    Args: query: the parameters; to change them, close this generator and begin another one.
    """
    version: str | None = None
    while True:
        asked = {**query(), **({} if version is None else {"after": version, "timeout_s": f"{WAIT_S:g}"})}
        try:
            answer = await connection.call("GET", f"/v1/board?{urlencode(asked)}", wait_s=WAIT_S)
        except (OSError, errors.GpuschedError) as error:
            connection.close()
            version = None
            yield error
            await asyncio.sleep(AGAIN_S)
            continue
        version = answer["version"]
        yield answer


async def find_next(ask: Callable[[dict[str, str]], Awaitable[dict[str, Any]]], state: TopState) -> int | None:
    """Place of the next row with the word that is looked for, after the cursor and then from the beginning.

    None if there is none. All rows of the pane count: the daemon finds them, by a few requests for one row each.

    Args: ask: returns the answer of GET /v1/board to these parameters.
    """
    own = state.cursor_id
    matching = {"filter": state.search_filter()}

    async def rows(offset: int) -> tuple[str | None, dict[str, Any]]:
        answer = (await ask(state.search(**matching, offset=offset, **({} if own is None else {"find": own}))))["lists"]
        order = answer["rows"]["order"]
        return (order[0] if order else None), answer["rows"]["facts"]

    async def place_of(row: str) -> int | None:
        answer = await ask(state.search(find=row))
        place: int | None = answer["lists"]["rows"]["facts"]["found"]
        return place

    first, facts = await rows(0)
    if first is None:
        return None
    total, mine = facts["total"], facts["found"]
    if mine is None:
        # The first match behind the cursor: places of matches rise with their numbers.
        low, high = 0, total
        while low < high:
            middle = (low + high) // 2
            row, _ = await rows(middle)
            place = None if row is None else await place_of(row)
            low, high = (low, middle) if place is None or place > state.cursor else (middle + 1, high)
        wanted = low % total
    else:
        wanted = (mine + 1) % total
    row, _ = await rows(wanted)
    return None if row is None else await place_of(row)


class LogReader:
    """Reads the output of one job in a thread, with the rights of who runs gtop."""

    def __init__(self, socket_path: str, job: str, tell: Callable[[list[str], str], None]) -> None:
        """Args: tell: called in the thread with complete new lines, and a note about the file."""
        self._socket_path = socket_path
        self._job = job
        self._tell = tell
        self._rest = b""
        self._is_over = False

    def close(self) -> None:
        self._is_over = True

    def run(self, sleep: Callable[[float], None]) -> None:
        """Read until closed."""
        run_number = 0
        tails: list[Tail | NodeTail] = []
        with DaemonConnection(self._socket_path) as client:
            while not self._is_over:
                try:
                    answer = client.call("GET", f"/v1/logs?ids={self._job}", timeout_s=PATIENCE_S)
                    jobs = answer["jobs"]
                    job = jobs[0] if jobs else None
                    runs = [] if job is None else selected_runs(job, OutputRequest("gtop"))
                    if job is None or not runs:
                        self._tell([], "nothing yet" if not tails else "")
                    elif runs[-1]["run"] != run_number:
                        for tail in tails:
                            tail.close()
                        run_number, tails, self._rest = runs[-1]["run"], [], b""
                        for file in files_of(job, runs[-1], OutputRequest("gtop"))[:1]:
                            tail = open_tail(client, job, runs[-1], file, OutputRequest("gtop"))
                            begin(tail, _FIRST_LINES)
                            tails.append(tail)
                        self._tell([], f"run {run_number}")
                    for tail in tails:
                        tail.copy(self._take, 1 << 20)
                except (errors.GpuschedError, OSError) as error:
                    text = error.message if isinstance(error, errors.GpuschedError) else error.strerror or str(error)
                    self._tell([], printable(text, 200))
                    client.close()
                sleep(_LOG_S)

    def _take(self, piece: bytes | memoryview) -> None:
        *lines, rest = (self._rest + bytes(piece)).split(b"\n")
        self._rest = rest[-MOST_LINE:]
        # A progress bar redraws its line: the last state counts.
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2][:MOST_LINE].decode(errors="replace") for line in lines]
        self._tell(shown, "")
