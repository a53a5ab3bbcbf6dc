"""What holds a run to the VRAM that it booked of a card, named honestly. Pure."""

from __future__ import annotations

from gpusched.model.cluster import Enforcement, GpuSample
from gpusched.model.settings import GpuSettings
from gpusched.model.units import format_duration


def enforcement(sample: GpuSample | None, settings: GpuSettings, limit: str | None) -> tuple[str, str]:
    """Of a slice on this card, or of a MIG instance: a word of `Enforcement`, and what that means here.

    Args: limit: what the run was started under; of a card, what the next one would be.
    """
    if sample is not None and sample.mig_profile is not None:
        return Enforcement.MIG, f"the hardware gives it no more: a MIG instance {sample.mig_profile}"
    if limit == Enforcement.MPS and sample is not None and sample.mps:
        return Enforcement.MPS, "CUDA gives it no more, as long as it leaves the variables of MPS alone"
    word, why = _watched(sample, settings)
    return word, f"its MPS control daemon is gone; {why}" if limit == Enforcement.MPS else why


def _watched(sample: GpuSample | None, settings: GpuSettings) -> tuple[str, str]:
    if settings.vram_over == "ignore":
        return Enforcement.NONE, "[gpu] vram_over is ignore"
    if sample is None or sample.processes is None:
        return Enforcement.NONE, "the driver does not tell which process holds how much"
    if any(process.vram_mib is None for process in sample.processes):
        return Enforcement.NONE, "the driver does not tell how much some process holds"
    if settings.vram_over == "warn":
        return Enforcement.WATCHED, "who holds more is told, and goes on"
    return Enforcement.WATCHED, f"who holds more is told, and ended {format_duration(settings.vram_over_grace_s)} later"
