"""The fixed pieces of work whose function calls `benchmarks.ratchet` counts.

Everything here runs in an interpreter with a fixed hash seed, a small environment and no garbage collection, on a
scheduler whose clock moves when told. A call is one of a Python function, of a C function, or of a generator that goes
on. Calls on other threads and in other processes are not counted, so there are none but where a piece says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from cProfile import Profile
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from benchmarks.engine import make_ticket
from benchmarks.nodes import ENV, ENV_SHA, Ticking
from gpusched import client as connections
from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.addons.slurm import command, scontrol, squeue
from gpusched.api import auth
from gpusched.api.rate_limits import RateLimits
from gpusched.api.server import HttpServer, build_app
from gpusched.api.service import ApiService
from gpusched.cli import gq, output
from gpusched.client import DaemonConnection
from gpusched.daemon.facade import DaemonFacade
from gpusched.engine import spool as files
from gpusched.engine.launchers import ticket_facts
from gpusched.engine.supervisor.processes import AWAITED, PR_SET_CHILD_SUBREAPER
from gpusched.engine.supervisor.supervisor import Home, supervisor_of
from gpusched.engine.wire import LENGTH_BYTES, pack_ticket, unpack_ticket
from gpusched.model.commands import Caller, Submit
from gpusched.model.job import ArraySpec, JobSpec, Launch, Request, RetryRule
from gpusched.model.value import replace

ROOT = Path(__file__).parent.parent
SLOTS = 8
JOBS = 160
PENDING = 10_000
_SHOWN = 40
_FEW = 20
_CALLER = Caller(1000, "u0")


class Meter:
    """Figures by name: calls for each of what is counted.

    Args: where: the figure of which `top` tells the functions called most often.
    """

    def __init__(self, where: str = "") -> None:
        self.found: dict[str, float] = {}
        self.top: list[tuple[str, float]] = []
        self._where = where

    def count(self, name: str, action: Callable[[], object], per: float = 1) -> None:
        """Count the calls of an action, for each of `per` things that it does."""
        self.take(name, calls_of(action), per)

    def take(self, name: str, calls: Counter[str], per: float = 1) -> None:
        """Add calls that were counted, by function."""
        self.found[name] = round(self.found.get(name, 0.0) + calls.total() / per, 1)
        if name == self._where:
            self.top = [(function, number / per) for function, number in calls.most_common(_SHOWN)]


def calls_of(action: Callable[[], object]) -> Counter[str]:
    """Calls during an action, by function."""
    profile = Profile()
    profile.enable()
    try:
        action()
    finally:
        profile.disable()
    found: Counter[str] = Counter()
    for entry in profile.getstats():
        found[_name(entry.code)] += entry.callcount
    return found


def _name(code: CodeType | str) -> str:
    if isinstance(code, str):
        return code
    return f"{code.co_filename.removeprefix(f'{ROOT}/')}:{code.co_firstlineno} {code.co_name}"


# --- the daemon -------------------------------------------------------------------------------------------


class Slots(Ticking):
    """A scheduler of one node with so many slots for plain jobs of ten seconds, all of one kind."""

    def __init__(self, folder: str) -> None:
        super().__init__(os.path.join(folder, "gpusched.db"), 1)

    def _outcome(self, ticket: object) -> SimulatedOutcome:
        return SimulatedOutcome(runs_s=10.0)

    def spec(self, caller: Caller) -> JobSpec:
        launch = Launch(("true",), None, None, ENV_SHA, "/tmp", stdout="/dev/null")
        return JobSpec("plain", Request(cpus=64.0 / SLOTS), launch, RetryRule(), time_limit_s=600)

    def submit(self, jobs: int) -> None:
        """Submit so many, one after the other, each with its tick."""
        for _ in range(jobs):
            self.ask(self.submission())

    def tick_at_ends(self) -> bool:
        """Go to the next end of a run and tick; False without one."""
        at = min((at for engine in self.engines.values() if (at := engine.next_event_at()) is not None), default=None)
        if at is None:
            return False
        self.clock.at = at
        self.ticker.tick()
        return True

    def drain(self) -> None:
        """Tick until all jobs have ended."""
        while self.tick_at_ends():
            continue
        self.ticker.tick()
        if self.scheduler.state.jobs:
            raise AssertionError(f"{len(self.scheduler.state.jobs)} jobs have not ended")


class Cards(Slots):
    """As many slots, a GPU each, in which some runs end together; the GPUs are read as runs end, as the loop does."""

    def __init__(self, folder: str) -> None:
        self._runs = 0
        super().__init__(folder)

    def _outcome(self, ticket: object) -> SimulatedOutcome:
        self._runs += 1
        return SimulatedOutcome(runs_s=float(10 + self._runs % 3))

    def spec(self, caller: Caller) -> JobSpec:
        spec = super().spec(caller)
        return replace(spec, request=replace(spec.request, gpus=1, cpus=0.0))

    def tick_at_ends(self) -> bool:
        (engine,) = self.engines.values()
        at, state = engine.next_event_at(), self.scheduler.state
        if at is not None:
            self.clock.at = at
        if self.ticker.take_news() or state.releasing:
            self.clock.at += 0.001
            self.read()
        self.ticker.tick()
        return bool(state.open_runs or state.releasing)


@contextmanager
def slots(made: type[Slots] = Slots) -> Iterator[Slots]:
    """Some slots, with a few jobs behind them."""
    with tempfile.TemporaryDirectory(prefix="gpusched-bench-") as folder:
        one = made(folder)
        try:
            one.submit(2 * SLOTS)
            one.drain()
            yield one
        finally:
            one.store.close()


def lives(meter: Meter) -> None:
    """Jobs from submission to end, through a few slots."""
    with slots() as one:
        meter.count("a plain job: its submission", lambda: one.submit(JOBS), JOBS)
        meter.count("a plain job: its start and end", one.drain, JOBS)
        caller = one.caller()
        spec = replace(one.spec(caller), array=ArraySpec(f"0-{PENDING - 1}"))
        array = Submit(caller, [spec], {ENV_SHA: ENV})
        meter.count("an array: its submission", lambda: one.ask(array))
        for _ in range(3):
            one.tick_at_ends()
        meter.count("an array: a task", lambda: [one.tick_at_ends() for _ in range(_FEW)], _FEW * SLOTS)
    with slots(Cards) as cards:
        cards.submit(JOBS)
        meter.count("a GPU job: its start and end", cards.drain, JOBS)
        caller = cards.caller()
        spec = replace(cards.spec(caller), array=ArraySpec(f"0-{JOBS - 1}"))
        cards.ask(Submit(caller, [spec], {ENV_SHA: ENV}))
        meter.count("an array of GPU jobs: a task", cards.drain, JOBS)


def idle_ticks(meter: Meter) -> None:
    """Ticks in which nothing happens."""
    for pending in (0, 1000):
        with tempfile.TemporaryDirectory(prefix="gpusched-bench-") as folder:
            one = Slots(folder)
            try:
                if pending:
                    one.ask(one.submission(pending))
                for _ in range(3):
                    one.tick()

                def tick(one: Ticking = one) -> None:
                    for _ in range(_FEW):
                        one.clock.at += 1.0
                        one.ticker.tick()

                meter.count(f"an idle tick, {pending:,} pending", tick, _FEW)
            finally:
                one.store.close()


# --- a long queue, and those who look at it ---------------------------------------------------------------


class Inline(ThreadPoolExecutor):
    """Works at once on the thread that asks, where its calls are counted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def service_of(one: Ticking, wake: Callable[[], None] = lambda: None) -> ApiService:
    """The API, for which time passes between requests: no caller is ever too fast."""
    minutes = count(0.0, 60.0)
    return ApiService(DaemonFacade(one.ticker, wake=wake), pace=RateLimits(minutes.__next__), thinker=Inline(1))


