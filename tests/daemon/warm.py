"""Daemons and commands forked from a process that has imported theirs: nine tenths of their start is imports.

Such a process is one like any other, with a session, an environment, a folder and descriptors of its own, and is
killed like any other. Only its command line is that of the process it was forked from. What a command imports, and
when, shows only where an interpreter starts it, as in `tests/cli/test_core_alone.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO, NoReturn

_PROGRAM = (
    "import sys; sys.path[:1] = sys.argv[4:]; import warm; sys.exit(warm.serve(*map(int, sys.argv[1:3]), sys.argv[3]))"
)
_LONGEST = 1 << 20
"""Bytes of a request: most of it is an environment."""
_IMPORTED_AT_START = (
    *("importlib.metadata", "gpusched.addons.notify.courier", "gpusched.addons.notify.targets"),
    *("gpusched.addons.simulate.auto_preset", "gpusched.addons.slurm.engine.slurm_engine"),
)
"""By a daemon, when it has read its settings."""
_PROGRAMS = {
    "gpusched.gpu.worker": "gpusched.gpu.source",
    "gpusched.addons.notify.courier": "gpusched.addons.notify.sender",
}
"""Modules that start a process, and the modules whose `main` it runs."""
_IMPORTED_BY_PROGRAMS = ("gpusched.gpu.mps", "gpusched.gpu.power", "gpusched.gpu.simulated", "gpusched.gpu.static")
SLURM_COMMANDS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "sstat")
"""Those that only ask and tell: what becomes of a terminal and of signals is tried with interpreters."""
_FORK_SERVERS = (
    "import sys; sys.path += sys.argv[3:]; import warm_fork_servers; sys.path.pop()\n"
    "del sys.argv[3:]; warm_fork_servers.serve(*map(int, sys.argv[1:]))"
)
_kept: list[Any] = []
"""The process that forks fork servers, and what it reads until this one has ended."""
_DRIVERS = ("auto", "nvml", "amdsmi")
"""Kinds of GPU readers that load a library, whose loader reads the environment."""


class Forked:
    """A daemon that was forked; what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, ended: int) -> None:
        """Args: ended: descriptor from which its wait status can be read at its end."""
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._ended)

    def poll(self) -> int | None:
        """Its exit code, minus the signal that killed it; None as long as it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises: subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("the daemon", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has, and is about to be told of
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to stop."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout_s)[0]:
            status = os.read(self._ended, 16)
            assert status, "the process that forks daemons has died"
            self.returncode = os.waitstatus_to_exitcode(int(status))
            os.close(self._ended)
        return self.returncode


class _Child(Forked):
    """A child that was forked."""

    def __init__(self, pid: int, stdin: BinaryIO | None) -> None:
        super().__init__(pid, os.pidfd_open(pid))
        self.stdin = stdin

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout_s)[0]:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._ended)
        return self.returncode


class Nest:
    """A process that has imported what it forks for each request, once there is one.

    Args: kind: `daemon` or `commands`; settings: what its interpreter and loader read from the environment.
    """

    def __init__(self, kind: str, settings: dict[str, str], address: str = "") -> None:
        self.settings = settings
        self.address = address
        """Where it is asked."""
        self._process: subprocess.Popen[bytes] | None = None
        if not address:
            self._start(kind)

    def _start(self, kind: str) -> None:
        self._held, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked.bind("")  # a name that goes with it
        asked.listen(64)
        self.address = asked.getsockname().decode()
        # Tests look for processes of their own by the names that these variables have for them.
        others = {
            name: value for name, value in os.environ.items() if not _is_setting(name) and name[:9] != "GPUSCHED_"
        }
        fds = [theirs.fileno(), asked.fileno()]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *map(str, fds), kind, os.getcwd(), str(Path(__file__).parent)],
            env=others | self.settings,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        asked.close()
        atexit.register(self._close)

    def _close(self) -> None:
        assert self._process is not None
        self._held.close()
        self._process.wait()

    @property
    def has_ended(self) -> bool:
        """A test that ends all children of its process ends it, too."""
        return self._process is not None and self._process.poll() is not None

    def start(self, arguments: list[str], env: dict[str, str], out: int, ready: int) -> Forked:
        """Start a daemon.

        Args: out: descriptor of its standard output and error; ready: of what it reports to.
        """
        return self._fork({"arguments": arguments, "env": env, "folder": os.getcwd(), "path": True}, [out, ready])

    def program(
        self, module: str, command: list[str], *, stdin: int, stdout: int, stderr: int | None, **how: Any
    ) -> Forked:
        """Do as `subprocess.Popen` for a module that starts a process, see `_PROGRAMS`."""
        kept = list(how.get("pass_fds", ()))
        request = {"program": _PROGRAMS[module], "argument": command[-1], "folder": how["cwd"], "kept": kept}
        request["env"] = dict(how.get("env") or os.environ)
        forked = self._fork(request, [stdin, stdout, 2 if stderr is None else stderr, *kept])
        with contextlib.suppress(ProcessLookupError):  # it has ended
            while os.getpgid(forked.pid) != forked.pid:
                time.sleep(0.001)  # who starts it may signal its group at once
        return forked

    def run(
        self, command: str, words: Sequence[str], env: dict[str, str], folder: Path, stdin: bytes, timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """Run a command to its end, at most 64 KiB of standard input being given.

        Returns: its exit code, and what was written to its standard output and error until nothing has them open.
        Raises: subprocess.TimeoutExpired.
        """
        pipes = [os.pipe() for _ in range(3)]
        (given, feed), (out, its_out), (err, its_err) = pipes
        request = {"command": command, "arguments": [command, *words], "env": env, "folder": str(folder)}
        if nest().settings == self.settings:
            request["daemons"] = nest().address
        os.write(feed, stdin)
        os.close(feed)
        forked = self._fork(request, [given, its_out, its_err])
        for descriptor in (given, its_out, its_err):
            os.close(descriptor)
        written: dict[int, list[bytes]] = {out: [], err: []}
        is_open = {out, err}
        deadline = time.monotonic() + timeout_s
        while is_open:
            left_s = deadline - time.monotonic()
            for descriptor in select.select(is_open, [], [], left_s)[0] if left_s > 0 else ():
                data = os.read(descriptor, 1 << 16)
                written[descriptor].append(data)
                if not data:
                    is_open.remove(descriptor)
                    os.close(descriptor)
            if left_s <= 0:
                forked.kill()
                raise subprocess.TimeoutExpired([command, *words], timeout_s)
        code = forked.wait(timeout_s)
        return code, b"".join(written[out]), b"".join(written[err])

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> Forked:
        ended, theirs = os.pipe()
        try:
            return Forked(_ask(self.address, request, [theirs, *descriptors]), ended)
        finally:
            os.close(theirs)


def _ask(address: str, request: dict[str, Any], descriptors: list[int]) -> int:
    """Have something forked; returns its pid."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
        link.connect(address.encode())
        socket.send_fds(link, [json.dumps(request).encode()], descriptors)
        return int(link.recv(16))


