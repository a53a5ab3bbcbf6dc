"""Which values a setting may have, beyond its type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpusched.model.settings import BACKFILL_BY, BACKFILL_ORDERS, FOREIGN_MESSAGES, ORDERS, PRIVATE_DATA, STRATEGIES
from gpusched.model.units import MAX_MIB, MAX_SECONDS


@dataclass(frozen=True, slots=True)
class Range:
    """A number from `low` to `high`."""

    low: float
    high: float
    above: bool = False
    """The low end itself is not allowed."""

    def __str__(self) -> str:
        least = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        return f"{least} and at most {self.high:.15g}"

    def admits(self, value: float) -> bool:
        """Whether the value is in the range."""
        return (value > self.low if self.above else value >= self.low) and value <= self.high


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some words."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return "one of " + ", ".join(self.words)

    def admits(self, value: str) -> bool:
        """Whether it is one of them."""
        return value in self.words


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is not empty."""

    is_word: bool = False
    may_be_empty: bool = False

    def __str__(self) -> str:
        if self.may_be_empty:
            return "one word without blanks, or empty"
        return "one word without blanks" if self.is_word else "not empty, on one line"

    def admits(self, value: str) -> bool:
        """Whether it is on one line, or one word."""
        if self.may_be_empty and not value:
            return True
        if self.is_word:
            return bool(value) and value.isprintable() and " " not in value
        return bool(value) and not any(char in value for char in "\0\r\n")


@dataclass(frozen=True, slots=True)
class Folder:
    """The path of a folder."""

    def __str__(self) -> str:
        return "an absolute path"

    def admits(self, value: str) -> bool:
        """Whether it begins at the root and is on one line."""
        return value.startswith("/") and Text().admits(value)


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of words, none of them empty."""

    what: str

    def __str__(self) -> str:
        return f"{self.what}, none of them empty"

    def admits(self, value: tuple[str, ...]) -> bool:
        """Whether all are words."""
        return all(word and word.isprintable() and " " not in word for word in value)


@dataclass(frozen=True, slots=True)
class SomeOf:
    """A list of some of these words."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return "a list of some of " + ", ".join(self.words)

    def admits(self, value: tuple[str, ...]) -> bool:
        """Whether each is one of them."""
        return all(word in self.words for word in value)


@dataclass(frozen=True, slots=True)
class Cells:
    """A list of cells, `SIZE` or `NODE:SIZE`."""

    def __str__(self) -> str:
        return "a list of texts such as '4' (four linked GPUs) or 'n1:4' (those on node n1)"

    def admits(self, value: tuple[str, ...]) -> bool:
        """Whether each names a number of cards, with or without a node."""
        return all(re.fullmatch(r"(?:[^\s:]+:)?[1-9]\d{0,3}", word) for word in value)


@dataclass(frozen=True, slots=True)
class Amounts:
    """A table of names and numbers."""

    low: float
    above: bool = False

    def __str__(self) -> str:
        return f"a table of names and numbers, each {'above' if self.above else 'at least'} {self.low:g}"

    def admits(self, value: Mapping[str, float]) -> bool:
        """Whether every name is a word and every number large enough."""
        named = Text(is_word=True)
        return all(
            named.admits(name) and (count > self.low if self.above else count >= self.low)
            for name, count in value.items()
        )


