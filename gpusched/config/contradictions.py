"""Contradictions between settings that are each valid.

Checks that depend on the machines (guarantees above capacity) are in `scheduler.limits`; the daemon runs
them at start, at a reload, and for the doctor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import inf

from gpusched import entry_points
from gpusched.config.schema import value_of
from gpusched.model.planner_settings import AUTO
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings, chain_of
from gpusched.model.settings import Settings
from gpusched.model.units import closest, format_amount, plural
from gpusched.scheduler.burst import burst_limit_s
from gpusched.scheduler.limits import quota_problems

Contradiction = tuple[tuple[str, ...], str, str]
"""Path of the offending key, a sentence, and a remedy."""


def contradictions(settings: Settings) -> Iterator[Contradiction]:
    """Yield all, section by section."""
    yield from _in_tree("queue", settings.queue)
    yield from _in_tree("account", settings.account)
    for queue in settings.queue.values():
        yield from _in_queue(queue, settings)
    yield from _promises(settings)
    for qos in settings.qos.values():
        yield from _in_qos(qos, settings.qos)
    yield from _in_defaults(settings)
    yield from _unknown_accounts(settings)
    yield from _in_budgets(settings)
    yield from _in_foreign(settings)
    yield from _in_cluster(settings)
    yield from _in_bursts(settings)
    yield from _without_add_on(settings)


def _in_tree(section: str, tree: Mapping[str, QueueSettings | AccountSettings]) -> Iterator[Contradiction]:
    told: set[str] = set()
    for name, one in tree.items():
        if one.parent is not None and one.parent not in tree:
            path, text = (section, name, "parent"), f"{section} {name} is below {one.parent}, which does not exist"
            yield path, text, _meant(one.parent, tree, f"add [{section}.{one.parent}], or leave the parent out")
        chain = tuple(chain_of(name, tree))
        circle = tuple(node.name for node in chain) if chain[-1].parent == name else ()
        if circle and not told & set(circle):
            told |= set(circle)
            text = f"the {section}s form a cycle: {' -> '.join((*circle, circle[0]))}"
            yield (section, name, "parent"), text, f"leave out the parent of one of them: {', '.join(circle)}"


def _in_queue(queue: QueueSettings, settings: Settings) -> Iterator[Contradiction]:
    name = queue.name
    for kind in ("gpus", "cpus", "mem_mib"):
        guaranteed, most = getattr(queue, f"guaranteed_{kind}"), getattr(queue, f"max_{kind}")
        if most is not None and guaranteed > most:
            text = f"queue {name} is guaranteed {format_amount(guaranteed)} {kind} and may hold at most "
            text += format_amount(most)
            yield ("queue", name, f"guaranteed_{kind}"), text, f"raise max_{kind}, or guarantee less"
    yield from _limits("queue", f"queue {name}", queue)
    yield from _limits_above(queue, settings.queue)
    if queue.cells and queue.max_gpus is not None and _cards(queue) > queue.max_gpus:
        most = format_amount(queue.max_gpus)
        text = f"the cells of queue {name} are {plural(_cards(queue), 'GPU')}, but it may hold at most {most}"
        yield ("queue", name, "cells"), text, "raise max_gpus, or promise fewer cells"
    yield from _default_time(queue, settings.queue)
    least, most_s = settings.default.time_limit_s, queue.max_time_s
    is_used = name == settings.default.queue and queue.default_time_s is None
    if is_used and least is not None and most_s is not None and least > most_s:
        text = f"max_time_s of queue {name}, the default queue, is {most_s}, but default.time_limit_s is {least}"
        yield ("queue", name, "max_time_s"), text, "raise it, or lower [default] time_limit_s"


def _default_time(queue: QueueSettings, queues: Mapping[str, QueueSettings]) -> Iterator[Contradiction]:
    """A default time limit above the maximum of the queue or one of its ancestors."""
    default_s = queue.default_time_s
    if default_s is None:
        return
    for one in chain_of(queue.name, queues):
        if one.max_time_s is not None and default_s > one.max_time_s:
            where = "" if one is queue else f" of queue {one.name} above it"
            text = f"default_time_s of queue {queue.name} is {default_s}, but max_time_s{where} is "
            hint = f"lower it, or raise max_time_s of {one.name}"
            yield ("queue", queue.name, "default_time_s"), f"{text}{one.max_time_s}", hint
            return


_LIMITS = (
    ("max_gpus_per_user", "max_gpus"),
    ("max_gpus_per_job", "max_gpus"),
    ("max_gpus_per_job", "max_gpus_per_user"),
    ("max_running_per_user", "max_jobs_per_user"),
    ("max_jobs_per_user", "max_jobs"),
)
"""Limits, each with those that count the same and more: above these the first could never be reached."""


def _limits(section: str, who: str, one: QueueSettings | QosSettings) -> Iterator[Contradiction]:
    told = set()
    for small, large in _LIMITS:
        value, most = getattr(one, small), getattr(one, large, None)
        if value is not None and most is not None and value > most and small not in told:
            told.add(small)
            text = f"{small} of {who} is {format_amount(value)}, but {large} is {format_amount(most)}"
            yield (section, one.name, small), text, f"leave {small} out, or raise {large}"


def _limits_above(queue: QueueSettings, queues: Mapping[str, QueueSettings]) -> Iterator[Contradiction]:
    """Limits of a queue that cannot be reached because of an ancestor's maximum."""
    for limit in ("max_gpus_per_user", "max_gpus_per_job"):
        value = getattr(queue, limit)
        if value is None or (queue.max_gpus is not None and value > queue.max_gpus):
            continue
        for above in islice(chain_of(queue.name, queues), 1, None):
            if above.max_gpus is not None and value > above.max_gpus:
                most = format_amount(above.max_gpus)
                text = f"{limit} of queue {queue.name} is {format_amount(value)}, but queue {above.name} above "
                hint = f"leave {limit} out, or raise max_gpus of {above.name}"
                yield ("queue", queue.name, limit), f"{text}it may hold at most {most}", hint
                break