_of_daemons: list[Nest] = []


def nest() -> Nest:
    """The one of this process for daemons."""
    if not _of_daemons or _of_daemons[0].has_ended:
        _of_daemons[:] = [Nest("daemon", interpreter_settings(dict(os.environ)))]
    return _of_daemons[0]


def addresses() -> list[str]:
    """Of the nests for daemons and for commands of this process, for workers that are to use these."""
    of_commands = commands(dict(os.environ))
    assert of_commands is not None
    return [nest().address, of_commands.address]


def use_addresses(of_daemons: str, of_commands: str) -> None:
    """Use nests of the process that started this one, with its settings, in place of own ones."""
    settings = interpreter_settings(dict(os.environ))
    _of_daemons[:] = [Nest("daemon", settings, of_daemons)]
    _nests[tuple(sorted(settings.items()))] = Nest("commands", settings, of_commands)


_nests: dict[tuple[tuple[str, str], ...], Nest] = {}
"""For commands, by the settings of their interpreter."""
_asked: Counter[tuple[tuple[str, str], ...]] = Counter()
_BEFORE_A_NEST = 2
"""Commands of other settings than those of the tests which interpreters start, as a nest costs as much as they do."""


def commands(env: dict[str, str]) -> Nest | None:
    """The one for commands in an environment; None where an interpreter is cheaper."""
    settings = interpreter_settings(env)
    key = tuple(sorted(settings.items()))
    _asked[key] += 1
    if key not in _nests or _nests[key].has_ended:
        if _asked[key] <= _BEFORE_A_NEST and settings != interpreter_settings(dict(os.environ)):
            return None
        _nests[key] = Nest("commands", settings)
    return _nests[key]


