"""Job options with a syntax of their own, much of it Slurm's: `a100:2`, `B:USR1@60`, `100M:5`."""

from __future__ import annotations

from gpusched.model.option import Several, decimal, whole
from gpusched.model.units import parse_duration_s, parse_size_mib, printable


def gpus(text: str) -> Several:
    """`2`, `a100:2`, `a100`, `0.5`, `a100:0.5`, `1g.10gb`. Sets every GPU key, to reset any earlier -g."""
    kind, colon, count = text.rpartition(":")
    is_profile = "g." in count  # of a MIG instance, 1g.10gb
    if not colon and (is_profile or (not count[:1].isdigit() and count[:1] not in (".", "-", "+"))):
        kind, count = count, "1"
    found = Several(gpus=None, gpu_fraction=None, gpu_type=kind or None)
    if "." not in count:
        return Several(found, gpus=whole(0, 1024)(count))
    fraction = decimal(0.0, 1024.0)(count)
    if not 0 < fraction <= 1:
        shown = printable(text, 40)
        raise ValueError(f"{shown!r} is neither a number of GPUs nor a share of one; write -g 2, -g 0.5 or -g 0")
    return Several(found, gpu_fraction=fraction)


def gpus_of_node(text: str) -> Several:
    """As -g, but per node: `2`, `a100:2`, `0.5`."""
    found = gpus(text)
    count = 1 if found["gpu_fraction"] is not None else found["gpus"]
    kind = {"gpu_type": found["gpu_type"]} if found["gpu_type"] else {}
    return Several(gpus_per_node=count, gpu_fraction=found["gpu_fraction"], **kind)


def percent(text: str) -> int:
    """`30%` or `30`."""
    return int(whole(1, 100)(text.strip().removesuffix("%")))


def gpus_of_task(text: str) -> Several:
    """As -g, but for each task: `1`, `a100:1`."""
    found = gpus(text)
    if not found["gpus"]:
        raise ValueError(f"{printable(text, 40)!r} is not a number of GPUs for each task; write 1 or a100:1")
    kind = {"gpu_type": found["gpu_type"]} if found["gpu_type"] else {}
    return Several(gpus_per_task=found["gpus"], **kind)


def gres(text: str) -> Several:
    """Slurm's `gpu:2`, `gpu:a100:2` and `scratch:2`, per node, joined by commas."""
    found = Several()
    for word in text.split(","):
        name, _, rest = word.partition(":")
        if name == "gpu":
            found.update(gpus_of_node(rest or "1"))
        elif name in ("shard", "mps"):
            raise ValueError(
                f"{printable(word, 40)!r} is a share of a GPU; ask for a fraction, -g 0.5, or for memory, --vram 8G"
            )
        elif name != "none":
            found.setdefault("resources", {}).update(_amount_of(name, rest, word))
    return found


def _amount_of(name: str, rest: str, word: str) -> dict[str, int]:
    """A custom resource and its number."""
    if not name or ":" in rest:
        raise ValueError(
            f"{printable(word, 40)!r} is not a resource and its number, as in gpu:2, gpu:a100:2, scratch:2"
        )
    return {name: int(whole(1, 1_000_000)(rest or "1"))}


def memory(text: str) -> Several:
    """Host memory of the job, 0 for a node's; overrides an earlier amount per core or GPU."""
    is_all = text.strip().upper().rstrip("KMGTIB") == "0"
    return Several(mem_mib="all" if is_all else parse_size_mib(text), mem_per_cpu_mib=None, mem_per_gpu_mib=None)


def memory_per_core(text: str) -> Several:
    """Host memory per core; overrides an earlier amount for the job or per GPU."""
    return Several(mem_mib=None, mem_per_cpu_mib=parse_size_mib(text), mem_per_gpu_mib=None)


def memory_per_gpu(text: str) -> Several:
    """Host memory per GPU; overrides an earlier amount for the job or per core."""
    return Several(mem_mib=None, mem_per_cpu_mib=None, mem_per_gpu_mib=parse_size_mib(text))


