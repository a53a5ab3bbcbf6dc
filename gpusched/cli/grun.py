"""grun: like gsub, but in the foreground, with the terminal or with pipes; inside a job, starts its tasks."""

from __future__ import annotations

import _socket
import os
import posixpath
import signal
import sys
import time

from gpusched.cli import output
from gpusched.cli.environment import captured, current_folder, named_variables, umask
from gpusched.cli.gwait import call_patiently, ending, wait_until_done
from gpusched.cli.job_options import OWN_OF_GRUN, grun_table
from gpusched.cli.parse import parse
from gpusched.cli.submission import say_excluded, say_without_effect, spec_of
from gpusched.client import connect, reach
from gpusched.errors import GpuschedError, NotReady, Refused, UsageError
from gpusched.model.state_names import FINAL
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from gpusched.cli.jupyter import Notebook
    from gpusched.cli.parse import Values
    from gpusched.cli.run_connection import RunEnding, Way
    from gpusched.cli.tasks import Tasks
    from gpusched.client import DaemonConnection


SOON_S = 0.3
"""A job that starts within this time is not reported as waiting."""
LOOK_S = 5.0
REACH_S = 20.0
ANSWER_S = 10.0
_BECAUSE = {
    "cancel": "it was cancelled",
    "timeout": "it reached its time limit",
    "lease": "its lease expired without activity",
    "preempt": "it was preempted by another job",
    "requeue": "it was requeued",
    "gpu_lost": "it lost a GPU",
    "shutdown": "the machine is shutting down",
    "vram_over": "it used more GPU memory than it booked",
    "unbooked_use": "it used a GPU it had not booked",
    "client_lost": "its client disconnected",
    "head_lost": "its node lost contact with the daemon",
    "node_fail": "another of its nodes failed",
}


LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal told this process to exit while it waits."""

    def __init__(self, number: int) -> None:
        self.number = number


def main() -> int:
    return output.run("grun", body)


def body(words: list[str]) -> int:
    """Run the command; returns its exit code."""
    table = grun_table()
    values, operands, _ = parse(table, words)
    if output.common(table, values, operands):
        return 0
    if "attach" in values:
        if operands or values.keys() - {"attach", "quiet"}:
            raise UsageError("--attach takes a job id and no other options", "for example: grun --attach 42")
        with connect() as client:
            return _attend(client, values["attach"], values)
    if "job" in values:
        from gpusched.cli.visit import grun_in  # few ask for it

        return grun_in(values, operands)
    if not operands and values.get("pty") and not values.get("jupyter"):
        operands = [os.environ.get("SHELL") or "/bin/sh"]
    if not operands and not values.get("jupyter"):
        raise UsageError("there is nothing to run", "for example: grun -g 1 --pty bash   or: grun -g 1 python train.py")
    with connect() as client:
        if os.environ.get("GPUSCHED_JOB_ID"):
            found = call_patiently(client, "/v1/inside")["inside"]
            if found is not None and values.get("jupyter"):
                raise UsageError(
                    f"--jupyter starts a new job, and this is job {found['id']}",
                    "type it in a shell outside of jobs, or here: jupyter lab --no-browser --ip=127.0.0.1",
                )
            if found is not None:
                return run_tasks(found["id"], values, operands)
            _note(values, "GPUSCHED_JOB_ID is set, but this process belongs to no job; starting a new job")
        if values.get("ntasks", 1) > 1:
            raise UsageError(
                f"{values['ntasks']} tasks can be started only inside a job",
                "start a job with grun --pty bash, then run grun -n 4 COMMAND; or do so in a script for gsub",
            )
        notebook = None
        if values.get("jupyter"):
            from gpusched.cli.jupyter import Notebook  # few jobs are notebooks

            notebook = Notebook(operands, captured(values).get("PATH", ""))
        spec = _spec(values, operands if notebook is None else notebook.argv)
        if notebook is not None:
            notebook.add_to(spec)
        answer = client.call("POST", "/v1/jobs", {"spec": spec})
        say_without_effect("grun", values)
        say_excluded("grun", answer.get("env_excluded", []), values)
        for text in (*answer.get("notes", ()), *answer.get("limits", ())):
            _note(values, printable(text))
        if notebook is not None:
            _note(values, f"job {answer['job']['id']}: {notebook.lease_note(spec['lease_s'])}")
        return _attend(client, answer["job"]["id"], values, notebook)


def _spec(values: Values, argv: list[str]) -> dict[str, Any]:
    spec = spec_of({key: value for key, value in values.items() if key not in OWN_OF_GRUN})
    spec.setdefault("work_dir", current_folder())
    spec["env"], spec["env_named"] = captured(values), named_variables(values)
    spec["umask"] = umask()
    spec["argv"] = argv
    spec.setdefault("name", posixpath.basename(argv[0]) or "grun")
    spec["interactive"] = "pty" if values.get("pty") else "pipes"
    spec["keep"] = bool(values.get("keep"))
    if "lease_s" in values:
        spec["lease_s"] = values["lease_s"]
    return spec


# --- waiting for the start ------------------------------------------------------------------------------


def _attend(client: DaemonConnection, job_id: str, values: Values, notebook: Notebook | None = None) -> int:
    """Wait until the job runs, serve as its foreground client, and return its exit code."""
    is_new = "attach" not in values
    before = {number: signal.signal(number, _leave) for number in LEAVING}
    try:
        place = _reach_run(client, job_id, values)
    except Interrupted as leave:
        if is_new and not (values.get("keep") and leave.number == signal.SIGHUP):
            _give_up(client, job_id, values)
        return 128 + leave.number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if place is None:
        return _judge(client, job_id)
    from gpusched.cli.relay import AttachClient, size  # not needed by a job that never starts
    from gpusched.cli.run_connection import RunConnection

    sock, way, where = place
    try:
        watch = None if notebook is None else notebook.watch(where.get("node"))
        connection = RunConnection(way, size=size(), sock=sock)
        end = AttachClient(connection, where["keep"], watch=watch).run()
    except Refused as refused:
        raise Refused(f"job {where['id']}: {refused.message}", refused.hint) from None
    return _conclude(client, where, end, connection.error)


def _give_up(client: DaemonConnection, job_id: str, values: Values) -> None:
    try:
        client.call("POST", "/v1/jobs/cancel", {"ids": [job_id]}, timeout_s=ANSWER_S)
    except (GpuschedError, OSError):
        if values.get("keep"):
            output.tell(
                "grun", f"the scheduler does not answer; job {job_id} stays pending; cancel it with: gcancel {job_id}"
            )
        else:
            output.tell("grun", f"the scheduler does not answer; job {job_id} will be cancelled when it does")
        return
    output.tell("grun", f"job {job_id} was cancelled before it started")


def _leave(number: int, where: FrameType | None) -> None:
    for repeated in LEAVING:
        # It would interrupt the cancel.
        signal.signal(repeated, signal.SIG_IGN)
    raise Interrupted(number)


def _reach_run(
    client: DaemonConnection, job_id: str, values: Values
) -> tuple[_socket.socket | None, Way, dict[str, Any]] | None:
    """The way to the job's run, a connection to it on this node, and its `attach` document; None if the job ended
    without a run.
    """
    from gpusched.cli.run_connection import Way, way_of

    line = PendingLine(values)
    give_up_at = None
    try:
        while True:
            where = call_patiently(client, f"/v1/jobs/{job_id}/attach")["attach"]
            if not where["is_interactive"]:
                shown = where["id"]
                raise Refused(
                    f"job {shown} runs in the background; there is nothing to attach to",
                    f"follow its output with: glogs -f {shown}   or start a shell in it: grun --job {shown}",
                )
            if where["state"] in FINAL:
                return None
            if where["run"] is None:
                _await_start(client, where, line)
                continue
            if where["path"] is None:
                return None, way_of({**where, "job": where["id"], "token": ""}, client.socket_path), where
            if (sock := connect_to_run(where["path"])) is not None:
                return sock, Way(where["path"]), where
            give_up_at = give_up_at or time.monotonic() + REACH_S
            if time.monotonic() > give_up_at:
                raise NotReady(
                    f"job {where['id']} is running, but {where['path']} does not answer",
                    f"end it with: gcancel {job_id}",
                )
    finally:
        line.close()


def _await_start(client: DaemonConnection, where: dict[str, Any], line: PendingLine) -> None:
    path = f"/v1/wait?ids={where['id']}&state_not={where['state']}&timeout_s="
    answer = call_patiently(client, f"{path}{LOOK_S if line.was_shown else SOON_S}")
    job = answer["jobs"][0]
    if job["state"] == where["state"] and line.is_wanted:
        query = f"/v1/jobs?ids={where['id']}&fields=reason,reason_text"
        reason, text = call_patiently(client, query)["rows"][0]
        line.show(f"job {where['id']} is pending: ({reason}) {printable(text or '')}")


def connect_to_run(path: str) -> _socket.socket | None:
    """A connection to a run that may not have opened its socket yet; None after some tries."""
    pause_s = 0.002
    while pause_s < 0.5:
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            reach(sock, path)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            time.sleep(pause_s)
            pause_s *= 2
            continue
        sock.setblocking(False)
        return sock
    return None


class PendingLine:
    """One line on a terminal with the reason that the job is pending."""

    def __init__(self, values: Values) -> None:
        self.is_wanted = sys.stderr.isatty() and not values.get("quiet")
        self.was_shown = False

    def show(self, text: str) -> None:
        """Replace the text of the line."""
        import shutil  # imports regular expressions; needed only at a terminal

        width = shutil.get_terminal_size().columns - 1
        line = f"grun: {text}"
        self._write("\r\x1b[K" + (line if len(line) <= width else line[: width - 3] + "..."))
        self.was_shown = True

    def close(self) -> None:
        """End the line, so that later output begins on a new one."""
        if self.was_shown:
            self._write("\r\n")

    @staticmethod
    def _write(text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            # The terminal is closed; a signal reports that as well.
            pass


# --- the end --------------------------------------------------------------------------------------------


def _conclude(client: DaemonConnection, where: dict[str, Any], end: RunEnding, error: GpuschedError | None) -> int:
    """Report how the run ended; returns the exit code. Args: error: why the connection did."""
    job_id = where["id"]
    if end.left_by is not None:
        if end.left_by != signal.SIGPIPE:
            what = f"keeps running; come back with: grun --attach {job_id}" if where["keep"] else "is being terminated"
            output.tell("grun", f"detached from job {job_id}, which {what}")
        return 128 + end.left_by if end.left_by else 0
    if end.gave_up:
        fate = "keeps running" if where["keep"] else "ends soon without its client"
        raise NotReady(
            f"the connection to {where['node']} did not come back; job {job_id} {fate}",
            f"come back with: grun --attach {job_id}",
        )
    if error is not None and not end.was_lost:
        raise Refused(f"job {job_id}: {error.message}", f"read the rest of its output with: glogs {job_id}")
    if end.was_lost:
        output.tell("grun", f"job {job_id} ended meanwhile; the rest of its output: glogs {job_id}")
    if not end.is_known:
        # The supervisor died without a report: the daemon determines how the run ended.
        return _judge(client, job_id)
    if end.sentence:
        raise Refused(end.sentence, f"see: gshow {job_id}")
    if end.stopped_by is not None:
        output.tell("grun", f"job {job_id} was terminated: {_why(client, job_id, end.stopped_by)}")
    if end.signal is not None:
        return 128 + end.signal
    return end.code or (1 if end.stopped_by is not None else 0)


def _why(client: DaemonConnection, job_id: str, stopped_by: str) -> str:
    """The cause of the end, which the daemon records before it terminates the run."""
    text = None
    if stopped_by in ("cancel", "preempt", "requeue"):
        path = f"/v1/jobs?ids={job_id}&fields=reason_text"
        try:
            ((text,),) = client.call("GET", path, timeout_s=ANSWER_S)["rows"]
        except (GpuschedError, OSError, ValueError):
            # The daemon is unreachable; the kind of end is known anyway.
            pass
    return printable(text) if text else _BECAUSE.get(stopped_by, stopped_by)


def _judge(client: DaemonConnection, job_id: str) -> int:
    try:
        job = wait_until_done(client, [job_id], None)["jobs"][0]
    except KeyboardInterrupt:
        return 130
    if job["state"] != "COMPLETED":
        output.tell("grun", ending(job))
    return output.exit_code_of(job)


def _note(values: Values, text: str) -> None:
    if not values.get("quiet"):
        output.note("grun", text)


ALLOWED = (OWN_OF_GRUN - {"keep", "lease_s"}) | {"work_dir", "extra_env"}


def run_tasks(job_id: str, values: Values, argv: list[str]) -> int:
    """Run the command here, once or as several parallel tasks.

    Returns the highest exit code. Raises: UsageError, Refused.
    """
    if not values.keys().isdisjoint({"keep", "lease_s"}):
        raise UsageError(
            f"inside job {job_id}, --keep and --lease do not apply: its tasks end with it",
            "leave them out, or give them when you start the job",
        )
    if not values.keys() <= ALLOWED:
        raise UsageError(
            f"inside job {job_id}, tasks share its resources and cannot request more",
            "leave out the resource options, or submit another job with: gsub",
        )
    env = {**os.environ, **values.get("extra_env", {})}
    try:
        os.chdir(values.get("work_dir", "."))
    except OSError as error:
        raise Refused(
            f"cannot enter {printable(values['work_dir'])}: {error.strerror}", "choose another directory with -D"
        ) from None
    # Python ignores it, which a command must not inherit.
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
        raise Refused(f"cannot run {printable(argv[0])}: {why}", "look for it with: command -v") from None


def _together(count: int, argv: list[str], env: dict[str, str]) -> int:
    """Run several copies in parallel; only the first reads standard input. Signals to this process go to all."""
    from gpusched.cli.tasks import run_together, task_variables  # only inside jobs

    null = os.open(os.devnull, os.O_RDONLY)

    def start(tasks: Tasks, task: int) -> None:
        streams = (null if task else 0, 1, 2)
        tasks.start(task, argv, {**env, **task_variables(task, count)}, streams)

    try:
        return run_together(count, start)
    finally:
        os.close(null)
