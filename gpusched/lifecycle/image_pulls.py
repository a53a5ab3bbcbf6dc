"""The job that pulls an image for others, before any of them takes a GPU; pure.

A pull is a CPU job of its own, with all that jobs have: limits, a place in the queue, a log, cancelling, retries. The
end of the first one pins the image, by digest, of every job that waits for it. Further ones pull that digest to other
nodes, as long as a job that waits could use them.
"""

from __future__ import annotations

from collections.abc import Collection

from gpusched.model.container import is_pinned
from gpusched.model.job import Job, JobSpec, Launch, Request, RetryRule
from gpusched.model.spec import MAX_NAME
from gpusched.model.states import JobState
from gpusched.model.value import replace

OUTPUT = "gpusched-pull-%j.out"
"""Removed if the pull succeeds."""
_RETRIES = RetryRule(retries=1, backoff_s=5.0)
"""Registries have bad moments."""


def pull_spec(spec: JobSpec, nodes: tuple[str, ...], limit_s: int) -> JobSpec:
    """The submission that pulls the image of this one, with its owner's environment, account and queue.

    Args: nodes: where it may run; empty for any.
    """
    launch = spec.launch
    assert launch.image is not None
    return JobSpec(
        name=f"pull {launch.image}"[:MAX_NAME],
        request=Request(nodelist=nodes, runtime=spec.request.runtime),
        launch=Launch(
            argv=("gpusched-pull", launch.image),
            script_sha=None,
            script_name=None,
            env_sha=launch.env_sha,
            work_dir=launch.submit_dir or launch.work_dir,
            umask=launch.umask,
            stdout=OUTPUT,
            open_mode="append",
            image=launch.image,
            image_digest=launch.image_digest,
        ),
        retry=_RETRIES,
        queue=spec.queue,
        account=spec.account,
        qos=spec.qos,
        nice=spec.nice,
        time_limit_s=limit_s,
        reservation=spec.reservation,
        is_pull=True,
    )


def pinned(job: Job, image: str, nodes: Collection[str]) -> Job:
    """The job with the image that a pull has found, which all of its runs use. Args: nodes: that have it."""
    spec = job.spec
    known = tuple(sorted({*spec.request.image_nodes, *nodes}))
    launch, request = replace(spec.launch, image_digest=image), replace(spec.request, image_nodes=known)
    return replace(job, spec=replace(spec, launch=launch, request=request))


def refused_by(job: Job, node: str) -> Job:
    """The job, whose image could not be pulled to a node."""
    known = tuple(sorted({*job.spec.launch.image_refused, node}))
    return replace(job, spec=replace(job.spec, launch=replace(job.spec.launch, image_refused=known)))


def checked_end(job: Job, said: str | None) -> Job:
    """A pull that has succeeded and named an image; else the pull as failed, so that nothing waits for it any more.

    What it said is the user's own output: nothing else than an image may come from it.
    """
    wanted = job.spec.launch.image_digest
    if job.state is not JobState.COMPLETED or (said is not None and is_pinned(said) and wanted in (None, said)):
        return job
    return replace(job, state=JobState.FAILED, reason_text="it named no image when it had ended")
