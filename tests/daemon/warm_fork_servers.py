"""Fork servers forked from a process that has imported theirs: that is most of their start.

Like theirs, its interpreter knows no site and nothing of the environment, see `gpusched.engine.launchers`. Such a fork
server is no child of its daemon. It ends as any other does, when the daemon's end of its socket is closed.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys

_LONGEST = 1 << 16
"""Bytes of a request."""
_FDS = 16


def serve(held: int, asked: int) -> None:
    """Fork on request until the other end of a descriptor is closed. Args: asked: where others connect to ask."""
    from gpusched.engine import forkserver

    os.fsync = lambda _: None  # see `warm.never_wait_for_the_disk`
    gc.collect()
    gc.freeze()
    others = socket.socket(fileno=asked)
    running: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    for each in (held, asked):
        poll.register(each, select.POLLIN)
    while True:
        for readable, _ in poll.poll():
            if readable == held:
                return
            if readable != asked:
                pid, ended = running.pop(readable)
                poll.unregister(readable)
                os.close(readable)
                _tell(ended, os.waitpid(pid, 0)[1])
                continue
            link = others.accept()[0]
            message, (ended, *given), _, _ = socket.recv_fds(link, _LONGEST, _FDS)
            pid = os.fork()
            if not pid:
                link.detach()
                others.detach()
                _become(json.loads(message), *given)
                _end(forkserver.main)
            for each in given:
                os.close(each)
            running[watched := os.pidfd_open(pid)] = pid, ended
            poll.register(watched, select.POLLIN)
            link.send(str(pid).encode())
            link.close()


def _become(wanted: dict[str, str], log: int, *fds: int) -> None:
    """Be as a fork server that was started so. Args: fds: those that it is told of."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    first = 3
    for number in (*sorted(fds), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, number)
        first = number + 1
    os.environ.clear()
    os.environ.update(wanted["env"])  # type: ignore[arg-type]
    os.chdir("/")
    sys.argv[1:] = [*map(str, fds), *wanted["words"]]


def _end(main: object) -> None:
    code = 1
    try:
        main()  # type: ignore[operator]
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _tell(ended: int, status: int) -> None:
    try:
        os.write(ended, str(status).encode())
    except BrokenPipeError:
        pass  # nobody asks any more
    os.close(ended)
