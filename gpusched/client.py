"""A thin client of the daemon's socket: hand-written HTTP/1.1 and JSON, for the shortest start-up time.

client = connect()                    # starts the personal daemon if there is none
client.call("GET", "/v1/jobs")        # the answer's document; errors are raised as in gpusched.errors
"""

from __future__ import annotations

# The C module: `socket` itself wraps every constant in an enum, which takes time at the prompt.
import _socket
import os
import sys
import time

from gpusched import errors, paths, quickjson
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

START_TIMEOUT_S = 30.0
PATIENCE_S = 120.0
"""How long a rate-limited request is repeated."""
MAX_WAIT_S = 30.0
DAEMON = "import sys; sys.path[:] = filter(None, sys.path); from gpusched.daemon.main import main; sys.exit(main())"
"""Program of a daemon started by a client. Not `-m`, which searches the current folder for modules first: anyone may
be able to write there."""
_LOOK_AGAIN_S = 0.05
_TRY_AGAIN_S = 1.0
"""Each try starts a process, which exits if the lock is taken."""
_LONG_PATH = 100
_BY_CODE = {
    kind.code: kind
    for kind in (
        errors.UsageError,
        errors.Refused,
        errors.NotFound,
        errors.Forbidden,
        errors.SignedOut,
        errors.TooMany,
        errors.TooSlow,
        errors.NotReady,
        errors.DaemonBusy,
        errors.StoreBroken,
        errors.StoreFull,
        errors.DaemonUnreachable,
        errors.BrokenInvariant,
    )
}


warnings: set[bytes] = set()
"""Warnings from daemons for the user at the prompt, percent-encoded, without duplicates."""


