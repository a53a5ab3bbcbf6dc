"""A job's fields as options of sbatch, and the `#SBATCH` lines that say them."""

from __future__ import annotations

from gpusched.addons.slurm.handover.losses import events_lost
from gpusched.addons.slurm.spellings import CORES, COUNTS, FILES, GPUS, INSTANTS, SIZES, TEXTS
from gpusched.errors import Refused
from gpusched.model.units import format_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Spec = dict[str, Any]
    Words = Iterator[tuple[str, str | None]]

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./?&|()-")


def directives(spec: Spec, nodes: int) -> Words:
    """Options of sbatch for these fields, as name and value, None for an option without one; all but the name and the
    environment of the job.

    Args: spec: fields as a submission has them; nodes: how many the job is for. Raises: Refused.
    """
    for name, key in TEXTS.items():
        if spec.get(key):
            yield name, str(spec[key])
    if spec.get("queue"):
        yield "partition", spec["queue"]
    most = spec.get("nodes_max")
    yield "nodes", f"{nodes}-{most}" if most else str(nodes)
    yield from _amounts(spec)
    if "nodelist" in spec or "exclude" in spec:
        from gpusched.model.hostlist import fold  # few submissions name nodes

        for key in ("nodelist", "exclude"):
            if spec.get(key):
                yield key, fold(spec[key])
    if spec.get("exclusive"):
        yield "exclusive", None
    yield from _times(spec)
    if spec.get("array"):
        yield "array", spec["array"]
    yield from _end(spec)
    for name, key in {"chdir": "work_dir", **FILES, "open-mode": "open_mode"}.items():
        if spec.get(key):
            yield name, spec[key]


def _amounts(spec: Spec) -> Words:
    for name, key in {**COUNTS, "cpus-per-gpu": CORES["cpus-per-gpu"]}.items():
        if spec.get(key):
            yield name, str(spec[key])
    if spec.get("cpus") is not None:
        yield "cpus-per-task", str(max(1, -int(-spec["cpus"] // 1)))
    for name, key in SIZES.items():
        if spec.get(key):
            yield name, "0" if spec[key] == "all" else _size(spec[key])
    kind = f"{spec['gpu_type']}:" if spec.get("gpu_type") else ""
    gres = [f"{name}:{count}" for name, count in spec.get("resources", {}).items()]
    percent = spec.get("sm_percent")
    fraction = spec.get("gpu_fraction") if percent is None else percent / 100
    if fraction is not None:
        if kind:
            raise Refused(
                f"-g {kind}{fraction:g} cannot be expressed in an sbatch script: gres mps has no types",
                "name the type as a feature of the cluster, with -C",
            )
        if spec.get("gpus_per_task"):
            text = f"-g {fraction:g} and --gpus-per-task cannot be combined in an sbatch script"
            raise Refused(text, "leave out one of the two")
        gres.insert(0, f"mps:{round(fraction * 100)}")
    elif spec.get("gpu_shards"):
        gres.insert(0, f"shard:{spec['gpu_shards']}")
    else:
        for name, key in GPUS.items():
            if spec.get(key):
                yield name, f"{kind}{spec[key]}"
    if gres:
        yield "gres", ",".join(gres)
    if spec.get("licenses"):
        yield "licenses", ",".join(f"{name}:{count}" for name, count in spec["licenses"].items())


def _size(mib: int) -> str:
    return f"{mib // 1024}G" if not mib % 1024 else f"{mib}M"


def _times(spec: Spec) -> Words:
    limit = spec.get("time_limit_s")
    if limit == "unlimited":
        yield "time", "UNLIMITED"
    elif isinstance(limit, int):
        # Slurm reads two numbers as minutes and seconds, as we do.
        yield "time", format_duration(-(-limit // 60) * 60)
    for name, key in INSTANTS.items():
        if spec.get(key) is not None:
            import time  # few jobs have one

            # A second later rather than earlier.
            yield name, time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(-int(-spec[key] // 1)))
    if spec.get("never_satisfied"):
        yield "kill-on-invalid-dep", "yes" if spec["never_satisfied"] == "cancel" else "no"
    if spec.get("hold"):
        yield "hold", None
    if spec.get("nice"):
        yield "nice", str(spec["nice"])


def _end(spec: Spec) -> Words:
    if "requeue" in spec:
        yield "requeue" if spec["requeue"] else "no-requeue", None
    if spec.get("notice"):
        import signal  # few jobs ask for one

        wanted = spec["notice"]
        try:
            name = signal.Signals(wanted["signal"]).name.removeprefix("SIG")
        except ValueError:
            name = str(wanted["signal"])
        yield "signal", f"{'B:' if wanted['main_only'] else ''}{name}@{wanted['before_s']}"
    words = [word for word in spec.get("notify") or () if word not in events_lost(spec["notify"])]
    if words:
        mail = ["REQUEUE" if word in ("preempt", "retry", "requeue") else word.upper() for word in words]
        yield "mail-type", ",".join(dict.fromkeys(mail))
    if addresses := [name for name in spec.get("notify_to") or () if "@" in name]:
        yield "mail-user", ",".join(addresses)


def directive_line(name: str, text: str | None) -> str:
    """The `#SBATCH` line of an option. Raises: Refused for what no such line can hold."""
    if text is None:
        return f"#SBATCH --{name}"
    if "\n" in text or "\r" in text:
        raise Refused(f"--{name} holds a line break, which no #SBATCH line can", "write it in one line")
    word = f"--{name}={text}"
    if not _PLAIN.issuperset(word):
        word = '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH {word}"
