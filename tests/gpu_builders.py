"""Samples, readings and bookings of GPUs in one line each."""

from __future__ import annotations

from typing import Any

from gpusched.model.cluster import GpuProcess, GpuReading, GpuSample
from gpusched.model.job import GpuShare

UUID = "GPU-0"


def sample(uuid: str = UUID, **fields: Any) -> GpuSample:
    """An idle 24 GiB card; `processes` may be pairs of pid and MiB."""
    known: dict[str, Any] = {"name": "A100", "vram_total_mib": 24576, "vram_used_mib": 0, "processes": ()}
    known.update(fields)
    if known["processes"] is not None:
        known["processes"] = tuple(
            GpuProcess(*found) if isinstance(found, tuple) else found for found in known["processes"]
        )
    known.setdefault("index", int(uuid.rpartition("-")[2]))
    return GpuSample(uuid=uuid, **known)


def reading(at: float, *gpus: GpuSample, error: str | None = None) -> GpuReading:
    """A reading of these cards."""
    return GpuReading(at, "simulated", gpus, error)


def whole(run: str, uuid: str = UUID) -> dict[str, list[tuple[str, GpuShare]]]:
    """The run has the whole card."""
    return {uuid: [(run, GpuShare(uuid, 0))]}


def slices(uuid: str = UUID, **mib_of: int) -> dict[str, list[tuple[str, GpuShare]]]:
    """Runs `r1=...` have slices of this many MiB; `r1` is the run `1.1`."""
    return {uuid: [(f"{name[1:]}.1", GpuShare(uuid, 0, mib)) for name, mib in mib_of.items()]}
