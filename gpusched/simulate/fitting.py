"""Leaves out, counted and named, what no state of the machines, or no policy that is compared, would ever take."""

from __future__ import annotations

from collections.abc import Sequence

from gpusched.model.cluster import NodeView
from gpusched.model.job import JobSpec, Launch
from gpusched.model.settings import Settings
from gpusched.model.units import plural
from gpusched.model.value import replace
from gpusched.scheduler.admission import (
    Tally,
    account_refusal,
    default_account,
    open_to_all,
    qos_of,
    time_limit,
    why_refused,
)
from gpusched.scheduler.infeasible import refusal
from gpusched.simulate.policies import Policy
from gpusched.simulate.rules import request_of
from gpusched.simulate.trace import BadTrace, Trace, TraceJob

Why = tuple[str, str]
"""What kind of reason, and the reason."""

_NOBODY = Tally()
_MOST_REASONS = 5


def leave_out_what_cannot_fit(
    trace: Trace, nodes: Sequence[NodeView], policies: Sequence[Policy], *, is_admitted: bool
) -> None:
    """Leave out of all policies what any of them could never run, so that they are compared on the same jobs.

    Args: is_admitted: whether queues, accounts and QOS have their say.
    Raises: BadTrace when nothing is left.
    """
    known: dict[object, Why | None] = {}
    kept, left_out = [], []
    for job in trace.jobs:
        # Most jobs are like another one: nothing is made anew for those.
        mark: object = (job.procs, job.gpus, job.cpus, job.mem_mib, job.gpu_fraction, job.spec)
        if is_admitted:
            mark = mark, job.user, job.account, job.queue, job.estimate_s
        if mark not in known:
            spec = _spec(job, nodes)
            found = (_why_not(policy, spec, job, nodes, is_admitted) for policy in policies)
            known[mark] = next((why for why in found if why is not None), None)
        why = known[mark]
        if why is None:
            kept.append(job)
        else:
            left_out.append((job, why))
    _tell(trace, left_out)
    if not kept:
        text = "; ".join(f"{reason}: {one}" for reason, one in trace.dropped.items())
        raise BadTrace(f"no job of {trace.name} can be replayed ({text})", "give a larger cluster, or other settings")
    trace.jobs = kept


def _tell(trace: Trace, left_out: Sequence[tuple[TraceJob, Why]]) -> None:
    """Count and name them by reason; where there are many reasons of a kind, the first stands for all of them."""
    texts: dict[str, dict[str, None]] = {}
    for _, (kind, text) in left_out:
        texts.setdefault(kind, {})[text] = None
    for job, (kind, text) in left_out:
        listed = texts[kind]
        if len(listed) > _MOST_REASONS:
            text = f"the first of {len(listed)} reasons: {next(iter(listed))}"
        trace.drop(f"{kind}, {text}", job.id)


def _why_not(policy: Policy, spec: JobSpec, job: TraceJob, nodes: Sequence[NodeView], is_admitted: bool) -> Why | None:
    found = refusal(spec.request, nodes, policy.settings)
    if found is not None:
        is_gang = job.spec is None and (spec.request.nodes > 1 or spec.request.tail_gpus)
        return (
            "does not fit",
            f"asked for {plural(job.gpus, 'GPU')} of nodes that give them together" if is_gang else found.text,
        )
    if not is_admitted:
        return None
    settings = replace(policy.settings, account=open_to_all(policy.settings.account))
    asked = _completed(spec, job.user, settings)
    found = account_refusal(asked.account, job.user, (), settings) or why_refused(asked, job.user, settings, _NOBODY)
    return None if found is None else (f"refused by the policy {policy.name}", found.text)


def _completed(spec: JobSpec, user: str, settings: Settings) -> JobSpec:
    account = spec.account or default_account(user, (), settings) or user
    spec = replace(spec, queue=spec.queue or settings.default.queue)
    return replace(spec, account=account, qos=qos_of(spec, settings), time_limit_s=time_limit(spec, settings).seconds)


def _spec(job: TraceJob, nodes: Sequence[NodeView]) -> JobSpec:
    if job.spec is not None:
        return job.spec
    # Without a queue it goes to that of the settings, which each policy may have in another way.
    return JobSpec(
        job.name or "job",
        request_of(job, nodes),
        _LAUNCH,
        queue=job.queue,
        account=job.account,
        time_limit_s=job.estimate_s,
    )


_LAUNCH = Launch(("job",), None, None, "", "/")
