"""Images of jobs: who may run in one, and the pulls that jobs wait for."""

from __future__ import annotations

from collections.abc import Iterable

from gpusched.daemon.commit import TickTransaction
from gpusched.errors import Refused
from gpusched.lifecycle.image_pulls import checked_end, pinned, pull_spec
from gpusched.lifecycle.transitions import new_job
from gpusched.model.commands import Caller
from gpusched.model.job import Job, JobEvent, JobSpec
from gpusched.model.states import JobState
from gpusched.model.units import printable
from gpusched.model.value import replace


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
        nodes = [node.name for node in tx.nodes]
        trouble = tx.containers.refusal(spec, owner.user, owner.uid, nodes, tx.settings)
        if trouble is not None:
            raise Refused(*trouble, about="image")


def with_pull(spec: JobSpec, owner: Caller, tx: TickTransaction) -> JobSpec:
    """The submission, waiting for the pull of its image: one of the same user that has not ended, or a new one."""
    image = spec.launch.image
    if image is None or spec.is_for_slurm or spec.is_pull:
        return spec
    pull = _open_pull(owner.uid, image, tx)
    if pull is None:
        made = pull_spec(spec, tx.settings.containers.pull_limit_s)
        pull = new_job(tx.world.next_id, owner, made, tx.now)
        tx.world.next_id = pull.last_id + 1
        text = f"pulls {printable(image, 200)} for the jobs of {owner.user} that run in it"
        tx.put_job(pull, JobEvent(pull.id, tx.now, "submitted", text))
    return replace(spec, image_job=pull.id, launch=replace(spec.launch, image_digest=None))


def _open_pull(uid: int, image: str, tx: TickTransaction) -> Job | None:
    for job in tx.world.jobs.values():
        if job.spec.is_pull and job.uid == uid and job.spec.launch.image == image and job.cancel_at is None:
            return None if job.hold is not None else job
    return None


def end_pull(pull: Job, said: str | None, tx: TickTransaction) -> Job:
    """Pin the image of the jobs that wait for this pull, which has ended with this last line; returns the pull."""
    pull = checked_end(pull, said)
    if pull.state is JobState.COMPLETED and said is not None:
        for job_id in tx.world.children_of(pull.id):
            job = tx.world.jobs[job_id]
            if job.spec.image_job == pull.id:
                after, told = pinned(job, pull, said, tx.now)
                tx.world.replace_dependency(after)
                if after.spec.dependency:
                    tx.world.learn_parents(tx.jobs, [after.spec.dependency])
                tx.put_job(after, told)
    return pull
