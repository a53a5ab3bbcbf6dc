"""What systemd is told of a run's unit: a pure function from a ticket to the properties of a transient service.

Nothing that a user wrote goes in here: what a unit is made of can be read by everybody, and systemd expands `$`
and `%`. Command, environment and paths go to the supervisor through a descriptor.

Source: org.freedesktop.systemd1(5), systemd.exec(5), systemd.kill(5), systemd.resource-control(5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpusched.model.execution import Ticket

Property = tuple[str, tuple[str, Any]]
"""Name, and D-Bus signature with value."""

MAX_UINT64 = (1 << 64) - 1
"""systemd's "infinity"."""
STOP_MARGIN_S = 30.0
"""What a supervisor that was told to end may need beyond its job's grace, before systemd kills it too."""


@dataclass(frozen=True, slots=True)
class Names:
    """How the units of one daemon are called. Several daemons may run on a machine, each with a job 1."""

    prefix: str = "gpusched"
    slice: str = "gpusched.slice"
    """Holds all runs, beside `system.slice` and `user.slice`: to be limited or looked at together. systemd makes it."""

    def unit(self, run: str) -> str:
        """The unit of a run `JOB.RUN`."""
        return f"{self.prefix}-{run}.service"


@dataclass(frozen=True, slots=True)
class Program:
    """What a unit executes: the supervisor."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def properties(ticket: Ticket, names: Names, program: Program, fds: Sequence[int]) -> list[Property]:
    """All properties of the unit of one run.

    Args: fds: what the supervisor has as its standard input, output and error.
    """
    job, _, number = ticket.run.partition(".")
    return [
        ("Description", ("s", f"run {number} of gpusched's job {job}")),
        ("Slice", ("s", names.slice)),
        ("Type", ("s", "exec")),
        # Not ExecStartEx, with which `$` would need no second one: systemd 252 writes that down under a name that it
        # does not read, and after a daemon-reload every run is a unit without a command, about which it complains.
        ("ExecStart", ("a(sasb)", [(program.argv[0], [word.replace("$", "$$") for word in program.argv], False)])),
        ("Environment", ("as", [f"{name}={value}" for name, value in program.environment.items()])),
        ("StandardInputFileDescriptor", ("h", fds[0])),
        ("StandardOutputFileDescriptor", ("h", fds[1])),
        ("StandardErrorFileDescriptor", ("h", fds[2])),
        ("UMask", ("u", 0o077)),
        *_ending(ticket),
        # The supervisor divides its cgroup: itself here, the job there.
        ("Delegate", ("b", True)),
        # Who is killed for want of memory is the kernel's choice; the supervisor must live to tell of it.
        ("OOMPolicy", ("s", "continue")),
        # A limit of its own would make systemd's default a limit of jobs.
        ("TasksMax", ("t", MAX_UINT64)),
        # All else of a cage is set by the supervisor, on the job's part alone.
        *([] if ticket.cage is None else [("CPUWeight", ("t", ticket.cage.cpu_weight))]),
    ]


def _ending(ticket: Ticket) -> list[Property]:
    """How the unit ends when it is not the supervisor that ends its run."""
    return [
        # The supervisor is told, and tells the job in its own way. When it is gone, all that is left is killed.
        ("KillMode", ("s", "mixed")),
        ("SendSIGKILL", ("b", True)),
        ("TimeoutStopUSec", ("t", int((ticket.grace_s + ticket.leftover_grace_s + STOP_MARGIN_S) * 1e6))),
        # When the machine goes down the daemon ends first, and gives notice while the runs are still there.
        ("Before", ("as", ["gpusched.service"])),
        # Nothing stays in systemd's memory: how it ended is in the spool.
        ("CollectMode", ("s", "inactive-or-failed")),
    ]
