"""The process that runs a GPU source: reads request numbers from stdin, writes readings to stdout.

A driver call can hang, and a thread stuck in one cannot be ended; a process can. It ends when its
stdin closes, so it never outlives the daemon. What `-c` runs is `main(json)`.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from gpusched.errors import UsageError
from gpusched.gpu.choose import Choice, build
from gpusched.model.cluster import GpuReading
from gpusched.model.codec import encode
from gpusched.model.value import Value

STDIN, STDOUT = 0, 1


class Answer(Value):
    """One reading and the request it answers; a line of JSON on its way to the daemon."""

    request: int
    reading: GpuReading
    is_last: bool = False
    """The child ends after this: there is nothing to keep a driver open for."""


def main(argument: str) -> None:
    """Serve the choice in `argument` until stdin closes."""
    # Ctrl-C in the terminal of a foreground daemon reaches its children too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    choice = Choice(**json.loads(argument))
    # The C library may print to stdout; answers keep the pipe for themselves.
    answers = os.dup(STDOUT)
    os.dup2(2, STDOUT)
    _write(answers, b"\n")
    try:
        source = build(choice, os.environ)
    except UsageError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(error.exit_code)
    try:
        for line in sys.stdin.buffer:
            reading = source.read()
            is_last = choice.kind == "nvml" and (reading.source == "none" or reading.error is not None)
            _write(answers, encode(Answer(int(line), reading, is_last)) + b"\n")
            if is_last:
                break
    finally:
        source.close()


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