def nodes(text: str) -> Several:
    """A number of nodes, or a range `1-2`."""
    low, dash, high = text.partition("-")
    if not (dash and low and high):
        return Several(nodes=whole(1, 4096)(text), nodes_max=None)
    least, most = whole(1, 4096)(low), whole(1, 4096)(high)
    if most < least:
        raise ValueError(f"{printable(text, 40)!r} is a range that ends before it begins")
    return Several(nodes=least, nodes_max=most if most > least else None)


def exclusive(text: str) -> Several:
    """Slurm's values of --exclusive; `user` and `mcs` mean the whole node as well."""
    word = text.strip().lower()
    if word not in ("user", "mcs"):
        raise ValueError(f"{printable(text, 40)!r} is neither user nor mcs")
    return Several(
        exclusive=True, slurm_notes=[f"--exclusive={word}: no other job runs on the node, not even your own"]
    )


def hosts(text: str) -> tuple[str, ...]:
    """Slurm's node list, `lab1,gpu[01-03]`. A tuple, so that the last of several options wins, as in Slurm."""
    from gpusched.model.hostlist import expand  # few submissions name nodes

    return tuple(expand(text))


def near(text: str) -> tuple[str, ...]:
    """What a job wants to be near to: `data=imagenet,coco`."""
    kind, equals, names = text.partition("=")
    if kind.strip() != "data" or not equals:
        raise ValueError(f"{printable(text, 60)!r} does not say near to what; write data=imagenet")
    found = sorted({name.strip() for name in names.split(",")} - {""})
    if not found:
        raise ValueError("no data set is named; write data=imagenet")
    return tuple(found)


def time_limit(text: str) -> int | str:
    """Slurm's words for no limit, `auto`, or a duration."""
    word = text.strip().lower()
    if word in ("0", "unlimited", "infinite", "none"):
        return "unlimited"
    return word if word == "auto" else parse_duration_s(text, ", or as auto")


def notice(text: str) -> Several:
    """`[B:]SIG[@seconds]`, by default 60 seconds, as in Slurm."""
    main_only = text[:2].upper() == "B:"
    name, at, before = (text[2:] if main_only else text).partition("@")
    before_s = whole(0, 65535)(before) if at else 60
    return Several(notice={"signal": signal_number(name), "before_s": before_s, "main_only": main_only})


def signal_number(name: str) -> int:
    """Number of a signal given by name, with or without SIG, or by number. Raises: ValueError."""
    import signal  # most command lines name none

    word = name.upper()
    if word.isascii() and word.isdigit() and 1 <= int(word[:4]) <= 64:
        return int(word)
    found = getattr(signal, word if word.startswith("SIG") else "SIG" + word, None)
    if not isinstance(found, signal.Signals):
        raise ValueError(f"{printable(name, 40)!r} is not a signal; write TERM, SIGUSR1 or 10")
    return int(found)


def log_max(text: str) -> Several:
    """`100M` or `100M:5`: a size, and the number of rotated files to keep; None resets an earlier number."""
    size, colon, keep = text.partition(":")
    return Several(log_max_mib=parse_size_mib(size), log_keep=whole(0, 100)(keep) if colon else None)


def events(text: str) -> list[str]:
    """Events for alerts, parsed as in the daemon, but here an error can name its location."""
    from gpusched.model.alerts import parse_events  # few submissions ask for it

    return list(parse_events(text))


def mail_type(text: str) -> list[str]:
    """Slurm's words; its ALL covers fewer events than ours."""
    words = text.split(",")
    return events(",".join("begin,end,fail,requeue" if word.strip().upper() == "ALL" else word for word in words))


def kill_on_invalid_dep(text: str) -> str:
    """Slurm's `yes` and `no`."""
    word = text.strip().lower()
    if word not in ("yes", "no"):
        raise ValueError(f"{printable(text, 40)!r} is neither yes nor no")
    return "cancel" if word == "yes" else "wait"
