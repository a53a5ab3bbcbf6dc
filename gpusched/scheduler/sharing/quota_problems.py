"""What is wrong with the amounts that the settings of queues promise, alone and against the machines."""

from __future__ import annotations

from collections.abc import Sequence

from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.scheduler.sharing.limits import show_amount, show_number
from gpusched.scheduler.sharing.queues import KINDS, Amount, QueueNode, amount_of, own_guarantee, plant

_SETTINGS = ("guaranteed_gpus", "guaranteed_cpus", "guaranteed_mem_mib")
_MAXIMA = ("max_gpus", "max_cpus", "max_mem_mib")


def problems(settings: Settings, capacity: Resources | None) -> list[tuple[str, str]]:
    """Setting and sentence for every promise that cannot be kept. Without `capacity` the machines are not looked at."""
    nodes = plant(settings.queue)
    found: list[tuple[str, str]] = []
    for name in sorted(nodes):
        found += _below(nodes[name], [nodes[child] for child in nodes[name].children])
    if capacity is not None:
        tops = [node for _, node in sorted(nodes.items()) if node.parent is None]
        found += _against_machines(tops, amount_of(capacity))
    return found


def _below(node: QueueNode, children: Sequence[QueueNode]) -> list[tuple[str, str]]:
    """Queues that are promised, together, more than the one above them has or may have."""
    found = []
    own = own_guarantee(node.settings)
    for kind in KINDS:
        below = sum(child.guaranteed[kind] for child in children)
        most = dict(node.maxima).get(kind)
        if most is not None and below > most:
            text = f"the queues below {node.name} are guaranteed {show_amount(kind, below)}, but it may hold at most "
            found.append((f"queue.{node.name}.{_MAXIMA[kind]}", text + show_number(kind, most)))
        elif own[kind] and below > own[kind]:
            text = f"the queues below {node.name} are guaranteed {show_amount(kind, below)}, but it has only "
            found.append((f"queue.{node.name}.{_SETTINGS[kind]}", text + show_number(kind, own[kind])))
    return found


def _against_machines(tops: Sequence[QueueNode], capacity: Amount) -> list[tuple[str, str]]:
    found = []
    for kind in KINDS:
        promised = [node for node in tops if node.guaranteed[kind]]
        total = sum(node.guaranteed[kind] for node in promised)
        if total <= capacity[kind]:
            continue
        there = show_number(kind, capacity[kind])
        if len(promised) == 1:
            who = f"queue {promised[0].name} is guaranteed {show_amount(kind, total)}"
        else:
            each = ", ".join(f"{node.name} {show_number(kind, node.guaranteed[kind])}" for node in promised)
            who = f"queues are guaranteed {show_amount(kind, total)} ({each})"
        found.append((f"queue.{promised[-1].name}.{_SETTINGS[kind]}", f"{who}, but the machines have {there}"))
    return found
