"""A step of a job: tasks that srun starts, recorded with the daemon. Those on srun's own node are its children."""

from __future__ import annotations

import os
import sys
import time

from gpusched.addons.slurm.step_client import BEGIN_PATIENCE_S, PatientClient, StepUsage, begin_step, end_step
from gpusched.addons.slurm.step_options import Options, with_tres
from gpusched.addons.slurm.step_tasks import NodeShare, bind_cores, bind_gpus, exported
from gpusched.addons.slurm.streams import Pump, Streams
from gpusched.cli.environment import umask
from gpusched.cli.slurm_options import ONLY_SLURM
from gpusched.cli.tasks import Tasks, task_variables
from gpusched.model.units import folded_counts, printable, ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
    from typing import Any

    from gpusched.addons.slurm.command import Command, Parsed
    from gpusched.addons.slurm.multi_prog import Programs
    from gpusched.addons.slurm.part_client import Parts
    from gpusched.cli.tasks import SignalInfo
else:
    # The other module makes enumerations of its numbers, for which it takes longer than all the rest.
    import _signal as signal

STALE_PATIENCE_S = 5.0
"""How long a step waits for a daemon that does not answer where only SLURM_JOB_ID speaks for a job, maybe over."""
KILL_WAIT_S = 30.0
"""Between TERM and KILL."""
INTERRUPT_S = 1.0
"""A second Ctrl-C within this time is passed on."""
SI_QUEUE = -1
"""Code of a signal that the supervisor passes on for a client, see sigaction(2)."""
LINGER_S = 2.0
"""How long output may stay open after the last task."""
NO_PMI = (
    "there is no PMI here, so MPI takes each task to be alone; start MPI programs in the job with mpirun, "
    "which uses srun to reach its nodes, and torch with srun or torchrun"
)


