"""What gctl can do, and what `gctl update` can change, as data for the command and for its help."""

from __future__ import annotations

from gpusched.cli.parse import decimal, whole, words_of
from gpusched.cli.readers import begin, choice, events, gpus, instant, kill_on_invalid_dep, time_limit
from gpusched.cli.where import counts, gpus_of_node, hosts, nodes
from gpusched.model.units import parse_size_mib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ACTIONS = {
    "hold": "keep jobs from starting, or starting again: gctl hold 41 42, gctl hold -n sweep",
    "release": "undo a hold: gctl release 41, gctl release --all",
    "suspend": "let running jobs stand still, in memory: gctl suspend 41",
    "resume": "let suspended jobs go on: gctl resume 41",
    "requeue": "end runs and let their jobs wait again, with --hold until released: gctl requeue 41",
    "update": "change what jobs ask for: gctl update 41 time=2h nice=5 gpus=2",
    "drain": "keep new work off nodes or GPUs: gctl drain 3 -m 'fan is broken'",
    "undrain": "let work back: gctl undrain 3",
    "reserve": "keep GPUs for some people, once or again and again; without a name: list: gctl reserve",
    "unreserve": "take a reservation out: gctl unreserve course",
    "account": "show the tree of accounts, its members, shares and use: gctl account vision",
    "queue": "show what queues are guaranteed, hold, borrow and lend: gctl queue vision",
    "preset": "show which preset is in force, and what each would have made of the last weeks: gctl preset",
    "reload": "read the config file again: gctl reload",
}


def _size(key: str) -> Callable[[str], dict[str, Any]]:
    return lambda text: {key: parse_size_mib(text)}


def _text(key: str) -> Callable[[str], dict[str, Any]]:
    return lambda text: {key: text}


def _yes_or_no(key: str) -> Callable[[str], dict[str, Any]]:
    read = choice(key, "yes", "no")
    return lambda text: {key: read(text.lower())[key] == "yes"}


def _gpus(text: str) -> dict[str, Any]:
    found = gpus(text)
    # Asking for whole cards takes back an earlier fraction, and the other way round.
    if found["gpus"] is None:
        found["gpus"] = 1
    if found["gpu_type"] is None:
        del found["gpu_type"]  # another number of the same kind
    return found


UPDATES: dict[str, Callable[[str], dict[str, Any]]] = {
    "name": _text("name"),
    "time": time_limit,
    "nice": whole("nice", -10000, 10000),
    "begin": begin,
    "queue": _text("queue"),
    "account": _text("account"),
    "gpus": _gpus,
    "vram": _size("vram_mib"),
    "min-vram": _size("min_vram_mib"),
    "cpus": decimal("cpus", 0, 65536),
    "mem": _size("mem_mib"),
    "throttle": whole("throttle", 1, 4_000_000),
    "retries": whole("retries", 0, 1000),
    "fallback": _text("fallback"),
    "ignore-idle": _yes_or_no("ignore_idle"),
    "notify": events,
    "notify-to": words_of("notify_to"),
    "dependency": _text("dependency"),
    "kill-on-invalid-dep": kill_on_invalid_dep,
    "qos": _text("qos"),
    "deadline": instant("deadline_at"),
    "reservation": _text("reservation"),
    "nodes": nodes,
    "gpus-per-node": gpus_of_node,
    "gpus-linked": _yes_or_no("gpus_linked"),
    "nodelist": hosts("nodelist"),
    "exclude": hosts("exclude"),
    "constraint": _text("constraint"),
    "prefer": _text("prefer"),
    "exclusive": _yes_or_no("exclusive"),
    "licenses": counts("licenses", "licenses=matlab:2"),
    "res": counts("resources", "res=scratch:2"),
}
CLEARED = {
    "time": "time_limit_s",
    "vram": "vram_mib",
    "min-vram": "min_vram_mib",
    "mem": "mem_mib",
    "begin": "begin_at",
    "deadline": "deadline_at",
    "res": "resources",
    "kill-on-invalid-dep": "never_satisfied",
}
"""Fields that `NAME=` with nothing after it takes back, where they are not called NAME."""
