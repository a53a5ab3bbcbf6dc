"""The daemon's own checks for `gpusched doctor`: job table, bookings, GPU readings."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from gpusched.access import is_group, user_name
from gpusched.daemon.core import Scheduler
from gpusched.daemon.launch.limits import PERSONAL, isolation
from gpusched.daemon.meters import SLOW_S
from gpusched.daemon.tick import Ticker
from gpusched.engine.linux.as_user import why_unsafe
from gpusched.errors import GpuschedError, NotReady
from gpusched.lifecycle.overuse import unbooked_use_text
from gpusched.model.checks import Check, Finding, failed, passed, warned
from gpusched.model.mentions import mention_job
from gpusched.model.units import format_duration, gpu_label, plural
from gpusched.scheduler import cells
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.invariants import check_invariants
from gpusched.scheduler.limits import quota_problems
from gpusched.scheduler.usage import capacity_of

MOST_COMPARED = 20_000
"""With more active jobs, reading the job table would block the daemon for over a second."""
_MOST_LISTED = 5
_PACE_S = 300.0


def daemon_checks(ticker: Ticker) -> list[Check]:
    scheduler = ticker.scheduler
    found = [
        Check("database", *_table(scheduler)),
        Check("bookings", *_books(scheduler)),
        Check("planner", *_planner(ticker)),
        *(Check(name, *run(scheduler)) for name, run in CHECKS.items()),
    ]
    cluster = scheduler.cluster
    if len([*cluster, *cluster.absent]) > 1 or cluster.head.trouble is not None:
        found.append(Check("nodes", *_nodes(scheduler)))
    if any(queue.power_cap_w is not None for queue in scheduler.settings.queue.values()):
        found.append(Check("power caps", *_power_caps(scheduler)))
    return found


def _power_caps(scheduler: Scheduler) -> Finding:
    troubles = [
        (f"node {node.name}: " if node is not scheduler.head else "") + text
        for node in scheduler.cluster
        if node.reading is not None
        for text in node.reading.power_troubles
    ]
    if troubles:
        return warned("; ".join(troubles), "jobs run without them; limits that a GPU takes: nvidia-smi -q -d POWER")
    return passed("no GPU has refused a power limit")


def broken_promises(scheduler: Scheduler) -> list[str]:
    """One sentence per queue guarantee that the machine cannot hold in its current state."""
    settings = scheduler.settings
    if not settings.queue:
        return []
    layout = ClusterLayout(scheduler.nodes(scheduler.now()), settings)
    found = [*quota_problems(settings, capacity_of(layout)), *cells.cell_problems(settings, layout)]
    return [f"{path}: {text}" for path, text in found]


def _table(scheduler: Scheduler) -> Finding:
    if (lost := scheduler.store.lost()) is not None:
        return failed(lost.message, lost.hint)
    try:
        problem = scheduler.store.check()
    except GpuschedError as error:
        problem = error.message
    if problem is None and scheduler.trouble is None:
        return passed("the job table is sound and writable")
    return failed(
        problem or scheduler.trouble or "",
        "free space on its disk or restore the newest backup; its path: gpusched daemon status",
    )


def _books(scheduler: Scheduler) -> Finding:
    quota_problems = check_invariants(scheduler.snapshot(scheduler.now()), scheduler.settings)
    if not quota_problems:
        return passed("no GPU, core or memory is booked twice")
    return failed("; ".join(quota_problems), "report this with: gpusched debug snapshot > snapshot.json")


def _planner(ticker: Ticker) -> Finding:
    try:
        found = ticker.check_planner(MOST_COMPARED)
    except NotReady as error:
        return warned(f"not compared with the job table: {error.message}", error.hint)
    if found:
        more = f"; and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
        hint = "its state was rebuilt from the job table; report this with: gpusched debug snapshot > snapshot.json"
        return failed("; ".join(found[:_MOST_LISTED]) + more, hint)
    if len(ticker.scheduler.state.jobs) > MOST_COMPARED:
        return passed("too many jobs to compare the daemon's state with the job table; it plans from its own state")
    return passed("its state agrees with the job table")


def _isolation(scheduler: Scheduler) -> Finding:
    found = scheduler.head.limiter.isolation
    facts = isolation(found, scheduler.settings.isolation)
    kinds = ("memory", "tasks", "cpus", "gpus")
    text = ", ".join(f"{kind} {facts[kind]}" for kind in kinds) + f"; launcher: {found.launcher}"
    if found is PERSONAL:
        return passed("a personal daemon enforces no limits: requests are only booked")
    if facts["why_not"] is not None:
        hint = "until this is fixed, requests are booked but not enforced; see docs/howto/isolation.md"
        return warned(f"{text}: {facts['why_not']}", hint)
    if scheduler.head.reading is not None and scheduler.head.reading.gpus and not facts["guard"]:
        hint = "if they should not: sudo gpusched system guard on"
        return warned(f"{text}; login sessions can open every GPU", hint)
    return passed(text)


def _settings(scheduler: Scheduler) -> Finding:
    problem = scheduler.parts.settings_problem()
    if problem is None:
        return passed("the config file as last loaded is in force")
    return failed(*problem)


def _containers(scheduler: Scheduler) -> Finding:
    host, rules = scheduler.containers, scheduler.settings.containers
    if host is None or rules.runtime == "none":
        return passed("switched off: jobs with --image are refused")
    # Each user's ids are looked at when they submit; for other users only what concerns all.
    trouble = host.why_not(rules, user_name(os.geteuid()), os.geteuid())
    if trouble is None:
        no_gpus = host.why_no_gpus(rules)
        return (
            passed(host.describe(rules))
            if no_gpus is None
            else warned(f"jobs with --image get no GPU: {no_gpus[0]}", no_gpus[1])
        )
    if rules.runtime == "auto" and not host.is_installed(rules):
        return passed(f"jobs with --image are refused: {trouble[0]}")
    return warned(f"jobs with --image are refused: {trouble[0]}", trouble[1])


def _access(scheduler: Scheduler) -> Finding:
    group = scheduler.settings.access.admin_group
    if group is None:
        return passed("no admin group is set; only root and the owner of the scheduler are admins")
    if not is_group(group):
        hint = f"create it with: sudo groupadd {group}, or correct [access] admin_group and run: gctl reload"
        return warned(f"group {group} does not exist, so only root is an admin", hint)
    return passed(f"members of group {group} are admins")


def _checkpoints(scheduler: Scheduler) -> Finding:
    folder = scheduler.settings.life.checkpoint_dir or scheduler.head.site.checkpoints
    try:
        why_not = why_unsafe(folder, for_others=scheduler.head.limiter.isolation is not PERSONAL)
    except FileNotFoundError:
        why_not = None
    except OSError as error:
        why_not = f"{folder}: {error.strerror}"
    if why_not is None:
        return passed(f"jobs get their checkpoint directories in {folder}")
    hint = f"give it and its parent directories to root: chown root {folder} && chmod 711 {folder}"
    return failed(f"jobs get no GPUSCHED_CHECKPOINT_DIR: {why_not}", hint)


def _gpus(scheduler: Scheduler) -> Finding:
    reading = scheduler.head.reading
    if reading is None:
        return failed("the GPUs have not been read yet", "try again in a few seconds")
    if reading.error:
        return failed(reading.error, "GPU jobs stay pending until it works again; other jobs run")
    if not reading.gpus and (reading.source in ("nvml", "amdsmi") or reading.notes):
        text = "; ".join(reading.notes) or "the driver lists no GPU"
        hint = "compare with nvidia-smi; until then, jobs that request a GPU are rejected"
        return warned(text, hint)
    if not reading.gpus:
        return passed("no GPU on this machine; to try simulated GPUs set GPUSCHED_FAKE_GPUS=4x24GiB")
    # A GPU divided by MIG is not bookable on purpose: its instances are the GPUs.
    views = scheduler.head.tracker.views(scheduler.now())
    instances = Counter(view.mig_parent for view in views)
    broken = [view for view in views if view.why_not and not (view.is_divided and instances[view.uuid])]
    if broken:
        text = "; ".join(f"GPU {gpu_label(view.index)}: {view.why_not}" for view in broken)
        return failed(text, "see ginfo; a repaired GPU comes back by itself or with: gctl undrain GPU")
    if reading.source == "static":
        return passed(f"{plural(len(reading.gpus), 'GPU')} declared; use outside of jobs cannot be seen")
    return passed(f"{plural(len(reading.gpus), 'GPU')} answered ({reading.source})")


def _gpu_faults(scheduler: Scheduler) -> Finding:
    reading = scheduler.head.reading
    if reading is not None and reading.log_trouble:
        hint = "to see faults from before the daemon started, run it as root or set kernel.dmesg_restrict=0"
        return warned(reading.log_trouble, hint)
    if reading is not None and reading.source == "static":
        return passed("not monitored: the GPUs are declared in [gpu] static, and nothing of them is read")
    return passed("monitored through the driver and the kernel log")


def _unbooked_use(scheduler: Scheduler) -> Finding:
    found = scheduler.intruders.unbooked()
    if not found:
        return passed("every job uses only the GPUs it booked")
    jobs = {one.run: scheduler.state.open_runs.get(one.run) for one in found if one.run is not None}
    texts = []
    for one in found:
        name = scheduler.answers.name_of_run(one.run or "")
        run = jobs[one.run or ""]
        user = "" if run is None else scheduler.state.jobs[run.job_id].user
        texts.append(f"{mention_job(name, user)} {unbooked_use_text(one)}")
    hint = "the owner has been notified; to end such a job: gcancel ID"
    if scheduler.settings.gpu.astray != "end":
        hint += ', or let the daemon do it: [gpu] astray = "end"'
    return warned("; ".join(texts), hint)


def _slurm_commands(scheduler: Scheduler) -> Finding:
    if not scheduler.settings.slurm.commands_in_jobs:
        return passed("not in the PATH of jobs: [slurm] commands_in_jobs = false")
    problem = scheduler.parts.commands_problem()
    if problem is None:
        return passed(f"at the end of every job's PATH: {scheduler.head.site.commands}")
    hint = "correct this and restart the daemon, or set [slurm] commands_in_jobs = false"
    return warned(f"jobs have no srun, scontrol or sbatch: {problem}", hint)


def _queues(scheduler: Scheduler) -> Finding:
    broken = broken_promises(scheduler)
    if broken:
        hint = "lower the guarantees in the config file and run: gctl reload; or bring back the missing GPUs, see ginfo"
        return failed("; ".join(broken), hint)
    return passed("the machine covers every guarantee")


def _plugins(scheduler: Scheduler) -> Finding:
    plugins = scheduler.plugins
    if plugins.troubles:
        return failed(plugins.troubles[-1], "fix the plug-in and restart the daemon; its log has the traceback")
    names = ", ".join(plugins.names)
    return passed(f"loaded: {names}" if names else "none")


def _nodes(scheduler: Scheduler) -> Finding:
    cluster = scheduler.cluster
    down = [outage.why for _, outage in sorted(scheduler.outages.by_node.items())]
    if down:
        hint = "their jobs keep their state and GPUs; if one is off for good: gctl down NODE"
        return failed("; ".join(down), hint)
    troubles = [node.trouble for node in cluster if node.trouble is not None]
    if troubles:
        return failed("; ".join(troubles), "free space on that disk; running jobs continue, and their results are kept")
    notes = [node.clock_note for node in cluster if node.clock_note is not None]
    if notes:
        return warned("; ".join(notes), "jobs are not affected; times of their logs are")
    return passed(f"all {len([*cluster])} nodes answer, and their clocks agree")


def _alerts(scheduler: Scheduler) -> Finding:
    waiting = sum(map(len, scheduler.alerts.waiting().values()))
    trouble = scheduler.alerts.trouble()
    if trouble is None:
        return passed(f"{waiting} to be sent" if waiting else "none to be sent")
    text = f"{trouble}; {waiting} to be sent" if waiting else trouble
    return warned(text, "jobs are not affected; fix the target and try it with: gpusched notify test")


def _pace(scheduler: Scheduler) -> Finding:
    recent = [one for one in scheduler.meters.slow_ticks if scheduler.now() - one.at <= _PACE_S]
    if not recent:
        return passed(f"no tick of the last {_PACE_S / 60:g} minutes took {SLOW_S:g} s or longer")
    slowest = max(recent, key=lambda one: one.seconds)
    is_disk = slowest.commit_s > slowest.seconds / 2
    return failed(
        f"a tick took {slowest.seconds:.1f} s within the last {_PACE_S / 60:g} minutes, "
        f"{slowest.commit_s:.1f} s of it to write the job table",
        "check for a slow disk" if is_disk else "see the load of the machine with: uptime",
    )


def _steps(scheduler: Scheduler) -> Finding:
    failing = failing_steps(scheduler)
    if failing:
        hint = "jobs go on, and what failed is tried again by itself; the traceback is in the daemon's log: report it"
        return failed("; ".join(failing), hint)
    count = scheduler.failures.counts.total()
    return passed(f"all working; {count} failed earlier and recovered" if count else "all working")


def failing_steps(scheduler: Scheduler) -> list[str]:
    """One sentence per step of the daemon whose last run failed."""
    found = []
    for failure in scheduler.failures.failing:
        long = format_duration(scheduler.now() - failure.since_at)
        found.append(f"{failure.step} failed {plural(failure.count, 'time')} in {long}: {failure.error}")
    return found


def _tariff(scheduler: Scheduler) -> Finding:
    problem, tariff = scheduler.tariff_problem, scheduler.tariff
    if problem is not None:
        return warned(f"the prices of energy are out of date: {problem.message}", problem.hint or "")
    if tariff is None or not (tariff.has_price or tariff.has_grams):
        return passed("none configured; energy is shown without money and emissions")
    if tariff.end_at is not None and tariff.end_at < scheduler.now():
        return warned(
            "the last row of [energy] tariff is over; the fixed values apply",
            f"add rows to {scheduler.settings.energy.tariff}",
        )
    rows = plural(len(tariff.rows), "row")
    return passed(f"{rows} of prices and emissions" if tariff.rows else "fixed prices and emissions")


CHECKS: dict[str, Callable[[Scheduler], Finding]] = {
    "gpus": _gpus,
    "gpu faults": _gpu_faults,
    "unbooked use": _unbooked_use,
    "isolation": _isolation,
    "settings": _settings,
    "access": _access,
    "containers": _containers,
    "checkpoints": _checkpoints,
    "slurm commands": _slurm_commands,
    "queues": _queues,
    "tariff": _tariff,
    "plugins": _plugins,
    "alerts": _alerts,
    "pace": _pace,
    "daemon steps": _steps,
}
"""Further checks in the order of the report."""