def typed(
    command: str, *words: str, env: dict[str, str], folder: Path | None = None, stdin: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """What a command left that was typed in an environment, and in a folder: the current one if none is given.

    Args: stdin: at most 64 KiB.
    """
    found = commands(env)
    if found is not None:
        code, out, err = found.run(command, words, env, folder or Path.cwd(), stdin, timeout_s=120)
        return subprocess.CompletedProcess([command, *words], code, out.decode(), err.decode())
    module = "admin" if command == "gpusched" else command
    program = f"import sys; sys.argv[0] = {command!r}; from gpusched.cli.{module} import main; sys.exit(main())"
    argv = [sys.executable, "-c", program, *words]
    text = stdin.decode()
    return subprocess.run(
        argv, env=env, cwd=folder, input=text, capture_output=True, text=True, timeout=120, check=False
    )


def interpreter_settings(env: dict[str, str]) -> dict[str, str]:
    """What an interpreter or its loader would read from an environment when it starts, which a fork does not."""
    return {name: value for name, value in env.items() if _is_setting(name)}


def _is_setting(name: str) -> bool:
    if name in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"):  # of no account to what has been imported
        return False
    return name.startswith(("PYTHON", "LD_", "MALLOC_", "LANG", "LC_"))


def serve(descriptor: int, asked: int, kind: str) -> int:
    """Fork on request. Args: descriptor: closed by the other side at the end; asked: where others connect to ask."""
    held, others = socket.socket(fileno=descriptor), socket.socket(fileno=asked)
    is_ready = False
    running: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    for each in (descriptor, asked):
        poll.register(each, select.POLLIN)
    while True:
        for readable, _ in poll.poll():
            if readable not in (descriptor, asked):
                pid, ended = running.pop(readable)
                poll.unregister(readable)
                os.close(readable)
                _tell(ended, os.waitpid(pid, 0)[1])
                continue
            if readable == descriptor:
                return 0
            link = others.accept()[0]
            message, received, _, _ = socket.recv_fds(link, _LONGEST, 8)
            if not message:
                link.close()
                continue
            if not is_ready:
                _import_all_of(kind)
                gc.collect()
                gc.freeze()
                is_ready = True
            ended, *given = received
            pid = os.fork()
            if not pid:
                for one in (held, others, link):
                    one.detach()
                wanted = json.loads(message)
                if "program" in wanted:
                    _run_program(wanted, given)
                _run_command(wanted, *given) if "command" in wanted else _run_daemon(wanted, *given)
            for each in given:
                os.close(each)
            running[watched := os.pidfd_open(pid)] = pid, ended
            poll.register(watched, select.POLLIN)
            with contextlib.suppress(BrokenPipeError):  # who asked has ended
                link.send(str(pid).encode())
            link.close()


def _make_ready() -> None:
    """What each daemon would do at its start, to the same effect."""
    sys.path.append(str(Path(__file__).parent.parent))
    from ready_table import ready_series, ready_table, use_ready_tables

    use_ready_tables()
    ready_table()
    ready_series()
    for name in _IMPORTED_AT_START:
        importlib.import_module(name)
    _look_for_plugins_once()
    _make_routes()
    main: Any = importlib.import_module("gpusched.daemon.main")
    main.build_parser = functools.cache(main.build_parser)
    main.build_parser()
    fork_programs()
    never_wait_for_the_disk()


def _look_for_plugins_once() -> None:
    """Read the metadata of all installed packages once, and not in each daemon."""
    from importlib import metadata

    look = metadata.entry_points
    path, found = [sys.path[0], *sys.path[2:]], look(group="gpusched")  # as of a daemon, see `_run_daemon`

    def entry_points(**wanted: Any) -> metadata.EntryPoints:
        return found if sys.path in (path, path[1:]) and wanted == {"group": "gpusched"} else look(**wanted)

    metadata.entry_points = entry_points


def _make_routes() -> None:
    """Leave what answers on each route with the route, and the pattern of its path with `re`."""
    from aiohttp import web

    from gpusched.api.routes import ROUTES, Route

    Route.answerer = functools.cache(Route.answerer)  # type: ignore[method-assign]
    router = web.Application().router
    for route in ROUTES:
        router.add_route(route.method, route.path, route.answerer())


def never_wait_for_the_disk() -> None:
    """Let tables of this process, and of those that are forked from it, survive its end and not that of the machine.

    What is written is in the hands of the kernel, whoever is killed. Waiting until it is on the disk, and the work of a
    journal, would take a third of the time of all daemons; that it is asked for is tried in `tests/contract`.
    """
    sqlite3.connect = functools.partial(sqlite3.connect, factory=_NeverSynced)
    os.fsync = os.fdatasync = lambda _: None


class _NeverSynced(sqlite3.Connection):
    def __init__(self, *where: Any, **how: Any) -> None:
        super().__init__(*where, **how)
        with contextlib.suppress(sqlite3.Error):  # of a damaged table, which is then told of as elsewhere
            super().execute("PRAGMA synchronous = OFF")

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        return super().execute("PRAGMA synchronous = OFF" if sql.startswith("PRAGMA synchronous =") else sql, *values)


def fork_programs() -> None:
    """Have daemons of this process fork those that read their GPUs, send their alerts and fork their supervisors."""
    for name in _IMPORTED_BY_PROGRAMS:
        importlib.import_module(name)
    importlib.import_module("gpusched.addons.notify.attempt").preload()
    for starter, program in _PROGRAMS.items():
        start = functools.partial(_fork_or_start, importlib.import_module(program))
        importlib.import_module(starter).subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    launchers = importlib.import_module("gpusched.engine.launchers")
    start = functools.partial(_fork_fork_server, _start_fork_servers(launchers.KEPT_VARIABLES, launchers.PACKAGE_ROOT))
    launchers.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})


