"""Prolog and epilog: programs of the job's owner and of the site around the command of a run.

    site's prolog -> owner's prolog -> command -> owner's epilog -> site's epilog -> result

The owner's run in the run: as its user, with its environment, limits and GPUs, and with the log as output. The site's
run as this process's user, root under the system's daemon, outside of the run's limits, with an environment of ids
alone, so that nothing of a user's is interpreted. Each is over when none of its processes is left, and the run ends
after the last one: until then its GPUs stay booked. A killed supervisor runs nothing further; the daemon ends what it
left. How the command ended is recorded before the epilogs, so that it is not repeated for their sake.
"""

from __future__ import annotations

import os
import time

from gpusched.engine import spool as files
from gpusched.engine.linux import proctree
from gpusched.engine.linux.as_user import LaunchError, text_of
from gpusched.engine.linux.site_program import SiteProgramError, open_site_program
from gpusched.engine.supervisor import launch
from gpusched.engine.supervisor.processes import WALL, exit_of
from gpusched.engine.supervisor.supervisor import Supervisor, ascii_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

    from gpusched.engine.supervisor.result import RunResult

SITE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OF_ANOTHER_JOB = frozenset({"GPUSCHED_EXIT_CODE", "GPUSCHED_SIGNAL", "GPUSCHED_REASON"})
"""What a fallback has in its environment about the job that failed, which in an epilog would pass for its own."""
KILL_AGAIN_S = 0.1
HASTE_S = 10.0
"""Longest time of an epilog while the machine goes down."""
SAID_BYTES = 4096
"""Of the site's output this much is searched for its last line."""
STATES = {
    "cancel": "CANCELLED",
    "client_lost": "CANCELLED",
    "timeout": "TIMEOUT",
    "lease": "TIMEOUT",
    "vram_over": "OUT_OF_MEMORY",
    "gpu_lost": "NODE_FAIL",
    "node_fail": "NODE_FAIL",
}
"""States by what stopped the run."""
STATES_UNLESS_DONE = {
    "preempt": "PREEMPTED",
    "requeue": "PREEMPTED",
    "shutdown": "NODE_FAIL",
    "head_lost": "NODE_FAIL",
}
"""The same where a command has COMPLETED all the same if no other run follows one that ended with exit code 0."""


def run_site_prolog(supervisor: Supervisor) -> str | None:
    """Execute the site's prolog; a sentence if it failed."""
    return _run_site_program(supervisor, "prolog", supervisor.ticket["site_prolog"], {})


def run_epilogs(supervisor: Supervisor, result: RunResult, is_prepared: bool) -> None:
    """Execute the epilogs, and note how they failed.

    If this process is killed meanwhile, the command has ended all the same, and is not repeated.

    Args: is_prepared: the site's prolog or the job was started, so that the site's epilog has something to end.
    """
    control, ticket = supervisor.control, supervisor.ticket
    control.is_over = True
    variables = result_variables(supervisor, result)
    has_started = control.start_at is not None
    has_own = ticket.get("epilog") is not None and has_started
    has_site = ticket.get("site_epilog") is not None and is_prepared
    if (has_own or has_site) and has_started and control.stopping is None:
        supervisor.events.notify("stopping", at=time.time(), why="epilog")
    if has_started:
        cut, why = {}, "did not end: the supervisor of the run was killed"
        if has_own:
            cut["epilog_failure"] = f"its epilog {ascii_of(ticket['epilog'])} {why}"
        if has_site:
            cut["epilog_fault"] = f"the epilog {ticket['site_epilog']['path']} {why}"
        files.note_outcome(supervisor.record_fd, supervisor.events.take_start_line(), result.line(**cut))
    if has_own:
        supervisor.faults["epilog_failure"] = run_own_epilog(supervisor, variables)
        if control.logs is not None:
            control.logs.drain()
    if has_site:
        supervisor.faults["epilog_fault"] = _run_site_program(supervisor, "epilog", ticket["site_epilog"], variables)


def result_variables(supervisor: Supervisor, result: RunResult) -> dict[str, str]:
    """How the command ended, as variables of the epilogs."""
    code, number = result.exit
    stopped_by = supervisor.control.stopped_by
    is_success = supervisor.launch_error is None and code == 0
    state = "COMPLETED" if is_success else "FAILED"
    if supervisor.control.start_at is None and supervisor.launch_error is None:
        # The site's prolog failed.
        state = "NODE_FAIL"
    elif not is_success and (result.failure.get("gpu_oom") or result.counted.get("oom_kills")):
        state = "OUT_OF_MEMORY"
    if stopped_by is not None:
        is_done = is_success and (result.is_done or not supervisor.ticket.get("requeue", True))
        state = STATES.get(stopped_by) or (not is_done and STATES_UNLESS_DONE.get(stopped_by)) or state
    found = {"GPUSCHED_STATE": state}
    if code is not None or number is not None:
        found["GPUSCHED_EXIT_CODE"] = str(code if number is None else 128 + number)
    if number is not None:
        found["GPUSCHED_SIGNAL"] = str(number)
    if stopped_by is not None:
        found["GPUSCHED_STOPPED_BY"] = stopped_by
    return found


