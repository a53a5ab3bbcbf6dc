"""Settings that are valid and have no effect, because another one that they need is missing.

Only what the file says is judged, and a value that equals the default only where whoever states it expects something
of it: a file that lists all defaults is not a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from gpusched import entry_points
from gpusched.config.load import Loaded
from gpusched.config.schema import SETTINGS, value_of
from gpusched.model.planner_settings import AUTO
from gpusched.model.settings import Settings
from gpusched.scheduler.who_preempts import lends, may_preempt, tiers_that_only_order

Finding = tuple[str, str, str]
"""Path of the setting, a sentence, and a remedy."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings of one section that need another one."""

    section: str
    keys: tuple[str, ...]
    has_effect: Callable[[Settings], bool]
    because: str
    remedy: str


def _orders(settings: Settings) -> set[str]:
    """Orders in use; all where the daemon chooses."""
    if settings.priority.preset == AUTO and "order" not in settings.stated:
        return {"response_ratio", "multifactor"}
    return {settings.priority.order, *(queue.order for queue in settings.queue.values() if queue.order is not None)}


def _has_budgets(settings: Settings) -> bool:
    return any((one.gpu_hours, one.gpu_hours_per_user) != (None, None) for one in settings.account.values())


def _has_price(settings: Settings) -> bool:
    energy = settings.energy
    return (energy.price_per_kwh, energy.g_per_kwh, energy.tariff) != (None, None, None)


_OF_SUMS = ("weight_age", "max_age_s", "weight_short", "weight_whole", "weight_fit", "weight_fairshare")
_OF_URGENCY = ("weight_size", "weight_deadline")
_OF_ANY_WEIGHT = ("weight_nice", "weight_queue", "weight_qos")
_WEIGHING = frozenset({"multifactor", "hybrid", "response_ratio", "priority"})
_SET_ORDER = 'set order = "multifactor" in [priority], or leave it out'

