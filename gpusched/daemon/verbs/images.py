"""Images of jobs: who may run in one, and the pulls that jobs wait for."""

from __future__ import annotations

from collections.abc import Iterable

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.watches import Stage, Watch
from gpusched.errors import Refused
from gpusched.lifecycle.image_pulls import checked_end, pinned, pull_spec, refused_by
from gpusched.lifecycle.transitions import new_job
from gpusched.model.bundles import part_of
from gpusched.model.commands import Caller
from gpusched.model.job import Job, JobEvent, JobSpec, Run
from gpusched.model.mentions import mention_job
from gpusched.model.states import JobState
from gpusched.model.units import printable
from gpusched.model.value import replace
from gpusched.scheduler.infeasible import refusal


def check_images(specs: Iterable[JobSpec], owner: Caller, tx: TickTransaction) -> None:
    """Refuse jobs whose container cannot be started here. Raises: Refused."""
    seen: set[tuple[object, ...]] = set()
    for spec in specs:
        launch = spec.launch
        if launch.image is None or spec.is_for_slurm:
            continue
        mark = (launch.image, launch.binds, launch.work_dir, id(spec.request), launch.slurm, spec.layout)
        if mark in seen:
            continue
        seen.add(mark)
        if tx.containers is None:
            raise Refused("this server runs no containers", "leave --image out")
        trouble = tx.containers.refusal(spec, owner.user, owner.uid, tx.settings)
        if trouble is not None:
            raise Refused(*trouble, about="image")


def with_runtime(spec: JobSpec, tx: TickTransaction) -> JobSpec:
    """The submission, limited to nodes that can run its image."""
    if spec.launch.image is None or spec.is_for_slurm or tx.containers is None or spec.request.runtime is not None:
        return spec
    return replace(spec, request=replace(spec.request, runtime=tx.containers.runtime(tx.settings.containers)))


def with_pull(spec: JobSpec, owner: Caller, tx: TickTransaction) -> JobSpec:
    """The submission, waiting for the pull of its image: one of the same user that has not ended, or a new one."""
    if spec.launch.image is None or spec.is_for_slurm or spec.is_pull:
        return spec
    launch = replace(spec.launch, image_digest=None, image_refused=())
    spec = replace(spec, launch=launch, request=replace(spec.request, image_nodes=()))
    pull, _ = _pull_for(spec, _useful_nodes(spec, tx) if len(tx.nodes) > 1 else spec.request.nodelist, owner, tx)
    return replace(spec, image_job=pull.id)


def _pull_for(spec: JobSpec, nodes: tuple[str, ...], owner: Caller, tx: TickTransaction) -> tuple[Job, bool]:
    """The pull of a job's image to one of these nodes, and whether it is new: there may be one that has not ended."""
    made = pull_spec(spec, nodes, tx.settings.containers.pull_limit_s)
    what = made.launch.image, made.launch.image_digest, made.request
    for job in _open_pulls(owner.uid, tx):
        launch = job.spec.launch
        if (launch.image, launch.image_digest, job.spec.request) == what and job.hold is None:
            return job, False
    pull = new_job(tx.state.next_id, owner, made, tx.now)
    tx.state.next_id = pull.last_id + 1
    where = "" if made.launch.image_digest is None else f" to {nodes[0]}"
    text = f"pulls {printable(made.launch.image or '', 200)}{where} for the jobs of {owner.user} that run in it"
    tx.put_job(pull, JobEvent(pull.id, tx.now, "submitted", text))
    return pull, True


def _open_pulls(uid: int | None, tx: TickTransaction) -> list[Job]:
    """Pulls that have neither ended nor been cancelled. Args: uid: of one user."""
    jobs = (tx.state.jobs[job_id] for job_id in sorted(tx.state.open_pulls))
    return [job for job in jobs if uid in (None, job.uid) and job.cancel_at is None]


def _useful_nodes(spec: JobSpec, tx: TickTransaction) -> tuple[str, ...]:
    """Nodes that can be used now and could run the job, or a part of it, if they had its image.

    Those that cannot be used now count as well where the others are too few.
    """
    asked, refused = spec.request, spec.launch.image_refused
    # A node with room for one bundle may be one of those that it gets.
    part = asked if asked.bundles is None else part_of(asked, 1)
    part = replace(part, nodes=1, tail_gpus=0, nodelist=(), exclude=(), licenses=(), image_nodes=())
    found = [
        node
        for node in tx.nodes
        if node.name not in (*asked.exclude, *refused)
        and (not asked.nodelist or node.name in asked.nodelist)
        and refusal(part, (node,), tx.settings) is None
    ]
    usable = [node for node in found if node.why_not is None]
    return tuple(node.name for node in (usable if len(usable) >= spec.request.nodes else found))


def _is_ready(spec: JobSpec, tx: TickTransaction) -> bool:
    """Whether the nodes that have its image could run the job."""
    return bool(spec.request.image_nodes) and refusal(spec.request, tx.nodes, tx.settings) is None