class Daemon:
    """Answers requests of one caller as the server would, without a socket."""

    def __init__(self, one: Ticking, loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._loop = build_app(service_of(one)), loop
        self._app.freeze()

    def get(self, path: str) -> bytes:
        request = make_mocked_request("GET", path, app=self._app, loop=self._loop)
        request[auth._CALLER] = _CALLER
        answering: Coroutine[Any, Any, web.StreamResponse] = self._app._handle(request)
        answer = self._loop.run_until_complete(answering)
        assert isinstance(answer, web.Response), path
        assert isinstance(answer.body, (bytes, bytearray)), path
        if answer.status != 200:
            raise AssertionError(f"{path}: {answer.status} {answer.body[:300].decode()}")
        return bytes(answer.body)


class Answers(DaemonConnection):
    """A connection to it that remembers the answers, and the calls that the daemon needed for them."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__("")
        self.calls: Counter[str] = Counter()
        self._daemon = daemon
        self._known: dict[str, bytes] = {}

    def _patiently(self, method: str, path: str, body: object, timeout_s: float | None) -> tuple[int, bytearray]:
        if path not in self._known:
            self.calls.update(calls_of(lambda: self._known.update({path: self._daemon.get(path)})))
        return 200, bytearray(self._known[path])


LOOKS = {
    "gq": (),
    "gq --json": ("--json",),
    "gq --all-rows": ("--all-rows",),
    "gq --start": ("--start",),
    "gq --why": ("--why", "JOB"),
    "gq --priority": ("--priority",),
    "squeue": (),
    "squeue --json": ("--json",),
    "scontrol show job": ("show", "job", "JOB"),
}
"""Words by name. JOB is a pending job of the caller."""


def crowds(meter: Meter) -> None:
    """Ticks and looks with many jobs pending on eight nodes of eight GPUs."""
    with tempfile.TemporaryDirectory(prefix="gpusched-bench-") as folder:
        one = Ticking(os.path.join(folder, "gpusched.db"), 8)
        loop = asyncio.new_event_loop()
        try:
            one.fill(PENDING)
            for _ in range(3):
                one.end_one()
            meter.count(
                f"an end and the start behind it, {PENDING:,} pending",
                lambda: [one.end_one() for _ in range(_FEW)],
                _FEW,
            )
            daemon = Daemon(one, loop)
            own = [job.id for job in one.scheduler.state.jobs.values() if job.uid == _CALLER.uid]
            with patch.object(time, "time", one.clock.now):
                for name, words in LOOKS.items():
                    asked = [word.replace("JOB", str(own[len(own) // 2])) for word in words]
                    _look(meter, name, asked, daemon)
        finally:
            loop.close()
            one.store.close()


def _look(meter: Meter, name: str, words: list[str], daemon: Daemon) -> None:
    """Count the daemon's part of a look, then the client's part of an equal one."""
    client = Answers(daemon)

    def look() -> int:
        if name.startswith("squeue"):
            return command.run(squeue.COMMAND, squeue.body, words)
        if name.startswith("scontrol"):
            return command.run(scontrol.COMMAND, scontrol.body, words)
        return output.run("gq", gq.body, words)

    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        patch.object(gq, "connect", lambda: client),
        patch.object(squeue, "connect", lambda: client),
        patch.object(connections, "connect", lambda: client),
    ):
        code = look()
        assert code == 0, name
        meter.take(f"{name}: the daemon", client.calls)
        meter.count(f"{name}: the client", look)


# --- commands at the prompt -------------------------------------------------------------------------------

_AT_THE_PROMPT = """
import os, sys
command, root, *words = sys.argv[1:]
sys.path[:] = [root, *filter(None, sys.path)]
sys.argv = [command, *words]
before = len(sys.modules)
from _lsprof import Profiler
profiler = Profiler()
def leave(code, leave=os._exit):
    profiler.disable()
    there = len(sys.modules) - before
    import json
    found = [[str(e.code) if isinstance(e.code, str) else
        f"{e.code.co_filename.removeprefix(root + '/')}:{e.code.co_firstlineno} {e.code.co_name}", e.callcount]
        for e in profiler.getstats()]
    sys.stderr.write(json.dumps([code, there, found]))
    sys.stderr.flush()
    leave(0)
os._exit = leave
profiler.enable()
main = __import__(f"gpusched.cli.{command}", fromlist=["main"]).main
leave(main())
"""
PROMPT = {
    "gsub --version": ("gsub", "--version"),
    "gsub": ("gsub", "--", "true"),
    "gq": ("gq",),
}


def prompts(meter: Meter) -> None:
    """Commands from their first import to their exit, each in a process of its own, and a submission in the daemon."""
    with slots() as one, tempfile.TemporaryDirectory(prefix="gpusched-bench-") as home:
        asyncio.run(_serve(meter, one, home))


async def _serve(meter: Meter, one: Slots, home: str) -> None:
    loop = asyncio.get_running_loop()

    def wake() -> None:
        loop.call_soon(one.ticker.tick)

    server = HttpServer(service_of(one, wake))
    path = os.path.join(home, "api.sock")
    await server.start(path)
    try:
        for name, words in PROMPT.items():
            await _command(home, path, words)  # its modules are compiled now
            code, modules, calls = await _command(home, path, words)
            assert code == 0, name
            meter.take(f"{name} at the prompt: calls", Counter(dict(calls)))
            meter.take(f"{name} at the prompt: modules", Counter(modules=modules))
    finally:
        await server.close()


async def _command(home: str, socket_path: str, words: tuple[str, ...]) -> tuple[int, int, list[tuple[str, int]]]:
    """Its exit code, the modules that it imported, its calls."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-S", "-s", "-c", _AT_THE_PROMPT, words[0], str(ROOT), *words[1:]),
        env={"PATH": "/usr/bin:/bin", "HOME": home, "GPUSCHED_SOCKET": socket_path, **FIXED},
        cwd=home,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await child.communicate()
    try:
        code, modules, calls = json.loads(said)
    except ValueError:
        raise AssertionError(f"{words}: {said.decode()}") from None
    return code, modules, [(re.sub(r" at 0x\w+", "", name), number) for name, number in calls]