def run_step(command: Command, typed: Parsed, wanted: str) -> int:
    """Run a step of the job that this process belongs to; returns its exit code. Raises: CommandError."""
    scheduler = PatientClient()
    wanted = printable(wanted)
    patience_s = BEGIN_PATIENCE_S if "GPUSCHED_RUN" in os.environ else STALE_PATIENCE_S
    job = scheduler.ask("GET", "/v1/inside", None, patience_s)["inside"]
    if job is None or (typed.has("jobid") and typed.get("jobid") not in (job["id"], str(job["job_id"]))):
        from gpusched.addons.slurm.srun_enter import run_in  # most steps are of the job that they are in

        return run_in(command, typed, wanted, scheduler, is_in_another=job is not None)
    for name, _ in typed.options:
        if (only := ONLY_SLURM.get(name)) is not None and only.is_refused:
            raise command.error(only.note, 255)
    if typed.has("gpus-per-socket"):
        raise command.error("--gpus-per-socket is not supported for a step; use --gpus", 255)
    if typed.has("tres-per-task"):
        typed = with_tres(command, typed)
    if (kind := typed.get("mpi") or os.environ.get("SLURM_MPI_TYPE", "none")) != "none" and not typed.has("quiet"):
        command.note(f"--mpi={printable(kind)} has no effect: {NO_PMI}")
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
        self.has_pty = typed.has("pty") and os.isatty(0)
        if typed.has("pty") and not self.has_pty:
            self.say("error: Not using a pseudo-terminal, disregarding --pty option")
        self.programs = self._read_programs()
        self.argv = typed.operands
        self.number = 0
        self.count = 0
        """Tasks on all nodes."""
        self.has_own_gpus = False
        self.shares: list[NodeShare] = []
        self.doors: dict[str, Any] = {}
        """To the job on the other nodes of the step, by their names."""
        self.tasks: Tasks
        """Those on this node, from `run` on."""
        self.parts: Parts | None = None
        """Those on other nodes."""
        self.pump = Pump()
        self.ends: list[tuple[int, int]] = []
        """Tasks with their exit code or, negative, signal."""
        self.kill_at: float | None = None
        self.limit_at: float | None = None
        self.wait_at: float | None = None
        self.is_terminated = False
        """This process has ended the step before its time."""
        self.is_timeout = False
        self.is_cut_short = False
        """Output of its tasks may be missing, although they have ended."""
        self.interrupted_at = float("-inf")
        self.early: set[int] = set()
        """Signals that came before all tasks had been started."""

    def _read_programs(self) -> Programs | None:
        if not self.typed.has("multi-prog"):
            return None
        from gpusched.addons.slurm.multi_prog import Programs  # few steps have several

        return Programs(self.command, self.typed.operands[0])

    @property
    def name(self) -> str:
        """`42.0`."""
        return f"{self.job['job_id']}.{self.number}"

    @property
    def node(self) -> str:
        return str(self.job["node"])

    @property
    def running(self) -> list[int]:
        """Tasks that have not ended, on all nodes."""
        return self.tasks.running if self.parts is None else sorted([*self.tasks.running, *self.parts.running])

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
        self.begin()
        sys.stdout.flush()
        sys.stderr.flush()
        tasks, usage = Tasks(own_groups=not self.has_pty), StepUsage()
        self.tasks = tasks
        try:
            try:
                if self.start():
                    self.follow()
            finally:
                if self.parts is not None and self.parts.running:
                    self.parts.leave()
                if tasks.running:
                    tasks.signal(signal.SIGKILL)
                    while tasks.running:
                        tasks.wait(None)
                        self.ends += tasks.take_ended()
        finally:
            tasks.close()
            self.pump.finish(LINGER_S)
            sys.stderr.flush()
            usage.add(tasks.user_cpu_s, tasks.system_cpu_s, tasks.peaks_kib)
            if self.parts is not None:
                self.parts.restore_terminal()
                self.parts.report_rest(self)
                usage.add(self.parts.user_cpu_s, self.parts.system_cpu_s, self.parts.peaks_kib)
            self.end(usage)
        return self.exit_code()

    # --- the daemon ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Record the step. Raises: CommandError."""
        found = begin_step(self.command, self.typed, self.options, self.job, self.scheduler)
        self.number, self.has_own_gpus = found["step"], found["has_own_gpus"]
        self.shares = [NodeShare(one) for one in found["nodes"]]
        self.doors = {door["node"]: door for door in found["doors"]}
        self.count = sum(len(share.tasks) for share in self.shares)
        asked = self.options.tasks
        nodes = self.options.text("nodes")
        if asked is not None and nodes is not None and nodes.isdigit() and asked == len(self.shares) < int(nodes):
            self.inform(f"Warning: can't run {asked} processes on {nodes} nodes, setting nnodes to {len(self.shares)}")

    def end(self, usage: StepUsage) -> None:
        """Report how the step has ended and what it has used."""
        codes = self.codes()
        is_node_lost = self.parts is not None and self.parts.are_lost
        why = end_step(self.scheduler, self.number, codes, usage, is_timeout=self.is_timeout, is_node_lost=is_node_lost)
        if why is not None:
            self.say(f"error: the end of step {self.name} could not be recorded: {why}")

    # --- the tasks -----------------------------------------------------------------------------------

    def start(self) -> bool:
        """Start every task; one that cannot be is reported, and ends with the number of the error.

        Returns: False if a node cannot be reached: none was started then.
        """
        programs = None if self.programs is None else self.programs.of(self.count)
        here = next((share for share in self.shares if share.node == self.node), None)
        if here is None or len(self.shares) > 1:
            from gpusched.addons.slurm.step_start import start_everywhere  # most steps are on one node

            is_started = start_everywhere(self, here, programs)
        else:
            self._start_here(here, programs)
            is_started = True
        self.early = signal.sigpending()
        if self.options.time_limit_s is not None:
            self.limit_at = time.monotonic() + self.options.time_limit_s
        return is_started

    def _start_here(self, share: NodeShare, programs: list[list[str]] | None) -> None:
        base = {**self.environment(), **self.variables_on(share)}
        gpus, cores = self.gpus_of_tasks(share), self.cores_of_tasks(share)
        streams = Streams(self)
        failed: list[tuple[int, int]] = []
        for local, task in enumerate(share.tasks):
            env = {**base, **task_variables(task, self.count, local)}
            if gpus is not None:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[local])
            argv = self.argv if programs is None else programs[task]
            try:
                self.tasks.start(task, argv, env, streams.of(task, share), cores[local] if cores else ())
            except (OSError, ValueError) as error:
                failed.append((task, self.explain(argv, error)))
        streams.close()
        self.pump.start()
        self.take_ended(share.node, failed)

    def explain(self, argv: Sequence[str], error: OSError | ValueError) -> int:
        """Say why a task did not start; returns the exit code that it has, as in Slurm."""
        if not isinstance(error, OSError):
            return 22
        self.say(f"error: execve(): {printable(argv[0])}: {error.strerror}", "slurmstepd")
        return error.errno or 1

    def environment(self) -> dict[str, str]:
        """Variables of all tasks on all nodes."""
        options, job, shares = self.options, self.job, self.shares
        env = exported(options.text("export"))
        facts = {
            "SLURM_JOB_ID": job["job_id"],
            "SLURM_JOBID": job["job_id"],
            "SLURM_JOB_NAME": job["name"],
            "SLURM_JOB_NODELIST": job["node"] if len(job["nodes"]) == 1 else _folded_names(job["nodes"]),
            "SLURM_JOB_NUM_NODES": len(job["nodes"]),
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
        env.setdefault("SLURM_NODELIST", env["SLURM_JOB_NODELIST"])
        counts = [len(share.tasks) for share in shares]
        per_node = folded_counts(counts)
        address = self._address()
        env.update(
            {
                "SLURM_STEP_ID": str(self.number),
                "SLURM_STEPID": str(self.number),
                "SLURM_STEP_NODELIST": self.node_list(),
                "SLURM_STEP_NUM_NODES": str(len(shares)),
                "SLURM_STEP_NUM_TASKS": str(self.count),
                "SLURM_STEP_TASKS_PER_NODE": per_node,
                "SLURM_TASKS_PER_NODE": per_node,
                "SLURM_NPROCS": str(self.count),
                "SLURM_DISTRIBUTION": self._distribution(),
                "SLURM_LAUNCH_NODE_IPADDR": address,
                "SLURM_SRUN_COMM_HOST": address,
                "SLURM_PRIO_PROCESS": "0",
                "SLURM_UMASK": f"{umask():04o}",
            }
        )
        if not self.typed.has("preserve-env"):
            env["SLURM_NNODES"] = str(len(shares))
        env.setdefault("SLURM_NNODES", str(len(shares)))
        stated = options.per_node or env.get("SLURM_NTASKS_PER_NODE")
        if stated or self.count > 1:
            env["SLURM_NTASKS_PER_NODE"] = str(stated or max(counts))
        if options.cpus_per_task:
            env["SLURM_CPUS_PER_TASK"] = str(options.cpus_per_task)
        if options.gpus_per_task is not None:
            env["SLURM_GPUS_PER_TASK"] = str(options.gpus_per_task)
        return env

    def node_list(self) -> str:
        """Nodes of the step, as Slurm writes them."""
        names = [share.node for share in self.shares]
        return names[0] if len(names) == 1 else _folded_names(names)

    def _address(self) -> str:
        """Of srun's node, as tasks on all nodes reach it."""
        here = [share.address for share in self.shares if share.node == self.node]
        if here and len(self.shares) == 1:
            return "127.0.0.1"
        return here[0] if here else self.node

    def _distribution(self) -> str:
        if (kind := self.options.text("distribution")) is None:
            return "cyclic" if self.count <= len(self.shares) else "block"
        return kind.partition("=")[0]

    def variables_on(self, share: NodeShare) -> dict[str, str]:
        """Variables of all tasks on one node."""
        env = {
            "SLURM_NODEID": str(share.nodeid),
            "SLURM_GTIDS": ",".join(map(str, share.tasks)),
            "SLURMD_NODENAME": share.node,
            "SLURM_TOPOLOGY_ADDR": share.node,
        }
        if share.gpus:
            env["SLURM_STEP_GPUS"] = ",".join(str(gpu["index"]) for gpu in share.gpus)
            env["SLURM_GPUS_ON_NODE"] = str(len(share.gpus))
        return env

    def gpus_of_tasks(self, share: NodeShare) -> list[list[str]] | None:
        """What each task of a node sees of GPUs; None leaves CUDA_VISIBLE_DEVICES as it is. Raises: CommandError."""
        options = self.options
        words = [str(gpu["visible"]) for gpu in share.gpus]
        kind, _, rest = (options.text("gpu-bind") or "").removeprefix("verbose,").removeprefix("v,").partition(":")
        count = len(share.tasks)
        if not words or (not self.has_own_gpus and kind in ("", "none", "closest")):
            return [[] for _ in range(count)] if self.has_own_gpus else None
        if kind in ("", "none", "closest"):
            if not options.gpus_per_task or kind == "none":
                return [words] * count
            kind, rest = "per_task", str(options.gpus_per_task)
        try:
            if kind in ("map_gpu", "single", "per_task", "mask_gpu"):
                return bind_gpus(kind, rest, words, count)
        except ValueError:
            pass
        raise self.command.error("Invalid --gpu-bind specification", 255)

    def cores_of_tasks(self, share: NodeShare) -> list[list[int]] | None:
        """Processors of each task on this node; None leaves them alone. Raises: CommandError."""
        text = self.options.text("cpu-bind")
        if text is None:
            return None
        width = self.options.cpus_per_task or 1
        try:
            return bind_cores(text, width, len(share.tasks), os.sched_getaffinity(0))
        except ValueError as error:
            raise self.command.error(f"Invalid --cpu-bind argument: {printable(str(error))}", 255) from None

    def follow(self) -> None:
        """Wait for the tasks; pass signals on, and end the step when it is time."""
        tasks = self.tasks
        if self.parts is not None:
            # What came together with the start, whose signal has been taken.
            self.parts.report(self)
        while self.running:
            due = [at for at in (self.kill_at, self.limit_at, self.wait_at) if at is not None]
            info = tasks.wait(min(due) - time.monotonic() if due else None)
            if info is not None and info.si_signo != signal.SIGCHLD:
                self.take_signal(info)
            self.take_ended(self.node, tasks.take_ended())
            if self.parts is not None:
                self.parts.report(self)
            self.act(time.monotonic())

    def take_ended(self, node: str, ended: Sequence[tuple[int, int]]) -> None:
        """Note and report tasks that have ended on a node."""
        if ended:
            self.ends += ended
            self.report(node, ended)
            self.after_end(ended)

    def take_signal(self, info: SignalInfo) -> None:
        """Pass a signal on, unless the tasks have got it as well."""
        is_of_supervisor = info.si_pid == self.job["supervisor_pid"]
        if is_of_supervisor:
            self.note_stop(info.si_signo)
        if is_of_supervisor and info.si_code != SI_QUEUE:
            # It signals all processes of the job itself: those that there were then.
            if info.si_signo in self.early:
                self.early.remove(info.si_signo)
                self.signal(info.si_signo)
        elif not (self.has_pty and info.si_code > 0):
            # What a terminal sends its foreground, tasks at it have got as well.
            self.pass_on(info.si_signo)

    def note_stop(self, number: int) -> None:
        """Say that the job is being ended."""
        if number == signal.SIGTERM and not self.is_terminated:
            self.is_terminated = True
            self.inform("Job step aborted: Waiting up to 32 seconds for job step to finish.")
            self.say(f"error: *** STEP {self.name} ON {self.shares[0].node} CANCELLED AT {_now()} ***", "slurmstepd")

    def signal(self, number: int) -> None:
        """Signal every task on every node."""
        self.tasks.signal(number)
        if self.parts is not None:
            self.parts.signal(number)

    def pass_on(self, number: int) -> None:
        """Pass a signal on to the tasks. A single Ctrl-C at a terminal only asks for a second one."""
        if number != signal.SIGINT or not os.isatty(0) or self.has_pty:
            self.signal(number)
            return
        now = time.monotonic()
        if (
            self.typed.has("quit-on-interrupt")
            or self.typed.has("disable-status")
            or now - self.interrupted_at < INTERRUPT_S
        ):
            self.inform(f"sending Ctrl-C to StepId={self.name}")
            self.signal(signal.SIGINT)
            if self.kill_at is None:
                self.inform("Job step aborted: Waiting up to 32 seconds for job step to finish.")
                self.kill_at = now + KILL_WAIT_S
        else:
            self.inform("interrupt (one more within 1 sec to abort)")
            self.inform(f"StepId={self.name} {_tasks(self.running)}: running")
        self.interrupted_at = now

    def after_end(self, ended: Sequence[tuple[int, int]]) -> None:
        if not self.running:
            return
        if self.options.kills_on_bad_exit and any(code for _, code in ended):
            self.terminate()
        elif self.options.wait_s and self.wait_at is None:
            self.wait_at = time.monotonic() + self.options.wait_s

    def act(self, now: float) -> None:
        """Do what is due."""
        if not self.running:
            return
        if self.limit_at is not None and now >= self.limit_at:
            self.limit_at = None
            self.is_timeout = True
            self.terminate(" DUE TO TIME LIMIT")
        if self.wait_at is not None and now >= self.wait_at:
            self.wait_at = None
            self.inform(f"First task exited {self.options.wait_s}s ago")
            self.inform(f"StepId={self.name} {_tasks(self.running)}: running")
            self.inform(f"StepId={self.name} {_tasks([task for task, _ in self.ends])}: exited")
            self.terminate()
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = now + 1.0
            self.signal(signal.SIGKILL)

    def terminate(self, why: str = "") -> None:
        """End the tasks: TERM, and KILL after a while."""
        if self.is_terminated:
            return
        self.is_terminated = True
        if why:
            self.inform("Job step aborted: Waiting up to 32 seconds for job step to finish.")
        else:
            self.inform(f"launch/slurm: _step_signal: Terminating StepId={self.name}")
        self.say(f"error: *** STEP {self.name} ON {self.shares[0].node} CANCELLED AT {_now()}{why} ***", "slurmstepd")
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        self.kill_at = time.monotonic() + KILL_WAIT_S

    # --- the end -------------------------------------------------------------------------------------

    def report(self, node: str, ended: Sequence[tuple[int, int]]) -> None:
        """Say which tasks of a node failed, those that ended in the same way together."""
        groups: dict[int, list[int]] = {}
        for task, code in ended:
            if code:
                groups.setdefault(code, []).append(task)
        for code, failed in groups.items():
            how = f"Exited with exit code {code}" if code > 0 else (signal.strsignal(-code) or f"Signal {-code}")
            self.say(f"error: {node}: {_tasks(failed)}: {how}")

    def codes(self) -> list[int]:
        """Of the tasks that have ended, signals negative; success is not said of a step without all of its output."""
        return [code for _, code in self.ends] + [1] * self.is_cut_short

    def exit_code(self) -> int:
        """The highest of the tasks."""
        codes = self.codes()
        if self.is_terminated or -signal.SIGKILL in codes:
            self.inform(f"Force Terminated StepId={self.name}")
        return max((code if code >= 0 else 128 - code for code in codes), default=1)


def _tasks(numbers: Sequence[int]) -> str:
    """`task 0`, `tasks 0-2,5`."""
    return f"task{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _folded_names(names: Sequence[str]) -> str:
    from gpusched.model.hostlist import fold  # most jobs are on one node

    return fold(names)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")
