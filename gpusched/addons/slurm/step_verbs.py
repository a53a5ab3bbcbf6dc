"""Steps of a job: `srun` in it begins and ends them, others cancel or signal them."""

from __future__ import annotations

from typing import Any

from gpusched.access import Act, check
from gpusched.addons.slurm.step_layout import StepJob, lay_out, rooms
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.launch.environment import visible_words
from gpusched.daemon.verbs.enter import open_doors
from gpusched.errors import NotFound, Refused
from gpusched.lifecycle import steps
from gpusched.model.commands import BeginStep, Caller, CancelStep, EndStep
from gpusched.model.execution import SignalOrder, StepStopOrder
from gpusched.model.job import GpuShare, Job, Run
from gpusched.model.layout import count_tasks, starts_ranks
from gpusched.model.states import JobState, RunState
from gpusched.model.step import MOST_STEPS, JobStep
from gpusched.model.value import replace
from gpusched.ports.tables import STEPS
from gpusched.scheduler.cluster_state import is_of_type

_KILL = 9
BUSY, STARTING, SUSPENDED, ENDING = "busy", "starting", "suspended", "ending"
"""Why a step has to wait: for other steps, for all nodes to start and join, for a resume, for the signal to end."""
NOT_RUNNING = "not_running"
"""What a refusal is about: the job takes no more steps."""


def begin(command: BeginStep, tx: TickTransaction) -> dict[str, Any]:
    """Record a new step of the run that the caller's process belongs to.

    Answers: `step`, None while it has to wait: `why` says for what. Raises: Refused, NotFound, Forbidden.
    """
    job, run = _run_of(command.run, command.caller, tx)
    node = command.node if command.node in run.nodes else run.node
    others = tx.state.steps.of(run.id)
    for step in others:
        if (step.node, step.pid, step.start_ticks) == (node, command.pid, command.start_ticks):
            # Asked again: the answer was lost with a daemon.
            return _answered(command, step, job, run, tx)
    if job.state is JobState.SUSPENDED:
        # It does not know yet, or a handler of its notice asks.
        return {"step": None, "why": SUSPENDED}
    if job.state is not JobState.RUNNING:
        if run.parts or run.id not in tx.state.steps.closed:
            # A script that is refused before it gets the signal goes on, and may end by itself: a preempted job would
            # count as failed or, worse, as completed. Of a run on several nodes, any of them may have told of the stop.
            return {"step": None, "why": ENDING}
        raise Refused(
            f"job {job.shown_id} is {job.state} and accepts no more steps", f"see: gshow {job.shown_id}", NOT_RUNNING
        )
    if run.parts and run.state is RunState.STARTING:
        # Tasks are started through what runs on each node.
        return {"step": None, "why": STARTING}
    # Step 0 is the job's own ranks, where they were started with it.
    first = 1 if starts_ranks(job.spec) else 0
    number = tx.state.steps.next_number(run.id, lambda: max(first, tx.store.next_step(run.job_id, run.number)))
    if number >= MOST_STEPS:
        raise Refused(
            f"job {job.shown_id} has reached the maximum of {MOST_STEPS} steps", "run several commands in one step"
        )
    request = command.request
    layout = job.spec.layout
    counts = StepJob(
        job.shown_id,
        count_tasks(job.spec.request, layout, len(run.nodes)),
        None if layout is None else layout.ntasks_per_node,
    )
    held = _held(job, run, tx)
    if request.gpu_type:
        held = _of_type(request.gpu_type, held, job, tx)
    parts = lay_out(request, rooms(held, others, request), counts, node)
    if parts is None:
        return {"step": None, "why": BUSY}
    step = JobStep(
        job_id=job.id,
        run=run.number,
        number=number,
        name=command.name,
        command=command.command,
        node=node,
        start_at=tx.now,
        tasks=sum(len(part.tasks) for part in parts),
        cpus=sum(part.cpus for part in parts),
        gpus=tuple(share for part in parts for share in part.gpus),
        is_exclusive=request.is_exclusive,
        has_own_gpus=request.has_own_gpus,
        time_limit_s=command.time_limit_s,
        pid=command.pid,
        start_ticks=command.start_ticks,
        parts=() if [part.node for part in parts] == [node] else parts,
    )
    if not _are_known(step, tx):
        return {"step": None, "why": STARTING}
    tx.put_step(step)
    return _answered(command, step, job, run, tx)


def _are_known(step: JobStep, tx: TickTransaction) -> bool:
    """Whether all nodes of a step have joined: after a restart of the daemon their GPUs and addresses are not known."""
    return {node.name for node in tx.nodes if node.is_unknown}.isdisjoint(step.nodes)


def _answered(command: BeginStep, step: JobStep, job: Job, run: Run, tx: TickTransaction) -> dict[str, Any]:
    """The answer for a step that has been recorded, with doors on its other nodes, to start its tasks there."""
    if not _are_known(step, tx):
        return {"step": None, "why": STARTING}
    others = [name for name in step.nodes if name != step.node]
    if others and command.token:
        open_doors(tx, run, command.token, others)
    return {"step": _answer(step, job, run, tx)}


Held = list[tuple[str, float, tuple[GpuShare, ...]]]
"""Name, CPUs and GPUs of each node of a run."""


def _held(job: Job, run: Run, tx: TickTransaction) -> Held:
    """Name, CPUs and GPUs of the nodes of a run; an exclusive job books what it asked for, and has them to itself."""
    whole = {node.name: node.cpus for node in tx.nodes} if job.spec.request.is_exclusive else {}
    return [(part.node, max(part.cpus, whole.get(part.node, 0.0)), part.gpus) for part in run.on_each_node]


