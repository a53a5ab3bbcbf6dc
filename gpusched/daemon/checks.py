"""What only the daemon can check for `gpusched doctor`: its table, its books, its readings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gpusched.access import is_group
from gpusched.daemon.launch.limits import PERSONAL, isolation
from gpusched.daemon.tick import Scheduler
from gpusched.engine.users import why_unsafe
from gpusched.errors import GpuschedError, NotReady
from gpusched.lifecycle.intruders import in_words
from gpusched.model.units import format_duration, gpu_label, plural
from gpusched.scheduler import cells
from gpusched.scheduler.draft import Layout
from gpusched.scheduler.invariants import check_invariants
from gpusched.scheduler.sharing.quota_problems import problems
from gpusched.scheduler.sharing.usage import capacity_of

MOST_COMPARED = 20_000
"""Active jobs with which the job table is still read for a check, within a second: nothing else is done meanwhile."""
_MOST_TOLD = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report."""

    check: str
    ok: bool
    text: str
    hint: str = ""
    level: str = ""
    """`warn` for what costs something and breaks nothing."""


def daemon_checks(scheduler: Scheduler) -> list[Check]:
    """All checks, each with what to do when it fails."""
    return [
        _table(scheduler),
        _books(scheduler),
        _planner(scheduler),
        _gpus(scheduler),
        _gpu_faults(scheduler),
        _unbooked_use(scheduler),
        _isolation(scheduler),
        _settings(scheduler),
        _access(scheduler),
        _checkpoints(scheduler),
        _queues(scheduler),
        _plugins(scheduler),
        _alerts(scheduler),
        _pace(scheduler),
        _steps(scheduler),
    ]


def broken_promises(scheduler: Scheduler) -> list[str]:
    """What the queues are promised and the machines, as they are, cannot hold: a sentence for each."""
    settings = scheduler.settings
    if not settings.queue:
        return []
    layout = Layout(scheduler.nodes(scheduler.now()), settings)
    found = [*problems(settings, capacity_of(layout)), *cells.problems(settings, layout)]
    return [f"{path}: {text}" for path, text in found]


def _table(scheduler: Scheduler) -> Check:
    if (lost := scheduler.store.lost()) is not None:
        return Check("database", False, lost.message, lost.hint)
    try:
        problem = scheduler.store.check()
    except GpuschedError as error:
        problem = error.message
    if problem is None and scheduler.trouble is None:
        return Check("database", True, "the job table is sound and writable")
    return Check(
        "database",
        False,
        problem or scheduler.trouble or "",
        "free space on its disk, or restore the newest backup; gpusched daemon status shows where it lies",
    )


def _books(scheduler: Scheduler) -> Check:
    problems = check_invariants(scheduler.snapshot(scheduler.now()), scheduler.settings)
    if not problems:
        return Check("bookings", True, "no GPU, core or memory is promised twice")
    return Check("bookings", False, "; ".join(problems), "report this with: gpusched debug snapshot > snapshot.json")


def _planner(scheduler: Scheduler) -> Check:
    try:
        found = scheduler.check_planner(MOST_COMPARED)
    except NotReady as error:
        return Check("planner", True, f"not compared with the job table: {error.message}", error.hint, "warn")
    if found:
        more = f"; and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
        hint = (
            "it goes on with all rebuilt from the job table; report this with: gpusched debug snapshot > snapshot.json"
        )
        return Check("planner", False, "; ".join(found[:_MOST_TOLD]) + more, hint)
    if len(scheduler.world.jobs) > MOST_COMPARED:
        return Check(
            "planner",
            True,
            "plans by the daemon's memory; that is compared with the job table while there are few jobs",
        )
    return Check("planner", True, "plans by what the job table says")


def _isolation(scheduler: Scheduler) -> Check:
    found = scheduler.cager.isolation
    facts = isolation(found, scheduler.settings.isolation)
    kinds = ("memory", "tasks", "cpus", "gpus")
    text = ", ".join(f"{kind} {facts[kind]}" for kind in kinds) + f"; runs are started by {found.launcher}"
    if found is PERSONAL:
        return Check("isolation", True, "runs are kept to nothing but what they book, as always by a personal daemon")
    if facts["why_not"] is not None:
        hint = "until then what runs ask for is only booked; see docs/howto/isolation.md"
        return Check("isolation", True, f"{text}: {facts['why_not']}", hint, "warn")
    if scheduler.reading is not None and scheduler.reading.gpus and not facts["guard"]:
        hint = "keep logins off the GPUs with: sudo gpusched system guard on   (or leave it, if they may use them)"
        return Check("isolation", True, f"{text}; logins may open every GPU", hint, "warn")
    return Check("isolation", True, text)


def _settings(scheduler: Scheduler) -> Check:
    problem = scheduler.settings_problem()
    if problem is None:
        return Check("settings", True, "those of the config file, as it was read last")
    return Check("settings", False, *problem)


def _access(scheduler: Scheduler) -> Check:
    group = scheduler.settings.access.admin_group
    if group is None:
        return Check("access", True, "no admin group: the owner of the scheduler and root may do everything")
    if not is_group(group):
        hint = f"make it with: sudo groupadd {group}, or mend [access] admin_group, then: gctl reload"
        return Check("access", True, f"there is no group {group}, so nobody but root is an admin", hint, "warn")
    return Check("access", True, f"members of group {group} are admins")


