"""The supervisor of a part that holds its node: the command of the job runs on another one.

As Slurm's `extern` step, it makes the job's cage on the node, with limits, device rule, environment and the site's
prolog and epilog, and starts no process in it. What runs there enters from outside, see `visits`, and is stopped,
suspended and counted as what runs on the first node. Without a process nothing ends by itself here:

    a stop, by order or time limit   what runs there gets the job's signal and grace; over with its last process
    `job_ended`                      the command has ended on the first node: what is left ends as leftovers do there
    both                             what is left keeps its grace, as beside a command that ends while it is stopped
"""

from __future__ import annotations

import time

from gpusched.engine.linux.as_user import LaunchError
from gpusched.engine.supervisor import launch
from gpusched.engine.supervisor.supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any

    from gpusched.engine.supervisor.run_control import Home
else:
    import _signal as signal

JOB_ENDED = "job_ended"
"""As in `engine.cluster`, which supervisors do not import."""


class HoldingSupervisor(Supervisor):
    def __init__(self, ticket: dict[str, Any], home: Home) -> None:
        super().__init__(ticket, home)
        self.is_released = False
        """The command has ended on the first node."""

    def start(self) -> str | None:
        """Make the cage and report it; a sentence on failure."""
        home = self.home
        try:
            if self.ticket["limits"] is not None:
                from gpusched.engine.linux import cgroup  # a personal daemon's runs have none

                self.box = cgroup.RunCgroup(self.ticket["limits"], self.run)
            launch.prepare(self.ticket, home.spool, home.checkpoints)
        except LaunchError as error:
            return str(error)
        # There is no other process to name, and this one is found among the node's by the same number.
        self.job_pid = home.pid
        self.has_begun(time.time(), time.monotonic())
        self.forget_command()
        # Steps wait for it, and no end follows that it could go with.
        self.send(b"")
        return None

    def reap(self) -> bool:
        """As of any run; over once it is to end and nothing is left."""
        has_children = super().reap()
        if self.status is None and self.stopping is not None and not any(one.is_alive for one in self.members()):
            self.status = 0
            # Only hosts of visits may be left, without anything to serve.
            self.main_ended()
        return has_children or self.status is None

    def stop(self, why: str, number: int | None, grace_s: float | None) -> None:
        if why == JOB_ENDED and self.start_at is not None:
            self.release()
        elif self.stopping != why or why == "cancel" or grace_s is not None:
            # Otherwise it is what ended the part on the first node, and known.
            super().stop(why, number, grace_s)

    def release(self) -> None:
        """End after the command on the first node; more than once is the same."""
        self.is_released = True
        if self.status is not None:
            return
        if self.stopping is None:
            self.status = 0
            self.notice_at = self.still.look_at = None
            self.main_ended()
            return
        if self.only_main:
            # The notice was for the first process alone, which is gone.
            self.deliver(signal.SIGTERM)
            self.deliver(signal.SIGCONT)
        if self.visits is not None:
            self.visits.hang_up_terminals()

    def first_pids(self) -> tuple[int, ...]:
        return ()

    def has_just_ended(self) -> bool:
        return False

    def how_it_ended(self) -> tuple[int | None, int | None]:
        """Successfully if nothing but the end of the command ended it."""
        return (0, None) if self.is_released and self.stopped_by is None else (None, None)