def _start_fork_servers(kept: Sequence[str], package: str) -> str:
    """Start a process that forks fork servers, and ends with this one. Returns: where it is asked."""
    held, theirs = socket.socketpair()
    with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.bind("")
        asked.listen(64)
        fds = [theirs.fileno(), asked.fileno()]
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", "-c", _FORK_SERVERS),
                *(*map(str, fds), package, str(Path(__file__).parent)),
            ],
            env={name: value for name, value in os.environ.items() if name in kept or name.startswith("LC_")},
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        _kept.extend([held, process])
        return str(asked.getsockname().decode())


def _fork_fork_server(
    address: str, command: list[str], *, stdout: BinaryIO, pass_fds: Sequence[int], env: dict[str, str], **how: Any
) -> Forked | subprocess.Popen[bytes]:
    """Do as `subprocess.Popen`; those of a system's daemon are started, and all once the process for it was killed."""
    if "--system" not in sys.argv:
        ended, theirs = os.pipe()
        try:
            words = {"words": command[-3:-1], "env": env}
            return Forked(_ask(address, words, [theirs, stdout.fileno(), *pass_fds]), ended)
        except ConnectionError:
            os.close(ended)
        finally:
            os.close(theirs)
    return subprocess.Popen(command, stdout=stdout, pass_fds=pass_fds, env=env, **how)


def _fork_or_start(
    program: ModuleType, command: list[str], *, stdin: int, stdout: int, **how: Any
) -> _Child | subprocess.Popen[bytes]:
    """Do as `subprocess.Popen`; programs of other users are started, and those that load a driver's library."""
    if "user" in how or json.loads(command[-1]).get("kind") in _DRIVERS:
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, **how)
    given, feed = os.pipe() if stdin == subprocess.PIPE else (stdin, None)
    pid = os.fork()
    if not pid:
        _be_program(program, command[-1], [given, stdout, how.get("stderr")], how)
    if feed is not None:
        os.close(given)
    return _Child(pid, None if feed is None else open(feed, "wb", buffering=0))


