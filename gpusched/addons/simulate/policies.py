"""Policies by name: those of the literature, gpusched's presets, and the current settings; and the jobs they admit.

fcfs, sjf+easy, ...   ORDER[+BACKFILL][/PLACEMENT], settings under which schedules are those of the literature
default               gpusched's defaults, or the settings of a file
fair, throughput, ... gpusched's defaults under another preset
present               the settings that this machine's daemon reads

For jobs of this machine's own, and in a snapshot of it, policies extend its settings: its queues, accounts, QOS,
budgets and licences stay, and only order, backfill and placement change. `default` with a file stays that file.

Under the rules `swf` (rigid jobs on identical processors) and `gang` (whole GPUs on nodes with 8 each: whole nodes,
and one more for the remainder) every start is determined, so two simulators can be compared start for start.

`leave_out_what_cannot_fit` counts and names the jobs that would never start in any state of the machines, or under some
policy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from gpusched import paths
from gpusched.addons.simulate import planner_run
from gpusched.addons.simulate.auto_preset import read_state
from gpusched.addons.simulate.trace import BadTrace, Trace, TraceJob, request_of
from gpusched.config import load_settings
from gpusched.config.load import CONFIG_VARIABLE
from gpusched.errors import NotFound, UsageError
from gpusched.model.cluster import NodeView
from gpusched.model.job import JobSpec, Launch
from gpusched.model.planner_settings import AUTO, PlacementSettings, PrioritySettings
from gpusched.model.presets import PRESETS, preset, under_preset
from gpusched.model.settings import Settings
from gpusched.model.units import plural
from gpusched.model.value import Value, replace
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
from gpusched.scheduler.who_preempts import may_preempt

DEFAULT, PRESENT = "default", "present"


class Policy(Value):
    name: str
    settings: Settings
    orders_by_run_time: bool = False
    """Gives the policy the run time of each job."""
    predict: str | None = None
    """Prediction method, a name of `planner_run.PREDICTIONS`; None: no predictions."""


def policies_of(
    names: Sequence[str],
    config: Path | None = None,
    predict: str | None = None,
    *,
    is_exact: bool = False,
    site: Settings | None = None,
) -> list[Policy]:
    """Policies by name, `NAME[:PREDICTION]`; `config` is the file of `default`.

    Args:
        predict: prediction method of policies without one in their name.
        is_exact: estimates are the run times, so that settings need no predictions.
        site: settings that policies extend.

    Raises: UsageError for an unknown name; SettingsError for invalid settings.
    """
    if config is not None and DEFAULT not in [name.partition(":")[0] for name in names]:
        raise UsageError(
            f"no policy uses {config}: it defines the policy default", f"--policy {DEFAULT},{','.join(names)}"
        )
    return [_policy_of(name, config, predict, site, is_exact=is_exact) for name in names]


def _policy_of(text: str, config: Path | None, predict: str | None, site: Settings | None, *, is_exact: bool) -> Policy:
    name, _, own = text.partition(":")
    found = _named(name, config)
    if site is not None and name != PRESENT and (name != DEFAULT or config is None):
        settings = under(site, name)
        is_ours = name == DEFAULT or name in PRESETS
        found = _of_daemon(name, settings) if is_ours else replace(found, settings=settings)
    found = replace(found, name=text, predict=own or predict or (None if is_exact else found.predict))
    planner_run.check_prediction(
        found.predict, found.settings.priority.order, orders_by_run_time=found.orders_by_run_time
    )
    return found


def _named(name: str, config: Path | None) -> Policy:
    if name == DEFAULT:
        if config is None:
            return _of_daemon(name, Settings())
        if not config.is_file():
            raise NotFound(f"there is no config file {config}", "see what is in force: gpusched config show")
        return _of_daemon(name, load_settings(None, {CONFIG_VARIABLE: str(config)}).settings)
    if name == PRESENT:
        chosen = read_state(paths.preset_file()).in_force
        return _of_daemon(name, load_settings(paths.config_file(), os.environ, chosen=chosen).settings)
    if name in PRESETS:
        return _of_daemon(name, Settings(priority=preset(name)))
    if name == AUTO:
        raise UsageError(
            f"the preset {AUTO} selects one of the other presets and is not a policy itself",
            f"--policy {','.join(PRESETS)}",
        )
    rules = rules_of(name)
    return Policy(name, rules.settings(), rules.orders_by_run_time)


def _of_daemon(name: str, settings: Settings) -> Policy:
    """A policy with the daemon's predictions under these settings."""
    return Policy(
        name, settings, predict=planner_run.OWN_PREDICTION if settings.priority.predict else planner_run.NO_PREDICTION
    )