def end_pull(pull: Job, run: Run, said: str | None, tx: TickTransaction) -> Job:
    """Tell the jobs that need what this pull has found, or failed to find, on its node; returns the pull.

    Those that wait for the first pull have their image pinned. Args: said: the last line of its output.
    """
    pull = checked_end(pull, said)
    if not pull.state.is_final:
        return pull
    node, is_there = run.node, pull.state is JobState.COMPLETED
    if not is_there and len(tx.nodes) > 1:
        pull = replace(pull, reason_text=f"on {node}: {pull.reason_text}")
    digest = said if is_there else pull.spec.launch.image_digest
    waiting = [tx.state.jobs[job_id] for job_id in tx.state.dependents.children_of(pull.id)]
    waiting = [job for job in waiting if job.spec.image_job == pull.id]
    if digest is None:
        return pull
    # One that was cancelled has shown nothing about its node.
    others = (
        []
        if pull.state is JobState.CANCELLED
        else [
            job
            for job in tx.state.jobs.values()
            if job.uid == pull.uid and job.spec.launch.image_digest == digest and not job.spec.is_pull
        ]
    )
    nodes = {*((node,) if is_there else ()), *(name for job in others for name in job.spec.request.image_nodes)}
    for job in {one.id: one for one in (*waiting, *others)}.values():
        if job.state is not JobState.PENDING:
            continue
        after = pinned(job, digest, nodes) if is_there else refused_by(job, node)
        text = f"its image was pulled by {mention_job(str(pull.id))}: {digest}"
        if not is_there:
            text = f"its image was not pulled to {node} by {mention_job(str(pull.id))}: {pull.reason_text}"
        tell = not is_there or job.spec.launch.image_digest is None
        events = (JobEvent(job.id, tx.now, "note", text),) if tell else ()
        if job in waiting:
            after = _wait_on(after, pull, tx)
            tx.state.forget_dependency(after.id)
            if after.spec.dependency:
                tx.state.learn_parents(tx.jobs, [after.spec.dependency])
        tx.put_job(after, *events)
    return pull


def _wait_on(job: Job, ended: Job, tx: TickTransaction) -> Job:
    """The job once a pull that it waited for has ended: free if enough nodes have its image, else behind another one.

    Behind the one that has failed if there is no other: then it can never start.
    """
    spec = job.spec
    if _is_ready(spec, tx):
        return replace(job, spec=replace(spec, image_job=None))
    missing = [name for name in _useful_nodes(spec, tx) if name not in spec.request.image_nodes]
    owner = Caller(job.uid, job.user)
    # All of them pull at the same time.
    pulls = [_pull_for(spec, (name,), owner, tx)[0] for name in missing]
    if not pulls and ended.state is JobState.COMPLETED:
        # No node would do any more, with or without the image: its reason says so.
        return replace(job, spec=replace(spec, image_job=None))
    return replace(job, spec=replace(spec, image_job=pulls[0].id if pulls else ended.id))


class PullWatch(Watch):
    """Pulls to further nodes, as long as pending jobs could use them."""

    name = "image pulls"
    stage = Stage.AFTER_PLAN

    def __init__(self) -> None:
        self._nodes: tuple[object, ...] = ()
        """Nodes as they were at the last look."""
        self._is_due = True

    def carry_out(self, tx: TickTransaction) -> None:
        """Submit pulls to nodes that could run pending jobs and lack their image, and cancel those that no job needs.

        Not while more may start with the next reading.
        """
        nodes = tuple((node.name, node.why_not is None, node.runtimes) for node in tx.nodes)
        has_changed = nodes != self._nodes or any(job.spec.launch.image for job in tx.changes.jobs.values())
        self._nodes, self._is_due = nodes, self._is_due or has_changed
        if len(nodes) == 1 or not self._is_due or tx.awaits_readings:
            return
        tx.restore_if_dropped(self, "_is_due")
        self._is_due = False
        wanted: dict[tuple[int, str, str], Job] = {}
        seen: set[object] = set()
        for job in tx.state.jobs.values():
            digest = job.spec.launch.image_digest
            if digest is None or job.spec.is_pull or job.state is not JobState.PENDING or job.hold is not None:
                continue
            mark = job.uid, digest, job.spec.request, job.spec.launch.image_refused
            if mark not in seen:
                seen.add(mark)
                for name in _useful_nodes(job.spec, tx):
                    if name not in job.spec.request.image_nodes:
                        wanted.setdefault((job.uid, digest, name), job)
        for pull in _open_pulls(None, tx):
            digest = pull.spec.launch.image_digest
            if digest is not None and (pull.uid, digest, pull.spec.request.nodelist[0]) not in wanted:
                tx.cancel(pull, "gpusched, since no job that waits needs it")
        new = [_pull_for(job.spec, (name,), Caller(job.uid, job.user), tx)[1] for (_, _, name), job in wanted.items()]
        tx.must_plan |= any(new)