FIXED = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LANG": "C.UTF-8"}
"""Of the environment: what counts depend on."""


# --- a supervisor -----------------------------------------------------------------------------------------


def supervisors(meter: Meter) -> None:
    """A supervisor's life for runs of `true`, from the ticket to the result, after one that has loaded its modules."""
    with tempfile.TemporaryDirectory(prefix="gpusched-bench-") as folder:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.write(writer, json.dumps(_supervised(folder)).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            calls = json.loads(answer.read())
        os.waitpid(pid, 0)
        meter.take("a supervisor's life", Counter(calls))


def _supervised(folder: str) -> dict[str, int]:
    """Calls by function in a process that becomes a supervisor as those of the fork server do.

    Of several runs, the one with the fewest: others may have to wait for their job, or to tell of its start apart.
    """
    spool = os.path.join(folder, "spool")
    files.make_spool(spool)
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    home = Home(spool, "bench", tell)

    def serve(number: int) -> Counter[str]:
        facts = ticket_facts(make_ticket(f"{number}.1", folder, "/bin/true"), spool)
        ticket = pack_ticket(facts)[LENGTH_BYTES:]
        calls = calls_of(lambda: supervisor_of(unpack_ticket(ticket), home).supervise())
        os.read(told, 1 << 16)
        while signal.sigtimedwait(AWAITED, 0):
            continue
        return calls

    return min((serve(number) for number in range(1, 1 + _FEW)), key=Counter.total)


PIECES: tuple[Callable[[Meter], None], ...] = (lives, idle_ticks, crowds, prompts, supervisors)


def main(where: str = "") -> None:
    """Print figures, and the functions called most often in one of them, as JSON."""
    gc.disable()
    meter = Meter(where)
    for piece in PIECES:
        piece(meter)
    print(json.dumps({"found": meter.found, "top": meter.top}))


if __name__ == "__main__":
    main(*sys.argv[1:])