RULES = (
    Rule(
        "preempt",
        ("min_run_s", "reclaim"),
        lambda settings: settings.preempt.mode != "off",
        'mode = "off" preempts no run',
        'set mode = "requeue" in [preempt], or leave it out',
    ),
    Rule(
        "idle",
        ("then", "nice", "lower_after_s", "then_after_s", "utilisation", "window_s", "cpu_cores", "notice_s"),
        lambda settings: settings.idle.after_s > 0,
        "after_s = 0 marks no run as idle",
        "set after_s = 1800 in [idle], or leave it out",
    ),
    Rule(
        "idle",
        ("then_after_s", "cpu_cores", "notice_s"),
        lambda settings: settings.idle.then != "off" or not settings.idle.after_s,
        'then = "off" ends no idle run',
        'set then = "requeue" in [idle], or leave it out',
    ),
    Rule(
        "idle",
        ("lower_after_s",),
        lambda settings: settings.idle.nice > 0 or not settings.idle.after_s,
        "nice = 0 lowers no job",
        "set nice = 500 in [idle], or leave it out",
    ),
    Rule(
        "gpu",
        ("vram_over_grace_s",),
        lambda settings: settings.gpu.vram_over == "kill" or settings.gpu.astray == "end",
        'vram_over = "{gpu.vram_over}" and astray = "tell" end no run',
        'set vram_over = "kill" or astray = "end" in [gpu], or leave it out',
    ),
    Rule(
        "gpu",
        ("static_variable", "static_device"),
        lambda settings: settings.gpu.static is not None,
        "no static devices are declared",
        'set static = "2xnpu:16GiB" in [gpu], or leave it out',
    ),
    Rule(
        "gpu",
        ("static",),
        lambda settings: settings.gpu.source in (AUTO, "static"),
        'source = "{gpu.source}" reads other devices',
        'set source = "static" in [gpu], or leave it out',
    ),
    Rule(
        "gpu",
        ("fake",),
        lambda settings: settings.gpu.source in (AUTO, "simulated"),
        'source = "{gpu.source}" reads other devices',
        'set source = "simulated" in [gpu], or leave it out',
    ),
    Rule(
        "foreign",
        (
            *("message_after_s", "message_every_s", "only_when_wanted"),
            *("kill_grace_s", "exempt_users", "exempt_queues", "exempt_commands"),
        ),
        lambda settings: bool(settings.foreign.message),
        "message = [] alerts no owner",
        "set message = ['write', 'mail'] in [foreign], or leave it out",
    ),
    Rule(
        "foreign",
        ("kill_grace_s",),
        lambda settings: settings.foreign.kill_after_s is not None or not settings.foreign.message,
        "no process is killed without kill_after_s",
        "set kill_after_s = 3600 in [foreign], or leave it out",
    ),
    Rule(
        "fault",
        ("early_window_s",),
        lambda settings: settings.fault.early_users > 0,
        "early_users = 0 makes no GPU suspect for early failures",
        "set early_users = 2 in [fault], or leave it out",
    ),
    Rule(
        "prolog",
        ("timeout_s",),
        lambda settings: settings.prolog.path is not None,
        "the site has no prolog",
        "set path in [prolog], or job_timeout_s for the prologs of jobs",
    ),
    Rule(
        "epilog",
        ("timeout_s",),
        lambda settings: settings.epilog.path is not None,
        "the site has no epilog",
        "set path in [epilog], or job_timeout_s for the epilogs of jobs",
    ),
    Rule(
        "energy",
        ("pue", "currency"),
        _has_price,
        "no prices or emissions are known",
        "set price_per_kwh, g_per_kwh or tariff in [energy], or leave it out",
    ),
    Rule(
        "budget",
        ("alert_at",),
        _has_budgets,
        "no account has a budget",
        "set gpu_hours in [account.NAME], or leave it out",
    ),
    Rule(
        "burst",
        ("interval_s", "max_per_interval", "max_jobs"),
        lambda settings: any(queue.burst_after_s is not None for queue in settings.queue.values()),
        "no queue has burst_after_s",
        "set burst_after_s = 3600 in [queue.NAME], or leave it out",
    ),
    Rule(
        "cluster",
        ("connect",),
        lambda settings: bool(settings.cluster.nodes),
        "no other nodes are named",
        'set nodes = ["lab2"] in [cluster], or leave it out',
    ),
    Rule(
        "containers",
        ("allowed", "pull_limit_s"),
        lambda settings: settings.containers.runtime != "none",
        'runtime = "none" refuses all images',
        'set runtime = "auto" in [containers], or leave it out',
    ),
    Rule(
        "isolation",
        ("default_mem_mib", "swap", "oom_kills", "mem", "tasks", "pin_cpus", "devices"),
        lambda settings: settings.isolation.enforce,
        "enforce = false enforces no limit",
        "set enforce = true in [isolation], or leave it out",
    ),
    Rule(
        "priority",
        _OF_SUMS,
        lambda settings: not _orders(settings).isdisjoint({"multifactor", "hybrid"}),
        'order = "{priority.order}" does not weigh it',
        _SET_ORDER,
    ),
    Rule(
        "priority",
        _OF_URGENCY,
        lambda settings: not _orders(settings).isdisjoint({"multifactor", "hybrid", "response_ratio"}),
        'order = "{priority.order}" does not weigh it',
        _SET_ORDER,
    ),
    Rule(
        "priority",
        _OF_ANY_WEIGHT,
        lambda settings: not _orders(settings).isdisjoint(_WEIGHING),
        'order = "{priority.order}" does not weigh it',
        _SET_ORDER,
    ),
    Rule(
        "priority",
        ("favor_small",),
        lambda settings: settings.priority.weight_size > 0,
        "weight_size = 0 counts no size",
        "set weight_size = 1000 in [priority], or leave it out",
    ),
    Rule(
        "priority",
        ("fairshare_step", "reserve_after_s", "reserve_after_runs"),
        lambda settings: "response_ratio" in _orders(settings),
        'order = "{priority.order}" does not use it',
        'set order = "response_ratio" in [priority], or leave it out',
    ),
)


def without_effect(loaded: Loaded) -> Iterator[Finding]:
    """Settings that the file states and that change nothing."""
    settings = loaded.settings
    yield from _preemption(loaded)
    for rule in (*RULES, *chain.from_iterable(entry_points.all_of("without_effect").values())):
        stated = [key for key in rule.keys if _is_changed(loaded, f"{rule.section}.{key}")]
        if stated and not rule.has_effect(settings):
            verb = "has" if len(stated) == 1 else "have"
            because = rule.because
            for known in ("gpu.vram_over", "gpu.source", "priority.order"):
                because = because.replace(f"{{{known}}}", str(value_of(settings, known)))
            text = f"[{rule.section}] {' and '.join(stated)} {verb} no effect: {because}"
            yield f"{rule.section}.{stated[0]}", text, rule.remedy
    yield from _queues(loaded)
    yield from _qoses(loaded)
    yield from _accounts(loaded)