class DaemonConnection:
    """A persistent connection to one daemon. Not thread-safe."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self._socket: _socket.socket | None = None
        self._buffer = b""
        self._retry_after_s = 1.0
        self.headers = ""
        """Lines added to each request, each with its CRLF."""

    def call(self, method: str, path: str, body: object = None, timeout_s: float | None = None) -> dict[str, Any]:
        """Send one request and return the answer's document.

        Raises: the error of gpusched.errors in the answer; DaemonUnreachable if no daemon listens; OSError if the
        connection breaks during the request, which may or may not have been carried out.
        """
        status, answer = self._patiently(method, path, body, timeout_s)
        document = quickjson.loads(answer)
        if status != 200:
            raise error_from(document.get("error", {}))
        return document  # type: ignore[no-any-return]

    def try_once(self, path: str, timeout_s: float) -> dict[str, Any] | None:
        """A best-effort request: None unless the answer arrives at the first try and within the timeout."""
        try:
            status, answer = self._exchange(f"GET {path} HTTP/1.1\r\nHost: gpusched\r\n\r\n".encode(), timeout_s)
        except (OSError, errors.GpuschedError):
            return None
        return quickjson.loads(answer) if status == 200 else None

    def text(self, path: str, timeout_s: float | None = None) -> str:
        """The text of an answer that is not JSON. Raises: as `call`."""
        return self.raw(path, timeout_s).decode()

    def raw(self, path: str, timeout_s: float | None = None) -> bytearray:
        """The raw bytes of an answer; documents are ASCII without spaces. Raises: as `call`."""
        status, answer = self._patiently("GET", path, None, timeout_s)
        if status != 200:
            raise error_from(quickjson.loads(answer).get("error", {}))
        return answer

    def _patiently(self, method: str, path: str, body: object, timeout_s: float | None) -> tuple[int, bytearray]:
        """Status and body of the answer; a rate-limited request is repeated."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status, answer = self._ask(method, path, body, timeout_s)
            if status != errors.TooMany.http_status or time.monotonic() + self._retry_after_s > deadline:
                return status, answer
            # Nothing was carried out.
            time.sleep(self._retry_after_s)

    def _ask(self, method: str, path: str, body: object, timeout_s: float | None) -> tuple[int, bytearray]:
        content = b"" if body is None else quickjson.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: gpusched\r\nContent-Length: {len(content)}\r\n{self.headers}\r\n"
        fresh = self._socket is None
        try:
            return self._exchange(head.encode() + content, timeout_s)
        except errors.DaemonUnreachable:
            # The peer has closed and no daemon listens: nothing was sent yet.
            if fresh:
                raise
        except (ConnectionResetError, BrokenPipeError):
            self.close()
            # The daemon was restarted since the last request, or before it read this one; repeating a GET is safe.
            if fresh or method != "GET":
                raise
        _await_system(self)
        return self._exchange(head.encode() + content, timeout_s)

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._buffer = b""

    def __enter__(self) -> DaemonConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Connect now. Raises: DaemonUnreachable."""
        if self._socket is not None:
            return
        sock = _socket.socket(_socket.AF_UNIX)
        try:
            reach(sock, self.socket_path)
        except OSError as error:
            sock.close()
            is_system = self.socket_path == paths.SYSTEM_SOCKET
            raise errors.DaemonUnreachable(
                f"no daemon answers on {self.socket_path}: {error.strerror}",
                f"see what is wrong with: {'systemctl status gpusched' if is_system else 'gpusched doctor'}",
            ) from None
        self._socket = sock

    def _exchange(self, request: bytes, timeout_s: float | None) -> tuple[int, bytearray]:
        if self._socket is not None and _is_closed(self._socket):
            # The daemon silently closes idle connections.
            self.close()
        self.open()
        sock = self._socket
        assert sock is not None
        sock.settimeout(timeout_s)
        try:
            sock.sendall(request)
            while b"\r\n\r\n" not in self._buffer:
                self._receive(sock)
            head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
                elif name.lower() == b"gpusched-warning":
                    warnings.add(value.strip())
                elif name.lower() == b"retry-after":
                    self._retry_after_s = min(MAX_WAIT_S, max(0.05, float(value)))
            content = bytearray(length)
            have = min(length, len(self._buffer))
            content[:have] = self._buffer[:have]
            self._buffer = self._buffer[have:]
            with memoryview(content) as rest:
                while have < length:
                    received = sock.recv_into(rest[have:])
                    if not received:
                        raise ConnectionResetError("the daemon closed the connection")
                    have += received
            return int(head.split(None, 2)[1]), content
        except BaseException:
            # Part of an answer may be unread, also after Ctrl-C: it must not be taken for the next one.
            self.close()
            raise

    def _receive(self, sock: _socket.socket) -> None:
        piece = sock.recv(1 << 16)
        if not piece:
            raise ConnectionResetError("the daemon closed the connection")
        self._buffer += piece


def _is_closed(sock: _socket.socket) -> bool:
    """Whether the peer has closed an idle connection."""
    try:
        sock.settimeout(0.0)
        return not sock.recv(1, _socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def error_from(words: dict[str, Any]) -> errors.GpuschedError:
    """The exception for an error document."""
    kind = _BY_CODE.get(words.get("code", ""), errors.GpuschedError)
    error = kind(words.get("message", "the daemon answered with an error"), words.get("hint", ""))
    error.about = words.get("about", "")
    error.mistakes = tuple(kind(one["message"], one["hint"]) for one in words.get("mistakes", ()))
    return error


def chosen_socket() -> tuple[str, bool]:
    """The socket that `connect` uses, and whether it is the personal daemon's."""
    chosen = os.environ.get("GPUSCHED_SOCKET")
    if chosen:
        return os.path.abspath(chosen), False
    if paths.finds_system():
        return paths.SYSTEM_SOCKET, False
    return paths.socket_path(), True


def connect(autostart: bool = True) -> DaemonConnection:
    """A connected client: GPUSCHED_SOCKET, else the system daemon, else the personal one.

    Starts the personal daemon if necessary; waits for a system daemon that is restarting.
    Raises: DaemonUnreachable, or the error with which the daemon failed to start.
    """
    socket_path, is_personal = chosen_socket()
    client = DaemonConnection(socket_path)
    try:
        client.open()
    except errors.DaemonUnreachable:
        if not autostart:
            raise
        if is_personal:
            start_daemon()
            client.open()
        else:
            _await_system(client)
    return client


