"""Leaves out, counted and named, what no state of the machines, or no policy that is compared, would ever take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpusched.model.cluster import NodeView
from gpusched.model.job import JobSpec, Launch
from gpusched.model.settings import Settings
from gpusched.policy.capacity import refusal
from gpusched.policy.sharing.admission import Tally, default_account, qos_of, time_limit, why_refused
from gpusched.simulate.choices import Choice
from gpusched.simulate.rules import request_of
from gpusched.simulate.trace import BadTrace, Trace, TraceJob

_NOBODY = Tally()


def leave_out_what_cannot_fit(
    trace: Trace, nodes: Sequence[NodeView], choices: Sequence[Choice], *, is_admitted: bool
) -> None:
    """Leave out of all policies what any of them could never run, so that they are compared on the same jobs.

    Args: is_admitted: whether queues, accounts and QOS have their say.
    Raises: BadTrace when nothing is left.
    """
    known: dict[object, str | None] = {}
    kept = []
    for job in trace.jobs:
        spec = _spec(job, nodes)
        mark = (spec.request, *((job.user, *_asked(spec)) if is_admitted else ()))
        if mark not in known:
            known[mark] = next(
                (text for choice in choices if (text := _why_not(choice, spec, job, nodes, is_admitted))), None
            )
        why = known[mark]
        if why is None:
            kept.append(job)
        else:
            trace.drop(why, job.id)
    if not kept:
        why = "; ".join(f"{reason}: {one}" for reason, one in trace.dropped.items())
        raise BadTrace(f"no job of {trace.name} can be replayed ({why})", "give a larger cluster, or other settings")
    trace.jobs = kept


def _asked(spec: JobSpec) -> tuple[object, ...]:
    return spec.account, spec.queue, spec.qos, spec.time_limit_s


def _why_not(choice: Choice, spec: JobSpec, job: TraceJob, nodes: Sequence[NodeView], is_admitted: bool) -> str | None:
    found = refusal(spec.request, nodes, choice.settings)
    if found is not None:
        return f"does not fit: {found.text}"
    if not is_admitted:
        return None
    asked = _completed(spec, job.user, choice.settings)
    found = why_refused(asked, job.user, choice.settings, _NOBODY)
    return None if found is None else f"refused by the policy {choice.name}: {found.text}"


def _completed(spec: JobSpec, user: str, settings: Settings) -> JobSpec:
    account = spec.account or default_account(user, settings) or user
    spec = replace(spec, queue=spec.queue or settings.default.queue)
    return replace(spec, account=account, qos=qos_of(spec, settings), time_limit_s=time_limit(spec, settings))


def _spec(job: TraceJob, nodes: Sequence[NodeView]) -> JobSpec:
    if job.spec is not None:
        return job.spec
    # Without a queue it goes to that of the settings, which each policy may have in another way.
    return JobSpec(job.name or "job", request_of(job, nodes), _LAUNCH, queue=job.queue, time_limit_s=job.estimate_s)


_LAUNCH = Launch(("job",), None, None, "", "/")
