"""One attempt to reach one address, in its own process: a hanging service can be killed without affecting others.

apprise reports errors only through its log, which may contain addresses; every secret part of the address is
removed from the messages passed on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import signal
import time
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from gpusched.addons.notify.mail import is_mail, problem_of_server, send_mail
from gpusched.addons.notify.terminals import MAIL, TERMINALS, Unreached, write_to_terminals

_MOST_TEXT = 400
_LOOK_S = 0.2
_ALONE_S = 2.0
_SHORTEST_SECRET = 4
"""Shorter parts of an address are words such as `/to` and ports; passwords count at any length."""


def without_apprise() -> str:
    """The message where the library is missing."""
    from gpusched.extras import install_command  # hardly ever needed

    return f"apprise is not installed; install it with: {install_command('notify')}"


@dataclass(frozen=True, slots=True)
class SendResult:
    """Result of one attempt."""

    is_told: bool
    error: str = ""
    is_final: bool = False
    """A retry would change nothing."""


class SendAttempt:
    """A child process that sends; `poll` until there is a result, `end` at the latest at its deadline."""

    def __init__(
        self, url: str, title: str, body: str, timeout_s: float, receipt: tuple[int, bytes] | None = None
    ) -> None:
        """Start the attempt.

        Args: receipt: a descriptor and the line to append to it as soon as the message is accepted.
        Raises: OSError when no process can be created.
        """
        self._timeout_s = timeout_s
        self._fd, write_fd = os.pipe()
        os.set_blocking(self._fd, False)
        if not is_built_in(url):
            preload()
        # From here: loading the first time, on a busy machine, is no delay of the service.
        self.deadline = time.monotonic() + timeout_s
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self._fd)
            os.close(write_fd)
            raise
        if self._pid == 0:
            _child(write_fd, url, title, body, timeout_s, receipt)
        os.close(write_fd)
        self._said = b""

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._fd

    def poll(self) -> SendResult | None:
        """Return the result once there is one; past the deadline the attempt is killed and has failed."""
        try:
            while data := os.read(self._fd, 1 << 16):
                self._said += data
        except BlockingIOError:
            if time.monotonic() < self.deadline:
                return None
            self.end()
            return SendResult(False, f"no answer within {self._timeout_s:g} s")
        status = self._reap(0)
        try:
            return SendResult(**json.loads(self._said))
        except (ValueError, TypeError):
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"code {os.WEXITSTATUS(status)}"
            return SendResult(False, f"the sending process ended with {how}")

    def end(self) -> None:
        """Kill the child."""
        os.kill(self._pid, signal.SIGKILL)
        self._reap(0)

    def wait(self) -> SendResult:
        """Wait for the result, at most until the deadline."""
        while True:
            select.select([self._fd], [], [], _LOOK_S)
            result = self.poll()
            if result is not None:
                return result

    def _reap(self, options: int) -> int:
        os.close(self._fd)
        return os.waitpid(self._pid, options)[1]


def is_built_in(url: str) -> bool:
    """Whether the address needs no apprise."""
    return url == TERMINALS or is_mail(url)


def preload() -> bool:
    """Load apprise with its services once in the parent, so that no child has to; False when unavailable."""
    try:
        import apprise
    except ImportError:
        return False
    # The first address has every service imported; after that it costs nothing.
    apprise.Apprise.instantiate("json://localhost", suppress_exceptions=True)
    return True


def _child(fd: int, url: str, title: str, body: str, timeout_s: float, receipt: tuple[int, bytes] | None) -> None:
    """Body of the forked process; never returns."""
    code = 1
    try:
        # It must not use its parent's terminal and pipes.
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Its parent ends it at the deadline; where there is no parent any more, it ends itself.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _ALONE_S)
        result = send(url, title, body)
        if result.is_told and receipt is not None:
            with contextlib.suppress(OSError):
                # A disk that is full keeps no receipt; without one the message was sent all the same.
                os.write(*receipt)
        said = {"is_told": result.is_told, "error": result.error, "is_final": result.is_final}
        os.write(fd, json.dumps(said).encode())
        code = 0
    finally:
        os._exit(code)


def send(url: str, title: str, body: str) -> SendResult:
    """Send now, in this process. Raises nothing."""
    if is_built_in(url):
        try:
            if url == TERMINALS:
                write_to_terminals(body)
            else:
                send_mail(url, title, body)
        except Unreached as error:
            return SendResult(False, without_secrets(str(error), url)[:_MOST_TEXT], error.is_final)
        except Exception as error:
            return SendResult(False, without_secrets(f"{type(error).__name__}: {error}", url)[:_MOST_TEXT])
        return SendResult(True)
    try:
        import apprise
    except ImportError:
        return SendResult(False, without_apprise(), is_final=True)
    heard = _Listener()
    logger = logging.getLogger("apprise")
    logger.handlers, logger.propagate = [heard], False
    logger.setLevel(logging.WARNING)
    try:
        service = apprise.Apprise()
        if not service.add(url):
            scheme = url.partition("://")[0]
            return SendResult(False, f"no service understands the address {scheme}://...", is_final=True)
        # Services that take markup get the text in a form in which names and lines stay what they are.
        if service.notify(body=body, title=title, body_format=apprise.NotifyFormat.TEXT):
            return SendResult(True)
        problem = "; ".join(heard.lines) or "the service did not take the message"
    except Exception as error:
        # Whatever a plug-in raises, the alert has not been sent, and the reason must be reported.
        problem = f"{type(error).__name__}: {error}"
    return SendResult(False, without_secrets(problem, url)[:_MOST_TEXT])


def understands(url: str) -> bool | None:
    """Whether a service accepts this address; None when apprise is unavailable."""
    if is_built_in(url):
        return url in (TERMINALS, MAIL) or problem_of_server(url) is None
    if not preload():
        return None
    import apprise

    logging.getLogger("apprise").addHandler(logging.NullHandler())
    return apprise.Apprise.instantiate(url, suppress_exceptions=True) is not None


class _Listener(logging.Handler):
    """Keeps apprise's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        if line not in self.lines:
            self.lines.append(line)


def without_secrets(text: str, url: str) -> str:
    """Replace every part of the address in the text that may be secret with `***`."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the address cannot be parsed, so the answer is not shown"
    host = parts.hostname or ""
    words = [url, parts.username or "", *parts.path.split("/")]
    words += [pair.partition("=")[2] for pair in parts.query.split("&")]
    # Chat services have a token where others have the name of a machine.
    words += [] if "." in host or host in ("", "localhost") else [parts.netloc, host]
    words = [word for word in words if len(word) >= _SHORTEST_SECRET]
    words += [parts.password] if parts.password else []
    secrets = {form for word in words for form in (word, unquote(word))}
    for secret in sorted(secrets, key=len, reverse=True):
        text = re.sub(re.escape(secret), "***", text, flags=re.IGNORECASE)
    return text