def _be_program(program: ModuleType, argument: str, descriptors: list[int | None], how: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        env = how.get("env") or dict(os.environ)
        _become({"env": env, "folder": how["cwd"]}, *descriptors, kept=how.get("pass_fds", ()))
        Path("/proc/self/comm").write_text(program.__name__[-15:])  # the most that it holds
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        program.main(argument)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # what is to be done at the daemon's end is not to be done here


def _import_all_of(kind: str) -> None:
    if kind == "daemon":
        importlib.import_module("gpusched.daemon.main")
        _make_ready()
        return
    for package in ("gpusched.cli", "gpusched.config", "gpusched.addons.slurm"):
        path = importlib.import_module(package).__path__
        for found in pkgutil.walk_packages(path, f"{package}."):
            importlib.import_module(found.name)
    with contextlib.suppress(ImportError):
        importlib.import_module("typer._adapters")  # imports pydantic, where it is installed


def _tell(ended: int, status: int) -> None:
    try:
        os.write(ended, str(status).encode())
    except BrokenPipeError:
        pass  # nobody asks any more
    os.close(ended)


def _run_program(wanted: dict[str, Any], given: list[int]) -> NoReturn:
    streams, kept = given[:3], given[3:]
    # Those that it knows by number may have the numbers of others here.
    above = max([*wanted["kept"], *given, 64]) + 1
    streams, kept = ([fcntl.fcntl(one, fcntl.F_DUPFD, above) for one in some] for some in (streams, kept))
    for one, number in zip(kept, wanted["kept"], strict=True):
        os.dup2(one, number)
    how = {"env": wanted["env"], "cwd": wanted["folder"], "pass_fds": wanted["kept"]}
    _be_program(importlib.import_module(wanted["program"]), wanted["argument"], [*streams], how)


def _run_daemon(wanted: dict[str, Any], out: int, ready: int) -> NoReturn:
    from gpusched.daemon.main import main

    arguments = [*wanted["arguments"], "--ready-fd", "3"]
    sys.argv[:] = ["gpusched.daemon", *arguments]
    _become(wanted, None, out, out, ready)
    sys.path[:2] = [wanted["folder"]] if wanted["path"] else []
    _end(lambda: main(arguments))


def _run_command(wanted: dict[str, Any], given: int, out: int, err: int) -> NoReturn:
    command = wanted["command"]
    sys.argv[:] = wanted["arguments"]
    _become(wanted, given, out, err)
    # Those of the first process remember what their descriptors were.
    sys.stdin = sys.__stdin__ = open(0, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", errors=sys.stdout.errors, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors=sys.stderr.errors, closefd=False)  # noqa: SIM115
    sys.path[:2] = [""]
    if "daemons" in wanted:
        os.execv = functools.partial(_fork_daemon, os.execv, wanted["daemons"])
    if command in SLURM_COMMANDS:
        _end(lambda: importlib.import_module("gpusched.slurm_entry").main(command))
    _end(lambda: importlib.import_module(f"gpusched.cli.{'admin' if command == 'gpusched' else command}").main())


def _fork_daemon(execute: Callable[..., NoReturn], address: str, program: str, argv: list[str]) -> NoReturn:
    """Do as `os.execv`, but have a daemon forked in place of a process that would become one."""
    from gpusched.client import DAEMON

    if argv[:-1] != [program, "-c", DAEMON, "--ready-fd"]:
        execute(program, argv)
    wanted = {"arguments": [], "env": dict(os.environ), "folder": os.getcwd(), "path": False}
    # Nobody is told of its end.
    _ask(address, wanted, [os.open(os.devnull, os.O_WRONLY), 1, int(argv[-1])])
    os._exit(0)


def _end(main: Callable[[], object]) -> NoReturn:
    """Run it without the end of an interpreter, which would take its modules apart."""
    code: object = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if isinstance(code, str):
        print(code, file=sys.stderr, flush=True)
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _become(wanted: dict[str, Any], *descriptors: int | None, kept: Sequence[int] = ()) -> None:
    """Be as a process that was started so. Args: descriptors: its first ones; None to keep one; kept: others."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        if descriptor is not None:
            os.dup2(descriptor, number)
    first = len(descriptors)
    for number in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, number)
        first = number + 1
    os.environ.clear()
    os.environ.update(wanted["env"])
    time.tzset()
    os.chdir(wanted["folder"])