def _await_system(client: DaemonConnection) -> None:
    """Connect to a restarting system daemon or agent. Raises: DaemonUnreachable, at once if it was stopped."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.open()
            return
        except errors.DaemonUnreachable:
            is_system = client.socket_path == paths.SYSTEM_SOCKET
            is_away = paths.is_coming_back() if is_system else paths.is_of_agent(client.socket_path)
            if not is_away or time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_AGAIN_S)


def start_daemon() -> bool:
    """Start the personal daemon and wait until it is ready; False if another client was faster.

    Raises: the daemon's error, or NotReady.
    """
    import fcntl  # rarely needed: most commands find a running daemon

    from gpusched.paths import make_private

    try:
        make_private(paths.state_dir())
        os.makedirs(os.path.dirname(paths.daemon_output()), mode=0o700, exist_ok=True)
        lock = os.open(paths.start_lock(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise errors.NotReady(
            f"cannot use the scheduler's folder {paths.state_dir()}: {error.strerror}",
            "set GPUSCHED_HOME to a folder that you can write",
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _start_or_find()
    finally:
        os.close(lock)


def _start_or_find() -> bool:
    """Start a daemon unless one answers.

    Wait for one that is shutting down, or was started by a client that has since been killed.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    next_try = 0.0
    while True:
        client = DaemonConnection(paths.socket_path())
        try:
            client.open()
            client.close()
            return False
        except errors.DaemonUnreachable:
            pass
        if time.monotonic() >= next_try:
            try:
                _spawn()
                return True
            except errors.DaemonBusy:
                if time.monotonic() > deadline:
                    raise
            next_try = time.monotonic() + _TRY_AGAIN_S
        time.sleep(_LOOK_AGAIN_S)


def _spawn() -> None:
    reader, writer = os.pipe()
    output = os.open(paths.daemon_output(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            _take_precedence()
            # A second fork, so that init adopts the daemon and a long-lived caller gets no zombie.
            if os.fork() == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.set_inheritable(writer, True)
                argv = [sys.executable, "-c", DAEMON, "--ready-fd", str(writer)]
                os.execv(sys.executable, argv)
        finally:
            os._exit(127)
    os.waitpid(child, 0)
    os.close(writer)
    os.close(output)
    line = _read_line(reader)
    if line == "ready":
        return
    if line.startswith("error "):
        raise error_from(quickjson.loads(line[6:]))
    raise errors.NotReady(f"the daemon did not start{_last_word()}", f"its output is in {paths.daemon_output()}")


def _take_precedence() -> None:
    """Give this session precedence for CPU time where root starts it: the kernel shares that among sessions, and each
    run is one. Source: sched(7), The autogroup feature.
    """
    try:
        if os.getpriority(os.PRIO_PROCESS, 0) == 0:
            with open("/proc/self/autogroup", "w", encoding="ascii") as file:
                file.write("-10")
    except OSError:
        pass


def _last_word() -> str:
    """The last line printed by a daemon that died: usually the error."""
    with open(paths.daemon_output(), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
        lines = file.read().decode(errors="replace").split("\n")
    words = [line.strip() for line in lines if line.strip()]
    return f": {printable(words[-1], 200)}" if words else ""


def _read_line(fd: int) -> str:
    import select

    line = b""
    with os.fdopen(fd, "rb", buffering=0) as reader:
        while not line.endswith(b"\n"):
            if not select.select([fd], [], [], START_TIMEOUT_S)[0]:
                break
            piece = reader.read(4096)
            if not piece:
                break
            line += piece
    return line.decode(errors="replace").strip()


def reach(sock: _socket.socket, path: str) -> None:
    """Connect to a socket whose path may exceed the length of an address. Raises: OSError."""
    if len(os.fsencode(path)) < _LONG_PATH:
        sock.connect(path)
        return
    # An address holds 107 bytes; through its folder's descriptor any path is short.
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