def _of_type(gpu_type: str, held: Held, job: Job, tx: TickTransaction) -> Held:
    """What the job holds with only its GPUs of this type. Raises: Refused if there are GPUs and none is."""
    views = {gpu.uuid: gpu for node in tx.nodes for gpu in node.gpus}
    # One that has vanished has no known model.
    of_job = {share.uuid: views[share.uuid] for _, _, gpus in held for share in gpus if share.uuid in views}
    matching = {uuid for uuid, view in of_job.items() if is_of_type(view, gpu_type)}
    if of_job and not matching:
        models = ", ".join(sorted({view.name for view in of_job.values()}))
        raise Refused(
            f"the step requests a GPU of type {gpu_type!r}, but the GPUs of job {job.shown_id} are: {models}",
            "leave the type out, or request it when you submit the job; a part of the name is enough: see ginfo",
            "gpus",
        )
    return [(node, cpus, tuple(share for share in gpus if share.uuid in matching)) for node, cpus, gpus in held]


def end(command: EndStep, tx: TickTransaction) -> dict[str, Any]:
    """Record how a step ended, once: a step that has ended stays as it is.

    What a node that was lost to it still runs is killed when the node answers, before it hears of a later step.
    """
    job, run = _run_of(command.run, command.caller, tx)
    step = _step(job, run, command.number, tx)
    if step.is_open:
        step = steps.ended(
            step,
            job,
            tx.now,
            command.exit_code,
            command.signal,
            is_timeout=command.is_timeout,
            is_node_lost=command.is_node_lost,
        )
        if command.is_node_lost:
            tx.signal(run.id, StepStopOrder(step.number, 0.0))
        tx.put_step(
            replace(
                step,
                user_cpu_s=command.user_cpu_s,
                system_cpu_s=command.system_cpu_s,
                peak_mem_mib=command.peak_mem_mib,
                mean_mem_mib=command.mean_mem_mib,
            )
        )
    return {"step": {"step": step.number, "state": step.state.value}}


def cancel(command: CancelStep, tx: TickTransaction) -> dict[str, Any]:
    """End a step of a running job, or signal its processes."""
    job = tx.state.jobs.get(command.job_id)
    run = None if job is None else tx.state.open_runs.get(f"{job.id}.{job.run}")
    if job is None or run is None:
        raise NotFound(f"job {command.job_id} has no running steps", "list running steps with: squeue -s")
    check(command.caller, Act.CANCEL if command.signal is None else Act.SIGNAL, job, tx.settings)
    step = _step(job, run, command.number, tx)
    shown = f"{job.shown_id}.{step.number}"
    answer: dict[str, Any] = {"cancelled": [], "signalled": [], "ended": []}
    if not step.is_open:
        answer["ended"].append(shown)
        return answer
    tx.audit(command.caller, Act.CANCEL if command.signal is None else Act.SIGNAL, job)
    if command.signal is not None and command.signal != _KILL:
        tx.signal(run.id, SignalOrder(command.signal, f"step:{step.number}"))
        answer["signalled"].append(shown)
        return answer
    tx.put_step(replace(step, cancel_uid=command.caller.uid))
    tx.signal(run.id, StepStopOrder(step.number, 0.0 if command.signal == _KILL else None))
    answer["cancelled"].append(shown)
    return answer


def _run_of(handle: str, caller: Caller, tx: TickTransaction) -> tuple[Job, Run]:
    """The run that the caller's process belongs to, and its job. Raises: NotFound, Forbidden."""
    run = tx.state.open_runs.get(handle)
    if run is None:
        raise NotFound("the job of this process has ended", "start steps while it runs")
    job = tx.state.jobs[run.job_id]
    check(caller, Act.ATTACH, job, tx.settings)
    return job, run


def _step(job: Job, run: Run, number: int, tx: TickTransaction) -> JobStep:
    for step in tx.state.steps.of(run.id):
        if step.number == number:
            return step
    for step in (*filter(None, tx.changes.rows[STEPS].values()), *tx.store.steps([job.id])):
        if step.id == (job.id, run.number, number):
            return step
    raise NotFound(f"job {job.shown_id} has no step {number}", "list running steps with: squeue -s")


def _answer(step: JobStep, job: Job, run: Run, tx: TickTransaction) -> dict[str, Any]:
    indexes = {gpu.uuid: gpu.index for node in tx.nodes for gpu in node.gpus}
    form = job.spec.launch.gpu_ids or tx.settings.gpu.ids
    nodes = []
    for nodeid, part in enumerate(step.on_each_node):
        rank = run.nodes.index(part.node)
        there = run.on(rank)
        words = visible_words(there, form, indexes)
        word_of = {share.uuid: word for share, word in zip(there.gpus, words, strict=True)}
        gpus = [{"index": indexes.get(share.uuid, share.index), "visible": word_of[share.uuid]} for share in part.gpus]
        nodes.append(
            {
                "node": part.node,
                "nodeid": nodeid,
                "rank": rank,
                "tasks": list(part.tasks),
                "cpus": part.cpus,
                "gpus": gpus,
            }
        )
    return {
        "step": step.number,
        "node": step.node,
        "has_own_gpus": step.has_own_gpus,
        "tasks": step.tasks,
        "nodes": nodes,
    }
