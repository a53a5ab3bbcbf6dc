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
from gpusched.engine.supervisor.processes import RunProcesses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpusched.engine.supervisor.run_control import RunControl
    from gpusched.engine.supervisor.supervisor import Supervisor

JOB_ENDED = "job_ended"
"""As in `engine.cluster`, which supervisors do not import."""


class HeldProcesses(RunProcesses):
    """What runs in the cage: there is no first process. Args: pid: of this process, in its place."""

    tells_ends = False

    def __init__(self, pid: int) -> None:
        super().__init__(pid, is_script=False)
        self.first_pid = pid
        self.control: RunControl | None = None
        """Set with the start."""
        self.is_released = False
        """The command has ended on the first node."""

    def reap(self, ended: Callable[[int, int], None]) -> bool:
        """As of any run; over once it is to end and nothing is left."""
        has_children = super().reap(ended)
        is_to_end = self.control is not None and self.control.stopping is not None
        if self.status is None and is_to_end and not any(one.is_alive for one in self.members()):
            # Only hosts of visits may be left, without anything to serve.
            ended(self.first_pid, 0)
        return has_children or self.status is None

    def takes_stop(self, why: str, grace_s: float | None) -> bool:
        """Whether it is news, rather than what ended the part on the first node."""
        control = self.control
        if control is None:
            return True
        if why == JOB_ENDED:
            self.release(control)
            return False
        return control.stopping != why or why == "cancel" or grace_s is not None

    def release(self, control: RunControl) -> None:
        """End after the command on the first node; more than once is the same."""
        self.is_released = True
        if self.status is not None:
            return
        if control.stopping is None:
            control.first_ended(0)
            return
        if control.only_main:
            # The notice was for the first process alone, which is gone.
            control.terminate()
        if self.visits is not None:
            self.visits.hang_up_terminals()

    def first_pids(self) -> tuple[int, ...]:
        return ()

    def has_just_ended(self) -> bool:
        return False

    def exit(self) -> tuple[int | None, int | None]:
        """Successfully if nothing but the end of the command ended it."""
        is_success = self.is_released and self.control is not None and self.control.stopped_by is None
        return (0, None) if is_success else (None, None)


def hold(run: Supervisor) -> str | None:
    """Make the cage and report it; a sentence on failure."""
    try:
        if run.ticket["limits"] is not None:
            run.make_box()
        launch.prepare(run.ticket, run.home.spool, run.home.checkpoints)
    except LaunchError as error:
        return str(error)
    assert isinstance(run.processes, HeldProcesses)
    run.processes.control = run.control
    run.has_begun(time.time(), time.monotonic())
    # Steps wait for it, and no end follows that it could go with.
    run.events.send(b"")
    return None
