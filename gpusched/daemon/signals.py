"""What the scheduler announces: a typed signal for each kind of news."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec

from gpusched.daemon.commit import AuditEvent, SettingEffect
from gpusched.daemon.failures import StepFailures
from gpusched.daemon.nodes import ClusterNode
from gpusched.model.cluster import GpuReading
from gpusched.model.commands import Caller
from gpusched.model.job import Job
from gpusched.model.settings import Settings

P = ParamSpec("P")


class Signal(Generic[P]):
    """Calls its listeners in the order in which they were connected; one that raises stops no other.

    Args: step: name of a failure; None: that of the listener.
    """

    def __init__(self, step: str | None = None) -> None:
        self._step = step
        self._listeners: list[tuple[str, Callable[P, object]]] = []

    def connect(self, listener: Callable[P, object]) -> None:
        self._listeners.append((self._step or _name_of(listener), listener))

    def __bool__(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def send(self, failures: StepFailures, *args: P.args, **named: P.kwargs) -> None:
        for step, listener in self._listeners:
            failures.run(step, listener, *args, **named)


@dataclass(frozen=True, slots=True)
class Signals:
    """All of them; made before the scheduler, which sends them, and those that listen."""

    jobs_changed: Signal[[Mapping[int, Job]]] = field(default_factory=Signal)
    """After a commit: all jobs whose row, or a row of whose runs, changed, by id."""
    settings_changed: Signal[[Settings]] = field(default_factory=Signal)
    """After a reload: the new settings."""
    gpus_read: Signal[[ClusterNode, GpuReading]] = field(default_factory=lambda: Signal("time series"))
    """A reading that has been taken in, and its node."""
    gpus_freed: Signal[[]] = field(default_factory=lambda: Signal("GPU request"))
    """Runs have ended whose GPUs a new reading can show clean."""
    audited: Signal[[AuditEvent]] = field(default_factory=lambda: Signal("audit"))
    """After a commit: each of its audit events."""
    machine_set: Signal[[SettingEffect]] = field(default_factory=lambda: Signal("settings log"))
    """After a commit: each of its changes of the machine that an admin set."""
    settings_set: Signal[[Settings, Caller, str, Mapping[str, Any]]] = field(
        default_factory=lambda: Signal("settings log")
    )
    """After a change: the settings of the file, who made it, with which command, and the settings of the table."""


def _name_of(listener: Callable[..., object]) -> str:
    return f"listener {getattr(listener, '__qualname__', type(listener).__qualname__)}"
