"""Every setting with its default, unit and meaning. `config.py` fills them in from file and environment.

A field's `doc` is the reference text: `docs/reference/settings.md` lists exactly these, and a test
compares. The name in the config file is the field's path, as in `[retry] backoff_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def setting(default: Any, doc: str) -> Any:
    """A dataclass field that carries its documentation."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True)
class PrioritySettings:
    """How waiting jobs are ordered: priority = sum of weight x factor, each factor in [0, 1]."""

    weight_age: float = setting(1000.0, "Weight of the age factor: time waited over max_age_s, at most 1.")
    max_age_s: float = setting(7 * 86400.0, "Time after which waiting longer adds nothing, in seconds.")
    weight_nice: float = setting(20000.0, "Weight of the nice factor; at 20000 one nice step is one point.")
    backfill: bool = setting(True, "Let later jobs start in the gaps when they cannot delay the first blocked job.")


@dataclass(frozen=True, slots=True)
class CeilingSettings:
    """Measured load above which no further job is started on the node; unset means no ceiling."""

    cpu_fraction: float | None = setting(None, "Highest CPU load of the node, 0 to 1.")
    mem_fraction: float | None = setting(None, "Highest share of host memory in use, 0 to 1.")
    disk_mib_s: float | None = setting(None, "Highest disk traffic, read and written, in MiB/s.")
    net_mib_s: float | None = setting(None, "Highest network traffic, in and out, in MiB/s.")
    gpu_fraction: float | None = setting(
        None, "Highest utilisation of a shared card that another slice may join, 0 to 1."
    )


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What this node offers, where the measured figure is not the wanted one."""

    name: str | None = setting(None, "Name of the node; default: the host name.")
    cpus: float | None = setting(None, "Cores to hand out; default: the cores this process may use.")
    mem_mib: int | None = setting(None, "Host memory to hand out, in MiB; default: all of it.")


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """How GPUs are read, trusted and shared."""

    source: str = setting("auto", "`auto`, `nvml`, `simulated` (see GPUSCHED_FAKE_GPUS) or `none`.")
    fake: str | None = setting(None, "Simulated GPUs, as in GPUSCHED_FAKE_GPUS: `4x24GiB` or a JSON file.")
    ids: str = setting("index", "Form of CUDA_VISIBLE_DEVICES in jobs: `index` or `uuid`.")
    deadline_s: float = setting(3.0, "Longest wait for one reading; after it the last one is stale.")
    free_polls: int = setting(2, "Readings in a row that must show a card free before it is used first.")
    foreign_mib: int = setting(
        1024, "Memory of foreign processes above which a whole-card job avoids the card, in MiB."
    )
    foreign_peak_s: float = setting(300.0, "Foreign memory counts at its peak over this many seconds.")
    share_headroom_mib: int = setting(512, "Memory of a shared card that is never booked, for CUDA contexts, in MiB.")
    release_wait_s: float = setting(
        30.0, "Longest wait for a card's memory to come back after a job; then the card is suspect."
    )
    baseline_mib: int = setting(256, "Memory in use that still counts as an empty card when a job has ended, in MiB.")


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What one submission may hold."""

    script_mib: float = setting(4.0, "Largest script, in MiB.")
    environment_mib: float = setting(1.0, "Largest captured environment, in MiB.")
    jobs: int = setting(1_000_000, "Most jobs waiting or running at once.")
    batch: int = setting(100_000, "Most jobs in one submission.")


@dataclass(frozen=True, slots=True)
class DefaultSettings:
    """What a job gets when it does not say."""

    cpus: float = setting(1.0, "Cores of a job that does not ask.")
    time_limit_s: int | None = setting(None, "Time limit of a job that does not ask, in seconds.")
    queue: str = setting("default", "Queue of a job that does not name one.")
    output: str = setting("gpusched-%j.out", "Output pattern of a job that does not name one.")


@dataclass(frozen=True, slots=True)
class LifeSettings:
    """How runs are stopped and repeated."""

    grace_s: float = setting(30.0, "Between the first signal and KILL when a job is stopped, in seconds.")
    leftover_grace_s: float = setting(
        2.0, "Between TERM and KILL for processes that a finished job left behind, in seconds."
    )
    max_requeues: int = setting(
        5, "How often a run lost to the machine is repeated for free before the job ends as NODE_FAIL."
    )


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """The daemon itself."""

    poll_s: float = setting(1.0, "Time between polls; requests and ends of runs wake the daemon at once.")
    idle_poll_s: float = setting(5.0, "Time between GPU readings while no job waits or runs.")
    log_level: str = setting("info", "`debug`, `info`, `warning` or `error`.")
    log_mib: float = setting(10.0, "Size at which the log is rotated, in MiB.")
    log_files: int = setting(3, "Rotated logs that are kept.")
    drop_env: tuple[str, ...] = setting(
        (), "Name patterns (`*_TOKEN`) of variables that are not captured from the submitter."
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one daemon."""

    priority: PrioritySettings = field(default_factory=PrioritySettings)
    ceiling: CeilingSettings = field(default_factory=CeilingSettings)
    node: NodeSettings = field(default_factory=NodeSettings)
    gpu: GpuSettings = field(default_factory=GpuSettings)
    limit: LimitSettings = field(default_factory=LimitSettings)
    default: DefaultSettings = field(default_factory=DefaultSettings)
    life: LifeSettings = field(default_factory=LifeSettings)
    daemon: DaemonSettings = field(default_factory=DaemonSettings)