def run_own_epilog(supervisor: Supervisor, result: Mapping[str, str]) -> str | None:
    """Execute the job's own epilog; a sentence if it failed, which changes nothing about the run's result."""
    path: str = supervisor.ticket["epilog"]
    shown = ascii_of(path)
    logs, processes = supervisor.control.logs, supervisor.processes
    if supervisor.control.stopped_by == "head_lost":
        return _told(supervisor, f"its epilog {shown} was not started: the node had lost contact with the scheduler")
    pairs = (word.partition("=") for word in supervisor.env.decode("utf-8", "surrogateescape").split("\0"))
    env = {name: value for name, equals, value in pairs if equals and name not in OF_ANOTHER_JOB}
    ticket = {**supervisor.ticket, "env": {**env, **result}, "script": None}
    try:
        _, owner = launch.owner_of(ticket)
        pid = supervisor.home.start_as_job(
            lambda: launch.start_process(ticket, [path], logs, None, owner, processes.box)
        )
    except LaunchError as error:
        return _told(supervisor, ascii_of(f"its epilog was not started: {error}"))
    finally:
        if logs is not None:
            logs.begin()
    how = _await(supervisor, pid, ticket["epilog_timeout_s"], in_run=True)
    return None if how is None else _told(supervisor, f"its epilog {shown} {how}")


def _told(supervisor: Supervisor, text: str) -> str:
    if supervisor.control.logs is not None:
        supervisor.control.logs.say(f"job {supervisor.run.partition('.')[0]}: {text}")
    return text


def _run_site_program(
    supervisor: Supervisor, what: str, program: dict[str, Any], result: Mapping[str, str]
) -> str | None:
    path: str = program["path"]
    try:
        fd = open_site_program(path)
    except SiteProgramError as error:
        return f"the {what} was not started: {error}"
    spool, run = supervisor.home.spool, supervisor.run
    draft = f"{spool}/{what}-{run}"
    try:
        output = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        os.close(fd)
        return f"the {what} {path} was not started: its output cannot be written to {spool}: {error.strerror}"
    try:
        os.unlink(draft)
        pid = os.fork()
        if pid == 0:
            _become(supervisor, path, fd, output, {**_ids(supervisor), **result})
        how = _await(supervisor, pid, program["timeout_s"], in_run=False)
        if how is None:
            return None
        said = _last_line(output)
        return f"the {what} {path} {how}" + (f": {said}" if said else "")
    except OSError as error:
        return f"the {what} {path} was not started: {error.strerror}"
    finally:
        os.close(fd)
        os.close(output)


def _ids(supervisor: Supervisor) -> dict[str, str]:
    """The environment of a program of the site. No value is a user's text."""
    ticket = supervisor.ticket
    return {
        "PATH": SITE_PATH,
        "LANG": "C.UTF-8",
        "GPUSCHED_JOB_ID": supervisor.run.partition(".")[0],
        # With these two the processes of a killed supervisor are found.
        "GPUSCHED_RUN": supervisor.run,
        "GPUSCHED_SPOOL": supervisor.home.spool,
        "GPUSCHED_UID": str(ticket["uid"]),
        "GPUSCHED_GPU_INDICES": ",".join(str(index) for _, index in ticket["gpus"]),
        "GPUSCHED_GPU_UUIDS": ",".join(uuid for uuid, _ in ticket["gpus"]),
    }


def _become(supervisor: Supervisor, path: str, fd: int, output: int, env: dict[str, str]) -> NoReturn:
    """Execute the opened program in the child."""
    try:
        os.setpgid(0, 0)
        os.chdir("/")
        os.umask(0o022)
        null = os.open("/dev/null", os.O_RDONLY)
        for one, number in ((null, 0), (output, 1), (output, 2)):
            os.dup2(one, number)
        # The interpreter of a script opens it by this number. What was checked is what it reads.
        os.set_inheritable(fd, True)
        launch.reset_signals()
        os.execve(fd, [path], env)
    except BaseException as error:
        os.write(2, f"cannot run it: {text_of(error)}\n".encode("utf-8", "surrogateescape"))
    finally:
        os._exit(127)


def _await(supervisor: Supervisor, pid: int, timeout_s: float, *, in_run: bool) -> str | None:
    """Wait until a program and all that it started have ended; how it failed, as a predicate, or None.

    What it leaves behind is killed, as is all of it after the timeout. Orders for the run are read meanwhile.
    """
    processes = supervisor.processes
    if supervisor.control.stopped_by == "shutdown":
        timeout_s = min(timeout_s, HASTE_S)
    until = time.monotonic() + timeout_s
    failed: str | None = None
    status: int | None = None
    while True:
        try:
            ended, code, usage = os.wait4(-1, os.WNOHANG | WALL)
        except ChildProcessError:
            return failed
        if ended:
            if in_run:
                processes.cpu_s += usage.ru_utime + usage.ru_stime
            if ended == pid:
                status = code
                failed = failed or _how_it_failed(code)
            continue
        now = time.monotonic()
        if status is None and failed is None and now < until:
            contact = supervisor.contact if in_run else None
            # When the run's lease expires, an owner's program must end. The site's continues: it is not the run's.
            if contact is None or contact.look() is None:
                due_at = None if contact is None else contact.due_at
                supervisor.sleep(min(until, until if due_at is None else due_at) - now)
                continue
            failed = "was ended: the node had lost contact with the scheduler"
        elif failed is None and status is None:
            failed = f"did not end within {timeout_s:g} s and was killed"
        proctree.kill_all(processes.members)
        if in_run and processes.box is not None:
            processes.box.kill()
        supervisor.sleep(KILL_AGAIN_S)


def _how_it_failed(status: int) -> str | None:
    code, number = exit_of(status)
    if number is not None:
        return f"was ended by signal {number}"
    return f"ended with exit code {code}" if code else None


def _last_line(output: int) -> str:
    """The last line that a program of the site wrote, printable."""
    size = os.fstat(output).st_size
    lines = os.pread(output, SAID_BYTES, max(0, size - SAID_BYTES)).decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "".join(one if one.isascii() and one.isprintable() else "?" for one in last)