def under(settings: Settings, name: str) -> Settings:
    """These settings with order, backfill and placement by a name of the literature, under a preset, or `default`.

    Other settings stay. Raises: UsageError for an unknown name.
    """
    if name in PRESETS:
        return under_preset(settings, name)
    if name == DEFAULT:
        return replace(settings, priority=PrioritySettings(), placement=PlacementSettings())
    made = rules_of(name).settings()
    priority = replace(settings.priority, **{one: getattr(made.priority, one) for one in _RULED})
    return replace(settings, priority=priority, placement=replace(settings.placement, strategy=made.placement.strategy))


_RULED = (
    *("order", "backfill", "backfill_depth", "backfill_order", "backfill_elsewhere", "backfill_by"),
    *("max_wait_s", "fence_s"),
)
"""Settings of [priority] that `PolicyRules` determines."""


def refuse_fast(policy: Policy) -> None:
    """Raises: UsageError for settings that need more than the planner."""
    settings = policy.settings
    why = None
    if may_preempt(settings):
        why = "runs can be preempted"
    else:
        tables = (("queues", settings.queue), ("QOS", settings.qos), ("accounts", settings.account))
        named = [f"{what} ({', '.join(sorted(table))})" for what, table in tables if table]
        if named:
            why = f"{' and '.join(named)} decide who may submit what"
    if why is not None:
        raise UsageError(
            f"under the policy {policy.name} {why}, which the fast simulation cannot do",
            "simulate the whole daemon: --tick",
        )


ORDERS = {"fcfs": "fifo", "sjf": "sjf", "saf": "saf", "spf": "spf", "sjf_exact": "spf"}
"""Names in the literature, and ours."""

BACKFILLS = {"none": (False, 1), "greedy": (True, 0), "easy": (True, 1), "sjbf": (True, 1), "cons": (True, 1_000_000)}
"""Whether jobs may pass the first blocked one, and the number of reservations; with sjbf the shortest first."""

PLACEMENTS = {"best": "pack", "first": "first", "spread": "spread"}

EXACT = {
    "swf": (("fcfs", "sjf", "saf", "sjf_exact"), ("none", "greedy", "easy", "cons"), ("best",)),
    "gang": (("fcfs", "sjf"), ("none", "greedy", "easy"), ("best", "first", "spread")),
}
"""Orders, backfills and placements with fully determined schedules."""


@dataclass(frozen=True, slots=True)
class PolicyRules:
    """One policy by the names of its parts."""

    order: str = "fcfs"
    backfill: str = "none"
    placement: str = "best"

    @property
    def orders_by_run_time(self) -> bool:
        """Whether the order depends on exact run times."""
        return self.order == "sjf_exact"

    def settings(self) -> Settings:
        """Settings that make the daemon's policy follow these rules."""
        is_on, depth = BACKFILLS[self.backfill]
        return Settings(
            priority=PrioritySettings(
                order=ORDERS[self.order],
                backfill=is_on,
                backfill_depth=depth,
                backfill_order="shortest" if self.backfill == "sjbf" else "line",
                backfill_elsewhere=False,
                backfill_by="prediction",
                max_wait_s=inf,
                fence_s=inf,
            ),
            placement=PlacementSettings(strategy=PLACEMENTS[self.placement]),
        )


def rules_of(text: str) -> PolicyRules:
    """Parse the name of a policy. Raises: UsageError for an unknown part, listing the known ones."""
    rest, _, placement = text.partition("/")
    order, _, backfill = rest.partition("+")
    rules = PolicyRules(order, backfill or "none", placement or "best")
    for what, name, known in (
        ("order", rules.order, ORDERS),
        ("backfill", rules.backfill, BACKFILLS),
        ("placement", rules.placement, PLACEMENTS),
    ):
        if name not in known:
            raise UsageError(f"{text!r} names no known {what}: {', '.join(known)}", "--policy fcfs+easy")
    return rules


