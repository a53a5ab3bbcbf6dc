"""grun inside a job: tasks in its allocation, with its environment, without queueing."""

from __future__ import annotations

import os
import signal
import sys

from gpusched.cli.foreground import OWN
from gpusched.errors import Refused, UsageError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

    from gpusched.cli.parse import Values

ALLOWED = (OWN - {"keep", "lease_s"}) | {"work_dir", "extra_env"}
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run_tasks(job_id: str, values: Values, argv: list[str]) -> int:
    """Run the command here, once or several times at once; returns the highest code. Raises: UsageError, Refused."""
    if not values.keys().isdisjoint({"keep", "lease_s"}):
        raise UsageError(
            f"this runs inside job {job_id}, whose end is also that of its tasks: --keep and --lease are the job's",
            "leave them out, or start the job itself with them",
        )
    if not values.keys() <= ALLOWED:
        raise UsageError(
            f"this runs inside job {job_id}, and its tasks share what the job has: they can ask for nothing more",
            "leave the resources out, or submit another job with: gsub",
        )
    env = {**os.environ, **values.get("extra_env", {})}
    try:
        os.chdir(values.get("work_dir", "."))
    except OSError as error:
        raise Refused(f"cannot enter {printable(values['work_dir'])}: {error.strerror}", "give another -D") from None
    # Ignored by this interpreter, which a command must not inherit.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    count = values.get("ntasks", 1)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if count == 1:
            os.execvpe(argv[0], argv, env)
        return _together(count, argv, env)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise Refused(f"cannot run {printable(argv[0])}: {why}", "see where it is with: command -v") from None


def _together(count: int, argv: list[str], env: dict[str, str]) -> int:
    """Several at once; all but the first have no input. Signals to this process go to all of them."""
    pids: list[int] = []

    def forward(number: int, where: FrameType | None) -> None:
        for pid in pids:
            os.kill(pid, number)

    null = os.open(os.devnull, os.O_RDONLY)
    before = {number: signal.signal(number, forward) for number in FORWARDED}
    highest = 0
    try:
        for task in range(count):
            own = {"GPUSCHED_TASK": str(task), "GPUSCHED_NTASKS": str(count)}
            own |= {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NTASKS": str(count)}
            actions = [(os.POSIX_SPAWN_DUP2, null, 0)] if task else []
            pids.append(os.posix_spawnp(argv[0], argv, {**env, **own}, file_actions=actions, setsigdef=list(FORWARDED)))
        while pids:
            pid, status = os.wait()
            if pid in pids:
                pids.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                highest = max(highest, code if code >= 0 else 128 - code)
    except OSError:
        forward(signal.SIGTERM, None)
        raise
    finally:
        os.close(null)
        for number, handler in before.items():
            signal.signal(number, handler)
    return highest