def _cards(queue: QueueSettings) -> int:
    return sum(int(cell.rpartition(":")[2]) for cell in queue.cells)


def _promises(settings: Settings) -> Iterator[Contradiction]:
    """Child queues that are guaranteed more than their parent has or may have."""
    for path, text in quota_problems(settings, None):
        section, _, rest = path.partition(".")
        # The name of a queue may have dots in it.
        name, _, key = rest.rpartition(".")
        yield (section, name, key), text, "promise less below, or more above"


def _in_qos(qos: QosSettings, known: Mapping[str, QosSettings]) -> Iterator[Contradiction]:
    path = ("qos", qos.name, "preempts")
    for name in qos.preempts:
        if name == qos.name:
            yield path, f"QOS {name} would preempt itself", f"take {name} out of its list"
        elif name not in known:
            text = f"QOS {qos.name} may preempt {name}, which does not exist"
            yield path, text, _meant(name, known, f"add [qos.{name}], or take it out of the list")
        elif known[name].tier >= qos.tier:
            text = (
                f"QOS {qos.name} of tier {qos.tier} may preempt {name} of tier {known[name].tier}, which is not lower"
            )
            yield path, text, f"give {qos.name} a higher tier, or take {name} out of the list"
    yield from _limits("qos", f"QOS {qos.name}", qos)


def _in_defaults(settings: Settings) -> Iterator[Contradiction]:
    queue, qos = settings.default.queue, settings.default.qos
    if settings.queue and queue not in settings.queue:
        text = f"default.queue is {queue}, which does not exist"
        hint = f"add [queue.{queue}], or set [default] queue to one of: {', '.join(settings.queue)}"
        yield ("default", "queue"), text, _meant(queue, settings.queue, hint)
    elif any(one.parent == queue != one.name for one in settings.queue.values()):
        leaves = _leaves(settings.queue)
        text = f"default.queue is {queue}, which has queues below it and takes no jobs itself"
        yield ("default", "queue"), text, f"set [default] queue to one of: {', '.join(leaves)}"
    if qos and qos not in settings.qos:
        text = f"default.qos is {qos}, which does not exist"
        yield ("default", "qos"), text, _meant(qos, settings.qos, f"add [qos.{qos}]")


def _in_foreign(settings: Settings) -> Iterator[Contradiction]:
    """Foreign processes ended without a message to their owners, and unknown exempt queues."""
    foreign = settings.foreign
    if foreign.kill_after_s is not None and not foreign.message:
        text = (
            f"foreign.kill_after_s is {foreign.kill_after_s:g} and foreign.message is empty: foreign processes "
            "would be killed without alerting their owners"
        )
        yield ("foreign", "kill_after_s"), text, "set how to alert them, for example: message = ['write', 'mail']"
    for name in foreign.exempt_queues:
        if settings.queue and name not in settings.queue:
            text = f"exempt_queues names {name}, which does not exist"
            yield ("foreign", "exempt_queues"), text, _meant(name, settings.queue, f"add [queue.{name}]")


