"""Starts a step on several nodes, or on others than srun's: all of its tasks together, or none."""

from __future__ import annotations

import _thread
import os
import sys

from gpusched.addons.slurm.part_client import Parts
from gpusched.addons.slurm.streams import Streams, label_of
from gpusched.cli.environment import umask
from gpusched.cli.run_connection import RunConnection, way_of
from gpusched.cli.tasks import PreparedTasks, task_variables
from gpusched.engine.attach_protocol import Wanted
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any

    from gpusched.addons.slurm.step import Step
    from gpusched.addons.slurm.step_tasks import NodeShare
else:
    # The other module makes enumerations of its numbers, for which it takes longer than all the rest.
    import _signal as signal

PART = "gpusched.cli.slurm.step_part"
"""The name on the wire, which nodes of other releases know; see `ENTRY_POINTS`."""


def start_everywhere(step: Step, here: NodeShare | None, programs: list[list[str]] | None) -> bool:
    """Start all tasks, or none: then False, and it has been said why. Raises: CommandError.

    Args: here: the share of srun's own node. programs: the command of each task, if they differ.
    """
    shares = [share for share in step.shares if share is not here]
    for share in shares:
        if share.node not in step.doors:
            _say_failed(step, share.node, "the job has ended")
            return False
    # They connect while the rest is prepared.
    connections = [_connection(step, share) for share in shares]
    env = step.environment()
    gpus = {share.node: step.gpus_of_tasks(share) for share in step.shares}
    # Refuses words that no node understands.
    cores = step.cores_of_tasks(step.shares[0] if here is None else here)
    streams = Streams(step)
    parts = Parts(step.pump, _thread.get_ident())
    prepared = PreparedTasks(step.tasks)
    is_started = False
    try:
        if here is not None:
            for local, task in enumerate(here.tasks):
                own = {**env, **step.variables_on(here), **task_variables(task, step.count, local)}
                if (seen := gpus[here.node]) is not None:
                    own["CUDA_VISIBLE_DEVICES"] = ",".join(seen[local])
                argv = step.argv if programs is None else programs[task]
                prepared.add(task, argv, own, streams.of(task, here), cores[local] if cores else ())
        has_terminal = step.has_pty and (here is None or 0 not in here.tasks)
        reads_input = False
        for share, connection in zip(shares, connections, strict=True):
            launch = _launch(step, share, env, gpus[share.node], programs, has_terminal=has_terminal)
            planned = [streams.elsewhere(task, share) for task in share.tasks]
            for place, name in enumerate(("input", "output", "error")):
                launch[name] = [one[place] for one in planned]
            launch["truncates"] = streams.truncates
            part = parts.add(share, connection, launch)
            for task, (source, _, _, target, error_target) in zip(share.tasks, planned, strict=True):
                label = label_of(task, step.count) if step.options.has_label else None
                parts.add_target(part, task, 1, target, label)
                parts.add_target(part, task, 2, error_target, label)
                reads_input = reads_input or source is True or (has_terminal and task == 0)
        step.parts = parts
        step.pump.add_others(parts, read_input=reads_input)
        streams.close()
        step.pump.start()
        is_started = _await_go(step, parts, prepared, programs, has_terminal=has_terminal)
    finally:
        if not is_started:
            prepared.drop()
            parts.leave()
    return is_started


def _connection(step: Step, share: NodeShare) -> RunConnection:
    """To a new part of the step on this node."""
    wanted = Wanted([PART], {}, is_terminal=False, umask=umask(), work_dir="/", is_module=True)
    connection = RunConnection(way_of(step.doors[share.node], step.scheduler.socket_path), wanted=wanted)
    connection.on_ready(0)
    return connection


def _say_failed(step: Step, node: str, why: str) -> None:
    shown = printable(why, 2000)
    step.say(f"error: Task launch for StepId={step.name} failed on node {node}: {shown}")
    step.say(f"error: Application launch failed: {shown}")


def _launch(
    step: Step,
    share: NodeShare,
    env: dict[str, str],
    gpus: list[list[str]] | None,
    programs: list[list[str]] | None,
    *,
    has_terminal: bool,
) -> dict[str, Any]:
    """LAUNCH for one node, apart from its streams; see `part_server.PartServer`."""
    terminal = None
    if has_terminal and 0 in share.tasks:
        from gpusched.cli.relay import size  # few steps have a terminal on another node

        terminal = [*size()]
    return {
        "argv": [_portable(word) for word in step.argv],
        "programs": None
        if programs is None
        else [[_portable(word) for word in programs[task]] for task in share.tasks],
        "folder": _portable(os.getcwd()),
        "umask": umask(),
        "env": {_portable(name): _portable(value) for name, value in env.items()},
        "variables": step.variables_on(share),
        "tasks": share.tasks,
        "count": step.count,
        "gpus": gpus,
        "cpu_bind": step.options.text("cpu-bind"),
        "cpus_per_task": step.options.cpus_per_task or 1,
        "terminal": terminal,
        "is_unbuffered": step.options.has("unbuffered"),
    }


def _portable(text: str) -> str:
    """A word of this process as one that has UTF-8 for the names of its files, as parts have, reads it."""
    if sys.getfilesystemencoding() == "utf-8":
        return text
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def _await_go(
    step: Step,
    parts: Parts,
    prepared: PreparedTasks,
    programs: list[list[str]] | None,
    *,
    has_terminal: bool,
) -> bool:
    """Wait until all nodes are ready, then start the tasks on this one; False if they never are."""
    while True:
        info = step.tasks.wait(None)
        if info is not None and info.si_signo != signal.SIGCHLD:
            step.inform(f"Job step aborted before step {step.name} completely launched.")
            return False
        for what, part, fact in parts.take_events():
            if what == "note":
                sys.stderr.write(f"{fact}\n")
            elif what == "failed":
                _say_failed(step, part.node, fact)
                return False
            elif what == "go":
                _go(step, parts, prepared, programs, has_terminal=has_terminal)
                return True


def _go(
    step: Step,
    parts: Parts,
    prepared: PreparedTasks,
    programs: list[list[str]] | None,
    *,
    has_terminal: bool,
) -> None:
    failed = [
        (task, step.explain(step.argv if programs is None else programs[task], error)) for task, error in prepared.go()
    ]
    step.take_ended(step.node, failed)
    if has_terminal:
        from gpusched.cli.relay import RawTerminal, size  # few steps have a terminal on another node

        parts.terminal = RawTerminal()
        parts.terminal.make_raw()
        signal.signal(signal.SIGWINCH, lambda *_: parts.resize(*size()))
