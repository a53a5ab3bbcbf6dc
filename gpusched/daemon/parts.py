"""What the scheduler is built from, put together by its composition root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpusched.config import Loaded
from gpusched.daemon.launch.containers import ContainerHost
from gpusched.daemon.nodes import ClusterNodes
from gpusched.daemon.signals import Signals
from gpusched.model.settings import Settings
from gpusched.plugins import Plugins
from gpusched.ports import Clock, Engine, Handover, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParts:
    """The ports, and whatever else differs between daemons, simulations and tests."""

    store: Store
    engine: Engine
    cluster: ClusterNodes
    settings: Settings
    clock: Clock
    signals: Signals = field(default_factory=Signals)
    plugins: Plugins = field(default_factory=Plugins)
    handover: Handover | None = None
    """What jobs are handed over to; None where no other scheduler is named."""
    containers: ContainerHost | None = None
    """What jobs run in containers with; None where none can be."""
    read_settings: Callable[[], Loaded] | None = None
    """Reads the settings anew for a reload."""
    settings_problem: Callable[[], tuple[str, str] | None] = lambda: None
    """Why the settings in force differ from the config file, and what to do; None when they do not."""
    commands_problem: Callable[[], str | None] = lambda: None
    """Why jobs cannot use Slurm's commands; None when they can."""
    step: Callable[[str], None] = lambda name: None
    """Called with the name of each step of a tick before the step."""
    check_every: int = 0
    """Ticks between comparisons of the planner with the table; 0: never."""