def _leaves(queues: Mapping[str, QueueSettings]) -> list[str]:
    parents = {queue.parent for queue in queues.values()}
    return [name for name in queues if name not in parents]


def _unknown_accounts(settings: Settings) -> Iterator[Contradiction]:
    if not settings.account:
        return
    tables: Mapping[str, Mapping[str, QueueSettings | QosSettings]] = {"queue": settings.queue, "qos": settings.qos}
    for section, table in tables.items():
        for name, one in table.items():
            for account in one.accounts:
                if account not in settings.account:
                    text = f"{section} {name} is for account {account}, which does not exist"
                    hint = _meant(account, settings.account, f"add [account.{account}], or take it out of the list")
                    yield (section, name, "accounts"), text, hint


_LONGEST_DAYS = {"month": 31, "quarter": 92, "year": 366, "total": inf}
"""How long the history of runs must be for a budget of this period."""


def _in_budgets(settings: Settings) -> Iterator[Contradiction]:
    kept_days = settings.history.keep_days or inf
    for name, one in settings.account.items():
        least = _LONGEST_DAYS[one.budget_period]
        if (one.gpu_hours is not None or one.gpu_hours_per_user is not None) and kept_days < least:
            text = f"the budget of account {name} is per {one.budget_period}, but [history] keep_days is {kept_days:g}"
            if one.budget_period == "total":
                text = f"the budget of account {name} is for all time, but [history] keep_days is {kept_days:g}"
            hint = "set keep_days = 0" + ("" if least == inf else f", or at least {least}")
            yield ("account", name, "budget_period"), text, hint
        if one.when_spent == "filler" and settings.preempt.mode == "off":
            text = f'when_spent of account {name} is "filler", but [preempt] mode = "off" preempts no job'
            yield ("account", name, "when_spent"), text, 'set [preempt] mode = "requeue", or when_spent = "wait"'
        if one.gpu_hours is not None and one.gpu_hours_per_user is not None and one.gpu_hours_per_user > one.gpu_hours:
            more, less = format_amount(one.gpu_hours_per_user), format_amount(one.gpu_hours)
            text = f"gpu_hours_per_user of account {name} is {more}, but gpu_hours is {less}"
            yield ("account", name, "gpu_hours_per_user"), text, "leave gpu_hours_per_user out, or raise gpu_hours"


def _in_bursts(settings: Settings) -> Iterator[Contradiction]:
    for name, one in settings.queue.items():
        if one.burst_after_s is not None and one.engine is not None:
            text = f'queue {name} has burst_after_s, and engine = "{one.engine}" decides where all its jobs run'
            yield ("queue", name, "burst_after_s"), text, "leave out one of the two"
        elif one.burst_after_s is not None and value_of(settings, "handover.commands") is None:
            text = f"queue {name} has burst_after_s, and there is no Slurm to burst to"
            yield ("queue", name, "burst_after_s"), text, "set [handover] commands, or leave burst_after_s out"
        below = [other for other in settings.queue if one in chain_of(other, settings.queue)]
        if one.burst is not None and all(burst_limit_s(other, settings) is None for other in below):
            text = f'queue {name} has burst = "{one.burst}", and its jobs do not burst without burst_after_s'
            yield ("queue", name, "burst"), text, "set burst_after_s, or leave burst out"


def _meant(name: str, known: Iterable[str], otherwise: str) -> str:
    near = closest(name, known)
    return f"did you mean {near}?" if near else otherwise


def _in_cluster(settings: Settings) -> Iterator[Contradiction]:
    if settings.cluster.engine == "ray" and settings.cluster.nodes:
        text = 'with engine = "ray" the nodes are those that have joined, and none can be named'
        yield ("cluster", "nodes"), text, "leave nodes out, and on each of them: gpusched cluster join HEAD"


def _without_add_on(settings: Settings) -> Iterator[Contradiction]:
    """Settings that ask for what an add-on brings."""
    asked = (
        (settings.priority.preset == AUTO, ("priority", "preset"), f'preset = "{AUTO}"', "preset.auto", "simulate"),
        (settings.cluster.engine == "ray", ("cluster", "engine"), 'engine = "ray"', "engine.ray", "ray"),
    )
    for is_asked, key, what, point, addon in asked:
        if is_asked and entry_points.where(point) is None:
            error = entry_points.absent(addon, what)
            yield key, error.message, error.hint