def _is_stated(loaded: Loaded, path: str) -> bool:
    origin = loaded.origin.get(path, "default")
    return origin != "default" and not origin.startswith("preset ")


def _is_changed(loaded: Loaded, path: str) -> bool:
    return _is_stated(loaded, path) and value_of(loaded.settings, path) != SETTINGS[path].default


def _preemption(loaded: Loaded) -> Iterator[Finding]:
    """Preemption that is on, or expected of tiers, and that nobody may use."""
    settings = loaded.settings
    tiers = tiers_that_only_order(settings)
    if tiers is not None and not any(_is_stated(loaded, f"qos.{name}.preempts") for name in settings.qos):
        high, low = tiers
        text = f"the tier of QOS {high} only orders jobs, and preempts none: no QOS lists another in preempts"
        remedy = f'add preempts = ["{low}"] to [qos.{high}], or preempts = [] if it is only to go first'
        yield f"qos.{high}.tier", text, remedy
        return
    fillers = any(account.when_spent == "filler" for account in settings.account.values())
    stated = [key for key in ("mode", "min_run_s", "reclaim") if _is_stated(loaded, f"preempt.{key}")]
    if stated and settings.preempt.mode != "off" and not may_preempt(settings) and not fillers:
        text = f"[preempt] {' and '.join(stated)} {'has' if len(stated) == 1 else 'have'} no effect: "
        text += "no QOS lists another in preempts, and no queue has a guarantee to reclaim"
        remedy = 'add, for example, preempts = ["low"] to a [qos.NAME] of a higher tier, or guaranteed_gpus to a queue'
        yield f"preempt.{stated[0]}", text, remedy


def _queues(loaded: Loaded) -> Iterator[Finding]:
    settings = loaded.settings
    has_slurm = value_of(settings, "handover.commands") is not None
    for name in settings.queue:
        for key in ("slurm_partition", "slurm_account", "slurm_qos"):
            path = f"queue.{name}.{key}"
            if _is_stated(loaded, path) and not has_slurm:
                text = f"{key} of queue {name} has no effect: without [handover] commands no job is handed over"
                yield path, text, 'set commands = "/usr/bin" in [handover], or leave it out'
                break
        path = f"queue.{name}.preemptible"
        if _is_stated(loaded, path) and not settings.queue[name].preemptible and not _lends(settings):
            text = f"preemptible = false of queue {name} has no effect: no queue reclaims what it has lent"
            yield path, text, "give another queue guaranteed_gpus, or leave it out"


def _lends(settings: Settings) -> bool:
    return settings.preempt.mode != "off" and lends(settings)


def _accounts(loaded: Loaded) -> Iterator[Finding]:
    settings = loaded.settings
    for name, account in settings.account.items():
        if (account.gpu_hours, account.gpu_hours_per_user) != (None, None):
            continue
        for key in ("when_spent", "budget_period"):
            if _is_stated(loaded, path := f"account.{name}.{key}"):
                text = f"{key} of account {name} has no effect: the account has no budget of its own"
                yield path, text, f"set gpu_hours in [account.{name}], or leave {key} out"


def _qoses(loaded: Loaded) -> Iterator[Finding]:
    settings = loaded.settings
    for name, qos in settings.qos.items():
        path = f"qos.{name}.min_run_s"
        if qos.min_run_s is not None and not may_preempt(settings):
            yield path, f"min_run_s of QOS {name} has no effect: no run is preempted", f"leave it out of [qos.{name}]"
    factors = {
        ("queue", "queue"): [name for name, queue in settings.queue.items() if queue.factor > 0],
        ("qos", "QOS"): [name for name, qos in settings.qos.items() if qos.factor > 0],
    }
    for (section, word), named in factors.items():
        if named and _orders(settings).isdisjoint(_WEIGHING):
            text = f'factor of {word} {named[0]} has no effect: order = "{settings.priority.order}" does not weigh it'
            yield f"{section}.{named[0]}.factor", text, _SET_ORDER
