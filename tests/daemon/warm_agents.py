"""Agents forked from a process that has imported theirs, as daemons are by `warm`.

What a head starts to reach a node is a small program, the relay: it hands its streams to such an agent, lives as long,
and ends as it does. An agent is a process of its own, which is killed and stopped like any other; so it is its id that
the file of a node has. It ends with its head, or with its relay, as one that ssh started.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_PROGRAM = "import sys; sys.path[:1] = sys.argv[2:]; import warm_agents; warm_agents.serve(int(sys.argv[1]))"
_LONGEST = 1 << 20
"""Bytes of a request: most of it is an environment."""

_RELAY = """\
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
link.connect(sys.argv[1])
asked = {"pid_file": sys.argv[2], "arguments": sys.argv[3:], "env": dict(os.environ), "folder": os.getcwd()}
socket.send_fds(link, [json.dumps(asked).encode()], [0, 1, 2])
null = os.open(os.devnull, os.O_RDWR)
for stream in range(3):
    os.dup2(null, stream)
code = os.waitstatus_to_exitcode(int(link.recv(16) or 256))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class AgentNest:
    """A process that has imported the agent, and forks one for each relay that asks."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gpusched-agents-")  # readable by its owner alone
        folder = Path(self._folder.name)
        self._socket, self._relay = folder / "socket", folder / "relay.py"
        self._relay.write_text(_RELAY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(self._socket))
            listening.listen(64)
            # It ends when its standard input does.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(listening.fileno()), os.getcwd(), str(Path(__file__).parent)],
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        atexit.register(self._close)

    def command(self, pid_file: str) -> str:
        """What to execute, in a shell and with the arguments of an agent, instead of `gpusched agent`.

        Args: pid_file: where the agent writes its process id.
        """
        return f"{sys.executable} -IS {self._relay} {self._socket} {pid_file}"

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


@functools.cache
def agent_nest() -> AgentNest:
    """The one of this process."""
    return AgentNest()


def serve(descriptor: int) -> None:
    """Fork agents on request; returns in each of them when it has ended, and in the first process at the end."""
    # The command, and what it imports when it runs.
    from warm import fork_programs, never_wait_for_the_disk

    import gpusched.daemon.agent
    from gpusched.cli.admin.app import main

    fork_programs()
    never_wait_for_the_disk()
    assert gpusched.daemon.agent
    gc.collect()
    gc.freeze()
    listening = socket.socket(fileno=descriptor)
    relays: dict[int, tuple[int, socket.socket]] = {}
    """Pid and relay of the agents, by the descriptor that tells their ends."""
    agents: dict[int, int] = {}
    """Pids of the agents, by the descriptor of their relays."""
    poll = select.poll()
    for each in (0, descriptor):
        poll.register(each, select.POLLIN)
    while True:
        for readable, _ in poll.poll():
            if readable == 0:
                return
            if readable in agents:
                # The relay was ended.
                os.kill(agents.pop(readable), signal.SIGTERM)
                poll.unregister(readable)
            elif readable in relays:
                pid, relay = relays.pop(readable)
                poll.unregister(readable)
                os.close(readable)
                status = os.waitpid(pid, 0)[1]
                if agents.pop(relay.fileno(), None) is not None:
                    poll.unregister(relay.fileno())
                    _tell(relay, status)
                relay.close()
            elif readable == descriptor:
                relay, _ = listening.accept()
                message, streams, _, _ = socket.recv_fds(relay, _LONGEST, 3)
                if not message:
                    relay.close()
                    continue
                pid = os.fork()
                if not pid:
                    listening.detach()
                    for held in (relay, *(other for _, other in relays.values())):
                        held.detach()
                    _become_agent(json.loads(message), streams)
                    sys.exit(main())
                for stream in streams:
                    os.close(stream)
                watched = os.pidfd_open(pid)
                relays[watched] = pid, relay
                agents[relay.fileno()] = pid
                for each in (watched, relay.fileno()):
                    poll.register(each, select.POLLIN)


def _tell(relay: socket.socket, status: int) -> None:
    try:
        relay.send(str(status).encode())
    except OSError:
        pass  # it was ended at the same moment


def _become_agent(wanted: dict[str, Any], streams: list[int]) -> None:
    """Be as a process that was started so."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # Those of the first process remember what its descriptors were.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", errors=sys.stdout.errors, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors=sys.stderr.errors, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(wanted["env"])
    time.tzset()
    os.chdir(wanted["folder"])
    sys.path[:2] = [wanted["folder"]]
    sys.argv[:] = ["gpusched", "agent", *wanted["arguments"]]
    part = Path(wanted["pid_file"] + ".new")
    part.write_text(f"{os.getpid()}\n")
    part.rename(wanted["pid_file"])