def check_exact(kind: str, policies: Iterable[str], jobs: Sequence[TraceJob]) -> None:
    """Check that the rules of this kind, `swf` or `gang`, determine a unique schedule for these policies and jobs.

    Raises: UsageError for another kind, a policy or a request that the rules do not cover, and jobs of the other kind.
    """
    if kind not in EXACT:
        raise UsageError(f"{kind!r} is not a known set of rules: {', '.join(EXACT)}", "--rules swf")
    for policy in policies:
        rules = rules_of(policy)
        parts = rules.order, rules.backfill, rules.placement
        for name, known in zip(parts, EXACT[kind], strict=True):
            if name not in known:
                raise UsageError(
                    f"the rules {kind} do not define {name!r} of {policy}: {', '.join(known)}",
                    "--policy fcfs+easy",
                )
    wants_gpus = kind == "gang"
    other = next((job.id for job in jobs if bool(job.gpus) is not wants_gpus), None)
    if other is not None:
        what, better = ("no GPU", "swf") if wants_gpus else ("GPUs", "gang")
        raise UsageError(
            f"job {other} asks for {what}, which the rules {kind} do not allow", f"--rules {better}, or leave it out"
        )
    more = next((job.id for job in jobs if job.cpus or job.mem_mib or job.gpu_fraction is not None), None)
    if more is not None:
        raise UsageError(
            f"job {more} asks for cores, memory or a fraction of a GPU, which the rules {kind} do not cover",
            "leave --rules out",
        )


Why = tuple[str, str]
"""Kind of reason, and the reason."""

_NOBODY = Tally()
_MOST_REASONS = 5


def leave_out_what_cannot_fit(
    trace: Trace, nodes: Sequence[NodeView], policies: Sequence[Policy], *, is_admitted: bool
) -> None:
    """Remove jobs from the trace that some policy could never run, so that all policies schedule the same jobs.

    Args: is_admitted: whether queues, accounts and QOS apply.
    Raises: BadTrace if no job remains.
    """
    known: dict[object, Why | None] = {}
    kept, left_out = [], []
    for job in trace.jobs:
        # Most jobs equal another one and reuse its result.
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
    _keep(trace, kept)


def leave_out(trace: Trace, jobs: Sequence[tuple[TraceJob, str]]) -> None:
    """Remove these jobs, which some policy never starts, each with the reason. Raises: BadTrace if no job remains."""
    _tell(trace, [(job, ("never starts", why)) for job, why in jobs])
    gone = {job for job, _ in jobs}
    _keep(trace, [job for job in trace.jobs if job not in gone])


def _keep(trace: Trace, jobs: list[TraceJob]) -> None:
    if not jobs:
        text = "; ".join(f"{reason}: {one}" for reason, one in trace.dropped.items())
        raise BadTrace(f"no job of {trace.name} can be replayed ({text})", "give a larger cluster, or other settings")
    trace.jobs = jobs


def _tell(trace: Trace, left_out: Sequence[tuple[TraceJob, Why]]) -> None:
    """Count and name them by reason; among many reasons of a kind, report the first for all."""
    texts: dict[str, dict[str, None]] = {}
    for _, (kind, text) in left_out:
        texts.setdefault(kind, {})[text] = None
    for job, (kind, text) in left_out:
        listed = texts[kind]
        if len(listed) > _MOST_REASONS:
            text = f"the first of {len(listed)} reasons: {next(iter(listed))}"
        trace.drop(f"{kind}, {text}" if text else kind, job.id)


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
    # Without a queue it uses the default queue, which may differ between policies.
    return JobSpec(
        job.name or "job",
        request_of(job, nodes),
        _LAUNCH,
        queue=job.queue,
        account=job.account,
        time_limit_s=job.estimate_s,
    )


_LAUNCH = Launch(("job",), None, None, "", "/")