@dataclass(frozen=True, slots=True)
class Numbers:
    """A list of whole numbers, each from `low` to `high`."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"a list of whole numbers from {self.low} to {self.high}"

    def admits(self, value: tuple[int, ...]) -> bool:
        """Whether each is in the range."""
        return all(self.low <= number <= self.high for number in value)


Rule = SomeOf | Numbers | Folder | Range | OneOf | Text | Texts | Cells | Amounts

_WEIGHT = Range(0, 1e12)
_FRACTION = Range(0, 1, above=True)
_PART = Range(0, 1)
_RATE = Range(0, MAX_MIB, above=True)
_MIB = Range(0, MAX_MIB)
_SOME_MIB = Range(1, MAX_MIB)
_WAIT = Range(0, MAX_SECONDS)
_SOME_TIME = Range(0, MAX_SECONDS, above=True)
_LIMIT = Range(1, MAX_SECONDS)
_PACE = Range(0.001, 3600)
_CORES = Range(0, 1 << 20, above=True)
_COUNT = Range(1, 10**9)
_TIMES = Range(1, 100)
_GPUS = Range(0, 1 << 20)
_SHARES = Range(0, 1e9, above=True)
_NAMES = Texts("names")
_WORD = Text(is_word=True)

RULES: dict[str, Rule] = {
    "priority.order": OneOf(ORDERS),
    "priority.backfill_order": OneOf(BACKFILL_ORDERS),
    "priority.backfill_by": OneOf(BACKFILL_BY),
    "priority.weight_age": _WEIGHT,
    "priority.max_age_s": _SOME_TIME,
    "priority.max_wait_s": _SOME_TIME,
    "priority.weight_nice": _WEIGHT,
    "priority.weight_fairshare": _WEIGHT,
    "priority.weight_size": _WEIGHT,
    "priority.weight_queue": _WEIGHT,
    "priority.weight_qos": _WEIGHT,
    "priority.weight_deadline": _WEIGHT,
    "priority.weight_fit": _WEIGHT,
    "priority.weight_short": _WEIGHT,
    "priority.weight_whole": _WEIGHT,
    "priority.half_life_s": _SOME_TIME,
    "priority.calc_period_s": Range(0, MAX_SECONDS),
    "priority.backfill_depth": Range(0, 1_000_000),
    "ceiling.cpu_fraction": _FRACTION,
    "ceiling.mem_fraction": _FRACTION,
    "ceiling.disk_mib_s": _RATE,
    "ceiling.net_mib_s": _RATE,
    "ceiling.gpu_fraction": _FRACTION,
    "node.name": _WORD,
    "node.cpus": _CORES,
    "node.mem_mib": _SOME_MIB,
    "node.labels": Texts("labels"),
    "node.resources": Amounts(0),
    "gpu.source": OneOf(("auto", "nvml", "simulated", "none")),
    "gpu.fake": Text(),
    "gpu.ids": OneOf(("index", "uuid")),
    "gpu.deadline_s": Range(0, 3600, above=True),
    "gpu.free_polls": Range(1, 1000),
    "gpu.foreign_mib": _MIB,
    "gpu.foreign_fraction": _FRACTION,
    "gpu.foreign_utilisation": _PART,
    "gpu.display_mib": _MIB,
    "gpu.foreign_peak_s": _WAIT,
    "gpu.share_headroom_mib": _MIB,
    "gpu.mps_dir": Folder(),
    "gpu.vram_over": OneOf(("ignore", "warn", "kill")),
    "gpu.astray": OneOf(("tell", "end")),
    "gpu.vram_over_mib": _MIB,
    # One reading alone may be a transient; nothing is done by it.
    "gpu.vram_over_polls": Range(2, 1000),
    "gpu.vram_over_grace_s": _WAIT,
    "gpu.release_wait_s": _WAIT,
    "gpu.baseline_mib": _MIB,
    "gpu.ecc_errors": Range(0, 1_000_000),
    "gpu.hot_s": _WAIT,
    # Sizes that the API holds in memory while it reads them.
    "limit.script_mib": Range(0, 1024, above=True),
    "limit.environment_mib": Range(0, 1024, above=True),
    "limit.jobs": _COUNT,
    "limit.batch": _COUNT,
    "limit.jobs_per_user": _COUNT,
    "limit.running_per_user": _COUNT,
    "limit.submitted_mib_per_user": Range(1, 1 << 30),
    "limit.stored_mib_per_user": Range(1, 1 << 30),
    "limit.requests_per_s": Range(1, 1e6),
    "limit.requests_burst": Range(10, 10**6),
    "limit.connections": Range(10, 10**6),
    "limit.connections_per_user": Range(4, 10**6),
    "access.admin_group": _WORD,
    "access.private_data": SomeOf(PRIVATE_DATA),
    # Without a size and one old file, the record would grow without end.
    "access.audit_mib": Range(0.01, MAX_MIB),
    "access.audit_files": Range(1, 1000),
    "isolation.default_mem_mib": Range(16, MAX_MIB),
    "isolation.oom_kills": OneOf(("job", "process")),
    "isolation.tasks": Range(0, 4_000_000),
    "isolation.guard_units": Texts("names of systemd units"),
    "limit.array": Range(1, 4_000_000),
    "limit.snapshot_mib": Range(0, 1 << 20, above=True),
    "limit.snapshot_files": _COUNT,
    "limit.snapshot_keep_days": Range(0, 36_500),
    "limit.snapshot_total_mib": Range(0, 1 << 30),
    "default.cpus": Range(0, 1 << 20),
    "default.time_limit_s": _LIMIT,
    "default.queue": _WORD,
    "default.qos": Text(is_word=True, may_be_empty=True),
    "default.output": Text(),
    "life.grace_s": _WAIT,
    "life.leftover_grace_s": _WAIT,
    "interactive.lease_s": Range(0, MAX_SECONDS),
    "interactive.log_mib": Range(0, MAX_MIB),
    "life.max_requeues": Range(0, 10**6),
    "life.never_satisfied": OneOf(("cancel", "wait")),
    "life.checkpoint_dir": Folder(),
    "life.checkpoint_keep_s": _WAIT,
    "life.oom_growth": Range(1, 100),
    "fault.xid_victim": Numbers(1, 100_000),
    "fault.xid_drain": Numbers(1, 100_000),
    "fault.hold_after": Range(0, 1000),
    "fault.return_to_service": OneOf(("undrain", "auto")),
    "fault.early_s": _WAIT,
    "fault.early_users": Range(0, 1000),
    "fault.early_window_s": _SOME_TIME,
    "idle.after_s": _WAIT,
    "idle.utilisation": _PART,
    "idle.window_s": _SOME_TIME,
    "idle.lower_after_s": _WAIT,
    "idle.nice": Range(0, 10_000),
    "idle.then": OneOf(("off", "requeue", "cancel")),
    "idle.then_after_s": _WAIT,
    "idle.cpu_cores": _PART,
    "idle.notice_s": _WAIT,
    "daemon.poll_s": _PACE,
    "daemon.idle_poll_s": _PACE,
    "daemon.shutdown_grace_s": Range(0, 3600),
    "daemon.log_level": OneOf(("debug", "info", "warning", "error")),
    # Without a size and one old file, the log would never be rotated and grow without end.
    "daemon.log_mib": Range(0.01, MAX_MIB),
    "daemon.log_files": Range(1, 1000),
    "daemon.launcher": OneOf(("auto", "systemd", "fork")),
    "submit.env_exclude": Texts("name patterns"),
    "history.keep_days": Range(0, 36_500),
    "foreign.adopt": OneOf(("owner", "admin")),
    "foreign.message": SomeOf(FOREIGN_MESSAGES),
    "foreign.message_after_s": _WAIT,
    # Not so often that a terminal is of no more use.
    "foreign.message_every_s": Range(60, MAX_SECONDS),
    "foreign.kill_after_s": _SOME_TIME,
    "foreign.kill_grace_s": _WAIT,
    "foreign.exempt_users": _NAMES,
    "foreign.exempt_queues": _NAMES,
    "foreign.exempt_commands": _NAMES,
    "alert.admin": Texts("names of targets"),
    "alert.pending_s": _SOME_TIME,
    "alert.timeout_s": Range(0, 3600, above=True),
    "alert.backoff_s": Range(0.01, MAX_SECONDS),
    "alert.backoff_max_s": Range(0.01, MAX_SECONDS),
    "alert.give_up_s": _WAIT,
    "alert.outbox": Range(1, 10**6),
    "placement.strategy": OneOf(STRATEGIES),
    "oversubscribe.cpus": _TIMES,
    "oversubscribe.mem": _TIMES,
    "oversubscribe.vram": _TIMES,
    "preempt.mode": OneOf(("off", "requeue", "suspend")),
    "preempt.min_run_s": _WAIT,
    # of the tables by name
    "queue.parent": _WORD,
    "queue.guaranteed_gpus": _GPUS,
    "queue.guaranteed_cpus": _GPUS,
    "queue.guaranteed_mem_mib": _MIB,
    "queue.cells": Cells(),
    "queue.max_gpus": _GPUS,
    "queue.max_cpus": _GPUS,
    "queue.max_mem_mib": _MIB,
    "queue.weight": _SHARES,
    "queue.factor": _PART,
    "queue.order": OneOf(ORDERS),
    "queue.max_gpus_per_user": _GPUS,
    "queue.max_gpus_per_job": _GPUS,
    "queue.max_running_per_user": _COUNT,
    "queue.max_time_s": _LIMIT,
    "queue.max_jobs": _COUNT,
    "queue.max_jobs_per_user": _COUNT,
    "queue.users": _NAMES,
    "queue.accounts": _NAMES,
    "queue.operators": _NAMES,
    "qos.tier": Range(-1000, 1000),
    "qos.factor": _PART,
    "qos.preempts": _NAMES,
    "qos.min_run_s": _WAIT,
    "qos.usage_factor": Range(0, 1e6),
    "qos.max_gpus": _GPUS,
    "qos.max_gpus_per_user": _GPUS,
    "qos.max_gpus_per_job": _GPUS,
    "qos.max_running_per_user": _COUNT,
    "qos.max_jobs_per_user": _COUNT,
    "qos.max_time_s": _LIMIT,
    "qos.users": _NAMES,
    "qos.accounts": _NAMES,
    "account.parent": _WORD,
    "account.shares": _SHARES,
    "account.users": Amounts(0, above=True),
}
