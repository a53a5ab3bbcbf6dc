"""A step of a job: srun's tasks, as children of srun, recorded with the daemon."""

from __future__ import annotations

import os
import signal
import sys
import time

from gpusched.cli.slurm.step_client import PatientClient
from gpusched.cli.slurm.step_options import Options, with_tres
from gpusched.cli.slurm.step_tasks import bind_gpus, cores_in, exported
from gpusched.cli.slurm.streams import Pump, Streams
from gpusched.cli.slurm_options import ONLY_SLURM
from gpusched.cli.tasks import Tasks, task_variables
from gpusched.errors import DaemonUnreachable, NotFound, NotReady, UserError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpusched.cli.slurm.command import Command, CommandError, Parsed

BEGIN_PATIENCE_S = 3600.0
"""How long a step waits for a daemon that does not answer; asked again, the daemon knows the process."""
END_PATIENCE_S = 300.0
STALE_PATIENCE_S = 5.0
_BUSY_S = (0.1, 2.0)
"""First and longest interval between attempts to get resources that are in use."""
KILL_WAIT_S = 30.0
"""Between TERM and KILL."""
INTERRUPT_S = 1.0
"""A second Ctrl-C within this time is passed on."""
LINGER_S = 2.0
"""How long output may stay open after the last task."""
NAME_LENGTH, COMMAND_LENGTH = 256, 1024


_REFUSALS = {
    "cpus": "More processors requested than permitted",
    "gpus": "Invalid generic resource (gres) specification",
    "nodes": "Requested node configuration is not available",
    "not_running": "Job/step already completing or completed",
}
"""Slurm's sentence by what a refusal is about, see `errors.ABOUT`."""
_WAITS = {"busy": "Requested nodes are busy", "starting": "Job is not running on all of its nodes yet"}
"""Why a step waits, by the daemon's word."""


def run_step(command: Command, typed: Parsed, wanted: str) -> int:
    """Run a step of the job that this process belongs to; returns its exit code. Raises: CommandError."""
    scheduler = PatientClient()
    wanted = printable(wanted)
    patience_s = BEGIN_PATIENCE_S if "GPUSCHED_RUN" in os.environ else STALE_PATIENCE_S
    job = scheduler.ask("GET", "/v1/inside", None, patience_s)["inside"]
    if job is None or (typed.has("jobid") and typed.get("jobid") not in (job["id"], str(job["job_id"]))):
        from gpusched.cli.slurm.srun_enter import run_in  # most steps are of the job that they are in

        return run_in(command, typed, wanted, scheduler, is_in_another=job is not None)
    for name, _ in typed.options:
        if (only := ONLY_SLURM.get(name)) is not None and only.is_refused:
            raise command.error(only.sentence, 255)
    if typed.has("gpus-per-socket"):
        raise command.error("--gpus-per-socket is not supported for a step; use --gpus", 255)
    if typed.has("tres-per-task"):
        typed = with_tres(command, typed)
    if typed.has("test-only"):
        command.note(f"a step of job {job['id']} would start immediately")
        return 0
    return Step(command, typed, job, scheduler).run()