def _checkpoints(scheduler: Scheduler) -> Check:
    folder = scheduler.settings.life.checkpoint_dir or scheduler.site.checkpoints
    try:
        why_not = why_unsafe(folder, for_others=scheduler.cager.isolation is not PERSONAL)
    except FileNotFoundError:
        why_not = None
    except OSError as error:
        why_not = f"{folder}: {error.strerror}"
    if why_not is None:
        return Check("checkpoints", True, f"folders of jobs are made in {folder}")
    hint = f"make it root's: chown root {folder} && chmod 711 {folder}, and so what leads to it"
    return Check("checkpoints", False, f"jobs get no GPUSCHED_CHECKPOINT_DIR: {why_not}", hint)


def _gpus(scheduler: Scheduler) -> Check:
    reading = scheduler.reading
    if reading is None:
        return Check("gpus", False, "no reading of the GPUs has arrived yet", "try again in a few seconds")
    if reading.error:
        return Check("gpus", False, reading.error, "GPU jobs wait until it is mended; others run")
    if not reading.gpus and (reading.source == "nvml" or reading.notes):
        text = "; ".join(reading.notes) or "the driver lists no GPU"
        hint = "see what nvidia-smi says; a job that asks for a GPU is refused meanwhile"
        return Check("gpus", True, text, hint, "warn")
    if not reading.gpus:
        return Check("gpus", True, "no GPU on this machine; set GPUSCHED_FAKE_GPUS=4x24GiB to try simulated ones")
    # A card that MIG divides is out of the pool as it should be: its instances are GPUs.
    views = scheduler.tracker.views(scheduler.now())
    instances = Counter(view.mig_parent for view in views)
    broken = [view for view in views if view.why_not and not (view.is_divided and instances[view.uuid])]
    if broken:
        text = "; ".join(f"GPU {gpu_label(view.index)}: {view.why_not}" for view in broken)
        return Check("gpus", False, text, "see ginfo; a mended card returns by itself or with: gctl undrain GPU")
    return Check("gpus", True, f"{plural(len(reading.gpus), 'GPU')} answered ({reading.source})")


def _gpu_faults(scheduler: Scheduler) -> Check:
    reading = scheduler.reading
    if reading is not None and reading.log_trouble:
        hint = "only a daemon that root runs, or kernel.dmesg_restrict=0, brings what happened before it was started"
        return Check("gpu faults", True, reading.log_trouble, hint, "warn")
    return Check("gpu faults", True, "heard from the driver and read from the kernel's log, where there are GPUs")


def _unbooked_use(scheduler: Scheduler) -> Check:
    found = scheduler.intruders.unbooked()
    if not found:
        return Check("unbooked use", True, "every job keeps to the GPUs that it booked")
    jobs = {one.run: scheduler.world.open_runs.get(one.run) for one in found if one.run is not None}
    texts = []
    for one in found:
        name = scheduler.name_of_run(one.run or "")
        run = jobs[one.run or ""]
        user = "" if run is None else f" of {scheduler.world.jobs[run.job_id].user}"
        texts.append(f"job {name}{user} {in_words(one)}")
    hint = "its owner is told; end such a job with gcancel"
    if scheduler.settings.gpu.astray != "end":
        hint += ', or have the daemon do so: [gpu] astray = "end"'
    return Check("unbooked use", True, "; ".join(texts), hint, "warn")


def _queues(scheduler: Scheduler) -> Check:
    broken = broken_promises(scheduler)
    if broken:
        hint = "promise less in the config file, then: gctl reload; or mend what is missing, see ginfo"
        return Check("queues", False, "; ".join(broken), hint)
    return Check("queues", True, "what the queues are promised is there")


def _plugins(scheduler: Scheduler) -> Check:
    plugins = scheduler.plugins
    if plugins.troubles:
        return Check("plugins", False, plugins.troubles[-1], "mend the plug-in, then restart the daemon; see its log")
    names = ", ".join(plugins.names)
    return Check("plugins", True, f"loaded: {names}" if names else "none")


def _alerts(scheduler: Scheduler) -> Check:
    waiting = sum(map(len, scheduler.alerts.waiting().values()))
    trouble = scheduler.alerts.trouble()
    if trouble is None:
        return Check("alerts", True, f"{waiting} wait to be told" if waiting else "none waits to be told")
    text = f"{trouble}; {waiting} wait to be told" if waiting else trouble
    return Check("alerts", True, text, "jobs go on; mend the target, then try it with: gpusched notify test", "warn")


def _pace(scheduler: Scheduler) -> Check:
    slow = sorted(scheduler.recent_tick_s)[-1:] or [0.0]
    text = f"slowest of the last {len(scheduler.recent_tick_s)} ticks: {slow[0] * 1e3:.1f} ms"
    return Check("pace", slow[0] < 1.0, text, "look for a slow disk or an overloaded machine")


def _steps(scheduler: Scheduler) -> Check:
    failing = failing_steps(scheduler)
    if failing:
        return Check(
            "daemon steps",
            False,
            "; ".join(failing),
            "see its log, which says where, and report it; jobs go on meanwhile",
        )
    count = scheduler.failures.counts.total()
    return Check("daemon steps", True, f"all work; {count} failed so far and recovered" if count else "all work")


def failing_steps(scheduler: Scheduler) -> list[str]:
    """A sentence for each of the daemon's own steps that failed when it was last run."""
    found = []
    for failure in scheduler.failures.failing:
        long = format_duration(scheduler.now() - failure.since_at)
        found.append(f"{failure.step} failed {plural(failure.count, 'time')} in {long}: {failure.error}")
    return found
