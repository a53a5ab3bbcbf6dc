"""Answers of the daemon to its HTTP API, and the server that it runs.

The API calls `gpusched.daemon.facade.DaemonFacade`, whose type it imports for checks alone; `gpusched.daemon.main`
connects the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import field

from gpusched.lifecycle.overuse import Intruder
from gpusched.model.cluster import ShareFacts
from gpusched.model.job import GpuShare
from gpusched.model.value import Value
from gpusched.scheduler.forecast import StartRange
from gpusched.scheduler.whatif import Alternative


class Forecast(Value):
    """The answer of `gsub --dry-run`."""

    verdict: str
    """starts_now, waits, refused, or exists for a key that already has a job."""
    text: str
    reason: str | None = None
    node: str | None = None
    gpus: tuple[GpuShare, ...] = ()
    start_at: float | None = None
    """Now, or the latest start if known."""
    start_low_at: float | None = None
    """Start if runs take as long as usual; None when unknown."""
    facts: Mapping[str, object] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    """Changes that would let it start now."""
    hint: str | None = None
    """Remedy for a refusal."""
    about: str | None = None
    """What a refusal is about, as in `errors.ABOUT`."""
    time_limit_s: int | None = None
    time_limit_source: str | None = None
    limit_text: str = ""
    """Result of `-t auto`."""


class LimitHint(Value):
    """Run times of similar jobs, and the expected starts with and without a time limit. Instants, and seconds."""

    runs: int
    usual: str
    """`1 to 3 h`."""
    limit_s: int
    typed: str
    """As typed for -t: `4h`."""
    start_at: float
    start_without_at: float | None
    """None when unknown."""
    time_limit_s: int | None
    """Its current default."""


class JobOutlook(Value):
    """The future of one pending job."""

    place: tuple[int, int] | None
    """Position in the queue and total number of positions; None when too far behind to compute."""
    start: StartRange
    alternatives: tuple[Alternative, ...]
    """Changes that would let it start now."""
    as_of: float | None = None
    """Instant of which its start is told, if not of now."""


class RunFindings(Value):
    """Findings of the last GPU reading about an open run."""

    shares: Mapping[str, ShareFacts] = field(default_factory=dict)
    """By GPU UUID, for the cards that it shares."""
    vram_over: str | None = None
    """A sentence if it holds more VRAM than it booked."""
    unbooked: Sequence[Intruder] = ()
    """Its own unbooked use of GPUs."""
    intruders: Sequence[Intruder] = ()
    """Unbooked use, by others, of the GPUs that it booked."""
    idle: str | None = None
    """A sentence if its GPUs are idle."""


class DaemonHealth(Value):
    """Health of the daemon itself."""

    ticks: int
    last_tick_ms: float | None
    p95_tick_ms: float | None
    warnings: tuple[str, ...]
    failing_steps: tuple[Mapping[str, Any], ...]
    """Steps whose last execution raised: step, error, count, since_at, last_at."""


class ApiServer(Protocol):
    """Serves the API while the daemon's loop runs."""

    async def start(self, socket_path: str) -> None: ...

    async def close(self) -> None: ...