class Step:
    """One step, from its options to its exit code."""

    def __init__(self, command: Command, typed: Parsed, job: dict[str, Any], scheduler: PatientClient) -> None:
        self.command = command
        self.typed = typed
        self.job = job
        self.scheduler = scheduler
        self.options = Options(command, typed, job)
        self.argv = typed.operands
        self.number = 0
        self.grant: dict[str, Any] = {}
        self.pump = Pump()
        self.ends: list[tuple[int, int]] = []
        """Tasks with their exit code or, negative, signal."""
        self.kill_at: float | None = None
        self.limit_at: float | None = None
        self.wait_at: float | None = None
        self.is_terminated = False
        """This process has ended the step before its time."""
        self.is_timeout = False
        self.interrupted_at = float("-inf")

    @property
    def name(self) -> str:
        """`42.0`."""
        return f"{self.job['job_id']}.{self.number}"

    @property
    def node(self) -> str:
        return str(self.job["node"])

    def say(self, text: str, who: str = "srun") -> None:
        sys.stderr.write(f"{who}: {text}\n")

    def inform(self, text: str) -> None:
        if not self.typed.has("quiet"):
            self.say(text)

    def run(self) -> int:
        """Get the resources, start the tasks, wait for them, and report."""
        folder = self.options.text("chdir")
        if folder is not None:
            try:
                os.chdir(folder)
            except OSError as error:
                # As in Slurm, which then uses another one.
                self.say(f"error: couldn't chdir to `{printable(folder)}': {error.strerror}: going to /tmp instead")
                os.chdir("/tmp")
        answer = self.begin()
        self.grant = answer
        self.number = answer["step"]
        sys.stdout.flush()
        sys.stderr.flush()
        tasks = Tasks(own_groups=not self.typed.has("pty"))
        try:
            try:
                self.start(tasks)
                self.follow(tasks)
            finally:
                if tasks.running:
                    tasks.signal(signal.SIGKILL)
                    while tasks.running:
                        tasks.wait(None)
                        self.ends += tasks.take_ended()
        finally:
            tasks.close()
            self.pump.finish(LINGER_S)
            sys.stderr.flush()
            self.end(tasks)
        return self.exit_code()

    # --- the daemon ----------------------------------------------------------------------------------

    def begin(self) -> dict[str, Any]:
        """Record the step, waiting for what it asks for. Raises: CommandError."""
        options = self.options
        gpus = options.gpus
        if options.gpus_per_task is not None:
            gpus = max(gpus or 0, options.gpus_per_task * options.tasks)
        is_nested = "SLURM_STEP_ID" in os.environ and not any(
            map(self.typed.has, ("gpus", "gpus-per-task", "gpus-per-node", "gres"))
        )
        text = " ".join(self.argv)
        request = {
            "name": (self.typed.get("job-name") or self.argv[0].rpartition("/")[2] or "srun")[:NAME_LENGTH],
            "command": printable(text, COMMAND_LENGTH)[:COMMAND_LENGTH],
            "tasks": options.tasks,
            "cpus_per_task": options.cpus_per_task or 1,
            "gpus": gpus,
            "is_exact": options.is_exact,
            "overlaps": options.has("overlap") or is_nested,
            "overcommits": options.has("overcommit"),
            "time_limit_s": options.time_limit_s,
            # Tasks are children of this process.
            "nodes_min": 1,
            "nodelist": [self.node],
        }
        request["name"] = printable(str(request["name"]), NAME_LENGTH)[:NAME_LENGTH]
        pause_s, is_told = _BUSY_S[0], False
        while True:
            try:
                answer = self.scheduler.ask("POST", "/v1/steps", request, BEGIN_PATIENCE_S)
            except UserError as error:
                raise self._refused(error) from None
            if answer["step"] is not None:
                break
            if self.typed.has("immediate"):
                raise self.command.error(f"Unable to create step for job {self.job['id']}: {_WAITS[answer['why']]}")
            if not is_told:
                is_told = True
                why = _WAITS[answer["why"]]
                self.inform(f"Job {self.job['id']} step creation temporarily disabled, retrying ({why})")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _BUSY_S[1])
        if is_told:
            self.inform(f"Step created for StepId={self.job['job_id']}.{answer['step']['step']}")
        found: dict[str, Any] = answer["step"]
        (here,) = found["nodes"]
        return {**found, "gpus": here["gpus"]}

    def _refused(self, error: UserError) -> CommandError:
        job_id = self.job["id"]
        if isinstance(error, NotFound):
            return self.command.error(f"Unable to confirm allocation for job {job_id}: Invalid job id specified")
        why = _REFUSALS.get(error.about) or printable(error.message, 2000)
        found = self.command.error(f"Unable to create step for job {job_id}: {why}")
        found.text += f"\nsrun: {printable(error.message, 2000)}" + (
            f"\nsrun: hint: {error.hint}" if error.hint else ""
        )
        return found

    def end(self, tasks: Tasks) -> None:
        """Report how the step has ended and what it has used; a job that is being ended cannot always."""
        codes = [code for _, code in self.ends]
        worst = max(codes, key=lambda code: code if code >= 0 else 128 - code, default=1)
        how = {"exit_code": worst} if worst >= 0 else {"signal": -worst}
        body: dict[str, Any] = {"step": self.number, **how, "is_timeout": self.is_timeout}
        if peaks := tasks.peaks_kib:
            body.update(
                user_cpu_s=tasks.user_cpu_s,
                system_cpu_s=tasks.system_cpu_s,
                peak_mem_mib=max(peaks) / 1024,
                mean_mem_mib=sum(peaks) / len(peaks) / 1024,
            )
        try:
            self.scheduler.ask("POST", "/v1/steps/end", body, END_PATIENCE_S)
        except (UserError, NotReady, DaemonUnreachable) as error:
            self.say(f"error: the end of step {self.name} could not be recorded: {printable(error.message)}")

    # --- the tasks -----------------------------------------------------------------------------------

    def start(self, tasks: Tasks) -> None:
        """Start every task; one that cannot be is reported, and ends with the number of the error."""
        options = self.options
        base = self.environment()
        count = options.tasks
        gpus = self.gpus_of_tasks()
        cores = self.cores_of_tasks()
        streams = Streams(self)
        for task in range(count):
            env = {**base, **task_variables(task, count)}
            if gpus is not None:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[task])
            try:
                tasks.start(task, self.argv, env, streams.of(task), cores[task] if cores else ())
            except OSError as error:
                words = f"error: execve(): {printable(self.argv[0])}: {error.strerror}"
                self.say(words, "slurmstepd")
                self.ends.append((task, error.errno or 1))
            except ValueError:
                self.ends.append((task, 22))
        streams.close()
        self.pump.start()
        if options.time_limit_s is not None:
            self.limit_at = time.monotonic() + options.time_limit_s
        if self.ends:
            self.report(self.ends)

    def environment(self) -> dict[str, str]:
        """Variables of all tasks."""
        options, job, grant = self.options, self.job, self.grant
        env = exported(options.text("export"))
        facts = {
            "SLURM_JOB_ID": job["job_id"],
            "SLURM_JOBID": job["job_id"],
            "SLURM_JOB_NAME": job["name"],
            "SLURM_JOB_NODELIST": job["node"],
            "SLURM_NODELIST": job["node"],
            "SLURM_JOB_NUM_NODES": 1,
            "SLURM_NNODES": 1,
            "SLURM_JOB_PARTITION": job["queue"],
            "SLURM_JOB_USER": job["user"],
            "SLURM_JOB_UID": job["uid"],
            "SLURM_JOB_ACCOUNT": job["account"],
            "SLURMD_NODENAME": job["node"],
            "SLURM_CPUS_ON_NODE": job["cpus"],
            "SLURM_JOB_CPUS_PER_NODE": job["cpus"],
            "SLURM_SUBMIT_DIR": os.getcwd(),
        }
        for name, value in facts.items():
            # A client may have deleted all but the id.
            env.setdefault(name, str(value))
        count = options.tasks
        env.update(
            {
                "SLURM_STEP_ID": str(self.number),
                "SLURM_STEPID": str(self.number),
                "SLURM_STEP_NODELIST": self.node,
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_NUM_TASKS": str(count),
                "SLURM_STEP_TASKS_PER_NODE": str(count),
                "SLURM_TASKS_PER_NODE": str(count),
                "SLURM_NPROCS": str(count),
                "SLURM_NODEID": "0",
                "SLURM_GTIDS": ",".join(map(str, range(count))),
                "SLURM_DISTRIBUTION": "cyclic",
                "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
                "SLURM_SRUN_COMM_HOST": "127.0.0.1",
                "SLURM_PRIO_PROCESS": "0",
                "SLURM_UMASK": f"{_umask():04o}",
            }
        )
        per_node = options.per_node or env.get("SLURM_NTASKS_PER_NODE")
        if per_node or count > 1:
            env["SLURM_NTASKS_PER_NODE"] = str(per_node or count)
        if options.cpus_per_task:
            env["SLURM_CPUS_PER_TASK"] = str(options.cpus_per_task)
        if options.gpus_per_task is not None:
            env["SLURM_GPUS_PER_TASK"] = str(options.gpus_per_task)
        if grant["gpus"]:
            env["SLURM_STEP_GPUS"] = ",".join(str(gpu["index"]) for gpu in grant["gpus"])
            env["SLURM_GPUS_ON_NODE"] = str(len(grant["gpus"]))
        return env

    def gpus_of_tasks(self) -> list[list[str]] | None:
        """What each task sees of GPUs; None leaves CUDA_VISIBLE_DEVICES as it is. Raises: CommandError."""
        options = self.options
        words = [str(gpu["visible"]) for gpu in self.grant["gpus"]]
        kind, _, rest = (options.text("gpu-bind") or "").removeprefix("verbose,").removeprefix("v,").partition(":")
        count = options.tasks
        if not words or (not self.grant["has_own_gpus"] and kind in ("", "none", "closest")):
            return [[] for _ in range(count)] if self.grant["has_own_gpus"] else None
        if kind in ("map_gpu", "single", "per_task", "mask_gpu"):
            return bind_gpus(self.command, kind, rest, words, count)
        if kind not in ("", "none", "closest"):
            raise self.command.error("Invalid --gpu-bind specification", 255)
        if options.gpus_per_task and kind != "none":
            return bind_gpus(self.command, "per_task", str(options.gpus_per_task), words, count)
        return [words] * count

    def cores_of_tasks(self) -> list[list[int]] | None:
        """Processors of each task; None leaves them alone. Raises: CommandError."""
        words = [word for word in (self.options.text("cpu-bind") or "").lower().split(",") if word]
        while words and words[0] in ("q", "quiet", "v", "verbose"):
            words.pop(0)
        if not words or words[0] in ("none", "no", "y", "yes", "n"):
            return None
        kind, _, first = words[0].partition(":")
        if kind not in ("rank", "cores", "threads", "sockets", "ldoms", "map_cpu", "mask_cpu", "rank_ldom"):
            raise self.command.error("Invalid --cpu-bind argument: " + printable(",".join(words)), 255)
        free = sorted(os.sched_getaffinity(0))
        count, width = self.options.tasks, self.options.cpus_per_task or 1
        if kind in ("map_cpu", "mask_cpu"):
            try:
                sets = [cores_in(kind, word) & set(free) for word in [first, *words[1:]]]
            except ValueError:
                raise self.command.error("Invalid --cpu-bind argument: " + printable(",".join(words)), 255) from None
            return [sorted(sets[task % len(sets)]) for task in range(count)]
        if kind in ("sockets", "ldoms", "rank_ldom") or count * width > len(free):
            return None
        return [free[task * width : (task + 1) * width] for task in range(count)]

    def follow(self, tasks: Tasks) -> None:
        """Wait for the tasks; pass signals on, and end the step when it is time."""
        while tasks.running:
            due = [at for at in (self.kill_at, self.limit_at, self.wait_at) if at is not None]
            info = tasks.wait(min(due) - time.monotonic() if due else None)
            if info is not None and info.si_signo != signal.SIGCHLD:
                if info.si_pid == self.job["supervisor_pid"]:
                    # It signals all processes of the job itself.
                    self.note_stop(info.si_signo)
                elif not (self.typed.has("pty") and info.si_code > 0):
                    # What a terminal sends its foreground, tasks at it have got as well.
                    self.pass_on(tasks, info.si_signo)
            ended = tasks.take_ended()
            if ended:
                self.ends += ended
                self.report(ended)
                self.after_end(tasks, ended)
            self.act(tasks, time.monotonic())

    def note_stop(self, number: int) -> None:
        """Say that the job is being ended."""
        if number == signal.SIGTERM and not self.is_terminated:
            self.is_terminated = True
            self.inform("Job step aborted: Waiting up to 32 seconds for job step to finish.")
            self.say(f"error: *** STEP {self.name} ON {self.node} CANCELLED AT {_now()} ***", "slurmstepd")

    def pass_on(self, tasks: Tasks, number: int) -> None:
        """Pass a signal on to the tasks. A single Ctrl-C at a terminal only asks for a second one."""
        if number != signal.SIGINT or not os.isatty(0) or self.typed.has("pty"):
            tasks.signal(number)
            return
        now = time.monotonic()
        if (
            self.typed.has("quit-on-interrupt")
            or self.typed.has("disable-status")
            or now - self.interrupted_at < INTERRUPT_S
        ):
            self.inform(f"sending Ctrl-C to StepId={self.name}")
            tasks.signal(signal.SIGINT)
            if self.kill_at is None:
                self.inform("Job step aborted: Waiting up to 32 seconds for job step to finish.")
                self.kill_at = now + KILL_WAIT_S
        else:
            self.inform("interrupt (one more within 1 sec to abort)")
            self.inform(f"StepId={self.name} {_tasks(tasks.running)}: running")
        self.interrupted_at = now

    def after_end(self, tasks: Tasks, ended: Sequence[tuple[int, int]]) -> None:
        if not tasks.running:
            return
        if self.options.kills_on_bad_exit and any(code for _, code in ended):
            self.terminate(tasks)
        elif self.options.wait_s and self.wait_at is None:
            self.wait_at = time.monotonic() + self.options.wait_s

    def act(self, tasks: Tasks, now: float) -> None:
        """Do what is due."""
        if not tasks.running:
            return
        if self.limit_at is not None and now >= self.limit_at:
            self.limit_at = None
            self.is_timeout = True
            self.terminate(tasks, " DUE TO TIME LIMIT")
        if self.wait_at is not None and now >= self.wait_at:
            self.wait_at = None
            self.inform(f"First task exited {self.options.wait_s}s ago")
            self.inform(f"StepId={self.name} {_tasks(tasks.running)}: running")
            self.inform(f"StepId={self.name} {_tasks([task for task, _ in self.ends])}: exited")
            self.terminate(tasks)
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = now + 1.0
            tasks.signal(signal.SIGKILL)

    def terminate(self, tasks: Tasks, why: str = "") -> None:
        """End the tasks: TERM, and KILL after a while."""
        if self.is_terminated:
            return
        self.is_terminated = True
        if why:
            self.inform("Job step aborted: Waiting up to 32 seconds for job step to finish.")
        else:
            self.inform(f"launch/slurm: _step_signal: Terminating StepId={self.name}")
        self.say(f"error: *** STEP {self.name} ON {self.node} CANCELLED AT {_now()}{why} ***", "slurmstepd")
        tasks.signal(signal.SIGTERM)
        tasks.signal(signal.SIGCONT)
        self.kill_at = time.monotonic() + KILL_WAIT_S

    # --- the end -------------------------------------------------------------------------------------

    def report(self, ended: Sequence[tuple[int, int]]) -> None:
        """Say which tasks failed, those that ended in the same way together."""
        groups: dict[int, list[int]] = {}
        for task, code in ended:
            if code:
                groups.setdefault(code, []).append(task)
        for code, failed in groups.items():
            how = f"Exited with exit code {code}" if code > 0 else (signal.strsignal(-code) or f"Signal {-code}")
            self.say(f"error: {self.node}: {_tasks(failed)}: {how}")

    def exit_code(self) -> int:
        """The highest of the tasks."""
        codes = [code for _, code in self.ends]
        if self.is_terminated or -signal.SIGKILL in codes:
            self.inform(f"Force Terminated StepId={self.name}")
        return max((code if code >= 0 else 128 - code for code in codes), default=1)


def _tasks(numbers: Sequence[int]) -> str:
    """`task 0`, `tasks 0-2,5`."""
    ordered = sorted(numbers)
    ranges: list[list[int]] = []
    for number in ordered:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    return f"task{'s' if len(ordered) > 1 else ''} {text}"


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")
